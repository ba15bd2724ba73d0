"""Execute every notebook and compare what it shows (strict nbval): `make notebooks`.

Two at a time; one that fails is executed once more, whole and alone: its claims are about time, and others compute on the machine. The
output names it; one that fails twice fails, and so does a process that is left behind, whatever the second time says.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import LEFT

ROOT = Path(__file__).parents[1]
NBVAL = ["--nbval", "--nbval-cell-timeout", "300", "--nbval-sanitize-with", "tests/nbval.cfg"]
TWO_AT_A_TIME = ["-n", "2", "--dist", "loadfile"]
LAST_FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"


def execute(paths: list[str], arguments: list[str]) -> tuple[int, bool]:
    """Execute notebooks; returns pytest's exit status, and whether a process was left behind."""
    command = [sys.executable, "-m", "pytest", *NBVAL, "--cache-clear", *paths, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as pytest:
        assert pytest.stdout is not None
        left = False
        for line in pytest.stdout:
            print(line, end="", flush=True)
            left |= line.startswith(LEFT)
    return pytest.returncode, left


def main(arguments: list[str]) -> int:
    """Execute all, and those that fail once more; returns the last exit status."""
    status, left = execute(["notebooks"], [*TWO_AT_A_TIME, *arguments])
    if status != 1 or left or not LAST_FAILED.exists():  # all is well, nothing could be executed, or once more would not mend it
        return status
    failed = sorted({cell.partition("::")[0] for cell in json.loads(LAST_FAILED.read_text())})
    print(f"once more, alone: {', '.join(failed)}", flush=True)
    return execute(failed, arguments)[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
