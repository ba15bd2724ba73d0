"""The seconds of a step on hardware that is not here: rates by kind of operator, launch gaps, idle stages, exposed communication."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from workbench.cluster.analysis.operator_time import KERNEL, KINDS, SHARES, Operator
from workbench.cluster.analysis.plan.ranges import ENDS, LAUNCH, OTHER_LAUNCH, SLOWEST_LAUNCH
from workbench.core import units
from workbench.core.codec import NOT_STORED, JsonDataclass
from workbench.core.device import Device
from workbench.core.display import table as display
from workbench.core.statistics import Interval

SAME, OTHER = 0.05, 0.12
"""Half the width of a calibrated interval over its middle: for the program that was measured, and for another that spends its time on the
same kinds of operators. What differs adds to it (`StepTime.calibrate`)."""
HOST_BOUND = "the host's launches set the pace: a faster GPU does not help; larger micro-batches or compile do"
WORTH = 0.02
"""Share of the step that padding must save to be told."""
SHORTEST, CACHED = 1e-6, 3
"""No measured eager step is shorter than so many seconds for each kernel (chosen: a third of KERNEL, for CUDA graphs), or than its bytes at
so many times the memory's bandwidth, since caches answer some (chosen: caches of this size have two to three times the bandwidth)."""
SLOWEST, SLOWEST_CPU = 32, 1000
"""No measured step is longer than so many times its kernels at the datasheet's rates, with SLOWEST_LAUNCH for each launch. Chosen: kernels
for odd shapes reach a tenth, and milliseconds that are taken for seconds are a thousand times as long. The rates of CPU are round figures,
so a CPU's step may be SLOWEST_CPU times as long or short."""
FARTHEST = 0.5
"""Share of the time that may be spent on other kinds of operators than the calibrated program's; beyond it an estimate is refused."""


