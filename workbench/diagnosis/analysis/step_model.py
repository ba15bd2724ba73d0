"""StepModel: predicts the parts of a step under changed knobs, from what experiments measured of it as it is.

Measured and predicted steps are both `Parts`: what each part adds to the step.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.core import units
from workbench.core.checks import did_you_mean
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.core.machine_speeds import MachineSpeeds
from workbench.core.statistics import Interval
from workbench.core.vocabulary import PART_WORDS, PARTS
from workbench.diagnosis.analysis.costs import MAX_FRESH_COST, Costs, mean_saved
from workbench.diagnosis.analysis.evidence import Evidence, Gradients
from workbench.diagnosis.analysis.loader_model import LoaderModel, free_cores
from workbench.runs import spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(display.Shown, JsonDataclass):
    """Mean seconds per step of each part; they add up to the step."""

    data_wait: float = 0.0
    transfer: float = 0.0
    compute: float = 0.0
    host: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0
    straggler: float = 0.0
    stalls: float = 0.0
    samples: float | None = None
    """Samples per step over all ranks, where it is known."""
    predicted: bool = False
    """True for a prediction; False for a measurement."""
    notes: tuple[str, ...] = ()
    """What a prediction leaves out."""

    def seconds(self, part: str) -> float:
        """Seconds of one part.

        Raises:
            ValueError: no such part.
        """
        if part not in PARTS:
            raise ValueError(f"no part {part!r}: a step is made of {', '.join(PARTS)}")
        return float(getattr(self, part))

    @property
    def step(self) -> float:
        """Seconds of the step: the sum of its parts."""
        return sum(self.seconds(part) for part in PARTS)

    def share(self, part: str) -> float:
        """Fraction 0..1 of the step; nan of a step of no length."""
        return self.seconds(part) / self.step if self.step else math.nan

    @property
    def samples_per_sec(self) -> float:
        """Over all ranks; nan if the samples are not known."""
        return self.samples / self.step if self.samples is not None and self.step else math.nan

    @property
    def rate(self) -> float:
        """Samples per second, or steps per second where the samples are not known: good for ratios."""
        return (1.0 if self.samples is None else self.samples) / self.step if self.step else math.nan

    @property
    def table(self) -> display.Table:
        """One row per part that is there, and the step."""
        rows = [
            [part, units.seconds(self.seconds(part)), units.percent(self.share(part)), PART_WORDS[part]]
            for part in PARTS
            if self.seconds(part)
        ]
        rate = "" if self.samples is None else f"; {units.rate(self.samples_per_sec)}"
        return display.Table(
            columns=("part", "seconds", "share", ""),
            rows=[*rows, ["step", units.seconds(self.step), "100 %", ""]],
            title="What the step is made of",
            note=display.notes([f"{'predicted' if self.predicted else 'measured'}{rate}", *self.notes]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per part: seconds, share."""
        return display.frame([{"part": part, "seconds": self.seconds(part), "share": self.share(part)} for part in PARTS])


KNOBS = tuple(name for name, about in spec.KNOBS.items() if about.predicted)
"""What can be changed; `optimizer` is "fused" or "foreach"."""

BUCKET_MB, FIRST_BUCKET_MB = 25.0, 1.0
"""DDP's own sizes: Source: torch.nn.parallel.DistributedDataParallel, `bucket_cap_mb` and `dist._DEFAULT_FIRST_BUCKET_BYTES`."""
MIB = 2**20
LOOPBACK = Gradients(size=0, buckets=1, latency=3e-4, per_byte=1e-9)
"""What a reduction between two processes of one machine costs, where none was measured: a run of one rank on a machine that has no such
speed on file. An order of magnitude, chosen between gloo's 0.1 ms and 1 GB/s as measured on the machine of `FITTED_ON` and slower ones. The
predicted part of reductions is off by as much as it is; the formula names it."""

DRIFTED = 1.15
"""A reduction after micro-batches without one takes so much longer: ranks on CPUs have drifted apart meanwhile. Measured on two cores, with
gloo, three programs: 0.96, 1.13 and 1.34, four micro-batches per reduction against steps with and without `no_sync`. Ranks on more cores
may drift further. It multiplies the predicted part of reductions: at 10 % of a step, twice the excess costs 1.5 %."""

