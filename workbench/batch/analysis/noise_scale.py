"""NoiseScale: how large a batch must be before its gradient is more signal than noise, from two norms per step, with its interval.

Data parallelism and accumulation have W groups of b samples in each step, and so two numbers for nothing: s, the mean square of a group's
gradient before the reduction, and g, the square of the mean gradient after it. Of samples that are drawn independently,

    |G|²  = (W g − s) / (W − 1)            the square of the true gradient
    tr Σ  = b W / (W − 1) · (s − g)        the variance of one sample's gradient, summed over the parameters
    B     = tr Σ / |G|²                    the simple noise scale, in samples

are unbiased step by step, so B is the ratio of their means (the mean of the ratios is far off). Sources: McCandlish et al., An Empirical
Model of Large-Batch Training, arXiv 1812.06162, appendix A.1; its pair B_small, B_big is b, W b here.

Batches that are dealt out of a dataset of N samples without repetition are not independent: two samples of a step are never the same. Then
the first is too small by tr Σ / N, which is put right where N is known (a small dataset's B would come out too large by about B / N).

What it does not say: it weighs all parameters alike, which Adam does not, and it is an order of magnitude for the batch from which more
samples stop paying; `wb.steps_to_target` measures that directly.

A noise scale in words: what a reader of it should know, and what would make it better.

A run's gradient norms, as its ranks have written them down: put together into a NoiseScale.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.batch.analysis.noise_estimate import ENOUGH, NoiseBlock, NoiseScaleError, NoiseSteps, relative_width
from workbench.core import units
from workbench.core.codec import JsonDataclass, OrInf
from workbench.core.display import table as display

SHORT = 4.0
"""Times by which the noise scale exceeds a group's samples, before larger groups are advised."""
MOVED = 1.5
"""Times by which stretches of a training differ, before it is worth a word."""
LARGER = 4
"""Times by which they then are to be larger."""


def samples(value: float) -> str:
    """A number of samples as text.

    >>> samples(83.8), samples(float("inf"))
    ('83.8', 'unknown')
    """
    return "unknown" if math.isinf(value) else units.count(float(f"{value:.3g}"))


def left_out(lost: int, start: int, count: int) -> list[str]:
    """Steps that do not count.

    Args:
        lost: those whose gradients are no numbers.
        start: those at the beginning whose gradients are of another size.
        count: all steps.
    """
    told = []
    if lost:
        told.append(f"{lost} of {count} steps left out: their gradients were inf, NaN or 0 (in fp16 a few at the start are normal)")
    if start:
        told.append(f"the first {start} steps left out: gradients still changed in size")
    return told


def advice(result: "NoiseScale") -> list[str]:
    """What would help, and what to beware of."""
    told, known, now = [], math.isfinite(result.b_simple), result.micro_batch
    if not result.enough and (not known or result.b_simple > SHORT * now):
        what = f"{samples(result.b_simple)} samples" if known else "still unknown"
        gain = f": with {LARGER * now} about {result.steps_with(micro_batch=LARGER * now):,} steps in all" if known else ""
        told.append(f"groups of {now} samples are small beside the noise scale ({what}): larger ones help more than more steps{gain}")
    known_blocks = [block for block in result.over_time if block.low > 0 and math.isfinite(block.high)]
    if known_blocks:
        least, most = min(known_blocks, key=lambda block: block.high), max(known_blocks, key=lambda block: block.low)
        if _apart(least, most):
            told.append(
                f"it moves while training goes on: {samples(least.b_simple)} in steps {least.first}–{least.last}, "
                f"{samples(most.b_simple)} in steps {most.first}–{most.last}; see over_time"
            )
    if result.dataset_size and now * result.groups > result.dataset_size:
        told.append(f"a step takes more than the {units.count(result.dataset_size)} samples of the dataset")
    return told


def _apart(least: "NoiseBlock", most: "NoiseBlock") -> bool:
    """Do two stretches differ, beyond what happens when many are compared: by twice what their intervals allow for?"""
    allowed = math.log(least.high / least.low) + math.log(most.high / most.low)  # twice the half widths
    return most.b_simple > MOVED * least.b_simple and math.log(most.b_simple / least.b_simple) > allowed


