"""Checks plans against published sweeps over layouts: the fastest layout on the short list, what the first plan and the list lose, steps in
their ranges, and memory. Plans use datasheets alone; nothing is fitted to these rows.

Run: python benchmarks/reality_layouts.py
"""

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

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
from workbench.cluster.analysis.plan.plans import Plans, Power
from workbench.cluster.analysis.plan.ranges import EFFICIENCY, HELD, LAUNCH, LINKS, MESSAGE, PlanError, efficiency_of
from workbench.cluster.analysis.plan.search import PlanSearch, at_level_of
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


def rates(cluster: Cluster, peak: float, place: str) -> HardwareRates:
    """Of hardware that is slow, in the middle or fast: place "low", "mid" or "high"."""
    slow = {"low": "high", "mid": "mid", "high": "low"}[place]
    share, late = getattr(LINKS, place), {"low": 1.0, "mid": 0.0, "high": -1.0}[place]
    launch, message = getattr(LAUNCH, slow), getattr(MESSAGE, slow)
    efficiency = getattr(efficiency_of(cluster.device, "amp_bf16"), place)
    return HardwareRates.of(cluster, peak, efficiency, share, launch, (LINKS.mid / share,) * 2, message, late)


def ranges(workload: Workload, found: Layouts, cluster: Cluster = CLUSTER, peak: float = PEAK) -> list[Interval]:
    """Seconds of a step of each layout, low to high."""
    ends = [seconds(workload, found, rates(cluster, peak, place), 8).total for place in ("high", "mid", "low")]
    return [Interval(low=float(low), mid=float(mid), high=float(high)) for low, mid, high in zip(*ends, strict=True)]


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


def memory_judged() -> Counter[tuple[bool, bool]]:
    """Of the other source's layouts with tensor parallelism of at most 8: (did it run, is it said to fit) → how many.

    Why those that did not run stopped is not published; not all need have run out of memory.
    """
    found: Counter[tuple[bool, bool]] = Counter()
    for model in NANOTRON:
        mine = tuple(one for one in TRIED if one.model == model and one.tensor <= 8)
        held = memory(workload_of(model), layouts_of(mine), OTHER.device.name).total
        found.update((math.isfinite(one.seconds), bool(used <= ROOM)) for one, used in zip(mine, held, strict=True))
    return found


def named(model: str, poll: float | None = None, checked: bool | None = None) -> tuple[Version, ...]:
    """The versions of the other source's trainer, of one of its models."""
    return versions_of(workload_of(model), TRAINER, poll, checked, efficiency_of(OTHER.device, "amp_bf16"))


def versions(rows: tuple[Found, ...], poll: float = max(TRAINER.polls)) -> dict[Found, dict[str, Interval]]:
    """Seconds of each row as planned, and as each known version of its trainer takes them: with polling, with checks, and with both."""
    found: dict[Found, dict[str, Interval]] = {one: {} for one in rows}
    for model in sorted({one.model for one in rows}):
        mine = tuple(one for one in rows if one.model == model)
        for name, sleep, checks in (("as planned", 0.0, False), ("polling", poll, False), ("checks", 0.0, True), ("both", poll, True)):
            workload = replace(workload_of(model), poll=sleep, checked=checks)
            for one, span in zip(mine, ranges(workload, layouts_of(mine), OTHER, OTHER_PEAK), strict=True):
                if not ((sleep and one.pipeline == 1) or (checks and one.gpus <= 8)):
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


OTHERWISE = (("as planned", "as planned"), ("polling", "as planned"), ("checks", "as planned"), ("both", "checks"))
"""Version → what it comes to where there is no pipeline; on a single node nothing is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What is said of rows where other rows of their model set the level."""

    errors: list[float]
    """Of each row by each level."""
    inside: list[bool]
    widths: list[float]
    """High over low."""
    versions: list[int]
    """That the measured rows left."""

    @property
    def error(self) -> float:
        """Median."""
        return statistics.median(self.errors)

    @property
    def covered(self) -> float:
        """Share of the pairs."""
        return statistics.mean(self.inside)

    @property
    def width(self) -> float:
        """Median."""
        return statistics.median(self.widths)

    def __str__(self) -> str:
        count, left = len(self.errors), statistics.mean(self.versions)
        return f"{count} pairs: error {self.error:.3f}, inside {self.covered:.3f}, high over low {self.width:.2f}, versions {left:.2f}"