UNKNOWN_OVERLAP = 0.5
"""How far a device computes while the training process takes a batch, where workers load all: nothing of the loop shows it. Chosen between
what was measured on an emulated device: 0 where the loss is read in each step, 1 where it is read in every tenth. At either end the
predicted wait for data is off by half of what taking a batch costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Predicts the parts of a step under other knobs. Everything that an experiment tried is taken from it as measured;
    what was not tried follows formulas. Known errors: `LoaderModel` for the loader; the rest of the step is taken to scale as

        forward + backward = fixed + samples × the rest         (from the doubled batch)
        reductions = measured × (latency × buckets (n − 1) + size × per_byte × 2 (n − 1) / n, now over then)
        reductions after micro-batches without one = measured × DRIFTED   (ranks on CPUs)
    """

    evidence: Evidence
    costs: Costs
    feeding: LoaderModel | None
    """The loader as it is, its times those of the loader alone; None if it could not be probed."""
    unexplained: float
    """Seconds of data wait that the formulas do not give for the loader as it is. Without workers, nothing runs beside anything, so it is
    what a fresh batch costs training more than a replayed one: no worker takes that off."""

    @classmethod
    def of(cls, evidence: Evidence) -> "StepModel":
        """The model of a step, from its evidence and costs."""
        costs = Costs.of(evidence)
        feeding = LoaderModel.of(evidence)
        if feeding is None:
            return cls(evidence=evidence, costs=costs, feeding=None, unexplained=0.0)
        feeding = _with_compute(feeding, costs.cached / evidence.accumulation)
        if evidence.device != "cpu":
            feeding = dataclasses.replace(feeding, hidden=UNKNOWN_OVERLAP if feeding.num_workers or evidence.observed else costs.overlap)
        left = costs.cached + costs.data.mid - feeding.step(**_loader_knobs(evidence))
        return cls(evidence=evidence, costs=costs, feeding=feeding, unexplained=left)

    @property
    def knobs(self) -> dict[str, Any]:
        """Every knob as it is, by default where no experiment says; None where it is not known."""
        e = self.evidence
        loading = e.loading
        known = {
            "num_workers": loading.num_workers if loading else None,
            "prefetch_factor": loading.prefetch_factor if loading else None,
            "persistent_workers": loading.persistent_workers if loading else None,
            "pin_memory": loading.pin_memory if loading else None,
            "micro_batch": loading.batch_size if loading else None,
            "accumulation": e.accumulation,
            "precision": e.precision,
            "nproc_per_node": e.world_size,
            "threads": e.threads,
        }
        return {name: known[name] if name in known else spec.KNOBS[name].default for name in KNOBS}

    def __repr__(self) -> str:
        knobs = ", ".join(f"{name}={value!r}" for name, value in self.knobs.items() if value is not None)
        return f"StepModel({units.seconds(self.costs.step)} a step, {knobs})"

    def parts(self, **changes: Any) -> Parts:
        """The predicted parts of the step.

        Args:
            changes: knobs of KNOBS; without any, the step as it is, measured.

        Raises:
            ValueError: no such knob, or it cannot be predicted from what was measured.
        """
        for name in changes:
            if name not in KNOBS:
                raise ValueError(f"no knob {name!r}: {did_you_mean(name, KNOBS)}There are {', '.join(KNOBS)}")
        now = self.knobs
        new = {name: value for name, value in changes.items() if value != now[name] and not (value is None and name != "bucket_cap_mb")}
        notes: list[str] = []
        inner, samples = self._inner({**now, **new}, new, notes)
        data = self._data_wait({**now, **new}, new, sum(inner.values()) - self._late_for(new))
        return Parts(
            data_wait=data,
            stalls=self.costs.stalls.mid,
            samples=None if self.evidence.samples is None else self.evidence.samples * samples,
            predicted=bool(new),
            notes=tuple(notes),
            **inner,
        )

    def speedup(self, **changes: Any) -> float:
        """Throughput in samples under changed knobs over that of now."""
        new = self.parts(**changes)
        samples = self._samples(changes)
        return samples * self.parts().step / new.step if new.step else math.nan

    def with_cores(self, **changes: Any) -> Interval:
        """`speedup` with the fewest cores that other processes may leave, up to all cores (see `free_cores`)."""
        most, noise, feeding = self.most_of_workers(**changes), self.evidence.noise, self.feeding
        mid = min(self.speedup(**changes), most)
        if noise is None or feeding is None:
            return Interval(low=mid, mid=mid, high=mid)
        cores = free_cores(noise, self.evidence.world_size)
        few, all_ = (dataclasses.replace(self, feeding=dataclasses.replace(feeding, cores=n)) for n in (cores.low, cores.high))
        ends = [mid, *(min(other.speedup(**changes), most) for other in (few, all_))]
        return Interval(low=min(ends), mid=mid, high=max(ends))

    def most_of_workers(self, **changes: Any) -> float:
        """What workers can gain at most where there were none: all CPU of a step, of the loader and of training, spread over all cores.

        Both that step and the one of now are those of an idle machine: what now waits for a core beside other processes is left out. inf =
        the CPU was not measured, or more is changed than the loader.
        """
        e, loading = self.evidence, self.evidence.loading
        of_loader = {"num_workers", "persistent_workers", "prefetch_factor"}
        if e.noise is None or loading is None or loading.cpu is None or loading.num_workers or e.device != "cpu":
            return math.inf
        if not changes.get("num_workers") or not changes.keys() <= of_loader:
            return math.inf
        cpu = e.cpu_seen if e.observed else None
        if e.inside and e.inside.cpu and not e.observed:
            cpu = loading.cpu * e.accumulation + e.inside.cpu
        if not cpu:
            return math.inf
        now = self.costs.step * (1 - min(1.0, e.noise.waiting))
        return max(1.0, now * e.noise.cores / (e.world_size * cpu))

    def without(self, seconds: float, **changes: Any) -> float:
        """Speedup if training took so many seconds less per step, the loader as it is; `changes` are the knobs that make it so."""
        cached = max(1e-12, self.costs.cached - seconds)
        step = cached + self._data_wait({**self.knobs, **changes}, {}, cached) + self.costs.stalls.mid + self._late_input
        return self.costs.step / step if step > 0 else math.nan

    # --- training on batches that are there

    @property
    def _late_input(self) -> float:
        """What a slow rank's loader adds to every step."""
        slow = self.costs.slow
        return max(0.0, self.costs.straggler.mid - slow.compute) if slow else 0.0

    def _late_for(self, new: Mapping[str, Any]) -> float:
        """The same under changed knobs: it is slow with every sample."""
        if new.get("nproc_per_node") == 1:
            return 0.0
        return self._late_input * self._samples({name: value for name, value in new.items() if name != "nproc_per_node"})

    def _samples(self, changes: Mapping[str, Any]) -> float:
        now = self.knobs
        return math.prod(float(changes[k] / now[k]) for k in ("micro_batch", "accumulation", "nproc_per_node") if changes.get(k) and now[k])

    def _inner(self, knobs: Mapping[str, Any], new: Mapping[str, Any], notes: list[str]) -> tuple[dict[str, float], float]:
        """The parts of a step without its loader, and its samples relative to now."""
        c, e = self.costs, self.evidence
        if "micro_batch" in new and not self.knobs["micro_batch"]:
            raise ValueError("micro_batch cannot be predicted: how many samples a batch has now is not known")
        size = float(knobs["micro_batch"] / self.knobs["micro_batch"]) if "micro_batch" in new else 1.0
        batches = float(knobs["accumulation"] / e.accumulation)
        compute, host = c.compute, c.host.mid
        if size != 1.0 and math.isnan(c.fixed):
            notes.append("how the step grows with its batch was not measured: all but Python is taken to grow with it")
        fixed = host if math.isnan(c.fixed) else min(c.fixed, compute + host)
        host_fixed = min(host, fixed)
        compute_fixed = fixed - host_fixed
        host = (host_fixed + (host - host_fixed) * size) * batches
        compute = (compute_fixed + (compute - compute_fixed) * size) * batches
        late = (c.slow.compute if c.slow else 0.0) * size * batches
        transfer = 0.0 if new.get("pin_memory") else c.transfer.mid * size * batches
        optimizer, communication = c.optimizer.mid, c.communication.mid
        for name, value in new.items():
            if name == "tf32" and new.get("precision", "fp32") != "fp32":
                notes.append("tf32 beside mixed precision: its products are in 16 bits already")
            elif name in ("precision", "channels_last", "tf32", "deterministic") or (name == "gc" and not value):
                ratio = 1 - self._tried(name, value, notes) / max(c.compute + c.host.mid, 1e-12)
                compute, host = compute * max(0.05, ratio), host * max(0.05, ratio)
            elif name == "optimizer":
                optimizer = max(0.0, optimizer - self._tried(name, value, notes))
            elif name == "threads":
                ratio = max(0.05, 1 - self._tried(name, value, notes) / max(c.replayed, 1e-12))
                compute, host, optimizer, communication = (ratio * part for part in (compute, host, optimizer, communication))
        if "bucket_cap_mb" in new and e.gradients:
            other = dataclasses.replace(e.gradients, buckets=buckets_of(e.gradients.size, knobs["bucket_cap_mb"]))
            was = _bare(e.gradients, e.world_size)
            communication *= _bare(other, e.world_size) / was if was else 1.0
        if "nproc_per_node" in new:
            communication = self._reduced(knobs["nproc_per_node"], notes)
            crowd = self._crowd(knobs["nproc_per_node"]) / self._crowd(e.world_size)
            compute, host, optimizer = compute * crowd, host * crowd, optimizer * crowd
            late = 0.0 if knobs["nproc_per_node"] == 1 else late
        if e.device == "cpu" and batches > 1 and e.accumulation == 1:
            communication *= DRIFTED
        inner = {
            "transfer": transfer,
            "compute": compute,
            "host": host,
            "optimizer": optimizer,
            "communication": communication,
            "straggler": late + self._late_for(new),
        }
        return inner, size * batches * knobs["nproc_per_node"] / e.world_size

    def _tried(self, name: str, value: Any, notes: list[str]) -> float:
        """Seconds that a change saves of a cached step, where a variant tried it."""
        e, arm = self.evidence, self._arm_of(name, value)
        if arm not in e.arms:
            notes.append(f"{name}={value} was not tried: its effect is not known and left out")
            return 0.0
        return self.costs.replayed * mean_saved(e.arms[arm])

    @staticmethod
    def _arm_of(name: str, value: Any) -> str:
        return {"channels_last": "channels_last", "tf32": "tf32" if value else "", "gc": "no_gc"}.get(name, f"{name}={value}")

    def untried(self, change: Mapping[str, Any]) -> list[str]:
        """Which of these knobs get a new value that only an experiment could predict, and none tried."""
        by_experiment = ("precision", "channels_last", "tf32", "gc", "optimizer", "threads")
        return [
            name
            for name, value in change.items()
            if name in by_experiment and value != self.knobs.get(name) and self._arm_of(name, value) not in self.evidence.arms
        ]

    def _reduced(self, ranks: int, notes: list[str]) -> float:
        e = self.evidence
        if ranks == 1:
            return 0.0
        size = e.gradients.size if e.gradients else 4 * (e.parameters or 0)
        if e.world_size > 1 and e.gradients:
            was = _bare(e.gradients, e.world_size)
            return self.costs.communication.mid * (_bare(e.gradients, ranks) / was if was else 1.0)
        if e.world_size > 1:
            return self.costs.communication.mid * (ranks - 1) / ranks * e.world_size / (e.world_size - 1)
        pair, known = between_two(e.device, e.speeds)
        rate = f"{units.seconds(pair.latency)} and {units.count(1 / pair.per_byte, 'B/s')}"
        source = "as measured between two ranks of this machine" if known else "which are assumed"
        notes.append(f"one rank reduces nothing, so a reduction is predicted with {rate}, {source}")
        return _bare(dataclasses.replace(pair, size=size, buckets=buckets_of(size, None)), ranks)

    def _crowd(self, ranks: int) -> float:
        """How much slower the ranks get by sharing the cores; on a GPU each has its own."""
        e = self.evidence
        if e.device != "cpu" or e.noise is None:
            return 1.0
        busy = float(e.threads)
        if e.inside and e.inside.cpu and self.costs.replayed:
            busy = min(busy, e.inside.cpu / self.costs.replayed)
        return max(1.0, ranks * busy / e.noise.left_cores)

    # --- the loader

    def _data_wait(self, knobs: Mapping[str, Any], new: Mapping[str, Any], inner: float) -> float:
        """What the loader adds to a step that takes `inner` seconds without it."""
        c, e = self.costs, self.evidence
        batches = float(knobs["accumulation"] / e.accumulation)
        size = float(knobs["micro_batch"] / self.knobs["micro_batch"]) if "micro_batch" in new else 1.0
        if self.feeding is None:
            if math.isnan(c.loader):
                return c.data.mid * batches * size
            loader = c.loader * batches * size
            left = c.data.mid - _wait(c.loader, c.cached, c.overlap)
            return max(0.0, _wait(loader, inner, c.overlap) + left * batches * size)
        fresh = self._fresh(knobs) * batches * size
        feeding = _with_compute(
            _times(self.feeding, size, knobs["nproc_per_node"] / e.world_size), (inner + fresh) / knobs["accumulation"], self.costs.cached
        )
        feeding = dataclasses.replace(feeding, accumulation=knobs["accumulation"], ranks=knobs["nproc_per_node"])
        if (
            e.device == "cpu" and f"threads={knobs['threads']}" in e.arms
        ):  # while an operator lasts they keep a core each, those that wait for the others, too
            feeding = dataclasses.replace(feeding, compute_cpu=knobs["threads"] * feeding.compute)
        wait = feeding.step(**_defaults(knobs)) - inner
        kept = 0.0  # of what the formulas do not give: all, if the workers are the same; none, if they are others
        if knobs["num_workers"] == self.knobs["num_workers"]:
            now = feeding.step(**_loader_knobs(e)) - inner
            kept = min(1.0, max(0.0, wait / now)) if now > 0 else 1.0
        return max(0.0, wait + kept * self.unexplained * batches * size)

    def _fresh(self, knobs: Mapping[str, Any]) -> float:
        """What a fresh batch costs training more than a replayed one, where it is not a part of `unexplained` already."""
        assert self.feeding is not None
        if self.feeding.num_workers or not knobs["num_workers"]:
            return 0.0
        return min(max(0.0, self.unexplained), MAX_FRESH_COST * self.costs.cached)


