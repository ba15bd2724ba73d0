"""Published seconds per iteration of LLaMA models under every layout of a grid, and which layouts ran out of memory; those of a larger
search by another trainer.

The figures are facts, keyed in again.
Source of GRIDS: Hagemann, Weinbach, Dobler, Schall and de Melo 2023, Efficient Parallelization Layouts for Large-Scale Distributed Model
Training, arXiv 2311.05610; tables of all runs at
github.com/Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-layouts, commit e13c2cb.
A100 of 80 GB, 8 in a node, ZeRO-1, 1F1B, bf16, a vocabulary of 128,000. Of runs that differ in the kernels only, the fastest with
FlashAttention-2 counts; runs that failed for other reasons are left out.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from workbench.cluster.analysis.plan.layouts import SHARINGS, Layouts
from workbench.cluster.analysis.plan.workload import TRAINERS, Workload, workload_of_transformer
from workbench.cluster.analysis.transformer import Transformer

SIZES = {"13B": (40, 5120, 40, 13824), "30B": (60, 6656, 52, 17920), "65B": (80, 8192, 64, 22016)}
"""Model → layers, width, heads (Touvron et al. 2023, LLaMA, table 2), and width of the feed-forward (as in its published checkpoints)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One model on so many GPUs."""

    model: str
    sequence: int
    gpus: int
    batch: int
    """Sequences per iteration: 4 million tokens."""
    sequence_parallel: bool
    text: str
    """tensor.pipeline.micro_batch, n or f (nothing or every layer recomputed) = seconds, or - where memory ran out."""

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.model}, {self.sequence // 1024}k tokens, {self.gpus} GPUs" + (
            ", sequence parallel" if self.sequence_parallel else ""
        )

    @property
    def seconds(self) -> Mapping[tuple[int, int, int, str], float]:
        """(tensor, pipeline, micro_batch, checkpointing) → seconds; infinite where memory ran out."""
        found = {}
        for word in self.text.split():
            layout, value = word.split("=")
            tensor, pipeline, micro = (int(part) for part in layout[:-1].split("."))
            kind = "none" if layout[-1] == "n" else "full"
            found[tensor, pipeline, micro, kind] = math.inf if value == "-" else float(value)
        return found


GRIDS = (
    Grid(
        model="13B",
        sequence=2048,
        gpus=64,
        batch=2048,
        sequence_parallel=False,
        text="1.1.1f=37.51 1.1.1n=26.54 1.1.2f=36.69 1.1.2n=- 1.1.4f=36.66 1.1.4n=- 1.1.8n=- 1.2.1f=44.13 1.2.1n=31.06 1.2.2f=47.37 "
        "1.2.2n=33.11 1.2.4f=55.61 1.2.4n=- 1.2.8f=72.82 1.2.8n=- 2.1.1f=47.12 2.1.1n=31.29 2.1.2f=44.45 2.1.2n=29.70 2.1.4f=44.10 "
        "2.1.4n=- 2.1.8f=43.24 2.1.8n=- 2.2.1n=34.84 2.2.2f=53.57 2.2.2n=35.05 2.2.4f=56.61 2.2.4n=37.57 2.2.8f=65.47 2.2.8n=- ",
    ),
    Grid(
        model="13B",
        sequence=8192,
        gpus=128,
        batch=512,
        sequence_parallel=False,
        text="1.1.1f=28.15 1.1.1n=- 1.1.2f=- 1.1.2n=- 1.1.4f=- 1.1.4n=- 1.2.1f=24.62 1.2.1n=- 1.2.2f=27.53 1.2.2n=- 1.2.4f=- 1.2.4n=- "
        "1.4.1f=26.29 1.4.1n=- 1.4.2f=29.08 1.4.2n=- 1.4.4f=- 1.4.4n=- 2.1.1f=26.63 2.1.1n=- 2.1.2f=- 2.1.2n=- 2.1.4f=- 2.1.4n=- "
        "2.2.1f=27.42 2.2.1n=18.41 2.2.2f=29.19 2.2.2n=- 2.2.4f=- 2.2.4n=- 2.4.1f=28.08 2.4.1n=19.32 2.4.2f=30.08 2.4.2n=- 2.4.4f=- "
        "2.4.4n=- 4.1.1f=32.57 4.1.1n=21.36 4.1.2f=32.13 4.1.2n=- 4.1.4f=- 4.1.4n=- 4.2.1f=34.76 4.2.1n=21.94 4.2.2f=34.64 4.2.2n=- "
        "4.2.4f=- 4.2.4n=- 4.4.1f=36.71 4.4.1n=23.46 4.4.2f=36.07 4.4.2n=23.78 4.4.4f=- 4.4.4n=- ",
    ),
    Grid(
        model="30B",
        sequence=8192,
        gpus=128,
        batch=512,
        sequence_parallel=False,
        text="2.2.1f=62.99 2.2.1n=- 2.2.2f=- 2.2.2n=- 2.2.4f=- 2.2.4n=- 2.4.1f=62.84 2.4.1n=- 2.4.2f=66.71 2.4.2n=- 2.4.4f=- 2.4.4n=- "
        "2.8.1f=63.99 2.8.1n=- 2.8.2f=68.99 2.8.2n=- 2.8.4f=- 2.8.4n=- 2.16.1f=66.69 2.16.1n=- 2.16.2f=71.81 2.16.2n=- 2.16.4f=- "
        "2.16.4n=- 4.2.1f=72.42 4.2.1n=- 4.2.2f=73.33 4.2.2n=- 4.2.4f=- 4.2.4n=- 4.4.1f=75.53 4.4.1n=49.43 4.4.2f=76.53 4.4.2n=- "
        "4.4.4f=- 4.4.4n=- 4.8.1f=77.86 4.8.1n=50.23 4.8.2f=79.74 4.8.2n=- 4.8.4f=- 4.8.4n=- 4.16.1f=82.62 4.16.1n=54.78 "
        "4.16.2f=85.34 4.16.2n=- 4.16.4f=- 4.16.4n=- ",
    ),
    Grid(
        model="30B",
        sequence=2048,
        gpus=256,
        batch=2048,
        sequence_parallel=False,
        text="1.1.1f=- 1.1.1n=- 1.1.2f=- 1.1.2n=- 1.1.4f=- 1.1.4n=- 1.2.1f=35.07 1.2.1n=- 1.2.2f=37.76 1.2.2n=- 1.2.4f=- 1.2.4n=- "
        "1.4.1f=29.08 1.4.1n=24.00 1.4.2f=29.76 1.4.2n=- 1.4.4f=34.22 1.4.4n=- 2.1.1f=39.70 2.1.1n=- 2.1.2f=- 2.1.2n=- 2.1.4f=- "
        "2.1.4n=- 2.2.1f=31.94 2.2.1n=28.34 2.2.2f=32.27 2.2.2n=- 2.2.4f=34.45 2.2.4n=- 2.4.1f=31.81 2.4.1n=22.67 2.4.2f=31.13 "
        "2.4.2n=24.26 2.4.4f=33.70 2.4.4n=- 4.1.1f=44.09 4.1.1n=31.77 4.1.2f=42.13 4.1.2n=35.32 4.1.4f=43.92 4.1.4n=- 4.2.1f=40.07 "
        "4.2.1n=26.94 4.2.2f=39.57 4.2.2n=26.26 4.2.4f=37.12 4.2.4n=- 4.4.1f=41.01 4.4.1n=26.28 4.4.2f=38.51 4.4.2n=25.32 "
        "4.4.4f=38.28 4.4.4n=25.05 ",
    ),
    Grid(
        model="65B",
        sequence=2048,
        gpus=128,
        batch=2048,
        sequence_parallel=False,
        text="2.2.1f=118.68 2.2.1n=- 2.2.2f=- 2.2.2n=- 2.2.4f=- 2.2.4n=- 2.4.1f=111.35 2.4.1n=79.31 2.4.2f=107.39 2.4.2n=- 2.4.4f=109.04 "
        "2.4.4n=- 2.8.1f=118.39 2.8.1n=79.54 2.8.2f=112.77 2.8.2n=- 2.8.4f=114.42 2.8.4n=- 4.2.1f=136.43 4.2.1n=87.14 4.2.2n=- "
        "4.2.4f=126.61 4.2.4n=- 4.4.1f=140.95 4.4.1n=86.61 4.4.2f=129.68 4.4.2n=82.88 4.4.4f=125.11 4.4.4n=- 4.8.1f=156.54 "
        "4.8.1n=92.61 4.8.2f=141.87 4.8.2n=86.55 4.8.4f=133.56 4.8.4n=- 8.2.1f=192.69 8.2.1n=107.85 8.2.2f=174.43 8.2.2n=101.28 "
        "8.2.4f=164.21 8.2.4n=- 8.4.1f=209.24 8.4.1n=111.83 8.4.2f=180.93 8.4.2n=103.17 8.4.4f=168.97 8.4.4n=- 8.8.1f=237.99 "
        "8.8.1n=121.93 8.8.2f=203.08 8.8.2n=115.58 8.8.4f=184.98 8.8.4n=- ",
    ),
    Grid(
        model="13B",
        sequence=2048,
        gpus=32,
        batch=2048,
        sequence_parallel=True,
        text="1.1.1n=53.99 1.1.2n=- 1.1.4n=- 1.1.8n=- 1.2.1n=58.01 1.2.2n=59.55 1.2.4n=- 1.2.8n=- 2.1.1n=60.96 2.1.2n=61.12 2.1.4n=- "
        "2.1.8n=- 2.2.1n=66.26 2.2.2n=65.04 2.2.4n=67.47 2.2.8n=- ",
    ),
    Grid(
        model="13B",
        sequence=8192,
        gpus=64,
        batch=512,
        sequence_parallel=True,
        text="1.1.4n=- 1.2.4n=- 1.4.4n=- 2.1.1n=- 2.1.2n=- 2.1.4n=- 2.2.1n=34.84 2.2.2n=- 2.2.4n=- 2.4.1n=35.80 2.4.2n=- 2.4.4n=- "
        "4.1.1n=36.99 4.1.2n=- 4.1.4n=- 4.2.1n=38.85 4.2.2n=- 4.2.4n=- 4.4.1n=40.82 4.4.2n=41.06 4.4.4n=- 8.1.1n=46.37 8.1.2n=- "
        "8.1.4n=- 8.2.1n=49.96 8.2.2n=46.89 8.2.4n=- 8.4.1n=54.78 8.4.2n=51.91 8.4.4n=- ",
    ),
    Grid(
        model="30B",
        sequence=8192,
        gpus=64,
        batch=512,
        sequence_parallel=True,
        text="2.2.1n=- 2.2.2n=- 2.2.4n=- 2.4.1n=- 2.4.2n=- 2.4.4n=- 4.2.1n=84.37 4.2.2n=- 4.2.4n=- 4.4.1n=85.69 4.4.2n=- 4.4.4n=- "
        "4.8.1n=86.17 4.16.1n=86.16 ",
    ),
    Grid(
        model="30B",
        sequence=2048,
        gpus=64,
        batch=2048,
        sequence_parallel=True,
        text="1.1.4n=- 1.2.1n=- 1.2.2n=- 1.2.4n=- 1.4.1n=72.60 1.4.2n=- 1.4.4n=- 2.1.4n=- 2.2.1n=76.84 2.2.2n=- 2.2.4n=- 2.4.1n=76.58 "
        "2.4.2n=72.66 2.4.4n=- 4.1.1n=89.33 4.1.2n=85.21 4.1.4n=- 4.2.1n=85.47 4.2.2n=81.06 4.2.4n=83.11 4.4.1n=87.68 4.4.2n=82.22 "
        "4.4.4n=77.59 ",
    ),
    Grid(
        model="65B",
        sequence=2048,
        gpus=64,
        batch=2048,
        sequence_parallel=True,
        text="2.2.1n=- 2.2.2n=- 2.2.4n=- 2.4.1n=147.02 2.4.2n=- 2.4.4n=- 2.8.1n=149.97 2.8.2n=- 4.2.1n=162.32 4.2.2n=- 4.2.4n=- "
        "4.4.1n=159.57 4.4.2n=149.92 4.4.4n=- 4.8.1n=166.36 4.8.2n=156.40 8.2.1n=192.45 8.2.2n=178.64 8.4.1n=198.11 8.4.2n=179.87 "
        "8.8.1n=201.44 8.8.2n=186.54 ",
    ),
)

NANOTRON = {  # layers, width, heads, width of the feed-forward, whether embedding and output layer share their weights
    "1.34B": (16, 2048, 32, 8192, True),
    "3.57B": (28, 3072, 32, 8192, True),
    "8.86B": (32, 4096, 32, 14336, False),
    "80B": (80, 8192, 64, 28672, False),
}
"""Model → its sizes, by its number of parameters, with a vocabulary of 131,072."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A layout of a large search by nanotron's authors, with which a model was trained on so many GPUs: 256 sequences of 4,096 tokens in a
    step. What is published is a single step, the third of its run (`NANOTRON_BENCHMARK` of trainer.py in March 2025), with loader and all.

    Source: github.com/vinjn/nanotron-ultrascale-playbook at 924e4d0 (a copy of huggingface.co/spaces/nanotron/ultrascale-playbook),
    The Ultra-Scale Playbook, Apache-2.0 by its README,
    assets/data/benchmarks/benchmarks_interactive.html (nanotron, H100, 8 in a node), sizes and batch by scripts/scaling_benchmarks.py of
    github.com/huggingface/nanotron. Left out: 26 layouts whose ranks or batch do not multiply to what is said, and 11 rows of a model of
    other size (MFU over tokens per second is that of 8 key-value heads). The shares of the peak printed there are no measure of time: they
    count the embedding twice where two stages share it, and once where it is untied; `benchmark_summary.svg` of nanotron repeats them.
    """

    model: str
    gpus: int
    tensor: int
    pipeline: int
    micro_batch: int
    sharing: str
    seconds: float
    """Of a step, by the published tokens per second; infinite where it did not run (out of memory, or failed: the source does not say)."""
    gigabytes: float
    """Memory of the fullest GPU, as printed; NaN where it did not run."""

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.model}, {self.gpus} H100"


SEQUENCE, BATCH, VOCABULARY = 4096, 256, 131_072
TRAINER = TRAINERS["nanotron"]
"""Which version of it a row had is not published; the script of February 2025 runs pipelines again whose jobs are older than number
14097150."""


def _tried() -> Iterator[Found]:
    with open(Path(__file__).with_name("nanotron_layouts.csv"), encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            gpus, tensor, pipeline, micro = (int(row[name]) for name in ("gpus", "tensor", "pipeline", "micro_batch"))
            rate = float(row["tokens_per_second_per_gpu"] or 0)
            yield Found(
                model=row["model"],
                gpus=gpus,
                tensor=tensor,
                pipeline=pipeline,
                micro_batch=micro,
                sharing="zero1" if row["zero"] == "1" else "ddp",
                seconds=SEQUENCE * BATCH / (rate * gpus) if rate else math.inf,
                gigabytes=float(row["gigabytes"] or math.nan),
            )


TRIED = tuple(_tried())
"""All layouts of the search, of those that ran and those that did not."""


def transformer_of(model: str) -> Transformer:
    """One of NANOTRON."""
    layers, hidden, heads, wide, tied = NANOTRON[model]
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "feed_forward": wide, "vocabulary": VOCABULARY, "sequence": SEQUENCE}
    return Transformer(**sizes, gated=True, tied=tied)  # type: ignore[arg-type]


@cache
def workload_of(model: str) -> Workload:
    """One of the models of TRIED, as its trainer trains it: sequence parallel, cross-entropy of divided logits, and as TRAINERS says."""
    workload = workload_of_transformer(
        transformer_of(model),
        sequence=None,
        precision="amp_bf16",
        fused_attention=True,
        sequence_parallel=True,
        gpus_per_node=8,
        loss_parallel=TRAINER.loss_parallel,
    )
    return TRAINER.trains(workload)


@cache
def layouts_of(rows: tuple[Found, ...]) -> Layouts:
    """One row each."""
    table = []
    for one in rows:
        data = one.gpus // (one.tensor * one.pipeline)
        inside = data if one.gpus <= 8 else math.gcd(data, max(1, 8 // one.tensor))
        row = {"gpus": one.gpus, "data": data, "tensor": one.tensor, "pipeline": one.pipeline, "chunks": 1, "micro_batch": one.micro_batch}
        row |= {"accumulation": BATCH // data // one.micro_batch, "sharing": SHARINGS.index(one.sharing), "checkpointing": 0}
        table.append(row | {"shard": data, "inside": inside})
    return Layouts(**{name: np.array([row[name] for row in table]) for name in table[0]})
