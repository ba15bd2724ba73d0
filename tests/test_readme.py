"""The README's example runs, and prints what the README shows, numbers aside."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGET = 5
"""Seconds for the diagnosis and for the proof; the README leaves a minute for each."""


def shape(text: str) -> list[list[str]]:
    """Words of each line without numbers and units. What follows the measured row says how the proof went, which depends on the machine."""
    lines = text.strip().splitlines()
    measured = next(i for i, line in enumerate(lines) if line.startswith("measured"))
    return [re.findall(r"[a-z_0-9]*[a-z_]{3,}", line) for line in lines[: measured + 1]]


def test_the_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    code, shown = (re.search(rf"```{kind}\n(.*?)```", readme, re.S) for kind in ("python", "text"))
    assert code
    assert shown
    quick = code[1].replace("step, loader)", f"step, loader, budget_s={BUDGET})").replace(".prove()", f".prove(budget_s={BUDGET})")
    assert quick.count("budget_s=") == 2
    script = tmp_path / "example.py"
    script.write_text(quick)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert shape(done.stdout) == shape(shown[1])
    assert re.search(r"measured +[1-9]\.\d", shown[1]), "the remedy that the README shows helped"
