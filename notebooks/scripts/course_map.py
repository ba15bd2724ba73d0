"""Draws the map of the course: which question leads to which notebook. Titles and times are read from the notebooks themselves."""

import json
import re
import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from workbench.core.display.axes import WIDTH, ink, prepared
from workbench.core.display.colors import LINE, PHASES, SERIES

FOLDER = Path(__file__).parents[1]
ROADS = {
    "Is it slow?": ("01", "02", "03", "08", "12", "18", "13"),
    "Does it fit?": ("04", "15"),
    "Which size?": ("05", "06", "07"),
    "Does it scale?": ("16", "09", "10", "11"),
    "Can I trust it?": ("14", "17"),
}
"""A question → the notebooks that answer it, in the order in which to read them."""
COLORS = dict(zip(ROADS, (LINE, PHASES["optimizer"], PHASES["data_wait"], PHASES["backward"], SERIES[1]), strict=True))
LETTERS = 92
"""Of a line in the boxes of all columns together."""


def head(path: Path) -> tuple[str, str]:
    """A notebook's question, and its difficulty and learning time."""
    text = "".join(json.loads(path.read_text())["cells"][0]["source"])
    times = re.search(r"\*\*Difficulty\*\* (\S+) · \*\*Learning\*\* (\d+ min)", text)
    return text.splitlines()[0].lstrip("# "), " · ".join(times.groups()) if times else ""


def draw(ax: Axes | None = None) -> Axes:
    """Draw a column per question, with its notebooks from top to bottom."""
    ax = prepared(ax, WIDTH, 0.4 + 1.05 * max(map(len, ROADS.values())))
    ax.axis("off")
    letters, heading = LETTERS // len(ROADS), 48 / max(4, len(ROADS))
    for column, (question, numbers) in enumerate(ROADS.items()):
        ax.text(column, 0.62, question, ha="center", va="bottom", color=ink(ax), fontsize=heading, fontweight="bold")
        paths = [path for number in numbers for path in FOLDER.glob(f"{number}_*.ipynb")]
        for row, path in enumerate(paths):
            title, times = head(path)
            ax.add_patch(
                FancyBboxPatch(
                    (column - 0.4, -row - 0.33),
                    0.8,
                    0.66,
                    boxstyle="round,pad=0.05",
                    edgecolor=COLORS[question],
                    facecolor="none",
                    linewidth=1.4,
                )
            )
            text = "\n".join([path.name[:2], *textwrap.wrap(title.partition(":")[0], letters), times])
            ax.text(column, -row, text, ha="center", va="center", color=ink(ax), fontsize=8 if len(ROADS) < 5 else 7.2, linespacing=1.25)
    ax.set_xlim(-0.55, len(ROADS) - 0.45)
    ax.set_ylim(-max(map(len, ROADS.values())) + 0.45, 0.85)
    return ax
