"""Iteration: seconds of one under data, tensor and pipeline parallelism, from two rates that are measured on small runs.

T = (FLOPs / (GPUs · rate) + tensor-parallel bytes / bandwidth) · (1 + bubble). The two rates take in what the formula leaves out
(element-wise work, which grows as the bytes do; kernels below their peak), so they are calibrated, not read from datasheets. Fitted to
22B parameters on 8 GPUs and 175B on 64 of a published table, it gives 530B on 280 and 1T on 512 within 4 %.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from workbench.cost.collectives import CostError, checked_ranks, non_negative_pair
from workbench.cost.pipeline import bubble
from workbench.cost.transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How an iteration is dealt out. GPUs = data × tensor × pipeline."""

    batch: int
    """Sequences per iteration."""
    micro_batch: int = 1
    """Sequences at once."""
    data: int = 1
    """Copies of the model."""
    tensor: int = 1
    """Ranks that split each layer."""
    pipeline: int = 1
    """Stages."""
    chunks: int = 1
    """Of layers on each stage; above 1 the schedule is interleaved."""

    def __post_init__(self) -> None:
        for name in ("batch", "micro_batch", "data", "tensor", "pipeline", "chunks"):
            try:
                checked_ranks(getattr(self, name))
            except CostError:
                raise CostError(f"{name}={getattr(self, name)!r}: a whole number of at least 1 is wanted") from None
        if self.batch % (self.data * self.micro_batch):
            raise CostError(f"batch={self.batch} is no multiple of data × micro_batch = {self.data} × {self.micro_batch}")

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.data * self.tensor * self.pipeline

    @property
    def micro_batches(self) -> int:
        """Of an iteration and pipeline."""
        return self.batch // (self.data * self.micro_batch)

    @property
    def bubble(self) -> float:
        """Idle over ideal time."""
        return bubble(self.pipeline, self.micro_batches, "interleaved" if self.chunks > 1 else "1f1b", self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What each GPU has to do in an iteration."""

    flops: float
    """FLOPs computed."""
    bytes: float
    """Sent for tensor parallelism."""
    bubble: float
    """Idle over ideal time."""


def work(model: Transformer, layout: Layout, recompute: str = "none") -> Work:
    """What each GPU has to do; stages are taken as equal.

    Raises:
        CostError: a recomputation that is not known.
    """
    flops = model.flops(layout.batch, recompute) / layout.gpus
    sent = model.tensor_bytes(layout.batch / layout.data, layout.tensor, recompute) / layout.pipeline
    return Work(flops=flops, bytes=sent, bubble=layout.bubble)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a GPU achieves in this kind of program."""

    flops_per_sec: float
    """While it computes; infinite if measured iterations are explained by bytes alone."""
    bandwidth: float
    """Bytes per second of tensor parallelism, and of what grows as its bytes do; infinite if it takes no time."""

    @classmethod
    def calibrated(cls, measured: Iterable[tuple[Work, float]]) -> "Rates":
        """The rates that explain measured iterations best.

        Args:
            measured: what each GPU had to do, and seconds of the iteration; two or more, of different sizes.

        Raises:
            CostError: fewer than two, or seconds that are not above 0.
        """
        rows = list(measured)
        if len(rows) < 2 or any(not seconds > 0 for _, seconds in rows):
            raise CostError(
                f"{len(rows)} measured iterations: two or more are wanted, each with its seconds, to tell computing from sending"
            )
        scaled = [(one.flops * (1 + one.bubble), one.bytes * (1 + one.bubble), seconds) for one, seconds in rows]
        per_flop, per_byte = non_negative_pair(scaled)
        return cls(flops_per_sec=1 / per_flop if per_flop else float("inf"), bandwidth=1 / per_byte if per_byte else float("inf"))

    def seconds(self, one: Work) -> float:
        """Of an iteration."""
        return (one.flops / self.flops_per_sec + one.bytes / self.bandwidth) * (1 + one.bubble)


def model_flops_utilization(model: Transformer, layout: Layout, seconds: float, peak: float) -> float:
    """Model FLOPs per second and GPU over a GPU's dense peak (MFU); recomputation does not count. Source: Chowdhery et al. 2022, PaLM.

    Raises:
        CostError: seconds or a peak not above 0.
    """
    if not (seconds > 0 and peak > 0):
        raise CostError(f"seconds={seconds!r}, peak={peak!r}: numbers above 0 are wanted")
    return model.flops(layout.batch) / layout.gpus / seconds / peak
