"""What a run of a plan leaves: its Course, the loss over the samples; and the Gain of a plan over another, predicted or measured."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What one plan brings over another, as ratios; predicted and measured alike."""

    throughput: float = math.nan
    """Samples per second over those before; nan = not known."""
    samples: float = math.nan
    """Samples to the same loss over those before; nan = not known; infinite = it was not reached."""

    @property
    def time(self) -> float:
        """Seconds to the same loss over those before."""
        return self.samples / self.throughput

    def to_json(self) -> dict[str, float | str | None]:
        """As plain JSON values; infinite is text."""
        return {name: _plain(getattr(self, name)) for name in ("throughput", "samples")}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        return cls(**{name: math.nan if one is None else float(one) for name, one in value.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The loss of one run, against the samples that it has seen."""

    plan: str
    """Which one it ran: "old" or "new"."""
    seed: int
    """Of model and data."""
    samples: tuple[int, ...]
    """Seen so far, ascending."""
    losses: tuple[float, ...]
    """Mean loss of the samples between two of those numbers."""
    samples_per_sec: float = math.nan
    """Of all ranks, warm-up left out."""

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], window: float, *, plan: str, seed: int, samples_per_sec: float) -> "Course":
        """From the lines of a report, averaged over as many samples each; a last window that is not half full is left out.

        Args:
            rows: with "step", "samples" (seen so far) and "loss".
            window: samples, at least one step's.
            plan: "old" or "new".
            seed: of the run.
            samples_per_sec: of the run.
        """
        found: dict[int, list[float]] = {}
        step = 0
        for row in rows:
            if "loss" in row:
                step = row["samples"] // row["step"]
                found.setdefault(math.ceil(row["samples"] / window - 1e-9), []).append(row["loss"])
        full = {place: losses for place, losses in found.items() if len(losses) * step >= window / 2}
        return cls(
            plan=plan,
            seed=seed,
            samples=tuple(round(place * window) for place in full),
            losses=tuple(sum(losses) / len(losses) for losses in full.values()),
            samples_per_sec=samples_per_sec,
        )

    @property
    def falling(self) -> list[tuple[float, float]]:
        """(Samples, loss) of the curve that never rises and is nearest to the losses in squares: what noise lifts is averaged with what
        follows (pool adjacent violators, Ayer and others 1955); each pool stands at the middle of its samples.
        """
        pools: list[tuple[float, float, int]] = []  # sum of samples, sum of losses, points
        for seen, loss in zip(self.samples, self.losses, strict=True):
            pools.append((seen, loss, 1))
            while len(pools) > 1 and pools[-2][1] / pools[-2][2] <= pools[-1][1] / pools[-1][2]:
                last, before = pools.pop(), pools.pop()
                pools.append((before[0] + last[0], before[1] + last[1], before[2] + last[2]))
        return [(samples / count, loss / count) for samples, loss, count in pools]

    def at(self, samples: float) -> float:
        """The loss at so many samples, on the falling curve; nan beyond the last point."""
        if not self.samples or samples > self.samples[-1]:
            return math.nan
        curve = self.falling
        right = next((place for place, (seen, _) in enumerate(curve) if seen >= samples), len(curve))
        if right in (0, len(curve)):
            return curve[min(right, len(curve) - 1)][1]
        (left, high), (seen, low) = curve[right - 1], curve[right]
        return low + (seen - samples) / (seen - left) * (high - low)

    def reaches(self, loss: float) -> float:
        """Samples after which the falling curve is at a loss for the first time; infinite if it never is."""
        curve = self.falling
        right = next((place for place, (_, value) in enumerate(curve) if value <= loss), None)
        if right is None:
            return math.inf
        if right == 0:
            return curve[0][0]
        (left, high), (seen, low) = curve[right - 1], curve[right]
        return left + (high - loss) / (high - low) * (seen - left)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "plan": self.plan,
            "seed": self.seed,
            "samples": list(self.samples),
            "losses": [_plain(loss) for loss in self.losses],
            "samples_per_sec": _plain(self.samples_per_sec),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        read = {"samples": tuple(value["samples"]), "losses": tuple(map(_read, value["losses"]))}
        return cls(**{**value, **read, "samples_per_sec": _read(value["samples_per_sec"])})


def _plain(value: float) -> float | str | None:
    return None if math.isnan(value) else str(value) if math.isinf(value) else value


def _read(value: float | str | None) -> float:
    return math.nan if value is None else float(value)
