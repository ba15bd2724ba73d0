"""Checks predictors of scaling on published results: curves, iterations under 3-D parallelism, collectives; beside the naive line.

Of each curve the last point, twice the GPUs, is held out; of the iterations the two largest models, on four to eight times the GPUs that
the formula's two rates come from. A version that does worse than COMMITTED ends with an exit code of 1.

Run: python benchmarks/reality.py [FILE.csv …]   A file with columns curve,gpus,per_gpu has tables of one's own, scored without a limit.
"""

import csv
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import reality_layouts
from published_scaling import ALL_REDUCE, COMMUNICATION, COMPUTE, CURVES, ITERATIONS, SHARDED, Iteration, Published
from published_times import Layout, Rates, Work, sharded_step, work

from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collective_cost import Link, all_reduce, bus_factor
from workbench.cluster.analysis.links import Sweep
from workbench.cluster.analysis.transformer import Transformer
from workbench.core.display import table
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.analysis.curve.fit import CurveForecast
from workbench.scaling.analysis.curve.forms import NAIVE

TOGETHER = "laws together"
COMMITTED = {
    "error": 0.0224,
    COMPUTE: 0.0180,
    COMMUNICATION: 0.0662,
    "covered": 11,
    "width": 0.155,
    "3-D parallel": 0.0343,
    "ZeRO-3": 0.0281,
    "all-reduce": 0.104,
    "interpolated": 0.0586,
    "shortlist regret": 0.0194,
    "first regret": 0.0353,
    "first reached": 0.955,
    "five reached": 0.977,
    "best listed": 8,
    "step covered": 0.949,
    "step error": 0.1215,
    "step error calibrated": 0.132,
    "other covered": 0.842,
    "other error": 0.185,
    "other calibrated": 0.12,
    "memory right": 0.924,
    "memory covered": 0.994,
    "memory open": 0.187,
}
MORE_IS_BETTER = (
    "covered",
    "best listed",
    "first reached",
    "five reached",
    "step covered",
    "other covered",
    "memory right",
    "memory covered",
)
"""Not to be worse than: mean error of all laws together, on all curves and by kind; curves inside their 90 % interval; median width of the
interval; largest error of an iteration, and of a step under ZeRO-3; median error of an
all-reduce, fitted and interpolated; the figures of `reality_layouts.summary`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One held-out point of one curve."""

    curve: Published
    gpus: int
    fitted: int
    """Points that were fitted."""
    forecast: CurveForecast
    measured: float
    """Tokens per second of all GPUs."""

    @property
    def errors(self) -> dict[str, float]:
        """Law → predicted over measured, less 1."""
        said = {**self.forecast.by_form, TOGETHER: self.forecast.mid}
        return {name: value / self.measured - 1 for name, value in said.items()}

    @property
    def width(self) -> float:
        """Of the interval, over what was measured."""
        return (self.forecast.high - self.forecast.low) / self.measured


def score(curve: Published, fitted: int) -> list[Score]:
    """Fit the first points and predict all others."""
    gpus = sorted(curve.per_gpu)
    fit = ScalingCurve([(n, n * curve.per_gpu[n]) for n in gpus[:fitted]]).fit()
    return [
        Score(curve=curve, gpus=n, fitted=fitted, forecast=forecast, measured=n * curve.per_gpu[n])
        for n, forecast in zip(gpus[fitted:], fit.forecasts(gpus[fitted:]), strict=True)
    ]


def last_held_out(curves: Iterable[Published]) -> list[Score]:
    """Every curve of three points or more, its last point predicted from the others."""
    return [one for curve in curves if len(curve.per_gpu) > 2 for one in score(curve, len(curve.per_gpu) - 1)]


def all_prefixes(curves: Iterable[Published]) -> list[Score]:
    """Every beginning of every curve, and all that follows: up to sixteen times the GPUs, from as few as two points."""
    return [one for curve in curves for fitted in range(2, len(curve.per_gpu)) for one in score(curve, fitted)]


