"""CurveSpec: what a scaling curve measures, validated before anything starts. CurveDirectory: the directory that keeps its runs."""

import os
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.core.checks import whole_number
from workbench.core.codec import JsonDataclass
from workbench.core.statistics import interval_of
from workbench.runs.launch.environment import versions
from workbench.runs.launch.launch import label
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.run import Run
from workbench.runs.spec import AUTO, SHARDED, RunSpec, SpecError, check_names
from workbench.runs.target import read_spec
from workbench.scaling.analysis.curve.curve import KINDS, ScalingCurve, shown_value
from workbench.scaling.analysis.curve.point import PROCESSES, CurveError


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveSpec(JsonDataclass):
    """A curve to be measured."""

    spec: RunSpec
    """What all points have in common."""
    over: str
    """The knob that is turned."""
    values: tuple[Any, ...]
    """What it is turned to."""
    kind: str
    """ "weak" or "strong"."""
    repeat: int
    """How often each point is measured."""
    communication: bool
    """Measure exposed communication as well."""

    @property
    def points(self) -> list[tuple[str, RunSpec]]:
        """Each point as text, with its spec.

        >>> spec = RunSpec(task="text-gpt", micro_batch=8)
        >>> curve_spec = CurveSpec(spec=spec, over="nproc_per_node", values=(1, 2), kind="strong", repeat=1, communication=False)
        >>> [(words, each.micro_batch, each.global_batch) for words, each in curve_spec.points]
        [('nproc_per_node=1', 8, 8), ('nproc_per_node=2', 4, 8)]
        """
        return [(f"{self.over}={value}", point_of(self.spec, self.over, value, self.kind)) for value in self.values]

    @property
    def why_no_communication(self) -> str:
        """Why exposed communication cannot be measured here; "" if it can."""
        if self.spec.parallel in SHARDED or (self.over == "parallel" and set(self.values) & set(SHARDED)):
            return f"exposed communication is not measured under {', '.join(SHARDED)}: no rank can compute without the others' weights"
        if any(spec.tensor_parallel > 1 for _, spec in self.points):
            return "exposed communication is not measured with tensor_parallel: no rank can compute without the others"
        if any(spec.pipeline_parallel > 1 for _, spec in self.points):
            return "exposed communication is not measured with pipeline_parallel: no stage can compute without the others"
        if any(spec.expert_parallel > 1 for _, spec in self.points):
            return "exposed communication is not measured with expert_parallel: no rank can compute without the others' experts"
        if any(spec.local_sgd != "none" for _, spec in self.points):
            return "exposed communication is not measured with local_sgd: a step that averages parameters takes longer than the others"
        return ""

    def continues(self, other: "CurveSpec") -> bool:
        """Do the points of both belong to one curve?"""
        return (self.spec.replace(**{self.over: getattr(other.spec, self.over)}), self.over, self.kind) == (
            other.spec,
            other.over,
            other.kind,
        )


def validate(spec: Any, *, over: str, values: Sequence[Any], kind: str, repeat: int, communication: bool) -> CurveSpec:
    """The curve that the arguments of `scaling_curve` describe, checked.

    Raises:
        SpecError: no RunSpec, no such knob, or a value it does not take.
        CurveError: values that make no curve.
    """
    spec = read_spec(
        "scaling_curve",
        spec,
        because="whose knobs can be turned, or the directory of a curve, to read it",
        instead="for a script: ScalingCurve.from_runs([launch(script, nproc_per_node=n, watch=True).wait() for n in (1, 2)])",
        error=SpecError,
    )
    check_names(RunSpec, {over: None})
    if kind not in KINDS:
        raise CurveError(f"kind={kind!r}: allowed are " + " and ".join(f'"{name}" ({what})' for name, what in KINDS.items()))
    if kind == "strong" and over != PROCESSES:
        raise CurveError(f'kind="strong" over {over}: it is processes that share a batch; leave kind out, or over')
    if isinstance(values, str | bytes) or not isinstance(values, Sequence) or not values:
        raise CurveError(f"values={values!r}: give a list of values for {over}, such as (1, 2, 4)")
    if any(value in values[:place] for place, value in enumerate(values)):
        raise CurveError(f"values={list(values)!r} has one twice: to measure each point several times there is repeat=3")
    whole_number("repeat", repeat, least=1, also="; with 1 no point has an interval", error=CurveError)
    if spec.micro_batch == AUTO and over != "micro_batch":
        raise CurveError(
            'micro_batch="auto" may be another number at each point: give one, such as wb.max_micro_batch(spec, device).micro_batch'
        )
    curve_spec = CurveSpec(spec=spec, over=over, values=tuple(values), kind=kind, repeat=repeat, communication=bool(communication))
    assert curve_spec.points  # raises where a value is not possible
    return curve_spec