class EstimateTimeError(ValueError):
    """A step whose time cannot be estimated; the message says what was given, what is allowed and what to measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeCalibration(JsonDataclass):
    """What one measured step says about a device: how much longer it takes than estimated."""

    device: str
    """Name of the device."""
    factor: float
    """Measured seconds over those estimated without calibration."""
    mix: Mapping[str, float]
    """Kind of operator → its share of the computing."""
    program: str
    """What was measured."""
    seconds: float
    """That were measured."""
    flops: float
    """Of the measured step, of a rank: a program of that name and with these is the same one."""
    host: float
    """Seconds in which the host launches an operator, at most."""
    host_bound: bool = False
    """Did the host set the pace? Then nothing was learnt of the kernels."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Kind of operator → its own factor, where a trace tells kinds apart; `factor` is that of all others."""
    compiled: bool = False
    """Was the measured step compiled? Compiling fuses, so that its level is not that of eager steps."""
    wait: float = 0.0
    """Seconds of the measured step that neither kernels at the datasheet's rates nor the host explain."""

    def of(self, kind: str) -> float:
        """The factor of a kind of operator."""
        return self.factors.get(kind, self.factor)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the measured step may have waited for beside its launches."""
        if not (self.wait or (self.host_bound and self.host > SLOWEST_LAUNCH)):
            return ()
        most = f"launching takes {units.seconds(SLOWEST_LAUNCH)} an operator at most"
        waited = f"{most}: the measured step waited for something else, too, such as data"
        slow = ", or its kernels are far slower than by the datasheet. The interval of another step spans both: time it without its loader"
        return (waited + f"{slow}, or give a trace" * bool(self.wait),)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime(display.Shown, JsonDataclass):
    """The predicted seconds of an optimizer step on a device, in parts that add up; nothing was run there."""

    title: str
    """What is estimated."""
    device: Device
    operators: tuple[Operator, ...]
    """Of one rank."""
    samples: int
    """That all ranks take in a step."""
    ranks: int = 1
    exposed: Interval = field(default_factory=lambda: Interval(low=0.0, mid=0.0, high=0.0))
    """Seconds of communication that computing does not hide; with `traffic` it follows from the computing."""
    bubble: float = 0.0
    """In a pipeline, whose slowest stage sets the pace and has the operators: idle time over that of forward and backward; see
    `iteration.bubble`."""
    compiled: bool = False
    """Is the step to be compiled? Its operators are those of the eager one, and a measured compiled step sets the level."""
    traffic: Any = field(default=None, metadata=NOT_STORED, compare=False, repr=False)
    """A TrafficTime: its collectives on the cluster at the links' full bandwidth; None = `exposed` stands as it is."""
    links: Interval = field(default_factory=lambda: Interval(low=1.0, mid=1.0, high=1.0))
    """Share of the links' bandwidth that collectives reach."""
    calibration: TimeCalibration | None = None
    """The measured step that sets the level; None = shares of datasheets."""
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """Floating point operations of a rank in a step, recomputation included."""
        return sum(one.flops * one.calls for one in self.operators)

    def computing(self, end: str = "mid", *, phase: str | None = None) -> dict[str, float]:
        """Kind of operator → seconds of a rank, at an end of the interval.

        Args:
            end: "low" (fast kernels), "mid" or "high".
            phase: only of one phase.
        """
        share_end = {"low": "high", "mid": "mid", "high": "low"}[end]
        found = dict.fromkeys(KINDS, 0.0)
        for one in self.operators:
            if phase in (None, one.phase):
                found[one.kind] += self._factor(one.kind) * one.seconds(self.device, getattr(SHARES[one.kind], share_end))
        return {kind: seconds for kind, seconds in found.items() if seconds}

    def _factor(self, kind: str) -> float:
        return self.calibration.of(kind) if self.calibration else 1.0

    def hidden_behind(self, end: str, seconds: float) -> float:
        """Seconds of communication that a step exposes whose operators take so long, launch gaps included.

        Args:
            end: of the links: "low" is the fastest.
            seconds: of forward, backward and update; each takes its part of it.
        """
        if self.traffic is None:
            return float(getattr(self.exposed, end))
        share = getattr(self.links, {"low": "high", "mid": "mid", "high": "low"}[end])
        taken = {phase: seconds * self._share(phase) for phase in ("forward", "backward")}
        return float(replace(self.traffic, each=tuple(each / share for each in self.traffic.each)).exposed(**taken))

    def _share(self, phase: str) -> float:
        """Share of a phase in the computing."""
        whole = sum(self.computing().values())
        return sum(self.computing(phase=phase).values()) / whole if whole else 0.0

    def idle(self, end: str = "mid") -> float:
        """Seconds in which the slowest stage of a pipeline waits for the others: they grow with its forward and backward."""
        return self._idle_share * (sum(self.computing(end).values()) + self.gaps(end))

    @property
    def _idle_share(self) -> float:
        """Idle time over that of the operators, launch gaps included: there is none in the optimizer's update."""
        return self.bubble * (self._share("forward") + self._share("backward")) if self.bubble else 0.0

    def with_exposed(self) -> "StepTime":
        """The same with the communication that its computing, at its calibration, does not hide."""
        if self.traffic is None:
            return self
        of = {end: "mid" if self.calibration else end for end in ENDS}
        low, mid, high = sorted(self.hidden_behind(end, sum(self.computing(of[end]).values()) + self.gaps(of[end])) for end in ENDS)
        return replace(self, exposed=Interval(low=low, mid=mid, high=high))

    @property
    def _is_measured(self) -> bool:
        """Is this the program that was measured?"""
        return bool((c := self.calibration) and c.program == self.title and math.isclose(c.flops, self.flops, rel_tol=1e-6))

    def gaps(self, end: str = "mid") -> float:
        """Seconds in which the device waits for the host: what launching all operators takes longer than running them."""
        if self.device.name == CPU.name:
            return 0.0  # there an operator is launched where it runs: calibration includes it
        known = self.calibration
        launch = known.host if known else float(getattr(LAUNCH, end))
        if known and known.host_bound and not self._is_measured:
            launch *= OTHER_LAUNCH[end]
        return max(0.0, sum(one.calls for one in self.operators) * launch - sum(self.computing(end).values()))

    @property
    def parts(self) -> dict[str, float]:
        """Part → seconds, in the middle; they add up to the step."""
        idle = {"pipeline idle": self.idle()} if self.bubble else {}
        return {**self.computing(), "launch gaps": self.gaps(), **idle, "exposed communication": self.exposed.mid}

    @property
    def mix(self) -> dict[str, float]:
        """Kind of operator → its share of the computing."""
        parts = self.computing()
        return {kind: seconds / sum(parts.values()) for kind, seconds in parts.items()}

    @property
    def seconds(self) -> Interval:
        """Of an optimizer step."""
        low, mid, high = (sum(self.computing(end).values()) + self.gaps(end) + self.idle(end) + getattr(self.exposed, end) for end in ENDS)
        known = self.calibration
        if known is None or (known.host_bound and not self._is_measured):
            return Interval(low=low, mid=mid, high=high)
        width = SAME if self._is_measured else OTHER + distance(self.mix, known.mix)
        ends = [mid / (1 + width), mid * (1 + width)]
        if known.wait and not self._is_measured:  # perhaps it waits as long, however large the batch
            usual = replace(self, calibration=replace(known, factor=1.0, wait=0.0)).with_exposed().seconds
            ends += [usual.low + known.wait, usual.high + known.wait]
        return Interval(low=min(ends), mid=mid, high=max(ends))

    @property
    def samples_per_sec(self) -> Interval:
        """Of all ranks."""
        return self.seconds.of(lambda seconds: self.samples / seconds)

    @property
    def mfu(self) -> Interval:
        """FLOPs of a rank over its dense peak, in the format of most of them; with recomputation it is the hardware's utilization."""
        return self.seconds.of(lambda seconds: self.flops / seconds / self.peak)

    @property
    def peak(self) -> float:
        """Dense FLOP/s of the device in the number format of most operations."""
        by_format: dict[str, float] = {}
        for one in self.operators:
            by_format[one.dtype] = by_format.get(one.dtype, 0.0) + one.flops * one.calls
        most = max(by_format, key=lambda name: by_format[name])
        peaks = self.device.flops_per_sec
        return peaks.get(most) or peaks.get("fp32") or max(peaks.values())

    def calibrate(self, measured: Any) -> "StepTime":
        """The same step at the level of a measured one; its `calibration` sets that of other programs on this device.

        A trace that tells its operators apart sets a level for each kind of them, anything else one for all.

        Args:
            measured: seconds of an optimizer step of this very program on this device; or a Run, or a Trace, of it; or the traces of
                several ranks: a TraceSet, another mapping from rank to Trace, or a list of traces. Of these, the one counts whose
                operators take longest, for whom the others wait.

        Raises:
            EstimateTimeError: not a number above 0, something else among traces, shorter or longer than a step can be (`possible`), or
                the run of a compiled step where this one is eager, or the other way round.
        """
        measured = _slowest(measured)
        seconds = measured_seconds(measured)
        compiled = getattr(getattr(measured, "spec", None), "compile", None)
        if compiled is not None and (compiled != "none") != self.compiled:
            raise _other_level(self, compiled != "none", "measured=")
        bare = replace(self, calibration=None)
        reached = self.flops / seconds / self.peak
        if reached > 1 and self.device.name != CPU.name:
            raise EstimateTimeError(
                f"measured={units.seconds(seconds)} for {units.count(self.flops, 'FLOP')} would be {units.percent(reached)} of the dense "
                f"peak of {self.device.name}, {units.count(self.peak, 'FLOP/s')}: no device exceeds its peak. Usual reasons: the clock was "
                "read before the device had finished (torch.cuda.synchronize), the step is one micro-batch or one rank of what is "
                "estimated, the precision is another, or samples are counted twice. Try the median of some synchronised steps of it"
            )
        left = bare._without_exposed(seconds)
        if left <= 0:
            alone = units.seconds(bare.hidden_behind("mid", 0.0))
            raise EstimateTimeError(
                f"measured={units.seconds(seconds)}: the communication alone is predicted to take {alone}; "
                "measure one rank, or the links (wb.measure_collectives)"
            )
        (low, high), calls = bare.possible, sum(one.calls for one in self.operators)
        if not low <= seconds <= high:
            way = (
                "Usual reasons: the clock was read before the device had finished (torch.cuda.synchronize), or the step is a part of it"
                if seconds < low
                else "Is it seconds, not milliseconds; one step, not an epoch; without the wait for data, and without the first step?"
            )
            raise EstimateTimeError(
                f"measured={units.seconds(seconds)}: a step of {self.title} on {self.device.name} may take {units.seconds(low)} … "
                f"{units.seconds(high)}, with its {calls:,.0f} operators. {way}"
            )
        level = sum((parts := bare.computing()).values())
        told = _told_apart(parts, measured_kinds(measured))
        no_kernel = sum(bare.computing("high").values()) < left and self.device.name != CPU.name and not told
        host_bound = not told and left >= level and (bare.gaps() > 0 or (no_kernel and left <= SLOWEST_LAUNCH * calls))
        factor, waits = 1.0 if host_bound else left / level, host_bound
        if told:
            factor = sum(told[kind] * parts[kind] for kind in told) / sum(parts[kind] for kind in told)
            kernels = sum(told.get(kind, factor) * own for kind, own in parts.items())
            waits = kernels < left and self.device.name != CPU.name
            if not waits:  # a CPU's host is the device; elsewhere some ran at once
                told = {kind: own * left / kernels for kind, own in told.items()}
                factor *= left / kernels
        known = TimeCalibration(
            device=self.device.name,
            factor=factor,
            mix=bare.mix,
            program=self.title,
            seconds=seconds,
            flops=self.flops,
            host=left / calls if waits else min(left / calls, LAUNCH.mid),
            host_bound=host_bound,
            factors=told,
            compiled=self.compiled,
            wait=left - level if no_kernel and not host_bound else 0.0,
        )
        return checked_calibration(self, known)

    @property
    def possible(self) -> tuple[float, float]:
        """The shortest and the longest seconds that a measured step of it can be; see SHORTEST and SLOWEST.

        A compiled step fuses kernels, so of its shortest only the FLOPs are known.
        """
        bandwidth, peaks = self.device.bandwidth, self.device.flops_per_sec
        rest = peaks.get("fp32") or max(peaks.values())
        each = (one.calls * max(one.flops / peaks.get(one.dtype, rest), one.bytes / bandwidth) for one in self.operators)
        kernels = sum(one.calls for one in self.operators if one.flops or one.bytes)
        full = sum(each) + kernels * KERNEL
        if self.device.name == CPU.name:
            return full / SLOWEST_CPU, full * SLOWEST_CPU
        moved = sum(one.bytes * one.calls for one in self.operators)
        low = 0.0 if self.compiled else max(moved / (CACHED * bandwidth), kernels * SHORTEST)
        launched = sum(one.calls for one in self.operators) * SLOWEST_LAUNCH
        return low, (SLOWEST * full + launched) * (1 + self._idle_share) + SLOWEST * self.exposed.high

    def _without_exposed(self, seconds: float) -> float:
        """What of a measured step is neither exposed communication, nor a pipeline's idling: the longer it is, the more it hides."""
        times = 1 + self._idle_share
        if self.traffic is None:
            return (seconds - self.exposed.mid) / times
        low, high = 0.0, seconds
        if self.hidden_behind("mid", 0.0) >= seconds:
            return 0.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if times * middle + self.hidden_behind("mid", middle) <= seconds else (low, middle)
        return low

    @property
    def alignment(self) -> str | None:
        """What matrix products cost whose sizes do not suit tensor cores, in a sentence; None = less than 2 % of the step."""
        odd = [one for one in self.operators if one.stride]
        padded = replace(self, operators=tuple(replace(one, stride=0) for one in self.operators))
        saved, whole = self.seconds.mid - padded.seconds.mid, self.seconds.mid
        if saved < WORTH * whole:
            return None
        worst = max(odd, key=lambda one: one.calls * one.flops).stride
        return (
            f"{sum(one.calls for one in odd):,.0f} matrix products have a side that is not a multiple of 8 (such as {worst:,}), but tensor "
            f"cores need multiples of 8 to run fast: padded to {-(-worst // 64) * 64:,}, the step would take about "
            f"{units.seconds(saved)} less"
        )

    @property
    def word(self) -> str:
        """The step in one sentence."""
        low, mid, high = (units.seconds(getattr(self.seconds, end)) for end in ENDS)
        text = f"{mid} a step ({low} … {high}), {units.rate(self.samples_per_sec.mid)}"
        if self.device.name != CPU.name:
            text += f", {units.percent(self.mfu.mid)} of the peak of {units.count(self.peak, 'FLOP/s')}"
        return f"{text}; predicted, " + (f"calibrated on {self.calibration.program}" if self.calibration else "shares of datasheets")

    @property
    def table(self) -> display.Table:
        """A row per part: seconds, share of the step, calls, FLOPs and bytes."""
        whole = self.seconds.mid
        rows = []
        for name, seconds in sorted(self.parts.items(), key=lambda item: -item[1]):
            own = [one for one in self.operators if one.kind == name]
            sums = (sum(one.flops * one.calls for one in own), sum(one.bytes * one.calls for one in own))
            counted = (
                [f"{sum(one.calls for one in own):,.0f}", units.count(sums[0], "FLOP"), units.bytes_(sums[1])]
                if own
                else [units.MISSING] * 3
            )
            rows.append([KINDS.get(name, name), units.seconds(seconds), units.percent(seconds / whole), *counted])
        return display.Table(
            columns=("part", "predicted", "share", "calls", "FLOPs", "moved"),
            rows=rows,
            title=f"{self.title} on {self.ranks} × {self.device.name}: predicted",
            note="\n".join([self.word, *([HOST_BOUND] if self.gaps() else []), *filter(None, [self.alignment]), *self.notes]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per operator and size: seconds at the middle."""
        return display.frame(
            {"kind": one.kind, **asdict(one), "seconds": self._factor(one.kind) * one.seconds(self.device, SHARES[one.kind].mid)}
            for one in self.operators
        )

    plot = display.plot_method("estimated_time")

    def __repr__(self) -> str:
        return f"StepTime({self.title!r} on {self.ranks} × {self.device.name}: {units.seconds(self.seconds.mid)})"


CPU = Device(
    name="cpu",
    memory=2**40,
    bandwidth=1e10,
    flops_per_sec={"fp32": 5e10, "bf16": 5e10, "fp16": 5e10},
    source="round figures of a core, whose level a measured step sets",
)
"""Stands for a CPU, which has no datasheet of this kind."""


def distance(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Share of the time that two programs spend on different kinds of operators.

    >>> distance({"products": 1.0}, {"products": 0.75, "memory": 0.25})
    0.25
    """
    return 0.5 * sum(abs(one.get(kind, 0.0) - other.get(kind, 0.0)) for kind in {*one, *other})


def measured_seconds(measured: Any) -> float:
    """Seconds of a step: a number; the median step of a Run's first rank; the mean step of a Trace.

    Raises:
        EstimateTimeError: something else, or not above 0.
    """
    value = measured
    if hasattr(measured, "timelines"):  # a Run
        lines = measured.timelines
        if not lines:
            raise EstimateTimeError(
                f"measured={measured!r:.80}: it has no timeline, so its steps have no times; expected a finished run of a RunSpec"
            )
        value = lines[0].median()
    elif hasattr(measured, "windows"):  # a Trace
        value = measured.seconds / max(1, len(measured.steps))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise EstimateTimeError(f"measured={measured!r:.80}: expected seconds of a step above 0, a Run, or a Trace")
    return float(value)


def _slowest(measured: Any) -> Any:
    """Of the traces of several ranks, that of the rank whose operators take longest; anything else as it is."""
    if not isinstance(measured, Mapping | list | tuple):
        return measured
    traces = dict(measured) if isinstance(measured, Mapping) else dict(enumerate(measured))
    if not traces:
        raise EstimateTimeError("measured= has no traces: give the trace of at least one rank, or seconds of a step")
    for rank, trace in traces.items():
        if not hasattr(trace, "windows"):
            raise EstimateTimeError(
                f"measured={{{rank!r}: {trace!r:.80}}} is not a Trace. For several ranks give one trace each, as wb.trace or "
                "wb.TraceSet.load return them: {rank: trace}, or a list. Seconds or a Run are given by themselves"
            )
    return max(traces.values(), key=lambda trace: sum(measured_kinds(trace).values()))


def measured_kinds(measured: Any) -> dict[str, float]:
    """Kind of operator → seconds of it in a step of a Trace: of the device where it has one, else of the host; nothing of anything else.

    The optimizer's update is part of "memory", since names do not tell one from the other.
    """
    if not hasattr(measured, "windows"):
        return {}
    from workbench.traces.analysis.kernels import could_use_tensor_cores
    from workbench.traces.analysis.operators import ops

    rows = ops(measured.columns, measured.kinds, "operator", False, measured.host_steps).rows
    on_device = any(row.device_seconds for row in rows)
    found: dict[str, float] = {}
    for row in rows:
        space, _, name = row.name.partition("::")
        if name and space not in ("c10d", "_c10d_functional", "autograd") and row.name != "record_param_comms":
            own = row.device_seconds if on_device else row.self_seconds
            product = "products" if could_use_tensor_cores(row.name) else "memory"
            kind = "attention" if "attention" in name else "convolutions" if "conv" in name else product
            found[kind] = found.get(kind, 0.0) + own / max(1, len(measured.steps))
    return {kind: seconds for kind, seconds in found.items() if seconds}


def _told_apart(parts: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Kind → measured over estimated seconds, where both have at least two kinds; else nothing."""
    rest = parts.get("memory", 0.0) + parts.get("update", 0.0)
    known = {kind: measured[kind] / seconds for kind, seconds in {**parts, "memory": rest}.items() if seconds and measured.get(kind)}
    known |= {"update": known["memory"]} if "memory" in known else {}
    return {kind: factor for kind, factor in known.items() if parts.get(kind)} if len({*known} - {"update"}) > 1 else {}


def _other_level(step: StepTime, compiled: bool, given: str) -> EstimateTimeError:
    one, other = ("compiled", "eager") if compiled else ("eager", "compiled")
    return EstimateTimeError(
        f"{given} is of {'a' if compiled else 'an'} {one} step, and {step.title} is {other}: compiling fuses operators, so that one says "
        f"nothing of the other. Measure {'an' if compiled else 'a'} {other} step on {step.device.name}, or estimate with "
        f"compile={'the same setting' if compiled else repr('none')}"
    )


def checked_calibration(step: StepTime, known: TimeCalibration) -> StepTime:
    """A step at the level of a calibration.

    Raises:
        EstimateTimeError: it is of another device, of a compiled step where this one is eager (or the other way round), or of a program
            that spends its time on other operators, whose level it does not have.
    """
    if known.device != step.device.name:
        raise EstimateTimeError(f"calibration= is of {known.device}, and the step is for {step.device.name}: measure one step there")
    if known.compiled != step.compiled:
        raise _other_level(step, known.compiled, "calibration=")
    apart = distance(*({kind: share for kind, share in mix.items() if kind not in known.factors} for mix in (step.mix, known.mix)))
    if apart > FARTHEST:
        most = max(step.mix, key=lambda kind: step.mix[kind] - known.mix.get(kind, 0.0))
        raise EstimateTimeError(
            f"{step.title} spends {units.percent(apart)} of its time on other kinds of operators than {known.program}, which was measured: "
            f"most of all {KINDS[most]}. Measure one step of a program like it on {known.device}, and give its calibration"
        )
    return replace(step, calibration=known, notes=(*step.notes, *known.notes)).with_exposed()
