"""Order: what a curve is to measure, checked before anything is started, and the spec of each of its points."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core.checks import whole_number
from workbench.core.codec import JsonDataclass
from workbench.runs.spec import AUTO, SHARDED, RunSpec, SpecError, check_names
from workbench.runs.target import check_spec
from workbench.scaling.analysis.curve.curve import KINDS
from workbench.scaling.analysis.curve.point import PROCESSES, CurveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(JsonDataclass):
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
        """Each point in words, and its spec.

        >>> spec = RunSpec(task="text-gpt", micro_batch=8)
        >>> order = Order(spec=spec, over="nproc_per_node", values=(1, 2), kind="strong", repeat=1, communication=False)
        >>> [(words, each.micro_batch, each.global_batch) for words, each in order.points]
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
        return ""

    def continues(self, other: "Order") -> bool:
        """Are the points of both on one curve?"""
        return (self.spec.replace(**{self.over: getattr(other.spec, self.over)}), self.over, self.kind) == (
            other.spec,
            other.over,
            other.kind,
        )


def ordered(spec: Any, *, over: str, values: Sequence[Any], kind: str, repeat: int, communication: bool) -> Order:
    """What was asked for, checked.

    Raises:
        SpecError: no RunSpec, no such knob, or a value it does not take.
        CurveError: values that make no curve.
    """
    check_spec(
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
        raise CurveError(f"values={values!r}: a list of what {over} is turned to is wanted, such as (1, 2, 4)")
    if any(value in values[:place] for place, value in enumerate(values)):
        raise CurveError(f"values={list(values)!r} has one twice: to measure each point several times there is repeat=3")
    whole_number("repeat", repeat, least=1, also="; with 1 no point has an interval", error=CurveError)
    if spec.micro_batch == AUTO and over != "micro_batch":
        raise CurveError(
            'micro_batch="auto" may be another number at each point: give one, such as wb.max_micro_batch(spec, device).micro_batch'
        )
    order = Order(spec=spec, over=over, values=tuple(values), kind=kind, repeat=repeat, communication=bool(communication))
    for _ in order.points:  # refuses what no point can be
        pass
    return order


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
        good = [n for n in range(1, 2 * max(value, 4) + 1) if n % spec.tensor_parallel == 0 and whole % _parts(spec, n) == 0]
        raise CurveError(
            f"{value} processes cannot share a global batch of {whole} evenly ({_said(spec, alone)}): numbers that divide it are "
            f"{', '.join(map(str, good))}; or choose another micro_batch, such as {-(-whole // alone.global_batch) * alone.global_batch}"
        )
    return alone.replace(micro_batch=whole // alone.global_batch)


def _parts(spec: RunSpec, processes: int) -> int:
    return spec.accumulation * (processes // spec.tensor_parallel)


def _said(spec: RunSpec, alone: RunSpec) -> str:
    times = f" × accumulation {spec.accumulation}" if spec.accumulation > 1 else ""
    return f"{alone.data_ranks} data ranks{times}"
