"""Remedies for the parts of the gap between N × one rank and N ranks, each with its knobs, its predicted gain and what it costs."""

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from workbench.core import units
from workbench.diagnosis.analysis.gap import NAMED, Gap
from workbench.diagnosis.analysis.gap_evidence import GapEvidence, ranks_with_rare_steps, seconds_of
from workbench.diagnosis.analysis.loader_remedies import SHARED_EPOCH
from workbench.diagnosis.analysis.remedy import MIN_SPEEDUP, Remedy, sort_key
from workbench.runs.spec import AUTO, RunSpec, ScriptSpec, Spec

MORE = 4
"""How many times as many micro-batches a step gets where its reductions or waits are to be shared by more samples."""
FEW_BUCKETS = 3
"""Reductions per step that still overlap with the backward, and hardly cost any starts."""
MIB = 2**20


def remedies_for_gap(evidence: GapEvidence, gap: Gap, spec: Spec | None) -> tuple[Remedy, ...]:
    """What would narrow the gap, the best first. Their gains do not multiply."""
    remedies = [remedy for remedy in _all(evidence, gap, None if gap.predicted else spec) if remedy.speedup >= MIN_SPEEDUP]
    best: dict[str, Remedy] = {}
    for remedy in remedies:
        if remedy.name not in best or remedy.scope == "cause":
            best[remedy.name] = remedy
    return tuple(sorted(best.values(), key=sort_key))


def _all(e: GapEvidence, gap: Gap, given: Spec | None) -> Iterator[Remedy]:
    """Those of `_cores` and `_buckets` can be set from outside of a script, too."""
    spec = given if isinstance(given, RunSpec) else None
    yield from _cores(e, gap, given)
    yield from _memory(gap)
    yield from _loaders(e, gap, spec)
    yield from _slow(e, gap, spec)
    yield from _rare(e, gap)
    yield from _accumulate(e, gap, spec)
    yield from _buckets(e, gap, given)
    yield from _compression(e, gap, spec)
    yield from _micro_batch(e, gap, spec)
    yield from _epochs(e, gap, spec)


def _removing(
    gap: Gap,
    causes: tuple[str, ...],
    name: str,
    change: Mapping[str, Any],
    what: str,
    *,
    share: float = 1.0,
    ceiling: bool = True,
    costs: str = "",
    formula: str = "",
) -> Remedy:
    """A remedy that takes a share of some parts away."""
    known = [gap[cause] for cause in causes]

    def speedup(seconds: float) -> float:
        left = gap.step.mid - max(0.0, share * seconds)
        return gap.step.mid / left if left > 0 else math.inf

    low, mid, high = (speedup(sum(getattr(part, end) for part in known)) for end in ("low", "mid", "high"))
    said = formula or f"{units.percent(share)} of {units.seconds(sum(part.mid for part in known))} per step is gone ({', '.join(causes)})"
    return Remedy(
        name=name,
        change=dict(change),
        what=what,
        speedup=mid,
        low=1.0 if ceiling else low,
        high=high,
        formula=said,
        costs=costs,
        ceiling=ceiling,
        scope="cause" if gap.cause in causes else "part",
    )


