"""The commands `plan` and `estimate-time` of the command line."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.cluster.analysis.cluster import CLUSTERS
from workbench.core import codec
from workbench.core.checks import choice
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec

Show = Callable[[Any, argparse.Namespace], None]


def plan(given: argparse.Namespace, knobs: Mapping[str, Any], show: Show) -> int:
    """Find layouts of a task on a cluster that fit and are fast; returns the exit status.

    Raises:
        ValueError: no such task, cluster or knob; or nothing fits.
    """
    from workbench.cluster import plan as planning

    spec = RunSpec(task=given.target).replace(**knobs)
    choice("--cluster", given.cluster, [cluster.name for cluster in CLUSTERS])
    plans = planning.plan(spec, given.cluster, gpus=given.gpus, global_batch=given.global_batch, top=given.top)
    show(list(plans) if given.json else plans, given)
    return 0


def estimate_time(given: argparse.Namespace, knobs: Mapping[str, Any], show: Show) -> int:
    """Predict the time of a task's step on a device that need not be here; returns the exit status.

    Raises:
        ValueError: no such task, device, cluster, knob or run; or its time cannot be estimated: it says what to measure.
    """
    from workbench.cluster import estimate_time as elsewhere

    spec = RunSpec(task=given.target).replace(**knobs)
    measured: Any = given.measured
    if measured is not None and (Path(measured) / "run.json").is_file():
        measured = Run.load(measured)
    elif measured is not None:
        try:
            measured = float(measured)
        except ValueError:
            raise ValueError(f"--measured {measured}: expected seconds of a step, or the directory of a run") from None
    shapes = {name: value for name in ("sequence", "image") if (value := getattr(given, name)) is not None}
    step = elsewhere.estimate_time(spec, device=given.device, cluster=given.cluster, measured=measured, **shapes)
    figures = {"seconds": step.seconds, "parts": step.parts, "samples_per_sec": step.samples_per_sec, "mfu": step.mfu, "notes": step.notes}
    show(codec.to_json({"title": step.title, "device": step.device.name, **figures}) if given.json else step, given)
    return 0
