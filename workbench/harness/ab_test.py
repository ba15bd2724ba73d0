"""Contest: two ways to do a step take turns, block by block, until it is clear by how much one is faster."""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.harness import ablations
from workbench.harness.blocks import DiagnoseError, StepFailed, steps_for
from workbench.harness.discover import discover
from workbench.harness.feed import Feed
from workbench.harness.loaders import with_knobs
from workbench.harness.observe import check_arguments, device_of, discover_training, on_new_optimizer, samples_of
from workbench.harness.peers import Peers
from workbench.harness.restore import SavedState
from workbench.harness.results import VariantTimes
from workbench.runs.spec import KNOBS

WARM_UP_STEPS = 3
"""Steps of each before anything is timed."""
BLOCK_SECONDS, MAX_STEPS = 0.4, 400
"""A block lasts about so long, and has at most so many steps."""
MIN_PAIRS, MAX_PAIRS = 6, 40
MIN_STEPS_PER_PASS = 4
"""Steps: shorter passes over the loader are timed as they come."""
MAX_WIDTH = 0.04
"""The interval of the saved fraction that is narrow enough."""


class Side(Protocol):
    """One way to do a step. If it has a `feed`, what it costs to begin a pass over the loader is spread over the steps of a pass."""

    def step(self) -> None:
        """One whole step, loading included."""

    def drain(self) -> None:
        """Its turn begins: take what its loader has made ahead, so that a block begins as a step in the middle of training does."""


def run_ab_test(one: Side, other: Side, *, budget_s: float, peers: Peers, clock: Callable[[], float] = time.perf_counter) -> VariantTimes:
    """Let two contestants take turns; all ranks call this together.

    Args:
        one: the baseline.
        other: the change.
        budget_s: seconds it may take, about.
        peers: who takes part.
        clock: seconds.

    Returns:
        The pairs of neighbouring blocks, in seconds per step of the slowest rank; the same on all ranks. Nothing is left out: what stalls
        now and then, stalls here.
    """
    start = clock()
    sides = [_SideTimer(contestant, peers, clock) for contestant in (one, other)]
    pairs: list[tuple[float, float]] = []
    while True:
        swapped = len(pairs) % 2 == 1
        times = [side.block() for side in (sides[::-1] if swapped else sides)]
        base, changed = times[::-1] if swapped else times
        pairs.append((base, changed))
        spent = peers.agree(clock() - start)
        narrow = len(pairs) >= MIN_PAIRS and VariantTimes(name="changed", baseline="full", pairs=tuple(pairs)).saved.width <= MAX_WIDTH
        if narrow or len(pairs) >= MAX_PAIRS or spent * (1 + 1 / len(pairs)) > budget_s:
            break
    extra = [peers.agree(side.per_step_of_passes()) for side in sides]
    return VariantTimes(name="changed", baseline="full", pairs=tuple((base + extra[0], changed + extra[1]) for base, changed in pairs))


