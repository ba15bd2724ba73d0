"""Holds `wb.estimate_time` against published throughputs of training steps: median and worst error, intervals that hold, refusals.

Each row was published for 8 GPUs of one node; predicted is the step by datasheets alone, and once more after one row of the same GPU
had set the level (`calibrate`), which is the largest model's at 2,048 tokens. Nothing is fitted to these rows. Beside it the roofline
by hand: 6 FLOPs per parameter and token, and attention's, at half the peak.

Run: python benchmarks/estimate_time.py
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import workbench as wb
from workbench.cluster.analysis.step_time import EstimateTimeError, Operator, StepTime
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


def loss(model: Any, batch: Any) -> Any:
    """Of the next token."""
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@cache
def counted(model: str, sequence: int, micro_batch: int, device: str) -> StepTime:
    """One micro-batch and the update, of one rank. One and two layers are run, and all others follow."""
    width, layers, heads = SIZES[model]
    tokens = torch.zeros(micro_batch, sequence, dtype=torch.long, device="meta")
    options: dict[str, Any] = {"loss": loss, "optimizer": "adamw(fused=True)", "device": device, "precision": "amp_bf16"}
    few, more = (wb.estimate_time(lambda depth=depth: Mpt(width, depth, heads, sequence), (tokens, tokens), **options) for depth in (1, 2))
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
    """The row's step: as many micro-batches, and the part of the update that one of 8 shards has; gathers are hidden inside a node."""
    one = counted(row.model, row.sequence, row.micro_batch, row.device)
    operators = tuple(
        replace(each, bytes=each.bytes / GPUS) if each.phase == "update" else replace(each, calls=each.calls * row.accumulation)
        for each in one.operators
    )
    samples = row.micro_batch * row.accumulation
    return replace(one, operators=operators, samples=samples, title=f"MPT {row.model}, {row.sequence} tokens, {row.micro_batch} at once")


def by_hand(row: Row) -> float:
    """Seconds of a roofline by hand: 6 N + 12 l h s FLOPs per token at half of the dense peak."""
    width, layers, _ = SIZES[row.model]
    parameters = 12 * layers * width**2 + VOCABULARY * width
    flops = (6 * parameters + 12 * layers * width * row.sequence) * row.sequence * row.micro_batch * row.accumulation
    return flops / (Device.named(row.device).flops_per_sec["bf16"] / 2)


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
    shown, errors, calibrated, hands, held, held_calibrated = [], [], [], [], 0, 0
    levels = {
        device: predicted(level(device)).calibrate(level(device).seconds).calibration for device in dict.fromkeys(r.device for r in rows())
    }
    every = list(rows())
    for row in every:
        bare = predicted(row)
        known = replace(bare, calibration=levels[row.device])
        error, after, hand = (seconds / row.seconds - 1 for seconds in (bare.seconds.mid, known.seconds.mid, by_hand(row)))
        errors.append(abs(error))
        hands.append(abs(hand))
        held += row.seconds in bare.seconds
        if row != level(row.device):
            calibrated.append(abs(after))
            held_calibrated += row.seconds in known.seconds
        shown.append([row.device, row.model, f"{row.sequence:,}", f"{row.micro_batch} × {row.accumulation}", f"{row.seconds:.3f} s"])
        shown[-1] += [f"{bare.seconds.mid:.3f} s ({bare.seconds.low:.3f} … {bare.seconds.high:.3f})"]
        shown[-1] += [f"{100 * each:+.0f} %" for each in (error, after, hand)]
    columns = ("GPU", "model", "tokens", "batch", "published", "predicted", "error", "calibrated", "by hand")
    print(display.Table(columns=columns, rows=shown))
    for name, list_, inside in (("datasheets", errors, held), ("calibrated", calibrated, held_calibrated), ("by hand", hands, None)):
        text = f"{name}: median error {100 * statistics.median(list_):.1f} %, worst {100 * max(list_):.0f} %"
        print(text + (f", inside the interval {inside} of {len(list_)}" if inside is not None else ""))
    for name, message in refusals():
        print(f"refused, {name}: {message[:150]}")


if __name__ == "__main__":
    main()
