"""The README's example runs, and prints what the README shows, numbers aside."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def shape(text: str) -> list[list[str]]:
    """Words of each line without numbers, units and the words that a noisy machine adds."""
    text = text.partition("measured on")[0]
    return [re.findall(r"[a-z_0-9]*[a-z_]{3,}", line) for line in text.strip().splitlines()]


def test_the_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    code, shown = (re.search(rf"```{kind}\n(.*?)```", readme, re.S) for kind in ("python", "text"))
    assert code
    assert shown
    script = tmp_path / "example.py"
    script.write_text(code[1].replace("notebooks/", f"{ROOT}/notebooks/"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert shape(done.stdout) == shape(shown[1])
    assert "measured on rank 0" in done.stdout
    assert "measured on rank 0" in shown[1]
