"""TensorBoard's profiler plugin without TensorBoard: what its own parser says of a file, beside what the workbench says."""

import logging
import tempfile
from pathlib import Path

from torch_tb_profiler import consts
from torch_tb_profiler.profiler.data import RunProfileData

from workbench import Trace
from workbench.core import units
from workbench.core.display.table import Table

PARTS = ("Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other", "step")
"""What its overview shows, in the order of its arithmetic."""

logging.getLogger(consts.PLUGIN_NAME).setLevel(logging.CRITICAL)  # it reports collectives at the edge of a trace as errors


def overview(path: Path) -> dict[str, float]:
    """Its step time breakdown: part → seconds per step."""
    found = RunProfileData.parse("worker0", None, str(path), tempfile.gettempdir())
    return dict(zip(PARTS, (microseconds / 1e6 for microseconds in found.avg_costs.costs), strict=True))


def beside(trace: Trace) -> Table:
    """The same file, read twice."""
    theirs, ours = overview(trace.path), trace.breakdown()
    pairs = [("DataLoader", "data_wait"), ("Communication", "communication"), ("CPU Exec", "compute"), ("Other", "host"), ("step", "total")]
    rows = [[one, units.seconds(theirs[one]), other, units.seconds(ours.mean(other))] for one, other in pairs]
    return Table(columns=("the plugin", "time", "the workbench", "time "), rows=rows, title="One file, two readers")
