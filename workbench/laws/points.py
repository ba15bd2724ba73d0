"""Points: the runs that a law is fitted to, each with its parameters, its tokens and its final loss."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.codec import JsonDataclass

FEWEST = 5
"""Points below which nothing is fitted: the law has five numbers."""
VARIED = 2
"""Sizes and amounts of data below which nothing is fitted: what never varied cannot be told apart from the rest."""


class PointsError(ValueError):
    """Points that no law can be fitted to; the message says what was given, what is wanted and what to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points(JsonDataclass):
    """Measured runs, as columns of equal length."""

    parameters: tuple[float, ...]
    """Parameters of each model (N)."""
    tokens: tuple[float, ...]
    """Tokens, or samples, that each was trained on (D)."""
    loss: tuple[float, ...]
    """Final loss of each (L), all in the same unit; above 0."""
    run: tuple[str, ...]
    """The run that each belongs to; points of one run share its luck."""

    def __len__(self) -> int:
        return len(self.loss)

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]]) -> "Points":
        """Points from rows of (parameters, tokens, loss) or (parameters, tokens, loss, run).

        Raises:
            PointsError: a row of another length, or a value that is no number above 0.
        """
        columns: list[list[float]] = [[], [], []]
        names = []
        for place, row in enumerate(rows):
            if len(row) not in (3, 4):
                raise PointsError(
                    f"point {place}, {tuple(row)!r:.80}: (parameters, tokens, loss) is wanted, or these and the name of its run"
                )
            for name, column, value in zip(("parameters", "tokens", "loss"), columns, row, strict=False):
                try:
                    column.append(positive(value, name))
                except PointsError as error:
                    raise PointsError(f"point {place}: {error}") from None
            names.append(str(row[3]) if len(row) == 4 else f"run {place}")
        return cls(parameters=tuple(columns[0]), tokens=tuple(columns[1]), loss=tuple(columns[2]), run=tuple(names))

    @property
    def rows(self) -> list[tuple[float, float, float, str]]:
        """Inverse of `of`."""
        return list(zip(self.parameters, self.tokens, self.loss, self.run, strict=True))

    @property
    def sizes(self) -> tuple[float, ...]:
        """The different numbers of parameters, ascending."""
        return tuple(sorted(set(self.parameters)))

    @property
    def amounts(self) -> tuple[float, ...]:
        """The different numbers of tokens, ascending."""
        return tuple(sorted(set(self.tokens)))

    def compute(self, per: float) -> tuple[float, ...]:
        """Training FLOPs of each: `per` · N · D."""
        return tuple(per * n * d for n, d in zip(self.parameters, self.tokens, strict=True))

    def where(self, keep: Iterable[bool]) -> "Points":
        """Those of them whose flag is set."""
        return Points.of([row for row, kept in zip(self.rows, keep, strict=True) if kept])

    def check(self) -> "Points":
        """These points, if a law can be fitted to them.

        Raises:
            PointsError: too few, or one of the two has not been varied.
        """
        if len(self) < FEWEST:
            raise PointsError(
                f"{len(self)} points were given, and the law E + A/N^α + B/D^β has five numbers to find: at least {FEWEST} points are "
                "wanted, better 15 or more; add short runs of small models, such as 4 sizes × 4 amounts of data"
            )
        for what, values, remedy in (
            ("parameters", self.sizes, "runs of a smaller and a larger model"),
            ("tokens", self.amounts, "shorter and longer runs"),
        ):
            if len(values) < VARIED:
                raise PointsError(
                    f"all {len(self)} points have the same number of {what} ({values[0]:,.0f}), so its effect cannot be told: "
                    f"add {remedy}, at least by a factor of 4"
                )
        return self


def positive(value: Any, name: str) -> float:
    """The value, if it is a finite number above 0.

    Raises:
        PointsError: it is not; the message has its name.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise PointsError(f"{name}={value!r} is not a number") from None
    if not (math.isfinite(number) and number > 0):
        hint = "; a run that has diverged teaches the law nothing: leave it out" if name == "loss" else ""
        raise PointsError(f"{name}={value!r}: a finite number above 0 is wanted{hint}")
    return number
