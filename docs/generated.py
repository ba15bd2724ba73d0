"""Makes the parts of the documentation that follow from the code: API, command line, knobs, verdicts, pictures."""

import ast
import contextlib
import inspect
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import notebook_pages
import workbench
from workbench import __main__ as command_line
from workbench import data, plot, widgets
from workbench.diagnosis.analysis import verdict
from workbench.runs import spec
from workbench.runs.commands import knob_meanings

ROOT = Path(__file__).parents[1]
SUBJECTS = {
    "runs": "Runs",
    "timeline": "Timelines",
    "diagnosis": "Diagnosis",
    "memory": "Memory",
    "batch": "Batch size and learning rate",
    "scaling": "Scaling",
    "cluster": "Clusters and communication",
    "traces": "Traces",
    "data": "Data",
    "core": "Devices",
}
"""Package → heading, in the order of the page."""


def api() -> str:
    """All public names, by subject, for mkdocstrings to fill in."""
    homes = {name: module for name, module in workbench._HOMES.items() if name not in ("data", "plot", "widgets")} | data._HOMES
    lines = []
    for package, heading in SUBJECTS.items():
        names = sorted((name for name, home in homes.items() if home.split(".")[1] == package), key=lambda name: (name[0].isupper(), name))
        lines += [f"## {heading}", "", *(_directive(f"{homes[name]}.{name}") for name in names)]
    return "\n".join(lines)


def pictures() -> str:
    """All functions of `wb.plot`, for mkdocstrings."""
    return "\n".join(_directive(f"{inspect.unwrap(getattr(plot, name)).__module__}.{name}") for name in plot.__all__)


def panels() -> str:
    """All panels of `wb.widgets`, for mkdocstrings."""
    return "\n".join(_directive(f"{getattr(widgets, name).__module__}.{name}", members=False) for name in widgets.__all__)


def _directive(path: str, *, members: bool = True) -> str:
    return f"::: {path}\n" + ("" if members else "    options:\n      members: false\n")


def commands() -> list[str]:
    """The commands of the command line."""
    listed = re.search(r"\{([\w,-]+)\}", _help())
    assert listed, "the command line has no subcommands"
    return listed[1].split(",")


def cli() -> str:
    """What each command says of itself. `lab` hands its options on to JupyterLab."""
    parts = [f"```text\n{_help()}```"]
    parts += [f"## workbench {name}\n\n```text\n{_help(name)}```" for name in commands() if name != "lab"]
    return "\n\n".join(parts)


def _help(*words: str) -> str:
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        command_line.main([*words, "--help"])
    return printed.getvalue()


def knobs() -> str:
    """Every field of RunSpec: default, values, meaning."""
    docs = {name: meaning.replace("|", "\\|") for name, meaning in knob_meanings().items()}
    rows = []
    for name, knob in spec.KNOBS.items():
        default = "required" if name == "task" else f"`{knob.default!r}`"
        rows.append(f"| `{name}` | {default} | {docs[name]} |")
    return "\n".join(["| knob | default | meaning |", "|---|---|---|", *rows])


def verdicts() -> str:
    """The verdicts. The page has this table and that of `limits` in its source, where a test compares them."""
    rows = [f"| {name} | {what} |" for name, what in verdict.VERDICTS.items()]
    return "\n".join(["| verdict | what limits the step |", "|---|---|", *rows])


def limits() -> str:
    """From which saving on a part is blamed, and why."""
    limits = {**verdict.LIMITS, "every other part": verdict.USUAL}
    rows = [f"| {part} | {100 * limit.least:.0f} % | {100 * limit.least_low:.0f} % | {limit.reason} |" for part, limit in limits.items()]
    return "\n".join(["| part | saving | lower end of its interval | reason |", "|---|---|---|---|", *rows])


def causes() -> set[str]:
    """Every cause that a diagnosis can name, as the code spells it."""
    folder = ROOT / "workbench/diagnosis/analysis"
    trees = [ast.parse((folder / name).read_text()) for name in ("causes.py", "verdict.py", "stalls.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Cause"]
    values = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "cause"]
    return {value.value for value in values if isinstance(value, ast.Constant) and value.value}


def notebooks() -> str:
    """The pictures of all notebooks, each with the code that drew it."""
    parts = []
    for path in notebook_pages.paths():
        drawn = list(notebook_pages.pictures(path))
        if drawn:
            parts.append(f"## [{notebook_pages.title(path)}](../../notebooks/{path.name})")
        for picture in drawn:
            parts.append(f"```python\n{picture.code}\n```\n\n![The picture that this code draws](notebooks/{picture.name})")
    return "\n\n".join(parts)


def all_pictures() -> str:
    """Every function of `wb.plot`, with what it says of itself and a picture."""
    parts = [f"### `{name}`\n\n{_summary(name)}\n\n![What wb.plot.{name} draws](drawn/{name}.png)" for name in plot.__all__]
    return "\n\n".join(parts)


def _summary(name: str) -> str:
    """The first paragraph of a function's docstring."""
    return " ".join((inspect.getdoc(getattr(plot, name)) or "").partition("\n\n")[0].split())


def draw_pictures(folder: Path) -> None:
    """Draw every picture of `wb.plot` into a folder, `NAME.png`; the results are made by hand, in `tests/drawn.py`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sys.path.insert(0, str(ROOT))
    from tests.drawn import draw

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as results:
        for name in plot.__all__:
            draw(name, Path(results)).figure.savefig(folder / f"{name}.png", dpi=130)
            pyplot.close("all")


INSERTS: dict[str, Callable[[], str]] = {
    "api": api,
    "pictures": pictures,
    "panels": panels,
    "cli": cli,
    "knobs": knobs,
    "notebook-pictures": notebooks,
    "all-pictures": all_pictures,
}
"""Name in `<!-- insert: NAME -->` → what makes the text."""
