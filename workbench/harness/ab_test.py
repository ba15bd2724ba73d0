"""A/B tests: times two ways to do a training step in interleaved blocks, until it is clear by how much one is faster."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Protocol, Self

from torch import nn
from torch.optim import Optimizer

from workbench.core import units
from workbench.core.progress import INTERRUPTED
from workbench.core.system_load import LoadMeter
from workbench.harness import ablations, device_clock
from workbench.harness.blocks import MAX_PASS_SECONDS, DiagnoseError, StepFailed, common_length, steps_for
from workbench.harness.discover import discover
from workbench.harness.feed import Feed
from workbench.harness.loaders import with_knobs
from workbench.harness.observe import check_arguments, discover_training, on_new_optimizer, samples_of, timed_device_of
from workbench.harness.peers import Peers
from workbench.harness.restore import SavedState
from workbench.harness.results import VariantTimes
from workbench.harness.tf32 import has_tf32
from workbench.runs.spec import KNOBS

WARM_UP_STEPS = 3
"""Steps of each side before its blocks, the last of which is timed for their length; two if a step takes LONG_STEP seconds."""
LONG_STEP = 1.0
"""Seconds of a step from which on one is enough to warm up a side, and none comes before a block. Chosen: caches, threads and queues settle
within a second. It decides how long proofs of slow steps take."""
BLOCK_SECONDS, MAX_STEPS = 0.4, 400
"""A block lasts about so long, and has at most so many steps."""
MIN_PAIRS, MAX_PAIRS = 6, 40
FEWEST_PAIRS = 2
"""With so many an interrupted test has a result: two pairs say how much they differ."""
MIN_STEPS_PER_PASS = 4
"""Passes over the loader with fewer steps are timed as they come, their start included."""
MAX_WIDTH = 0.04
"""The width of the saved fraction's interval at which the test ends. Chosen: a gain of 2× is then known to 8 %. With half, proofs take up
to four times as long."""


class Side(Protocol):
    """One of the two ways to do a step. If it has a `feed`, the cost of beginning a pass over the loader is spread over its steps."""

    def step(self) -> None:
        """One whole step, loading included."""

    def drain(self) -> None:
        """Before its block: take what the loader has prefetched, so that the block starts like a step in the middle of training."""


def run_ab_test(
    baseline: Side,
    changed: Side,
    *,
    budget_s: float,
    peers: Peers,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str, str], object] | None = None,
) -> VariantTimes:
    """Time two sides in alternating blocks; all ranks call this together.

    Args:
        baseline: the step as it is.
        changed: the step with the change.
        budget_s: seconds it may take, about.
        peers: the ranks that take part.
        clock: gives the time in seconds.
        progress: called with what comes now and what is known so far, on one rank; a KeyboardInterrupt that it raises ends the test on all.

    Returns:
        The pairs of neighbouring blocks, in seconds per step of the slowest rank; the same on all ranks. Nothing is left out: steps
        that stall now and then count here. A note says whether other processes needed the cores meanwhile, and whether Ctrl-C ended it.

    Raises:
        KeyboardInterrupt: it came before FEWEST_PAIRS were timed, or on one of several ranks.
    """
    start, meter, stopped = clock(), LoadMeter(), False
    pairs: list[tuple[float, float]] = []

    def interrupted(now: str) -> bool:
        try:
            if progress:
                progress(now, _known(pairs))
        except KeyboardInterrupt:
            return True
        return False

    if peers.agree(interrupted("warming up both sides")):
        raise KeyboardInterrupt
    timers = [_SideTimer(side, peers, clock) for side in (baseline, changed)]
    try:
        while True:
            swapped = len(pairs) % 2 == 1
            times = [timer.block() for timer in (timers[::-1] if swapped else timers)]
            first, second = times[::-1] if swapped else times
            pairs.append((first, second))
            spent = peers.agree(math.inf if interrupted(f"pair {len(pairs) + 1} of blocks") else clock() - start)
            if stopped := spent == math.inf:
                if len(pairs) < FEWEST_PAIRS:
                    raise KeyboardInterrupt
                break
            narrow = len(pairs) >= MIN_PAIRS and VariantTimes(name="changed", baseline="full", pairs=tuple(pairs)).saved.width <= MAX_WIDTH
            if narrow or len(pairs) >= MAX_PAIRS or spent * (1 + 1 / len(pairs)) > budget_s:
                break
    except KeyboardInterrupt:
        if peers.group is not None or len(pairs) < FEWEST_PAIRS:
            raise
        stopped = True
    extra = [peers.agree(timer.per_step_of_passes()) for timer in timers]
    doubt = peers.agree(meter.doubt())
    meter.close()
    notes = [f"{INTERRUPTED} after {len(pairs)} pairs of blocks: this is the result so far"] if stopped else []
    notes += [doubt] if doubt else []
    whole = tuple((first + extra[0], second + extra[1]) for first, second in pairs)
    return VariantTimes(name="changed", baseline="full", pairs=whole, note="; ".join(notes) or None)


def _known(pairs: Sequence[tuple[float, float]]) -> str:
    """What so many pairs say, in words; "" = nothing yet. Of batches of other sizes it is the step, not the throughput."""
    if len(pairs) < FEWEST_PAIRS:
        return ""
    saved = VariantTimes(name="changed", baseline="full", pairs=tuple(pairs)).saved.mid
    return f"the step takes {units.percent(abs(saved))} {'less' if saved >= 0 else 'more'} with it, after {len(pairs)} pairs"


class _SideTimer:
    """Times the blocks of one side, on the clock of the device in use."""

    def __init__(self, side: Side, peers: Peers, clock: Callable[[], float]) -> None:
        """Warm up, and find out how many steps make a block."""
        self._side, self._peers, self._clock = side, peers, clock
        self._feed: Feed | None = getattr(side, "feed", None)
        self._begun: list[float] = []
        self._others: list[float] = []
        side.drain()
        for _ in range(WARM_UP_STEPS - 1):
            begin = clock()
            side.step()
            if peers.agree(clock() - begin) >= LONG_STEP:
                break
        self._device = device_clock.current_device()  # in use now at the latest
        device_clock.synchronize(self._device)
        before = clock()
        side.step()
        device_clock.synchronize(self._device)
        seconds = peers.agree(clock() - before)
        workers = self._feed.num_workers if self._feed else 0
        whole = workers if workers * seconds < 2 * BLOCK_SECONDS else 1
        per_pass = common_length(self._steps_per_pass(), peers)
        self._whole_passes = device_clock.is_asynchronous(self._device) and per_pass * seconds <= MAX_PASS_SECONDS
        multiple = int(per_pass) if self._whole_passes else max(1, whole)
        self._count = steps_for(seconds, BLOCK_SECONDS, least=2 if seconds < LONG_STEP else 1, most=MAX_STEPS, multiple=multiple)
        self._warm = max(2, whole) if seconds < LONG_STEP else 0

    def block(self) -> float:
        """Seconds per step of a block, of the slowest rank."""
        side = self._side
        side.drain()
        for _ in range(self._warm):
            side.step()
        self._peers.barrier()
        passes, begin = self._passes(), set[int]()
        timer = device_clock.step_clock(self._device, self._clock)
        for i in range(self._count):
            side.step()
            timer.mark()
            if (so_far := self._passes()) != passes:  # some blocks would have such a step, others not
                passes = so_far
                begin.add(i)
        parts, whole = timer.read()
        steps = parts or [whole / self._count] * self._count
        begun = [step for i, step in enumerate(steps) if i in begin]
        others = [step for i, step in enumerate(steps) if i not in begin]
        self._begun += begun
        self._others += others
        return self._peers.agree(statistics.fmean(others or begun))

    def _steps_per_pass(self) -> float:
        feed = self._feed
        return feed.epoch // feed.accumulation if feed and feed.epoch else math.inf

    def _passes(self) -> int:
        """How many passes over the loader have begun, unless every block has the same number of beginnings."""
        feed = self._feed
        return 0 if feed is None or self._whole_passes or self._steps_per_pass() < MIN_STEPS_PER_PASS else feed.passes

    def per_step_of_passes(self) -> float:
        """Seconds per step that beginning new passes over the loader adds to the blocks' means."""
        feed = self._feed
        if feed is None or not feed.epoch or not self._begun:
            return 0.0
        extra = statistics.median(self._begun) - statistics.fmean(self._others or self._begun)
        return max(0.0, extra) / max(1, feed.epoch // feed.accumulation)


CHANGEABLE = {name: about.turned_in for name, about in KNOBS.items() if about.turned_in}
"""Knobs that can be changed in a user's own step and loader → in which of the two."""


def measure_change(
    step: Callable[[Any], Any],
    loader: Any,
    change: Mapping[str, Any],
    *,
    model: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    budget_s: float = 60.0,
    progress: Callable[[str, str], object] | None = None,
) -> VariantTimes:
    """Time a step with a change against the step without, in this process. Everything is left as it was.

    Where a process group is initialised, all of its ranks have to call it.

    Args:
        step: `step(batch)` does one optimizer step.
        loader: gives the batches.
        change: num_workers, prefetch_factor, persistent_workers, pin_memory, micro_batch of the loader; precision ("amp_bf16",
            "amp_fp16"), optimizer ("fused", "foreach"), channels_last, tf32, threads, deterministic, gc (False) of the step.
        model: what is trained; None = discovered from the step.
        optimizer: what updates it; None = discovered from the step.
        budget_s: seconds that it may take, about.
        progress: see `run_ab_test`.

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
    device = timed_device_of(state.models)
    if change.get("tf32") and not has_tf32(device):
        raise DiagnoseError(f"tf32=True: the model is on {device}, which has no TF32; NVIDIA GPUs have it from Ampere on (A100, RTX 3090)")
    with Peers.join() as peers, ExitStack() as undo:
        saved = SavedState(state)
        undo.callback(saved.restore)
        undo.enter_context(ablations.frozen_schedules(state.objects))
        active = undo.enter_context(_ActiveSide(saved))
        feeds = [undo.enter_context(Feed(loader)), undo.enter_context(Feed(with_knobs(loader, **knobs) if knobs else loader))]
        sizes = [samples_of(feed.next(), feed) for feed in feeds] if "micro_batch" in change else [1, 1]  # Ctrl-C ends workers, too
        changed = partial(ablations.changed_step, change, state.models, state.optimizers)
        baseline = _StepSide(active, step, feeds[0], contextlib.nullcontext)
        with on_new_optimizer(state.optimizers, lambda optimizer: saved.add(discover(optimizer))):
            baseline.drain()
            baseline.step()
        with_change = _StepSide(active, ablations.wrap_step(step, change, device), feeds[1], changed)
        times = run_ab_test(baseline, with_change, budget_s=budget_s, peers=peers, progress=progress)
    note = times.note
    if None in sizes:
        sizes = [getattr(loader, "batch_size", None) or 1, change["micro_batch"]]
        note = "; ".join(filter(None, ("samples per batch as the loader says", note)))
    return VariantTimes(name="changed", baseline="full", pairs=times.pairs, samples=(sizes[1] or 1) / (sizes[0] or 1), note=note)


class _ActiveSide:
    """Which side runs: its change is in force only then."""

    def __init__(self, saved: SavedState) -> None:
        self._saved = saved
        self._on: _StepSide | None = None
        self._changes = ExitStack()

    def enter(self, side: "_StepSide") -> None:
        """Switch to a side. The workers of the other one are given time to fill their queue first."""
        if self._on is side:
            return
        if self._on is not None:
            self._changes.close()
            self._on.feed.wait_until_full(1.0)
        self._saved.restore_weights()
        self._on = side
        self._changes.enter_context(side.on())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._changes.close()


class _StepSide:
    """A step in this process, with or without the change."""

    def __init__(self, active: _ActiveSide, step: Callable[[Any], Any], feed: Feed, on: Callable[[], AbstractContextManager[Any]]) -> None:
        self._active, self._step, self.feed, self.on = active, step, feed, on
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
        """Switch to this side, and take the batches that are ready."""
        self._active.enter(self)
        self.feed.drain()
