"""First steps: they warm up, and give away what can be seen of a step from outside; what they change for good is said."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from workbench.measure import arms
from workbench.measure.batches import padding_of
from workbench.measure.blocks import Bench
from workbench.measure.feed import Feed
from workbench.measure.found import Found, describe, find
from workbench.measure.keep import Keep
from workbench.measure.replay import versions
from workbench.measure.spy import collectives, meeting, uses
from workbench.measure.subject import autocast_seen, dtype_of, samples_of

MOST = 20
"""First steps, even if they still get shorter."""
SHORTER = 0.8
"""A step that takes no less than that of the one before it is warm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the first steps showed."""

    samples: int | None
    """That one step takes on this rank."""
    padding: float | None
    """Fraction of the first batch."""
    precision: str
    """In which modules were called."""
    written: bool
    """Does the step write into its batch?"""
    reduces: bool
    """Does the arm without reductions take any communication away?"""


def first_steps(bench: Bench, feed: Feed, keep: Keep, found: Found, until: float, notes: list[str]) -> Seen:
    """Step until steps do not get shorter any more.

    Args:
        bench: where it runs.
        feed: gives the batches.
        keep: gets what is met on the way.
        found: what is known of the step.
        until: seconds on the bench's clock when it is enough in any case.
        notes: get what one should know.

    Raises:
        Exhausted: the loader ended.
    """
    batch = feed.next()
    samples, padding = samples_of(batch, feed.accumulation), padding_of(batch if feed.accumulation == 1 else batch[0])
    before, late = versions(batch), list[Optimizer]()

    def meet(optimizer: Optimizer) -> None:
        late.append(optimizer)
        keep.add(find(optimizer))

    with autocast_seen(found.models, bench.device) as precisions:
        with meeting(found.optimizers, meet):
            bench.warm([batch], _watching_use(bench.step, notes))
        written = versions(batch) != before
        times = [_seconds(bench, feed.next() if written else batch)]
        while len(times) < 3 or (times[-1] < SHORTER * times[-2] and len(times) < MOST):
            times.append(_seconds(bench, feed.next()))
            if bench.tick() > until:
                break
    _note_what_stays(feed, keep, found, late, notes)
    return Seen(
        samples=samples,
        padding=padding,
        precision=precisions[-1] if precisions else dtype_of(found.models),
        written=written,
        reduces=bench.peers.world_size > 1 and _reduces(bench, feed, found, notes),
    )


def _seconds(bench: Bench, batch: Any) -> float:
    block = bench.run("warm-up", [batch], 1)
    return max(laps.calls[0] + laps.tail for laps in block.laps)


def _watching_use(step: Callable[[Any], Any], notes: list[str]) -> Callable[[Any], None]:
    """The step, for once with an eye on whether it uses its batch."""

    def watched(batch: Any) -> None:
        if uses(step, batch) is False:
            notes.append("step() does not use its batch: what the loader gives makes no difference to it")

    return watched


def _note_what_stays(feed: Feed, keep: Keep, found: Found, late: list[Optimizer], notes: list[str]) -> None:
    """What will not be as it was before."""
    if late:
        notes.append(
            f"{', '.join(map(describe, late))} was found only as it stepped: it was put back, but gradients may differ, and what it takes "
            "is in the rest of the step. Try optimizer=…"
        )
    elif found.models and not found.optimizers:
        notes.append(
            "no optimizer was found behind step: what it takes is in the rest of the step, and if it remembers anything, that was not put "
            "back. Try optimizer=…"
        )
    if keep.left_out:
        notes.append(f"step() reaches what could not be put back to what it was before: {', '.join(keep.left_out)}")
    if feed.unread and feed.kind != "once":
        notes.append(f"the loader holds what could not be put back to what it was before: {', '.join(feed.unread)}")


def _reduces(bench: Bench, feed: Feed, found: Found, notes: list[str]) -> bool:
    """Does the arm without reductions take any communication away? What it leaves is noted: then it is not all that it costs."""
    heard = []
    for arm in (contextlib.nullcontext(), arms.without_reduction(found.models)):
        batch = feed.next()
        with arm, collectives() as called:
            bench.warm([batch])
        heard.append(set[str]().union(*bench.peers.gather(called)))
    usual, left = heard
    if left:
        notes.append(
            "communication's true cost was not measured: no_sync is DDP's, and all that could be taken away besides is the step's own "
            f"all_reduce; this step also calls {' and '.join(sorted(left))}, so ranks waited for each other in all arms"
        )
    return usual != left
