"""`python -m workbench.programs.communication RUN_DIR`: how long a step of each of several specs takes with and without its reduction.

torchrun starts one per rank. Which specs stands in run.json under "experiment"; rank 0 leaves what came of it beside.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from workbench.core import run_directory
from workbench.harness.ab_test import contest
from workbench.harness.ablations import can_rest, without_reduction
from workbench.harness.peers import Peers
from workbench.programs.experiment import Assignment, Resting, Training, carry_out, entered
from workbench.runs.spec import RunSpec


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what run.json says."""
    carry_out(measure, name="workbench.programs.communication", about=__doc__, arguments=arguments)


def measure(mine: Assignment) -> dict[str, Any]:
    """Of each spec the pairs of neighbouring blocks: seconds per step with and without the reduction; rank 0 writes them.

    One spec after the other, each on as many ranks as it wants; the others rest.
    """
    found = []
    for place, given in enumerate(mine.order["specs"]):
        spec = RunSpec.from_json(given)
        with Peers.join() as peers, entered(spec, mine.task, mine.ranks, place) as training, turns(training) as (one, other):
            arm = contest(one, other, budget_s=mine.order["seconds"], peers=peers)
        found.append({"spec": given, "pairs": [list(pair) for pair in arm.pairs]})
    return {run_directory.COMMUNICATION: {"steps": found}} if mine.ranks.rank == 0 else {}


@dataclasses.dataclass(slots=True, kw_only=True)
class Turn:
    """A training that takes its turn with the reduction, or without."""

    training: Training
    switch: contextlib.ExitStack
    """Shared by both: what it holds is undone when the other's turn begins."""
    reduces: bool

    @property
    def feed(self) -> Any:
        """Of the training."""
        return self.training.feed

    def step(self) -> None:
        """One optimizer step, loading included."""
        self.training.step()

    def drain(self) -> None:
        """The turn begins."""
        self.switch.close()
        self.training.drain()
        if not self.reduces:
            self.switch.enter_context(without_reduction([self.training.trainer.model]))


@contextlib.contextmanager
def turns(training: Training | Resting) -> Iterator[tuple[Turn, Turn] | tuple[Resting, Resting]]:
    """The two contestants of one training, which goes on without its ranks agreeing: only its speed means anything afterwards."""
    if isinstance(training, Resting):
        yield training, training
        return
    assert can_rest([training.trainer.model]), "who asks has seen to it"
    with contextlib.ExitStack() as switch:
        yield Turn(training=training, switch=switch, reduces=True), Turn(training=training, switch=switch, reduces=False)


if __name__ == "__main__":
    main()
