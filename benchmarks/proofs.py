"""Compares predicted gains with proved ones, and judges the printed ranges, on the cases of `tests/diagnosis/gallery` and an emulated GPU.

    python benchmarks/proofs.py [CASE…] [--held-out] [--proofs 3] [--record FILE.jsonl] [--again]
    python benchmarks/proofs.py --record FILE.jsonl --show | --export PAIRS.jsonl

Each case is diagnosed and its first remedies are proved in a process of its own. A line of the record has the evidence, so that changed
formulas can be judged without another run, and the proofs. Cases that are in the record are not run again. About a minute per case: 50
minutes for all, 11 for the held-out ones.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workbench.core import units
from workbench.core.display.table import Table
from workbench.diagnosis.analysis import remedy as remedy_module
from workbench.diagnosis.analysis.costs import is_crowded
from workbench.diagnosis.analysis.evidence import Evidence
from workbench.diagnosis.analysis.loader_remedies import in_workers
from workbench.diagnosis.analysis.model_errors import MODEL_ERRORS, kind_of, widened
from workbench.diagnosis.analysis.remedies import remedies_for
from workbench.diagnosis.analysis.remedy import Remedy
from workbench.diagnosis.analysis.step_model import StepModel
from workbench.diagnosis.analysis.verdict import judge
from workbench.runs.spec import RunSpec

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
    """Prediction and proof, one by one, without the evidence: as it was printed, and with the formulas of now."""
    for line in lines_of(record):
        if line.get("proofs"):
            again = predictions(line)
            for proof in line["proofs"]:
                old = proof["remedy"]
                new = again(old["name"], old["change"])
                if new is not None:
                    yield {
                        "case": line["case"],
                        "remedy": old["name"],
                        "crowded": is_crowded(Evidence.from_json(line["evidence"])),
                        **{name: round(getattr(new, name), 4) for name in ("low", "speedup", "high")},
                        "proved": round(proof["measured"][1], 4),
                        "printed": [round(old[name], 4) for name in ("low", "speedup", "high")],
                    }


def predictions(line: dict[str, Any]) -> Callable[[str, dict[str, Any]], Remedy | None]:
    """Name and change → what the formulas of now predict from the evidence of a line; the range covers the noise of measurements only."""
    evidence = Evidence.from_json(line["evidence"])
    judgement = judge(evidence)
    spec = RunSpec(task="clipart-mlp")  # any: its knobs can be changed
    offered = {remedy.name: remedy for remedy in remedies_for(evidence, judgement, spec=spec, noise_only=True)}
    case = remedy_module.Case(evidence=evidence, judgement=judgement, model=StepModel.of(evidence), spec=spec)

    def predict(name: str, change: dict[str, Any]) -> Remedy | None:
        if name not in offered and "num_workers" in change:
            return in_workers(case, change["num_workers"])
        return offered.get(name)

    return predict


def show(record: Path) -> None:
    """A table of all pairs, and how many proofs lie in their range: as it was printed, and with the formulas and ranges of now."""
    pairs = list(pairs_of(record))
    rows, sizes = [], []
    held = {"printed": 0, "now": 0}
    for pair in pairs:
        ends = widened(pair["low"], pair["speedup"], pair["high"], MODEL_ERRORS[pair["crowded"]][kind_of(pair["remedy"])])
        low, mid, high = pair["printed"]
        inside = [low <= pair["proved"] <= high, ends[0] <= pair["proved"] <= ends[1]]
        held = {name: held[name] + one for name, one in zip(held, inside, strict=True)}
        errors = [mid / pair["proved"] - 1, pair["speedup"] / pair["proved"] - 1]
        sizes.append([abs(error) for error in errors])
        spans = [_span(low, mid, high), _span(ends[0], pair["speedup"], ends[1])]
        cells = [f"{span}, {100 * error:+.0f} % {'✓' if one else '✗'}" for span, error, one in zip(spans, errors, inside, strict=True)]
        rows.append([pair["case"], pair["remedy"], units.times(pair["proved"]), *cells])
    notes = [
        f"{name}: {held[name]} of {len(pairs)} in their range, median error {units.percent(statistics.median(column))}, "
        f"worst {units.percent(max(column))}"
        for name, column in zip(held, zip(*sizes, strict=True), strict=False)
    ]
    columns = ("case", "remedy", "proved", "as printed", "with the formulas of now")
    print(Table(columns=columns, rows=rows, title="Proofs", note="; ".join(notes)))


def _span(low: float, mid: float, high: float) -> str:
    return f"{units.times(mid)} ({units.times(low)} … {units.times(high)})"


def main() -> None:
    """Run the cases that the record lacks, or show the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names; none = all that formulas were fitted to")
    parser.add_argument("--held-out", action="store_true", help="the cases that nothing was fitted to")
    parser.add_argument("--record", type=Path, help="file with a line per case; none = a temporary one")
    parser.add_argument("--again", action="store_true", help="also those that are in the record")
    parser.add_argument("--proofs", type=int, default=3, help="of each case, at most")
    parser.add_argument("--budget", type=float, default=20, help="seconds of a diagnosis")
    parser.add_argument("--proof-budget", type=float, default=10, help="seconds of a proof")
    parser.add_argument("--show", action="store_true", help="only show the record")
    parser.add_argument("--export", type=Path, help="only write the pairs of the record, without its evidence")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given.record = given.record or Path(folder, "proofs.jsonl")
        work(given)


def work(given: argparse.Namespace) -> None:
    """Do what was asked for."""
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
