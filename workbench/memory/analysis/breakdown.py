"""MemoryBreakdown: what a training step's memory is made of at its peak, measured or predicted.

MemoryDifference compares two of them: a prediction less a measurement is the error of the prediction, group by group. The groups
(weights, gradients, activations, …) are defined in `core/vocabulary.py` (`MEMORY_PARTS`), their colours in `core/display/colors.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.device import Device
from workbench.core.display import table as display
from workbench.core.vocabulary import GROUPS, MEMORY_PHASES
from workbench.memory.analysis.caching_allocator import CachingAllocator
from workbench.memory.analysis.fit import MARGIN, Fit, fit
from workbench.memory.analysis.holders import Holder, Shares, holders_at, prefix, scratch_of, shares, telling, unsplit_of
from workbench.memory.analysis.log import MemoryLog
from workbench.memory.analysis.non_pytorch import NonPyTorchMemory, non_pytorch_memory
from workbench.memory.analysis.over_time import EMPTY, MemoryTimeline
from workbench.memory.analysis.replay import Numbers, Replay

CUDA_GRANULARITY = 512
"""Bytes that CUDA's caching allocator rounds each request up to a multiple of (c10/core/AllocatorConfig.h, kMinBlockSize)."""
ONE_STEP = "one step only: states that the optimizer makes in it may lack at its peak; the second step tells"
Kind = Literal["predicted", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MemoryBreakdown(display.Shown, JsonDataclass):
    """Bytes by group at the peak, what holds them, and how they change over the step."""

    kind: Kind
    """Whether it was "measured", or "predicted" without running anything for real."""
    title: str
    """Program that was run, in one line."""
    device: str
    """Whose memory: "cpu", "cuda" (any GPU) or a device's name, such as "H200"."""
    rank: int = 0
    """Rank of the process."""
    world_size: int = 1
    """Ranks of the job."""
    parameters: int
    """Bytes at the peak, as is every group: weights, gathered ones included."""
    gradients: int
    """Gradients, and the buckets in which they are reduced."""
    optimizer_states: int
    """Momenta, variances, master weights."""
    activations: int
    """Kept from forward for backward, or recomputed there."""
    temporaries: int
    """Temporary tensors of one phase."""
    inputs: int
    """The batch."""
    buffers: int
    """Running statistics and the like."""
    other: int
    """All other tensors."""
    reserved: int | None = None
    """Peak of the allocator's segments, measured or simulated; None where there is no caching allocator (CPU)."""
    outside: NonPyTorchMemory | None = None
    """What the process takes on the device beside them; None on a CPU."""
    peak_moment: str
    """When the peak is and what is then largest: "start of backward, step 2: log_softmax of the loss"."""
    first_step: int
    """Peak of the first step, in bytes; the optimizer makes its states in it."""
    steady: int
    """Peak of the later steps; of the first where there is no other."""
    largest: Mapping[str, int]
    """Group → the most that it ever held."""
    phases: Mapping[str, int]
    """Phase → its peak, all groups together."""
    holders: tuple[Holder, ...] = ()
    """Holders of the memory at the peak, largest first; they sum to `total`. Empty if they were not recorded."""
    timeline: MemoryTimeline = EMPTY
    """All groups over the steps."""
    retries: int = 0
    """How often the allocator, at its limit, freed its cache and tried again."""
    notes: tuple[str, ...] = ()
    """Notes for the reader."""

    @classmethod
    def from_log(
        cls,
        log: MemoryLog,
        *,
        kind: Kind,
        title: str,
        device: str = "cpu",
        granularity: int | None = None,
        reserved: int | None = None,
        outside: NonPyTorchMemory | None = None,
        scratch: int = 0,
        retries: int = 0,
        rank: int = 0,
        world_size: int = 1,
        notes: tuple[str, ...] = (),
    ) -> "MemoryBreakdown":
        """A breakdown from the storages of some steps.

        Args:
            log: what a recorder wrote.
            kind: "measured" or "predicted".
            title: what was run, in one line.
            device: "cpu", "cuda" or a device's name.
            granularity: each storage is rounded up to a multiple of so many bytes; None = 1 on a CPU, 512 elsewhere.
            reserved: the measured peak of reserved bytes; None = simulated for a prediction on a GPU, otherwise unknown.
            outside: bytes outside the allocator; None = what is known for the device, nothing on a CPU.
            scratch: bytes by which the measured peak exceeds the log's: memory inside kernels, counted as temporaries.
            retries: measured retries of the allocator.
            rank: rank of the process.
            world_size: ranks of the job.
            notes: notes for the reader, in addition to those of the log.

        Raises:
            ValueError: no such kind, a negative scratch, or a log without storages.
        """
        if kind not in get_args(Kind):
            raise ValueError(f"kind={kind!r}: a breakdown is {' or '.join(map(repr, get_args(Kind)))}")
        if scratch < 0:
            raise ValueError(f"scratch={scratch}: bytes of the measured peak above the log's; the log cannot hold more than was allocated")
        on_cpu = device == "cpu"
        fields = _read(
            log,
            granularity=granularity or (1 if on_cpu else CUDA_GRANULARITY),
            simulated=kind == "predicted" and not on_cpu,
            reserved=reserved,
            scratch=scratch,
            retries=retries,
            notes=notes,
        )
        if outside is None and not on_cpu:
            outside = non_pytorch_memory(device, world_size, fields["reserved"] or 0)
        return cls(kind=kind, title=title, device=device, rank=rank, world_size=world_size, outside=outside, **fields)

    @property
    def total(self) -> int:
        """Bytes in live tensors at the peak: the sum of the groups."""
        return sum(int(getattr(self, group)) for group in GROUPS)

    @property
    def allocated(self) -> int:
        """The same as `total`, under PyTorch's name."""
        return self.total

    @property
    def device_used(self) -> int | None:
        """What nvidia-smi would show for the process: reserved bytes plus those outside the allocator; None if either is unknown."""
        return None if self.reserved is None or self.outside is None else self.reserved + self.outside.mid

    def by_module(self, depth: int | None = None, group: str | None = None) -> Shares:
        """What each module holds at the peak.

        Args:
            depth: number of names in a module's path to distinguish (1 = the model's children); None = all.
            group: count only this group, such as "activations".

        Raises:
            ValueError: no such group, or a depth below 1.
        """
        if depth is not None and depth < 1:
            raise ValueError(f"depth={depth}: how many names of a module's path to look at, from 1 on; None for the whole path")
        return self._shares(lambda h: prefix(h.module, depth) or "outside any module", "module", group)

    def by_operator(self, group: str | None = None) -> Shares:
        """What each operator has allocated that is held at the peak.

        Raises:
            ValueError: no such group.
        """
        return self._shares(lambda h: h.operator or "no operator", "operator", group)

    def _shares(self, name: Any, key: str, group: str | None) -> Shares:
        if group is not None and group not in GROUPS:
            raise ValueError(f"no group {group!r}: memory is held as {', '.join(GROUPS)}")
        chosen = [h for h in self.holders if group is None or h.group == group]
        what = (group or "memory").replace("_", " ").capitalize()
        return shares(chosen, name, key, f"{what} by {key}: {self.title}", self.headline)

    def fits(self, device: str | Device | int, margin: float = MARGIN) -> Fit:
        """Whether the step fits a device.

        Args:
            device: a name that `Device.named` knows, a Device, or bytes.
            margin: fraction 0..1 of its memory that stays free.

        Raises:
            ValueError: an unknown name; a margin outside 0..1; a GPU, for a breakdown of a CPU's memory.
        """
        if isinstance(device, int):
            return self._fit(self.outside, "", device, margin)
        known = Device.named(device) if isinstance(device, str) else device
        if self.device == "cpu":
            raise ValueError(
                f"this is memory as a CPU holds it ({self.title}); a GPU rounds, reserves and computes in another way. "
                f"Predict it: wb.estimate_memory(…, device={known.name!r}); or ask about a number of bytes: fits({known.memory})"
            )
        outside = non_pytorch_memory(known.name, self.world_size, self.reserved or 0) if self.device == "cuda" else self.outside
        return self._fit(outside, known.name, known.memory, margin)

    def _fit(self, outside: NonPyTorchMemory | None, name: str, capacity: int, margin: float) -> Fit:
        """Bytes reserved plus bytes outside the allocator, if any are reserved; else bytes allocated."""
        if self.reserved is None:
            return fit(self.total, None, name, capacity, margin)
        return fit(self.reserved, outside, name, capacity, margin)

    def __sub__(self, other: "MemoryBreakdown") -> "MemoryDifference":
        if not isinstance(other, MemoryBreakdown):
            return NotImplemented
        return MemoryDifference(self, other)

    @property
    def headline(self) -> str:
        """What the numbers are, in a few words."""
        where = f" of rank {self.rank} of {self.world_size}" if self.world_size > 1 else ""
        return f"{self.kind} for {self.device}{where}, at the peak ({self.peak_moment})"

    @property
    def caption(self) -> str:
        """All notes on the numbers; `outside.source` is the source of the bytes outside."""
        text = f"{self.headline}; first step {units.bytes_(self.first_step)}, later steps {units.bytes_(self.steady)}"
        if self.outside:
            text += f"; outside of the allocator {units.bytes_(self.outside.low)} … {units.bytes_(self.outside.high)}"
        if self.retries:
            text += f"; the allocator ran into the limit and gave its cache back {self.retries} times"
        return display.notes([text, *self.notes])

    def _none_yet(self, group: str) -> str:
        """Why a step that has gradients has none at its peak: they are made later, in the backward."""
        before = self.peak_moment.partition(",")[0].partition(" of micro-step")[0].endswith(("forward", "backward"))
        return ", none yet" if group == "gradients" and before and not self.gradients and self.largest[group] else ""

    @property
    def _on_device(self) -> list[tuple[str, int]]:
        """The sums that a device has beside what is allocated, those that are known."""
        sums = {"reserved": self.reserved, "outside": self.outside.mid if self.outside else None, "device_used": self.device_used}
        return [(name, held) for name, held in sums.items() if held is not None]

    @property
    def table(self) -> display.Table:
        """One row per group at the peak, then three sums that are easily confused: allocated, reserved, device used."""
        rows = [
            [
                g.replace("_", " "),
                units.bytes_(getattr(self, g)) + self._none_yet(g),
                units.percent(getattr(self, g) / self.total),
                units.bytes_(self.largest[g]),
            ]
            for g in GROUPS
        ]
        rows.append(["allocated", units.bytes_(self.total), units.percent(1.0), units.bytes_(self.total)])
        for name, held in self._on_device:
            rows.append([name.replace("_", " "), units.bytes_(held), units.MISSING, units.MISSING])
        columns = ("memory", "at the peak", "of allocated", "largest over time")
        return display.Table(columns=columns, rows=rows, title=self.title, note=self.caption)

    def to_frame(self) -> Any:
        """A DataFrame with one row per group and sum, in bytes: at the peak, and the largest over time."""
        rows = [{"memory": group, "at_peak": getattr(self, group), "largest": self.largest[group]} for group in GROUPS]
        rows.append({"memory": "allocated", "at_peak": self.total, "largest": self.total})
        rows += [{"memory": name, "at_peak": held, "largest": held} for name, held in self._on_device]
        return display.frame(rows, columns=("memory", "at_peak", "largest"))

    plot = display.plot_method("memory")

    def plot_timeline(self, ax: Any = None) -> Any:
        """The stacked areas of `plot.memory_timeline`; returns the Axes."""
        return display.picture("memory_timeline")(self, ax=ax)

    def __repr__(self) -> str:
        return f"MemoryBreakdown({self.kind}, {units.bytes_(self.total)} allocated on {self.device})"


def _read(
    log: MemoryLog, *, granularity: int, simulated: bool, reserved: int | None, scratch: int, retries: int, notes: tuple[str, ...]
) -> dict[str, Any]:
    """Replay a log, and return the fields of a MemoryBreakdown that follow from it: the peak, what holds it, and the peaks of each part.

    Args:
        log: allocations and frees, as a recorder wrote them.
        granularity: bytes that each storage is rounded up to a multiple of.
        simulated: CUDA's allocator is simulated: it says what is reserved, and counts what it does not split off a block.
        reserved: measured bytes that the allocator reserved; None = not known.
        scratch: bytes of the measured peak above the log's.
        retries: measured retries of the allocator.
        notes: further notes, beside those of the log.
    """
    replay = Replay(log, granularity)
    counted: Numbers = replay.total
    if simulated:
        allocator = CachingAllocator().run(replay.events)
        reserved, retries = reserved or allocator.peak_reserved, retries or allocator.retries
        if granularity == CUDA_GRANULARITY:
            counted = np.array(allocator.history, np.int64)
    position = int(counted.argmax())
    mark = replay.phase_of(position)
    groups = {group: int(replay.held[position, column]) for column, group in enumerate(GROUPS)}
    unsplit = int(counted[position] - replay.total[position])
    groups["temporaries"] += scratch
    groups["other"] += unsplit
    more = [made(held, mark.phase) for made, held in ((scratch_of, scratch), (unsplit_of, unsplit)) if held]
    holders = tuple(sorted((*holders_at(replay, position), *more), key=lambda h: -h.bytes))
    steps, phases = replay.peaks("step", counted), replay.peaks("phase", counted)
    steps[mark.step] += scratch
    phases[mark.phase] += scratch
    later = [held for step, held in steps.items() if step > min(steps)]
    return {
        **groups,
        "reserved": reserved,
        "retries": retries,
        "peak_moment": _moment(replay.moment(position), holders),
        "first_step": steps[min(steps)],
        "steady": max(later, default=steps[min(steps)]),
        "largest": {group: max(groups[group], int(replay.held[:, column].max())) for column, group in enumerate(GROUPS)},
        "phases": {phase: phases[phase] for phase in MEMORY_PHASES if phase in phases},
        "holders": holders,
        "timeline": MemoryTimeline.from_replay(replay, position),
        "notes": tuple(dict.fromkeys((*log.notes, *notes, *(() if later else (ONE_STEP,))))),
    }


def _moment(when: str, holders: tuple[Holder, ...]) -> str:
    """The moment of the peak, and the holders that explain it."""
    largest = telling(holders, when)
    return f"{when}: {largest.words}" if largest else when


_SUMS = ("total", "reserved", "device_used")
_NAMES = {"total": "allocated", "device_used": "device used"}


@dataclass(frozen=True, slots=True)
class MemoryDifference(display.Shown):
    """`this - other`, in bytes."""

    this: MemoryBreakdown
    """What was subtracted from."""
    other: MemoryBreakdown
    """What was subtracted: the measure of percentages."""

    def __getitem__(self, name: str) -> int:
        """Bytes that `this` has more.

        Args:
            name: of GROUPS, or "total", "reserved", "device_used".

        Raises:
            KeyError: no such name, or one of both does not have it.
        """
        if name not in (*GROUPS, *_SUMS):
            raise KeyError(f"no {name!r} in a difference: there are {', '.join((*GROUPS, *_SUMS))}")
        mine, theirs = getattr(self.this, name), getattr(self.other, name)
        if mine is None or theirs is None:
            raise KeyError(f"{name!r} is not known on both sides: on a CPU nothing is reserved")
        return int(mine - theirs)

    @property
    def total(self) -> int:
        """Difference of what is allocated at the peak."""
        return self["total"]

    @property
    def error(self) -> float:
        """Difference of what is allocated, as a fraction of what `other` has; negative: less."""
        return self.total / self.other.total

    @property
    def table(self) -> display.Table:
        """One row per group that one of both has, then the sums that both have."""
        names = [group for group in GROUPS if getattr(self.this, group) or getattr(self.other, group)]
        names += [name for name in _SUMS if getattr(self.this, name) is not None and getattr(self.other, name) is not None]
        rows = [
            [
                _NAMES.get(name, name.replace("_", " ")),
                units.bytes_(getattr(self.this, name)),
                units.bytes_(getattr(self.other, name)),
                _signed(self[name]),
                f"{100 * self[name] / self.other.total:+.2f} %",
            ]
            for name in names
        ]
        mine, theirs = self.names
        note = f"{mine}: {self.this.title}, peak: {self.this.peak_moment}; {theirs}: {self.other.title}, peak: {self.other.peak_moment}"
        columns = ("group", mine, theirs, "difference", f"of all that is allocated, {theirs}")
        return display.Table(columns=columns, rows=rows, title=f"{mine} less {theirs}", note=note)

    @property
    def names(self) -> tuple[str, str]:
        """What each side is called: which of the two is predicted and which measured, or first and second of the same kind."""
        kinds = self.this.kind, self.other.kind
        return kinds if kinds[0] != kinds[1] else (f"{kinds[0]}, this", f"{kinds[1]}, other")

    def to_frame(self) -> Any:
        """A DataFrame with one row per group and sum, in bytes."""
        names = [name for name in (*GROUPS, *_SUMS) if None not in (getattr(self.this, name), getattr(self.other, name))]
        rows = [
            {"group": name, "this": getattr(self.this, name), "other": getattr(self.other, name), "difference": self[name]}
            for name in names
        ]
        return display.frame(rows, columns=("group", "this", "other", "difference"))

    def plot(self, ax: Any = None) -> Any:
        """Both as stacked bars, one below the other; returns the Axes."""
        return display.picture("memory")([self.this, self.other], ax=ax)

    def __repr__(self) -> str:
        return f"MemoryDifference({_signed(self.total)}, {100 * self.error:+.2f} %)"


def _signed(value: int) -> str:
    return f"{'+' if value > 0 else ''}{units.bytes_(value)}"
