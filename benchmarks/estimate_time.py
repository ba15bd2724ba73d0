"""Holds `wb.estimate_time` against published throughputs of training steps: median and worst error, intervals that hold, refusals.

Rows of llm-foundry were published for 8 GPUs of one node; predicted is the step by datasheets alone, and once more after one row of the
same GPU had set the level (`calibrate`), which is the largest model's at 2,048 tokens. Nothing is fitted to these rows. Rows of nanoGPT and
torchtitan came later and changed nothing: by datasheets, and at the level of another program's row on such a GPU. So did llm-foundry's
on 16 to 512 GPUs, with their exchange and share of the peak (MFU). Beside it the roofline by hand: 6 FLOPs per parameter and token, and
attention's, at half the peak.

Run: python benchmarks/estimate_time.py
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import workbench as wb
from workbench.cluster.analysis.cluster import Cluster
from workbench.cluster.analysis.collective_call import CollectiveCall
from workbench.cluster.analysis.operator_time import Operator
from workbench.cluster.analysis.plan.layouts import SHARINGS, Layouts
from workbench.cluster.analysis.plan.ranges import LAUNCH, LINKS, efficiency_of
from workbench.cluster.analysis.plan.timing import HardwareRates
from workbench.cluster.analysis.plan.timing import seconds as plan_seconds
from workbench.cluster.analysis.plan.workload import workload_of_transformer
from workbench.cluster.analysis.step_time import EstimateTimeError, StepTime
from workbench.cluster.analysis.traffic import Traffic
from workbench.cluster.analysis.transformer import Transformer
from workbench.cluster.count_collectives import mark_waited
from workbench.core.device import Device
from workbench.core.display import table as display

SOURCE = "github.com/mosaicml/llm-foundry at 8c8dd48, scripts/train/benchmarking/README.md (MPT, FSDP full_shard, bf16, no checkpointing)"
SIZES = {"125M": (768, 12, 12), "350M": (1024, 24, 16), "760M": (1536, 24, 12), "1B": (2048, 24, 16), "3B": (2560, 32, 32)}
"""Model → width, layers, heads (llm-foundry, scripts/train/yamls/pretrain)."""
VOCABULARY = 50_368
GPUS = 8
ROWS = {
    ("H100-SXM", "3B"): "8192.3.6=16578 4096.5.6=20964 1024.20.6=27046 512.40.6=27965",
    ("H100-SXM", "1B"): "8192.3.4=29157 4096.7.4=38535 2048.14.1=45455 1024.18.4=48910 512.56.4=52275",
    ("H100-SXM", "760M"): "8192.6.2=41825 4096.12.2=55459 2048.24.2=63147 1024.48.2=78581 512.96.2=83749",
    ("A100-80GB", "3B"): "8192.3.6=7695 4096.5.6=9457 2048.10.2=10811 1024.20.6=11580 512.40.6=12127",
    ("A100-80GB", "1B"): "8192.3.4=13814 4096.7.4=17807 2048.14.4=20513 1024.18.4=22112 512.56.4=23148",
    ("A100-80GB", "760M"): "8192.6.2=20933 4096.12.2=27351 2048.24.2=32434 1024.48.2=29765 512.96.2=29446",
    ("A100-80GB", "350M"): "8192.8.2=36569 4096.16.2=49555 2048.32.2=58782 1024.64.2=64813 512.128.2=69330",
    ("A100-80GB", "125M"): "8192.8.2=90392 4096.16.2=118396 2048.40.2=142830 2048.32.2=141737 1024.64.2=156468 512.128.2=165681",
    ("A100-40GB", "3B"): "8192.1.8=7149 4096.2.8=8777 2048.5.8=10065 1024.10.8=10731 512.20.8=11324",
    ("A100-40GB", "1B"): "8192.2.8=13474 4096.4.8=16856 2048.8.8=19271 1024.16.8=20959 512.32.8=21782",
    ("A100-40GB", "760M"): "8192.3.4=20106 4096.6.4=25863 2048.12.4=30173 1024.24.4=33422 512.48.4=34938",
    ("A100-40GB", "350M"): "8192.4.4=34933 4096.8.4=46833 2048.16.4=55995 1024.32.4=62523 512.64.4=66284",
    ("A100-40GB", "125M"): "8192.5.3=86858 4096.13.3=115162 2048.26.3=136334 1024.52.3=148289 512.104.3=156735",
}
"""(GPU, model) → tokens.micro_batch.accumulation = tokens per second of each GPU. The figures are facts, keyed in again from SOURCE."""
GPT2, LLAMA = "GPT-2 124M, nanoGPT", "Llama 3.1 8B, torchtitan"
LATER = {
    ("A100-40GB", GPT2, 1): {"1024.8.1": 8192 / 0.25},
    ("H100-SXM", LLAMA, 8): {"8192.2.1": 5762},
    ("H100-SXM", LLAMA, 128): {"8192.2.1": 5605},
}
"""(GPU, model, GPUs) → the same, of rows that no rule has seen.

