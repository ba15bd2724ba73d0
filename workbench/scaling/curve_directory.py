"""Folder: the directory of a curve. It holds the order and the runs, so that a curve can be read, and gone on with, at any time.

Sharing: which part of a step is nothing but communication, by steps that were taken with and without it.
"""

import os
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.core.codec import JsonDataclass
from workbench.core.statistics import interval_of
from workbench.runs.launch.environment import versions
from workbench.runs.launch.launch import label
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.analysis.curve.point import CurveError
from workbench.scaling.analysis.curve.read import shown_value
from workbench.scaling.curve_order import Order


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Where a curve grows."""

    path: Path
    order: Order

    @classmethod
    def new(cls, order: Order, runs_dir: str | os.PathLike[str] | None) -> "Folder":
        """An empty one.

        Raises:
            LaunchError: there is no place to write to.
        """
        runs = _runs(runs_dir)
        base = f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{label(order.spec)}-scaling".replace(os.sep, "-")
        try:
            runs.mkdir(parents=True, exist_ok=True)
            path = next(place for number in range(1, 1000) if not (place := runs / (base if number == 1 else f"{base}-{number}")).exists())
            path.mkdir()
            run_directory.write_json(path / run_directory.SCALING, order.to_json())
        except OSError as error:
            raise LaunchError(f"no directory can be made in {runs}: {error.strerror}. Try runs_dir= with a folder of yours") from error
        return cls(path=path, order=order)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Folder":
        """One that is there.

        Raises:
            CurveError: it is none.
        """
        where = Path(path).expanduser().absolute()
        if not (where / run_directory.SCALING).is_file():
            raise CurveError(
                f"{where} is not the directory of a curve: it has no {run_directory.SCALING}. wb.scaling_curve(spec) makes one, "
                "and says where; runs of a sweep become a curve by ScalingCurve.from_runs(runs)"
            )
        return cls(path=where, order=Order.from_json(run_directory.read_json(where / run_directory.SCALING)))

    @classmethod
    def latest(cls, order: Order, runs_dir: str | os.PathLike[str] | None) -> "Folder | None":
        """The newest one of the same curve, if there is any."""
        found = sorted(_runs(runs_dir).glob(f"*/{run_directory.SCALING}"), reverse=True)
        folders = (cls.load(path.parent) for path in found)
        return next((folder for folder in folders if folder.order.continues(order)), None)

    def continued(self, order: Order) -> "Folder":
        """The same directory for an order with other values or repeats, of the same curve on the same machine.

        Raises:
            CurveError: it is of another curve; the message names the field. Or runs of it were made elsewhere.
        """
        if not order.continues(self.order):
            raise CurveError(f"{self.path} cannot be gone on with: {_difference(self.order, order)}. Leave resume out for a new curve")
        for run in self.runs():
            info = run_directory.read_json(run.path / run_directory.RUN_JSON)
            for what, there, here in (
                ("on", info.get("host"), platform.node()),
                ("with torch", info.get("versions", {}).get("torch"), versions().get("torch")),
            ):
                if there != here:
                    raise CurveError(f"{self.path} has runs made {what} {there}, and this is {here}: points of both would be no curve")
        run_directory.write_json(self.path / run_directory.SCALING, order.to_json())
        return Folder(path=self.path, order=order)

    def runs(self) -> list[Run]:
        """All trainings that have ended, of points that are wanted; those that were stopped or lost tell nothing, and are left out."""
        wanted = [spec for _, spec in self.order.points]
        found = [run for run in self._all() if run.spec in wanted and run.state in ("finished", "failed")]
        return sorted(found, key=lambda run: run.created)

    def _all(self) -> Iterator[Run]:
        for path in [*self.path.glob(f"*/{run_directory.RUN_JSON}"), *self.path.glob(f"*/[0-9][0-9][0-9]/{run_directory.RUN_JSON}")]:
            if list(path.parent.glob(f"000/{run_directory.RUN_JSON}")) or "experiment" in run_directory.read_json(path):
                continue  # a launch that several share, or no training
            yield Run.load(path.parent)

    def steps(self) -> list[Steps]:
        """What is known of steps with and without communication, of points that are wanted."""
        wanted = [spec for _, spec in self.order.points]
        found = []
        for path in sorted(self.path.glob(f"*/{run_directory.COMMUNICATION}")):
            found += [Steps.from_json(one) for one in run_directory.read_json(path)["steps"]]
        return [steps for steps in found if steps.spec in wanted]

    def curve(self, notes: tuple[str, ...] = ()) -> ScalingCurve:
        """What is known so far. Of a point that failed and was measured later, the failure is forgotten.

        Raises:
            CurveError: nothing yet.
        """
        runs = self.runs()
        good = [run.spec for run in runs if run.ok]
        kept = [run for run in runs if run.ok or run.spec not in good]
        if not kept:
            raise CurveError(f"{self.path} has no run that has ended: wb.scaling_curve(spec, …, resume={str(self.path)!r}) goes on with it")
        known = {shown_value(getattr(run.spec, self.order.over)) for run in kept}
        shares = {shown_value(value): share for value, share in exposed(self.steps(), self.order.over).items()}
        shares = {value: share for value, share in shares.items() if value in known}
        missing = len(self.order.points) - len(known)
        left = (f"{missing} of {len(self.order.points)} points are not measured yet",) if missing else ()
        curve = ScalingCurve.from_runs(kept, over=self.order.over, exposed=shares, notes=(*notes, *left))
        return replace(curve, kind="strong" if self.order.kind == "strong" else "weak")  # which one point alone does not show


def _runs(runs_dir: str | os.PathLike[str] | None) -> Path:
    return Path(runs_dir or "runs").expanduser().absolute()


def _difference(old: Order, new: Order) -> str:
    for name in ("over", "kind"):
        here, there = getattr(old, name), getattr(new, name)
        if here != there:
            return f"it is a curve with {name}={here!r}, and {name}={there!r} is wanted"
    changed: dict[str, Any] = {name: pair for name, pair in old.spec.changes(new.spec).items() if name != old.over}
    name, (here, there) = next(iter(changed.items()))
    return f"its {name} is {here!r}, and {there!r} is wanted"
