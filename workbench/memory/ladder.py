"""Searches the changes that make a step fit a device at the least cost in time (`memory_ladder`)."""

import bisect
import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from workbench.core import units
from workbench.core.device import Device
from workbench.core.progress import predicts, tick
from workbench.core.synonyms import accept_synonyms
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.fit import MARGIN, device_of, is_unnamed, ranks_here, usable_memory
from workbench.memory.analysis.whatif import MemoryLadder, MemoryRung, combinations, needed
from workbench.memory.api import estimate_memory
from workbench.runs.spec import RunSpec
from workbench.runs.target import device_or_batch
from workbench.runs.task import Task

if TYPE_CHECKING:
    from workbench.memory.estimate.plan import Plan
    from workbench.memory.estimate.roofline_time import Roofline

PARTS = (2, 4, 8)
"""Parts into which the ladder splits a micro-batch, or the next larger numbers that divide it. Where that is not enough, it is also split
into as many parts as it takes, and twice as many."""
MICRO_STEPS = 64
"""Most micro-batches of a dry run: further ones need the same memory, and the update's share of the time of a sample is small by then."""
LAST = 1e6
"""Stands for a price in time that no roofline has, so that such a change comes after all others."""
NEGLIGIBLE = 1.03
"""Times that differ by less count as equal: a roofline is not more exact."""


@accept_synonyms
@device_or_batch
@predicts("dry runs of a step with what may make it fit")
def memory_ladder(
    target: Any, device: str | Device, *, capacity: int | None = None, margin: float = MARGIN, **options: Any
) -> MemoryLadder:
    """Find the changes that make a step fit a device at the least cost in time.

    All sensible sets of changes are tried in the order of their cost, until one fits. The cost of a set is the product of the costs of its
    changes; the cost of a change is the roofline time of its dry run over that of the unchanged step. If the device's roofline is not
    known, fewer changes count as cheaper. Offloading to host memory (`offload=`) is tried on a GPU only if nothing else fits, since its
    time is not predicted.

    Args:
        target: as in `estimate_memory`.
        device: a name, such as "RTX-4090", a Device, or "cpu"; with a capacity also "cuda" (any GPU).
        capacity: bytes available to one rank; None = the device's memory, of "cpu" this machine's, in equal shares for the ranks.
        margin: share of the device's memory that stays free.
        options: as in `estimate_memory`. As there, the batch may be the second argument, if `device=` is given by name.

    Raises:
        ValueError: an unknown device, or a target that cannot be estimated.
    """
    name, limit = usable_memory(device, capacity, margin, ranks=ranks_here(target, options))
    return _Climb(target, device, options, limit=limit).ladder(name, margin)


