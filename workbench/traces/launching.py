"""Launching: which call of the host launched which work of the device."""

import numpy as np

from workbench.traces.columns import Columns
from workbench.traces.intervals import Numbers
from workbench.traces.kinds import Kinds


def callers(columns: Columns, kinds: Kinds, work: Numbers) -> Numbers:
    """Number of the call that launched each of some events of a device, by correlation; -1 where the file does not tell.

    Args:
        columns: the events.
        kinds: what they are.
        work: numbers of events of a device.
    """
    calls = np.flatnonzero(kinds.where("runtime", "wait") & (columns.correlation >= 0))
    if not len(calls):
        return np.full(len(work), -1, dtype=np.int64)
    keys, at = np.unique(columns.correlation[calls], return_index=True)
    wanted = columns.correlation[work]
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found: Numbers = np.where((keys[place] == wanted) & (wanted >= 0), calls[at][place], -1)
    return found
