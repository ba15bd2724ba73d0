"""LoaderModel: predicts loader and step over the number of workers from two short probes.

Its `curve()` is a LoaderCurve, on which measurements stand beside the prediction. If samples are unevenly slow, deliveries are simulated
batch by batch (`delivery_seconds`).
"""

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.core.statistics import Interval
from workbench.core.system_load import MIN_LEFT_SHARE, Noise
from workbench.diagnosis.analysis.evidence import Evidence

TERMS = {
    "in turn": "loading and training in turn",
    "workers": "workers too few or too slow",
    "cores": "all cores busy",
    "hand-over": "taking batches from workers",
    "compute": "training: fed well",
}
"""What limits the step, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Loader and step at one number of workers. Seconds."""

    num_workers: int
    loader: float
    """Per batch of the loader alone, predicted."""
    step: float
    """Per step, predicted."""
    binds: str
    """What limits it, of TERMS."""
    measured_loader: float | None = None
    measured_step: float | None = None


APART = "predicted from the loader and the training timed separately; measured with both running"
"""Why a measured step differs from the predicted one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderCurve(display.Shown, JsonDataclass):
    """Loader and step over the number of workers. Predicted and measured are the same quantities, so their difference is the error."""

    points: tuple[CurvePoint, ...]
    """One per number of workers."""
    recommended: int
    """The smallest number of workers within 5 % of the best step."""
    compute: float
    """Seconds per step of training on batches that are there already: no step is shorter."""
    current: int | None = None
    """What the loader has now."""
    persistent_workers: bool = True
    """Do the present workers persist? Their point is predicted and measured as they are; at all other points workers persist."""
    doubt: str = ""
    """Why no number of workers is recommended by this curve; "" = one is."""

    def with_measured(self, *, loader: Mapping[int, float] | None = None, step: Mapping[int, float] | None = None) -> Self:
        """The same curve with measurements beside the prediction.

        Args:
            loader: seconds per batch of the loader alone, by number of workers.
            step: seconds per step, likewise.

        Raises:
            ValueError: a number of workers that is not on the curve.
        """
        loader, step = loader or {}, step or {}
        there = [point.num_workers for point in self.points]
        if odd := sorted({*loader, *step} - set(there)):
            raise ValueError(f"measured with {odd[0]} workers, but the curve goes from {there[0]} to {there[-1]}: try curve({odd[-1]})")
        return dataclasses.replace(
            self,
            points=tuple(
                dataclasses.replace(
                    point,
                    measured_loader=loader.get(point.num_workers, point.measured_loader),
                    measured_step=step.get(point.num_workers, point.measured_step),
                )
                for point in self.points
            ),
        )

    def marks(self, num_workers: int) -> list[str]:
        """What a number of workers is: "now", "recommended", both or neither."""
        marked = {"now": self.current, **({} if self.doubt else {"recommended": self.recommended})}
        return [name for name, count in marked.items() if count == num_workers]

    @property
    def errors(self) -> dict[int, float]:
        """Predicted over measured step, less 1, by number of workers, where it was measured."""
        return {point.num_workers: point.step / point.measured_step - 1 for point in self.points if point.measured_step}

    @property
    def table(self) -> display.Table:
        """One row per number of workers."""
        seen = any(value is not None for p in self.points for value in (p.measured_loader, p.measured_step))
        rows = []
        for p in self.points:
            measured = (units.seconds(p.measured_loader), units.seconds(p.measured_step)) if seen else ()
            rows.append(
                (
                    p.num_workers,
                    units.seconds(p.loader),
                    units.seconds(p.step),
                    *measured,
                    TERMS[p.binds],
                    ", ".join(self.marks(p.num_workers)),
                )
            )
        return display.Table(
            columns=("workers", "loader alone", "step", *(("loader, measured", "step, measured") if seen else ()), "limited by", ""),
            rows=rows,
            title="The loader over its workers",
            note=f"loader alone is per batch; {APART if seen else 'predicted'}; "
            f"training alone takes {units.seconds(self.compute)}"
            + ("" if self.persistent_workers else "; workers of now start anew with each pass over the loader, all others persist")
            + (f"; no number of workers is recommended: {self.doubt}" if self.doubt else ""),
        )

    to_frame = display.frame_method("points", CurvePoint)

    plot = display.plot_method("loader_curve")

    def __repr__(self) -> str:
        recommended = "nothing" if self.doubt else f"num_workers={self.recommended}"
        return f"LoaderCurve({len(self.points)} points, recommended: {recommended})"


SIMULATED_BATCHES = 400
"""Batches that are simulated: their mean is within a few percent of that over many."""
SLOW_SAMPLES = 0.05
"""The slowest samples, whose share of the time is known: see `Loading.slow_share`. Chosen: of 40 samples, two."""


def delivery_seconds(making: Sequence[float], workers: int, queue: int, training: float) -> float:
    """Seconds per batch of a loop whose workers deliver in order.

    Batch j is made by worker j mod n as soon as that one is free and batch j − queue has been taken; it is taken in its turn, when training
    on the one before is done.

    >>> delivery_seconds([2.0] * 100, workers=2, queue=4, training=0.5)
    1.0
    >>> delivery_seconds([2.0] * 100, workers=4, queue=8, training=1.5)
    1.5

    Args:
        making: seconds to make each batch; the first half, in which queues fill up, is not counted.
        workers: number of workers, n.
        queue: batches that are on their way or ready, at most.
        training: seconds that training takes for a batch.
    """
    made, taken = [0.0] * len(making), [0.0] * len(making)
    for j, seconds in enumerate(making):
        free = made[j - workers] if j >= workers else 0.0
        requested = taken[j - queue] if j >= queue else 0.0
        made[j] = max(free, requested) + seconds
        taken[j] = max(made[j], taken[j - 1] + training if j else 0.0)
    half = len(making) // 2
    return (taken[-1] - taken[half - 1]) / (len(making) - half)


@lru_cache(maxsize=64)
def uneven_batches(share: float, batch_size: int) -> tuple[float, ...]:
    """Relative times to make batches, mean 1 in the second half: the slowest twentieth of the samples takes `share` of the time more.

    The same each time: no chance in a result.
    """
    chance = random.Random(0)
    slow = [sum(chance.random() < SLOW_SAMPLES for _ in range(batch_size)) for _ in range(SIMULATED_BATCHES)]
    mean = sum(slow[SIMULATED_BATCHES // 2 :]) / (SIMULATED_BATCHES - SIMULATED_BATCHES // 2)  # of those that count
    return tuple((1 - share) + share * count / mean if mean else 1.0 for count in slow)


PLATEAU = 0.05
"""A number of workers within 5 % of the best one is as good. Measured: two runs of one setting differ as much. With half or twice as much,
one worker more or fewer is recommended."""
MAX_WORKERS = 64
"""Most workers that are considered."""
MOST_OBSERVED = 8
"""Workers that are considered at most for a loader that was only observed, or twice as many as there are cores: its times are less certain
than those of a probe, and each worker is a process. Chosen."""
SINGLE_THREAD_CPU = 1.2
"""CPU over duration: below that, training computes on one thread. Derived: 1 with some help of other threads; two threads have more.
Between 1.1 and 1.5 it decides alike, beyond it cannot tell one thread from two."""
MIN_SLOW_SHARE = 0.1
"""A smaller share of slow samples is as good as none. Derived: even samples have 0.05."""
MAX_PACE = 1.5
"""A machine is not that much faster or slower than a minute ago: then the probe measured something else. Chosen: speeds of one machine
differ by a fifth from run to run. It cuts a correction; beyond, the loader's own figures count."""
PROCESSES_PER_RANK = 2
"""That compete with those of others for the cores: a rank, and a worker of its loader. Chosen; with more workers ours get more.
`free_cores` gives a range from half to all."""