LEVEL = 0.9
"""Share of intervals that hold the truth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale(display.Shown, JsonDataclass):
    """The gradient noise scale with its interval, and whether the steps were enough to know it."""

    b_simple: OrInf
    """tr Σ / |G|², in samples; inf where |G|² did not come out above 0."""
    low: float
    """Lower end of its interval."""
    high: OrInf
    """Upper end; inf where it is not known that |G|² is above 0."""
    squares: float
    """|G|², the square of the true gradient."""
    trace: float
    """tr Σ, the variance of one sample's gradient, summed over the parameters."""
    steps: int
    """Those it was made of."""
    steps_needed: int
    """So many more, and it is known well enough; 0 = it is. At least so many, where `high` is inf."""
    micro_batch: int
    """Samples of a group (b)."""
    groups: int
    """Groups of a step (W): micro-batches of a step, over all ranks."""
    every: int = 1
    """Only each so many-th step of the training was looked at."""
    level: float = LEVEL
    """Share of such intervals that hold the truth."""
    left_out: int = 0
    """Steps at the beginning that were left out, as their gradients were of another size."""
    dataset_size: int | None = None
    """Samples that steps are dealt out of without repetition; None = drawn independently."""
    exact: bool = False
    """From the gradients of single samples, at one moment."""
    optimizer: Mapping[str, Any] | None = None
    """Settings of the optimizer that trained meanwhile."""
    over_time: tuple[NoiseBlock, ...] = ()
    """Over the training, stretch by stretch."""
    notes: tuple[str, ...] = ()
    """What a reader should know."""
    pairs: tuple[tuple[OrInf, OrInf], ...] = field(default=(), repr=False)
    """Step by step, the mean square of a group's gradient, and the square of the mean gradient; inf where it was no number."""

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[float, float]],
        *,
        micro_batch: int,
        groups: int,
        level: float = LEVEL,
        dataset_size: int | None = None,
        every: int = 1,
        optimizer: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
    ) -> "NoiseScale":
        """The noise scale that two norms per step tell.

        Args:
            pairs: step by step, the mean square of a group's gradient, and the square of the mean gradient. Steps in which one of them is
                not a number above 0 (fp16 that overflowed) are left out.
            micro_batch: samples of a group.
            groups: of a step, 2 or more.
            level: share of intervals that hold the truth.
            dataset_size: samples that a step is dealt out of without repetition; None = drawn independently.
            every: only each so many-th step was looked at, and is in `pairs`.
            optimizer: settings of the optimizer that trained meanwhile.
            notes: what a reader should know besides.

        Raises:
            NoiseScaleError: fewer than two groups or two steps, or no step has gradients that are numbers.
        """
        found = NoiseSteps.of(pairs, micro_batch=micro_batch, groups=groups, level=level, dataset_size=dataset_size, every=every)
        trace, squares, start = found.trace, found.squares, found.start
        whole = found.over(start, len(trace))
        result = cls(
            b_simple=whole.b_simple,
            low=whole.low,
            high=whole.high,
            squares=float(squares[start:].mean()),
            trace=float(trace[start:].mean()),
            steps=len(trace) - start,
            steps_needed=found.needed(),
            micro_batch=micro_batch,
            groups=groups,
            every=every,
            level=level,
            left_out=start,
            dataset_size=dataset_size,
            optimizer=optimizer,
            over_time=found.stretches(),
            pairs=tuple((_number(small), _number(big)) for small, big in pairs),
        )
        return replace(result, notes=(*notes, *left_out(found.lost, start, len(pairs)), *advice(result)))

    @property
    def enough(self) -> bool:
        """Is it known well enough, to about 10 %?"""
        return self.exact or not self.steps_needed

    @property
    def relative_error(self) -> float:
        """Half the width of the interval, as a fraction of the estimate; inf where it has no upper end."""
        return relative_width(NoiseBlock(first=1, last=self.steps, b_simple=self.b_simple, low=self.low, high=self.high))

    def steps_with(self, *, micro_batch: int | None = None, groups: int | None = None) -> int:
        """About how many steps of the training it would take in all, with other groups.

        The variance goes with ((1 + B/b)² / (W − 1) + 1) / W, where the noise of single samples is near to normal.

        Args:
            micro_batch: samples of a group; None = as now.
            groups: of a step; None = as now.
        """
        b, w = micro_batch or self.micro_batch, groups or self.groups
        if b < 1 or w < 2:
            raise NoiseScaleError(f"micro_batch={b}, groups={w}: at least 1 sample and 2 groups are wanted")
        if not math.isfinite(self.b_simple):
            return self.every * self.steps + self.steps_needed
        ratio = _variance(self.b_simple / b, w) / _variance(self.b_simple / self.micro_batch, self.groups)
        narrow = math.isfinite(self.high)
        taken = self.every * self.steps
        now = taken * (self.relative_error / ENOUGH) ** 2 if narrow else taken + self.steps_needed
        return max(2, math.ceil(now * ratio))

    def running(self, points: int = 40) -> tuple[NoiseBlock, ...]:
        """The estimate and its interval as they were after more and more of the steps: how it narrows.

        Args:
            points: how often it is looked at.
        """
        if not self.pairs:
            return ()
        steps = NoiseSteps.of(
            self.pairs,
            micro_batch=self.micro_batch,
            groups=self.groups,
            level=self.level,
            dataset_size=self.dataset_size,
            every=self.every,
        )
        return steps.running(points)

    @property
    def summary(self) -> str:
        """One line: the estimate, its interval, and whether it is enough."""
        return f"noise scale {samples(self.b_simple)} ({self._between}): {self.word}"

    @property
    def word(self) -> str:
        """Is it known well enough, in words?"""
        if self.exact:
            return "by the gradients of single samples"
        if self.enough:
            return "enough steps"
        return f"not enough: {'at least ' if math.isinf(self.high) else 'about '}{self.steps_needed:,} more steps needed"

    @property
    def _between(self) -> str:
        if self.low == self.high:
            return "exact"
        high = "?" if math.isinf(self.high) else samples(self.high)
        return f"{units.percent(self.level)}: {samples(self.low)} … {high}"

    @property
    def table(self) -> display.Table:
        """What was measured, line by line."""
        steps = f"{self.steps:,} steps" + (f" (one of {self.every})" if self.every > 1 else "")
        over = f"{self.groups} gradients" if self.exact else f"{steps} of {self.groups} groups of {self.micro_batch} samples"
        rows = [
            ["noise scale B = tr Σ / |G|²", f"{samples(self.b_simple)} samples", self._between],
            ["signal |G|²", f"{self.squares:.3g}", "square of the true gradient"],
            ["noise tr Σ", f"{self.trace:.3g}", "variance of one sample's gradient"],
            ["measured over", over, self.word],
        ]
        title = "Gradient noise scale" + (", exact" if self.exact else "")
        return display.Table(columns=("", "value", ""), rows=rows, title=title, note="; ".join(self.notes) or None)

    to_frame = display.frame_method("over_time", NoiseBlock)
    plot = display.plot_method("noise_scale")

    def __repr__(self) -> str:
        return f"NoiseScale({samples(self.b_simple)}, {self._between}, {self.word})"


