"""Fitting: what changes of a spec do to its memory, the largest micro-batch that fits a device, and the cheapest changes that make it fit.

Every answer is a fake run of the changed program, or exact between fake runs (`memory.family`); nothing is a line through peaks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.device import Device
from workbench.estimating import estimate_memory
from workbench.memory.breakdown import MemoryBreakdown
from workbench.memory.family import Family
from workbench.memory.whatif import MaxMicroBatch, MemoryComparison, MemoryLadder, MemoryRung, WhatIf, combinations, needed
from workbench.spec import RunSpec

MARGIN = 0.05
"""Share of a device that stays free unless said otherwise: fragmentation grows over a run, and a driver's share of the memory varies."""
NODES = (7, 11)
"""Micro-batches of the two fake runs that tell all others; small ones are avoided, since programs and kernels treat them specially."""
ATTEMPTS = 3
"""Pairs of runs, each near the answer of the one before, until one is right; after them the answer is looked for by single runs."""
HALVINGS = 3
"""The ladder splits a micro-batch up to 2 to the power of it."""
NEGLIGIBLE = 1.03
"""Times of two programs that differ by less count as the same: a roofline knows no better."""


def compare_memory(
    target: Any,
    changes: Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]],
    *,
    device: str | Device = "cuda",
    margin: float = MARGIN,
    **options: Any,
) -> MemoryComparison:
    """Predict what each of several changes does to the memory of a step.

    Args:
        target: as `estimate_memory` takes it.
        changes: one mapping of knobs per row, `[{"precision": "amp_bf16"}, {"checkpointing": "full", "micro_batch": 64}]`; or knob →
            values, one row each, `{"optimizer": ["sgd", "adamw"], "sequence": [512, 1024]}`. Knobs are those of a RunSpec, and the
            arguments `sequence`, `image`, `world_size` and `optimizer` of `estimate_memory`.
        device: as there; a name or a Device adds whether it fits.
        margin: share of the device that stays free.
        options: of all rows, as `estimate_memory` takes them.

    Raises:
        ValueError: no change, a knob that does not exist, or a baseline that cannot be estimated. A change that cannot be estimated is a
            row that says why.
    """
    rows = _rows(changes)
    found = [WhatIf(changes={}, breakdown=estimate_memory(target, device=device, **options))]
    for change in rows:
        try:
            found.append(WhatIf(changes=change, breakdown=_changed(target, change, device=device, **options)))
        except ValueError as error:
            found.append(WhatIf(changes=change, breakdown=None, complaint=str(error)))
    room = None if device in ("cuda", "cpu") else _room(_device(device), margin)
    return MemoryComparison(rows=tuple(found), capacity=room, device=device.name if isinstance(device, Device) else device)


def max_micro_batch(target: Any, device: str | Device, *, margin: float = MARGIN, **options: Any) -> MaxMicroBatch:
    """The largest micro-batch that fits a device, without the device.

    Two fake runs tell the memory of every batch; the answer and the next larger one are run once more to be sure. Where the program
    depends on the batch, every step of the bisection is a fake run.

    Args:
        target: as `estimate_memory` takes it.
        device: a name, such as "A100-80GB", or a Device.
        margin: share of the device that stays free.
        options: as `estimate_memory` takes them.

    Raises:
        ValueError: an unknown device, or a target that cannot be estimated.
    """
    where = _device(device)
    limit = _room(where, margin)
    runs = _Runs(target, device, options)
    largest = _largest(runs, limit)
    return MaxMicroBatch(
        micro_batch=largest,
        breakdown=runs.at(max(1, largest)),
        next=runs.at(largest + 1),
        device=where.name,
        capacity=limit,
        runs=runs.count,
    )


class _Runs:
    """Fake runs at several micro-batches, each made once.

    Attributes:
        count: how many were made.
    """

    def __init__(self, target: Any, device: str | Device, options: Mapping[str, Any]) -> None:
        self._target, self._device, self._options = target, device, options
        self._seen: dict[int, MemoryBreakdown] = {}
        self.count = 0

    def at(self, batch: int) -> MemoryBreakdown:
        """The memory with so many samples."""
        if batch not in self._seen:
            self.count += 1
            self._seen[batch] = estimate_memory(self._target, device=self._device, **{**self._options, "micro_batch": batch})
        return self._seen[batch]

    def family(self, batches: Sequence[int]) -> Family | None:
        """That of every batch, from runs at two; None where they did not do the same."""
        self.count += len(batches)
        return batch_family(self._target, batches, device=self._device, **self._options)

    def bracket(self, limit: int) -> tuple[int, int | None]:
        """The largest number seen to fit (0: none) and the smallest above it seen not to (None: none)."""
        fitting = max((batch for batch, found in self._seen.items() if needed(found) <= limit), default=0)
        return fitting, min((batch for batch in self._seen if batch > fitting), default=None)


