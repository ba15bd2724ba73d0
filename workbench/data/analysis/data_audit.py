"""DataAudit: what is wrong with data: duplicates, leakage between splits, conflicting labels, unreadable samples, unequal classes."""

import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.core import units
from workbench.core.checks import real_number
from workbench.core.codec import JsonDataclass
from workbench.core.display.table import Shown, Table, frame, panel, picture

REASONS: Mapping[str, str] = {
    "unreadable": "it cannot be read or decoded",
    "huge": "it declares more pixels than is sane, or unpacks to far more bytes than it has",
    "conflicting labels": "equal samples have different labels, and nobody knows which is right",
    "leak": "an equal sample is in another split, which is kept",
    "duplicate": "an equal sample is kept",
}
"""Reason to drop a sample → what it means; of several reasons, the first holds."""
EXACT = ("bytes", "pixels", "text", "values")
NEAR = ("near pictures", "near texts")
EVALUATION = ("test", "validation", "valid", "val", "dev", "eval")
"""Names of splits whose samples are kept where equal ones are in others, the first before the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member(JsonDataclass):
    """A sample."""

    split: str
    """Name of its split; "" = there is but one."""
    index: int
    """Its number in the split."""
    key: str
    """Its name: that of its file, or its key in the source."""
    label: str | None = None
    """Its label, as text."""
    picture: str = ""
    """A small JPEG as base64; kept for the first groups only."""

    @property
    def where(self) -> str:
        """The name, with the split."""
        return f"{self.split}: {self.key}" if self.split else self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(JsonDataclass):
    """Samples that are equal, or nearly so; of near ones, each is like the first."""

    kind: str
    """By what they are equal: "bytes", "pixels", "text" (normalised) or "values"; or "near pictures", "near texts"."""
    members: tuple[Member, ...]
    """Two or more samples, the one that is to be kept first."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Their labels, each once."""
        return tuple(sorted({member.label for member in self.members if member.label is not None}))

    @property
    def splits(self) -> tuple[str, ...]:
        """Their splits, each once."""
        return tuple(sorted({member.split for member in self.members}))

    @property
    def exact(self) -> bool:
        """Are they equal?"""
        return self.kind in EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable(JsonDataclass):
    """A sample that cannot be used."""

    member: Member
    """Which."""
    reason: str
    """"unreadable" or "huge"."""
    why: str
    """What happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(JsonDataclass):
    """A sample that should be left out."""

    member: Member
    """Which."""
    reason: str
    """A key of `REASONS`."""
    why: str
    """In words: the sample that is kept, or what happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes(JsonDataclass):
    """How large samples are."""

    name: str
    """What is counted: "words", "pixels", "bytes"."""
    least: float
    """Of the smallest."""
    median: float
    """Half of them have at most as much."""
    p99: float
    """99 % have at most as much."""
    most: float
    """Of the largest."""

    @classmethod
    def of(cls, name: str, values: Sequence[float]) -> "Sizes":
        """The figures of some values, at least one."""
        ordered = sorted(values)
        high = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
        return cls(name=name, least=ordered[0], median=statistics.median(ordered), p99=high, most=ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAudit(JsonDataclass, Shown):
    """What an audit found in data. Near duplicates are for review: some are different things, so `drop_list` has none of them."""

    target: str
    """What was audited."""
    samples: Mapping[str, int]
    """Split → samples."""
    kinds: Mapping[str, int]
    """Kind of samples ("picture", "text", "tokens", "values") → number."""
    classes: Mapping[str, Mapping[str, int]]
    """Split → label → samples; empty = they have no labels."""
    groups: tuple[Group, ...]
    """Of equal samples, then of near ones."""
    unusable: tuple[Unusable, ...]
    """Samples that cannot be read, or must not be."""
    sizes: tuple[Sizes, ...]
    """How large they are."""
    seconds: float
    """That it took."""
    notes: tuple[str, ...] = ()
    """What the reader should know."""
    order: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Split → label of each sample as a number (-1 = none), in the order of storage: what `split` needs."""

    @property
    def exact(self) -> tuple[Group, ...]:
        """Groups of equal samples."""
        return tuple(group for group in self.groups if group.exact)

    @property
    def near(self) -> tuple[Group, ...]:
        """Groups of near duplicates, for review."""
        return tuple(group for group in self.groups if not group.exact)

    @property
    def redundant(self) -> int:
        """Samples that would be dropped if each group of equal samples kept one."""
        return sum(len(group.members) - 1 for group in self.exact)

    @property
    def conflicts(self) -> tuple[Group, ...]:
        """Groups of equal samples with different labels."""
        return tuple(group for group in self.exact if len(group.labels) > 1)

    @property
    def leaks(self) -> tuple[Group, ...]:
        """Groups, near ones too, with samples in several splits."""
        return tuple(group for group in self.groups if len(group.splits) > 1)

    @property
    def ok(self) -> bool:
        """Whether nothing was found that makes results wrong: no leak, no conflict, no unusable sample."""
        return not (self.leaks or self.conflicts or self.unusable)

    @property
    def drop_list(self) -> tuple[Drop, ...]:
        """Samples to leave out, with the reason; each once, in the order of `REASONS`. Near duplicates are not among them."""
        drops: dict[tuple[str, int], Drop] = {}

        def add(member: Member, reason: str, why: str) -> None:
            drops.setdefault((member.split, member.index), Drop(member=member, reason=reason, why=why))

        for each in self.unusable:
            add(each.member, each.reason, each.why)
        for group in self.conflicts:
            for member in group.members:
                add(member, "conflicting labels", f"equal samples are labelled {' and '.join(group.labels)}")
        for group in self.exact:
            kept, *others = group.members
            for member in others:
                leak = member.split != kept.split
                add(member, "leak" if leak else "duplicate", f"equal to {kept.where}, by {group.kind}")
        ranks = list(REASONS)
        return tuple(sorted(drops.values(), key=lambda drop: ranks.index(drop.reason)))

    def kept(self, split: str = "", *, without: Sequence[str] = tuple(REASONS)) -> list[int]:
        """Indices of the samples of a split that are not on the drop list, for `torch.utils.data.Subset`.

        Args:
            split: its name; "" if there is only one.
            without: reasons for which samples are left out.

        Raises:
            ValueError: there is no such split or reason.
        """
        self._check(split)
        if unknown_reasons := [reason for reason in without if reason not in REASONS]:
            raise ValueError(f"without={unknown_reasons[0]!r}: allowed are {', '.join(map(repr, REASONS))}")
        gone = {drop.member.index for drop in self.drop_list if drop.member.split == split and drop.reason in without}
        return [index for index in range(self.samples[split]) if index not in gone]

    def split(self, validation: float = 0.2, *, seed: int = 0, split: str = "") -> tuple[list[int], list[int]]:
        """Indices of the samples for training and for validation: equal and near samples stay together, and classes have similar shares.

        Args:
            validation: share of samples in the validation set.
            seed: seed of the choice.
            split: which split to divide; "" if there is only one.

        Raises:
            ValueError: the share is not between 0 and 1, or there is no such split.
        """
        self._check(split)
        real_number("validation", validation, above=0.0, below=1.0)
        unit = list(range(self.samples[split]))  # each points at a sample of its unit, and in the end at the first of it

        def root(index: int) -> int:
            while unit[index] != index:
                unit[index] = index = unit[unit[index]]
            return index

        for group in self.groups:
            inside = [member.index for member in group.members if member.split == split]
            for index in inside[1:]:
                a, b = sorted((root(inside[0]), root(index)))
                unit[b] = a
        together: dict[int, list[int]] = defaultdict(list)
        for index in range(len(unit)):
            together[root(index)].append(index)
        labels = self.order[split]
        wanted = {label: count * validation for label, count in Counter(labels).items()}
        members = list(together.values())
        random.Random(seed).shuffle(members)
        held: set[int] = set()
        for indices in members:
            counts = Counter(labels[index] for index in indices)
            if all(wanted[label] >= count / 2 for label, count in counts.items()):
                held.update(indices)
                for label, count in counts.items():
                    wanted[label] -= count
        return [index for index in range(len(unit)) if index not in held], sorted(held)

    @property
    def figures(self) -> dict[str, int]:
        """What was found → number of samples that it concerns."""
        leaking = sum(len(group.members) - max(Counter(m.split for m in group.members).values()) for group in self.leaks)
        return {
            "equal samples": self.redundant,
            "near duplicates": sum(len(group.members) - 1 for group in self.near),
            "leaks between splits": leaking,
            "conflicting labels": sum(len(group.members) for group in self.conflicts),
            "unreadable": sum(each.reason == "unreadable" for each in self.unusable),
            "huge": sum(each.reason == "huge" for each in self.unusable),
        }

    @property
    def balance(self) -> float:
        """Samples of the largest class over those of the smallest; nan = there are no classes."""
        total: Counter[str] = Counter()
        for counts in self.classes.values():
            total.update(counts)
        return max(total.values()) / min(total.values()) if total else math.nan

    @property
    def verdict(self) -> str:
        """The answer in a sentence or two."""
        count, drops = sum(self.samples.values()), self.drop_list
        if not any(self.figures.values()):
            return f"{self.target}: nothing wrong in {count:,} samples."
        kinds = Counter(drop.reason for drop in drops)
        told = ", ".join(f"{number} {reason}" for reason, number in kinds.items())
        found = f"{self.target}: {len(drops):,} of {count:,} samples should go ({told})" if drops else f"{self.target}: no sample has to go"
        leaks = f" {len(self.leaks)} groups are in several splits: validation figures are too good." if self.leaks else ""
        near = f" {len(self.near)} groups of near duplicates are for review." if self.near else ""
        return f"{found}.{leaks}{near}"

    @property
    def table(self) -> Table:
        """A row per finding, and the verdict."""
        total = sum(self.samples.values())
        examples = {"equal samples": self.exact, "near duplicates": self.near}
        examples |= {"leaks between splits": self.leaks, "conflicting labels": self.conflicts}
        rows = []
        for name, number in self.figures.items():
            groups = examples.get(name, ())
            first = "; ".join(member.where for member in groups[0].members[:2]) if groups else ""
            if not first:
                first = next((f"{each.member.where}: {each.why}" for each in self.unusable if each.reason == name), "")
            rows.append((name, f"{number:,}", units.percent(number / max(1, total)), len(groups) or "", first[:90]))
        notes = [self.verdict]
        if self.classes:
            notes.append(f"the largest class has {self.balance:.3g} times the samples of the smallest")
        notes += [
            f"{s.name}: {s.least:,.0f} to {s.most:,.0f}, half have at most {s.median:,.0f}, 99 % at most {s.p99:,.0f}" for s in self.sizes
        ]
        columns = ("finding", "samples", "share", "groups", "for example")
        return Table(columns=columns, rows=rows, title=f"Audit of {self.target}", note="\n".join([*notes, *self.notes]))

    def to_frame(self) -> Any:
        """The members of all groups, a row each, as a DataFrame."""
        rows = [
            {"group": number, "kind": group.kind, "split": member.split, "index": member.index, "key": member.key, "label": member.label}
            for number, group in enumerate(self.groups)
            for member in group.members
        ]
        return frame(rows, columns=["group", "kind", "split", "index", "key", "label"])

    def plot(self, ax: Any = None) -> Any:
        """The most important groups, as rows of pictures: `wb.plot.duplicates`."""
        return picture("duplicates")(self, ax=ax)

    def explore(self) -> Any:
        """A panel of the audit: `wb.widgets.DataExplorer`."""
        return panel("DataExplorer")(self)

    def __repr__(self) -> str:
        return f"DataAudit({self.target!r}, samples={sum(self.samples.values())}, groups={len(self.groups)}, ok={self.ok})"

    def _check(self, split: str) -> None:
        if split not in self.samples:
            raise ValueError(f"split={split!r}: allowed are {', '.join(map(repr, self.samples))}")
