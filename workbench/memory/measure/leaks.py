"""Finds memory that grows from step to step: the operator and module that made it, and the Python variable that keeps it alive."""

import gc
import statistics
import sys
import types
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from workbench.core import gc as collector
from workbench.core import units
from workbench.core.checks import whole_number
from workbench.core.display import table as display
from workbench.core.package import is_workbench
from workbench.core.progress import Waiting
from workbench.harness.discover import name_of as name_of_step
from workbench.memory.analysis.log import FREE, MARK, MemoryLog, Record
from workbench.memory.measure.at_oom import saved
from workbench.memory.measure.memory import freed_by_collector, recorded
from workbench.memory.measure.recorder import storages

MOST_DEEP = 10
"""Depth to which nested containers are followed."""
MOST_SEEN = 20_000
"""Most objects whose referrers are searched."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A variable that keeps tensors alive."""

    words: str
    """The variable, its kind and where it is."""
    bounded: bool = False
    """Is it a queue with a largest length?"""
    graph: bool = False
    """Does it hold an autograd graph, which lives as long as it does?"""


def living() -> list[Tensor]:
    """All tensors that Python knows of, without those that have no memory. What was frozen is thawed, and `Referrers` see it."""
    # not isinstance, which asks proxies what they are
    return [tensor for tensor in collector.live_objects() if issubclass(type(tensor), Tensor) and not tensor.is_meta]


def _is_module(name: str, module: object) -> bool:
    """Is it a module under its own name? multiprocessing makes `__mp_main__` another name of `__main__`."""
    return isinstance(module, types.ModuleType) and name != "__mp_main__"


@dataclass(slots=True)
class _Trail:
    """The path from tensors to an object that keeps them alive. It holds none of them: that would be a referrer as well."""

    roots: set[int]
    """The tensors, by id."""
    bounded: bool = False
    """Did it pass a queue with a largest length?"""
    kind: str = ""
    """Name of the object whose dictionary or variable it is."""
    key: str = ""
    """Its key in a dictionary."""
    place: int = -1
    """Of a variable among those that a function shares."""


class Referrers:
    """Finds the variables that hold tensors. Create and use it while the user's functions are still running.

    Each call of the garbage collector visits all live objects, so the referrers of all tensors are searched at once, level by level.
    """

    def __init__(self, names: Mapping[nn.Module, str] | None = None) -> None:
        self._names = names or {}
        self._modules = {id(vars(module)): name for name, module in list(sys.modules.items()) if _is_module(name, module)}
        self._locals: dict[int, tuple[str, str]] = {}
        for frame in _frames():
            if frame.f_code.co_name != "<module>":
                self._locals.update({id(value): (name, frame.f_code.co_name) for name, value in frame.f_locals.items()})

    def holdings(self, tensors: Iterable[Tensor]) -> dict[int, Holding]:
        """The nearest variable that leads to each tensor, by the tensor's id; those to which none leads are left out."""
        level: list[Any] = list(tensors)
        graphs = {id(tensor): tensor.grad_fn is not None for tensor in level}
        trails = {id(tensor): _Trail({id(tensor)}) for tensor in level}
        found: dict[int, Holding] = {}
        seen = {*trails, id(level)}
        for _ in range(MOST_DEEP):
            for value in level:
                if id(value) in self._locals:
                    name, function = self._locals[id(value)]
                    _resolve(found, trails[id(value)], f"{name} ({_kind(value)} in {function}())", graphs)
            level = [value for value in level if not trails[id(value)].roots <= found.keys()]
            if not level or len(seen) > MOST_SEEN:
                break
            seen.add(id(level))
            level, trails = self._above(level, trails, seen, found, graphs)
        return found

    def _above(
        self, level: list[Any], trails: dict[int, _Trail], seen: set[int], found: dict[int, Holding], graphs: dict[int, bool]
    ) -> tuple[list[Any], dict[int, _Trail]]:
        """The referrers of a level that have no name, and how they were come to."""
        above: dict[int, _Trail] = {}
        objects: list[Any] = []
        for referrer in gc.get_referrers(*level):
            if id(referrer) in seen or isinstance(referrer, types.FrameType | types.ModuleType) or _is_ours(referrer):
                continue
            for value in gc.get_referents(referrer):
                trail = trails.get(id(value))
                if trail is None:
                    continue
                if name := self._named(value, trail, referrer):
                    _resolve(found, trail, name, graphs)
                    continue
                if id(referrer) not in above:
                    above[id(referrer)] = _trail(value, trail, referrer)
                    objects.append(referrer)
                above[id(referrer)].roots |= trail.roots
        seen.update(above)
        return objects, above

    def _named(self, value: Any, trail: _Trail, referrer: Any) -> str | None:
        """The name that a referrer has for an object, if it is a variable or an attribute."""
        if isinstance(referrer, types.FunctionType):
            if referrer.__closure__ is value and trail.place >= 0 and not (referrer.__module__ or "").startswith("workbench."):
                return f"{referrer.__code__.co_freevars[trail.place]} ({trail.kind}, a variable around {referrer.__name__}())"
            return f"a default ({trail.kind}) of {referrer.__qualname__}()" if referrer.__defaults__ is value else None
        if isinstance(referrer, dict):
            module = self._modules.get(id(referrer))
            return None if module is None else f"{_key(referrer, value)} ({_kind(value)}, a global variable of {_file(module)})"
        attributes = getattr(referrer, "__dict__", None)
        if attributes is value:
            return f"{trail.key} ({trail.kind}, an attribute of {self._owner(referrer)})"
        if isinstance(attributes, dict) and (name := next((name for name, item in attributes.items() if item is value), None)):
            return f"{name} ({_kind(value)}, an attribute of {self._owner(referrer)})"
        return None

    def _owner(self, owner: Any) -> str:
        if isinstance(owner, type):
            return f"the class {owner.__name__}"
        name = self._names.get(owner) if isinstance(owner, nn.Module) else None
        return f"the module {name}, {_kind(owner)}" if name else _kind(owner)


