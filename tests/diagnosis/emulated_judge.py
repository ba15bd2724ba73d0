"""Judges what the library says of a loop on the emulated GPU against the time from sync to sync, and proves its remedies.

    python -m tests.diagnosis.emulated_judge CASE OUT.json [--budget S] [--proofs N] [--clean]

Cases of several ranks have a fork for each.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.diagnosis.emulated_loops import CASES, Case, Loop
from tests.emulated_device import Ranks
from tests.undisturbed_clock import UndisturbedClock, undisturbed_machine

ROOT = Path(__file__).parents[2]
MAX_STEP_ERROR = 0.05
"""By how much the library may take a step for longer or shorter than it is, beside what two times of the wall clock differ."""
LIMIT = 180
"""Seconds for a case."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A remedy, as it was predicted and proved, and the same change by the wall clock."""

    remedy: str
    predicted: tuple[float, float, float]
    """Lower end, middle and upper end."""
    ceiling: bool
    proved: float
    wall: float

    @property
    def error(self) -> float:
        return self.predicted[1] / self.proved - 1

    @property
    def inside(self) -> bool:
        """Is what was proved in the printed range?"""
        return self.predicted[0] <= self.proved <= self.predicted[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What the library says of a case, and the truth. Seconds."""

    case: str
    verdict: str
    cause: str
    step: float
    """As the library has it."""
    true: tuple[float, float]
    """The step before and after the diagnosis."""
    clean: float | None
    """Without what was planted; None = it was not asked for."""
    took: float
    text: str
    notes: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

    @property
    def error(self) -> float:
        """Of the step."""
        return self.step / statistics.fmean(self.true) - 1

    @property
    def timed(self) -> bool:
        """Is the step right?"""
        return min(self.true) * (1 - MAX_STEP_ERROR) <= self.step <= max(self.true) * (1 + MAX_STEP_ERROR)

    @property
    def right(self) -> bool:
        """Are verdict and cause right?"""
        return CASES[self.case].right(self.verdict, self.cause)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Answer":
        content = json.loads(path.read_text())
        content["changes"] = tuple(Change(**{**change, "predicted": tuple(change["predicted"])}) for change in content["changes"])
        return cls(**{**content, "true": tuple(content["true"]), "notes": tuple(content["notes"])})


def judge(case: Case, *, budget_s: float, proofs: int = 0, cleaned: bool = False, rank: int = 0, folder: Path | None = None) -> Answer:
    """Run the case in this process, which has not imported the library yet: others on the machine do not count."""
    with pytest.MonkeyPatch.context() as patch:
        clock = UndisturbedClock(alone=not case.workers)
        clock.install(patch)
        undisturbed_machine(patch, clock)
        import workbench as wb

        ranks = Ranks(rank, case.ranks, folder, not_counted=clock.stopped)
        clean = None
        if cleaned and not case.healthy:
            loop = Loop(case.cleaned(), case.cleaned().device(ranks).install(patch))
            clean = loop.seconds_per_step()
        loop = Loop(case, case.device(ranks).install(patch))
        before = loop.seconds_per_step()
        began = time.perf_counter()
        diagnosis = wb.diagnose(loop.step, loop.loader, budget_s=budget_s)
        took = time.perf_counter() - began
        after = loop.seconds_per_step()
        changes = []
        for remedy in [remedy for remedy in diagnosis.remedies if remedy.change][:proofs]:
            proof = diagnosis.prove(remedy, budget_s=budget_s)
            wall = _with_change(case, loop, dict(remedy.change))
            predicted = (remedy.low, remedy.speedup, remedy.high)
            changes.append(
                Change(remedy=remedy.name, predicted=predicted, ceiling=remedy.ceiling, proved=proof.measured.mid, wall=after / wall)
            )
    return Answer(
        case=case.name,
        verdict=diagnosis.verdict,
        cause=diagnosis.cause,
        step=diagnosis.evidence.step,
        true=(before, after),
        clean=clean,
        took=took,
        text=str(diagnosis),
        notes=diagnosis.evidence.notes,
        changes=tuple(changes),
    )


def _with_change(case: Case, loop: Loop, change: dict[str, Any]) -> float:
    """Seconds per step with a change, per sample of the loop without it."""
    from workbench.harness import ablations
    from workbench.harness.ab_test import CHANGEABLE
    from workbench.harness.loaders import with_knobs

    names = {"micro_batch": "batch_size"}
    knobs = {names.get(name, name): value for name, value in change.items() if CHANGEABLE[name] == "loader"}
    loader = with_knobs(loop.loader, **knobs) if knobs else loop.loader
    with ablations.changed_step(change, [loop.model], [loop.optimizer]):
        changed = ablations.wrap_step(loop.step, change, torch.device("cuda"))
        other = loop.with_parts(changed, loader)
        return other.seconds_per_step() * case.samples / knobs.get("batch_size", case.samples)


def judge_ranks(case: Case, *, budget_s: float, proofs: int = 0, cleaned: bool = False) -> Answer:
    """Run a case of several ranks, each in a fork of this process."""
    with tempfile.TemporaryDirectory() as name:
        options = {"budget_s": budget_s, "proofs": proofs, "cleaned": cleaned}
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=judge_rank, args=(case, rank, Path(name)), kwargs=options) for rank in range(case.ranks)]
        limit = time.monotonic() + LIMIT * (1 + proofs)
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(max(0.0, limit - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"exit codes of the ranks, which said why: {[process.exitcode for process in processes]}")
        return Answer.read(Path(name) / "answer.json")


def judge_rank(case: Case, rank: int, folder: Path, **options: Any) -> None:
    """Run a case as one of its ranks; the first one writes the answer into the folder."""
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(case.ranks), "WORKBENCH_CACHE": str(folder)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.ranks)
    try:
        answer = judge(case, **options, rank=rank, folder=folder)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if not rank:
        answer.write(folder / "answer.json")


def main() -> None:
    """Judge one case, and write the answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=10.0)
    parser.add_argument("--proofs", type=int, default=0)
    parser.add_argument("--clean", action="store_true", help="time the loop without what was planted, too")
    given = parser.parse_args()
    case = CASES[given.case]
    answer = (judge_ranks if case.ranks > 1 else judge)(case, budget_s=given.budget, proofs=given.proofs, cleaned=given.clean)
    answer.write(given.out)


if __name__ == "__main__":
    main()
