"""Checks plans against published sweeps over layouts: the fastest layout on the short list, what the first plan and the list lose, steps in
their ranges, and memory. Plans use datasheets alone; nothing is fitted to these rows.

Run: python benchmarks/reality_layouts.py
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from published_layouts import (
    BATCH,
    GRIDS,
    NANOTRON,
    SIZES,
    TRAINER,
    TRIED,
    Found,
    Grid,
    layouts_of,
    transformer_of,
    workload_of,
)
from published_scaling import ITERATIONS, Iteration
from scipy.optimize import minimize
from scipy.stats import norm

import workbench as wb
from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.plan.layouts import Layouts, list_layouts
from workbench.cluster.analysis.plan.memory import memory
from workbench.cluster.analysis.plan.plans import Plans
from workbench.cluster.analysis.plan.ranges import EFFICIENCY, HELD, LAUNCH, LEVELS, LINKS, MESSAGE, PlanError
from workbench.cluster.analysis.plan.search import MEASURED
from workbench.cluster.analysis.plan.timing import HardwareRates, seconds
from workbench.cluster.analysis.plan.workload import Version, Workload, versions_of, workload_of_transformer
from workbench.cluster.analysis.transformer import Transformer
from workbench.core.display import table as display
from workbench.core.statistics import Interval

CLUSTER, PEAK, MEMORY = Cluster.named("DGX-A100"), 312e12, 80e9
OTHER, OTHER_PEAK = Cluster.named("DGX-H100"), 989.5e12
ROOM = MEMORY * 0.95
GRADIENTS = 2
"""Bytes of a gradient there: 13B on single GPUs of 80 GB leaves no room for more."""


def model_of(grid: Grid) -> Transformer:
    """By its sizes."""
    layers, hidden, heads, wide = SIZES[grid.model]
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "feed_forward": wide, "vocabulary": 128_000, "sequence": grid.sequence}
    return Transformer(**sizes, gated=True, tied=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layout: what was measured, and what we say."""

    measured: float
    """Seconds; infinite where memory ran out."""
    said: Interval
    fits: bool
    """Do we say so?"""
    needed: tuple[float, float]
    """Bytes of the fullest GPU, low and high."""
    room: float
    """The GPU's memory over what the allocator is predicted to hold."""

    @property
    def told(self) -> bool:
        """Does the range of its memory allow what happened?"""
        low, high = self.needed
        return low <= MEMORY if math.isfinite(self.measured) else high > MEMORY

    @property
    def open(self) -> bool:
        """Does the range leave it open?"""
        low, high = self.needed
        return low <= MEMORY < high


@cache
def candidates(grid: Grid) -> tuple[Workload, Layouts]:
    """What is trained, and all its layouts without interleaved pipelines."""
    workload = workload_of_transformer(
        model_of(grid),
        sequence=None,
        precision="amp_bf16",
        fused_attention=True,
        sequence_parallel=grid.sequence_parallel,
        gpus_per_node=8,
        gradient_bytes=GRADIENTS,
    )
    everything = list_layouts(workload, CLUSTER, [grid.gpus], grid.batch, ["zero1"], Counter())
    return workload, everything.select(everything.chunks == 1)


def keys(workload: Workload, found: Layouts) -> list[tuple[int, int, int, str]]:
    """Of layouts, as a Grid has them."""
    kinds = list(workload.computed)
    columns = zip(found.tensor.tolist(), found.pipeline.tolist(), found.micro_batch.tolist(), found.checkpointing.tolist(), strict=True)
    return [(tensor, pipeline, micro, kinds[kind]) for tensor, pipeline, micro, kind in columns]


