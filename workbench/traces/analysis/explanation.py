"""Explains in words what the breakdown of a trace shows, and what a trace cannot show."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.traces.analysis.breakdown import PARTS, Breakdown, Overlap

CLEAR = 0.15
"""Fraction of the step from which on a part is blamed, as a diagnosis by experiment does: without it the step is 1.18 times as fast."""
WAITED = "computed or waited for a core: they are timed by the clock, and beside other processes an operator waits for its slowest thread"
"""What a trace of a CPU does not show of its operators."""
UNEVEN = 2.0
"""The longest step over the shortest from which on that is said. Chosen; a matter of words."""
VERDICTS = {
    "data_wait": ("input-bound", "the step waits for its loader", "more workers, cheaper samples, or data that is prepared beforehand"),
    "h2d": ("transfer-bound", "nothing computes while batches are copied to the device", "pinned memory and non_blocking copies"),
    "communication": (
        "communication-bound",
        "ranks exchange numbers, and nothing computes meanwhile",
        "larger buckets, accumulation, fewer bytes",
    ),
    "host": (
        "host-bound",
        "the host is at work while nothing computes",
        "compile, CUDA graphs, larger batches, or less Python in the loop",
    ),
    "idle": ("idle", "neither the device nor the host's operators are at work", "look for Python, locks or I/O between the operators"),
    "other": ("other", "copies on the device, or time outside of every mark", "look at trace.ops('kernel')"),
}
"""Part → verdict, what it means, what is commonly tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(display.Shown, JsonDataclass):
    """A verdict on observed shares. What removing a part would really gain, only an experiment tells: `wb.diagnose`."""

    verdict: str
    """"input-bound", "transfer-bound", "communication-bound", "host-bound", "idle", "other", "compute-bound" or "inconclusive"."""
    why: str
    next: str
    cannot: tuple[str, ...]
    """What this trace cannot tell."""
    shares: Mapping[str, float]
    """Part → fraction 0..1 of the step."""

    def __post_init__(self) -> None:
        if self.verdict == "data-bound":  # as it was called in what was stored before
            object.__setattr__(self, "verdict", "input-bound")

    @property
    def table(self) -> display.Table:
        """Verdict, why, next, and what it cannot tell."""
        rows = [["verdict", self.verdict], ["why", self.why], ["next", self.next], *(["it cannot tell", limit] for limit in self.cannot)]
        return display.Table(columns=("", "what the trace says"), rows=rows, title="The traced step in words")

    def to_frame(self) -> Any:
        """A DataFrame with one row per part."""
        return display.frame([{"part": part, "share": share} for part, share in self.shares.items()], columns=("part", "share"))

    def __repr__(self) -> str:
        return f"Explanation({self.verdict!r})"


def explain(breakdown: Breakdown, overlap: Overlap, *, marked: bool, ranks: int | None, stacks: bool = False) -> Explanation:
    """Judge the shares of a breakdown: the largest part that is not computing, if it is large enough."""
    shares = {part: breakdown.share(part) for part in PARTS}
    cannot = _cannot(breakdown, overlap, marked, ranks, stacks)

    def explained(verdict: str, why: str, next: str) -> Explanation:
        return Explanation(verdict=verdict, why=why, next=next, cannot=cannot, shares=shares)

    if not breakdown.steps or any(map(math.isnan, shares.values())):
        shares = {}
        return explained("inconclusive", "the trace has no step with a length", "trace some steps with a schedule: wb.trace(step, loader)")
    if breakdown.unrecorded:
        return explained(
            "inconclusive",
            f"{breakdown.unrecorded:,} launches were recorded, but no work of the device: only the host was profiled, or CUPTI failed",
            "trace with ProfilerActivity.CUDA, where no other profiler runs and the driver lets users profile: wb.trace(step, loader)",
        )
    part = max(VERDICTS, key=lambda name: shares[name])
    seconds = f"{units.seconds(breakdown.mean(part))} of {units.seconds(breakdown.mean())}, {units.percent(shares[part])}"
    if not marked and (part in ("idle", "other", "host") or (len(breakdown.steps) == 1 and part == "data_wait")):
        return explained(
            "inconclusive",
            f"{part} takes {seconds}, but without step marks that may lie before or after training",
            "trace with a schedule, and call step() of the profiler after every step: wb.trace(step, loader) does both",
        )
    if shares[part] < CLEAR:
        why = f"computing takes {units.percent(shares['compute'])} of the step; next comes {part}, {seconds}"
        look = "trace.ops() names the operators that take longest"
        if (uneven := _uneven(breakdown)) and breakdown.device == "cpu":
            look += "; trace again on a quiet machine, or after torch.set_num_threads(1)"
        return explained("compute-bound", f"{why}{uneven}", look)
    verdict, meaning, tried = VERDICTS[part]
    return explained(verdict, f"{meaning}: {part} takes {seconds}", f"Commonly tried: {tried}. wb.diagnose proves what it gains")


def _uneven(breakdown: Breakdown) -> str:
    """That steps take very different times, as the end of a sentence; "" = they do not."""
    times = [step.total for step in breakdown.steps]
    if len(times) < 3 or max(times) < UNEVEN * min(times):
        return ""
    reason = ": operators may have waited for cores that other processes had, or their inputs differ" if breakdown.device == "cpu" else ""
    return f"; steps take from {units.seconds(min(times))} to {units.seconds(max(times))}{reason}"


def _cannot(breakdown: Breakdown, overlap: Overlap, marked: bool, ranks: int | None, stacks: bool) -> tuple[str, ...]:
    limits = ["what removing a part would gain: shares are not gains, and the profiler itself slows the step down"]
    if breakdown.device == "cpu":
        more = "trace.idle() names its functions" if stacks else "with_stack=True tells more"
        limits.append(f"whether the time outside of operators is Python at work, waiting or asleep ({more})")
        limits.append(f"whether operators {WAITED}")
    if overlap.mean("communication") > 0 and ranks != 1:
        limits.append(
            "how much of a collective is waiting for a slower rank: those of all ranks tell, TraceSet.load(directory).stragglers()"
        )
    elif ranks and ranks > 1:
        limits.append(f"why no collective is to be seen, although the file is of one of {ranks} ranks")
    if not marked:
        limits.append("how steps differ: there are no step marks")
    elif len(breakdown.steps) < 3:
        limits.append(f"how much steps vary: it has {len(breakdown.steps)}")
    limits.append("whether a full prefetch queue hides a slow loader, unless tracing began after as many steps as the queue has batches")
    return tuple(limits)