class _Climb:
    """The search for the cheapest set of changes."""

    def __init__(self, target: Any, device: str | Device, options: Mapping[str, Any], *, limit: int) -> None:
        self._target, self._options, self._limit = target, options, limit
        self._typed = device
        self._device = device if is_unnamed(device) else device_of(device)
        self._timed = isinstance(self._device, Device)
        self._seen: dict[tuple[int, ...], tuple[MemoryBreakdown, float] | None] = {}
        self._moves: list[tuple[Mapping[str, Any], str]] = []

    def ladder(self, name: str, margin: float) -> MemoryLadder:
        start = self._found(())
        rungs: list[MemoryRung] = []
        if needed(start[0]) > self._limit:
            device = self._device if isinstance(self._device, Device) else None
            self._moves = _moves(self._spec(), device)
            self._moves = _moves(self._spec(), device, self._parts(needed(start[0])))
            rungs = self._rungs(self._needed(self._chosen()))
        return MemoryLadder(
            start=start[0],
            rungs=tuple(rungs),
            device=name,
            capacity=self._limit,
            margin=margin,
            tried=sum(run is not None for run in self._seen.values()),
            tried_changes=tuple(units.knobs(move) for place, (move, _) in enumerate(self._moves) if self._run((place,))),
            advice="" if self._device == "cpu" else _advice(self._target),
        )

    def _parts(self, whole: int) -> int:
        """The fewest parts of the batch that fit without another change; where none do, the whole over the limit."""
        splits = [place for place, (move, _) in enumerate(self._moves) if "micro_batch" in move]
        if any((run := self._run((place,))) and needed(run[0]) <= self._limit for place in splits):
            return 1
        batch = self._spec().micro_batch
        tick("the fewest parts of the batch that fit")
        counts = [count for count in range(PARTS[-1] + 1, batch + 1) if batch % count == 0]
        first = bisect.bisect_left(counts, True, key=lambda count: self._fits({"micro_batch": batch // count, "accumulation": 2}))
        return counts[first] if first < len(counts) else math.ceil(whole / max(1, self._limit))

    def _fits(self, change: Mapping[str, Any]) -> bool:
        with contextlib.suppress(ValueError):
            return needed(estimate_memory(self._target, device=self._device, **{**self._options, **change})) <= self._limit
        return False

    def _chosen(self) -> tuple[int, ...]:
        """Places of the moves to make: without offloading, if they fit so."""
        best = self._cheapest(combinations(move for move, _ in self._moves))
        if self._device == "cpu" or self._spec().offload != "none":
            return best
        for offload in OFFLOADS:
            if needed(self._found(best)[0]) <= self._limit:
                break
            place = len(self._moves)
            self._moves.append(offload)
            if self._run((place,)) is None:
                del self._moves[place], self._seen[(place,)]
                continue
            sets = [(*chosen, place) for chosen in combinations(move for move, _ in self._moves[:place]) if not self._vain(chosen, place)]
            best = min(best, self._cheapest(sets), key=lambda chosen: needed(self._found(chosen)[0]))
        return best

    def _vain(self, chosen: tuple[int, ...], place: int) -> bool:
        """Do moves not go with offloading? The host has no fused kernel to gain from, and recomputing leaves few activations to move."""
        changed = {name for move in chosen for name in self._moves[move][0]}
        return {"optimizer": "optimizer", "activations": "checkpointing"}[
            self._moves[place][0]["offload"]
        ] in changed or "offload" in changed

    def _cheapest(self, sets: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Of these places of moves those that fit at the least cost; where nothing fits, those that need least."""
        if self._hopeless(sets):
            sizes = {chosen: needed(run[0]) for chosen, run in self._seen.items() if run is not None}
            return min(sizes, key=lambda chosen: (sizes[chosen], chosen))
        price = {chosen: math.prod(map(self._price, chosen)) for chosen in sets}
        smallest: tuple[int, tuple[int, ...]] = (needed(self._found(())[0]), ())
        for chosen in sorted(price, key=lambda chosen: (price[chosen], len(chosen))):
            run = self._run(chosen)
            if run is None or math.isnan(price[chosen]):
                continue
            if needed(run[0]) <= self._limit:
                return chosen
            smallest = min(smallest, (needed(run[0]), chosen))
        return smallest[1]

    def _hopeless(self, sets: list[tuple[int, ...]]) -> bool:
        """Does nothing fit? Where each move alone saves memory, only the sets that no further move can join need to be checked."""
        singles = [self._run((place,)) for place in range(len(self._moves))]
        least = needed(self._found(())[0])
        if any(run is None or not self._limit < needed(run[0]) <= least for run in singles):  # such as one that fits by itself
            return False
        widest = [chosen for chosen in sets if not any(set(chosen) < set(other) for other in sets)]
        return not any((run := self._run(chosen)) and needed(run[0]) <= self._limit for chosen in widest)

    def _price(self, place: int) -> float:
        """Times that a step takes with a move alone; 1 where no roofline is known, so that only the number of moves counts."""
        return LAST if "offload" in self._moves[place][0] else self._slowdown((), (place,)) if self._timed else 1.0

    def _needed(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """The moves without those that it fits without, and in no more time."""
        for place in chosen:
            rest = tuple(other for other in chosen if other != place)
            run = self._run(rest)
            if run and needed(run[0]) <= self._limit and run[1] <= NEGLIGIBLE * self._found(chosen)[1]:
                return self._needed(rest)
        return chosen

    def _rungs(self, chosen: tuple[int, ...]) -> list[MemoryRung]:
        """The moves in the order of their cost, each on top of those before it."""
        done: tuple[int, ...] = ()
        rungs = []
        for place in sorted(chosen, key=self._price):
            now = tuple(sorted((*done, place)))
            change, price = self._moves[place]
            if self._run(now) is None:  # only together with a later one
                rungs.append(MemoryRung(change=change, breakdown=self._found(done)[0], slowdown=1.0, price=price))
                continue
            slowdown = math.nan if "offload" in change else self._slowdown(done, now)
            rungs.append(MemoryRung(change=change, breakdown=self._found(now)[0], slowdown=slowdown, price=price))
            done = now
        return rungs

    def _slowdown(self, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        first, second = self._run(before), self._run(after)
        return math.nan if first is None or second is None else second[1] / first[1]

    def _found(self, chosen: tuple[int, ...]) -> tuple[MemoryBreakdown, float]:
        run = self._run(chosen)
        assert run is not None
        return run

    def _run(self, chosen: tuple[int, ...]) -> tuple[MemoryBreakdown, float] | None:
        """Breakdown and seconds per sample with some moves; None where they cannot be had together."""
        if chosen not in self._seen:
            changes = {name: value for place in chosen for name, value in self._moves[place][0].items()}
            tick(f"{self._number(chosen)}: {units.knobs(changes)}" if chosen else "a dry run of the step as it is")
            try:
                self._seen[chosen] = self._estimate({**self._options, **changes})
            except ValueError:
                if not chosen:
                    raise
                self._seen[chosen] = None
        return self._seen[chosen]

    def _number(self, chosen: tuple[int, ...]) -> str:
        """Which of how many dry runs comes now: a change alone, or several together, of which it takes some until one set fits."""
        count, done = len(self._moves), sum(len(other) > 1 for other in self._seen)
        if len(chosen) == 1:
            return f"change {len(self._seen) - done} of {count}"  # the step as it is has been seen
        return f"changes together, {done + 1} of at most {len(combinations(move for move, _ in self._moves)) - 1 - count}"

    def _estimate(self, options: Mapping[str, Any]) -> tuple[MemoryBreakdown, float]:
        times = options.get("accumulation", 1)
        if times > MICRO_STEPS:
            found, seconds = self._estimate({**options, "accumulation": MICRO_STEPS})
            title = found.title.replace(f"{MICRO_STEPS} micro", f"{times} micro")
            moment = found.peak_moment.replace(f" of {MICRO_STEPS}", f" of {times}")
            return replace(found, title=title, peak_moment=moment), seconds
        if isinstance(self._device, Device):
            return timed_estimate(self._target, device=self._device, typed=self._typed, **options)
        return estimate_memory(self._target, device=self._device, **options), math.nan

    def _spec(self) -> RunSpec:
        from workbench.memory.estimate.plan import plan_of

        return plan_of(self._target, device=self._device, **self._options).spec


OFFLOADS: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"offload": "optimizer"}, "the CPU updates: gradients go to the host in each step, weights come back"),
    ({"offload": "activations"}, "what the backward needs goes to the host and comes back"),
)
"""What can move to host memory, with its price in words."""


def _advice(target: Any) -> str:
    """What is left to try where nothing fits one device, as calls."""
    target, batch = (
        ("spec", "") if isinstance(target, RunSpec) else ("task", "") if isinstance(target, Task) else ("build", "batch=batch, ")
    )
    weights = "build().to(torch.bfloat16)" if batch else "…().to(torch.bfloat16) as the model of the task"
    return (
        f'next: more GPUs, wb.estimate_memory({target}, {batch}parallel="fsdp", nproc_per_node=8), of which wb.plan({target}, "DGX-H100", '
        f"{batch}gpus=8, global_batch=…) finds the fastest layout; or weights kept in bf16, lambda: {weights}"
    )


def _moves(spec: RunSpec, device: Device | None, parts: int = 1) -> list[tuple[Mapping[str, Any], str]]:
    """Changes that may save memory, each with its price in words, for a batch that fits in so many parts."""
    moves: list[tuple[Mapping[str, Any], str]] = []
    if spec.optimizer not in ("fused", "foreach") and "fused" not in (spec.optimizer or ""):
        moves.append(({"optimizer": _fused(spec.optimizer)}, "the same update in one kernel"))
    if spec.precision == "fp32":
        name = "amp_bf16" if device is None or "bf16" in device.flops_per_sec else "amp_fp16"
        moves.append(({"precision": name}, "products in 16 bits; check the loss"))
    if spec.parallel == "ddp" and spec.world_size > 1:
        moves.append(({"gradient_as_bucket_view": True}, "gradients must not be replaced by the step"))
        moves.append(({"parallel": "zero1"}, "each rank updates its part, and sends it to all"))
        moves.append(({"parallel": "fsdp"}, "half as much communication again: weights are gathered twice"))
    whole = spec.micro_batch
    wanted = (*PARTS, *((parts, 2 * parts) if parts > PARTS[-1] else ()))
    for count in sorted({next(n for n in range(min(least, whole), whole + 1) if whole % n == 0) for least in wanted} - {1}):
        change = {"micro_batch": whole // count, "accumulation": spec.accumulation * count}
        moves.append((change, "more and smaller kernels; statistics of BatchNorm over fewer samples"))
    if spec.checkpointing == "none":
        moves.append(({"checkpointing": "selective"}, "cheap operators run again in backward"))
        moves.append(({"checkpointing": "full"}, "every block runs again in backward"))
    return moves


def _fused(optimizer: str | None) -> str:
    """The same optimizer in its fused implementation."""
    if not optimizer:
        return "fused"
    name, _, rest = optimizer.partition("(")
    return f"{name}({rest[:-1]}, fused=True)" if rest else f"{name}(fused=True)"


def timed_estimate(target: Any, *, device: Device, typed: str | Device | None = None, **options: Any) -> tuple[MemoryBreakdown, float]:
    """The memory of a step, and the seconds per sample at the device's roofline, of one dry run; ValueError as `estimate_memory`.

    `typed` is the device as it was given, since a short name, such as "A100", has a note of its own.
    """
    from workbench.memory.estimate.plan import plan_of

    plan = plan_of(target, device=typed or device, **options)
    breakdown, floor = counted(plan, device)
    return breakdown, floor.seconds / (plan.spec.micro_batch * plan.spec.accumulation * plan.steps)


def counted(plan: "Plan", device: Device) -> "tuple[MemoryBreakdown, Roofline]":
    """The memory of a plan's steps, and their operators at a device's roofline, of one dry run; ValueError if it needs values."""
    from workbench.memory.api import breakdown_of, record
    from workbench.memory.estimate.roofline_time import Roofline

    rooflines: list[Roofline] = []  # one per attempt; the last one counts

    def watch() -> Roofline:
        rooflines.append(Roofline(device))
        return rooflines[-1]

    log, rank = record(plan, watch=watch)
    return breakdown_of(plan, log, rank), rooflines[-1]
