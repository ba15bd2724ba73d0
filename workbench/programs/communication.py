"""Times communication between ranks: collectives by themselves, or the steps of specs with and without their reduction of gradients.

torchrun starts `python -m workbench.programs.communication RUN_DIR` once per rank. run.json says under "experiment" what to time. Rank 0
writes the result, `links.json` or `communication.json`.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from workbench.cluster.analysis.links import LinkPoint, Links
from workbench.cluster.measure.links import time_links
from workbench.core import run_directory
from workbench.harness.ab_test import run_ab_test
from workbench.harness.ablations import can_skip_reduction, without_reduction
from workbench.harness.peers import Peers
from workbench.programs.experiment import Assignment, IdleTraining, Training, enter_training, run_program
from workbench.runs.entrypoints import COMMUNICATION
from workbench.runs.spec import RunSpec
from workbench.train.ranks import Ranks


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what run.json says."""
    run_program(measure, COMMUNICATION, __doc__, arguments)


def measure(assignment: Assignment) -> dict[str, Any]:
    """Time collectives or steps, as run.json says."""
    return time_collectives(assignment) if assignment.order["kind"] == "links" else time_steps(assignment)


def time_collectives(assignment: Assignment) -> dict[str, Any]:
    """Time collectives; the results so far are written after each round, so that a stop does not lose them."""
    order, first, began = assignment.order, assignment.ranks.rank == 0, time.monotonic()
    writer = run_directory.LineWriter(assignment.run_dir / run_directory.METRICS) if first else None

    def seen(done: int, rounds: int, points: list[LinkPoint]) -> None:
        if writer is not None:
            links = as_links(assignment.info, assignment.ranks, points)
            run_directory.write_json(assignment.run_dir / run_directory.LINKS, links.to_json())
            writer.write([{"step": done, "steps": rounds, "seconds": time.monotonic() - began}])

    torch.set_num_threads(1)
    device, budget = assignment.ranks.device, order["measuring_s"]
    points = time_links(order["kinds"], order["sizes"], device=device, repeats=order["repeats"], budget_s=budget, seen=seen)
    if writer is not None:
        writer.close()
    return {run_directory.LINKS: as_links(assignment.info, assignment.ranks, points).to_json()} if first else {}


def as_links(info: Mapping[str, Any], ranks: Ranks, points: Sequence[LinkPoint]) -> Links:
    """The timed collectives, with notes on what they say of a real network."""
    device, cores = ranks.device, info.get("cores")
    notes = []
    if device.type == "cpu" and cores and ranks.world_size > cores:
        notes.append(f"oversubscribed: {ranks.world_size} ranks on {cores} cores wait for each other's turns, not for a link")
    if device.type == "cpu":
        notes.append("between processes of one machine, through its memory or loopback: no network of a cluster")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Links(
        points=tuple(points),
        ranks=ranks.world_size,
        backend=str(dist.get_backend()),
        device=name,
        host=str(info.get("host", "")),
        notes=tuple(notes),
    )


def time_steps(assignment: Assignment) -> dict[str, Any]:
    """Seconds per step of each spec with and without its reduction, in pairs of neighbouring blocks.

    One spec after the other, each on as many ranks as it needs; the others idle.
    """
    steps = []
    for index, given in enumerate(assignment.order["specs"]):
        spec = RunSpec.from_json(given)
        with (
            Peers.join() as peers,
            enter_training(spec, assignment.task, assignment.ranks, index) as training,
            variants(training) as (reducing, silent),
        ):
            arm = run_ab_test(reducing, silent, budget_s=assignment.order["seconds"], peers=peers)
        steps.append({"spec": given, "pairs": [list(pair) for pair in arm.pairs]})
    return {run_directory.COMMUNICATION: {"steps": steps}} if assignment.ranks.rank == 0 else {}


@dataclasses.dataclass(slots=True, kw_only=True)
class Variant:
    """A training with or without its reduction of gradients; two variants share the training and alternate."""

    training: Training
    switch: contextlib.ExitStack
    """Shared by both: what one variant entered is undone when the other's turn begins."""
    reduces: bool

    @property
    def feed(self) -> Any:
        return self.training.feed

    def step(self) -> None:
        """One optimizer step, loading included."""
        self.training.step()

    def drain(self) -> None:
        """Before its block: switch the reduction on or off, and prepare the training for the block."""
        self.switch.close()
        self.training.drain()
        if not self.reduces:
            self.switch.enter_context(without_reduction([self.training.trainer.model]))


@contextlib.contextmanager
def variants(training: Training | IdleTraining) -> Iterator[tuple[Variant, Variant] | tuple[IdleTraining, IdleTraining]]:
    """The two variants of a training. Afterwards its ranks no longer agree on the weights: only its speed means anything."""
    if isinstance(training, IdleTraining):
        yield training, training
        return
    assert can_skip_reduction([training.trainer.model]), "whoever asks has checked it"
    with contextlib.ExitStack() as switch:
        yield Variant(training=training, switch=switch, reduces=True), Variant(training=training, switch=switch, reduces=False)


if __name__ == "__main__":
    main()
