"""Runs the example of the README, writes what it prints below it, and draws its picture: python docs/readme.py."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PICTURE = ROOT / "docs/pages/pictures/diagnosis.png"
BLOCK = r"(?<=```{kind}\n)(.*?)(?=```)"


def main() -> None:
    """Renew the first block of text of the README, and the picture."""
    readme = README.read_text()
    code = re.search(BLOCK.format(kind="python"), readme, re.DOTALL)
    assert code
    names: dict[str, Any] = {"__name__": "__main__"}
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(code[0], "train.py", "exec"), names)
    print(names["diagnosis"], printed.getvalue(), sep="\n\n")
    README.write_text(re.sub(BLOCK.format(kind="text"), lambda _: printed.getvalue(), readme, count=1, flags=re.DOTALL))
    PICTURE.parent.mkdir(exist_ok=True)
    names["diagnosis"].plot().figure.savefig(PICTURE, dpi=200, metadata={"Software": None})


if __name__ == "__main__":
    main()