def point_of(spec: RunSpec, over: str, value: Any, kind: str) -> RunSpec:
    """The spec of one point. In strong scaling the micro-batch is divided, so that the global batch stays.

    Raises:
        SpecError: the knob does not take the value.
        CurveError: the global batch cannot be divided so.
    """
    try:
        if kind != "strong":
            return spec.replace(**{over: value})
        alone = spec.replace(nproc_per_node=value, micro_batch=1)
    except SpecError as error:
        raise SpecError(f"{error} (at {over}={value!r})") from error
    whole = spec.global_batch
    if whole % alone.global_batch:
        good = [
            n
            for n in range(1, 2 * max(value, 4) + 1)
            if n % (ways := spec.tensor_parallel * spec.pipeline_parallel) == n % spec.expert_parallel == 0
            and whole % (spec.accumulation * n // ways) == 0
        ]
        raise CurveError(
            f"{value} processes cannot share a global batch of {whole} evenly ({_said(spec, alone)}): numbers that divide it are "
            f"{', '.join(map(str, good))}; or choose another micro_batch, such as {-(-whole // alone.global_batch) * alone.global_batch}"
        )
    return alone.replace(micro_batch=whole // alone.global_batch)


def _said(spec: RunSpec, alone: RunSpec) -> str:
    times = f" × accumulation {spec.accumulation}" if spec.accumulation > 1 else ""
    return f"{alone.data_ranks} data ranks{times}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps(JsonDataclass):
    """Steps of one spec with and without the reduction of gradients, interleaved."""

    spec: RunSpec
    pairs: tuple[tuple[float, float], ...]
    """Seconds per step of neighbouring blocks: (with, without)."""

    @property
    def whole(self) -> float:
        """Seconds of a step as it is: the median of its blocks."""
        return statistics.median(whole for whole, _ in self.pairs)

    @property
    def saved(self) -> float:
        """Seconds that it is shorter without the reduction."""
        return interval_of(self.pairs, lambda whole, other: 1 - other / whole).mid * self.whole


def exposed(measured: Iterable[Steps], over: str) -> dict[Any, float]:
    """Share of the step that is exposed communication, by the knob's value.

    With one process nothing is sent, and yet DDP copies each gradient into its bucket. Where one process was measured, what that costs is
    subtracted from the others: it is no communication.

    >>> spec = RunSpec(task="text-gpt")
    >>> steps = [Steps(spec=spec.replace(nproc_per_node=n), pairs=((s, w),)) for n, s, w in ((1, 1.0, 0.9), (2, 2.0, 1.4))]
    >>> {n: round(share, 2) for n, share in exposed(steps, "nproc_per_node").items()}
    {1: 0.0, 2: 0.25}
    """
    known = list(measured)
    alone = [steps.saved for steps in known if steps.spec.nproc_per_node == 1] if over == "nproc_per_node" else []
    copied = max(0.0, statistics.median(alone)) if alone else 0.0
    return {
        getattr(steps.spec, over): 0.0 if steps.spec.nproc_per_node == 1 else min(0.99, max(0.0, (steps.saved - copied) / steps.whole))
        for steps in known
    }


def in_launches(specs: Sequence[RunSpec]) -> list[list[RunSpec]]:
    """Groups of specs that one launch can measure in turn: what is fixed when the processes start is the same.

    That includes the number of processes: a model that communicates by itself (SyncBatchNorm, say) does so with all of them.
    """
    groups: dict[Any, list[RunSpec]] = {}
    for spec in specs:
        groups.setdefault((spec.task, spec.nproc_per_node, spec.device, spec.backend, spec.threads), []).append(spec)
    return list(groups.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveDirectory:
    """The directory of a curve: its runs, and the CurveSpec that says which are still missing."""

    path: Path
    curve_spec: CurveSpec

    @classmethod
    def new(cls, curve_spec: CurveSpec, runs_dir: str | os.PathLike[str] | None) -> "CurveDirectory":
        """Make an empty directory.

        Raises:
            LaunchError: there is no place to write to.
        """
        runs = _runs(runs_dir)
        base = f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{label(curve_spec.spec)}-scaling".replace(os.sep, "-")
        try:
            runs.mkdir(parents=True, exist_ok=True)
            path = next(place for number in range(1, 1000) if not (place := runs / (base if number == 1 else f"{base}-{number}")).exists())
            path.mkdir()
            run_directory.write_json(path / run_directory.SCALING, curve_spec.to_json())
        except OSError as error:
            raise LaunchError(f"no directory can be made in {runs}: {error.strerror}. Try runs_dir= with a folder of yours") from error
        return cls(path=path, curve_spec=curve_spec)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "CurveDirectory":
        """Open the directory of a curve.

        Raises:
            CurveError: it is not the directory of a curve.
        """
        where = Path(path).expanduser().absolute()
        if not (where / run_directory.SCALING).is_file():
            raise CurveError(
                f"{where} is not the directory of a curve: it has no {run_directory.SCALING}. wb.scaling_curve(spec) makes one, "
                "and says where; runs of a sweep become a curve by ScalingCurve.from_runs(runs)"
            )
        return cls(path=where, curve_spec=CurveSpec.from_json(run_directory.read_json(where / run_directory.SCALING)))

    @classmethod
    def latest(cls, curve_spec: CurveSpec, runs_dir: str | os.PathLike[str] | None) -> "CurveDirectory | None":
        """The newest directory of the same curve; None if there is none."""
        paths = sorted(_runs(runs_dir).glob(f"*/{run_directory.SCALING}"), reverse=True)
        directories = (cls.load(path.parent) for path in paths)
        return next((directory for directory in directories if directory.curve_spec.continues(curve_spec)), None)

    def continued(self, curve_spec: CurveSpec) -> "CurveDirectory":
        """The same directory with other values or repeats, of the same curve on the same machine.

        Raises:
            CurveError: it is of another curve; the message names the field. Or runs of it were made elsewhere.
        """
        if not curve_spec.continues(self.curve_spec):
            raise CurveError(
                f"{self.path} cannot be continued: {_difference(self.curve_spec, curve_spec)}. Leave resume out for a new curve"
            )
        for run in self.runs():
            info = run_directory.read_json(run.path / run_directory.RUN_JSON)
            for what, there, here in (
                ("on", info.get("host"), platform.node()),
                ("with torch", info.get("versions", {}).get("torch"), versions().get("torch")),
            ):
                if there != here:
                    raise CurveError(f"{self.path} has runs made {what} {there}, and this is {here}: points of both would be no curve")
        run_directory.write_json(self.path / run_directory.SCALING, curve_spec.to_json())
        return CurveDirectory(path=self.path, curve_spec=curve_spec)

    def runs(self) -> list[Run]:
        """All trainings of the curve's points that have ended; those that were stopped or lost are left out."""
        wanted = [spec for _, spec in self.curve_spec.points]
        runs = [run for run in self._all() if run.spec in wanted and run.state in ("finished", "failed")]
        return sorted(runs, key=lambda run: run.created)

    def _all(self) -> Iterator[Run]:
        for path in [*self.path.glob(f"*/{run_directory.RUN_JSON}"), *self.path.glob(f"*/[0-9][0-9][0-9]/{run_directory.RUN_JSON}")]:
            if list(path.parent.glob(f"000/{run_directory.RUN_JSON}")) or "experiment" in run_directory.read_json(path):
                continue  # a launch that several share, or no training
            yield Run.load(path.parent)

    def steps(self) -> list[Steps]:
        """Steps with and without communication of the curve's points, as far as they were measured."""
        wanted = [spec for _, spec in self.curve_spec.points]
        paths = sorted(self.path.glob(f"*/{run_directory.COMMUNICATION}"))
        measured = [Steps.from_json(steps) for path in paths for steps in run_directory.read_json(path)["steps"]]
        return [steps for steps in measured if steps.spec in wanted]

    def curve(self, notes: tuple[str, ...] = ()) -> ScalingCurve:
        """The curve so far. If a point failed and was measured later, the failure is left out.

        Raises:
            CurveError: no run has ended yet.
        """
        runs = self.runs()
        good = [run.spec for run in runs if run.ok]
        kept = [run for run in runs if run.ok or run.spec not in good]
        if not kept:
            raise CurveError(f"{self.path} has no run that has ended: wb.scaling_curve(spec, …, resume={str(self.path)!r}) goes on with it")
        known = {shown_value(getattr(run.spec, self.curve_spec.over)) for run in kept}
        shares = {shown_value(value): share for value, share in exposed(self.steps(), self.curve_spec.over).items()}
        shares = {value: share for value, share in shares.items() if value in known}
        missing = len(self.curve_spec.points) - len(known)
        left = (f"{missing} of {len(self.curve_spec.points)} points are not measured yet",) if missing else ()
        curve = ScalingCurve.from_runs(kept, over=self.curve_spec.over, exposed=shares, notes=(*notes, *left))
        return replace(curve, kind="strong" if self.curve_spec.kind == "strong" else "weak")  # which one point alone does not show


def _runs(runs_dir: str | os.PathLike[str] | None) -> Path:
    return Path(runs_dir or "runs").expanduser().absolute()


def _difference(old: CurveSpec, new: CurveSpec) -> str:
    for name in ("over", "kind"):
        here, there = getattr(old, name), getattr(new, name)
        if here != there:
            return f"it is a curve with {name}={here!r}, not {name}={there!r}"
    changed: dict[str, Any] = {name: pair for name, pair in old.spec.changes(new.spec).items() if name != old.over}
    name, (here, there) = next(iter(changed.items()))
    return f"its {name} is {here!r}, not {there!r}"