nanoGPT: "from ~250ms / iter" of README.md at 5a725d9 (2022-12-29), eager, one A100-40GB; batch, model and options by its bench.py.
torchtitan: benchmarks/llama3_h100_202412_torchtitan.md at b5bcd76, tables 1 and 3, eager FSDP2 in bf16, with the selective checkpointing
of its llama3_8b.toml at 9dec370. Its H100 have 96 GB at 2.4 TB/s and draw at most 500 W, so that "the actual peak TFLOPs number is between
SXM and NVL"; predicted is an SXM of that bandwidth. Left out, as we refuse them or cannot ask for them: compiled steps and fp8. Left out
of nanoGPT: issue 110 (8 A100, 562 ms, compiled), and times without a GPU, a batch or a version.
"""
CLUSTERS = {
    "H100-SXM": Cluster.named("DGX-H100"),
    "A100-40GB": replace(Cluster.named("DGX-A100"), name="A100-40GB, RoCE", device=Device.named("A100-40GB")),
}
"""GPU → where published_scaling.SCALE ran: A100 with 1,600 Gb/s per node by SOURCE, like a DGX-A100; of H100, 400 Gb/s each are assumed."""
BANDWIDTH = {LLAMA: 2.4e12}
"""Model → bytes per second of the memory of the GPUs it ran on, where the datasheet has another figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published step."""

    device: str
    model: str
    sequence: int
    micro_batch: int
    accumulation: int
    published: float
    """Tokens per second of a GPU."""
    gpus: int = GPUS
    mfu: float | None = None
    """Published share of the peak, of SCALE only."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.sequence * self.micro_batch * self.accumulation / self.published


def rows() -> Iterator[Row]:
    """All of ROWS."""
    for (device, model), text in ROWS.items():
        for word in text.split():
            sizes, value = word.split("=")
            sequence, micro, accumulation = map(int, sizes.split("."))
            yield Row(device=device, model=model, sequence=sequence, micro_batch=micro, accumulation=accumulation, published=float(value))


def later() -> Iterator[Row]:
    """All of LATER."""
    for (device, model, gpus), some in LATER.items():
        for sizes, value in some.items():
            sequence, micro, accumulation = map(int, sizes.split("."))
            yield Row(
                device=device, model=model, sequence=sequence, micro_batch=micro, accumulation=accumulation, published=value, gpus=gpus
            )


def at_scale() -> Iterator[Row]:
    """All of SCALE."""
    from published_scaling import CURVES, SCALE

    rates = {curve.name: curve.per_gpu for curve in CURVES}
    for curve, some in SCALE.items():
        gpu, model = curve.split(", ")[1:3]
        for gpus, (micro, accumulation, share) in some.items():
            sizes = {"sequence": 2048, "micro_batch": micro, "accumulation": accumulation, "gpus": gpus}
            device = "H100-SXM" if gpu == "H100" else gpu
            yield Row(device=device, model=model, **sizes, published=rates[curve][gpus], mfu=share / 100)