def _largest(runs: _Runs, limit: int) -> int:
    """The largest micro-batch within so many bytes; 0 if not even 1 is."""

    def fits(batch: int) -> bool:
        return needed(runs.at(batch)) <= limit

    nodes = NODES
    for _ in range(ATTEMPTS):
        family = runs.family(nodes)
        if family is None:
            break
        beside = _beside(runs.at(nodes[0]))
        guess = family.largest(limit, lambda batch, family=family, beside=beside: family.reserved(batch) + beside)  # type: ignore[misc]
        if (not guess or fits(guess)) and not fits(guess + 1):
            return guess
        nodes = (max(2, guess), max(2, guess) + NODES[1] - NODES[0])  # the program is another there: ask it there
    low, high = runs.bracket(limit)
    if high is None:
        high = max(1, 2 * low)
        while fits(high):
            low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def memory_ladder(target: Any, device: str | Device, *, margin: float = MARGIN, **options: Any) -> MemoryLadder:
    """The cheapest changes, in time, that make a step fit a device.

    All sets of changes that make sense are tried in the order of their cost, until one fits; the cost of a set is the product of its
    changes' own, each the roofline of its fake run over that of the step as it is.

    Args:
        target: as `estimate_memory` takes it.
        device: a name, such as "RTX-4090", or a Device.
        margin: share of the device that stays free.
        options: as `estimate_memory` takes them.

    Raises:
        ValueError: an unknown device, or a target that cannot be estimated.
    """
    climb = _Climb(target, _device(device), margin, options)
    return climb.ladder()