def _cores(e: GapEvidence, gap: Gap, spec: Spec | None) -> Iterator[Remedy]:
    if gap.share("cores") < NAMED:
        return
    cores, wanted = e.cores or math.inf, e.world_size
    if e.threads > 1 and wanted * e.threads > cores:
        fewer = max(1, int(cores // wanted))
        yield _removing(
            gap,
            ("cores",),
            f"threads={fewer}",
            {"threads": fewer} if spec else {},
            f"Give each rank {units.several(fewer, 'thread')} for an operator (OMP_NUM_THREADS), so that all have a core.",
            costs="an operator alone takes longer",
        )
    elif e.num_workers and wanted * (e.threads + e.num_workers) > cores and wanted * e.threads <= cores:
        fewer = max(0, int(cores // wanted) - e.threads)
        yield _removing(
            gap,
            ("cores",),
            f"num_workers={fewer}",
            _workers(fewer) if spec else {},
            f"Give each rank's loader {fewer} workers, so that they leave the cores to the training.",
            costs="batches may come later",
        )
    else:
        yield _removing(
            gap,
            ("cores",),
            "a core for each rank",
            {},
            f"{wanted} ranks share {units.count(cores)} cores: give each a core of its own (fewer ranks, or more machines).",
        )
        fewer = max(1, int(cores // e.threads)) if e.cores else wanted
        if isinstance(spec, ScriptSpec) and fewer < wanted:
            most = fewer / wanted * gap.step.mid / gap.linear.mid
            yield Remedy(
                name=f"nproc_per_node={fewer}",
                change={"nproc_per_node": fewer},
                what=f"Start {units.several(fewer, 'rank')}, which have a core for each thread.",
                speedup=most,
                low=1.0,
                high=most,
                formula=f"each of {units.several(fewer, 'rank')} is as fast as one alone",
                costs="a smaller global batch, if each rank keeps its own",
                ceiling=True,
                scope="cause" if gap.cause == "cores" else "part",
            )


def _memory(gap: Gap) -> Iterator[Remedy]:
    if gap.share("memory") >= NAMED:
        yield _removing(
            gap,
            ("memory",),
            "memory of its own for each rank",
            {},
            "The ranks wait for the machine's memory: spread them over sockets or machines (numactl), fuse what passes over memory "
            "(optimizer=fused, torch.compile), or use fewer bytes (amp_bf16).",
        )


def _loaders(e: GapEvidence, gap: Gap, spec: RunSpec | None) -> Iterator[Remedy]:
    if gap.share("loaders") < NAMED:
        return
    more = max(1, 2 * e.num_workers)
    yield _removing(
        gap,
        ("loaders",),
        f"num_workers={more}",
        _workers(more, spec) if spec else {},
        f"The loaders slow each other down: make batches in {units.several(more, 'worker')} of each rank, ahead of the training.",
        costs="memory and cores of the workers",
    )


def _slow(e: GapEvidence, gap: Gap, spec: RunSpec | None) -> Iterator[Remedy]:
    if gap.share("slow rank") >= NAMED:
        yield _removing(
            gap,
            ("slow rank",),
            f"rank {e.slowest} as fast as the others",
            {},
            f"Rank {e.slowest} computes longer with the same work: look at its device and cores (clocks, temperature, other processes, "
            "affinity), and at what only this rank does (logging, evaluation).",
        )
    if gap.share("uneven data") >= NAMED:
        s = seconds_of(e)
        loading = (s.strangers_slowest - s.cached_slowest) - (s.strangers - s.strangers_cached)
        if loading > 0.5 * gap["uneven data"].mid:
            more = max(1, 2 * e.num_workers)
            yield _removing(
                gap,
                ("uneven data",),
                f"num_workers={more}",
                _workers(more, spec) if spec else {},
                f"Rank {e.slowest} waits longer for its data: let {units.several(more, 'worker')} make batches ahead, and give it storage "
                "and shards like the others'.",
                costs="memory and cores of the workers",
            )
        else:
            yield _removing(
                gap,
                ("uneven data",),
                "samples shared out by length",
                {},
                f"Rank {e.slowest} has longer samples: share them out by length instead of by number.",
            )


def _rare(e: GapEvidence, gap: Gap) -> Iterator[Remedy]:
    if gap.share("rare long steps") < NAMED:
        return
    ranks = ranks_with_rare_steps(e)
    where = "all ranks" if len(ranks) == e.world_size else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    yield _removing(
        gap,
        ("rare long steps",),
        "no rare long steps",
        {},
        f"Find out what happens now and then on {where}, such as opening a file, an evaluation, a checkpoint or garbage collection: "
        "wb.diagnose names the line. Do it less often, on all ranks at once, or beside the training (workers, a thread).",
    )


def _accumulate(e: GapEvidence, gap: Gap, spec: RunSpec | None) -> Iterator[Remedy]:
    """More micro-batches per step: one reduction and one wait for the slowest per more samples."""
    causes = ("many reductions", "large gradients", "uneven steps")
    if sum(max(0.0, gap.share(cause)) for cause in causes) < NAMED:
        return
    chance = gap["uneven steps"]
    spread = MORE * chance_of_sums(e, MORE) if chance.mid > 0 else 0.0

    def speedup(seconds: tuple[float, float]) -> float:
        most = min(1.0, gap.step.mid / sum(seconds)) if any(seconds) else 1.0  # ends of wide intervals may exceed the whole step
        reduction, waits = (most * each for each in seconds)
        longer = MORE * (gap.step.mid - reduction - waits) + reduction + min(spread, MORE * waits)
        return MORE * gap.step.mid / longer if longer > 0 else math.inf

    def ends(end: str) -> tuple[float, float]:
        return max(0.0, sum(getattr(gap[cause], end) for cause in causes[:2])), max(0.0, getattr(chance, end))

    low, mid, high = (speedup(ends(end)) for end in ("low", "mid", "high"))
    now = spec.accumulation if spec else e.accumulation
    without = "no reduction" if e.script and e.gradients is None else "no_sync()"  # no DDP was seen
    yield Remedy(
        name=f"accumulation={MORE * now}",
        change={"accumulation": MORE * now} if spec else {},
        what=f"Reduce gradients once per {MORE * now} micro-batches: accumulation with {without} in between.",
        speedup=mid,
        low=min(mid, 1 + 0.8 * (low - 1)),
        high=max(mid, 1 + 1.25 * (high - 1)),
        formula=f"one reduction and one wait for the slowest rank per {MORE} times as many samples; what the optimizer saves comes on top",
        costs=f"a global batch {MORE} times as large: learning rate and schedule have to follow",
        scope="cause" if gap.cause in causes else "part",
    )


def chance_of_sums(e: GapEvidence, count: int) -> float:
    """Seconds per micro-batch by which the slowest rank exceeds the mean, where ranks meet after each `count` steps only."""
    waits = []
    for block in e.rounds("strangers"):
        busy = [block.busy(rank) for rank in range(len(block.steps))]
        rows = [row for row in zip(*busy, strict=False) if all(step == step for step in row)]
        sums = [[sum(column) for column in zip(*rows[i : i + count], strict=True)] for i in range(0, len(rows) - count + 1, count)]
        if sums:
            mean = max(statistics.fmean(column) for column in zip(*rows, strict=True))
            waits.append(statistics.fmean(map(max, sums)) / count - mean)
    return max(0.0, statistics.fmean(waits)) if waits else 0.0


def _buckets(e: GapEvidence, gap: Gap, spec: Spec | None) -> Iterator[Remedy]:
    g = e.gradients
    if g is None or g.buckets <= FEW_BUCKETS or gap.share("many reductions") < NAMED:
        return
    size = max(1.0, round(g.size / MIB / FEW_BUCKETS, 1))
    yield _removing(
        gap,
        ("many reductions",),
        f"bucket_cap_mb={size:g}",
        {"bucket_cap_mb": size} if spec else {},
        f"Reduce gradients in buckets of {size:g} MiB: {FEW_BUCKETS} or so instead of {g.buckets}.",
        ceiling=False,
        share=1 - FEW_BUCKETS / g.buckets,
        costs="the first bucket is reduced a little later; its memory",
        formula=f"starting a reduction takes {units.seconds(g.latency)}, and there are {g.buckets - FEW_BUCKETS} fewer",
    )


def _compression(e: GapEvidence, gap: Gap, spec: RunSpec | None) -> Iterator[Remedy]:
    if gap.share("large gradients") < NAMED:
        return
    turned = spec is not None and e.device == "cuda" and spec.gradient_compression == "none"
    yield _removing(
        gap,
        ("large gradients",),
        "gradients in 16 bits",
        {"gradient_compression": "bf16"} if turned else {},
        "Send gradients in half the bytes (a communication hook such as bf16_compress_hook on GPUs), or thin matrices of them (PowerSGD).",
        share=0.5,
        costs="gradients lose digits; on a CPU the conversion costs more than it saves on one machine",
    )


def _micro_batch(e: GapEvidence, gap: Gap, spec: RunSpec | None) -> Iterator[Remedy]:
    """Twice the samples per rank and step, which cost less than twice the time where they do."""
    s = seconds_of(e)
    if not e.large or not math.isfinite(s.one_large) or (spec is not None and spec.micro_batch == AUTO):
        return
    base = s.one_cached if math.isfinite(s.one_cached) else s.one
    doubled = base + max(0.0, (s.one_large - base) / (e.large - 1)) if e.large > 1 else 2 * base
    step = gap.step.mid - base + doubled + max(0.0, gap.linear.mid - base)  # a loader's work doubles, too
    speedup = 2 * gap.step.mid / step
    if speedup < 1 + 2 * NAMED:  # a larger batch changes what is trained
        return
    now = spec.micro_batch if spec else None
    yield Remedy(
        name=f"micro_batch={2 * now}" if now else "micro-batches twice as large",
        change={"micro_batch": 2 * now} if now else {},
        what="Give each rank twice the samples per step: a step costs less than twice as much.",
        speedup=speedup,
        low=1 + 0.7 * (speedup - 1),
        high=1 + 1.2 * (speedup - 1),
        formula=f"one rank with {e.large} times its batch takes {units.times(s.one_large / base)} the time, not {e.large}×",
        costs="memory; a global batch twice as large: learning rate and schedule have to follow",
        scope="cause" if gap.cause in ("micro-batch", "many reductions", "large gradients") else "part",
    )


def _epochs(e: GapEvidence, gap: Gap, spec: RunSpec | None) -> Iterator[Remedy]:
    if gap.share("epochs") < NAMED:
        return
    if e.num_workers and not e.persistent_workers:
        yield _removing(
            gap,
            ("epochs",),
            "epoch in shared memory" if e.misses_epochs else "persistent_workers=True",
            {"persistent_workers": True} if spec and not e.misses_epochs else {},
            SHARED_EPOCH if e.misses_epochs else "Keep the loader's workers from one epoch to the next.",
            ceiling=False,
            share=0.9,
            costs="workers hold their memory all the time",
        )
    else:
        yield _removing(
            gap,
            ("epochs",),
            "longer passes",
            {},
            "Let the loader go on without an end, such as by a sampler that repeats the data: its start comes once.",
        )


def _workers(count: int, spec: RunSpec | None = None) -> dict[str, Any]:
    """The knobs of a loader with so many workers."""
    if count:
        return {"num_workers": count, **({"persistent_workers": True} if spec is None or not spec.persistent_workers else {})}
    return {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
