"""Verdicts and predicted gains on an emulated GPU, against the time from sync to sync with and without what was planted.

    python benchmarks/emulated_gallery.py [CASE…] [--runs 3] [--budget 10] [--proofs 2] [--beside 1] [--results FOLDER]

Each case runs in a process of its own, in real time but for what others on the machine take (`tests/undisturbed_clock.py`, Linux only); so
several may run beside each other. About 20 seconds per case and run, and as many per proof.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.diagnosis.emulated_judge import LIMIT, ROOT, Answer
from tests.diagnosis.emulated_loops import CASES
from workbench.core import units
from workbench.core.display.table import Table


def answer_of(name: str, run: int, given: argparse.Namespace, results: Path) -> Answer | str:
    """What the library says of a case in one run, or why there is no answer."""
    path = results / f"{name.replace(' ', '_')}.{run}.json"
    if not path.exists():
        options = ["--budget", str(given.budget), "--proofs", str(given.proofs), "--clean"]
        command = [sys.executable, "-m", "tests.diagnosis.emulated_judge", name, str(path), *options]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6", "PYTHONPATH": str(ROOT), "WORKBENCH_CACHE": str(results)}
        limit = LIMIT * (1 + given.proofs)
        try:
            done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return "no answer in time"
        if not path.exists():
            return done.stderr[-2000:]
    answer = Answer.read(path)
    print(f"{name:40} {answer.verdict} ({answer.cause}){'' if answer.right and answer.timed else '   <<<'}", file=sys.stderr, flush=True)
    return answer


def verdicts(answers: dict[str, list[Answer | str]]) -> Table:
    """A row per case."""
    rows, right, timed, total = [], 0, 0, 0
    for name, some in answers.items():
        known = [answer for answer in some if isinstance(answer, Answer)]
        good, on_time = sum(answer.right for answer in known), sum(answer.timed for answer in known)
        right, timed, total = right + good, timed + on_time, total + len(some)
        if not known:
            rows.append([name, "failed", "", "", "", ""])
            continue
        step = statistics.median(statistics.fmean(answer.true) for answer in known)
        clean = [answer.clean for answer in known if answer.clean is not None]
        saved = units.percent(1 - statistics.median(clean) / step) if clean else "–"
        said = statistics.mode(f"{answer.verdict} ({answer.cause})" for answer in known)
        worst = max((answer.error for answer in known), key=abs)
        mark = "✓" if good == len(some) == on_time else "✗"
        rows.append([name, units.seconds(step), saved, f"{mark} {good}/{len(some)} {said}", f"{100 * worst:+.1f} %", took(known)])
    rows.append(["right, and step within 5 %", "", "", f"{right} and {timed} of {total}", "", ""])
    columns = ("loop", "step", "planted", "verdict (cause)", "worst error of the step", "seconds to the verdict")
    return Table(columns=columns, rows=rows, title="Verdicts on an emulated GPU")


def took(answers: Sequence[Answer]) -> str:
    """Median seconds of the diagnoses."""
    return f"{statistics.median(answer.took for answer in answers):.1f}"


def proofs(answers: dict[str, list[Answer | str]]) -> Table:
    """A row per remedy that was proved."""
    rows, errors, inside, by_wall = [], [], [], []
    for name, some in answers.items():
        for change in (change for answer in some if isinstance(answer, Answer) for change in answer.changes):
            low, mid, high = change.predicted
            by_wall.append(change.proved / change.wall - 1)
            printed = f"up to {units.times(high)}" if change.ceiling else f"{units.times(mid)} ({units.times(low)} … {units.times(high)})"
            error = "" if change.ceiling else f"{100 * change.error:+.0f} %"
            if not change.ceiling:
                errors.append(abs(change.error))
                inside.append(change.inside)
            rows.append([name, change.remedy, printed, units.times(change.proved), units.times(change.wall), error])
    note = ""
    if errors:
        note = (
            f"{len(errors)} predictions: median error {units.percent(statistics.median(errors))}, worst {units.percent(max(errors))}, "
            f"{sum(inside)} inside the printed range; proofs differ from the wall clock by {units.percent(max(map(abs, by_wall)))} at most"
        )
    columns = ("loop", "remedy", "predicted", "proved", "by the wall clock", "error of the prediction")
    return Table(columns=columns, rows=rows, title="Predicted and proved on an emulated GPU", note=note)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names; none = all")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for each diagnosis, and for each proof")
    parser.add_argument("--proofs", type=int, default=2, help="remedies to prove per case")
    parser.add_argument("--beside", type=int, default=1, help="cases that run at the same time")
    parser.add_argument("--results", type=Path, help="folder for the answers; what it has is not run again")
    given = parser.parse_args()
    names = given.cases or list(CASES)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(given.beside) as pool:
        results = (given.results or Path(temporary)).resolve()
        results.mkdir(parents=True, exist_ok=True)
        jobs = [(name, pool.submit(answer_of, name, run, given, results)) for run in range(given.runs) for name in names]
        answers: dict[str, list[Answer | str]] = {name: [] for name in names}
        for name, job in jobs:
            answers[name].append(job.result())
    print(verdicts(answers))
    print()
    print(proofs(answers))
    for name, some in answers.items():
        for error in (answer for answer in some if isinstance(answer, str)):
            print(f"\n{name} failed: {error}")


if __name__ == "__main__":
    main()
