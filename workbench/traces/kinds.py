"""Kinds: the kind of every event of a trace, and when events of a kind run."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from workbench.traces.columns import Columns
from workbench.traces.intervals import Spans, union
from workbench.traces.labels import DEVICE as DEVICE
from workbench.traces.labels import HOST_COLLECTIVE as HOST_COLLECTIVE
from workbench.traces.labels import KINDS as KINDS
from workbench.traces.labels import Label
from workbench.traces.labels import kind_of as kind_of


class Kinds:
    """The kind of every event of a trace."""

    def __init__(self, columns: Columns, of: Callable[[Label], str] = kind_of) -> None:
        self._columns = columns
        codes = {kind: code for code, kind in enumerate(KINDS)}
        self._of = np.array([codes[of(label)] for label in columns.labels] or [0], dtype=np.int8)
        self._code = self._of[columns.label]
        self._codes = codes
        self._covers: dict[str, Spans] = {}
        self.device = bool(np.isin(self._code, [codes[kind] for kind in DEVICE]).any())
        """Did a device other than the CPU work?"""

    @property
    def codes(self) -> NDArray[np.int8]:
        """Number of each event's kind, in the order of KINDS."""
        return self._code

    def where(self, *kinds: str) -> NDArray[np.bool_]:
        """Which events are of one of some kinds."""
        found: NDArray[np.bool_] = np.isin(self._code, [self._codes[kind] for kind in kinds])
        return found

    def spans(self, *kinds: str) -> Spans:
        """Start and end of the events of some kinds, in the order of the file."""
        chosen = self.where(*kinds)
        return np.stack([self._columns.start[chosen], self._columns.end[chosen]], axis=1)

    def cover(self, *kinds: str) -> Spans:
        """The time in which an event of one of some kinds runs."""
        for kind in kinds:
            if kind not in self._covers:
                self._covers[kind] = union(self.spans(kind))
        return union(*(self._covers[kind] for kind in kinds)) if len(kinds) != 1 else self._covers[kinds[0]]
