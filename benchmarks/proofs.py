"""Compares predicted gains with proved ones, and judges the printed ranges, on the cases of `tests/diagnosis/gallery` and an emulated GPU.

    python benchmarks/proofs.py RECORD.jsonl [CASE…] [--held-out] [--proofs 3] [--again]
    python benchmarks/proofs.py RECORD.jsonl --show | --export PAIRS.json

Each case is diagnosed and its first remedies are proved in a process of its own. A line of the record has the evidence, so that changed
formulas can be judged without another run, and the proofs. Cases that are in the record are not run again. About a minute per case.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.core import units
from workbench.core.display.table import Table

GALLERY = Path(__file__).parents[1] / "tests" / "diagnosis" / "gallery"
sys.path.insert(0, str(GALLERY))
from cases import CASES  # noqa: E402
from emulated import EMULATED, HELD_OUT_EMULATED  # noqa: E402
from held_out import HELD_OUT  # noqa: E402
from held_out_proofs import HELD_OUT_PROOFS  # noqa: E402

FITTED = CASES | HELD_OUT | EMULATED
"""Cases that formulas and ranges were fitted to."""
UNSEEN = HELD_OUT_PROOFS | HELD_OUT_EMULATED
LIMIT = 300
"""Seconds that a case may take."""


def run(case: str, budget: float, proof_budget: float, proofs: int) -> dict[str, Any]:
    """A line of the record, from a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "answer.json")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6", "WORKBENCH_CACHE": folder}
        command = [sys.executable, str(GALLERY / "judge.py"), case, "ours", str(out), "--budget", str(budget)]
        command += ["--prove", str(proofs), "--proof-budget", str(proof_budget)]
        try:
            done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return {"case": case, "error": f"no answer within {LIMIT} s"}
        if not out.exists():
            return {"case": case, "error": (done.stdout + done.stderr)[-2000:]}
        answer = json.loads(out.read_text())
    return {
        "case": case,
        "held_out": case in UNSEEN,
        "ranks": (FITTED | UNSEEN)[case].ranks,
        "time": time.time(),
        **{name: answer[name] for name in ("verdict", "cause", "seconds")},
        "evidence": answer["diagnosis"]["evidence"],
        "proofs": [{name: proof[name] for name in ("remedy", "measured", "notes")} for proof in answer["proofs"]],
    }


def lines_of(record: Path) -> Iterator[dict[str, Any]]:
    """The lines of a record."""
    if record.exists():
        yield from map(json.loads, record.read_text().splitlines())


def pairs_of(record: Path) -> Iterator[dict[str, Any]]:
    """Prediction and proof, one by one, without the evidence."""
    for line in lines_of(record):
        for proof in line.get("proofs", ()):
            remedy = proof["remedy"]
            yield {
                "case": line["case"],
                "held_out": line["held_out"],
                "remedy": remedy["name"],
                **{name: remedy[name] for name in ("speedup", "low", "high")},
                "proved": proof["measured"],
            }


def show(record: Path) -> None:
    """A table of all pairs, and how many proofs lie in their range."""
    pairs = list(pairs_of(record))
    rows, inside, errors = [], 0, []
    for pair in pairs:
        held = pair["low"] <= pair["proved"][1] <= pair["high"]
        inside += held
        errors.append(pair["speedup"] / pair["proved"][1] - 1)
        span = f"{units.times(pair['speedup'])} ({units.times(pair['low'])} … {units.times(pair['high'])})"
        rows.append(
            [pair["case"], pair["remedy"], span, units.times(pair["proved"][1]), f"{100 * errors[-1]:+.1f} %", "✓" if held else "✗"]
        )
    size = sorted(map(abs, errors)) or [math.nan]
    note = (
        f"{inside} of {len(pairs)} in their range; median error {units.percent(statistics.median(size))}, worst {units.percent(size[-1])}"
    )
    print(Table(columns=("case", "remedy", "predicted (range)", "proved", "error", "in range"), rows=rows, title="Proofs", note=note))


def main() -> None:
    """Run the cases that the record lacks, or show the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names; none = all that formulas were fitted to")
    parser.add_argument("--held-out", action="store_true", help="the cases that nothing was fitted to")
    parser.add_argument("--again", action="store_true", help="also those that are in the record")
    parser.add_argument("--proofs", type=int, default=3, help="of each case, at most")
    parser.add_argument("--budget", type=float, default=20, help="seconds of a diagnosis")
    parser.add_argument("--proof-budget", type=float, default=10, help="seconds of a proof")
    parser.add_argument("--show", action="store_true", help="only show the record")
    parser.add_argument("--export", type=Path, help="only write the pairs of the record, without its evidence")
    given = parser.parse_args()
    if given.export:
        given.export.write_text("".join(json.dumps(pair) + "\n" for pair in pairs_of(given.record)))
    elif not given.show:
        there = set() if given.again else {line["case"] for line in lines_of(given.record)}
        for name in given.cases or (UNSEEN if given.held_out else FITTED):
            if name in there or (FITTED | UNSEEN)[name].gpu:
                continue
            line = run(name, given.budget, given.proof_budget, given.proofs)
            with given.record.open("a") as file:
                file.write(json.dumps(line) + "\n")
            told = line.get("error", f"{line.get('verdict')} ({line.get('cause')})")
            print(f"{name:28} {told}", file=sys.stderr, flush=True)
    if not given.export:
        show(given.record)


if __name__ == "__main__":
    main()