def between_two(device: str, speeds: MachineSpeeds | None) -> tuple[Gradients, bool]:
    """What a reduction between two ranks of the machine costs, and whether that was measured on it."""
    name = "gloo" if device == "cpu" else "nccl"
    latency, rate = (speeds.get(name), speeds.get(f"{name}_rate")) if speeds else (None, None)
    if latency is None or rate is None:
        return LOOPBACK, False
    return Gradients(size=0, buckets=1, latency=latency, per_byte=1 / rate), True


def _wait(loader: float, inner: float, overlap: float) -> float:
    return (1 - overlap) * loader + overlap * max(0.0, loader - inner)


def _times(feeding: LoaderModel, by: float, ranks: float = 1.0) -> LoaderModel:
    """The loader with batches so many times as large, on so many times as many ranks: fewer batches make an epoch; start-up stays."""
    if by == 1.0 and ranks == 1.0:
        return feeding
    return dataclasses.replace(
        feeding,
        epoch=None if feeding.epoch is None else max(1, round(feeding.epoch / by / ranks)),
        batch_bytes=round(feeding.batch_bytes * by),
        cpu=feeding.cpu * by,
        blocked=feeding.blocked * by,
        worker_cpu=None if feeding.worker_cpu is None else feeding.worker_cpu * by,
        handover=feeding.handover * by,
    )


