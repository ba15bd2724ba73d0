"""Turns the stored notebooks into pages: their text, code, and outputs as text and pictures. Nothing is executed."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


@dataclass(frozen=True)
class Picture:
    """A picture that a cell has drawn."""

    name: str
    """File beside the page."""
    code: str
    """The cell that drew it."""
    content: bytes


def paths() -> list[Path]:
    """All notebooks, in their order."""
    return sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return found


def title(path: Path) -> str:
    """The first heading of a notebook."""
    return "".join(cells(path)[0]["source"]).splitlines()[0].lstrip("# ")


def pictures(path: Path) -> Iterator[Picture]:
    """All pictures of a notebook."""
    for place, cell in enumerate(cells(path)):
        for image in (output["data"]["image/png"] for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})):
            name = f"{path.stem}-{place}.png"
            yield Picture(name=name, code="".join(cell["source"]), content=base64.b64decode("".join(image)))


def markdown(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by name."""
    drawn = {picture.name: picture.content for picture in pictures(path)}
    parts = [f"!!! note\n\n    This page shows `notebooks/{path.name}` as it is stored. `make lab` opens it, to run and to change."]
    for place, cell in enumerate(cells(path)):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = source.replace("<details>", '<details markdown="1">')  # else what is folded would not be read as Markdown
            parts.insert(0, source) if not place else parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        folded = cell["metadata"].get("jupyter", {}).get("outputs_hidden", False) and cell["outputs"]
        if folded:
            parts.append('<details markdown="1"><summary>Output</summary>')
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                parts.append(f"![Output of the cell above]({path.stem}-{place}.png)")
            elif text := _text(output):
                parts.append(f"```text\n{text}\n```")
        if folded:
            parts.append("</details>")
    return "\n\n".join(parts) + "\n", drawn


def _text(output: dict[str, Any]) -> str:
    """The text of an output; a panel has none, and is only shown where a kernel runs."""
    text = "".join(output.get("text", ()) or output.get("data", {}).get("text/plain", ())).rstrip()
    return "" if "application/vnd.jupyter.widget-view+json" in output.get("data", {}) else text
