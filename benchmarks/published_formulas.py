"""Formulas that others have published for the memory and work of a training step, with their sources. None runs anything.

They are here to be compared with, and to check a fake run where they are known to hold. b batch, s sequence, h hidden, a heads, t tensor
parallel ranks, P parameters, N data parallel ranks.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from workbench.core import units
from workbench.core.display import table as display

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula(display.Shown):
    """What a formula gives: named terms in bytes, and where it holds."""

    title: str
    """What it is a formula of."""
    terms: dict[str, float]
    """Name → bytes."""
    source: str
    """Who says so."""
    validity: str
    """Where it holds, and what it leaves out."""

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.terms.values())

    @property
    def table(self) -> display.Table:
        """One row per term, then the sum."""
        rows = [[name, units.bytes_(held)] for name, held in self.terms.items()]
        note = f"{self.source}; {self.validity}"
        return display.Table(columns=("term", "memory"), rows=[*rows, ["sum", units.bytes_(self.total)]], title=self.title, note=note)

    def to_frame(self) -> Any:
        """A DataFrame with one row per term, in bytes."""
        return display.frame(({"term": name, "bytes": held} for name, held in self.terms.items()), columns=("term", "bytes"))


def korthikanti(
    *,
    batch: int,
    sequence: int,
    hidden: int,
    heads: int,
    layers: int = 1,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    fused_attention: bool = False,
) -> Formula:
    """Activations of transformer layers: `s b h (34 + 5 a s / h)` bytes each.

    Attention takes 11 sbh + 5 as²b, the MLP 19 sbh, the two layer norms 4 sbh. Under tensor parallelism sbh (10 + 24/t + 5as/(ht)), with
    sequence parallelism sbh (34/t + 5as/(ht)); selective recomputation, and fused attention, drop the term in as²b; full recomputation
    keeps the layer's input, 2 sbh.

    Args:
        batch: samples of a micro-batch.
        sequence: tokens of a sample.
        hidden: width.
        heads: of attention.
        layers: how many.
        tensor_parallel: ranks that share a layer.
        sequence_parallel: what tensor parallelism leaves whole is split along the sequence.
        recompute: "none", "selective" (the core of attention) or "full".
        fused_attention: attention that keeps no matrix of scores; its logsumexp (4 asb bytes) is not in the paper and counted apart.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, equations 2, 4 and 6,
    table 2.

    Raises:
        ValueError: a number below 1, no such recomputation, or sequence parallelism without tensor parallelism.
    """
    _positive(batch=batch, sequence=sequence, hidden=hidden, heads=heads, layers=layers, tensor_parallel=tensor_parallel)
    if recompute not in get_args(Recompute):
        raise ValueError(f"recompute={recompute!r}: one of {', '.join(map(repr, get_args(Recompute)))}")
    if sequence_parallel and tensor_parallel == 1:
        raise ValueError("sequence_parallel=True splits along the ranks of tensor parallelism: give tensor_parallel=2 or more")
    t, whole = tensor_parallel, tensor_parallel if sequence_parallel else 1
    unit = float(layers * sequence * batch * hidden)
    scores = 5.0 * layers * heads * sequence**2 * batch / t
    if recompute == "full":
        terms = {"inputs of the layers": 2 * unit}
    else:
        terms = {
            "attention": (8 / t + 3 / whole) * unit,
            "MLP": (16 / t + 3 / whole) * unit,
            "layer norms": 4 / whole * unit,
        }
        if fused_attention:
            terms["logsumexp"] = 4.0 * layers * heads * sequence * batch / t
        elif recompute == "none":
            terms["scores"] = scores
    return Formula(
        title=f"Activations of {layers} transformer layer{'s' if layers > 1 else ''}",
        terms=terms,
        source="Korthikanti et al. 2022, arXiv 2205.05198",
        validity="16-bit activations, GELU MLP of four times the width, three dropouts; embeddings, the last norm, the head and "
        "temporaries are left out",
    )


def zero(*, parameters: int, ranks: int = 1, stage: int = 0) -> Formula:
    """Weights, gradients and optimizer states under mixed-precision Adam: 2 P + 2 P + 12 P bytes, split by the stages of ZeRO.

    Args:
        parameters: of the model.
        ranks: data parallel ones.
        stage: 0 none, 1 splits the optimizer's states, 2 the gradients too, 3 the weights too.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054, figure 1.

    Raises:
        ValueError: a number below 1, or no such stage.
    """
    _positive(parameters=parameters, ranks=ranks)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage}: ZeRO has the stages 1, 2 and 3; 0 is without")
    terms = {
        "parameters": 2 * parameters / (ranks if stage >= 3 else 1),
        "gradients": 2 * parameters / (ranks if stage >= 2 else 1),
        "optimizer states": 12 * parameters / (ranks if stage >= 1 else 1),
    }
    return Formula(
        title=f"Model states, ZeRO stage {stage}, {ranks} rank{'s' if ranks > 1 else ''}",
        terms=terms,
        source="Rajbhandari et al. 2020, arXiv 1910.02054",
        validity="fp16 weights and gradients, fp32 master weights and two moments; no activations, buckets or temporaries. Stage 1 by "
        "whole parameters (torch) is bounded below by the largest one; stage 3 adds the layers that are gathered",
    )


def deepspeed(*, parameters: int, ranks: int = 1, stage: int = 2, largest_layer: int = 0, offload: bool = False) -> Formula:
    """What DeepSpeed's own estimators say of a GPU: stage 2 `4 P + 16 P / N`, stage 3 `4 · largest layer + 18 P / N`; offloaded less.

    Args:
        parameters: of the model.
        ranks: GPUs.
        stage: 2 or 3.
        largest_layer: parameters of the largest layer, for stage 3.
        offload: the optimizer's states (stage 2), and the weights too (stage 3), live on the CPU.

    Source: DeepSpeed documentation, "Memory Requirements" (docs/code-docs/source/memory.rst), `estimate_zero2_model_states_mem_needs`,
    `estimate_zero3_model_states_mem_needs`.

    Raises:
        ValueError: a number below 1, no such stage, or stage 3 without the largest layer.
    """
    _positive(parameters=parameters, ranks=ranks)
    if stage not in (2, 3):
        raise ValueError(f"stage={stage}: DeepSpeed estimates stages 2 and 3")
    if stage == 3 and largest_layer < 1:
        raise ValueError(f"largest_layer={largest_layer}: stage 3 gathers one layer at a time; give the parameters of the largest")
    terms: dict[str, float]
    if stage == 2:
        terms = {"weights": 2.0 * parameters} if offload else {"weights and gradients": 4.0 * parameters, "split": 16 * parameters / ranks}
    else:
        terms = {"largest layer": 4.0 * largest_layer}
        if not offload:
            terms["split"] = 18 * parameters / ranks
    return Formula(
        title=f"DeepSpeed's estimate of stage {stage}{' with offload' if offload else ''}, {ranks} GPU{'s' if ranks > 1 else ''}",
        terms=terms,
        source="DeepSpeed, memory.rst",
        validity="model states under mixed-precision Adam; no activations, buffers of communication or fragmentation",
    )


def accelerate(*, parameters: int, bytes_per_parameter: int = 4) -> Formula:
    """`accelerate estimate-memory`: training with Adam takes four times the bytes of the weights.

    Args:
        parameters: of the model.
        bytes_per_parameter: of its number format; 4 is fp32.

    Source: Hugging Face accelerate documentation, "Model memory estimator".

    Raises:
        ValueError: a number below 1.
    """
    _positive(parameters=parameters, bytes_per_parameter=bytes_per_parameter)
    weights = float(parameters * bytes_per_parameter)
    return Formula(
        title="accelerate's estimate of training with Adam",
        terms={"weights": weights, "gradients": weights, "optimizer states": 2 * weights},
        source="accelerate estimate-memory",
        validity="meant for loading the weights, within a few percent; neither batch nor sequence is in it, so no activations are",
    )


def _positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name}={value}: a whole number from 1 on")
