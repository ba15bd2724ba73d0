"""Ranking: the operators or kernels of any part of a trace, most time of their own first; what is dear to find is kept."""

from dataclasses import dataclass

import numpy as np

from workbench.traces.analysis.labels import DEVICE
from workbench.traces.analysis.operators import Which, self_times
from workbench.traces.analysis.trace import Trace

HOST = ("operator", "host_communication", "collective_call", "optimizer", "backward")
"""Kinds that count as operators of the host, as in `trace.ops()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """All calls of one name that begin in a part of a trace."""

    name: str
    count: int
    self_seconds: float
    """Without what it calls."""
    total_seconds: float
    """With it."""
    share: float
    """Fraction 0..1 of all `self_seconds` in that part."""


class Ranking:
    """Operators and kernels of a trace, for any part of it."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        columns = trace.columns
        told = {name: code for code, name in enumerate(dict.fromkeys(label.name for label in columns.labels))}
        self._names = list(told)
        self._name = np.array([told[label.name] for label in columns.labels] or [0], dtype=np.int64)[columns.label]
        self._length = columns.end - columns.start
        self._own = np.where(trace.kinds.where(*DEVICE), self._length, self_times(columns, trace.kinds))

    def own(self, event: int) -> float:
        """Seconds of an event without what it calls."""
        return float(self._own[event]) / 1e9

    def within(self, start: float, end: float, which: Which = "operator") -> tuple[Ranked, ...]:
        """Those that begin in a part of the time, in nanoseconds from the first event on.

        Args:
            start: where the part begins.
            end: where it ends.
            which: "operator" (of the host) or "kernel" (of the device, with its copies).
        """
        columns = self._trace.columns
        kinds = DEVICE if which == "kernel" else HOST
        chosen = self._trace.kinds.where(*kinds) & (columns.start >= start) & (columns.start < end)
        name, size = self._name[chosen], len(self._names)
        counts = np.bincount(name, minlength=size)
        own = np.bincount(name, weights=self._own[chosen], minlength=size) / 1e9
        total = np.bincount(name, weights=self._length[chosen], minlength=size) / 1e9
        whole = own.sum() or 1.0
        return tuple(
            Ranked(
                name=self._names[i],
                count=int(counts[i]),
                self_seconds=float(own[i]),
                total_seconds=float(total[i]),
                share=float(own[i] / whole),
            )
            for i in np.argsort(-own, kind="stable").tolist()
            if counts[i]
        )
