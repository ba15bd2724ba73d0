"""Write the notebooks without their outputs into build/student, since an output may be the answer to a question: `make student`.

Helpers and pictures go with them, so the folder can be given to a class. With --no-solutions the folded solutions are taken out, too.
"""

import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
SOLUTION = re.compile(r"\n*<details>\s*<summary>Solution</summary>.*?</details>", re.DOTALL)


def write(into: Path, solutions: bool = True) -> None:
    """Write the edition for students into a folder; what an earlier edition left there is replaced."""
    into.mkdir(parents=True, exist_ok=True)
    for old in into.glob("*.ipynb"):
        old.unlink()
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell.update(execution_count=None, outputs=[])
                cell["metadata"].pop("jupyter", None)  # says that its output is folded
            elif not solutions:
                cell["source"] = SOLUTION.sub("", "".join(cell["source"]))
        (into / path.name).write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    for name in ("scripts", "pictures"):
        shutil.rmtree(into / name, ignore_errors=True)
        shutil.copytree(FOLDER / name, into / name, ignore=shutil.ignore_patterns("__pycache__", "runs", ".*"))


if __name__ == "__main__":
    target = ROOT / "build/student"
    write(target, solutions="--no-solutions" not in sys.argv[1:])
    print(f"{len(list(target.glob('*.ipynb')))} notebooks in {target}")
