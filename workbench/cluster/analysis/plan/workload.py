"""`Workload`: what a plan needs to know of a model: parameters, FLOPs, bytes sent and kept per sample; of a Transformer by its sizes.
`Trainer`: what a training program does of its own accord that the time of a step depends on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from workbench.cluster.analysis.plan.ranges import LAUNCH, MESSAGE, OTHER_LAYOUT, PlanError
from workbench.cluster.analysis.transformer import Transformer
from workbench.core import units
from workbench.core.checks import choice, real_number
from workbench.core.statistics import Interval

CHECKPOINTINGS = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Micro-batch sizes that are tried."""
CHUNKS = (1, 2, 3, 4, 6, 8)
"""Pieces of the layers on each stage of an interleaved pipeline."""
ELEMENT = {"fp32": 4, "amp_bf16": 2, "amp_fp16": 2}
"""Precision → bytes of an activation."""
LOGITS = 14
"""Bytes per token and word of the vocabulary at the end of the forward, in 16 bit: the logits (2), log_softmax (4) and two gradients
(4 + 4), as eager PyTorch keeps them; in fp32 two more."""

OPERATORS = {False: {"none": 105, "selective": 120, "full": 125}, True: {"none": 170, "selective": 208, "full": 215}}
"""Gated? → checkpointing → operators that an eager block calls, forward, backward and forward again. Counted in dry runs of transformers 5
with autocast, without views: of GPT-2 (104, 121, 126) and of Llama; fused kernels make fewer."""
UNDIVIDED = {"none": 44, "selective": 44, "full": 64}
"""Checkpointing → bytes per token and width, in 16 bit, that norms and residual sums of a block move: tensor parallelism leaves them whole.
Each of two norms reads 2 and writes 2 forward, reads 4 and writes 2 backward; each of two sums reads 4 and writes 2 both ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained. "Per sample" is for one sample on a GPU that has the full model."""

    name: str
    """Name, for tables and messages."""
    parameters: float
    """Parameters of the whole model."""
    layers: int
    """Equal blocks, which pipelines divide and FSDP gathers one by one."""
    shared: float
    """Parameters outside of the blocks (embeddings), all on the first stage."""
    flops: float
    """FLOPs of the model per sample, forward and backward, without recomputation."""
    computed: Mapping[str, float]
    """Checkpointing → FLOPs per sample with recomputation. Only these kinds are planned."""
    kept: Mapping[str, float]
    """Checkpointing → bytes per sample that all blocks keep for the backward."""
    once: Mapping[str, float] = field(default_factory=dict)
    """Checkpointing → FLOPs of every micro-batch, whatever its size."""
    whole: Mapping[str, float] = field(default_factory=dict)
    """Checkpointing → the part of `kept` that tensor parallelism does not split."""
    working: Mapping[str, float] = field(default_factory=dict)
    """Checkpointing → extra bytes per sample of one block while it is recomputed."""
    split_head: bool = False
    """Is `head` split by tensor parallelism?"""
    head: float = 0.0
    """Bytes per sample at the end of the forward (logits), on the last stage only."""
    output: float = 0.0
    """FLOPs per sample of the output layer, forward and backward, which is on a single stage of a pipeline."""
    exchanged: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Checkpointing → all-reduces of tensor parallelism per block and micro-batch, and bytes per sample of each; empty = none."""
    boundary: float = 0.0
    """Bytes per sample that a pipeline's stage sends to the next."""
    operators: Mapping[str, float] = field(default_factory=dict)
    """Checkpointing → operators that the host launches for a micro-batch, of all blocks: no step is faster. Empty = not known."""
    undivided: Mapping[str, float] = field(default_factory=dict)
    """Checkpointing → bytes per sample that elementwise operators of all blocks move, and tensor parallelism does not split."""
    states: tuple[float, float, float] = (2.0, 4.0, 12.0)
    """Bytes per parameter: weights, gradients, optimizer's states with the fp32 weights."""
    counted: Mapping[str, Mapping[int, tuple[float, float, float, float]]] = field(default_factory=dict)
    """Checkpointing → micro-batch → bytes besides the states, if counted by dry runs; used instead of `kept`: at the peak of a rank that
    shares nothing; before the optimizer's step, with whole weights and with gathered ones; and in the optimizer's step, for all weights."""
    buckets: float = 0.0
    """Bytes per parameter that DDP's buckets hold, where gradients are summed in them."""
    buckets_alone: bool = False
    """Is the model in DDP on a single rank, too, as in a launched run?"""
    broadcasts: int = 0
    """Parameter tensors that ZeRO-1 sends one by one, as torch's ZeroRedundancyOptimizer does after an all-reduce of all gradients;
    0 = ZeRO-1 as Megatron's distributed optimizer: gradients are reduced to their owners, and the new weights gathered at once."""
    whole_reduction: bool = False
    """Does ZeRO-1 reduce all gradients on every rank in one all-reduce, after the last backward, and gather new weights at once?"""
    slices: float = 0.0
    """Tensors of the model of which `whole_reduction` copies the slice of every rank back to its place, one by one, after the gather."""
    overlapped: bool = True
    """Are gradients reduced while the backward goes on, where weights are whole? Else after it."""
    clips: bool = True
    """Is the norm of all gradients clipped, as trainings of language models do?"""
    adding: float = 0.0
    """Bytes per parameter that operators of their own move to add the gradients of a micro-batch to those before, as in eager PyTorch. In
    Megatron the products that make them do so (gradient_accumulation_fusion), and what they read and write hides behind their computing."""
    poll: float = 0.0
    """Seconds that a stage of a pipeline sleeps until it looks again whether a message has arrived; 0 = it waits without sleeping."""
    polled: int = 2
    """Messages of a micro-batch between two stages, of both directions, for which they poll."""
    checked: bool = False
    """Does PyTorch compare what ranks call before each collective, as with TORCH_DISTRIBUTED_DEBUG=DETAIL?"""
    checked_in_node: bool = True
    """Also on a single node?"""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """Checkpointing → collectives of tensor parallelism per block and micro-batch; empty = those of `exchanged`."""
    tied: float = 0.0
    """Parameters of an embedding that is the output layer, too: the first and the last stage both have it."""
    tensors: Sequence[int] = (1,)
    """Numbers of ranks that can split a block."""
    stages: Sequence[int] = (1,)
    """Numbers of stages that get equal parts."""
    micro_batches: Sequence[int] = MICRO_BATCHES
    """Micro-batch sizes that are tried."""
    chunks: Sequence[int] = CHUNKS
    """Pieces of the layers on each stage that are tried."""
    precision: str = "amp_bf16"
    """As a RunSpec has it."""
    notes: tuple[str, ...] = ()
    """Caveats."""
    spec: Any = None
    """The RunSpec that was given, if any."""


