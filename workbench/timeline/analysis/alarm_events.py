"""Alarms as sentences: what has changed on a rank since which step, for which rank it waits, and the digest of a run."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workbench.core import units
from workbench.core.checks import is_number, is_whole

DEVICE_MEMORY = "device memory"
REDUCTION, COMPUTING = "reduction", "computing"
"""The parts of a backward where DDP says which of them takes longer."""
NOT_FINITE = "not finite"
"""A loss that is NaN or infinite from a step on."""
NOT_TIME = ("memory", DEVICE_MEMORY, "loss", NOT_FINITE)
"""What is followed and is no time."""
WORDS = {
    "step": "a step",
    "data_wait": "the wait for data",
    "h2d": "the copy to the device",
    "forward": "the forward",
    "backward": "the backward",
    "optimizer": "the optimizer's step",
    "other": "what lies between the phases",
    REDUCTION: "the reduction of gradients, with the wait for other ranks,",
    COMPUTING: "computing the gradients",
    "loss": "a higher loss",
    NOT_FINITE: "a loss that is NaN or infinite",
}
"""What is followed, in a sentence."""
SHARED = "the backward, with the reduction of gradients,"
"""The same where there are several ranks."""
WAITS = ("backward", REDUCTION, "step", "throughput")
"""What becomes longer on a rank that waits for another one, too."""
UNSHARED = ("data_wait", "h2d")
"""Phases in which ranks do not wait for each other, as they may in a forward that broadcasts buffers, or in what lies between phases."""
ONE_ALARM = "alarms: 1 change in all"
"""The digest of a run with one alarm, as a note."""
MANY_TIMES = 10
"""So many times as long as before is not said in percent."""
MEETS = 64
"""Steps within which alarms of two ranks are taken to have one reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmEvent:
    """A change that an alarm reports."""

    rank: int
    step: int
    """The first step at the new level, about, from 1; of memory, which is read at each look, the latest that it may be."""
    phase: str
    """One of SERIES, REDUCTION, COMPUTING, DEVICE_MEMORY, "loss" or NOT_FINITE."""
    before: float
    """Seconds, samples per second, bytes, or the loss."""
    after: float
    """The same; of NOT_FINITE both are the last finite loss, 0 = there was none."""
    share: float
    """The change of the phase as a part of the step before; 0 for memory and loss."""
    circumstances: tuple[str, ...] = ()
    """What else changed."""
    waits_for: int | None = None
    """The rank whose own change explains this one, as far as it was known then."""
    trace: str = ""
    """File in the run directory with a trace of steps after the alarm; "" = none was asked for."""

    @property
    def slower(self) -> bool:
        """Does the training lose by it?"""
        return (self.after < self.before) == (self.phase == "throughput")

    def same_event(self, other: "AlarmEvent") -> bool:
        """Did the same change at about the same step, as far as alarms of two ranks show?"""
        return (self.phase, self.slower) == (other.phase, other.slower) and abs(self.step - other.step) <= MEETS

    def words(self, ranks: int = 1) -> str:
        """As a sentence."""
        change = abs(self.after / self.before - 1) if self.before > 0 else 1.0
        where = f" on rank {self.rank}" if ranks > 1 else ""
        waits = [] if self.waits_for is None else [f"it waits for rank {self.waits_for}"]
        traced = [f"a few steps are traced: {self.trace}"] if self.trace else []
        more = "".join(f"; {text}" for text in (*waits, *self.circumstances, *traced))
        since = f"since step {self.step:,}"
        if self.phase in ("memory", DEVICE_MEMORY):
            how = "more" if self.after > self.before else "less"
            return f"{how} {self.phase}{where} {since} or earlier: {units.bytes_(self.after)}, {units.bytes_(self.before)} before{more}"
        if self.phase == NOT_FINITE:
            return f"{since} the loss is NaN or infinite{where}{f' ({self.before:.4g} before)' if self.before else ''}{more}"
        if self.phase == "loss":
            return f"{since} the loss is {units.percent(change)} higher{where} ({self.before:.4g} → {self.after:.4g}){more}"
        if self.phase == "throughput":
            return f"{since} {units.percent(change)} {'fewer' if self.slower else 'more'} samples per second{where}{more}"
        what = SHARED if self.phase == "backward" and ranks > 1 else WORDS[self.phase]
        took = f"{units.seconds(self.before)} → {units.seconds(self.after)}"
        longer = f"{units.times(1 + change)} as long" if change >= MANY_TIMES - 1 else f"{units.percent(change)} longer"
        less = f"{'more than 99 %' if change > 0.99 else units.percent(change)} less"
        return f"{since} {what} takes {longer if self.slower else less}{where} ({took}){more}"

    def to_row(self) -> dict[str, Any]:
        """For the rank's file."""
        return asdict(self) | {"circumstances": list(self.circumstances)}

    @classmethod
    def of_row(cls, row: Any) -> "AlarmEvent | None":
        """An alarm as a file has it; None where it is damaged."""
        try:
            event = cls(**{**row, "circumstances": tuple(map(str, row["circumstances"]))})
            numbers = (event.before, event.after, event.share)
            return event if is_whole(event.step) and is_whole(event.rank) and all(map(is_number, numbers)) else None
        except (TypeError, KeyError):
            return None


def waited_for(event: AlarmEvent, others: Iterable[AlarmEvent]) -> AlarmEvent | None:
    """The change of another rank, at about the same step, that explains why something takes longer, or less, on this one; None = none does.

    Ranks wait for the slowest one where they average gradients, so all their steps become longer, and one of them has a reason of its own.
    """
    if event.phase in NOT_TIME:
        return None
    reasons = []
    for other in others:
        together = other.rank != event.rank and other.slower == event.slower and abs(other.step - event.step) <= MEETS
        surer = event.phase in WAITS or (other.phase in UNSHARED and event.phase not in UNSHARED)
        enough = abs(other.share) >= abs(event.share) * (0.5 if surer else 2)
        if together and enough and other.phase not in (*WAITS, *NOT_TIME):
            reasons.append(other)
    return max(reasons, key=lambda other: abs(other.share), default=None)


def digest(events: Sequence[AlarmEvent], ranks: int = 1, traces: Sequence[str] = ()) -> str:
    """What an alarm reported over a run, in a line; ranks and phases that became slow again and again come first."""
    if not events:
        return ""
    slow: dict[tuple[int, str], list[int]] = {}
    for alarm in events:
        if alarm.slower and alarm.phase not in NOT_TIME and alarm.waits_for is None:
            slow.setdefault((alarm.rank, alarm.phase), []).append(alarm.step)
    again = [(key, steps) for key, steps in slow.items() if len(steps) > 1]
    words = [
        f"{'rank ' + str(rank) + ': ' if ranks > 1 else ''}{WORDS.get(phase, phase)} became slower {len(steps)} times, at steps "
        + ", ".join(f"{step:,}" for step in steps[:6])
        for (rank, phase), steps in sorted(again, key=lambda item: -len(item[1]))
    ]
    first = [f"{WORDS.get(alarm.phase, alarm.phase)} since step {alarm.step:,}" for alarm in events[:3]]
    listed = f": {', '.join(first)}{', …' * (len(events) > 3)}" if len(events) > 1 and not again else ""
    words += [f"{len(events)} change{'s' * (len(events) > 1)} in all{listed}"]
    for rank in sorted({alarm.waits_for for alarm in events if alarm.waits_for is not None}):
        words[-1] += f", {sum(alarm.waits_for == rank for alarm in events)} of them of rank {rank}, for which this one waits"
    words += [f"traced: {', '.join(traces)}"] if traces else []
    return "; ".join(words)