@cache
def rows(grid: Grid) -> dict[tuple[int, int, int, str], Row]:
    """All layouts that were tried."""
    workload, everything = candidates(grid)
    held = memory(workload, everything, CLUSTER.device.name)
    spans = ranges(workload, everything)
    found = {}
    for place, (key, span) in enumerate(zip(keys(workload, everything), spans, strict=True)):
        if key in grid.seconds:
            needed = (float(held.low[place]), float(held.high[place]))
            outside, total = float(held.groups["outside"][place]), float(held.total[place])
            room = HELD.mid * (MEMORY - outside) / (total - outside)
            found[key] = Row(measured=grid.seconds[key], said=span, fits=bool(total <= ROOM), needed=needed, room=room)
    return found


def rates(cluster: Cluster, peak: float, place: str, efficiency: Any = None, message: Any = None) -> HardwareRates:
    """Of hardware that is slow, in the middle or fast: place "low", "mid" or "high"; with what a measured step says, if it is given."""
    slow = {"low": "high", "mid": "mid", "high": "low"}[place]
    share, late = getattr(LINKS, place), {"low": 1.0, "mid": 0.0, "high": -1.0}[place]
    kernels = getattr(EFFICIENCY, place) if efficiency is None else efficiency
    launch, message = (getattr(LAUNCH, slow), getattr(MESSAGE, slow)) if efficiency is None else (LAUNCH.mid, message)
    return HardwareRates.of(cluster, peak, kernels, share, launch, (LINKS.mid / share,) * 2, message, late)


def ranges(workload: Workload, found: Layouts, cluster: Cluster = CLUSTER, peak: float = PEAK) -> list[Interval]:
    """Seconds of a step of each layout, low to high."""
    ends = [seconds(workload, found, rates(cluster, peak, place), 8).total for place in ("high", "mid", "low")]
    return [Interval(low=float(low), mid=float(mid), high=float(high)) for low, mid, high in zip(*ends, strict=True)]


def errors_once_calibrated() -> list[float]:
    """Of every layout that ran, the error of its seconds if the efficiency follows from another layout of its grid; each of them once."""
    errors = []
    for grid in GRIDS:
        workload, found = candidates(grid)
        measured = np.array([grid.seconds.get(key, math.inf) for key in keys(workload, found)])
        ran = np.flatnonzero(np.isfinite(measured))

        def taken(share: float, workload: Workload = workload, found: Layouts = found) -> Any:
            return seconds(workload, found, HardwareRates.of(CLUSTER, PEAK, share, LINKS.mid, LAUNCH.mid), 8).total

        for one in ran:
            low, high = 0.05, 1.5
            for _ in range(30):
                middle = (low + high) / 2
                low, high = (middle, high) if taken(middle)[one] > measured[one] else (low, middle)
            said = taken(low)
            errors += [abs(float(said[other] / measured[other]) - 1) for other in ran if other != one]
    return errors


@cache
def short_list(grid: Grid) -> Plans | None:
    """Ours, of the kinds that were tried."""
    try:
        return wb.plan(
            model_of(grid),
            CLUSTER,
            gpus=grid.gpus,
            global_batch=grid.batch,
            sharing="zero1",
            chunks=1,
            sequence_parallel=grid.sequence_parallel,
            gradient_bytes=GRADIENTS,
        )
    except PlanError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """What our short list costs on one grid."""

    grid: Grid
    best: tuple[int, int, int, str]
    listed: bool
    """Is the published best on our list?"""
    first: float
    """Seconds of our first plan that was tried, over the best's, less 1; infinite if it ran out of memory."""
    shortlist: float
    """The same of the best of our list."""
    five: float
    """The same of the best of the first five of our list that were tried."""


def regret(grid: Grid) -> Regret:
    """Of one grid."""
    known = grid.seconds
    best = min(known, key=lambda key: known[key])
    ours = [(one.tensor, one.pipeline, one.micro_batch, one.checkpointing) for one in short_list(grid) or ()]
    tried = [known[key] / known[best] - 1 for key in ours if key in known]
    least = [min(some, default=math.inf) for some in (tried, tried[:5])]
    return Regret(grid=grid, best=best, listed=best in ours, first=tried[0] if tried else math.inf, shortlist=least[0], five=least[1])


