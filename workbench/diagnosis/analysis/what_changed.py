"""WhatChanged: how two runs differ, and which difference makes one slower, need more memory or learn less than the other."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.core import units
from workbench.core.brief import fitted, number, short, three
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.core.statistics import USUAL_SPREAD, Interval
from workbench.core.units import several
from workbench.diagnosis.analysis.owner_search import MINE, Changes, Rerun, effect, level

QUANTITIES: Mapping[str, str] = {"time": "step", "memory": "peak memory", "loss": "loss"}
"""What two runs are compared for → what it is called."""
USUAL: Mapping[str, float] = {"time": USUAL_SPREAD, "memory": 0.003, "loss": 0.003}
"""Standard deviation of the ratio of two equal trainings, as known beforehand. Chosen: resident memory varies by pages, the loss of
a seed by the order in which ranks add up. Measured trainings replace it as they come."""
KINDS: Mapping[str, str] = {
    "owner": "a difference brings it, also today",
    "still": "nothing that was put back brings it, and run A is today nearer to what run B was",
    "over": "nothing that was put back brings it, and run A is today nearer to what it was",
    "nothing": "the two runs do not differ by more than their own steps do, and today's trainings, if any, do not either",
    "cannot run": "a run cannot be repeated today",
    "unclear": "the trainings vary too much to say",
    "not run": "only what was recorded is compared",
}
"""Kind of verdict → what it means."""
UNRECORDED = "a file that the code reads"
"""What no run records and may always differ. Of the data of a task, attributes and the first samples are recorded."""
_WORDS, _ROWS = 120, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference(JsonDataclass):
    """Something in which two runs differ."""

    section: str
    """"spec", "code", "variables", "environment", "versions", "git", "data" or "given"."""
    name: str
    """What differs: a knob, a variable, a package, …"""
    a: str
    """Its value in run A, as text."""
    b: str
    """Its value in run B, as text."""
    change: str = ""
    """The name under which it is tried; several differences that only go together have one. Empty = it cannot be tried."""
    why_not: str = ""
    """Why it cannot be tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatChanged(display.Shown, JsonDataclass):
    """Two runs, their differences, and the trainings that show which of these cause a regression."""

    of: str
    """"time", "memory" or "loss"."""
    runs: tuple[str, str]
    """Directories of the runs."""
    recorded: tuple[float, float]
    """What they gave: seconds of the slowest rank per step, peak bytes of the fullest, or loss."""
    change: Interval
    """Log of B's over A's, with the interval that the runs' own steps give."""
    differences: tuple[RunDifference, ...]
    """In what they differ, what can be tried first."""
    reruns: tuple[Rerun, ...] = ()
    """The trainings that were made, in order."""
    kind: str = "not run"
    """A key of `KINDS`."""
    owner: Changes = ()
    """What brings the regression, of kind "owner"."""
    together: bool = False
    """Do these bring it only together?"""
    why: str = ""
    """What stands in the way of a verdict, in words."""
    brings: tuple[str, ...] = ()
    """What else differs between the trainings with and without the owner: packages, data, code."""
    code: tuple[str, ...] = ()
    """Files in which the code differs, each with the line if it is one; the first few are enough to read."""
    left_over: tuple[str, ...] = ()
    """What differed between the runs, and does not between the trainings of today, though nobody tried it: it could not be put back."""
    not_recorded: tuple[str, ...] = ()
    """What the two runs did not record, though runs can: it may differ."""
    steps: int = 0
    """Steps of each training."""
    statistic: str = ""
    """Of time: what was taken of the steps, "mean" or "25 % quantile"; of loss "mean of the last tenth"."""
    per: str = "step"
    """Of time: what it is counted per, "step", or "sample" where the steps of the two differ in size."""
    seconds: float = 0.0
    """How long the trainings took."""
    notes: tuple[str, ...] = ()
    """What the reader should know."""

    @property
    def ratio(self) -> Interval:
        """What B gave over what A gave, as recorded."""
        return self.change.of(math.exp)

    @property
    def today(self) -> Interval | None:
        """The same of today's trainings, with all differences that can be tried; None = not measured."""
        return self._ratio(self.changes)

    @property
    def changes(self) -> Changes:
        """The names under which differences are tried."""
        return tuple(dict.fromkeys(each.change for each in self.differences if each.change))

    def _ratio(self, changes: Changes) -> Interval | None:
        seen = effect(self.reruns, changes, USUAL[self.of])
        return seen and seen.of(math.exp)

    @property
    def ratios(self) -> dict[Changes, Interval]:
        """Set of differences → what run A gives with them over what it gives without, in the order in which they were first tried."""
        each = dict.fromkeys(rerun.changes for rerun in self.reruns if rerun.changes)
        return {changes: seen for changes in each if (seen := self._ratio(changes))}

    @property
    def untried(self) -> Changes:
        """Differences that can be put back and were not, neither alone nor in a part of them: what is not known of them."""
        tried = {name for rerun in self.reruns if rerun.changes != self.changes or len(self.changes) == 1 for name in rerun.changes}
        return tuple(name for name in self.changes if name not in tried)

    @property
    def _what(self) -> str:
        if self.of == "loss" and self.steps:
            return f"loss after {several(self.steps, 'step')}"
        return "time per sample" if self.of == "time" and self.per == "sample" else QUANTITIES[self.of]

    @property
    def verdict(self) -> str:
        """The answer in words, with what to do."""
        what = self._what
        said = f"Run B's {what} is {over(self.ratio.mid)} that of run A"
        if self.kind == "nothing":
            own = "two trainings of one program may differ" if self.of == "memory" else "the steps of the runs themselves vary"
            vary = f"and {own} as much" if 0 in self.change else "which is too little to look for a reason"
            return f"Nothing to explain: {said[0].lower()}{said[1:]}, {vary} ({_ends(self.ratio)}){self._alike}."
        today = self._ratio(self.owner) if self.owner else self.today
        if self.kind == "owner":
            many = "are" if len(self.owner) > 1 else "is"
            alone, because = " together" if self.together else "", f" ({self.why})" if self.why else ""
            comes = tuple(text for text in self.brings if not self._said or not text.startswith("the code of "))
            comes = (*self.code * self._said, *comes)
            seed = self.of == "loss" and any(re.match(r"-*seed\b", name) for name in self.owner)
            because += " Another seed gives another loss by chance." * seed
            brought = f" With it {'comes' if len(comes) == 1 else 'come'} {_list(comes)}." if comes else ""
            if today and 0 not in self.change and math.log(today.mid) * self.change.mid < 0:
                cause = f" in trainings of {self.steps} steps, which may end differently from the recorded ones"
                cause = (
                    ", and the machine, or something that was not recorded, was different when A or B ran" if self.of == "time" else cause
                )
                return (
                    f"{said} as recorded, but today's alternating trainings on one machine show the contrary: run A's {what} with "
                    f"{_list(self.owner)} is {_ends(today)} that without. So {_list(self.owner)} {'raise' if today.mid > 1 else 'lower'}"
                    f"{'s' * (many == 'is')} it{alone}{cause} ({self._now}).{because}{brought}"
                )
            with_ = "them" if len(self.owner) > 1 else "it"
            seen = f": today run A's {what} with {with_} is {_ends(today)} that without" if today else ""
            if 0 in self.change:
                said = f"What was recorded leaves open whether run B's {what} is another ({_ends(self.ratio)}); today's trainings do not"
            return f"{said}, and {_list(self.owner)} {many} the reason{alone}{seen}.{because}{brought}"
        if self.kind == "still":
            return f"{said}, and the reason is {self._suspects('')}: {self._like('as run B was')} ({self._now}){self._alike}."
        if self.kind == "over":
            suspects = self._suspects(f" as it was while {'B' if self.ratio.mid > 1 else 'A'} ran")
            return f"{said}, and the reason is {suspects}: {self._like('as it was itself')} ({self._now}){self._alike}."
        code = tuple(each.name for each in self.differences if each.section == "code")
        more = (
            f"they differ in the code of {_list(code)}; " * bool(code)
            + f"what was recorded says no more; {self.why or 'short trainings may (without --recorded, or rerun=True)'}"
        )
        where = {"not run": more, "cannot run": self.why, "unclear": f"not yet clear why: {self.why}"}
        left = f" Not swapped one by one yet: {_list(self.untried)}." if self.kind == "unclear" and self.untried else ""
        if self.kind == "unclear" and today and len(self.changes) > 1 and not today.low <= 1 <= today.high:
            both = "both differences" if len(self.changes) == 2 else f"all {len(self.changes)} differences"
            left = f" Together they bring it: today run A's {what} with {both} is {_ends(today)} that without.{left}"
        return f"{said}; {where[self.kind]}.{left}"

    @property
    def _said(self) -> bool:
        """Does the verdict say in which lines the code differs?"""
        return bool(self.code) and "code" in self.owner

    @property
    def _notes(self) -> list[str]:
        return [*[f"the code differs in {', '.join(self.code)}"] * (bool(self.code) and not self._said), *self.notes]

    def _suspects(self, when: str) -> str:
        """What may be the reason where nothing that was put back is; `when` says which state of the machine is meant."""
        could_not = f"{_list(self.left_over)}, which could not be put back, " if self.left_over else ""
        missing = _list((*self.not_recorded, UNRECORDED), "or")
        return f"{could_not}{'or ' * bool(could_not)}the machine{when}, or something that was not recorded, such as {missing}"

    @property
    def _alike(self) -> str:
        return (
            f", and its {self._what} with B's {_list(self.changes)} is {_ends(self.today)} that without"
            if self.today and self.changes
            else ""
        )

    def _like(self, one: str) -> str:
        """How run A is today, `one` where it is not far from it: outside of both by half their difference it is like neither."""
        now, recorded = level(self.reruns, USUAL[self.of]), sorted(map(math.log, self.recorded))
        far = MINE * (recorded[1] - recorded[0])
        if now is None or recorded[0] - far < now.mid < recorded[1] + far:
            return f"run A is today {one}"
        return f"run A's {self._what} is today {'below' if now.mid < recorded[0] else 'above'} that of both"

    @property
    def _now(self) -> str:
        now = level(self.reruns, USUAL[self.of])
        texts = [self.text(value) for value in (self.recorded if now is None else (math.exp(now.mid), *self.recorded))]
        return texts[0] if now is None else f"{texts[0]}; then A {texts[1]}, B {texts[2]}"

    def text(self, value: float) -> str:
        """A value of what is compared, as text."""
        if math.isnan(value):
            return units.MISSING
        return {"time": units.seconds, "memory": units.bytes_}[self.of](value) if self.of != "loss" else f"{value:.4g}"

    @property
    def table(self) -> display.Table:
        """A row for all that is tried as one with what it brings, one for each set that was tried together, and the verdict."""
        found, rows = self.ratios, list[tuple[str, ...]]()
        for row in self.grouped:
            alone = found.get((row.change,)) if row.change else None
            if alone:
                result = f"{_ends(alone)}{' ←' if row.change in self.owner else ''}"
            elif error := next((rerun.error for rerun in self.reruns if rerun.error and rerun.changes == (row.change,)), ""):
                result = f"does not run: {error}"
            elif row.change and any(row.change in changes for changes in found):
                result = "not tried alone"
            else:
                result = row.why_not or "not tried"
            rows.append((row.section, row.name, row.a, row.b, result))
        for changes, seen in found.items():
            if len(changes) > 1:
                names = "all of the above that can be tried" if changes == self.changes else ", ".join(changes)
                rows.append(("together", names, "", "", f"{_ends(seen)}{' ←' * (changes == self.owner)}"))
        what = self._what
        texts = [self.text(value) for value in self.recorded]
        last = f"{several(len(self.reruns), 'training')} of {self.steps} steps in {units.seconds(self.seconds)}" if self.reruns else ""
        return display.Table(
            columns=("section", "what differs", "run A", "run B", f"{what} of A with it"),
            rows=rows,
            title=f"What changed: {what}{f' ({self.statistic})' * bool(self.statistic)} {texts[0]} in A, {texts[1]} in B",
            note="\n".join(filter(None, [self.verdict, last, *self._notes])),
        )

    @property
    def grouped(self) -> tuple[RunDifference, ...]:
        """The differences, of which those that are tried as one are one: the commit and its files, knobs that only go together."""
        groups: dict[str, list[RunDifference]] = {}
        for place, each in enumerate(self.differences):
            groups.setdefault(each.change or f"{place}", []).append(each)
        return tuple(_as_one(group) for group in groups.values())

    def to_frame(self) -> Any:
        """A DataFrame with one row per training: what was changed in run A, and what it gave."""
        return display.frame(
            [{"changes": ", ".join(rerun.changes) or "run A", "value": rerun.value, "error": rerun.error} for rerun in self.reruns],
            columns=["changes", "value", "error"],
        )

    plot = display.plot_method("what_changed")

    def brief(self) -> dict[str, Any]:
        """The answer for a program or an agent, as plain JSON values that take at most BRIEF_BYTES as text."""
        value = {
            "verdict": short(self.verdict, 4 * _WORDS),
            "kind": self.kind,
            "owner": [short(name, 40) for name in self.owner[:_ROWS]],
            "of": self.of,
            **({"statistic": self.statistic, "per": self.per} if self.statistic else {}),
            "recorded": [number(each, 5) for each in self.recorded],
            "tried": [[short(" + ".join(changes), _WORDS), three(seen, 5)] for changes, seen in self.ratios.items()],
            "differs": [[each.section, short(each.name, 40), short(each.a, 30), short(each.b, 30)] for each in self.grouped],
            "notes": [short(note, _WORDS) for note in self._notes],
        }
        return fitted(value, "tried", "differs", "notes")

    def __repr__(self) -> str:
        return f"WhatChanged(of={self.of!r}, kind={self.kind!r}, owner={self.owner!r})"


def _as_one(group: Sequence[RunDifference]) -> RunDifference:
    """Differences that are tried as one; of code the commits say what each side has, where they differ, else the digests of its files."""
    named = [each for each in group if each.section != "git" or each.name == "commit"] or list(group)
    shown = [each for each in named if each.section == "git"] or named
    texts = [", ".join(getattr(each, side) for each in some) for some, side in ((named, "name"), (shown, "a"), (shown, "b"))]
    return replace(group[-1], name=texts[0], a=texts[1], b=texts[2])


def _ends(ratio: Interval | None) -> str:
    """A ratio with its interval: "1.42× (1.37 to 1.47)"."""
    if ratio is None:
        return units.MISSING
    return f"{over(ratio.mid)} ({ratio.low:.3g} to {ratio.high:.3g})"


def over(ratio: float) -> str:
    """A ratio as text, with a digit more where it is near 1.

    >>> over(1.4), over(0.9873)
    ('1.40×', '0.987×')
    """
    return f"{ratio:.3f}×" if abs(ratio - 1) < 0.1 else units.times(ratio)


def _list(names: tuple[str, ...], last: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}" if names else ""