def _resolve(found: dict[int, Holding], trail: _Trail, words: str, graphs: Mapping[int, bool]) -> None:
    for root in trail.roots - found.keys():
        found[root] = Holding(words, trail.bounded, graphs[root])


def _trail(value: Any, before: _Trail, referrer: Any) -> _Trail:
    trail = _Trail(set(before.roots), before.bounded or (isinstance(referrer, deque) and referrer.maxlen is not None), before.kind)
    if isinstance(referrer, dict):
        trail.key, trail.kind = _key(referrer, value), _kind(value)
    elif isinstance(value, types.CellType) and isinstance(referrer, tuple):
        trail.place = referrer.index(value)
    else:
        trail.kind = _kind(value)
    return trail


def _frames() -> Iterator[types.FrameType]:
    """Frames of the functions that are running, but for the workbench's own."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_workbench(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("workbench.") and not isinstance(value, nn.Module)


def _key(names: dict[Any, Any], value: Any) -> str:
    return next((str(name) for name, item in names.items() if item is value), "?")


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _file(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).name if file else "the notebook" if module == "__main__" else module


LEAST_STEPS = 5
"""Steps that it takes: the first is left out, as the optimizer makes its states in it, and the last two may yet let go."""
OLD = 2
"""Steps after which what was allocated in a step should be free."""
REGULAR = 0.75
"""Fraction of the steps in which something has to be left behind to count as a leak: more than half, and one may be an exception."""
SMALL = 1024
"""Bytes per step below which only leaks with a graph are reported: a list of losses as numbers is no leak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """What one holder keeps alive, more of it after each step."""

    per_step: float
    """Bytes that each step leaves behind."""
    tensors: float
    """Tensors that each step leaves behind."""
    holder: str | None
    """The variable that keeps them, in words; None = none was found: it is not a Python object, or on the stack of a running frame."""
    operator: str
    """Operator that allocated most of it."""
    module: str
    """Module in whose forward that was; "" = the model itself or none."""
    graph: bool
    """Does it hold an autograd graph, which lives as long?"""

    def __str__(self) -> str:
        held = self.holder or "a holder that was not found"
        count = f"{self.tensors:.0f} tensor{'s' * (round(self.tensors) != 1)}"
        how = ", and a graph with them" if self.graph else ""
        where = f" in {self.module}" if self.module else ""
        return f"{held}: {units.bytes_(self.per_step)} more with each step ({count}, made by {self.operator or 'no operator'}{where}){how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaks(display.Shown):
    """The leaks of a step; empty, and false, if there are none."""

    title: str
    """The step that was run."""
    found: tuple[Leak, ...] = ()
    """The largest first."""
    after: Sequence[int] = field(default=())
    """Bytes held at the end of each step."""
    cyclic: float = 0
    """Bytes that each step leaves behind in reference cycles, which Python's collector frees; it is off while this is measured."""
    notes: tuple[str, ...] = ()
    """Why fewer steps were taken than were asked for."""

    def __bool__(self) -> bool:
        return bool(self.found)

    @property
    def per_step(self) -> float:
        """Bytes that each step leaves behind."""
        return sum(leak.per_step for leak in self.found)

    @property
    def hint(self) -> str | None:
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
        return display.Table(
            columns=columns, rows=rows, title=f"Leaks of {self.title}", note=display.notes([f"measured: {note}", *self.notes])
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per leak; bytes per step."""
        names = ("holder", "per_step", "tensors", "operator", "module", "graph")
        return display.frame([{name: getattr(leak, name) for name in names} for leak in self.found], columns=names)


_UNKNOWN = (
    "Who holds it was not found: no Python variable leads to it. A numpy array over a tensor's memory or an extension may; leave out parts "
    "of the step until it stops growing, beginning with the operator and the module that are named here."
)


def find(
    step: Callable[[Any], Any],
    loader: Iterable[Any],
    *,
    model: Any = None,
    optimizer: Any = None,
    steps: int = 8,
    line: Waiting | None = None,
) -> Leaks:
    """Take some steps, look for what is left behind, and put everything back.

    Raises:
        DiagnoseError: step cannot be called so.
        ValueError: too few steps, also where the budget ends them; the loader is empty or is none.
    """
    whole_number("steps", steps, least=LEAST_STEPS, also=": what lives on for two steps is looked for")
    before = {storage._cdata for tensor in living() for storage in storages(tensor)}  # such as the batches of a list
    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "steps": steps, "line": line, "least": LEAST_STEPS}
    with recorded(step, loader, **options) as (recorder, _, _, models, notes):
        old = {index for address, index in recorder._live.items() if address in before}
        cyclic = freed_by_collector(recorder)
        alive = dict(recorder._live)
        left = left_behind(recorder.log, but=old | cyclic)
        waiting = left_behind(recorder.log, but=old | set(alive.values()))
        suspects = {index for indices in left.values() for index in indices}
        names = {module: name for model in models.models for name, module in model.named_modules()}
        holders = _holders({address: index for address, index in alive.items() if index in suspects}, Referrers(names))
        found = leaks_of(recorder.log, left, holders)
    in_cycles = sum(leak.per_step for leak in leaks_of(recorder.log, waiting, {}))
    cut = tuple(note for note in notes if f"of {steps} steps" in note)
    after = tuple(held_after(recorder.log).values())
    return Leaks(title=name_of_step(step), found=found, after=after, cyclic=in_cycles, notes=cut)


_TO_STAY = ("parameter", "buffer", "gradient", "optimizer_state")


def left_behind(log: MemoryLog, but: Collection[int] = ()) -> dict[int, list[int]]:
    """Step → indices of the records allocated in it and alive after two more; not of the first step, much of which stays."""
    last = max((mark.step for mark in log.marks if mark.phase == "end"), default=0)  # one that Ctrl-C ended is none
    left: dict[int, list[int]] = {step: [] for step in range(1, last - OLD + 1)}
    for index, record in enumerate(log.records):
        if record.step in left and record.freed_at is None and record.size and record.category not in _TO_STAY and index not in but:
            left[record.step].append(index)
    return left


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
    """Record → who keeps it alive: the variable of a tensor that has the storage, or from which a graph leads to it."""
    if not addresses:
        return {}
    tensors = living()
    own = {id(tensor): {*_indices(tensor, addresses)} for tensor in tensors}
    behind = {
        id(tensor): {i for _, kept in saved([tensor]) for i in _indices(kept, addresses)}
        for tensor in tensors
        if tensor.grad_fn is not None
    }
    holdings = referrers.holdings([tensor for tensor in tensors if own[id(tensor)] or behind.get(id(tensor))])
    holders: dict[int, Holding] = {}
    for indices in (own, behind):  # who has the tensor itself comes first
        for tensor, mine in indices.items():
            if tensor in holdings:
                holders.update(dict.fromkeys(mine - holders.keys(), holdings[tensor]))
    return holders


def _indices(tensor: Tensor, addresses: Mapping[int, int]) -> list[int]:
    return [addresses[storage._cdata] for storage in storages(tensor) if storage._cdata in addresses]
