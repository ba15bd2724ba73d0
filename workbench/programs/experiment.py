"""Diagnoses a step of a spec, times two specs against each other, or finds what ranks cost each other; `run_program` runs such programs.

torchrun starts `python -m workbench.programs.experiment RUN_DIR` once per rank. run.json says under "experiment" what to do. Rank 0 writes
the result, `evidence.json`, `contest.json` or `gap.json`.
"""

import argparse
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from workbench.core import run_directory, units
from workbench.core.checks import number_in_environment
from workbench.diagnosis.measure.experiment import experiment
from workbench.diagnosis.measure.gap import measure_gap
from workbench.harness.ab_test import run_ab_test
from workbench.harness.blocks import StepFailed
from workbench.harness.feed import PATIENCE, Feed
from workbench.harness.peers import Peers
from workbench.memory.measure.at_oom import held
from workbench.runs import failure
from workbench.runs.entrypoints import EXPERIMENT
from workbench.runs.errors import is_out_of_memory
from workbench.runs.spec import RunSpec
from workbench.runs.task import Task, resolve
from workbench.train.device_turns import DeviceTurns
from workbench.train.ranks import Ranks, choose_backend, choose_device, join_group_creation
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


def run_program(
    measure: Callable[[Assignment], Mapping[str, Any]], name: str, about: str | None, arguments: Sequence[str] | None = None
) -> None:
    """Read the assignment, join the other ranks, measure, write the results, and leave together. An error is recorded first of all.

    Args:
        measure: gives what this rank writes: the content of JSON files, by their names in the run directory.
        name: of the program, for its help.
        about: what it does, for its help.
        arguments: the command line; None = that of this process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=about)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help='directory with a run.json that has an "experiment"')
    run_dir = parser.parse_args(arguments).run_dir
    try:
        info = run_directory.read_json(run_dir / run_directory.RUN_JSON)
        spec = RunSpec.from_json(info["spec"])
        task = resolve(spec.task)  # before the group: a wrong name needs no peers to be found
        if number_in_environment("RANK", 0) == 0:
            progress_writer(run_dir)("torch is loaded, waiting for all ranks", "")
        ranks = Ranks.join(spec)
        for file, result in measure(Assignment(run_dir=run_dir, info=info, spec=spec, task=task, ranks=ranks)).items():
            (run_dir / file).parent.mkdir(exist_ok=True)
            run_directory.write_json(run_dir / file, result)
        ranks.agree(True)  # no rank leaves while another one writes
    except BaseException as error:
        failure.record(error.error if isinstance(error, StepFailed) else error, run_dir=run_dir, held=held)
        raise
    Ranks.leave()


PROGRESS_SECONDS = 1.0
"""Seconds between two writes of the progress."""
MIN_MEASURING, MIN_MEASURING_SECONDS = 0.5, 15.0
"""Share of the budget that is left for measuring at least, however long the start has taken, and the most seconds that this comes to.
Chosen: in 15 s most diagnoses are sure. With half, slow steps get no verdict; with twice, a slow start makes a call take half as long again
as its budget."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what run.json says."""
    run_program(run_experiment, EXPERIMENT, __doc__, arguments)


def run_experiment(assignment: Assignment) -> dict[str, Any]:
    """Evidence about a step, the result of an A/B test, or what ranks cost each other; rank 0 writes it."""
    measure, file = KINDS[assignment.order["kind"]]
    if assignment.ranks.rank == 0:
        progress_writer(assignment.run_dir)("building the model and the loader", "")
    result = measure(assignment)
    return {file: result} if assignment.ranks.rank == 0 else {}


def diagnose(assignment: Assignment) -> dict[str, Any]:
    """Evidence about a step of the spec."""
    spec = assignment.spec
    trainer = Trainer(spec, assignment.task, assignment.ranks)

    def step(batches: Any) -> None:
        trainer.step(batches if spec.accumulation > 1 else (batches,))

    budget_s, late = _budget(assignment)
    evidence = experiment(
        step,
        trainer.loader,
        model=trainer.model,
        optimizer=trainer.optimizer,
        budget_s=budget_s,
        accumulation=spec.accumulation,
        progress=progress_writer(assignment.run_dir) if assignment.ranks.rank == 0 else None,
    )
    return dataclasses.replace(evidence, precision=spec.precision, notes=(*evidence.notes, *late)).to_json()


def measure_ranks(assignment: Assignment) -> dict[str, Any]:
    """What the ranks of the spec cost each other; see `diagnosis.measure.gap`."""
    spec = assignment.spec
    trainer = Trainer(spec, assignment.task, assignment.ranks)
    budget_s, late = _budget(assignment)
    evidence = measure_gap(
        lambda batches: trainer.step(batches if spec.accumulation > 1 else (batches,)),
        trainer.loader,
        [trainer.model],
        budget_s=budget_s,
        accumulation=spec.accumulation,
        threads=spec.threads,
        large=assignment.order["large"],
        progress=progress_writer(assignment.run_dir) if assignment.ranks.rank == 0 else None,
    )
    return dataclasses.replace(evidence, notes=(*evidence.notes, *late)).to_json()


def progress_writer(run_dir: Path) -> Callable[[str, str], None]:
    """A function that writes what is tried now and known so far into the run directory; whoever waits for the run shows it.

    It raises no OSError: rank 0 alone calls it, and the others would wait for a rank that has ended. Where whoever waits was interrupted
    and has asked the run to end early (FINISH), it raises KeyboardInterrupt, as Ctrl-C does in a process of one's own.
    """
    following = -math.inf

    def write(now: str, known: str) -> None:
        nonlocal following
        if (run_dir / run_directory.FINISH).exists():
            raise KeyboardInterrupt
        if time.monotonic() >= following:
            following = time.monotonic() + PROGRESS_SECONDS
            with contextlib.suppress(OSError):
                run_directory.write_json(run_dir / run_directory.PROGRESS, {"now": now, "known": known})

    return write