def _variance(ratio: float, groups: int) -> float:
    return ((1 + ratio) ** 2 / (groups - 1) + 1) / groups


def _number(value: float) -> float:
    return float(value) if math.isfinite(value) else math.inf


def combined(ranks: Sequence[Sequence[Mapping[str, Any]]], *, notes: Sequence[str] = ()) -> NoiseScale:
    """The noise scale of a run.

    Args:
        ranks: of each rank, a line that says what it is of, and one per step: the mean square of its micro-batches' gradients, and its
            share of the square of the mean gradient. Steps that not all ranks have written yet do not count.
        notes: what a reader should know.

    Raises:
        NoiseScaleError: not all ranks have begun, or there are too few steps, or none with gradients that are numbers.
    """
    heads = [rows[0] for rows in ranks if rows]
    if not heads or len(heads) < heads[0]["world_size"]:
        raise NoiseScaleError(
            f"{len(heads)} ranks have written gradient norms so far, and all are needed: wait until the first steps are done"
        )
    head = heads[0]
    by_step: dict[int, list[tuple[float, float] | None]] = {}
    for rows in ranks:
        for row in rows[1:]:
            by_step.setdefault(row["step"], []).append(None if row["small"] is None else (row["small"], row["big"]))
    steps = [step for step, found in sorted(by_step.items()) if len(found) == head["world_size"]]
    whole = [by_step[step] for step in steps]
    pairs = [pair for found in whole if (pair := _added(found)) is not None]
    told = list(notes)
    if split := len(whole) - len(pairs):
        told.append(
            f"{split} steps left out: their micro-batches were taken in parts, since memory ran out, or gradients came in parts (reentrant "
            "checkpoints that share a weight, two backwards through one forward)"
        )
    return NoiseScale.of(
        pairs,
        micro_batch=head["micro_batch"],
        groups=head["accumulation"] * head["world_size"],
        dataset_size=head["dataset_size"],
        every=_stride(steps, head["every"]),
        optimizer=head["optimizer"],
        notes=told,
    )


def _stride(steps: Sequence[int], begun_with: int) -> int:
    """One of how many steps was looked at, of late: a run may look less often than it began with."""
    latest = steps[-_LATEST:]
    return round((latest[-1] - latest[0]) / (len(latest) - 1)) if len(latest) > 1 else begun_with


_LATEST = 9
"""Steps that say how often a run looks now."""


def _added(found: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    """Over the ranks: the mean of the first, the sum of the second."""
    known = [pair for pair in found if pair is not None]
    if len(known) < len(found):
        return None
    return math.fsum(small for small, _ in known) / len(known), math.fsum(big for _, big in known)
