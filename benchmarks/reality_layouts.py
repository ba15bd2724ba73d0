"""Checks plans against published sweeps over layouts: the fastest layout on the short list, what the first plan and the list lose, steps in
their ranges, and memory. Plans use datasheets alone; nothing is fitted to these rows.

Run: python benchmarks/reality_layouts.py
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from published_layouts import (
    BATCH,
    GRIDS,
    NANOTRON,
    NAP,
    SIZES,
    TRIED,
    Found,
    Grid,
    layouts_of,
    transformer_of,
    waiting,
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
from workbench.cluster.analysis.plan.ranges import EFFICIENCY, HELD, LAUNCH, LINKS, PlanError
from workbench.cluster.analysis.plan.timing import HardwareRates, seconds
from workbench.cluster.analysis.plan.workload import Workload, workload_of_transformer
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


def ranges(
    workload: Workload, found: Layouts, cluster: Cluster = CLUSTER, peak: float = PEAK, beside: Callable[..., Any] | None = None
) -> list[Interval]:
    """Seconds of a step of each layout, low to high; `beside` adds what a trainer waits for."""

    def rates(end: str, other: str) -> HardwareRates:
        share = getattr(LINKS, end)
        return HardwareRates.of(cluster, peak, getattr(EFFICIENCY, end), share, getattr(LAUNCH, other), (LINKS.mid / share,) * 2)

    ends = [
        seconds(workload, found, rates(end, other), 8).total + (beside(workload, found, rates(end, other), other) if beside else 0.0)
        for end, other in (("high", "low"), ("mid", "mid"), ("low", "high"))
    ]
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
    for model, sharing in sorted({(one.model, one.sharing) for one in tried(slower)}):
        mine = tuple(one for one in tried(slower) if (one.model, one.sharing) == (model, sharing))
        workload, layouts = workload_of(model, sharing), layouts_of(mine)
        held = memory(workload, layouts, OTHER.device.name).total
        found += list(zip(mine, ranges(workload, layouts, OTHER, OTHER_PEAK), held.tolist(), strict=True))
    return found


def versions(rows: tuple[Found, ...], nap: float = NAP) -> dict[Found, dict[str, Interval]]:
    """Seconds of each row as planned, and as each known version of its trainer takes them: with naps, with checks, and with both."""
    found: dict[Found, dict[str, Interval]] = {one: {} for one in rows}
    for model, sharing in sorted({(one.model, one.sharing) for one in rows}):
        mine = tuple(one for one in rows if (one.model, one.sharing) == (model, sharing))
        workload, layouts = workload_of(model, sharing), layouts_of(mine)
        for name, naps, checks in (("as planned", 0.0, False), ("naps", nap, False), ("checks", 0.0, True), ("both", nap, True)):
            spans = ranges(workload, layouts, OTHER, OTHER_PEAK, lambda *given, a=naps, b=checks: waiting(*given, a, b))  # type: ignore[misc]
            for one, span in zip(mine, spans, strict=True):
                if not ((naps and one.pipeline == 1) or (checks and one.gpus <= 8)):
                    found[one][name] = span
    return found


def explained(said: Mapping[Found, Mapping[str, Interval]]) -> float:
    """Share of the rows whose step lies in the range of a version of their trainer."""
    return sum(any(one.seconds in span for span in spans.values()) for one, spans in said.items()) / len(said)


def told_of_waits() -> dict[str, tuple[float, float]]:
    """Model → what the first and the best of five of the layouts that the source tried on 512 GPUs reach of its fastest, in the order of
    the throughput to expect of them with naps and checks; 0 where they did not run.
    """
    found = {}
    for model in NANOTRON:
        rows = tuple(one for one in TRIED if (one.model, one.gpus) == (model, 512) and one.tensor <= 8)
        expected: dict[Found, float] = {}
        for sharing in ("ddp", "zero1"):
            mine = tuple(one for one in rows if one.sharing == sharing)
            held = memory(workload_of(model, sharing), layouts_of(mine), OTHER.device.name)
            said, chance = versions(mine), held.chance(ROOM)
            expected |= {one: list(said[one].values())[-1].mid / chance[at] for at, one in enumerate(mine) if held.total[at] <= ROOM}
        reached = [fastest()[model, 512].seconds / one.seconds for one in sorted(expected, key=expected.__getitem__)[:5]]
        found[model] = (reached[0], max(reached))
    return found


def other_calibrated(rows: tuple[Found, ...]) -> list[float]:
    """Of each of these rows, its error where the efficiency follows from another row of its model."""
    errors: list[float] = []
    for model in NANOTRON:
        mine = tuple(one for one in rows if one.model == model)
        measured = np.array([one.seconds for one in mine])
        low, high = np.full(len(mine), 0.05), np.full(len(mine), 1.5)
        for _ in range(30):
            middle = (low + high) / 2
            slow = _taken(mine, middle) > measured
            low, high = np.where(slow, middle, low), np.where(slow, high, middle)
        for place, share in enumerate(low):
            errors += np.delete(np.abs(_taken(mine, np.full(len(mine), share)) / measured - 1), place).tolist()
    return errors


def _taken(rows: tuple[Found, ...], shares: Any) -> Any:
    """Seconds of rows of one model, if kernels reach these shares of the peak."""
    total = np.zeros(len(rows))
    for sharing in {one.sharing for one in rows}:
        where = [place for place, one in enumerate(rows) if one.sharing == sharing]
        mine = tuple(rows[place] for place in where)
        rates = HardwareRates.of(OTHER, OTHER_PEAK, shares[where], LINKS.mid, LAUNCH.mid)
        total[where] = seconds(workload_of(mine[0].model, sharing), layouts_of(mine), rates, 8).total
    return total


def other_reached() -> dict[tuple[str, int], tuple[float, float]]:
    """Model and GPUs → throughput of our first plan and of the best of our first five that the other source has tried, over its fastest; 0
    where none of them ran. Layouts of both kinds of ZeRO, as a user would ask for them.
    """
    found = {}
    for (name, gpus), best in fastest().items():
        options: dict[str, Any] = {"sharing": ["ddp", "zero1"], "chunks": 1, "sequence_parallel": True, "loss_parallel": True}
        try:
            plans = list(wb.plan(transformer_of(name), OTHER, gpus=gpus, global_batch=BATCH, **options))
        except PlanError:
            plans = []
        ours = [(plan.tensor, plan.pipeline, plan.micro_batch, plan.sharing) for plan in plans if plan.checkpointing == "none"]
        known = {(o.tensor, o.pipeline, o.micro_batch, o.sharing): o.seconds for o in TRIED if (o.model, o.gpus) == (name, gpus)}
        reached = [best.seconds / known[key] for key in ours if key in known]
        found[name, gpus] = (reached[0], max(reached[:5])) if reached else (0.0, 0.0)
    return found


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
        "other calibrated": statistics.median(other_calibrated(tried(2.0))),
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
    errors = other_calibrated(rows)
    print(
        f"  {title}: {len(rows)} rows, measured over said {statistics.median(one.seconds / said.mid for one, said, _ in found):.2f}, "
        f"inside {sum(one.seconds in said for one, said, _ in found) / len(found):.3f}, error "
        f"{statistics.median(abs(said.mid / one.seconds - 1) for one, said, _ in found):.3f}, once calibrated "
        f"{statistics.median(errors):.3f}"
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
        "  inside that of a version: " + ", ".join(f"naps of {nap} s {explained(versions(tried(), nap)):.3f}" for nap in (0.05, NAP, 0.2))
    )
    print(f"  512 GPUs, told of naps and checks: {told_of_waits()}")


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
    pooled = errors_once_calibrated() + other_calibrated(tried(2.0))
    print(f"  both sources once calibrated: {statistics.median(pooled):.3f} of {len(pooled)} pairs")
    print_versions()
    reached = other_reached()
    for title, keep in (("all", 512), ("up to 256 GPUs", 256)):
        some = [value for (_, gpus), value in reached.items() if gpus <= keep]
        print(f"  reached, {title} ({len(some)}): first plan {statistics.mean(f for f, _ in some):.3f}, least {min(some)[0]:.3f};", end=" ")
        print(f"best of five {statistics.mean(five for _, five in some):.3f}, least {min(five for _, five in some):.3f}")
    print("  " + ", ".join(f"{name} × {gpus}: {first:.2f} {five:.2f}" for (name, gpus), (first, five) in reached.items()))
    for name, said, measured in iteration_ranges():
        print(f"  {name}: said {said.mid:.1f} s ({said.low:.1f} … {said.high:.1f}), measured {measured:.1f}")


if __name__ == "__main__":
    main()
