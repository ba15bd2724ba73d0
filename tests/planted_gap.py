"""Made measurements of N ranks beside one, in which each part of the gap is known."""

import random
from typing import Any

from workbench.diagnosis.analysis.evidence import Gradients
from workbench.diagnosis.analysis.gap_evidence import GapBlock, GapEvidence

STEPS = 12


def planted(
    *,
    ranks: int = 2,
    rounds: int = 6,
    computing: float = 0.020,
    loading: float = 0.002,
    sharing: float = 0.0,
    loaders: float = 0.0,
    slow: float = 0.0,
    data: float = 0.0,
    longer_samples: float = 0.0,
    uneven: float = 0.0,
    pauses: float = 0.0,
    reduction: float = 0.0,
    buckets: int = 2,
    waits: float = 0.0,
    start: float = 0.0,
    steps_per_pass: float | None = 100.0,
    large: float | None = None,
    unexplained: float = 0.0,
    noise: float = 0.004,
    seed: int = 0,
    **fields: Any,
) -> GapEvidence:
    """Blocks of all arms. Seconds per step.

    Args:
        ranks: how many.
        rounds: of all arms.
        computing: of a step.
        loading: of a step.
        sharing: more compute beside other ranks.
        loaders: more loading beside other ranks.
        slow: more compute on the last rank, with whatever batches.
        data: more loading on the last rank.
        longer_samples: more compute on the last rank, with its own batches.
        uneven: more compute in a third of the steps of each rank, by chance.
        pauses: of the last rank, in one step in 25, by chance, if it loads.
        reduction: beyond the slowest rank.
        buckets: reductions per step.
        waits: for a core, beside other ranks.
        start: of a pass.
        steps_per_pass: of each rank.
        large: of one rank with the batch of all; None = as many times the compute.
        unexplained: more with all together than anything tells.
        noise: by which blocks and steps differ, relative.
        seed: of the noise.
        fields: of GapEvidence.
    """
    chance = random.Random(seed)
    blocks = []

    def rank_steps(rank: int, *, fed: bool, beside: bool, same: bool = False) -> list[float]:
        last = rank == ranks - 1
        base = computing + (sharing if beside else 0.0) + (slow if last else 0.0) + (longer_samples if last and not same else 0.0)
        base += (loading + (loaders if beside else 0.0) + (data if last else 0.0)) if fed else 0.0
        block = 1 + noise * chance.gauss(0, 1)
        late = [uneven if chance.random() < 1 / 3 else 0.0 for _ in range(STEPS)]
        if pauses and last and fed:
            late = [more + (pauses if chance.random() < 1 / 25 else 0.0) for more in late]
        return [(base + more) * block * (1 + noise * chance.gauss(0, 1)) for more in late]

    def add(arm: str, rows: list[list[float]], wait: float = 0.0) -> None:
        steps = tuple(tuple(step + wait for step in row) for row in rows)
        blocks.append(GapBlock(arm=arm, steps=steps, delays=tuple((wait,) * len(row) for row in rows)))

    def together(fed: bool, more: float) -> list[list[float]]:
        rows = [rank_steps(rank, fed=fed, beside=True) for rank in range(ranks)]
        job = [max(step) + reduction + more for step in zip(*rows, strict=True)]
        return [job] * ranks

    idle: list[list[float]] = [[] for _ in range(ranks - 1)]
    for _ in range(rounds):
        add("one", [rank_steps(0, fed=True, beside=False), *idle])
        add("one, cached", [rank_steps(0, fed=False, beside=False), *idle])
        factor = (large if large is not None else ranks * computing) / computing
        add("one, large batch", [[factor * step for step in rank_steps(0, fed=False, beside=False)], *idle])
        add("strangers, cached", [rank_steps(rank, fed=False, beside=True) for rank in range(ranks)], waits)
        add("strangers", [rank_steps(rank, fed=True, beside=True) for rank in range(ranks)], waits)
        add("all", together(True, unexplained), waits)
        add("all, cached", together(False, 0.0), waits)
        if slow or longer_samples:
            add("strangers, same batches", [rank_steps(rank, fed=False, beside=True, same=True) for rank in range(ranks)], waits)
    given: dict[str, Any] = {
        "samples": 32.0 * ranks,
        "cores": float(ranks),
        "starts_alone": (start,) * rounds,
        "starts_together": (start,) * rounds,
        "gradients": Gradients(size=4 * 10**6, buckets=buckets, latency=3e-4, per_byte=1e-9),
        "large": ranks,
        "seconds": 20.0,
    }
    return GapEvidence(blocks=tuple(blocks), world_size=ranks, steps_per_pass=steps_per_pass, **{**given, **fields})
