"""The traces of several ranks in words: a verdict, and which operators are slower on a rank that holds the others up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench import units
from workbench.traces.breakdown import PARTS
from workbench.traces.explanation import CLEAR, Explanation
from workbench.traces.kinds import kind_of
from workbench.traces.ops import short
from workbench.traces.rank_parts import RankParts
from workbench.traces.stragglers import Stragglers

if TYPE_CHECKING:
    from workbench.traces.trace import Trace

NAMED = 3
"""Operators that are named at most."""
ALIKE = 0.1
"""Calls per step that differ by less than that fraction are as many."""
EXCHANGE = ("communication", "host_communication", "collective_call")
"""Kinds that are no computing."""
TRIED = {
    "data_wait": "the same number of workers and equally fast storage on every rank, and samples that are dealt out evenly",
    "h2d": "pinned memory, and the same slot or link for every device",
    "compute": "equal shapes on every rank (lengths of sequences, sizes of pictures), and a device or core that nothing else uses",
    "host": "look for what only this rank does: logging, checkpoints, metrics, another program on its cores",
    "idle": "look for what only this rank does between its operators: files, locks, sleep",
    "other": "look at what only this rank does outside of its steps",
}
"""Part that is longer → what is commonly tried."""


def slower(traces: Mapping[int, Trace], slow: Sequence[int]) -> tuple[str, ...]:
    """Operators, or kernels, that take longest in comparison on slow ranks, in words; nothing where no operator does.

    Args:
        traces: of all ranks.
        slow: ranks that hold the others up.
    """
    device = all(trace.kinds.device for trace in traces.values())
    seconds: dict[str, dict[int, float]] = defaultdict(dict)
    calls: dict[str, dict[int, float]] = defaultdict(dict)
    for rank, trace in traces.items():
        exchange = {label.name for label in trace.columns.labels if kind_of(label) in EXCHANGE}
        for name, (own, count) in trace.per_step("kernel" if device else "operator").items():
            if name not in exchange:  # waiting in them is what a slow rank does least, and none of its own work
                seconds[name][rank], calls[name][rank] = own, count
    others = [rank for rank in traces if rank not in slow]

    def more(values: Mapping[int, float]) -> float:
        return float(np.mean([values.get(r, 0.0) for r in slow]) - np.median([values.get(r, 0.0) for r in others]))

    found = sorted(((more(of), name) for name, of in seconds.items()), reverse=True)
    whole = sum(extra for extra, _ in found if extra > 0)
    said = []
    for extra, name in found[:NAMED]:
        if extra <= CLEAR * whole:
            break
        usual = float(np.median([calls[name].get(rank, 0.0) for rank in others]))
        often = "called as often" if abs(more(calls[name])) <= ALIKE * usual else f"{usual:.3g} calls a step on the others"
        said.append(f"{short(name)} +{units.seconds(extra)} ({often})")
    return tuple(said)


def explain_ranks(parts: RankParts, found: Stragglers, each: Mapping[int, Explanation]) -> Explanation:
    """A straggler first; else what the slowest rank's own trace says."""
    shares = _shares(parts)
    cannot = tuple(dict.fromkeys(one for explained in each.values() for one in explained.cannot if "waiting for a slower rank" not in one))
    if found.ranks and found.share >= CLEAR:
        tried = TRIED[found.phase] if found.phase else "the same work on every rank"
        return Explanation(
            verdict="straggler",
            why=f"{found.verdict}; {found.why}",
            next=f"Commonly tried: {tried}. wb.diagnose proves what it gains",
            cannot=cannot,
            shares=shares,
        )
    slowest = max(parts.ranks, key=lambda rank: parts.mean(rank) if parts.steps else 0.0)
    own = each[slowest]
    waiting = f"Straggler: {found.verdict}" if len(parts.ranks) > 1 else ""
    return Explanation(
        verdict=own.verdict,
        why="; ".join(filter(None, [f"rank {slowest}: {own.why}" if len(parts.ranks) > 1 else own.why, waiting])),
        next=own.next,
        cannot=cannot,
        shares=shares,
    )


def _shares(parts: RankParts) -> dict[str, float]:
    """Of all steps of all ranks."""
    whole = float(parts.values().sum())
    return {part: float(parts.values(part).sum()) / whole for part in PARTS} if whole else {}
