"""`python -m workbench.programs.experiment RUN_DIR`: finds out what a step of a spec is made of, or lets two specs take turns.

torchrun starts one per rank. What to do stands in run.json under "experiment"; rank 0 leaves what came of it beside.

The frame of a program that torchrun starts once per rank to find something out: read the order, join, do it, write, leave together.
"""

import argparse
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from workbench.core import run_directory
from workbench.diagnosis.measure.experiment import experiment
from workbench.harness.ab_test import contest
from workbench.harness.blocks import StepFailed
from workbench.harness.feed import Feed
from workbench.harness.peers import Peers
from workbench.harness.replay import PATIENCE, drain, settle
from workbench.memory.measure.at_oom import held
from workbench.runs import failure
from workbench.runs.spec import RunSpec
from workbench.runs.task import Task, resolve
from workbench.train.layout import stand_by
from workbench.train.ranks import Ranks, choose_backend, choose_device
from workbench.train.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a rank is to do."""

    run_dir: Path
    info: Mapping[str, Any]
    """What run.json says."""
    spec: RunSpec
    task: Task
    ranks: Ranks

    @property
    def order(self) -> Mapping[str, Any]:
        """The "experiment" of run.json."""
        order: Mapping[str, Any] = self.info["experiment"]
        return order


def carry_out(do: Callable[[Assignment], Mapping[str, Any]], *, name: str, about: str | None, arguments: Sequence[str] | None) -> None:
    """Do what run.json says; whatever goes wrong is recorded before anything is torn down.

    Args:
        do: gives what this rank writes: what goes into JSON by file, below the run directory.
        name: of the program, for its help.
        about: the same.
        arguments: the command line; None = that of this process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=about)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help='directory with a run.json that has an "experiment"')
    run_dir = parser.parse_args(arguments).run_dir
    try:
        info = run_directory.read_json(run_dir / run_directory.RUN_JSON)
        spec = RunSpec.from_json(info["spec"])
        task = resolve(spec.task)  # before the group: a wrong name needs no peers to be found
        ranks = Ranks.join(spec)
        for file, found in do(Assignment(run_dir=run_dir, info=info, spec=spec, task=task, ranks=ranks)).items():
            (run_dir / file).parent.mkdir(exist_ok=True)
            run_directory.write_json(run_dir / file, found)
        ranks.agree(True)  # nobody leaves while another writes
    except BaseException as error:
        failure.record(error.error if isinstance(error, StepFailed) else error, run_dir=run_dir, held=held)
        raise
    Ranks.leave()


LEAST = 0.5
"""Of the budget is for measuring at least, however long the start has taken."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what run.json says."""
    carry_out(find_out, name="workbench.programs.experiment", about=__doc__, arguments=arguments)


def find_out(mine: Assignment) -> dict[str, Any]:
    """Evidence, or a contest; rank 0 writes it."""
    try_out, name = (diagnose, run_directory.EVIDENCE) if mine.order["kind"] == "diagnose" else (prove, run_directory.CONTEST)
    found = try_out(mine.info, mine.task, mine.ranks)
    return {name: found} if mine.ranks.rank == 0 else {}


def diagnose(info: Mapping[str, Any], task: Task, ranks: Ranks) -> dict[str, Any]:
    """Evidence about a step of the spec."""
    spec = RunSpec.from_json(info["spec"])
    trainer = Trainer(spec, task, ranks)

    def step(batches: Any) -> None:
        trainer.step(batches if spec.accumulation > 1 else (batches,))

    evidence = experiment(
        step,
        trainer.loader,
        model=trainer.model,
        optimizer=trainer.optimizer,
        budget_s=_budget(info, ranks),
        accumulation=spec.accumulation,
    )
    return dataclasses.replace(evidence, precision=spec.precision).to_json()


def prove(info: Mapping[str, Any], task: Task, ranks: Ranks) -> dict[str, Any]:
    """Steps per second of two specs that take turns: an `Arm` whose baseline is the first."""
    specs = [RunSpec.from_json(info["experiment"][name]) for name in ("baseline", "changed")]
    with contextlib.ExitStack() as stack, Peers.join() as peers:
        one, other = [stack.enter_context(entered(spec, task, ranks, place)) for place, spec in enumerate(specs)]
        arm = contest(one, other, budget_s=_budget(info, ranks), peers=peers)
    return dataclasses.asdict(dataclasses.replace(arm, samples=specs[1].global_batch / specs[0].global_batch))


def _budget(info: Mapping[str, Any], ranks: Ranks) -> float:
    """Seconds that are left of those that the user gives for all of it: the same on all ranks, which decide by it when to stop."""
    given = float(info["experiment"]["budget_s"])
    left = max(given - (time.time() - info["created"]), LEAST * given)
    return min(map(float, ranks.share("budget", str(left).encode())))


class Resting:
    """On a rank that a contestant does not use."""

    def step(self) -> None:
        """Nothing to do."""

    def drain(self) -> None:
        """Nothing to do."""


class Training:
    """A spec that trains, in a contest with another one in the same process."""

    _turn: "Training | None" = None

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.feed = Feed(trainer.loader, trainer.spec.accumulation)

    def step(self) -> None:
        """One optimizer step, loading included."""
        batches = self.feed.next()
        self.trainer.step(batches if self.trainer.spec.accumulation > 1 else (batches,))

    def drain(self) -> None:
        """Take the turn: wait until the other one's workers rest, so that they take no core; take what lies ready in one's own queue."""
        if Training._turn not in (self, None):
            settle(Training._turn.feed, PATIENCE)
        Training._turn = self
        self.trainer.take_over()
        drain(self.feed)

    def close(self) -> None:
        """End its workers."""
        self.feed.close()
        Training._turn = None


@contextlib.contextmanager
def entered(spec: RunSpec, task: Task, everyone: Ranks, place: int) -> Iterator[Training | Resting]:
    """A contestant on this rank. It may want fewer ranks than there are; all have to come here, to make its process group.

    Args:
        spec: of the contestant.
        task: what is trained.
        everyone: all ranks of the launch.
        place: its number among the contestants.
    """
    members = list(range(spec.nproc_per_node))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device(spec, local_rank, spec.nproc_per_node)
    group = dist.new_group(members, backend=choose_backend(spec, device))
    if everyone.rank not in members:
        stand_by(spec, members)
        yield Resting()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = Ranks(rank=everyone.rank, world_size=len(members), device=device, store=PrefixStore(f"contestant {place}", everyone.store))
    with contextlib.closing(Training(Trainer(spec, task, ranks, group))) as training:
        yield training


if __name__ == "__main__":
    main()
