"""Makes requirements.lock anew from pyproject.toml and constraints.txt, with uv: `make lock`.

The lock has every package that `make setup` installs, for all platforms, with the checksums of its files. torch and what it needs for GPUs
are left out: which build of torch fits a machine, a lock file cannot know.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("notebooks", "tensorboard", "exporters", "trace", "formats", "docs", "dev")
"""As `make setup` has them; a test compares them."""
LEFT_OUT = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
HEAD = """\
# Every package that `make setup` installs, with the checksums of its files. `make lock` makes this file, from pyproject.toml and
# constraints.txt. torch and what it needs for GPUs are left out: which build of torch fits a machine, a lock file cannot know.
"""


def without_torch(text: str) -> str:
    """The lock without the packages that are left out: each begins a line, and its checksums follow with spaces before them."""
    blocks = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    return "".join(block for block in blocks if not LEFT_OUT.match(block))


def main() -> None:
    """Resolve, and write the file."""
    words = [f"--extra={extra}" for extra in EXTRAS]
    words += ["--constraints=constraints.txt", "--generate-hashes", "--universal", "--python-version=3.11", "--upgrade", "--quiet"]
    words += ["--no-header", "--no-annotate", "--no-emit-index-url"]
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", *words, "pyproject.toml"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    (ROOT / "requirements.lock").write_text(HEAD + without_torch(done.stdout), encoding="utf-8")


if __name__ == "__main__":
    main()