def _with_compute(feeding: LoaderModel, compute: float, was: float | None = None) -> LoaderModel:
    """Training takes `compute` seconds per batch; its CPU changes in proportion, if a step took `was` seconds when it was measured."""
    cpu = feeding.compute_cpu
    if cpu is not None and was:
        cpu = cpu * compute * feeding.accumulation / was
    return dataclasses.replace(feeding, compute=compute, compute_cpu=cpu)


def _loader_knobs(e: Evidence) -> dict[str, Any]:
    assert e.loading is not None  # or there would be no LoaderModel
    return _defaults(dataclasses.asdict(e.loading))


def _defaults(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a loader's curve depends on, torch's own values where none are given."""
    return {
        "num_workers": knobs["num_workers"] or 0,
        "prefetch_factor": knobs["prefetch_factor"] or 2,
        "persistent_workers": bool(knobs["persistent_workers"]),
    }


def buckets_of(size: float, cap_mb: float | None) -> int:
    """How many reductions DDP makes of gradients of `size` bytes: a small first bucket, then full ones.

    >>> buckets_of(100 * 2**20, None), buckets_of(2**19, 25)
    (5, 1)
    """
    cap = BUCKET_MB if cap_mb is None else cap_mb
    return 1 + math.ceil(max(0.0, size - min(FIRST_BUCKET_MB, cap) * MIB) / (cap * MIB))


def _bare(g: Gradients, ranks: int) -> float:
    """Seconds of the reductions over so many ranks, nothing beside: rings of n − 1 hops; each rank sends 2 (n − 1) / n of the bytes.

    `g` was measured over a number of ranks of its own, so only ratios of this mean something.
    """
    return g.latency * g.buckets * (ranks - 1) + g.size * g.per_byte * 2 * (ranks - 1) / ranks