class _SideTimer:
    """A contestant, and how its blocks are timed."""

    def __init__(self, contestant: Side, peers: Peers, clock: Callable[[], float]) -> None:
        """Warm up, and find out how many steps make a block."""
        self._contestant, self._peers, self._clock = contestant, peers, clock
        self._feed: Feed | None = getattr(contestant, "feed", None)
        self._begun: list[float] = []
        self._others: list[float] = []
        contestant.drain()
        for _ in range(WARM_UP_STEPS - 1):
            contestant.step()
        _synchronize()
        before = clock()
        contestant.step()
        _synchronize()
        seconds = peers.agree(clock() - before)
        workers = self._feed.num_workers if self._feed else 0
        whole = workers if workers * seconds < 2 * BLOCK_SECONDS else 1
        self._count = steps_for(seconds, BLOCK_SECONDS, least=2 if seconds < 1 else 1, most=MAX_STEPS, multiple=max(1, whole))
        self._warm = max(2, whole) if seconds < 1 else 1

    def block(self) -> float:
        """Seconds per step of a block, of the slowest rank."""
        contestant, now = self._contestant, self._clock
        contestant.drain()
        for _ in range(self._warm):
            contestant.step()
        _synchronize()
        self._peers.barrier()
        times: list[float] = []
        begun: list[float] = []
        passes, start = self._passes(), now()
        for _ in range(self._count):
            contestant.step()
            end = now()
            (times if self._passes() == passes else begun).append(end - start)  # some blocks would have such a step, others not
            passes, start = self._passes(), end
        _synchronize()
        tail = (now() - start) / self._count
        self._begun += begun
        self._others += times
        mean = sum(times) / len(times) if times else sum(begun) / len(begun)
        return self._peers.agree(mean + tail)

    def _passes(self) -> int:
        """How many passes over the loader have begun, unless they are so short that every block has some."""
        feed = self._feed
        return 0 if feed is None or (feed.epoch or MIN_STEPS_PER_PASS) // feed.accumulation < MIN_STEPS_PER_PASS else feed.passes

    def per_step_of_passes(self) -> float:
        """Seconds per step that beginning new passes over the loader adds to the blocks' means."""
        feed = self._feed
        if feed is None or not feed.epoch or not self._begun:
            return 0.0
        extra = statistics.median(self._begun) - statistics.fmean(self._others or self._begun)
        return max(0.0, extra) / max(1, feed.epoch // feed.accumulation)


def _synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


CHANGEABLE = {name: about.turned_in for name, about in KNOBS.items() if about.turned_in}
"""What can be changed of a step and a loader that are the user's own → in which of both."""


def measure_change(
    step: Callable[[Any], Any],
    loader: Any,
    change: Mapping[str, Any],
    *,
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    budget_s: float = 60.0,
) -> VariantTimes:
    """Run a step with a change and without, in turns, in this process. Everything is left as it was.

    Where a process group is initialised, all of its ranks have to call it.

    Args:
        step: `step(batch)` does one optimizer step.
        loader: gives the batches.
        change: num_workers, prefetch_factor, persistent_workers, pin_memory, micro_batch of the loader; precision ("amp_bf16",
            "amp_fp16"), optimizer ("fused", "foreach"), channels_last, threads, gc (False) of the step.
        model: what is trained; None = found by looking at the step.
        optimizer: likewise.
        budget_s: seconds that it may take, about.

    Raises:
        DiagnoseError: a change that cannot be made from here, or with which the step fails.
    """
    check_arguments(step, budget_s)
    if not change or (unknown := change.keys() - CHANGEABLE.keys()):
        raise DiagnoseError(
            f"{', '.join(sorted(unknown)) if change else 'nothing'} cannot be changed from outside of a step: possible are "
            f"{', '.join(CHANGEABLE)}; change the rest in your code, and diagnose that"
        )
    state = discover_training(step, model, optimizer, loader, [])
    if change.get("optimizer") and not ablations.has_unused_implementation(state.optimizers, change["optimizer"]):
        raise DiagnoseError(f"optimizer={change['optimizer']!r}: the step's optimizer has no such implementation, or uses it already")
    names = {"micro_batch": "batch_size"}  # what a DataLoader calls it
    knobs = {names.get(name, name): value for name, value in change.items() if CHANGEABLE[name] == "loader"}
    device = device_of(state.models)
    with Peers.join() as peers, ExitStack() as undo:
        saved = SavedState(state)
        undo.callback(saved.restore)
        undo.enter_context(ablations.frozen_schedules(state.objects))
        stage = undo.enter_context(_ActiveSide(saved))
        feeds = [undo.enter_context(Feed(loader)), undo.enter_context(Feed(with_knobs(loader, **knobs) if knobs else loader))]
        changed = partial(ablations.changed_step, change, state.models, state.optimizers)
        one = _StepSide(stage, step, feeds[0], contextlib.nullcontext)
        with on_new_optimizer(state.optimizers, lambda optimizer: saved.add(discover(optimizer))):
            one.drain()
            one.step()
        other = _StepSide(stage, ablations.wrap_step(step, change, device), feeds[1], changed)
        arm = run_ab_test(one, other, budget_s=budget_s, peers=peers)
        sizes = [samples_of(feed.next(), 1) for feed in feeds] if "micro_batch" in change else [1, 1]
    note = None
    if None in sizes:
        sizes, note = [getattr(loader, "batch_size", None) or 1, change["micro_batch"]], "samples per batch as the loader says"
    return VariantTimes(name="changed", baseline="full", pairs=arm.pairs, samples=(sizes[1] or 1) / (sizes[0] or 1), note=note)


class _ActiveSide:
    """Whose turn it is: what is changed for one contestant holds only then."""

    def __init__(self, saved: SavedState) -> None:
        self._saved = saved
        self._on: _StepSide | None = None
        self._changes = ExitStack()

    def enter(self, contestant: "_StepSide") -> None:
        """The turn of this one begins, and that of the other ends: its workers are left to fill their queue."""
        if self._on is contestant:
            return
        if self._on is not None:
            self._changes.close()
            self._on.feed.wait_until_full(1.0)
        self._saved.restore_weights()
        self._on = contestant
        self._changes.enter_context(contestant.on())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._changes.close()


class _StepSide:
    """A step in this process, with or without a change."""

    def __init__(self, stage: _ActiveSide, step: Callable[[Any], Any], feed: Feed, on: Callable[[], AbstractContextManager[Any]]) -> None:
        self._stage, self._step, self.feed, self.on = stage, step, feed, on
        self._called = 0

    def step(self) -> None:
        """One step."""
        batch = self.feed.next()
        self._called += 1
        try:
            self._step(batch)
        except Exception as error:
            raise StepFailed(self._called, error) from error

    def drain(self) -> None:
        """Take the stage, and what lies ready."""
        self._stage.enter(self)
        self.feed.drain()