def workload_of_transformer(
    model: Transformer,
    *,
    sequence: int | None,
    precision: str,
    fused_attention: bool,
    sequence_parallel: bool,
    gpus_per_node: int,
    gradient_bytes: float = 4,
    loss_parallel: bool = False,
) -> Workload:
    """The workload of a Transformer.

    Bytes kept per block: `s b h (34 + 5 a s/h)`, under tensor parallelism `s b h (34/t + …)` with sequence parallelism, else `s b h (10 +
    24/t + …)`; everything recomputed `2 s b h`. Source: Korthikanti et al. 2022, arXiv 2205.05198, table 2; fused attention keeps no scores
    but 4 a s b bytes of logsumexp. Weights, gradients and optimizer's states: 2 + 4 + 12 bytes with bf16 weights and fp32 gradients,
    4 + 4 + 8 in fp32; gradients of 2 bytes where they are summed in 16 bit. Source: docs.nvidia.com/megatron-core, "Distributed Optimizer".

    Raises:
        PlanError: a precision that is not known.
    """
    choice("precision", precision, ELEMENT, error=PlanError)
    model = model if sequence is None else replace(model, sequence=sequence)
    s, h, heads, wide = model.sequence, model.hidden, model.heads or max(1, model.hidden // 128), ELEMENT[precision] / 2
    unit = float(s * h)
    scores = 5.0 * heads * s * s * wide
    keeps, undivided = _kept(model)
    layer = {"none": keeps * unit * wide + (4.0 * heads * s if fused_attention else scores), "full": 2 * unit * wide}
    outside = {"none": 0.0 if sequence_parallel else undivided * unit * wide, "full": 0.0 if sequence_parallel else 2 * unit * wide}
    working = {"none": 0.0, "full": layer["none"]}
    if not fused_attention:  # useless with fused attention, which keeps no scores anyway
        layer["selective"], outside["selective"], working["selective"] = keeps * unit * wide, outside["none"], scores
    kinds = [kind for kind in CHECKPOINTINGS if kind in layer]
    exchanges = {kind: model.exchanges(kind) for kind in kinds}
    moved = {kind: 0.0 if sequence_parallel else model.layers * UNDIVIDED[kind] * unit * wide for kind in kinds}
    return Workload(
        name=f"transformer of {model.layers} × {model.hidden:,}, {units.count(model.parameters)} parameters, {s:,} tokens",
        parameters=model.parameters,
        layers=model.layers,
        shared=float(model.vocabulary + (0 if model.gated else s)) * h,
        flops=model.flops(1),
        computed={kind: model.flops(1, kind) for kind in kinds},
        kept={kind: model.layers * layer[kind] for kind in kinds},
        whole={kind: model.layers * outside[kind] for kind in kinds},
        working={kind: working[kind] for kind in kinds},
        head=(LOGITS + (2 if precision == "fp32" else 0)) * float(s) * model.vocabulary,
        split_head=loss_parallel,
        output=6.0 * model.vocabulary * unit,
        exchanged={kind: (exchanges[kind], unit * ELEMENT[precision]) for kind in kinds},
        # under sequence parallelism pairs, and in the backward inputs are gathered again
        collectives={kind: 2 * exchanges[kind] + 2 if sequence_parallel else exchanges[kind] for kind in kinds},
        boundary=model.boundary_bytes(1, ELEMENT[precision]),
        operators={kind: float(model.layers * OPERATORS[model.gated][kind]) for kind in kinds},
        undivided=moved,
        tied=float(model.vocabulary) * h if model.tied else 0.0,
        states=(4.0, 4.0, 8.0) if precision == "fp32" else (2.0, float(gradient_bytes), 12.0),
        tensors=[t for t in _divisors(gpus_per_node) if heads % t == 0],
        stages=sorted({*_divisors(model.layers), *(2**power for power in range(12) if 2**power <= model.layers)}),
        precision=precision,
    )


def _kept(model: Transformer) -> tuple[float, float]:
    """Bytes per token and width that a block keeps in 16 bit besides scores, and those that tensor parallelism does not split.

    A GPT: 34 and 10 (the source). A gated one, counted in the same way without dropouts: inputs of both norms, of attention and of the
    feed-forward 8; queries and attention's output 4, keys and values 4 k/a; gate, its activation, the other factor and the product 8 f/h.
    """
    if not model.gated:
        return 11 + 4 * (model.grouped - 1) + 3 + 16 * model.width / (4 * model.hidden) + 4, 10.0
    return 12 + 4 * model.grouped + 8 * model.width / model.hidden, 8.0


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


MEGATRON = (
    "zero1 is Megatron's distributed optimizer here, as published runs of such sizes have it: gradients are reduced to their owners, and "
    'new weights gathered. RunSpec(parallel="zero1") is torch\'s ZeroRedundancyOptimizer, which sends more; a Task or a RunSpec is planned '
    "with that"
)
"""Note on plans with Megatron's ZeRO-1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A training program whose code was read. Where its published versions differ, all of them are planned."""

    name: str
    source: str
    """Repository, commit and date of what was read."""
    zero1: str
    """Note on what its ZeRO-1 does."""
    loss_parallel: bool
    """Is the loss computed on split logits?"""
    sharings: tuple[str, ...] = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
    """What its ranks can share."""
    interleaves: bool = True
    """Can its pipelines be interleaved?"""
    whole_reduction: bool = False
    """As `Workload.whole_reduction`."""
    adding: float = 0.0
    """As `Workload.adding`, of 16-bit weights."""
    polls: tuple[float, ...] = (0.0,)
    """Version → `Workload.poll`."""
    polled: int = 2
    """As `Workload.polled`."""
    checks: tuple[bool, ...] = (False,)
    """Launch script → `Workload.checked`."""
    checked_in_node: bool = True
    """As `Workload.checked_in_node`."""

    def trains(self, workload: Workload) -> Workload:
        """The workload as this program trains it, in its version that waits least."""
        tensors = 6.0 * workload.layers + (2 if workload.tied else 3)  # of a block: qkv, output, gate and up, down, and two norms
        return replace(
            workload,
            broadcasts=0,
            whole_reduction=self.whole_reduction,
            slices=(float(workload.broadcasts) or tensors) if self.whole_reduction else 0.0,
            adding=workload.adding or self.adding,  # of a program they were counted
            chunks=workload.chunks if self.interleaves else (1,),
            polled=self.polled,
            checked_in_node=self.checked_in_node,
        )


TRAINERS = {
    trainer.name: trainer
    for trainer in (
        Trainer(
            name="megatron",
            source="docs.nvidia.com/megatron-core, Distributed Optimizer; github.com/NVIDIA/Megatron-LM, read in November 2026",
            zero1=MEGATRON,
            loss_parallel=True,
        ),
        Trainer(
            name="nanotron",
            source="github.com/huggingface/nanotron: trainer.py before 2025-06-23; p2p.py on nouamane/bench2 at 67c5ebb6, 2024-12-27; "
            "examples/mamba/run_multinode.sh at 77f54c10 and slurm_launcher.py at ef206a3a, March 2025; features by README.md at 042dfeaa",
            zero1="zero1 is nanotron's here: all gradients are reduced on every rank after the last backward, and each rank's part of "
            "every new weight is copied to its place, one by one; a RunSpec does not have it",
            loss_parallel=True,
            sharings=("ddp", "zero1"),
            interleaves=False,
            whole_reduction=True,
            adding=10.0,  # of bf16 gradients, and those before in fp32, read and written
            polls=(0.0, 0.1),
            polled=6,  # two shapes and sizes of each tensor: activations and their mask forward, their gradients back
            checks=(False, True),
            checked_in_node=False,
        ),
    )
}
"""Name → a training program whose code was read. Versions of nanotron's `_send_meta` and `_recv_meta` sleep 0.1 s between two looks for a
message; scripts of its authors for several nodes set TORCH_DISTRIBUTED_DEBUG=DETAIL."""


def at_level(span: Interval, level: Any) -> Any:
    """The value at places in a range: -1 = its low end, 0 = the middle, 1 = the high end; in proportion beyond and between.

    >>> at_level(Interval(low=0.25, mid=0.5, high=0.8), np.array([-2, -1, 0, 1])).tolist()
    [0.125, 0.25, 0.5, 0.8]
    """
    return span.mid * np.where(np.asarray(level) > 0, span.high / span.mid, span.low / span.mid) ** np.abs(level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version of a training program, with the ranges of what is not known of it."""

    workload: Workload
    """As it is trained."""
    efficiency: Interval
    """Share of the peak while a GPU computes."""
    message: Interval = MESSAGE
    """Seconds of a small message between hosts."""
    host: Interval = LAUNCH
    """Seconds in which the host launches an operator."""

    def at(self, kernels: float, messages: float, host: Interval, layouts: int = 1) -> "Version":
        """At places in the ranges: -1 = the fast end, 0 = the middle, 1 = the slow end; in proportion beyond and between. Other layouts
        than those whose steps were measured may be as far from it as OTHER_LAYOUT, in all of them, but reach no more than the peak.

        Args:
            kernels: place of the kernels.
            messages: place of the messages between hosts.
            host: places of the launches by the host that the steps leave possible, and the likeliest.
            layouts: of which a step was measured. Two layouts differ by twice the variance of one, and one from the mean of n by 1 + 1 / n
                of it.

        >>> version, middle = Version(workload=None, efficiency=Interval(low=0.25, mid=0.5, high=0.8)), Interval(low=0, mid=0, high=0)
        >>> [version.at(level, 0, middle).efficiency.mid for level in (-1, 0, 1, 2)]
        [0.8, 0.5, 0.25, 0.125]
        """
        spread = OTHER_LAYOUT.of(lambda ratio: ratio ** math.sqrt((1 + 1 / layouts) / 2))
        share = float(at_level(self.efficiency, -kernels))
        slower, faster = (
            math.log(getattr(spread, end)) / math.log(getattr(self.efficiency, end) / self.efficiency.mid) for end in ("low", "high")
        )
        low, mid, high = (float(at_level(self.message, level)) for level in (messages - faster, messages, messages + slower))
        least, usual, most = (float(at_level(self.host, place)) for place in (host.low, host.mid, host.high))
        return replace(
            self,
            efficiency=spread.of(lambda ratio: min(1.0, ratio * share)),
            message=Interval(low=low, mid=mid, high=high),
            host=Interval(low=min(least, spread.low * usual), mid=usual, high=max(most, spread.high * usual)),
        )

    @property
    def words(self) -> str:
        """How it waits."""
        words = [f"polling every {units.seconds(self.workload.poll)}"] * bool(self.workload.poll)
        words += ["checked collectives"] * self.workload.checked
        return " and ".join(words) or "without waits"


def versions_of(workload: Workload, trainer: Trainer | None, poll: Any, checked: Any, efficiency: Interval) -> tuple[Version, ...]:
    """The workload as each version of a trainer trains it, the one that waits least first.

    Args:
        workload: as the trainer trains it.
        trainer: None = one that does not wait.
        poll: seconds that stages sleep between two looks for a message; None = as its versions do.
        checked: are collectives checked? None = as its versions are launched.
        efficiency: share of the peak while a GPU computes.

    Raises:
        PlanError: wrong seconds, or not a bool.
    """
    if checked is not None and not isinstance(checked, bool):
        raise PlanError(f"checked_collectives={checked!r:.60}: allowed are True, False, and None for what versions of the trainer do")
    if poll is not None:
        what, also = "seconds between two looks for a message", ", such as 0.1"
        poll = real_number("poll_interval", poll, least=0, what=what, also=also, error=PlanError)
    polls: Sequence[float] = (trainer.polls if trainer else (0.0,)) if poll is None else (poll,)
    checks: Sequence[bool] = (trainer.checks if trainer else (False,)) if checked is None else (checked,)
    named = workload if checked is None else replace(workload, checked_in_node=True)
    versions = (replace(named, poll=each, checked=check) for each in polls for check in checks)
    return tuple(Version(workload=version, efficiency=efficiency) for version in versions)


def trainer_named(name: Any) -> Trainer | None:
    """The trainer of that name; None = none.

    Raises:
        PlanError: an unknown name.
    """
    if name is None:
        return None
    choice("trainer", name, TRAINERS, error=PlanError)
    return TRAINERS[name]