class Block(nn.Module):
    """A block of MPT: no biases, fused attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the feed-forward."""
        batch, length, width = x.shape
        parts = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.into(self.norms[0](x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return fed


class Mpt(nn.Module):
    """MPT with tied embeddings."""

    def __init__(self, width: int, layers: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.words.weight)


class PlainBlock(nn.Module):
    """A block of nanoGPT in 2022: attention written out, biases, dropout of 0, a fused GELU."""

    def __init__(self, width: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drops = nn.ModuleList(nn.Dropout(0.0) for _ in range(3))
        self.register_buffer("seen", torch.tril(torch.ones(sequence, sequence)).view(1, 1, sequence, sequence))

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the feed-forward."""
        batch, length, width = x.shape
        query, key, value = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in self.into(self.norms[0](x)).split(width, 2))
        scores = query @ key.transpose(-2, -1) * (width / self.heads) ** -0.5
        scores = functional.softmax(scores.masked_fill(self.seen == 0, float("-inf")), dim=-1)
        mixed = (self.drops[0](scores) @ value).transpose(1, 2).contiguous().view(batch, length, width)
        x = x + self.drops[1](self.out(mixed))
        fed: Tensor = x + self.drops[2](self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh")))
        return fed


class Gpt2(nn.Module):
    """GPT-2 of 124M parameters as nanoGPT had it in 2022, with an output layer of its own."""

    def __init__(self, layers: int, sequence: int) -> None:
        super().__init__()
        self.words, self.places, self.drop = nn.Embedding(50_257, 768), nn.Embedding(sequence, 768), nn.Dropout(0.0)
        self.blocks = nn.ModuleList(PlainBlock(768, 12, sequence) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 50_257, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.drop(self.words(tokens) + self.places.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class RmsNorm(nn.Module):
    """As torchtitan writes it out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """In fp32."""
        wide = x.float()
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class GatedBlock(nn.Module):
    """A block of Llama 3 8B: grouped queries, rotated by complex numbers in fp32, a gated feed-forward; every second product recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RmsNorm(4096) for _ in range(2))
        self.query, self.key, self.value = (nn.Linear(4096, wide, bias=False) for wide in (4096, 1024, 1024))
        self.out, self.gate, self.up = (nn.Linear(4096, wide, bias=False) for wide in (4096, 14_336, 14_336))
        self.down = nn.Linear(14_336, 4096, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        """Attention."""
        batch, length, _ = x.shape
        query, key, value = (layer(x).view(batch, length, -1, 128) for layer in (self.query, self.key, self.value))
        angles = torch.ones(length, 1, 64, dtype=torch.complex64, device=x.device)
        query, key = (
            torch.view_as_real(torch.view_as_complex(part.float().reshape(*part.shape[:-1], -1, 2)) * angles).flatten(3).type_as(x)
            for part in (query, key)
        )
        key, value = (part[:, :, :, None].expand(-1, -1, -1, 4, -1).reshape(batch, length, 32, 128) for part in (key, value))
        mixed = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (query, key, value)), is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).contiguous().view(batch, length, -1))
        return out

    def whole(self, x: Tensor) -> Tensor:
        """Attention, then the feed-forward."""
        x = x + self.attend(self.norms[0](x))
        normed = self.norms[1](x)
        fed: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return fed

    def forward(self, x: Tensor) -> Tensor:
        """The same, of which only attention's and every other product's output are kept."""
        kept: Tensor = checkpoint(self.whole, x, use_reentrant=False, preserve_rng_state=False, context_fn=every_second_product)
        return kept


def every_second_product() -> Any:
    """Contexts of a checkpoint as torchtitan's selective_ac_option = "op" makes them."""
    counts = {False: 0, True: 0}
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def policy(ctx: Any, function: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if function in products:
            counts[ctx.is_recompute] += 1
            keep = counts[ctx.is_recompute] % 2 == 1
        else:
            keep = "scaled_dot_product" in str(function)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    """Llama 3.1 8B of so many layers, in bf16 as FSDP2 has it while it computes."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(128_256, 4096), nn.Linear(4096, 128_256, bias=False)
        self.blocks, self.norm = nn.ModuleList(GatedBlock() for _ in range(layers)), RmsNorm(4096)
        self.bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, in fp32 for the loss."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)).float()
        return logits


def made(model: str, layers: int, sequence: int) -> nn.Module:
    """A model of so many layers."""
    if model == LLAMA:
        return Llama(layers)
    if model == GPT2:
        return Gpt2(layers, sequence)
    width, _, heads = SIZES[model]
    return Mpt(width, layers, heads, sequence)


def loss(model: Any, batch: Any) -> Any:
    """Of the next token."""
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@cache
def counted(model: str, sequence: int, micro_batch: int, device: str) -> StepTime:
    """One micro-batch and the update, of one rank. One and two layers are run, and all others follow."""
    layers = {GPT2: 12, LLAMA: 32}.get(model) or SIZES[model][1]
    tokens = torch.zeros(micro_batch, sequence, dtype=torch.long, device="meta")
    known = Device.named(device)
    known = replace(known, bandwidth=BANDWIDTH.get(model, known.bandwidth))
    options: dict[str, Any] = {"loss": loss, "optimizer": "adamw(fused=True)", "device": known, "precision": "amp_bf16"}
    options |= {GPT2: {"optimizer": "adamw"}, LLAMA: {"precision": "fp32"}}.get(model, {})
    few, more = (wb.estimate_time(lambda depth=depth: made(model, depth, sequence), (tokens, tokens), **options) for depth in (1, 2))
    calls: dict[Operator, list[float]] = {}
    moved = [0.0, 0.0]
    for place, step in enumerate((few, more)):
        for one in step.operators:
            if one.phase == "update":
                moved[place] += one.bytes * one.calls
            else:
                calls.setdefault(replace(one, calls=1.0), [0.0, 0.0])[place] += one.calls
    operators = [replace(one, calls=first + (layers - 1) * (second - first)) for one, (first, second) in calls.items()]
    update = Operator(
        name="update", phase="update", dtype="fp32", flops=0.0, bytes=moved[0] + (layers - 1) * (moved[1] - moved[0]), calls=1.0
    )
    return replace(few, operators=(*(one for one in operators if one.calls > 0), update))


def predicted(row: Row) -> StepTime:
    """The row's step: as many micro-batches, and one shard's part of the update; only rows of `at_scale` have an exchange."""
    one = counted(row.model, row.sequence, row.micro_batch, row.device)
    operators = tuple(
        replace(each, bytes=each.bytes / row.gpus) if each.phase == "update" else replace(each, calls=each.calls * row.accumulation)
        for each in one.operators
    )
    samples = row.micro_batch * row.accumulation
    step = replace(one, operators=operators, samples=samples, title=f"{row.model}, {row.sequence} tokens, {row.micro_batch} at once")
    if row.mfu is None:
        return step
    cluster = CLUSTERS[row.device]
    sent = Traffic(calls=tuple(exchange(row)), world_size=row.gpus, parameters=0).on(cluster)
    return replace(step, ranks=row.gpus, traffic=sent, links=LINKS).with_exposed()


def exchange(row: Row) -> list[CollectiveCall]:
    """FSDP's collectives: weights are gathered in bf16, twice but for the root, gradients reduced in fp32 (A100: bf16, "PURE")."""
    width, layers, _ = SIZES[row.model]
    root, block = (VOCABULARY + row.sequence) * width, 12 * width**2
    forward = [("all_gather", 2 * size, "forward") for size in (root, *[block] * layers)]
    wide = 4 if row.device == "H100-SXM" else 2
    backward = [(kind, size * block, "backward") for _ in range(layers) for kind, size in (("all_gather", 2), ("reduce_scatter", wide))]
    every = [
        (*each, micro) for micro in range(row.accumulation) for each in (*forward, *backward, ("reduce_scatter", wide * root, "backward"))
    ]
    known: dict[str, Any] = {"ranks": row.gpus, "axis": "shard"}
    return mark_waited([CollectiveCall(kind=kind, size=size, phase=phase, micro=micro, **known) for kind, size, phase, micro in every])


def mfu(row: Row, seconds: float) -> float:
    """Share of the dense peak as SOURCE counts it: 6 N + 12 l h s FLOPs per token, without recomputation."""
    width, layers, _ = SIZES[row.model]
    parameters = 12 * layers * width**2 + (VOCABULARY + row.sequence) * width
    flops = (6 * parameters + 12 * layers * width * row.sequence) * row.sequence * row.micro_batch * row.accumulation
    return flops / seconds / Device.named(row.device).flops_per_sec["bf16"]


def by_hand(row: Row) -> float:
    """Seconds of a roofline by hand: 6 N + 12 l h s FLOPs per token at half of the dense peak."""
    width, layers, _ = {GPT2: (768, 12, 12), LLAMA: (4096, 32, 32)}.get(row.model) or SIZES[row.model]
    parameters = 8.03e9 if row.model == LLAMA else 12 * layers * width**2 + VOCABULARY * width
    flops = (6 * parameters + 12 * layers * width * row.sequence) * row.sequence * row.micro_batch * row.accumulation
    return flops / (Device.named(row.device).flops_per_sec["bf16"] / 2)


def by_plan(row: Row) -> float:
    """Seconds by the closed forms of `wb.plan`, at the middle of its shares: FSDP over the GPUs of the row, everything kept."""
    cluster = Cluster.named({"H100-SXM": "DGX-H100", "A100-80GB": "DGX-A100", "A100-40GB": "AWS-p4d"}[row.device])
    gpt = {"layers": 12, "hidden": 768, "heads": 12, "vocabulary": 50_257, "tied": False}
    llama = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "feed_forward": 14_336, "vocabulary": 128_256}
    sizes: dict[str, Any] = {GPT2: gpt, LLAMA: {**llama, "gated": True, "tied": False}}.get(row.model, {})
    if not sizes:
        width, layers, heads = SIZES[row.model]
        sizes = {"layers": layers, "hidden": width, "heads": heads, "vocabulary": VOCABULARY}
    model = Transformer(**sizes, sequence=row.sequence)
    options: dict[str, Any] = {"sequence": None, "precision": "amp_bf16", "fused_attention": row.model != GPT2, "sequence_parallel": True}
    workload = workload_of_transformer(model, **options, gpus_per_node=8)
    shape = {"gpus": row.gpus, "data": row.gpus, "tensor": 1, "pipeline": 1, "chunks": 1, "micro_batch": row.micro_batch}
    shape |= {"accumulation": row.accumulation, "sharing": SHARINGS.index("fsdp"), "checkpointing": 0, "shard": row.gpus}
    layout = Layouts(**{name: np.array([value]) for name, value in (shape | {"inside": min(row.gpus, 8)}).items()})
    rates = HardwareRates.of(
        cluster, cluster.device.flops_per_sec["bf16"], efficiency_of(cluster.device, "amp_bf16").mid, LINKS.mid, LAUNCH.mid
    )
    return float(plan_seconds(workload, layout, rates, 8).total[0])


def level(device: str) -> Row:
    """The row that calibrates a GPU."""
    return next(row for row in rows() if (row.device, row.sequence) == (device, 2048))


def refusals() -> list[tuple[str, str]]:
    """What is refused, and the message."""
    row = level("A100-80GB")
    width, _, heads = SIZES[row.model]
    tokens = torch.zeros(1, 128, dtype=torch.long, device="meta")
    known: dict[str, Any] = {"loss": loss, "device": "A100-80GB"}
    cases = {
        "compiled, not measured": {"compile": "model"},
        "8 ranks without links": {"world_size": 8},
        "any GPU": {"device": "cuda"},
        "a CPU, not measured": {"device": "cpu"},
        "bf16 on a V100": {"device": "V100", "precision": "amp_bf16"},
        "more than the peak": {"measured": 1e-5},
    }
    found = []
    for name, options in cases.items():
        try:
            wb.estimate_time(lambda: Mpt(width, 2, heads, 128), (tokens, tokens), **{**known, **options})
            found.append((name, "NOT refused"))
        except EstimateTimeError as error:
            found.append((name, str(error)))
    return found


def main() -> None:
    """Print the table and its figures."""
    known = {device: predicted(level(device)).calibrate(level(device).seconds).calibration for device in {row.device for row in rows()}}
    shown: list[list[str]] = []
    every = list(rows())
    large, groups = list(at_scale()), {"llm-foundry": every, "nanoGPT and torchtitan": list(later()), "all": [*every, *later()]}
    groups |= {f"16 to 512 {gpu}": [row for row in large if row.device == gpu] for gpu in CLUSTERS} | {"llm-foundry, 16 to 512": large}
    for title, some in groups.items():
        errors, calibrated, hands, plans, held, held_calibrated = [], [], [], [], 0, 0
        for row in some:
            bare = predicted(row)
            after = replace(bare, calibration=known[row.device])
            error, then, hand = (seconds / row.seconds - 1 for seconds in (bare.seconds.mid, after.seconds.mid, by_hand(row)))
            errors.append(abs(error))
            hands.append(abs(hand))
            plans.append(abs(by_plan(row) / row.seconds - 1))
            held += row.seconds in bare.seconds
            if row != level(row.device):
                calibrated.append(abs(then))
                held_calibrated += row.seconds in after.seconds
            if title not in ("all", "llm-foundry, 16 to 512"):
                shown.append([row.device, row.model, str(row.gpus), f"{row.sequence:,}", f"{row.micro_batch} × {row.accumulation}"])
                shown[-1] += [f"{row.seconds:.3f} s", f"{bare.seconds.mid:.3f} s ({bare.seconds.low:.3f} … {bare.seconds.high:.3f})"]
                shown[-1] += [f"{100 * each:+.0f} %" for each in (error, then, hand)]
                shown[-1] += ["–"] * 2 if row.mfu is None else [f"{100 * each:.1f} %" for each in (row.mfu, mfu(row, bare.seconds.mid))]
        kinds = (
            ("datasheets", errors, held),
            ("calibrated", calibrated, held_calibrated),
            ("by hand", hands, None),
            ("wb.plan", plans, None),
        )
        for name, list_, inside in kinds:
            text = f"{title}, {name}: median error {100 * statistics.median(list_):.1f} %, worst {100 * max(list_):.0f} %"
            print(text + (f", inside the interval {inside} of {len(list_)}" if inside is not None else ""))
    columns = (
        "GPU",
        "model",
        "GPUs",
        "tokens",
        "batch",
        "published",
        "predicted",
        "error",
        "calibrated",
        "by hand",
        "MFU published",
        "ours",
    )
    print(display.Table(columns=columns, rows=shown))
    off = [mfu(row, row.seconds) - (row.mfu or 0.0) for row in large]
    points = [abs(mfu(row, predicted(row).seconds.mid) - (row.mfu or 0.0)) for row in large]
    print(f"MFU: published steps by our count differ by {100 * max(map(abs, off)):.2f} points from the published MFU at most; predicted by")
    print(f"{100 * statistics.median(points):.1f} in the median, {100 * max(points):.1f} at worst")
    first, second = (row for row in later() if row.model == LLAMA)
    told = replace(predicted(second), calibration=predicted(first).calibrate(first.seconds).calibration).seconds
    print(f"{LLAMA} on 128 at the level of 8: {told.mid:.3f} s ({told.low:.3f} … {told.high:.3f}), published {second.seconds:.3f} s")
    for name, message in refusals():
        print(f"refused, {name}: {message[:150]}")


if __name__ == "__main__":
    main()
