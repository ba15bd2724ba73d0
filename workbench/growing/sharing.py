"""Sharing: which part of a step is nothing but communication, by steps that were taken with and without it."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.codec import JsonDataclass
from workbench.diagnosis.interval import interval_of
from workbench.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps(JsonDataclass):
    """Steps of one spec, with and without the reduction of gradients, in turns."""

    spec: RunSpec
    pairs: tuple[tuple[float, float], ...]
    """Seconds per step of neighbouring blocks: (with, without)."""

    @property
    def whole(self) -> float:
        """Seconds of a step as it is: the median of its blocks."""
        return statistics.median(one for one, _ in self.pairs)

    @property
    def saved(self) -> float:
        """Seconds of it that are not there without the reduction."""
        return interval_of(self.pairs, lambda one, other: 1 - other / one).mid * self.whole


def exposed(measured: Iterable[Steps], over: str) -> dict[Any, float]:
    """Share of the step that is exposed communication, by the knob's value.

    With one process nothing is sent, and yet DDP copies each gradient into its bucket. Where one process was measured, what that costs is
    subtracted from the others: it is no communication.

    >>> spec = RunSpec(task="text-gpt")
    >>> steps = [Steps(spec=spec.replace(nproc_per_node=n), pairs=((s, w),)) for n, s, w in ((1, 1.0, 0.9), (2, 2.0, 1.4))]
    >>> {n: round(share, 2) for n, share in exposed(steps, "nproc_per_node").items()}
    {1: 0.0, 2: 0.25}
    """
    found = list(measured)
    alone = [steps.saved for steps in found if steps.spec.nproc_per_node == 1] if over == "nproc_per_node" else []
    copied = max(0.0, statistics.median(alone)) if alone else 0.0
    return {
        getattr(steps.spec, over): 0.0 if steps.spec.nproc_per_node == 1 else min(0.99, max(0.0, (steps.saved - copied) / steps.whole))
        for steps in found
    }


def in_launches(specs: Sequence[RunSpec]) -> list[list[RunSpec]]:
    """Specs that can be measured in one launch, one after the other: what is fixed when the processes start is the same.

    Their number too, though some could rest: a model that talks by itself (SyncBatchNorm, say) talks to all processes there are.
    """
    groups: dict[Any, list[RunSpec]] = {}
    for spec in specs:
        groups.setdefault((spec.task, spec.nproc_per_node, spec.device, spec.backend, spec.threads), []).append(spec)
    return list(groups.values())