def mean_errors(scores: Iterable[Score]) -> dict[str, tuple[float, float, int]]:
    """Law → mean and largest size of its errors, and how many there are."""
    found: dict[str, list[float]] = {}
    for one in scores:
        for name, error in one.errors.items():
            found.setdefault(name, []).append(abs(error))
    return {name: (statistics.mean(errors), max(errors), len(errors)) for name, errors in found.items()}


def summary(scores: list[Score]) -> dict[str, float]:
    """The figures of COMMITTED."""

    def together(keep: Callable[[Score], bool]) -> float:
        return statistics.mean(abs(one.errors[TOGETHER]) for one in scores if keep(one))

    return {
        "error": together(lambda one: True),
        COMPUTE: together(lambda one: one.curve.bound == COMPUTE),
        COMMUNICATION: together(lambda one: one.curve.bound == COMMUNICATION),
        "covered": sum(one.measured in one.forecast for one in scores),
        "width": statistics.median(one.width for one in scores),
        "3-D parallel": max(abs(predicted / measured - 1) for _, _, predicted, _, measured in iterations()),
        "ZeRO-3": max(abs(predicted / measured - 1) for _, predicted, measured in sharded()),
        "all-reduce": statistics.median(map(abs, all_reduce_errors())),
        "interpolated": statistics.median(map(abs, interpolation_errors())),
        **reality_layouts.summary(),
    }


def worse(found: Mapping[str, float], committed: Mapping[str, float] = COMMITTED) -> list[str]:
    """What has become worse, in words."""
    return [
        f"{name}: {found[name]:.4g}, committed {limit:.4g}"
        for name, limit in committed.items()
        if (found[name] < limit if name in MORE_IS_BETTER else found[name] > limit)
    ]


def work_of(one: Iteration, recompute: str) -> Work:
    """What a GPU has to do in a published iteration."""
    model = Transformer(layers=one.layers, hidden=one.hidden, vocabulary=51_200, sequence=2048)
    layout = Layout(batch=one.batch, micro_batch=one.micro_batch, tensor=one.tensor, pipeline=one.pipeline, chunks=one.chunks)
    return work(model, layout, recompute)


def iterations() -> list[tuple[str, str, float, float, float]]:
    """Name, recomputation, seconds predicted, naive and measured of the two larger models, by what the two smaller ones took.

    Naive: as many FLOPs per second and GPU as the second model had, and no more bubble.
    """
    small, large = ITERATIONS[:2], ITERATIONS[2:]
    found = []
    for recompute in ("full", "selective"):
        rates = Rates.calibrated([(work_of(one, recompute), getattr(one, recompute)) for one in small])
        for one in large:
            last, this = work_of(small[-1], recompute), work_of(one, recompute)
            naive = getattr(small[-1], recompute) * this.flops / last.flops
            found.append((one.name, recompute, rates.seconds(this), naive, getattr(one, recompute)))
    return found


def all_reduce_errors() -> list[float]:
    """Predicted over measured seconds, less 1, of all sizes of a sweep, by the latency and bandwidth fitted to it."""
    measured = {size: bus_factor("all_reduce", 8) * size / (rate * 1e9) for size, rate in ALL_REDUCE.items()}
    link = Link.from_sweep(list(measured.items()), ranks=8)
    return [all_reduce(size, 8, link) / seconds - 1 for size, seconds in measured.items()]


def sharded() -> list[tuple[str, float, float]]:
    """Name, tokens per second and GPU predicted and measured on more GPUs, from those on few: a GPU computes as long as there."""
    found = []
    for one in SHARDED:
        tokens = 2 * 8192
        step = sharded_step(tokens / one.few[1], 8.03e9, one.more[0], Cluster.named(one.cluster))
        found.append((f"{one.name}, {one.few[0]} → {one.more[0]}", tokens / step, one.more[1]))
    return found


