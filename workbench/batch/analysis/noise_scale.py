"""NoiseScale: how large a batch must be before its gradient is more signal than noise, estimated from two gradient norms per step.

With data parallelism or accumulation a step has W groups of b samples, and so two numbers without extra work: s, the mean square of a
group's gradient before the reduction, and g, the square of the mean gradient after it. For samples that are drawn independently,

    |G|²  = (W g − s) / (W − 1)            the square of the true gradient
    tr Σ  = b W / (W − 1) · (s − g)        the variance of one sample's gradient, summed over the parameters
    B     = tr Σ / |G|²                    the simple noise scale, in samples

are unbiased step by step, so B is the ratio of their means (the mean of the ratios is far off). Sources: McCandlish et al., An Empirical
Model of Large-Batch Training, arXiv 1812.06162, appendix A.1; its pair B_small, B_big is b, W b here.

Batches that are drawn from a dataset of N samples without repetition are not independent: |G|² is too small by tr Σ / N, which is
corrected where N is known (a small dataset's B would be too large by about B / N).

Left out: all parameters have the same weight, unlike in Adam. B is an order of magnitude for the batch from which more samples stop
paying, which `wb.steps_to_target` measures directly. `noise_scale_of_ranks` reads what the ranks of a run have written.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.batch.analysis.noise_scale_estimator import ENOUGH, NoiseBlock, NoiseScaleError, NoiseSteps, relative_width
from workbench.core import units
from workbench.core.codec import JsonDataclass, OrInf
from workbench.core.display import table as display
from workbench.core.progress import INTERRUPTED

SMALL_GROUP = 4.0
"""Larger groups are advised where the noise scale is this many times a group's samples."""
ADVISED = 4
"""They are to be this many times larger."""
MOVED = 1.5
"""Ratio of two windows that is worth a note."""
LEVEL = 0.9
"""Share of intervals that contain the true value."""
LATEST = 9
"""Steps that show how often a run measures at present."""


def samples(value: float) -> str:
    """A number of samples as text.

    >>> samples(83.8), samples(float("inf"))
    ('83.8', 'unknown')
    """
    return "unknown" if math.isinf(value) else units.count(float(f"{value:.3g}"))


def _notes_on_steps(not_finite: int, start: int, count: int) -> list[str]:
    """Which of all steps were left out: those with gradients that are NaN or infinite, and the initial transient."""
    notes = []
    if not_finite:
        notes.append(f"{not_finite} of {count} steps left out: their gradients were inf, NaN or 0 (in fp16 a few at the start are normal)")
    if start:
        notes.append(f"the first {start} steps left out: gradients still changed in size")
    return notes


def _advice(result: "NoiseScale") -> list[str]:
    """Notes on how to improve the estimate, and on its limits."""
    notes, known, now = [], math.isfinite(result.b_simple), result.micro_batch
    if not result.enough and (not known or result.b_simple > SMALL_GROUP * now):
        what = f"{samples(result.b_simple)} samples" if known else "still unknown"
        gain = f": with {ADVISED * now} about {result.steps_with(micro_batch=ADVISED * now):,} steps in all" if known else ""
        notes.append(f"groups of {now} samples are small beside the noise scale ({what}): larger ones help more than more steps{gain}")
    known_blocks = [block for block in result.over_time if block.low > 0 and math.isfinite(block.high)]
    if known_blocks:
        least, most = min(known_blocks, key=lambda block: block.high), max(known_blocks, key=lambda block: block.low)
        if _apart(least, most):
            notes.append(
                f"it moves while training goes on: {samples(least.b_simple)} in steps {least.first}–{least.last}, "
                f"{samples(most.b_simple)} in steps {most.first}–{most.last}; see over_time"
            )
    if result.dataset_size and now * result.groups > result.dataset_size:
        notes.append(f"a step takes more than the {units.count(result.dataset_size)} samples of the dataset")
    return notes


