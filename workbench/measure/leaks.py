"""Leaks: memory that grows from step to step, by who made it and by the Python variable that keeps it alive."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from workbench import display, units
from workbench.measure.found import name_of as name_of_step
from workbench.measure.graph import saved
from workbench.measure.memory import freed_by_collector, recorded
from workbench.measure.referrers import Holding, Referrers, living
from workbench.measure.storages import storages
from workbench.memory.log import FREE, MARK, MemoryLog, Record

LEAST_STEPS = 5
"""Steps that it takes: the first is left out, as the optimizer's states are born in it, and the last two may yet let go."""
OLD = 2
"""Steps after which what was born in a step should be gone."""
REGULAR = 0.75
"""Fraction of the steps in which something has to be left behind to count as a leak: more than half, and one may be an exception."""
SMALL = 1024
"""Bytes per step below which only what drags a graph along is worth a word: a list of losses as numbers is no leak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """What one holder keeps alive, more of it after each step."""

    per_step: float
    """Bytes that each step leaves behind."""
    tensors: float
    """Tensors that each step leaves behind."""
    holder: str | None
    """The variable that keeps them, in words; None = none was found: it lies outside of Python's reach, or in a running frame's stack."""
    operator: str
    """That made most of it."""
    module: str
    """Whose forward that was; "" = the model itself or none."""
    graph: bool
    """Does what is held lead to a graph, which lives as long?"""

    def __str__(self) -> str:
        held = self.holder or "a holder that was not found"
        count = f"{self.tensors:.0f} tensor{'s' * (round(self.tensors) != 1)}"
        how = ", and a graph with them" if self.graph else ""
        where = f" in {self.module}" if self.module else ""
        return f"{held}: {units.bytes_(self.per_step)} more with each step ({count}, made by {self.operator or 'no operator'}{where}){how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaks(display.Shown):
    """What grows; nothing, if the step is healthy. It is true if something does."""

    title: str
    """What was run."""
    found: tuple[Leak, ...] = ()
    """The largest first."""
    after: Sequence[int] = field(default=())
    """Bytes held at the end of each step."""
    cyclic: float = 0
    """Bytes that each step leaves behind in reference cycles, which Python's collector frees; it is off while this is measured."""

    def __bool__(self) -> bool:
        return bool(self.found)

    @property
    def per_step(self) -> float:
        """Bytes that each step leaves behind."""
        return sum(leak.per_step for leak in self.found)

    @property
    def hint(self) -> str | None:
        """What to do."""
        if any(leak.graph for leak in self.found):
            return "Keep numbers, not tensors with a graph: loss.item() or tensor.detach(); evaluate under torch.no_grad()."
        if any(leak.holder for leak in self.found):
            return "Let go of it: clear it after each step, or give it a limit, such as collections.deque(maxlen=…)."
        return _UNKNOWN if self.found else None

    @property
    def table(self) -> display.Table:
        """One row per leak."""
        rows = [
            [leak.holder or "not found", units.bytes_(leak.per_step), f"{leak.tensors:.0f}", leak.operator or "–", leak.module or "–"]
            for leak in self.found
        ]
        grown = f"held after the steps: {', '.join(units.bytes_(size) for size in self.after)}"
        if self.cyclic:
            grown += f"; {units.bytes_(self.cyclic)} of each step lie in reference cycles: no leak, but freed by gc only"
        note = f"{grown}. {self.hint}" if self.found else f"nothing grows; {grown}"
        columns = ("held by", "per step", "tensors", "operator", "module")
        return display.Table(columns=columns, rows=rows, title=f"Leaks of {self.title}", note=f"measured: {note}")

    def to_frame(self) -> Any:
        """A DataFrame with one row per leak; bytes per step."""
        names = ("holder", "per_step", "tensors", "operator", "module", "graph")
        return display.frame([{name: getattr(leak, name) for name in names} for leak in self.found], columns=names)


_UNKNOWN = (
    "Who holds it was not found: no Python variable leads to it. A numpy array over a tensor's memory or an extension may; leave out parts "
    "of the step until it stops growing, beginning with the operator and the module that are named here."
)


