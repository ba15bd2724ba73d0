"""Remedies for ranks that wait for each other: fewer, larger or cheaper reductions, and work dealt out evenly."""

from collections.abc import Iterator

from workbench.core import units
from workbench.diagnosis.analysis.causes import pausing_rank
from workbench.diagnosis.analysis.remedy import WORTH, WORTH_A_BATCH, Case, Remedy, ceiling, predicted, worth

REDUCTIONS = (0.93, 1.12)
"""Measured step over predicted one with fewer or larger reductions: they overlap with backward, which the formulas take as it is now."""
TIMES = 4
"""Micro-batches per step that are offered: more bring little, a step being mostly compute by then."""
FEW_BUCKETS = 4
"""So many still overlap with backward, and start few reductions."""
HALF = 0.5
"""Of the bytes, if gradients are sent in 16 bits."""
MIB = 2**20


def for_ranks(case: Case) -> Iterator[Remedy]:
    """What would make ranks wait less for each other."""
    e, c = case.evidence, case.costs
    if e.world_size < 2:
        return
    if c.communication.mid / c.step >= 1 - 1 / WORTH:
        yield from _accumulation(case)
        yield from _buckets(case)
        yield from _compression(case)
    if case.judgement.verdict == "straggler":
        yield from _balance(case)


def _accumulation(case: Case) -> Iterator[Remedy]:
    e, c = case.evidence, case.costs
    more = e.accumulation * TIMES
    speedup = case.model.speedup(accumulation=more)
    room = (case.model.without(c.communication.high) - 1) / max(1e-9, case.model.without(c.communication.mid) - 1)
    one = predicted(
        case,
        f"accumulation={more}",
        {"accumulation": more},
        f"Reduce gradients once per {more} micro-batches: accumulation with no_sync() in between.",
        speedup,
        (REDUCTIONS[0] / max(1.0, min(1.1, room)), REDUCTIONS[1]),
        f"one reduction ({units.seconds(c.communication.mid)}) and one optimizer step ({units.seconds(c.optimizer.mid)}) per {more} "
        f"micro-batches instead of per {e.accumulation}",
        f"a global batch {TIMES} times as large: learning rate and schedule have to follow",
    )
    if worth(one, WORTH_A_BATCH):
        yield one


def _buckets(case: Case) -> Iterator[Remedy]:
    c, g = case.costs, case.evidence.gradients
    if g is None or g.buckets <= FEW_BUCKETS:
        return
    size = max(1.0, round(g.size / MIB / FEW_BUCKETS, 1))
    speedup = case.model.speedup(bucket_cap_mb=size)
    saved = c.step * (1 - 1 / speedup) if speedup else 0.0
    one = predicted(
        case,
        f"bucket_cap_mb={size:g}",
        {"bucket_cap_mb": size},
        f"Reduce gradients in buckets of {size:g} MiB: {FEW_BUCKETS} or so instead of {g.buckets}.",
        speedup,
        (1 - 0.3 * saved / c.step, 1 + 0.5 * saved / c.step),
        f"starting a reduction takes {units.seconds(g.latency)}, and there are {g.buckets - FEW_BUCKETS} fewer",
        "the first bucket is reduced a little later; its memory",
    )
    if worth(one):
        yield one


def _compression(case: Case) -> Iterator[Remedy]:
    e, c, g = case.evidence, case.costs, case.evidence.gradients
    volume = 1.0
    if g is not None and g.latency * g.buckets + g.size * g.per_byte:
        volume = g.size * g.per_byte / (g.latency * g.buckets + g.size * g.per_byte)
    saved = c.share(c.saves(c.communication))
    one = ceiling(
        case,
        "gradients in 16 bits",
        "Send gradients in half the bytes: model.register_comm_hook(None, bf16_compress_hook) on GPUs, or PowerSGD.",
        saved.mid * volume * HALF,
        f"half of the {units.percent(volume)} of the reduction that grows with the bytes is gone",
        "gradients lose digits; converting them takes time (on a CPU, more than it saves on one machine)",
    )
    if one and e.device != "cpu":
        yield one


def _balance(case: Case) -> Iterator[Remedy]:
    e, c = case.evidence, case.costs
    pausing = pausing_rank(e)
    if pausing is not None:
        stalls = next(one.stalls for one in e.ranks if one.rank == pausing)
        where = f" ({stalls.where})" if stalls.where else ""
        one = ceiling(
            case,
            "no pauses",
            f"Find what rank {pausing} does in its pauses{where} and move it off the training thread, or do it less often.",
            c.share(c.stalls),
            "its pauses are gone",
        )
    elif c.slow:
        what = (
            "Give its loader what the others have: the same storage, as many workers and cores, shards of equal size."
            if c.slow.input >= c.slow.compute
            else "Deal out samples by length instead of by number, and look at its device: clocks, temperature, other processes."
        )
        late = c.straggler if c.slow.input >= c.slow.compute else c.saves(c.straggler)
        who = f"rank {', '.join(map(str, c.slow.ranks))}"
        one = ceiling(
            case,
            f"{who} as fast as the others",
            f"R{who[1:]} is slow. {what}",
            c.share(late),
            "all ranks are as fast as a typical one",
        )
    else:
        one = None
    if one:
        yield one
