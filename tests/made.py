"""Evidence made by hand: a world in which every cost is known, and what experiments in it would see."""

import dataclasses
import random
from dataclasses import dataclass

from workbench.core.machine_speeds import FITTED_ON, Machine, MachineSpeeds, Speed
from workbench.core.system_load import Noise
from workbench.diagnosis.analysis.evidence import Evidence, Gradients, Inside, Loading, RankEvidence, Stalls
from workbench.harness.results import VariantTimes
from workbench.timeline.timeline import Step, Timeline


@dataclass(frozen=True, kw_only=True)
class World:
    """A training loop. Seconds per step, of one batch of 32 samples."""

    work: float = 0.017
    """Operators of forward and backward."""
    fixed: float = 0.0
    """Of `work`: does not grow with the batch."""
    small: float = 0.0
    """Of `work`: in operators that are launched for longer than they run."""
    host: float = 0.001
    """No operator runs."""
    sleep: float = 0.0
    """Of `host`: asleep."""
    optimizer: float = 0.001
    fused: float | None = None
    """What a fused implementation of the optimizer would take; None = there is none."""
    transfer: float = 0.0
    communication: float = 0.0
    fresh: float = 0.0
    """What the reductions of fresh batches take longer than those of a replayed one."""
    cpu: float = 0.001
    """Of making a batch."""
    blocked: float = 0.0
    collate: float = 0.0
    """Of `cpu`."""
    worker: float = 0.001
    """CPU of a worker beyond `cpu`: transport."""
    handover: float = 0.0002
    num_workers: int = 0
    persistent: bool = True
    start_up: float = 0.0
    epoch: int = 500
    late_input: tuple[float, ...] = (0.0,)
    """Of each rank: what it waits longer for data."""
    late_compute: tuple[float, ...] = (0.0,)
    stall: tuple[float, int, str | None] = (0.0, 20, None)
    """Seconds, one in how many steps, kind."""
    bf16: float | None = None
    """Factor of `work` in mixed precision."""
    tf32: float | None = None
    """Factor of `work` with products in TF32."""
    cores: float = 8.0
    threads: int = 1
    crowd: float = 1.0
    """How much slower everything is for having more threads than cores."""
    noise: float = 0.01
    """Standard deviation of a block, relative."""
    pairs: int = 8

    @property
    def world_size(self) -> int:
        return max(len(self.late_input), len(self.late_compute))

    def without(self, **parts: object) -> "World":
        return dataclasses.replace(self, **parts)  # type: ignore[arg-type]

    @property
    def train(self) -> float:
        """Forward, backward and optimizer of a typical rank."""
        return (self.work + self.host + self.optimizer + self.transfer) * self.crowd

    @property
    def cached(self) -> float:
        return self.train + max(self.late_compute) + self.communication

    @property
    def loader(self) -> float:
        if not self.num_workers:
            return self.cpu + self.blocked + max(self.late_input)
        return (self.cpu + self.worker + self.blocked) / self.num_workers + max(self.late_input)

    @property
    def clean(self) -> float:
        if not self.num_workers:
            return self.cached + self.loader + self.fresh
        started = 0.0 if self.persistent else self.start_up / self.epoch
        return max(self.loader, self.cached + self.handover) + started

    @property
    def step(self) -> float:
        return self.clean + self.stall[0] / self.stall[1]

    def arm(self, name: str, baseline: str, base: float, changed: float, samples: float = 1.0) -> VariantTimes:
        chance = random.Random(name)
        pairs = tuple((base * chance.gauss(1, self.noise), changed * chance.gauss(1, self.noise)) for _ in range(self.pairs))
        return VariantTimes(name=name, baseline=baseline, pairs=pairs, samples=samples)

    def arms(self) -> dict[str, VariantTimes]:
        changed = {
            "no_optimizer": self.without(optimizer=0.0).cached,
            "doubled": self.cached + (self.work - self.fixed + self.transfer) * self.crowd,
        }
        if self.transfer:
            changed["device_batch"] = self.without(transfer=0.0).cached
        if self.world_size > 1:
            changed["no_sync"] = self.cached - self.communication
        if self.fused is not None:
            changed["optimizer=fused"] = self.without(optimizer=self.fused).cached
        if self.bf16 is not None:
            changed["precision=amp_bf16"] = self.without(work=self.work * self.bf16).cached
        if self.tf32 is not None:
            changed["tf32"] = self.without(work=self.work * self.tf32).cached
        if self.threads > 1:
            changed["threads=1"] = self.without(crowd=1.0).cached
        arms = {
            name: self.arm(name, "cached", self.cached, seconds, 2.0 if name == "doubled" else 1.0) for name, seconds in changed.items()
        }
        return {
            "cached": self.arm("cached", "full", self.clean, self.cached),
            "loader": self.arm("loader", "full", self.clean, self.loader),
            **arms,
        }

    def ranks(self) -> tuple[RankEvidence, ...]:
        found = []
        for rank in range(self.world_size):
            wait = (self.clean - self.cached - self.fresh if not self.num_workers else 0.0) - max(self.late_input)
            wait += self.late_input[rank] if rank < len(self.late_input) else 0.0
            compute = self.train + (self.late_compute[rank] if rank < len(self.late_compute) else 0.0)
            phases = (self.clean - self.cached, self.transfer, 0.3 * self.work, 0.7 * self.work, self.optimizer, self.host)
            steps = tuple(Step(index=i, phases=phases, samples=32) for i in range(60))
            found.append(
                RankEvidence(rank=rank, timeline=Timeline(rank=rank, steps=steps), alone=wait + compute, wait=wait, compute=compute)
            )
        return tuple(found)

    def evidence(self, **more: object) -> Evidence:
        extra, every, kind = self.stall
        stalls = Stalls(steps=300)
        if extra:
            at = tuple(range(every, 300, every))
            stalls = Stalls(steps=300, at=at, extra=extra, share=extra / every / self.step, every=float(every), kind=kind)
        late = (*self.late_compute, 0.0)[0]  # the trace is that of rank 0
        ops = (self.work + self.optimizer + self.transfer) * self.crowd + late
        values = {
            "step": self.step,
            "world_size": self.world_size,
            "threads": self.threads,
            "samples": 32.0 * self.world_size,
            "parameters": 1_000_000,
            "tensors": 40,
            "optimizer": "AdamW(single)",
            "arms": self.arms(),
            "loading": Loading(
                kind="DataLoader",
                num_workers=self.num_workers,
                prefetch_factor=2 if self.num_workers else None,
                persistent_workers=self.persistent and self.num_workers > 0,
                batch_size=32,
                batch_bytes=32 * 3072,
                epoch=self.epoch,
                alone=self.loader,
                cpu=self.cpu,
                blocked=self.blocked,
                fetch_cpu=self.cpu - self.collate,
                fetch_blocked=self.blocked,
                collate=self.collate,
                slow_share=0.05,
                worker_cpu=self.cpu + self.worker,
                handover=self.handover,
                start_up=self.start_up,
            ),
            "inside": Inside(
                step=self.cached,
                ops=ops,
                op_count=300.0,
                small_ops=self.small,
                optimizer=self.optimizer,
                collectives=self.communication + max(self.late_compute) - late if self.world_size > 1 else None,
                cpu=self.train - self.sleep,
                blocked=self.sleep + self.communication,
                lines=(("train.py:41 step", 0.9),),
            ),
            "stalls": stalls,
            "gradients": Gradients(size=4_000_000, buckets=1, latency=2e-4, per_byte=1e-9) if self.world_size > 1 else None,
            "ranks": self.ranks(),
            "noise": Noise(cores=self.cores, spread=2 * self.noise),
            "seconds": 12.0,
            "steps": 300,
        }
        return Evidence(**{**values, **more})  # type: ignore[arg-type]


def machine_slower_by(**factors: float) -> MachineSpeeds:
    """Speeds of a machine where something takes so many times as long as where the limits of verdicts were fitted."""
    medians = {name: FITTED_ON[name] / factor if name == "copy" else FITTED_ON[name] * factor for name, factor in factors.items()}
    return MachineSpeeds(machine=Machine(host="made"), speeds={name: Speed(median=median) for name, median in medians.items()})
