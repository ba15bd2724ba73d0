"""Execute every notebook and compare what it shows (strict nbval): `make notebooks`.

Two at a time, but for those whose claims are about time above all. One that fails is executed once more, whole and alone, since others
compute on the machine, too. The output names it; one that fails twice fails, and so does a process that is left behind, whatever the second
time says.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import LEFT

ROOT = Path(__file__).parents[1]
NBVAL = ["--nbval", "--nbval-cell-timeout", "300", "--nbval-sanitize-with", "tests/nbval.cfg"]
TWO_AT_A_TIME = ["-n", "2", "--dist", "loadfile"]
ALONE = ("02_", "03_")
"""How the names of those begin that judge times by experiment."""
LAST_FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"
NOTHING_CHOSEN = 5
"""pytest's exit status where the arguments choose nothing of these."""


def execute(paths: list[str], arguments: list[str]) -> tuple[int, list[str]]:
    """Execute notebooks; returns pytest's exit status, and those that failed: none where once more would not mend it."""
    command = [sys.executable, "-m", "pytest", *NBVAL, "--cache-clear", *paths, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as pytest:
        assert pytest.stdout is not None
        left = False
        for line in pytest.stdout:
            print(line, end="", flush=True)
            left |= line.startswith(LEFT)
    if pytest.returncode == NOTHING_CHOSEN and arguments:
        return 0, []
    if pytest.returncode != 1 or left or not LAST_FAILED.exists():
        return pytest.returncode, []
    return 1, sorted({cell.partition("::")[0] for cell in json.loads(LAST_FAILED.read_text())})


def main(arguments: list[str]) -> int:
    """Execute all, and those that fail once more; returns the exit status."""
    every = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    alone = [path for path in every if Path(path).name.startswith(ALONE)]
    again: list[str] = []
    for paths, how in ([path for path in every if path not in alone], TWO_AT_A_TIME), (alone, []):
        status, failed = execute(paths, [*how, *arguments])
        if status and not failed:
            return status
        again += failed
    if not again:
        return 0
    print(f"once more, alone: {', '.join(again)}", flush=True)
    return execute(again, arguments)[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
