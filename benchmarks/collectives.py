"""Checks `wb.collectives` and `wb.ddp_twin`: cost and exactness of the count, and the closed form of a step against real ranks.

    python benchmarks/collectives.py            # about two minutes on two quiet cores
    python benchmarks/collectives.py --only 8b

The model of 8 billion parameters is written here, in the shapes of a public one; nothing is downloaded, and no weight is ever made.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from volumes import volume

import workbench as wb
from workbench.cluster.analysis.iteration import buckets, overlap
from workbench.cluster.analysis.links import Sweep
from workbench.cluster.analysis.twin_run import TwinLayer
from workbench.core import units

DIM, KV_HEADS, HEAD, HIDDEN, VOCABULARY, LAYERS, SEQUENCE = 4096, 8, 128, 14336, 128256, 32, 2048
PLAN = {
    "layers.*.attention.[qkv]": "colwise",
    "layers.*.attention.out": "rowwise",
    "layers.*.mlp.gate": "colwise",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
}
CASES: tuple[tuple[int, dict[str, Any]], ...] = (
    (8, {"parallel": "fsdp"}),
    (256, {"parallel": "fsdp"}),
    (2048, {"parallel": "fsdp"}),
    (2048, {"parallel": "fsdp", "tensor_parallel": 8}),
    (2048, {"parallel": "hsdp"}),
    (2048, {"parallel": "zero1"}),
    (2048, {"parallel": "ddp"}),
    (8192, {"parallel": "fsdp"}),
    (8192, {"parallel": "hsdp"}),
)
HERE = Path(__file__).parent


class Attention(nn.Module):
    """Grouped queries; a rank that has a part of the heads sees only those."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = (nn.Linear(DIM, KV_HEADS * HEAD, bias=False) for _ in "kv")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        z: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return z


class Mlp(nn.Module):
    """With a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Layer(nn.Module):
    """Attention and a perceptron, each after a norm and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(DIM), Attention()
        self.norm2, self.mlp = nn.RMSNorm(DIM), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Decoder(nn.Module):
    """8.03 billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(self.norm(x))
        return y


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def decoder() -> wb.Task:
    sample = torch.zeros(SEQUENCE, dtype=torch.int64)
    return wb.Task(model=Decoder, dataset=lambda: [sample], loss=next_token, tensor_parallel=PLAN, name="decoder-8b")


def one(world_size: int, knobs: dict[str, Any]) -> dict[str, Any]:
    """Count once in this process, which is fresh; what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    traffic = wb.collectives(decoder(), world_size=world_size, micro_batch=1, precision="amp_bf16", **knobs)
    took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    took["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rows = [[row.calls[0].phase, row.name, row.calls[0].axis, row.calls[0].ranks, row.count, row.size, row.padding] for row in traffic.rows]
    timed = traffic.on("DGX-H100")
    lint = [str(finding) for finding in traffic.lint]
    return {**took, "rows": rows, "sent": traffic.sent(), "parameters": traffic.parameters, "lint": lint, "seconds": timed.seconds}


def eight_billion() -> None:
    """The 8-billion-parameter model, each case in a process of its own."""
    for world_size, knobs in CASES:
        command = [sys.executable, __file__, "--one", json.dumps([world_size, knobs])]
        wall = time.perf_counter()
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        whole = time.perf_counter() - wall
        print(
            f"{world_size:>5} ranks {knobs}: {found['cpu']:.1f} s CPU, {found['wall']:.1f} s, with Python and torch {whole:.1f} s, "
            f"peak {found['rss'] / 1e9:.2f} GB; sends {units.bytes_(found['sent'])}, {units.seconds(found['seconds'])} on DGX-H100"
        )
        for phase, kind, axis, ranks, count, size, padding in found["rows"]:
            print(f"        {phase:9s} {kind:15s} {axis:8s} {ranks:>5} ranks {count:>5} × = {size / 1e9:7.2f} GB, padding {padding:.1%}")
        if knobs == {"parallel": "fsdp"}:
            formula = volume(found["parameters"], world_size, "fsdp", parameter_bytes=2, gradient_bytes=4).total
            print(f"        closed form 2 gathers and a scatter: {units.bytes_(formula)} sent, {found['sent'] / formula - 1:+.1%} counted")
        for finding in found["lint"]:
            print("       ", finding)


def twin() -> None:
    """The twin beside the closed form."""
    from workbench.cluster.analysis.collective_cost import Link

    layers = [TwinLayer(size=2**20, forward=0.002, backward=0.004) for _ in range(16)]
    link = Link(latency=2e-6, bandwidth=2e9)
    for ranks, cap in ((8, 4.0), (64, 4.0), (256, 4.0), (1024, 4.0), (1024, 1.0), (1024, 25.0), (1024, None)):
        begin = time.perf_counter()
        exact = wb.ddp_twin(layers, link, ranks=ranks, bucket_cap_mb=cap)
        took = time.perf_counter() - begin
        real = wb.ddp_twin(layers, link, ranks=ranks, bucket_cap_mb=cap, real=2.0, steps=7)
        print(
            f"{ranks:>5} ranks, cap {cap}: {len(exact.buckets)} buckets; closed form {units.seconds(exact.closed_step)}, exposed "
            f"{units.seconds(exact.closed.exposed)}; twin ÷ closed: virtual {exact.ratio:.6f} ({units.seconds(took)}), "
            f"real {real.ratio:.3f}"
        )


def planted() -> None:
    """The closed form from a measured sweep against DDP's own step without its reduction, on two gloo ranks."""
    from collectives_ranks import CAPS, WIDTH
    from collectives_ranks import LAYERS as COUNT

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(HERE / "collectives_ranks.py")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    sweep = Sweep(points=[(size, seconds) for size, seconds in found["points"]], ranks=2)
    print(sweep)
    sizes = [4 * WIDTH * WIDTH] * COUNT
    for cap, row in zip(CAPS, found["rows"], strict=True):
        forward, backward = row["alone"]
        groups = [sum(sizes[place] for place in group) for group in buckets(sizes, int(cap * 2**20))]
        ready = [backward * sum(groups[: place + 1]) / sum(groups) for place in range(len(groups))]
        seconds = [sweep.seconds(size) for size in groups]
        step, truth = forward + backward, sum(row["reduced"])
        closed = step + overlap(ready, seconds, backward).exposed
        print(
            f"cap {cap} MiB, {len(groups)} buckets: without reduction {units.seconds(step)}, with {units.seconds(truth)}; closed form "
            f"{units.seconds(closed)} ({closed / truth - 1:+.1%}), no overlap {(step + sum(seconds)) / truth - 1:+.1%}, no communication "
            f"{step / truth - 1:+.1%}; exposed: measured {units.seconds(truth - step)}, closed form {units.seconds(closed - step)}"
        )


PARTS = {"8b": eight_billion, "twin": twin, "planted": planted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(*asked.one)))
        return
    for name, part in PARTS.items():
        if asked.only in (None, name):
            print(f"--- {name}")
            part()


if __name__ == "__main__":
    main()
