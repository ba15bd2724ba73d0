"""Folder: the directory of a curve. It holds the order and the runs, so that a curve can be read, and gone on with, at any time."""

import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench import rundir
from workbench.growing.order import Order
from workbench.growing.sharing import Steps, exposed
from workbench.launcher.environment import versions
from workbench.launcher.launching import label
from workbench.launcher.start import LaunchError
from workbench.run import Run
from workbench.scaling.curve import ScalingCurve
from workbench.scaling.point import CurveError
from workbench.scaling.reading import shown_value


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
            rundir.write_json(path / rundir.SCALING, order.to_json())
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
        if not (where / rundir.SCALING).is_file():
            raise CurveError(
                f"{where} is not the directory of a curve: it has no {rundir.SCALING}. wb.scaling_curve(spec) makes one, and says where; "
                "runs of a sweep become a curve by ScalingCurve.from_runs(runs)"
            )
        return cls(path=where, order=Order.from_json(rundir.read_json(where / rundir.SCALING)))

    @classmethod
    def latest(cls, order: Order, runs_dir: str | os.PathLike[str] | None) -> "Folder | None":
        """The newest one of the same curve, if there is any."""
        found = sorted(_runs(runs_dir).glob(f"*/{rundir.SCALING}"), reverse=True)
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
            info = rundir.read_json(run.path / rundir.RUN_JSON)
            for what, there, here in (
                ("on", info.get("host"), platform.node()),
                ("with torch", info.get("versions", {}).get("torch"), versions().get("torch")),
            ):
                if there != here:
                    raise CurveError(f"{self.path} has runs made {what} {there}, and this is {here}: points of both would be no curve")
        rundir.write_json(self.path / rundir.SCALING, order.to_json())
        return Folder(path=self.path, order=order)

    def runs(self) -> list[Run]:
        """All trainings that have ended, of points that are wanted; those that were stopped or lost tell nothing, and are left out."""
        wanted = [spec for _, spec in self.order.points]
        found = [run for run in self._all() if run.spec in wanted and run.state in ("finished", "failed")]
        return sorted(found, key=lambda run: run.created)

    def _all(self) -> Iterator[Run]:
        for path in [*self.path.glob(f"*/{rundir.RUN_JSON}"), *self.path.glob(f"*/[0-9][0-9][0-9]/{rundir.RUN_JSON}")]:
            if list(path.parent.glob(f"000/{rundir.RUN_JSON}")) or "experiment" in rundir.read_json(path):
                continue  # a launch that several share, or no training
            yield Run.load(path.parent)

    def steps(self) -> list[Steps]:
        """What is known of steps with and without communication, of points that are wanted."""
        wanted = [spec for _, spec in self.order.points]
        found = []
        for path in sorted(self.path.glob(f"*/{rundir.COMMUNICATION}")):
            found += [Steps.from_json(one) for one in rundir.read_json(path)["steps"]]
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
