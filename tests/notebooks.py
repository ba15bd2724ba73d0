"""Execute notebooks and compare what they show (strict nbval): `make notebooks`, two at a time.

Those that take longest: `make slow-notebooks`; of these, those whose claims are about time run alone. What is executed is a copy in
build/notebooks, with what a test has time for (`QUICK`), and in some (`FORKED`) with forks for the ranks that it launches. One that fails
is executed once more, whole and alone, since others compute on the machine, too. The output names it; one that fails twice fails, and so
does a process that is left behind, whatever the second time says.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import forked_kernel
from tests.conftest import LEFT
from tests.forked import Forks
from workbench.runs.launch.environment import steady_malloc

ROOT = Path(__file__).parents[1]
NBVAL = ["-p", "tests.conftest", "--nbval", "--nbval-cell-timeout", "300", "--nbval-sanitize-with", "tests/nbval.cfg"]
TWO_AT_A_TIME = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
SLOW = ("04_", "12_", "06_", "09_", "16_", "07_", "05_", "15_", "18_", "17_", "10_", "11_")
"""Prefixes of the slow notebooks, longest first."""
OTHERS = ("01_", "08_", "14_", "13_", "00_")
"""Prefixes of the other notebooks, longest first."""
ALONE = ("02_", "03_")
"""How the names of those begin that judge times by experiment: slow, too, and nothing may run beside them."""
FORKED = ("02_", "03_", "04_", "05_", "06_", "07_", "09_", "11_", "12_", "15_", "16_", "17_", "18_")
"""How the names of those begin whose launches have forks for ranks, with the memory of a process that is timed
(`workbench.runs.launch.environment.steady_malloc`): what they claim is not about how processes meet and end."""
QUICK = {
    "02_": {"budget_s=30": "budget_s=15", "budget_s=20": "budget_s=10"},
    "03_": {"budget_s=15": "budget_s=8", "budget_s=160": "budget_s=60"},
    "04_": {"micro_batch=36": "micro_batch=34"},  # there are fewer ways to divide it
    "07_": {"[480, 960, 1920, 3840]": "[240, 480, 960, 1920]", "steps=960": "steps=480", "7_680": "3_840"},  # the same ratios
    "06_": {'"seeds\\": 2': '"seeds\\": 1'},
    "09_": {"repeat=2": "repeat=1"},
    "12_": {"steps=15": "steps=45"},  # launches are quick here: so each takes long enough to outlast what else computes
    "11_": {"budget_s=20": "budget_s=12", "budget_s=15": "budget_s=8"},
}
"""How the name of a notebook begins → what a reader has time for → what a test has."""
COPIES = ROOT / "build/notebooks"
LAST_FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"
NOTHING_CHOSEN = 5
"""pytest's exit status where the arguments choose nothing of these."""


def copied(path: Path, folder: Path = COPIES) -> Path:
    """The copy of a notebook that is executed, beside the same helpers and pictures."""
    text = path.read_text()
    for slow, quick in QUICK.get(path.name[:3], {}).items():
        assert slow in text, f"{path.name} has no {slow}"
        text = text.replace(slow, quick)
    if path.name.startswith(FORKED):
        text = text.replace('"name": "python3"', f'"name": "{forked_kernel.NAME}"')
    (copy := folder / path.name).write_text(text)
    return copy


def execute(paths: list[str], arguments: list[str], forks: Forks | None) -> tuple[int, list[str]]:
    """Execute notebooks; returns pytest's exit status, and those that failed: none where once more would not mend it."""
    command = [sys.executable, "-m", "pytest", *NBVAL, "--cache-clear", *paths, *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CI": "true"}  # what they store is of a CPU, and has no progress lines
    if forks:
        environment |= {"JUPYTER_PATH": str(COPIES / "jupyter"), forked_kernel.ORDERS: str(forks.orders)}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as pytest:
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
    """Execute the quick notebooks, or with --slow the slow ones, and those that fail once more; returns the exit status."""
    slow = "--slow" in arguments
    arguments = [argument for argument in arguments if argument != "--slow"]
    shutil.rmtree(COPIES, ignore_errors=True)
    COPIES.mkdir(parents=True)
    for name in ("scripts", "pictures"):
        (COPIES / name).symlink_to(ROOT / "notebooks" / name)
    forked_kernel.install(COPIES / "jupyter")
    paths = [str(copied(path).relative_to(ROOT)) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    alone = [path for path in paths if Path(path).name.startswith(ALONE)]
    shared = [path for path in paths if path not in alone and Path(path).name.startswith(SLOW) == slow]
    longest = {name: place for place, name in enumerate(SLOW if slow else OTHERS)}
    shared.sort(key=lambda path: longest.get(Path(path).name[:3], len(longest)))
    forks = Forks(steady_malloc()) if slow else None
    try:
        results = [execute(shared, [*TWO_AT_A_TIME, *arguments], forks), *([execute(alone, arguments, forks)] if slow else [])]
        for status, failed in results:
            if status and not failed:
                return status
        again = [path for _, failed in results for path in failed]
        if not again:
            return 0
        print(f"once more, alone: {', '.join(again)}", flush=True)
        return execute(again, arguments, forks)[0]
    finally:
        if forks:
            forks.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
