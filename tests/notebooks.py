"""Execute every notebook and compare what it shows (strict nbval): `make notebooks`.

Two at a time; one that fails is executed once more, whole and alone: its claims are about time, and others compute on the machine. The
output names it; one that fails twice fails.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NBVAL = ["--nbval", "--nbval-cell-timeout", "300", "--nbval-sanitize-with", "tests/nbval.cfg"]
TWO_AT_A_TIME = ["-n", "2", "--dist", "loadfile"]
LAST_FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"


def execute(paths: list[str], arguments: list[str]) -> int:
    """Execute notebooks; returns pytest's exit status."""
    return subprocess.run([sys.executable, "-m", "pytest", *NBVAL, "--cache-clear", *paths, *arguments], cwd=ROOT, check=False).returncode


def main(arguments: list[str]) -> int:
    """Execute all, and those that fail once more; returns the last exit status."""
    status = execute(["notebooks"], [*TWO_AT_A_TIME, *arguments])
    if status != 1:  # all is well, or nothing could be executed
        return status
    failed = sorted({cell.partition("::")[0] for cell in json.loads(LAST_FAILED.read_text())})
    print(f"once more, alone: {', '.join(failed)}", flush=True)
    return execute(failed, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
