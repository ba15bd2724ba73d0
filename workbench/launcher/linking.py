"""Timing collectives in a launch of its own, awaited."""

import os
from collections.abc import Mapping
from typing import Any

from workbench.launcher.experimenting import launched
from workbench.launcher.launching import check
from workbench.launcher.waiting import time_left
from workbench.run import Run
from workbench.spec import RunSpec


def link_sweep(spec: RunSpec, order: Mapping[str, Any], *, runs_dir: str | os.PathLike[str] | None = None) -> Run:
    """Time collectives between ranks; the run directory then holds `links.json`.

    Args:
        spec: of which its ranks, device and backend count.
        order: kinds, sizes, repeats and measuring_s, as `measure.links.time_links` takes them.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        RunError: it failed; the run directory stays.
        LaunchError: it cannot run here. Nothing was written.
    """
    check(spec)
    wanted = {"kind": "links", "budget_s": order["measuring_s"], **order}
    return launched(spec, "collectives", wanted, runs_dir, program="workbench.train.links", show=time_left("{done} of {steps} rounds"))
