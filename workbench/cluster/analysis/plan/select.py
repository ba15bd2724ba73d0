"""Choosing: from all layouts that fit to a few that differ, and what limits each of them."""

from dataclasses import dataclass

import numpy as np

from workbench.cluster.analysis.plan.layouts import SHARINGS, Floats, Layouts
from workbench.cluster.analysis.plan.timing import PARTS, Seconds

SLACK = 0.25
"""The leanest and the best value may be this much slower, or dearer, than the fastest, or cheapest."""
NEAR = 0.10
"""The simplest may be this much slower than the fastest."""
FASTER = 0.05
"""A layout that does not fit counts as a loss if it were faster by this much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A place in the columns, and why it was chosen."""

    place: int
    roles: tuple[str, ...]
    why: str


def short_list(
    found: Layouts,
    total: Floats,
    used: Floats,
    gpu_seconds: Floats,
    sure: np.ndarray[tuple[int], np.dtype[np.bool_]],
    *,
    top: int,
    one_size: bool,
) -> list[Chosen]:
    """The fastest, and if its memory is tight, the fastest whose upper end fits too; the cheapest, the best value and the fewest GPUs where
    their number is open; the simplest; the leanest; and then the fastest of each other kind, until there are `top`.

    Args:
        found: layouts that fit.
        total: seconds of a step of each.
        used: bytes of each.
        gpu_seconds: GPUs × seconds of each.
        sure: does the upper end of its memory fit too?
        top: how many to choose at most; roles of one layout count once.
        one_size: have all as many GPUs?
    """
    fastest = _first(total, used)
    near = total <= (1 + NEAR) * total[fastest]
    soon = total <= (1 + SLACK) * total[fastest]
    kinds = complexity(found)
    picks: list[tuple[str, int, str]] = [("fastest", fastest, "the least time per step")]
    if sure.any() and not sure[fastest]:
        picks.append(("safe", _first(np.where(sure, total, np.inf), used), "the fastest whose memory fits by its upper end too"))
    if not one_size:
        cheapest = _first(gpu_seconds, total)
        cheap = np.where(gpu_seconds <= (1 + SLACK) * gpu_seconds[cheapest], total, np.inf)
        picks.append(("cheapest", cheapest, "the fewest GPU-seconds per sample"))
        picks.append(
            ("best value", _first(cheap, gpu_seconds), f"the fastest that is at most {100 * SLACK:.0f} % dearer than the cheapest")
        )
        picks.append(("fewest GPUs", _first(found.gpus.astype(float), total), "the fewest GPUs on which it fits"))
    leanest = _first(np.where(soon, used, np.inf), total)
    simplest = _first(np.where(near, kinds, np.inf), total)
    picks.append(("simplest", simplest, f"the fewest kinds of parallelism within {100 * NEAR:.0f} % of the fastest"))
    picks.append(("leanest", leanest, f"the least memory within {100 * SLACK:.0f} % of the fastest"))
    places: dict[int, list[tuple[str, str]]] = {}
    for role, place, why in picks:
        if place in places or len(places) < top:
            places.setdefault(place, []).append((role, why))
    for place in _others(found, total, set(places)):
        if len(places) >= top:
            break
        places[place] = [(f"next {len(places)}", "the fastest of another kind")]
    chosen = [
        Chosen(place=place, roles=tuple(role for role, _ in said), why="; ".join(why for _, why in said)) for place, said in places.items()
    ]
    ordered = sorted(chosen, key=lambda one: (total[one.place], used[one.place]))
    names = iter(range(1, len(ordered) + 1))
    return [
        Chosen(place=one.place, roles=(f"another way {next(names)}",), why=one.why) if one.roles[0].startswith("next") else one
        for one in ordered
    ]


def _first(value: Floats, then: Floats) -> int:
    """The place of the least, and of those equal to six digits the least by another column."""
    least = value.min()
    return int(np.argmin(np.where(value <= least * (1 + 1e-6), then, np.inf)))


def complexity(found: Layouts) -> Floats:
    """How much has to be set up: stages more than split layers, these more than shared states, and these more than recomputation."""
    shared = np.array([0.0, 0.5, 0.75, 1.0, 1.25])[found.sharing] * (found.data > 1)
    made: Floats = 4.0 * (found.pipeline > 1) + 1.0 * (found.chunks > 1) + 2.0 * (found.tensor > 1) + shared
    return made + 0.25 * (found.checkpointing > 0)


def kinds_of(found: Layouts) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A number per kind of layout: GPUs, tensor and pipeline degree, and whether weights are shared."""
    whole = np.isin(found.sharing, [SHARINGS.index(one) for one in ("fsdp", "hsdp")])
    return ((found.gpus * 1024 + found.tensor) * 4096 + found.pipeline) * 2 + whole


def _others(found: Layouts, total: Floats, taken: set[int]) -> list[int]:
    """The fastest of each kind that is not taken, fastest first."""
    kinds = kinds_of(found)
    order = np.argsort(total, kind="stable")
    seen = {int(kinds[place]) for place in taken}
    _, first = np.unique(kinds[order], return_index=True)
    return [int(order[place]) for place in np.sort(first) if int(kinds[order[place]]) not in seen]


def bounds(all_of_them: Layouts, total: Floats, fits: np.ndarray[tuple[int], np.dtype[np.bool_]], parts: Seconds, place: int) -> str:
    """What limits one layout: memory, if the same ranks could go faster by a layout that does not fit; else its largest part."""
    same = (all_of_them.gpus == all_of_them.gpus[place]) & (all_of_them.tensor == all_of_them.tensor[place])
    same &= all_of_them.pipeline == all_of_them.pipeline[place]
    if (same & ~fits).any() and total[same & ~fits].min() * (1 + FASTER) < total[same & fits].min():
        return "memory"
    sizes = {name: float(getattr(parts, name)[place]) for name in PARTS}
    return max(sizes, key=lambda name: sizes[name])