def level(search: PlanSearch, layouts: Layouts, measured: Any, chosen: tuple[int, ...]) -> PlanSearch:
    """The search at the level of some rows."""
    return at_level_of(search, [(layouts.select(np.array([at])), float(measured[at])) for at in chosen])


def add_level(to: Calibrated, after: PlanSearch, layouts: Layouts, measured: Any, asked: Any) -> None:
    """Add what is said of some rows at the level of others."""
    some, taken = layouts.select(asked), measured[asked]
    mid, corners = after.seconds(some).total, [corner.total for corner in after.corners(some)]
    low, high = np.min([mid, *corners], 0), np.max([mid, *corners], 0)
    to.errors.extend(np.abs(mid / taken - 1).tolist())
    to.inside.extend(((low <= taken) & (taken <= high)).tolist())
    to.widths.extend((high / low).tolist())
    to.versions.append(len(after.versions))


def plan_search(workload: Workload, cluster: Cluster, peak: float, batch: int, versions: tuple[Version, ...]) -> PlanSearch:
    """By datasheets alone, as `wb.plan` searches."""
    return PlanSearch(
        workload=workload,
        cluster=cluster,
        batch=batch,
        peak=peak,
        versions=versions,
        links=(LINKS, LINKS),
        held=HELD,
        usable_memory=ROOM,
        steps=1,
        top=1,
        power=Power(),
        unrestricted=workload,
        efficiency_given=False,
        held_given=False,
    )


@cache
def grids_calibrated() -> Calibrated:
    """Of every layout that ran, from each other layout of its grid."""
    every = Calibrated(errors=[], inside=[], widths=[], versions=[])
    for grid in GRIDS:
        workload, found = candidates(grid)
        measured = np.array([grid.seconds.get(key, math.inf) for key in keys(workload, found)])
        ran = np.flatnonzero(np.isfinite(measured))
        search = plan_search(workload, CLUSTER, PEAK, grid.batch, versions_of(workload, None, None, None, EFFICIENCY))
        for one in ran:
            add_level(every, level(search, found, measured, (int(one),)), found, measured, ran[ran != one])
    return every


@cache
def level_of(rows: tuple[Found, ...], poll: float | None, checked: bool | None) -> PlanSearch:
    """The search for plans of the other source at the level of some rows of one model."""
    search = plan_search(workload_of(rows[0].model), OTHER, OTHER_PEAK, BATCH, named(rows[0].model, poll, checked))
    return level(search, layouts_of(rows), [one.seconds for one in rows], tuple(range(len(rows))))


def related(_one: Found, _other: Found) -> bool:
    """Any two rows of a model."""
    return True


def next_to(one: Found, other: Found) -> bool:
    """Do they differ in one thing only: in GPUs, tensor parallelism, stages or micro-batch by a factor of 2, or in what ranks share?"""
    names = ("gpus", "tensor", "pipeline", "micro_batch")
    apart = [max(a, b) / min(a, b) for a, b in ((getattr(one, name), getattr(other, name)) for name in names)]
    return bool(sorted([*apart, 1 + (one.sharing != other.sharing)]) == [1, 1, 1, 1, 2])


def same_version(one: Found, other: Found) -> bool:
    """Are both nearest to the same version of the trainer? It is their own seconds that say so."""
    return nearest_version(one) == nearest_version(other)


@cache
def nearest_version(row: Found) -> str:
    """The version of the trainer to whose seconds, as planned by datasheets, those of a row are nearest."""
    spans = _versions()[row]
    return min(spans, key=lambda name: abs(math.log(row.seconds / spans[name].mid)))


@cache
def _versions() -> dict[Found, dict[str, Interval]]:
    return versions(tried())


def tells(one: Found) -> bool:
    """Does it show all waits: on several nodes, with both a pipeline and tensor parallelism?"""
    return one.tensor > 1 and one.pipeline > 1 and one.gpus > 8


