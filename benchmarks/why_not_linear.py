"""`wb.why_not_linear` on ranks that lose time for a planted reason, beside the rule "what no_sync saves is communication".

    python benchmarks/why_not_linear.py [CASE…] [--budget 30] [--results FOLDER]

Each case is one launch; about 40 seconds. Healthy cases have no cause, and none may be named.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import workbench as wb
from workbench.core import units
from workbench.core.display.table import Table
from workbench.diagnosis.analysis.gap import NAMED, REDUCTION
from workbench.diagnosis.analysis.gap_evidence import seconds_of

TASK = f"{Path(__file__).with_name('planted_ranks.py')}:task"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is planted, and what has to be named."""

    cause: str
    """ "" = healthy."""
    ranks: int
    what: dict[str, float]
    knobs: dict[str, Any] = field(default_factory=dict)
    same: str = "micro_batch"

    @property
    def right(self) -> tuple[str, ...]:
        """The answers that are right: the two parts of a reduction differ by what bare reductions cost on the machine."""
        return REDUCTION if self.cause == "reduction" else (self.cause,)


def cases() -> dict[str, Case]:
    """By name."""
    found: dict[str, Case] = {}
    for ranks in (2, 4):
        both = {
            "slow rank": Case(cause="slow rank", ranks=ranks, what={"slow": 0.015}),
            "slow storage of a rank": Case(cause="uneven data", ranks=ranks, what={"data": 0.012}),
            "longer samples of a rank": Case(cause="uneven data", ranks=ranks, what={"longer": 0.4}),
            "steps of uneven length": Case(cause="uneven steps", ranks=ranks, what={"uneven": 0.02, "computing": 0.01}),
            "large gradients": Case(cause="reduction", ranks=ranks, what={"numbers": 8e6}),
            "many small buckets": Case(
                cause="many reductions", ranks=ranks, what={"tensors": 120, "numbers": 120_000}, knobs={"bucket_cap_mb": 0.001}
            ),
            "a disk that is shared": Case(cause="loaders", ranks=ranks, what={"disk": 0.03, "computing": 0.004}),
            "memory that is shared": Case(cause="memory", ranks=ranks, what={"shared": 0.02, "computing": 0.002}),
            "short epochs": Case(
                cause="epochs", ranks=ranks, what={"samples": 8 * 6 * ranks}, knobs={"num_workers": 1}
            ),
            "smaller micro-batches": Case(cause="micro-batch", ranks=ranks, what={"fixed": 0.05}, same="global_batch"),
        }  # fmt: skip
        found |= {f"{name}, {ranks} ranks": case for name, case in both.items()}
    found["slightly slow rank, 2 ranks"] = Case(cause="slow rank", ranks=2, what={"slow": 0.006})
    found["CPU work on a rank, 2 ranks"] = Case(cause="slow rank", ranks=2, what={"burner": 0.012})
    found["four ranks on two cores"] = Case(cause="cores", ranks=4, what={"burn": 0.03, "computing": 0.005})
    # four ranks of gloo on two cores reduce these gradients in 6 to 9 ms, by the clock and without the library: a fifth of a step of 33 ms,
    # so that such a training is none without a cause. In steps of 0.2 s it is 4 %.
    for number, (ranks, what, knobs) in enumerate(
        [(2, {}, {}), (4, {"computing": 0.2}, {}), (2, {}, {"num_workers": 1}), (2, {}, {"accumulation": 2}),
         (4, {"computing": 0.1}, {"micro_batch": 16})]
    ):  # fmt: skip
        found[f"healthy {number + 1}, {ranks} ranks"] = Case(cause="", ranks=ranks, what=what, knobs=knobs)
    return found


def answer(name: str, case: Case, budget: float, results: Path) -> wb.WhyNotLinear:
    """What the library says; kept in a file."""
    path = results / f"{name.replace(' ', '_').replace(',', '')}.json"
    if path.exists():
        return wb.WhyNotLinear.from_json(json.loads(path.read_text()))
    os.environ.update(PLANTED=json.dumps(case.what), PLANTED_ID=str(os.getpid()), OMP_NUM_THREADS="1")
    knobs = {"micro_batch": 8, "nproc_per_node": case.ranks, "device": "cpu", **case.knobs}
    result = wb.why_not_linear(wb.RunSpec(task=TASK, **knobs), same=case.same, budget_s=budget, runs_dir=results / "runs")
    path.write_text(json.dumps(result.to_json()))
    return result


def by_hand(result: wb.WhyNotLinear) -> str:
    """What somebody concludes who trains once with and once without no_sync()."""
    seconds = seconds_of(result.evidence)
    return "reduction" if seconds.together - seconds.strangers >= NAMED * seconds.together else ""


def main() -> None:
    """Run the cases, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--budget", type=float, default=30.0)
    parser.add_argument("--results", type=Path, default=None)
    given = parser.parse_args()
    known = cases()
    if unknown := set(given.cases) - set(known):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    rows, right, hand, planted, residuals, healthy, clean = [], 0, 0, 0, [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        results = given.results or Path(folder)
        results.mkdir(parents=True, exist_ok=True)
        for name in given.cases or known:
            case = known[name]
            result = answer(name, case, given.budget, results)
            good = result.cause in case.right
            guess = by_hand(result)
            if case.cause:
                planted, right = planted + 1, right + good
                hand += guess == "reduction" and case.cause in ("reduction", *REDUCTION)
                residuals.append(result.residual)
            else:
                healthy, clean = healthy + 1, clean + good
            gap = result.gap
            rows.append(
                [name, f"{'✓' if good else '✗'} {result.cause or 'none'}", units.percent(gap.efficiency),
                 units.percent(gap.share(result.cause)) if result.cause else units.MISSING, units.percent(result.residual), guess or "none",
                 f"{result.evidence.foreign:.1f}"]
            )  # fmt: skip
            print("  ".join(map(str, rows[-1])), file=sys.stderr, flush=True)
    columns = ("planted", "named", "of linear", "of the step", "residual", "no_sync by hand", "foreign cores")
    residual = f"; residual {units.percent(statistics.median(residuals))} in the median" if residuals else ""
    note = f"right: {right} of {planted}, healthy not blamed: {clean} of {healthy}{residual}; by hand: {hand} of {planted}"
    print(Table(columns=columns, rows=rows, title="Why N ranks are slower than N times one", note=note))


if __name__ == "__main__":
    main()