def find(step: Callable[[Any], Any], loader: Iterable[Any], *, model: Any = None, optimizer: Any = None, steps: int = 8) -> Leaks:
    """Take some steps, look for what is left behind, and put everything back.

    Args:
        step: `step(batch)` does one optimizer step.
        loader: gives the batches.
        model: the module, or several; None = found behind the step.
        optimizer: likewise.
        steps: how many.

    Raises:
        DiagnoseError: step cannot be called so.
        ValueError: too few steps; the loader is empty or is none.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < LEAST_STEPS:
        raise ValueError(f"steps={steps!r}: a whole number of at least {LEAST_STEPS} is allowed: what lives on for two steps is looked for")
    before = {storage._cdata for tensor in living() for storage in storages(tensor)}  # such as the batches of a list
    with recorded(step, loader, model=model, optimizer=optimizer, steps=steps) as (recorder, _, _, models, _):
        old = {index for address, index in recorder._live.items() if address in before}
        cyclic = freed_by_collector(recorder)
        alive = dict(recorder._live)
        left = left_behind(recorder.log, but=old | cyclic)
        waiting = left_behind(recorder.log, but=old | set(alive.values()))
        suspects = {index for indices in left.values() for index in indices}
        names = {module: name for one in models.models for name, module in one.named_modules()}
        holders = _holders({address: index for address, index in alive.items() if index in suspects}, Referrers(names))
        found = leaks_of(recorder.log, left, holders)
    in_cycles = sum(leak.per_step for leak in leaks_of(recorder.log, waiting, {}))
    return Leaks(title=name_of_step(step), found=found, after=tuple(held_after(recorder.log).values()), cyclic=in_cycles)


_TO_STAY = ("parameter", "buffer", "gradient", "optimizer_state")


def left_behind(log: MemoryLog, but: Collection[int] = ()) -> dict[int, list[int]]:
    """Step → indices of the records that were born in it and live after two more; not of the first step, in which much is born to stay.

    Args:
        log: of the steps.
        but: records that are not meant: those of what lived before.
    """
    last = max((mark.step for mark in log.marks), default=0)
    found: dict[int, list[int]] = {step: [] for step in range(1, last - OLD + 1)}
    for index, record in enumerate(log.records):
        if record.step in found and record.died is None and record.size and record.category not in _TO_STAY and index not in but:
            found[record.step].append(index)
    return found


def held_after(log: MemoryLog) -> dict[int, int]:
    """Step → bytes that were held when it had ended."""
    sizes: dict[int, int] = {}
    held, after = 0, {}
    for event in log.events:
        if event.kind == MARK:
            mark = log.marks[event.index]
            if mark.phase == "end":
                after[mark.step] = held
            continue
        size = 0 if event.kind == FREE else event.size
        held += size - sizes.get(event.index, 0)
        sizes[event.index] = size
    return after


def leaks_of(log: MemoryLog, left: Mapping[int, Sequence[int]], holders: Mapping[int, Holding]) -> tuple[Leak, ...]:
    """What is left behind regularly, by holder.

    Args:
        log: of the steps.
        left: step → records that it left behind.
        holders: record → who keeps it alive, where that was found.
    """
    groups: dict[Holding | None, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for step, indices in left.items():
        for index in indices:
            groups[holders.get(index)][step].append(log.records[index])
    leaks = []
    for holding, steps in groups.items():
        if len(steps) < REGULAR * len(left) or (holding is not None and holding.bounded):
            continue
        records = [record for some in steps.values() for record in some]
        per_step = statistics.fmean(sum(record.size for record in steps.get(step, ())) for step in left)
        if per_step < SMALL and not (holding is not None and holding.graph):
            continue
        most = max(records, key=lambda record: record.size)
        leaks.append(
            Leak(
                per_step=per_step,
                tensors=len(records) / len(left),
                holder=holding.words if holding else None,
                operator=most.op,
                module=most.module,
                graph=bool(holding and holding.graph),
            )
        )
    return tuple(sorted(leaks, key=lambda leak: -leak.per_step))


def _holders(addresses: Mapping[int, int], referrers: Referrers) -> dict[int, Holding]:
    """Record → who keeps it alive: the variable of a tensor that has the storage, or from which a graph leads to it.

    Args:
        addresses: of a storage → its record.
        referrers: to ask.
    """
    if not addresses:
        return {}
    tensors = living()
    own = {id(tensor): {*_indices(tensor, addresses)} for tensor in tensors}
    behind = {
        id(tensor): {i for _, one in saved([tensor]) for i in _indices(one, addresses)} for tensor in tensors if tensor.grad_fn is not None
    }
    holdings = referrers.holdings([tensor for tensor in tensors if own[id(tensor)] or behind.get(id(tensor))])
    found: dict[int, Holding] = {}
    for indices in (own, behind):  # who has the tensor itself comes first
        for tensor, mine in indices.items():
            if tensor in holdings:
                found.update(dict.fromkeys(mine - found.keys(), holdings[tensor]))
    return found


def _indices(tensor: Tensor, addresses: Mapping[int, int]) -> list[int]:
    return [addresses[storage._cdata] for storage in storages(tensor) if storage._cdata in addresses]