def free_cores(noise: Noise, ranks: int = 1) -> Interval:
    """Cores that the ranks and their workers get while other processes compute, too.

    The others were measured while few of our processes computed. When more of ours do, processes of equal priority share the cores evenly.
    The others waited for cores as long as ours did, so they wanted more than they got. Ours get fewer if they wanted twice as many, and all
    if the others have a lower priority or end. In any case ours get what the others left.

    >>> free_cores(Noise(cores=2, foreign=1))
    Interval(low=1, mid=1.3333333333333333, high=2)
    """
    ours = PROCESSES_PER_RANK * ranks
    left, wanted = noise.left_cores, noise.foreign / max(MIN_LEFT_SHARE, 1 - noise.waiting)
    low, mid = (max(left, noise.cores * ours / (ours + times * wanted)) for times in (2, 1))
    return Interval(low=low, mid=mid, high=max(left, noise.cores))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderModel:
    """Predicts how fast a loader feeds a step. Seconds per batch.

    With n workers, and w, d, h, C, K, R as named below:

        loader(0) = cpu + d + waited           step(0) = loader(0) + C
        loader(n) = max((w + d) / n, R (w + h) / K, h)
        step(n)   = max(loader(n), C + h + late)

    `late` is what training loses to workers that run on its cores. It leaves them idle for `spare = K (C + h) − R (compute_cpu + h)`; what
    they need beyond that, R w − spare, is taken from it. If training computes on one thread, all K cores share the loss, so that
    C + h + late = R (w + h + compute_cpu) / K. If its threads wait for each other at the end of every operator, they proceed only while
    none of them is preempted, half of the time beside each busy worker: b busy ones, which work at half speed, too, cost it
    2 (1 − 2^−b) / b of the time that they compute.

    Known error of the step, 36 settings with 1 to 4 workers on two cores (sleeping, computing and mixed loaders): 6.5 % in the median, 33 %
    at worst. The worst ones had probes that other processes disturbed. Where batches are cheap and training binds, it is 10 to 20 % too
    short: a batch that comes fresh from a worker costs training more than one that is replayed.
    If some samples are far slower than others, batches are uneven, and max(loader, …) is simulated batch by batch: `delivery_seconds`.
    On a device that computes asynchronously, loading in the training process and hand-overs are hidden behind the work that is
    queued: with s = `hidden`, step(0) = loader(0) + C − s min(loader(0), C), and h counts (1 − s) times in C + h.
    Left out: hyperthreads, memory bandwidth.
    """

    cpu: float
    """CPU of making a batch in the training process."""
    blocked: float = 0.0
    """d: the time of making it that is spent neither computing nor waiting for a core."""
    waited: float = 0.0
    """What making it in the training process waited for a core beside other processes, where that is not a part of `cpu`. Workers wait for
    cores, too, so it is no time that they hide."""
    worker_cpu: float | None = None
    """w: CPU of a worker per batch, transport included. None = not known: `cpu` is taken."""
    handover: float = 0.0
    """h: CPU of the training process to take a batch from a worker."""
    compute: float = 0.0
    """C: training on a batch that is there already."""
    compute_cpu: float | None = None
    """CPU of that on the host, all threads of the process. None = `compute`."""
    cores: float = 1.0
    """K: that our processes may use, less those that others take."""
    ranks: int = 1
    """R: training processes that share the cores, each with workers of its own."""
    accumulation: int = 1
    """Batches per step."""
    start_up: float = 0.0
    """To start the workers that there are now (if none: one), once per epoch unless they persist."""
    epoch: int | None = None
    """Batches per epoch."""
    batch_bytes: int = 0
    batch_size: int | None = None
    slow_share: float = 0.0
    """Of the time of making a batch: what the slowest twentieth of the samples takes beyond the others, see `Loading.slow_share`."""
    num_workers: int = 0
    """What the loader has now."""
    most: int = MAX_WORKERS
    """Workers that are considered at most."""
    hidden: float = 0.0
    """s: 0 = loading in this process and training take turns, 1 = the device computes meanwhile."""

    @classmethod
    def of(cls, evidence: Evidence) -> Self | None:
        """From what was measured; None if nothing is known about how batches are made, or about the step without that."""
        loading, cached = evidence.loading, evidence.arm("cached")
        if loading is None or (cached is None and not evidence.observed):
            return None
        cpu = loading.cpu if loading.cpu is not None else loading.worker_cpu
        if cpu is None:
            return None
        inside, noise = evidence.inside, evidence.noise
        compute_cpu = inside.cpu / evidence.accumulation if inside and inside.cpu else None
        waited = 0.0
        if evidence.observed and not loading.num_workers:
            waited = max(0.0, loading.alone - cpu - (loading.blocked or 0.0))
            compute_cpu = max(0.0, seen - cpu) if (seen := evidence.cpu_seen) else None
        probed = cls(
            cpu=cpu,
            blocked=loading.blocked or 0.0,
            worker_cpu=loading.worker_cpu,
            handover=loading.handover or 0.0,
            compute=cached.seconds / evidence.accumulation if cached else evidence.step,  # see StepModel.of
            compute_cpu=compute_cpu,
            waited=waited,
            cores=free_cores(noise, evidence.world_size).mid if noise else 1.0,
            ranks=evidence.world_size,
            accumulation=evidence.accumulation,
            start_up=loading.start_up or 0.0,
            epoch=loading.epoch,
            batch_bytes=loading.batch_bytes,
            batch_size=loading.batch_size,
            slow_share=min(1.0, max(0.0, loading.slow_share or 0.0)),
            num_workers=loading.num_workers,
            most=max(MOST_OBSERVED, 2 * int(noise.cores)) if evidence.observed and noise else MAX_WORKERS,
        )
        alone = evidence.arm("loader")
        return probed._at_the_pace_of(alone.seconds / evidence.accumulation) if alone else probed

    def _at_the_pace_of(self, loader: float) -> Self:
        """The same with the CPU times of the probes scaled to a loader's measured seconds per batch: machines are faster or slower for
        a while, and the loader alone was measured interleaved with the other variants.
        """
        n = self.num_workers
        if n == 0:
            now, then = self.cpu, loader - self.blocked
        elif max(terms := self._loader_terms(n), key=terms.__getitem__) == "workers":
            now, then = self._worker, loader * n - self.blocked
        else:
            now, then = self.loader(n), loader
        pace = min(max(then / now, 1 / MAX_PACE), MAX_PACE) if now > 0 else 1.0
        return dataclasses.replace(
            self, cpu=self.cpu * pace, worker_cpu=None if self.worker_cpu is None else self.worker_cpu * pace, handover=self.handover * pace
        )

    def loader(self, num_workers: int, *, prefetch_factor: int = 2) -> float:
        """Seconds per batch of the loader alone."""
        if num_workers == 0:
            return self.cpu + self.blocked + self.waited
        terms = self._loader_terms(num_workers)
        return max(self._delivered(num_workers, prefetch_factor, self.handover), terms["cores"], terms["hand-over"])

    def step(self, num_workers: int, *, prefetch_factor: int = 2, persistent_workers: bool = False) -> float:
        """Seconds per step (of `accumulation` batches) with the loader and training both at work, the start of each epoch included."""
        if num_workers == 0:
            return (self.loader(0) + self.compute - self.hidden * min(self.loader(0), self.compute)) * self.accumulation
        loader, training = self.loader(num_workers, prefetch_factor=prefetch_factor), self._training(num_workers)
        steady = max(loader, self._delivered(num_workers, prefetch_factor, training))
        if self.epoch:
            # workers begin an epoch with empty queues: training waits for the first batch, the workers do not wait for training
            start = 0.0 if persistent_workers else self.start_up * (1 + num_workers) / (1 + max(1, self.num_workers))
            first = self._worker + self.blocked
            trained = first + self.epoch * (steady if steady > loader else training)
            steady = (start + max(self.epoch * loader + self.compute, trained)) / self.epoch
        return steady * self.accumulation

    def data_wait(self, num_workers: int, *, prefetch_factor: int = 2, persistent_workers: bool = False) -> float:
        """Of `step`: what loading adds to training on batches that are there already."""
        step = self.step(num_workers, prefetch_factor=prefetch_factor, persistent_workers=persistent_workers)
        return max(0.0, step - self.compute * self.accumulation)

    def binds(self, num_workers: int) -> str:
        """Which term limits the step: "in turn" (no workers), "workers", "cores", "hand-over" or "compute"."""
        if num_workers == 0:
            return "in turn"
        training = self._training(num_workers)
        first = last = 0.0
        if self.epoch:  # as in `step`: training waits for the first batch of an epoch, and the loader is done before the last is trained on
            first, last = (self._worker + self.blocked) / self.epoch, self.compute / self.epoch
        terms = {name: seconds + last for name, seconds in self._loader_terms(num_workers).items()} | {"compute": self._own + first}
        if training > self._own:
            terms["cores"] = max(terms["cores"], training + first)
        return max(terms, key=terms.__getitem__)

    def recommend(self, *, most: int | None = None, prefetch_factor: int = 2, shm_bytes: float | None = None) -> int:
        """The smallest number of workers whose step is within 5 % of the best.

        Args:
            most: workers, at most (None: as many as there are cores for each rank, or more if they mostly wait).
            prefetch_factor: batches that each of them makes ahead.
            shm_bytes: shared memory that their batches have to fit in.
        """
        most = self._most if most is None else most
        if shm_bytes is not None and self.batch_bytes:
            most = min(most, math.floor((shm_bytes / self.batch_bytes / self.ranks - 1) / prefetch_factor))
        steps = [self.step(count, prefetch_factor=prefetch_factor, persistent_workers=True) for count in range(max(0, most) + 1)]
        return next(count for count, step in enumerate(steps) if step <= (1 + PLATEAU) * min(steps))

    def curve(self, most: int | None = None, *, persistent_workers: bool = True) -> LoaderCurve:
        """The prediction for 0 to `most` workers (None: a little beyond the recommended number and that of now).

        Args:
            most: the largest number of workers.
            persistent_workers: those that there are now, which are predicted as they are. All others are recommended ones: they persist.

        Raises:
            ValueError: fewer than 0.
        """
        if most is not None and most < 0:
            raise ValueError(f"a curve up to {most} workers: 0 or more are possible, e.g. curve(8)")
        recommended = self.recommend()
        last = min(MAX_WORKERS, max(4, recommended + 2, self.num_workers)) if most is None else most
        return LoaderCurve(
            points=tuple(
                CurvePoint(
                    num_workers=n,
                    loader=self.loader(n),
                    step=self.step(n, persistent_workers=persistent_workers or n != self.num_workers),
                    binds=self.binds(n),
                )
                for n in range(last + 1)
            ),
            recommended=recommended,
            compute=self.compute * self.accumulation,
            current=self.num_workers,
            persistent_workers=persistent_workers or not self.num_workers,
        )

    @property
    def _worker(self) -> float:
        return self.cpu if self.worker_cpu is None else self.worker_cpu

    @property
    def _own(self) -> float:
        """Training on a batch, and taking it from a worker."""
        return self.compute + (1 - self.hidden) * self.handover

    @property
    def _most(self) -> int:
        """Enough workers for any purpose: with more, the cores or the hand-over bind."""
        limit = max(self._own, self.ranks * (self._worker + self.handover) / self.cores, 1e-9)
        return min(self.most, math.ceil((self._worker + self.blocked) / limit) + 1)

    def _delivered(self, num_workers: int, prefetch_factor: int, training: float) -> float:
        """Seconds per batch if only the workers and training limit it."""
        alone = (self._worker + self.blocked) / num_workers
        if self.slow_share < MIN_SLOW_SHARE or not self.batch_size or not alone:
            return max(alone, training)
        making = [num_workers * alone * relative for relative in uneven_batches(round(self.slow_share, 2), self.batch_size)]
        return delivery_seconds(making, num_workers, num_workers * max(1, prefetch_factor), training)

    def _loader_terms(self, num_workers: int) -> dict[str, float]:
        return {
            "workers": (self._worker + self.blocked) / num_workers,
            "cores": self.ranks * (self._worker + self.handover) / self.cores,
            "hand-over": self.handover,
        }

    def _training(self, num_workers: int) -> float:
        """Seconds per batch that training takes beside such workers, if it never waits for them."""
        own = self._own
        cpu = self.compute if self.compute_cpu is None else self.compute_cpu
        worker_cpu = self.ranks * self._worker
        spare = self.cores * own - self.ranks * (cpu + self.handover)
        if worker_cpu <= max(0.0, spare):
            return own
        late = worker_cpu - max(0.0, spare)
        if cpu <= SINGLE_THREAD_CPU * self.compute:  # its core is shared like all others
            return own + late / self.cores
        step = own + late  # beside one busy worker, which is the worst
        for _ in range(8):
            busy = min(max(1.0, worker_cpu / step), self.ranks * num_workers, max(1.0, self.cores))
            step = own + late * 2 * (1 - 0.5**busy) / busy
        return step


def blind_window(service: float, compute: float, queue: int) -> float:
    """Steps of one batch for which a queue, full at first, hides a loader that is slower than training; infinite if it is not slower.

    The queue loses `1 - compute / service` of a batch per step.

    >>> blind_window(0.050, 0.025, 8), blind_window(0.010, 0.025, 8)
    (16.0, inf)
    """
    return queue / (1 - compute / service) if service > compute else math.inf