def interpolation_errors() -> list[float]:
    """The same by the sweep itself, each size but the first and the last left out in turn."""
    measured = [(size, bus_factor("all_reduce", 8) * size / (rate * 1e9)) for size, rate in ALL_REDUCE.items()]
    found = []
    for place in range(1, len(measured) - 1):
        size, seconds = measured[place]
        found.append(Sweep(points=measured[:place] + measured[place + 1 :], ranks=8).seconds(size) / seconds - 1)
    return found


def table_of_iterations() -> table.Table:
    """A row per iteration held out."""
    rows = [
        [
            name,
            recompute,
            *(f"{one:.1f} s" for one in (predicted, measured)),
            *(f"{100 * (one / measured - 1):+.1f} %" for one in (predicted, naive)),
        ]
        for name, recompute, predicted, naive, measured in iterations()
    ]
    return table.Table(columns=("model", "recomputation", "predicted", "measured", "error", "naive error"), rows=rows)


def table_of_curves(scores: list[Score]) -> table.Table:
    """A row per held-out point: signed errors in percent, and the interval."""
    laws = list(dict.fromkeys(name for one in scores for name in one.errors))
    rows = [
        [
            one.curve.name,
            f"{one.fitted} points → {one.gpus}",
            *(f"{100 * one.errors[law]:+.1f}" if law in one.errors else "–" for law in laws),
            f"{100 * (one.forecast.low / one.measured - 1):+.1f} … {100 * (one.forecast.high / one.measured - 1):+.1f}",
            "inside" if one.measured in one.forecast else "outside",
        ]
        for one in scores
    ]
    return table.Table(columns=("curve", "held out", *laws, "90 % interval", ""), rows=rows)


def table_of_laws(scores: list[Score]) -> table.Table:
    """A row per law: mean and largest error, beside those of the naive line."""
    found = mean_errors(scores)
    naive = found[NAIVE][0]
    rows = [
        [name, count, f"{100 * mean:.1f} %", f"{100 * most:.1f} %", f"{100 * (mean - naive):+.1f} points"]
        for name, (mean, most, count) in found.items()
    ]
    covered = sum(one.measured in one.forecast for one in scores)
    note = f"90 % intervals hold {covered} of {len(scores)}, median width {100 * statistics.median(one.width for one in scores):.0f} %"
    return table.Table(columns=("law", "points", "mean error", "largest", "against naive"), rows=rows, note=note)


def from_csv(path: str) -> list[Published]:
    """Curves of a file with columns curve, gpus, per_gpu."""
    found: dict[str, dict[int, float]] = {}
    with Path(path).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["curve"], {})[int(row["gpus"])] = float(row["per_gpu"])
    return [Published(name=name, source=path, per_gpu=per_gpu) for name, per_gpu in found.items()]


def main(paths: list[str]) -> int:
    """Print the tables; 1 if COMMITTED is not reached."""
    curves = [curve for path in paths for curve in from_csv(path)] or list(CURVES)
    scores = last_held_out(curves)
    print(table_of_curves(scores), table_of_laws(scores), sep="\n\n")
    print("\nEvery beginning of every curve, and all that follows:", table_of_laws(all_prefixes(curves)), sep="\n")
    if not paths:
        print("\nIterations under 3-D parallelism:", table_of_iterations(), sep="\n")
        print("\nLlama 3.1 8B under FSDP2, tokens per second and GPU:")
        for name, predicted, measured in sharded():
            print(f"  {name}: predicted {predicted:,.0f}, measured {measured:,.0f}: {100 * (predicted / measured - 1):+.1f} %")
        print("\nAll-reduce, 8 GPUs, 32 KiB to 16 GiB:")
        for name, errors in (("latency and bandwidth", all_reduce_errors()), ("interpolated, leaving one out", interpolation_errors())):
            sizes = sorted(map(abs, errors))
            print(f"  {name}: median {100 * statistics.median(sizes):.1f} %, largest {100 * sizes[-1]:.0f} %")
        print("\nPlans against published sweeps over layouts, by datasheets alone:", reality_layouts.table(), sep="\n")
    lost = [] if paths else worse(summary(scores))
    for line in lost:
        print(f"worse than committed: {line}", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
