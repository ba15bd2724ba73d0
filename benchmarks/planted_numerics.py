"""Plants divergences and bad steps, and checks that `wb.diverge` and `wb.replay` name them, and nothing where all is well.

python benchmarks/planted_numerics.py    about two minutes

The cases are those of `tests/diagnosis/test_divergence.py` and `test_step_replay.py`. Exit code: 0 all were named right, 1 some were not.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import workbench as wb
from tests.diagnosis import test_divergence as pairs
from tests.diagnosis import test_step_replay as steps
from workbench.core.display.table import Table
from workbench.train.ranks import Ranks

Row = tuple[str, str, str, bool]
"""Case, what is planted, what was named, and whether that is right."""
OPTIMIZER = "adamw(lr=0.01)", "adamw(lr=0.01, eps=1e-3)"
KNOBS = ({"accumulation": 2, "micro_batch": 4}, {"precision": "amp_bf16"}, {"optimizer": "fused"}, {"checkpointing": "full"})


def divergences() -> Iterator[Row]:
    """Ten, each in a module or in the optimizer."""
    for name, (change, phase, module, operator) in pairs.BUGS.items():
        found = wb.diverge(pairs.net(), pairs.net(change), batch=pairs.X)
        first = found.first
        where = f"{first.phase}, {first.module}, {first.operator}" if first else "nothing"
        right = first is not None and (first.phase, first.module.split(".")[0]) == (phase, module) and operator in first.operator
        yield name, f"{phase}, {module}, {operator}", f"{found.verdict}: {where}", right and found.verdict == "bug"
    spec = wb.RunSpec(task="fashion-mlp", device="cpu", micro_batch=8)
    found = wb.diverge(*(spec.replace(optimizer=each) for each in OPTIMIZER))
    where = f"{found.first.phase}, {found.first.module}, {found.first.operator}" if found.first else "nothing"
    right = where.startswith("optimizer, the change of ") and where.endswith(", aten.add_") and "eps: 1e-08 and 0.001" in str(found)
    yield "eps of the optimizer", "optimizer, aten.add_, eps", f"{found.verdict}: {where}", right and found.verdict == "bug"


def healthy() -> Iterator[Row]:
    """Twelve pairs that agree but for rounding."""
    for name, make in pairs.HEALTHY.items():
        a, b, options = make()
        verdict = wb.diverge(a, b, **({} if isinstance(a, tuple) else {"batch": pairs.X}) | options).verdict
        yield name, "nothing", verdict, verdict in ("rounding", "identical")
    for knobs in KNOBS:
        spec = wb.RunSpec(task="text-gpt" if "checkpointing" in knobs else "fashion-mlp", device="cpu", micro_batch=8)
        verdict = wb.diverge(spec, spec.replace(**knobs)).verdict
        yield ", ".join(f"{name}={value}" for name, value in knobs.items()), "nothing", verdict, verdict in ("rounding", "identical")


def bad_steps() -> Iterator[Row]:
    """Eleven trainings in which a step goes wrong: eight by their data."""
    ranks = Ranks.join(wb.RunSpec(task="text-gpt", device="cpu"))
    try:
        for name, (knobs, cause) in steps.CASES.items():
            with tempfile.TemporaryDirectory() as folder:
                found = wb.replay(steps.trained(Path(folder) / "run", ranks, name, **knobs))
            right = found.verdict == cause
            planted, named = cause, found.verdict
            if cause == "data":
                right &= found.step == steps.BAD and steps.rightly_blamed(name, found.samples)
                planted += f", step {steps.BAD}"
                named += f", step {found.step}" + "".join(f", sample {index}" for index in found.samples)
            yield name.replace("_", " "), planted, named, right
    finally:
        ranks.leave()


def steps_asked_for() -> Iterator[Row]:
    """Runs whose rate is far too large, that overflow, have a bad step or none, asked for a step before, at or after it."""
    ranks = Ranks.join(wb.RunSpec(task="text-gpt", device="cpu"))
    try:
        for name, (task, knobs, asked, cause, step) in steps.ASKED.items():
            with tempfile.TemporaryDirectory() as folder:
                found = wb.replay(steps.trained(Path(folder) / "run", ranks, task, **knobs), asked)
            yield name, f"{cause}, step {step}", f"{found.verdict}, step {found.step}", (found.verdict, found.step) == (cause, step)
    finally:
        ranks.leave()


def main() -> int:
    """Print a table of each kind; 1 if something was not named right."""
    wrong = 0
    kinds = {
        "Planted divergences": divergences(),
        "Healthy pairs": healthy(),
        "Planted bad steps": bad_steps(),
        "Steps asked for": steps_asked_for(),
    }
    for title, cases in kinds.items():
        rows = list(cases)
        count = sum(right for *_, right in rows)
        wrong += len(rows) - count
        print(
            Table(
                columns=("case", "planted", "named", "right"),
                rows=[(*row[:3], "✓" if row[3] else "✗") for row in rows],
                title=f"{title}: {count} of {len(rows)}",
            ),
            flush=True,
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