class _Climb:
    """The search for the cheapest set of changes."""

    def __init__(self, target: Any, device: Device, margin: float, options: Mapping[str, Any]) -> None:
        self._target, self._device, self._options = target, device, options
        self._margin, self._limit = margin, _room(device, margin)
        self._seen: dict[tuple[int, ...], tuple[MemoryBreakdown, float] | None] = {}
        self._moves: list[tuple[Mapping[str, Any], str]] = []

    def ladder(self) -> MemoryLadder:
        start = self._run(())
        assert start is not None
        rungs: list[MemoryRung] = []
        if needed(start[0]) > self._limit:
            self._moves = _moves(self._spec(), self._device)
            rungs = self._rungs(self._needed(self._cheapest()))
        return MemoryLadder(
            start=start[0],
            rungs=tuple(rungs),
            device=self._device.name,
            capacity=self._limit,
            margin=self._margin,
            tried=sum(found is not None for found in self._seen.values()),
        )

    def _cheapest(self) -> tuple[int, ...]:
        """Places of the moves that fit at the least cost; where nothing fits, of those that need least."""
        alone = [self._slowdown((), (place,)) for place in range(len(self._moves))]
        price = {chosen: math.prod(alone[place] for place in chosen) for chosen in combinations(move for move, _ in self._moves)}
        smallest: tuple[int, tuple[int, ...]] = (needed(self._found(())[0]), ())
        for chosen in sorted(price, key=lambda chosen: (price[chosen], len(chosen))):
            found = self._run(chosen)
            if found is None or math.isnan(price[chosen]):
                continue
            if needed(found[0]) <= self._limit:
                return chosen
            smallest = min(smallest, (needed(found[0]), chosen))
        return smallest[1]

    def _needed(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """The moves without those that it fits without, and in no more time."""
        for place in chosen:
            rest = tuple(other for other in chosen if other != place)
            found = self._run(rest)
            if found and needed(found[0]) <= self._limit and found[1] <= NEGLIGIBLE * self._found(chosen)[1]:
                return self._needed(rest)
        return chosen

    def _rungs(self, chosen: tuple[int, ...]) -> list[MemoryRung]:
        """The moves in the order of their cost, each on top of those before it."""
        done: tuple[int, ...] = ()
        rungs = []
        for place in sorted(chosen, key=lambda place: self._slowdown((), (place,))):
            now = tuple(sorted((*done, place)))
            change, price = self._moves[place]
            if self._run(now) is None:  # only together with a later one
                rungs.append(MemoryRung(change=change, breakdown=self._found(done)[0], slowdown=1.0, price=price))
                continue
            slowdown = self._slowdown(done, now)
            rungs.append(MemoryRung(change=change, breakdown=self._found(now)[0], slowdown=slowdown, price=price))
            done = now
        return rungs

    def _slowdown(self, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        one, other = self._run(before), self._run(after)
        return math.nan if one is None or other is None else other[1] / one[1]

    def _found(self, chosen: tuple[int, ...]) -> tuple[MemoryBreakdown, float]:
        found = self._run(chosen)
        assert found is not None
        return found

    def _run(self, chosen: tuple[int, ...]) -> tuple[MemoryBreakdown, float] | None:
        """Breakdown and seconds per sample with some moves; None where they cannot be had together."""
        if chosen not in self._seen:
            changes = {name: value for place in chosen for name, value in self._moves[place][0].items()}
            try:
                self._seen[chosen] = timed_estimate(self._target, device=self._device, **{**self._options, **changes})
            except ValueError:
                if not chosen:
                    raise
                self._seen[chosen] = None
        return self._seen[chosen]

    def _spec(self) -> RunSpec:
        from workbench.estimate.plan import plan_of

        return plan_of(self._target, device=self._device, **self._options).spec


def _moves(spec: RunSpec, device: Device) -> list[tuple[Mapping[str, Any], str]]:
    """Changes that may save memory, each with its price in words."""
    moves: list[tuple[Mapping[str, Any], str]] = []
    if spec.optimizer not in ("fused", "foreach") and "fused" not in (spec.optimizer or ""):
        moves.append(({"optimizer": _fused(spec.optimizer)}, "the same update in one kernel"))
    if spec.precision == "fp32":
        name = "amp_bf16" if "bf16" in device.flops_per_sec else "amp_fp16"
        moves.append(({"precision": name}, "products in 16 bits; check the loss"))
    if spec.parallel == "ddp" and spec.nproc_per_node > 1:
        moves.append(({"gradient_as_bucket_view": True}, "gradients must not be replaced by the step"))
        moves.append(({"parallel": "zero1"}, "each rank updates its part, and sends it to all"))
        moves.append(({"parallel": "fsdp"}, "half as much communication again: weights are gathered twice"))
    for power in range(1, HALVINGS + 1):
        if spec.micro_batch % 2**power == 0:
            change = {"micro_batch": spec.micro_batch >> power, "accumulation": spec.accumulation << power}
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


def timed_estimate(target: Any, *, device: Device, **options: Any) -> tuple[MemoryBreakdown, float]:
    """The memory of a step, and the seconds per sample that the device needs for it at its roofline; both of one fake run.

    Args:
        target: as `estimate_memory` takes it.
        device: whose datasheet counts.
        options: as `estimate_memory` takes them.

    Raises:
        ValueError: as `estimate_memory`.
    """
    from workbench.estimate.plan import plan_of
    from workbench.estimate.roofline import Roofline
    from workbench.estimating import breakdown_of, record

    plan = plan_of(target, device=device, **options)
    rooflines: list[Roofline] = []  # one per attempt; the last one counts

    def watch() -> Roofline:
        rooflines.append(Roofline(device))
        return rooflines[-1]

    log, rank = record(plan, watch=watch)
    samples = plan.spec.micro_batch * plan.spec.accumulation * plan.steps
    return breakdown_of(plan, log, rank), rooflines[-1].seconds / samples


def batch_family(target: Any, batches: Sequence[int] = NODES, *, device: str | Device = "cuda", **options: Any) -> Family | None:
    """The memory of every micro-batch, from two fake runs; None where the program depends on the batch.

    Args:
        target: as `estimate_memory` takes it.
        batches: micro-batches of the runs.
        device: as there.
        options: as there.

    Raises:
        ValueError: as `estimate_memory`.
    """
    from workbench.estimate.plan import plan_of
    from workbench.estimating import record

    logs = {batch: record(plan_of(target, device=device, **{**options, "micro_batch": batch}))[0] for batch in batches}
    try:
        return Family(logs)
    except ValueError:
        return None


def _changed(target: Any, change: Mapping[str, Any], **options: Any) -> MemoryBreakdown:
    return estimate_memory(target, **{**options, **change})


def _rows(changes: Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]]) -> list[Mapping[str, Any]]:
    if isinstance(changes, Mapping):
        listed = {
            name: [values] if isinstance(values, str) or not isinstance(values, Sequence) else values for name, values in changes.items()
        }
        rows: list[Mapping[str, Any]] = [{name: value} for name, values in listed.items() for value in values]
    else:
        rows = list(changes)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(
            f"compare_memory(changes={changes!r:.80}): give what is to be compared: [{{'precision': 'amp_bf16'}}, {{'micro_batch': 8}}] "
            "or {'micro_batch': [8, 16, 32]}"
        )
    return rows


def _values(values: Any) -> Sequence[Any]:
    return values if isinstance(values, Sequence) and not isinstance(values, str) else [values]


def _device(device: str | Device) -> Device:
    if isinstance(device, str) and device in ("cuda", "cpu"):
        raise ValueError(f"device={device!r} has no capacity of its own: name one, such as 'H200' or 'RTX-4090', or make a wb.Device")
    return device if isinstance(device, Device) else Device.named(device)


def _room(device: Device, margin: float) -> int:
    """Bytes that may be used."""
    if not 0 <= margin < 1:
        raise ValueError(f"margin={margin}: a share from 0 to below 1 of the device is kept free; 0.05 is five percent")
    return int(device.memory * (1 - margin))


def _beside(breakdown: MemoryBreakdown) -> int:
    """Bytes that a process takes on the device beside what the allocator reserves."""
    return breakdown.outside.mid if breakdown.outside else 0