def iteration_ranges() -> list[tuple[str, Interval, float]]:
    """The published iterations under 3-D parallelism, by datasheets alone: name, said, measured."""
    found = []
    for one in ITERATIONS:
        for kind, parallel in (("full", False), ("selective", True)):
            found.append((f"{one.name}, {kind}", iteration_range(one, kind, parallel), getattr(one, kind)))
    return found


def iteration_range(one: Iteration, kind: str, parallel: bool) -> Interval:
    """Seconds of one, low to high."""
    workload = workload_of_transformer(
        Transformer(layers=one.layers, hidden=one.hidden, vocabulary=51_200, sequence=2048),
        sequence=None,
        precision="amp_bf16",
        fused_attention=False,
        sequence_parallel=parallel,
        gpus_per_node=8,
    )
    gpus = one.tensor * one.pipeline
    row = {"gpus": gpus, "data": 1, "tensor": one.tensor, "pipeline": one.pipeline, "chunks": one.chunks, "micro_batch": one.micro_batch}
    row |= {"accumulation": one.batch // one.micro_batch, "sharing": 0, "checkpointing": list(workload.computed).index(kind)}
    row |= {"shard": 1, "inside": 1}
    return ranges(workload, Layouts(**{name: np.array([value]) for name, value in row.items()}))[0]


@cache
def fastest() -> dict[tuple[str, int], Found]:
    """Model and GPUs → the fastest layout of the other source."""
    found: dict[tuple[str, int], Found] = {}
    for one in TRIED:
        key = one.model, one.gpus
        if one.seconds < (found[key].seconds if key in found else math.inf):
            found[key] = one
    return found


def tried(slower: float = math.inf, most: int = 512) -> tuple[Found, ...]:
    """Layouts of the other source that ran, with steps of so many times the fastest of their model and GPUs at most.

    Without tensor parallelism over two nodes, which is no plan of ours.
    """
    ran = [one for one in TRIED if one.tensor <= 8 and one.gpus <= most and math.isfinite(one.seconds)]
    return tuple(one for one in ran if one.seconds <= slower * fastest()[one.model, one.gpus].seconds)


@cache
def other_source(slower: float = 2.0) -> list[tuple[Found, Interval, float]]:
    """Of each of `tried`: what we say its step takes by datasheets alone, and the bytes of its fullest GPU."""
    found = []
    for model in NANOTRON:
        mine = tuple(one for one in tried(slower) if one.model == model)
        workload, layouts = workload_of(model), layouts_of(mine)
        held = memory(workload, layouts, OTHER.device.name).total
        found += list(zip(mine, ranges(workload, layouts, OTHER, OTHER_PEAK), held.tolist(), strict=True))
    return found


def named(model: str, poll: float | None = None, checked: bool | None = None) -> tuple[Version, ...]:
    """The versions of the other source's trainer, of one of its models."""
    return versions_of(workload_of(model), TRAINER, poll, checked, EFFICIENCY)


def versions(rows: tuple[Found, ...], nap: float = max(TRAINER.polls)) -> dict[Found, dict[str, Interval]]:
    """Seconds of each row as planned, and as each known version of its trainer takes them: with naps, with checks, and with both."""
    found: dict[Found, dict[str, Interval]] = {one: {} for one in rows}
    for model in sorted({one.model for one in rows}):
        mine = tuple(one for one in rows if one.model == model)
        for name, naps, checks in (("as planned", 0.0, False), ("naps", nap, False), ("checks", 0.0, True), ("both", nap, True)):
            workload = replace(workload_of(model), poll=naps, checked=checks)
            for one, span in zip(mine, ranges(workload, layouts_of(mine), OTHER, OTHER_PEAK), strict=True):
                if not ((naps and one.pipeline == 1) or (checks and one.gpus <= 8)):
                    found[one][name] = span
    return found


def explained(said: Mapping[Found, Mapping[str, Interval]]) -> float:
    """Share of the rows whose step lies in the range of a version of their trainer."""
    return sum(any(one.seconds in span for span in spans.values()) for one, spans in said.items()) / len(said)


def by_name(said: Mapping[Found, Mapping[str, Interval]]) -> tuple[float, float, float]:
    """Share of the rows in the range of a plan that knows the trainer's name, from its least version to its most; the median of high over
    low; and the median error of the geometric mean of its four versions.
    """
    ends = [(one.seconds, min(s.low for s in spans.values()), max(s.high for s in spans.values())) for one, spans in said.items()]
    mids = [
        statistics.geometric_mean(spans.get(name, spans.get(other, spans["as planned"])).mid for name, other in OTHERWISE)
        for spans in said.values()
    ]
    errors = [abs(mid / one.seconds - 1) for one, mid in zip(said, mids, strict=True)]
    covered = sum(low <= taken <= high for taken, low, high in ends) / len(ends)
    return covered, statistics.median(high / low for _, low, high in ends), statistics.median(errors)


OTHERWISE = (("as planned", "as planned"), ("naps", "as planned"), ("checks", "as planned"), ("both", "checks"))
"""Version → what it comes to where there is no pipeline; on a single node nothing is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What is said of rows where another row of their model set the level."""

    error: float
    """Median."""
    covered: float
    """Share of the pairs."""
    width: float
    """Median of high over low."""
    versions: float
    """That the measured row left, on average."""


@cache
def other_calibrated(rows: tuple[Found, ...], poll: float | None = 0.0, checked: bool | None = False) -> Calibrated:
    """Of each of these rows, from each other row of its model, as `PlanSearch.calibrated`; by default of the version without waits."""
    errors: list[float] = []
    inside: list[bool] = []
    widths: list[float] = []
    left: list[int] = []
    for model in sorted({one.model for one in rows}):
        mine = tuple(one for one in rows if one.model == model)
        known, layouts, measured = named(model, poll, checked), layouts_of(mine), np.array([one.seconds for one in mine])

        def taken(version: Version, place: str = "mid", layouts: Layouts = layouts) -> Any:
            found = rates(OTHER, OTHER_PEAK, place, getattr(version.efficiency, place), version.message.mid)
            return seconds(version.workload, layouts, found, 8).total

        nearest = [np.clip(measured, *(taken(version.at(level)) for level in LEVELS)) for version in known]
        levels = np.array([_levels(version, layouts, near) for version, near in zip(known, nearest, strict=True)])
        missed = np.maximum(0.0, abs(np.log(measured / np.array(nearest))) - MEASURED)
        for at in range(len(mine)):
            likely = [place for place in range(len(known)) if abs(levels[place, at]) <= 1 and not missed[place, at]]
            likely = likely or [int(np.lexsort((abs(levels[:, at]), missed[:, at]))[0])]
            each = [known[place].at(float(levels[place, at])) for place in likely]
            mid = np.exp(np.mean([np.log(taken(version)) for version in each], 0))
            ends = [taken(version, place) for version in each for place in ("low", "high")]
            low, high, others = np.min(ends, 0), np.max(ends, 0), np.arange(len(mine)) != at
            errors += np.abs(mid / measured - 1)[others].tolist()
            inside += ((low <= measured) & (measured <= high))[others].tolist()
            widths += (high / low)[others].tolist()
            left.append(len(each))
    return Calibrated(
        error=statistics.median(errors), covered=statistics.mean(inside), width=statistics.median(widths), versions=statistics.mean(left)
    )


def _levels(version: Version, layouts: Layouts, measured: Any) -> Any:
    """Of each row, the level at which this version takes as long as was measured, as `PlanSearch.calibrated`."""
    ends = []
    for taken in (measured / (1 + MEASURED), measured * (1 + MEASURED)):
        low, high = (np.full(len(taken), level) for level in LEVELS)
        for _ in range(30):
            level = (low + high) / 2
            share, message = (
                span.mid * np.where(up > 0, span.high / span.mid, span.low / span.mid) ** abs(up)
                for span, up in ((version.efficiency, -level), (version.message, level))
            )
            longer = seconds(version.workload, layouts, rates(OTHER, OTHER_PEAK, "mid", share, message), 8).total > taken
            low, high = np.where(longer, low, level), np.where(longer, level, high)
        ends.append(low)
    return np.minimum(np.maximum(ends[0], 0.0), ends[1])


def other_tries(tries: int = 5, again: bool = False, least: int = 8, **options: Any) -> dict[tuple[str, int], list[float]]:
    """Model and GPUs → throughput of the first of our plans that the other source has tried, over its fastest; 0 where one did not run.
    Layouts of both kinds of ZeRO, without what it never did.

    Args:
        tries: how many.
        again: is each chosen by a plan that knows what the last one took? Else all by the same plan.
        least: fewest GPUs.
        options: of the plan.
    """
    reached = {}
    for (name, gpus), best in fastest().items():
        if gpus < least:
            continue
        known = {(o.tensor, o.pipeline, o.micro_batch, o.sharing): o.seconds for o in TRIED if (o.model, o.gpus) == (name, gpus)}
        fixed: dict[str, Any] = {"gpus": gpus, "global_batch": BATCH, "sharing": ["ddp", "zero1"], "chunks": 1, "checkpointing": "none"}
        fixed |= {"loss_parallel": True, "top": 40, **options}
        done: dict[Any, float] = {}
        measured: Any = None
        plans: Any = None
        for _ in range(tries):
            if plans is None or (again and measured):
                try:
                    plans = wb.plan(transformer_of(name), OTHER, measured=measured, **fixed)
                except PlanError:  # no version can have taken so long: what was planned before stays
                    if plans is None:
                        raise
            keys = {(plan.tensor, plan.pipeline, plan.micro_batch, plan.sharing): plan for plan in plans}
            key = next((key for key in keys if key in known and key not in done), None)
            if key is None:
                break
            done[key] = best.seconds / known[key]
            measured = (keys[key], known[key]) if math.isfinite(known[key]) else measured
        reached[name, gpus] = list(done.values()) or [0.0]
    return reached


def implied_efficiency() -> tuple[float, float, float]:
    """5th percentile, median and 95th of the efficiency that published steps imply: the middle of ours, in proportion."""
    shares = [EFFICIENCY.mid * row.said.mid / row.measured for grid in GRIDS for row in rows(grid).values() if math.isfinite(row.measured)]
    shares += [EFFICIENCY.mid * said.mid / measured for _, said, measured in iteration_ranges()]
    low, mid, high = np.percentile(shares, [5, 50, 95]).tolist()
    return low, mid, high


def rooms() -> tuple[list[float], list[float]]:
    """Rising, `room` of the layouts that ran, and of those that ran out of memory."""
    every = [row for grid in GRIDS for row in rows(grid).values()]
    ran, out = ([row.room for row in every if math.isfinite(row.measured) == wanted] for wanted in (True, False))
    return sorted(ran), sorted(out)


def implied_held() -> tuple[float, float, float]:
    """5th percentile, median and 95th of the allocator's bytes over ours, if their logarithms follow a normal law: the likeliest one, by
    which of the layouts ran.
    """
    ran, out = (np.log(room) for room in rooms())

    def unlikely(law: Any) -> float:
        mid, width = law[0], math.exp(law[1])
        return -float(norm.logcdf((ran - mid) / width).sum() + norm.logsf((out - mid) / width).sum())

    mid, width = minimize(unlikely, [0.0, -2.0], method="Nelder-Mead").x
    low, high = (math.exp(mid + sign * norm.ppf(0.95) * math.exp(width)) for sign in (-1, 1))
    return low, math.exp(mid), high


def summary() -> dict[str, float]:
    """Figures that must not become worse; the first word says in which direction."""
    every = [row for grid in GRIDS for row in rows(grid).values()]
    ran = [row for row in every if math.isfinite(row.measured)]
    lists = [regret(grid) for grid in GRIDS]
    return {
        "shortlist regret": statistics.mean(one.shortlist for one in lists),
        "first regret": statistics.median(one.first for one in lists),
        "first reached": statistics.mean(1 / (1 + one.first) for one in lists),
        "five reached": statistics.mean(1 / (1 + one.five) for one in lists),
        "best listed": sum(one.listed for one in lists),
        "step covered": sum(row.measured in row.said for row in ran) / len(ran),
        "step error": statistics.median(abs(row.said.mid / row.measured - 1) for row in ran),
        "step error calibrated": statistics.median(errors_once_calibrated()),
        "other covered": sum(one.seconds in said for one, said, _ in other_source()) / len(other_source()),
        "other error": statistics.median(abs(said.mid / one.seconds - 1) for one, said, _ in other_source()),
        "other calibrated": other_calibrated(tried(2.0)).error,
        "memory right": sum(row.fits == math.isfinite(row.measured) for row in every) / len(every),
        "memory covered": sum(row.told for row in every) / len(every),
        "memory open": sum(row.open for row in every) / len(every),
    }


def table() -> display.Table:
    """A row per grid."""
    shown = []
    for grid in GRIDS:
        one, tried = regret(grid), rows(grid)
        ran = [row for row in tried.values() if math.isfinite(row.measured)]
        right = sum(row.fits == math.isfinite(row.measured) for row in tried.values())
        shown.append(
            [
                grid.name,
                f"tp {one.best[0]} × pp {one.best[1]}, {one.best[2]} at once",
                "yes" if one.listed else "no",
                f"{100 * one.first:.1f} %" if math.isfinite(one.first) else "no memory",
                f"{100 * one.shortlist:.1f} %",
                f"{100 * statistics.median(row.said.mid / row.measured - 1 for row in ran):+.0f} %",
                f"{sum(row.measured in row.said for row in ran)} of {len(ran)}",
                f"{right} of {len(tried)}",
            ]
        )
    return display.Table(
        columns=(
            "grid",
            "published best",
            "on the short list",
            "first plan slower by",
            "short list by",
            "step error",
            "in range",
            "memory right",
        ),
        rows=shown,
    )


def print_rows(title: str, found: list[tuple[Found, Interval, float]]) -> None:
    """What comes out for some rows of the other source."""
    rows = tuple(one for one, _, _ in found)
    print(
        f"  {title}: {len(rows)} rows, measured over said {statistics.median(one.seconds / said.mid for one, said, _ in found):.2f}, "
        f"inside {sum(one.seconds in said for one, said, _ in found) / len(found):.3f}, error "
        f"{statistics.median(abs(said.mid / one.seconds - 1) for one, said, _ in found):.3f}, once calibrated "
        f"{other_calibrated(rows).error:.3f}"
    )


def print_versions() -> None:
    """What the versions of the other source's trainer say of its rows."""
    said = versions(tried())
    nearest = {one: min(spans, key=lambda name: abs(math.log(one.seconds / spans[name].mid))) for one, spans in said.items()}
    for gpus in (8, 16, 32, 64, 128, 256, 512):
        some = {one: spans for one, spans in said.items() if one.gpus == gpus}
        print(f"  {gpus} GPUs: inside the range of a version {explained(some):.3f}, nearest {Counter(nearest[one] for one in some)}")
    for name in ("as planned", "naps", "checks", "both"):
        errors = [abs(said[one][name].mid / one.seconds - 1) for one in said if nearest[one] == name]
        print(f"  nearest {name}: {len(errors)}, error {statistics.median(errors):.3f}")
    print(
        "  inside that of a version: " + ", ".join(f"naps of {nap} s {explained(versions(tried(), nap)):.3f}" for nap in (0.05, 0.1, 0.2))
    )
    for title, slower in (("near", 2.0), ("all that ran", math.inf)):
        few = {one: spans for one, spans in said.items() if one in tried(slower)}
        alone = {one: {"as planned": spans["as planned"]} for one, spans in few.items()}
        for words, some in (("without waits", alone), ("by its name", few)):
            print("  {}, {}: inside {:.3f}, high over low {:.2f}, error {:.3f}".format(title, words, *by_name(some)))
        for words, waits in (("without waits", (0.0, False)), ("by its name", (None, None))):
            print(f"  {title}, {words}, once calibrated: {other_calibrated(tried(slower), *waits)}")


def print_tries() -> None:
    """What our plans reach of the other source's fastest."""
    unwaiting = {"trainer": "nanotron", "poll_interval": 0, "checked_collectives": False}
    named = {"trainer": "nanotron"}
    for title, options, again in (
        ("as Megatron", {}, False),
        ("as nanotron without waits", unwaiting, False),
        ("as nanotron", named, False),
        ("as Megatron, each with the last one's step", {}, True),
        ("as nanotron, each with the last one's step", named, True),
    ):
        reached = other_tries(again=again, **options)
        for words, sizes in (("all", range(513)), ("up to 256 GPUs", range(257)), ("512", (512,))):
            some = [value for (_, gpus), value in reached.items() if gpus in sizes]
            first, five = [value[0] for value in some], [max(value) for value in some]
            print(f"  {title}, {words} ({len(some)}): first {statistics.mean(first):.3f}, least {min(first):.3f}; ", end="")
            print(f"best of five {statistics.mean(five):.3f}, least {min(five):.3f}")
        print("    " + ", ".join(f"{name} × {gpus}: {value[0]:.2f} {max(value):.2f}" for (name, gpus), value in reached.items()))


def main() -> None:
    """Print all of it."""
    print(table())
    print(", ".join(f"{name} {value:.4g}" for name, value in summary().items()))
    print("efficiency that published steps imply: " + " … ".join(f"{share:.2f}" for share in implied_efficiency()))
    ran, out = rooms()
    print(f"memory over the prediction: {len(ran)} ran, with {ran[0]:.2f} or more; {len(out)} did not, with {out[-3]:.2f} or less, but for")
    print(f"{out[-2]:.2f} and {out[-1]:.2f}; a normal law: " + " … ".join(f"{share:.2f}" for share in implied_held()))
    print("another source (steps of at most twice the fastest of their model and GPUs, then all that ran):")
    for slower in (2.0, math.inf):
        for gpus in (8, 16, 32, 64, 128, 256, 512):
            print_rows(f"{gpus} GPUs", [row for row in other_source(slower) if row[0].gpus == gpus])
        print_rows("up to 256 GPUs", [row for row in other_source(slower) if row[0].gpus <= 256])
        print_rows("all", other_source(slower))
    best = set(fastest().values())
    print_rows("the fastest of each", [row for row in other_source() if row[0] in best])
    for one, said, held in other_source():
        if one in best:
            where = "inside" if one.seconds in said else "OUTSIDE"
            print(
                f"  {one.name}, {one.sharing}, tp {one.tensor} × pp {one.pipeline}, {one.micro_batch} at once: said {said.mid:.3f} s "
                f"({said.low:.3f} … {said.high:.3f}), measured {one.seconds:.3f}, {where}; held {held / 1e9:.0f} GB, "
                f"printed {one.gigabytes:.0f}"
            )
    every = other_source(math.inf)
    print(
        f"  said to fit: {sum(used <= 0.95 * 80e9 for *_, used in every)} of {len(every)} that ran; printed bytes over ours, median",
        end=" ",
    )
    print(f"{statistics.median(row.gigabytes * 1e9 / used for row, _, used in every):.2f}")
    print_versions()
    print_tries()
    for name, said, measured in iteration_ranges():
        print(f"  {name}: said {said.mid:.1f} s ({said.low:.1f} … {said.high:.1f}), measured {measured:.1f}")


if __name__ == "__main__":
    main()
