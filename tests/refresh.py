"""Execute the notebooks from a fresh kernel, in their own folder, and store their outputs: `make refresh`. Read the diff afterwards.

With the outputs it stores a digest of the code that they are of (`tests/shown_code.py`), so that a test can tell when they are older.
`--stamp` stores the digest alone, without executing anything: for a change of the code that changes nothing of what is shown.
Outputs that would answer what a reader is asked to guess are stored folded; JupyterLab unfolds them when their cell is run.
"""

import ast
import os
import sys
from pathlib import Path
from typing import Any

from tests import shown_code

FOLDER = Path(__file__).parents[1] / "notebooks"


def refresh(path: Path) -> None:
    """Execute one notebook and write it back; volatile metadata is dropped so that the diff shows what a reader sees."""
    import nbformat  # here: doctests import this module, and these take seconds
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, store_widget_state=False, resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)  # its model lives in a kernel that is gone
    notebook.metadata.pop("widgets", None)
    notebook.metadata.get("language_info", {}).pop("version", None)  # else every Python makes another diff
    fold_answers(notebook)
    notebook.metadata[shown_code.KEY] = shown_code.code_of(notebook)
    nbformat.write(notebook, path)
    print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} code cells")


def fold_answers(notebook: Any) -> None:
    """Fold the outputs from each cell with `guess = None` (or `guess_energy`, …) to the first one after it that compares that guess."""
    guesses: set[str] = set()
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse("\n".join(line for line in cell.source.splitlines() if not line.startswith("%")))
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id.startswith("guess")]
        guesses |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        guesses -= {node.id for node in names if isinstance(node.ctx, ast.Load)}
        if guesses and cell.outputs:
            cell.metadata["jupyter"] = {"outputs_hidden": True}
        else:
            cell.metadata.pop("jupyter", None)


def stamp(path: Path) -> None:
    """Store the digest of the code as it is now: what is shown is as if it were new."""
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    fold_answers(notebook)
    notebook.metadata[shown_code.KEY] = shown_code.code_of(notebook)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "CI": "true",
    }  # as `make notebooks` does: what they store is of a CPU, without progress lines
    act = stamp if "--stamp" in sys.argv else refresh
    for found in [Path(name) for name in sys.argv[1:] if name != "--stamp"] or sorted(FOLDER.glob("*.ipynb")):
        act(found)