@cache
def other_calibrated(
    rows: tuple[Found, ...],
    poll: float | None = 0.0,
    checked: bool | None = False,
    *,
    steps: int = 1,
    alike: Callable[[Found, Found], bool] = related,
    first: Callable[[Found], bool] = lambda _: True,
) -> Calibrated:
    """Of these rows, from others of their model, by default by the version without waits.

    Args:
        rows: whose seconds are asked.
        poll: of the trainer, as `versions_of`.
        checked: likewise.
        steps: rows that set a level; of several, the others are drawn by chance from those that are alike to the first.
        alike: of a row, those that it says something of.
        first: rows that set a level.
    """
    every, draw = Calibrated(errors=[], inside=[], widths=[], versions=[]), random.Random(0)
    for model in sorted({one.model for one in rows}):
        mine = tuple(one for one in rows if one.model == model)
        layouts, measured = layouts_of(mine), np.array([one.seconds for one in mine])
        for at, one in enumerate(mine):
            others = [place for place, other in enumerate(mine) if place != at and alike(one, other)]
            if first(one) and len(others) >= steps:
                more = draw.sample(others, steps - 1)
                after = level_of(tuple(mine[place] for place in (at, *more)), poll, checked)
                add_level(every, after, layouts, measured, np.array([place for place in others if place not in more]))
    return every


