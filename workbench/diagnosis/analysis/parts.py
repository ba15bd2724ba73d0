"""Parts: what a step of the job is made of, by what each part adds to it. Measured and predicted parts have this same type."""

import math
from dataclasses import dataclass
from typing import Any

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.core.vocabulary import PART_WORDS
from workbench.core.vocabulary import PARTS as PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(display.Shown, JsonDataclass):
    """Mean seconds per step of each part; they add up to the step."""

    data_wait: float = 0.0
    transfer: float = 0.0
    compute: float = 0.0
    host: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0
    straggler: float = 0.0
    stalls: float = 0.0
    samples: float | None = None
    """Samples per step over all ranks, where it could be told."""
    predicted: bool = False
    """True for a prediction; False for a measurement."""
    notes: tuple[str, ...] = ()
    """What a prediction leaves out."""

    def seconds(self, part: str) -> float:
        """Of one part.

        Raises:
            ValueError: no such part.
        """
        if part not in PARTS:
            raise ValueError(f"no part {part!r}: a step is made of {', '.join(PARTS)}")
        return float(getattr(self, part))

    @property
    def step(self) -> float:
        """Seconds of the step: the sum of its parts."""
        return sum(self.seconds(part) for part in PARTS)

    def share(self, part: str) -> float:
        """Fraction 0..1 of the step; nan of a step of no length."""
        return self.seconds(part) / self.step if self.step else math.nan

    @property
    def samples_per_sec(self) -> float:
        """Over all ranks; nan if the samples are not known."""
        return self.samples / self.step if self.samples is not None and self.step else math.nan

    @property
    def rate(self) -> float:
        """Samples per second, or steps per second where the samples are not known: good for ratios."""
        return (1.0 if self.samples is None else self.samples) / self.step if self.step else math.nan

    @property
    def table(self) -> display.Table:
        """One row per part that is there, and the step."""
        rows = [
            [part, units.seconds(self.seconds(part)), units.percent(self.share(part)), PART_WORDS[part]]
            for part in PARTS
            if self.seconds(part)
        ]
        rate = "" if self.samples is None else f"; {units.rate(self.samples_per_sec)}"
        return display.Table(
            columns=("part", "seconds", "share", ""),
            rows=[*rows, ["step", units.seconds(self.step), "100 %", ""]],
            title="What the step is made of",
            note="; ".join([f"{'predicted' if self.predicted else 'measured'}{rate}", *self.notes]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per part: seconds, share."""
        return display.frame([{"part": part, "seconds": self.seconds(part), "share": self.share(part)} for part in PARTS])