def prove(assignment: Assignment) -> dict[str, Any]:
    """Time two specs in alternating blocks; the result is a `VariantTimes` whose baseline is the first spec."""
    specs = [RunSpec.from_json(assignment.order[name]) for name in ("baseline", "changed")]
    with contextlib.ExitStack() as stack, Peers.join() as peers:
        turns = DeviceTurns(assignment.ranks.device, all_agree=lambda yes: peers.agree(yes, all))
        trainings: list[Training | IdleTraining] = []
        progress = progress_writer(assignment.run_dir) if assignment.ranks.rank == 0 else None
        try:
            for index, spec in enumerate(specs):
                trainings.append(stack.enter_context(enter_training(spec, assignment.task, assignment.ranks, index, turns)))
            budget_s, late = _budget(assignment)
            arm = run_ab_test(*trainings, budget_s=budget_s, peers=peers, progress=progress)
        except Exception as error:
            if is_out_of_memory(error) and (len(trainings) < len(specs) or Training.in_turn in trainings):
                side = "without" if not trainings or Training.in_turn is trainings[0] else "with"
                error.args = (f"{error} (in the training {side} the change)",)
            raise
    note = "; ".join(filter(None, (turns.note, arm.note, *late))) or None
    return dataclasses.asdict(dataclasses.replace(arm, samples=specs[1].global_batch / specs[0].global_batch, note=note))


KINDS: Mapping[str, tuple[Callable[[Assignment], dict[str, Any]], str]] = {
    "diagnose": (diagnose, run_directory.EVIDENCE),
    "prove": (prove, run_directory.CONTEST),
    "gap": (measure_ranks, run_directory.GAP),
}
"""Kind of an order → what does it, and the file with its result."""


def _budget(assignment: Assignment) -> tuple[float, tuple[str, ...]]:
    """Seconds that are left of the user's budget, the same on all ranks, which decide by it when to stop; and a note if the start took so
    long that the budget is exceeded.
    """
    budget, started = float(assignment.order["budget_s"]), time.time() - assignment.info["created"]
    least = min(MIN_MEASURING * budget, MIN_MEASURING_SECONDS)
    left = min(map(float, assignment.ranks.share("budget", str(max(budget - started, least)).encode())))
    if left > least:
        return left, ()
    whole = units.seconds(budget)
    return left, (
        f"the start took {units.seconds(started)} of the budget of {whole}, and measuring had {units.seconds(left)} all the same",
    )


class IdleTraining:
    """Takes the place of a training on a rank that it does not use."""

    def __init__(self, turns: DeviceTurns | None = None) -> None:
        self._turns = turns
        if turns is not None:
            turns.add(None)

    def step(self) -> None:
        """Nothing to do."""

    def drain(self) -> None:
        """Before its block: the other training rests here, too, once its workers idle."""
        if Training.in_turn is not None:
            Training.in_turn.feed.wait_until_full(PATIENCE)
        if self._turns is not None:
            self._turns.enter(None)


class Training:
    """Trains a spec, in blocks that alternate with another training in the same process."""

    in_turn: "Training | None" = None

    def __init__(self, trainer: Trainer, turns: DeviceTurns | None = None) -> None:
        self.trainer, self._turns = trainer, turns
        if turns is not None:
            turns.add(trainer)
        self.feed = Feed(trainer.loader, trainer.spec.accumulation)

    def step(self) -> None:
        """One optimizer step, loading included."""
        batches = self.feed.next()
        self.trainer.step(batches if self.trainer.spec.accumulation > 1 else (batches,))

    def drain(self) -> None:
        """Before its block: wait until the other training's workers idle and use no core, have the device, and empty the own queue."""
        if Training.in_turn not in (self, None):
            Training.in_turn.feed.wait_until_full(PATIENCE)
        Training.in_turn = self
        if self._turns is not None:
            self._turns.enter(self.trainer)
        self.trainer.apply_process_settings()
        self.feed.drain()

    def close(self) -> None:
        """End its workers."""
        self.feed.close()
        Training.in_turn = None


@contextlib.contextmanager
def enter_training(
    spec: RunSpec, task: Task, everyone: Ranks, number: int, turns: DeviceTurns | None = None
) -> Iterator[Training | IdleTraining]:
    """A contestant on this rank. It may use fewer ranks than there are; all must call this, to make its process group.

    One that uses all ranks takes the group of all, as a training does: NCCL has hundreds of MB on the device for each group.
    """
    members = list(range(spec.nproc_per_node))
    local_rank = number_in_environment("LOCAL_RANK", 0)
    device = choose_device(spec, local_rank, spec.nproc_per_node)
    backend = choose_backend(spec, device)
    shared = len(members) == dist.get_world_size() and backend == dist.get_backend()
    group = None if shared else dist.new_group(members, backend=backend)
    if everyone.rank not in members:
        join_group_creation(spec, members)
        yield IdleTraining(turns)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = Ranks(rank=everyone.rank, world_size=len(members), device=device, store=PrefixStore(f"contestant {number}", everyone.store))
    with contextlib.closing(Training(Trainer(spec, task, ranks, group), turns)) as training:
        yield training


if __name__ == "__main__":
    main()