def other_tries(tries: int = 5, again: bool = False, least: int = 8, **options: Any) -> dict[tuple[str, int], list[float]]:
    """Model and GPUs → throughput of the first of our plans that the other source has tried, over its fastest; 0 where one did not run.
    Layouts of both kinds of ZeRO, without what it never did.

    Args:
        tries: how many.
        again: is each chosen by a plan that knows what those before it took? Else all by the same plan.
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
        measured: list[Any] = []
        plans: Any = None
        for _ in range(tries):
            if plans is None or (again and measured):
                try:
                    plans = wb.plan(transformer_of(name), OTHER, measured=measured or None, **fixed)
                except PlanError:  # no version can have taken so long: what was planned before stays
                    if plans is None:
                        raise
            keys = {(plan.tensor, plan.pipeline, plan.micro_batch, plan.sharing): plan for plan in plans}
            key = next((key for key in keys if key in known and key not in done), None)
            if key is None:
                break
            done[key] = best.seconds / known[key]
            if math.isfinite(known[key]):
                measured.append((keys[key], known[key]))
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
        "step error calibrated": grids_calibrated().error,
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
    said = _versions()
    nearest = {one: nearest_version(one) for one in said}
    for gpus in (8, 16, 32, 64, 128, 256, 512):
        some = {one: spans for one, spans in said.items() if one.gpus == gpus}
        print(f"  {gpus} GPUs: inside the range of a version {explained(some):.3f}, nearest {Counter(nearest[one] for one in some)}")
    for name in ("as planned", "polling", "checks", "both"):
        errors = [abs(said[one][name].mid / one.seconds - 1) for one in said if nearest[one] == name]
        print(f"  nearest {name}: {len(errors)}, error {statistics.median(errors):.3f}")
    print(
        "  inside that of a version: "
        + ", ".join(f"sleeps of {poll} s {explained(versions(tried(), poll)):.3f}" for poll in (0.05, 0.1, 0.2))
    )
    for title, slower in (("near", 2.0), ("all that ran", math.inf)):
        few = {one: spans for one, spans in said.items() if one in tried(slower)}
        alone = {one: {"as planned": spans["as planned"]} for one, spans in few.items()}
        for words, some in (("without waits", alone), ("by its name", few)):
            print("  {}, {}: inside {:.3f}, high over low {:.2f}, error {:.3f}".format(title, words, *by_name(some)))


def print_calibrated() -> None:
    """What measured steps bring."""
    grids, near, unwaiting, quarter = grids_calibrated(), tried(2.0), other_calibrated(tried(2.0)), set(tried()[::4])
    print(f"  one step, ten grids: {grids}")
    both = Calibrated(**{name: getattr(grids, name) + getattr(unwaiting, name) for name in grids.__slots__})
    print(f"  one step, ten grids and near rows without waits: {both}")
    for steps in (1, 2, 3):
        for title, rows, waits, options in (
            ("near, without waits", near, (0.0, False), {}),
            ("near", near, (None, None), {}),
            ("near, next to it", near, (None, None), {"alike": next_to}),
            ("all", tried(), (None, None), {}),
            ("all, next to it", tried(), (None, None), {"alike": next_to}),
            ("all, next to it, same version", tried(), (None, None), {"alike": lambda a, b: next_to(a, b) and same_version(a, b)}),
            ("all, same version", tried(), (None, None), {"alike": same_version}),
            ("all, another version", tried(), (None, None), {"alike": lambda a, b: not same_version(a, b)}),
            ("all, same version, one that tells", tried(), (None, None), {"alike": same_version, "first": tells}),
        ):
            if steps > 1:  # a quarter of the rows first, since each draws others
                first = options.get("first", lambda _: True)
                options = {**options, "first": lambda one, first=first: one in quarter and first(one)}
            if steps == 1 or (steps == 2 and "next" not in title and "another" not in title) or title in ("near, without waits", "near"):
                print(f"  {steps} measured, {title}: {other_calibrated(rows, *waits, steps=steps, **options)}", flush=True)


def print_tries() -> None:
    """What our plans reach of the other source's fastest."""
    unwaiting = {"trainer": "nanotron", "poll_interval": 0, "checked_collectives": False}
    named = {"trainer": "nanotron"}
    grids = [[1 / (1 + one.first), 1 / (1 + one.five)] for one in map(regret, GRIDS)]
    for title, options, again in (
        ("as Megatron", {}, False),
        ("as nanotron without waits", unwaiting, False),
        ("as nanotron", named, False),
        ("as Megatron, each with the steps before it", {}, True),
        ("as nanotron, each with the steps before it", named, True),
    ):
        reached = other_tries(again=again, **options)
        for words, sizes in (("all", range(513)), ("up to 256 GPUs", range(257)), ("512", (512,)), ("and the ten grids", range(513))):
            some = [value for (_, gpus), value in reached.items() if gpus in sizes]
            some += grids if words == "and the ten grids" else []
            first, five = [value[0] for value in some], [max(value) for value in some]
            print(f"  {title}, {words} ({len(some)}): first {statistics.mean(first):.3f}, least {min(first):.3f}; ", end="")
            print(f"best of five {statistics.mean(five):.3f}, least {min(five):.3f}")
        print("    " + ", ".join(f"{name} × {gpus}: {value[0]:.2f} {max(value):.2f}" for (name, gpus), value in reached.items()))
    for middle in (30e-6, 45e-6, 90e-6, 120e-6):  # the one assumption that was made with these rows in view
        message = Interval(low=middle / 2, mid=middle, high=2 * middle)
        with mock.patch.dict(Version.__init__.__kwdefaults__, message=message):
            some = [(value[0], max(value)) for value in other_tries(**named).values()]
        pooled = [statistics.mean(values) for values in zip(*some, *grids, strict=True)]
        print(
            f"  as nanotron, {1e6 * middle:.0f} µs a message: first {statistics.mean(first for first, _ in some):.3f}, best of five ",
            end="",
        )
        print(f"{statistics.mean(five for _, five in some):.3f}; and the ten grids {pooled[0]:.3f} and {pooled[1]:.3f}")


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
    every, fits = other_source(math.inf), memory_judged()
    right, grids = fits[True, True] + fits[False, False], [row for grid in GRIDS for row in rows(grid).values()]
    both = (right + sum(row.fits == math.isfinite(row.measured) for row in grids)) / (fits.total() + len(grids))
    printed = statistics.median(row.gigabytes * 1e9 / used for row, _, used in every)
    print(f"  said to fit: {fits[True, True]} of {len(every)} that ran; printed bytes over ours, median {printed:.2f}")
    stopped = fits[False, True] + fits[False, False]
    print(f"  said to fit: {fits[False, True]} of {stopped} that did not run; right at least {right} of {fits.total()}, ", end="")
    print(f"{right / fits.total():.3f}; with the grids {both:.3f}")
    print_versions()
    print_tries()
    print_calibrated()
    for name, said, measured in iteration_ranges():
        print(f"  {name}: said {said.mid:.1f} s ({said.low:.1f} … {said.high:.1f}), measured {measured:.1f}")


if __name__ == "__main__":
    main()
