"""Remedy: one change of the step, with the gain it promises, how that was worked out, and what it costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench import units
from workbench.codec import JsonDataclass, OrInf

SHORTENS = frozenset({"precision", "channels_last", "threads", "micro_batch", "optimizer", "accumulation"})
"""Changes that make many a step shorter, whatever holds it back."""
ANSWERS = {
    "compute-bound": SHORTENS,
    "optimizer-bound": frozenset({"optimizer", "micro_batch", "accumulation"}),
    "communication-bound": frozenset({"accumulation", "micro_batch"}),
    "host-bound": frozenset({"threads", "micro_batch"}),
}
"""Verdict → those of them that change what it blames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy(JsonDataclass):
    """A change and its predicted gain. Gains of several remedies are not multiplied: what one frees, the other may no longer find."""

    name: str
    """Short, and unique in a diagnosis: "num_workers=2"."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """Knobs to turn: fields of RunSpec, and `optimizer` ("fused", "foreach"), `channels_last`, `gc`; empty where it is not ours to turn."""
    what: str
    """What to do, in a sentence."""
    speedup: OrInf
    """Predicted throughput in samples over that of now."""
    low: OrInf
    """The same, at least."""
    high: OrInf
    """The same, at most."""
    formula: str
    """How the prediction was worked out, with the numbers that went in."""
    costs: str = ""
    """What it costs: memory, accuracy, convenience; empty = nothing that we know of."""
    ceiling: bool = False
    """True: no more than this, since what replaces the removed part is taken to cost nothing."""

    @property
    def provable(self) -> bool:
        """Can it be tried by turning knobs?"""
        return bool(self.change)

    def answers(self, verdict: str) -> bool:
        """Does it change what the verdict blames, and not only make the rest of the step shorter?"""
        return not self.change.keys() & SHORTENS or self.change.keys() <= ANSWERS.get(verdict, frozenset())

    @property
    def gain(self) -> str:
        """The prediction as text: "1.62× (1.51× … 1.70×)"; of a ceiling "up to 1.62×"."""
        if self.ceiling:
            return f"up to {units.times(self.speedup)}"
        return f"{units.times(self.speedup)} ({units.times(self.low)} … {units.times(self.high)})"

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.gain}",
            self.what,
            f"Predicted from: {self.formula}.",
            f"It costs: {self.costs or 'nothing we know of'}.",
        ]
        return "\n".join(lines)


def rank(remedy: Remedy) -> float:
    """By which remedies are sorted: the larger the gain, the earlier. Of a ceiling half is counted: what replaces the part is not free."""
    return -(1 + (remedy.speedup - 1) / 2 if remedy.ceiling else remedy.speedup)