def _apart(least: "NoiseBlock", most: "NoiseBlock") -> bool:
    """Do two windows differ by twice what their intervals allow for? More than chance, where many are compared."""
    allowed = math.log(least.high / least.low) + math.log(most.high / most.low)  # twice the half widths
    return most.b_simple > MOVED * least.b_simple and math.log(most.b_simple / least.b_simple) > allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale(display.Shown, JsonDataclass):
    """The gradient noise scale with its interval, and whether there were enough steps."""

    b_simple: OrInf
    """tr Σ / |G|², in samples; inf where the estimate of |G|² is not above 0."""
    low: float
    """Lower end of its interval."""
    high: OrInf
    """Upper end; inf where |G|² may be 0."""
    squares: float
    """|G|², the square of the true gradient."""
    trace: float
    """tr Σ, the variance of one sample's gradient, summed over the parameters."""
    steps: int
    """Measured steps, without those left out."""
    steps_needed: int
    """Further steps until it is known well enough; 0 = it is. At least so many where `high` is inf."""
    micro_batch: int
    """Samples of a group (b)."""
    groups: int
    """Groups of a step (W): micro-batches of a step, over all ranks."""
    every: int = 1
    """Every how many-th step of the training was measured."""
    level: float = LEVEL
    """Share of such intervals that contain the true value."""
    left_out: int = 0
    """Length of the initial transient, which was left out."""
    dataset_size: int | None = None
    """Samples that steps are drawn from without repetition; None = drawn independently."""
    exact: bool = False
    """Is it from the gradients of single samples, with the same weights?"""
    optimizer: Mapping[str, Any] | None = None
    """Settings of the optimizer."""
    over_time: tuple[NoiseBlock, ...] = ()
    """Windowed estimates over the training."""
    notes: tuple[str, ...] = ()
    """Remarks."""
    pairs: tuple[tuple[OrInf, OrInf], ...] = field(default=(), repr=False)
    """Per step, the mean square of a group's gradient, and the square of the mean gradient; inf where it was not finite."""

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
        """Estimate the noise scale from two norms per step.

        Args:
            pairs: per step, the mean square of a group's gradient, and the square of the mean gradient. Steps in which one of them is not
                a number above 0 (fp16 that overflowed) are left out.
            micro_batch: samples of a group.
            groups: of a step, 2 or more.
            level: share of intervals that contain the true value.
            dataset_size: samples that a step is drawn from without repetition; None = drawn independently.
            every: every how many-th step was measured.
            optimizer: settings of the optimizer.
            notes: further remarks, which the result keeps.

        Raises:
            NoiseScaleError: fewer than two groups or two steps, or no step has gradients that are numbers.
        """
        measured = NoiseSteps.of(pairs, micro_batch=micro_batch, groups=groups, level=level, dataset_size=dataset_size, every=every)
        trace, squares, start = measured.trace, measured.squares, measured.start
        whole = measured.window(start, len(trace))
        result = cls(
            b_simple=whole.b_simple,
            low=whole.low,
            high=whole.high,
            squares=float(squares[start:].mean()),
            trace=float(trace[start:].mean()),
            steps=len(trace) - start,
            steps_needed=measured.needed(),
            micro_batch=micro_batch,
            groups=groups,
            every=every,
            level=level,
            left_out=start,
            dataset_size=dataset_size,
            optimizer=optimizer,
            over_time=measured.windows(),
            pairs=tuple((_finite_or_inf(small), _finite_or_inf(big)) for small, big in pairs),
        )
        return replace(result, notes=(*notes, *_notes_on_steps(measured.not_finite, start, len(pairs)), *_advice(result)))

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the measurement."""
        return any(note.startswith(INTERRUPTED) for note in self.notes)

    @property
    def enough(self) -> bool:
        """Whether the estimate is precise enough, to about 10 %."""
        return self.exact or not self.steps_needed

    @property
    def relative_error(self) -> float:
        """Half the width of the interval, as a fraction of the estimate; inf where it has no upper end."""
        return relative_width(NoiseBlock(first=1, last=self.steps, b_simple=self.b_simple, low=self.low, high=self.high))

    def steps_with(self, *, micro_batch: int | None = None, groups: int | None = None) -> int:
        """Estimate the steps that a sufficient measurement takes in all with other groups.

        The variance goes with ((1 + B/b)² / (W − 1) + 1) / W, where the noise of single samples is nearly normal.

        Args:
            micro_batch: samples of a group; None = as now.
            groups: of a step; None = as now.
        """
        b, w = micro_batch or self.micro_batch, groups or self.groups
        if b < 1 or w < 2:
            raise NoiseScaleError(f"micro_batch={b}, groups={w}: at least 1 sample and 2 groups are allowed")
        if not math.isfinite(self.b_simple):
            return self.every * self.steps + self.steps_needed
        ratio = _variance(self.b_simple / b, w) / _variance(self.b_simple / self.micro_batch, self.groups)
        narrow = math.isfinite(self.high)
        taken = self.every * self.steps
        now = taken * (self.relative_error / ENOUGH) ** 2 if narrow else taken + self.steps_needed
        return max(2, math.ceil(now * ratio))

    def running(self, points: int = 40) -> tuple[NoiseBlock, ...]:
        """The estimate and its interval after more and more of the steps, at about `points` of them."""
        if not self.pairs:
            return ()
        steps = NoiseSteps.of(
            self.pairs, micro_batch=self.micro_batch, groups=self.groups, level=self.level, dataset_size=self.dataset_size, every=self.every
        )
        return steps.running(points)

    @property
    def summary(self) -> str:
        """One line: the estimate, its interval, and whether there were enough steps."""
        return f"noise scale {samples(self.b_simple)} ({self._between}): {self.word}"

    @property
    def word(self) -> str:
        """Whether there were enough steps, in words."""
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
        """A row per quantity."""
        steps = f"{self.steps:,} steps" + (f" (one of {self.every})" if self.every > 1 else "")
        over = f"{self.groups} gradients" if self.exact else f"{steps} of {self.groups} groups of {self.micro_batch} samples"
        rows = [
            ["noise scale B = tr Σ / |G|²", f"{samples(self.b_simple)} samples", self._between],
            ["signal |G|²", f"{self.squares:.3g}", "square of the true gradient"],
            ["noise tr Σ", f"{self.trace:.3g}", "variance of one sample's gradient"],
            ["measured over", over, self.word],
        ]
        title = "Gradient noise scale" + (", exact" if self.exact else "")
        return display.Table(columns=("", "value", ""), rows=rows, title=title, note=display.notes(self.notes) or None)

    to_frame = display.frame_method("over_time", NoiseBlock)
    plot = display.plot_method("noise_scale")

    def __repr__(self) -> str:
        return f"NoiseScale({samples(self.b_simple)}, {self._between}, {self.word})"


def _variance(ratio: float, groups: int) -> float:
    return ((1 + ratio) ** 2 / (groups - 1) + 1) / groups


def _finite_or_inf(value: float) -> float:
    return float(value) if math.isfinite(value) else math.inf


def noise_scale_of_ranks(ranks: Sequence[Sequence[Mapping[str, Any]]], *, notes: Sequence[str] = ()) -> NoiseScale:
    """The noise scale of a run.

    Args:
        ranks: the rows of each rank: a head, then per step the mean square of its micro-batches' gradients, and its share of the square of
            the mean gradient. Steps that not all ranks have written yet do not count.
        notes: further remarks, which the result keeps.

    Raises:
        NoiseScaleError: a rank has not begun, or there are too few steps with finite gradients.
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
    steps = [step for step, by_rank in sorted(by_step.items()) if len(by_rank) == head["world_size"]]
    pairs = [pair for step in steps if (pair := _over_ranks(by_step[step])) is not None]
    latest, remarks = steps[-LATEST:], list(notes)  # a run may measure less often than it began with
    if split := len(steps) - len(pairs):
        remarks.append(
            f"{split} steps left out: their micro-batches were split, since memory ran out, or gradients came in parts (reentrant "
            "checkpoints that share a weight, two backwards through one forward)"
        )
    return NoiseScale.of(
        pairs,
        micro_batch=head["micro_batch"],
        groups=head["accumulation"] * head["world_size"],
        dataset_size=head["dataset_size"],
        every=round((latest[-1] - latest[0]) / (len(latest) - 1)) if len(latest) > 1 else head["every"],
        optimizer=head["optimizer"],
        notes=remarks,
    )


def _over_ranks(pairs: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    """The mean of the first norms, and the sum of the second; None = a rank has none."""
    known = [pair for pair in pairs if pair is not None]
    if len(known) < len(pairs):
        return None
    return math.fsum(small for small, _ in known) / len(known), math.fsum(big for _, big in known)
