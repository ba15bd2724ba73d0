"""Two real ranks take steps in many ways; what torch's profiler saw of their collectives is printed for a test to compare."""

import gc
import json
import math
import os
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import workbench as wb
from workbench.train.models import Gpt
from workbench.train.ranks import Ranks
from workbench.train.trainer import Trainer

BATCH = torch.zeros(2, 33, dtype=torch.int64)
PICTURES = torch.zeros(2, 3, 8, 8)
PLAN = {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}
BYTES = {"float": 4, "long": 8, "long int": 8, "int": 4, "c10::BFloat16": 2, "double": 8}
KINDS = {"allreduce_": "all_reduce", "broadcast_": "broadcast", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}


def gpt() -> nn.Module:
    return Gpt(vocabulary=2048, length=32, width=160, layers=3, heads=2)


def odd_gpt() -> nn.Module:
    return Gpt(vocabulary=511, length=33, width=66, layers=2, heads=2)


def gpt_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def pictures() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))


class Skipping(nn.Module):
    """A layer of it is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


def summed(model: nn.Module, batch: Tensor) -> Tensor:
    total: Tensor = model(batch).sum()
    return total


GPT = wb.Task(model=gpt, dataset=list, loss=gpt_loss, tensor_parallel=PLAN)
ODD = wb.Task(model=odd_gpt, dataset=list, loss=gpt_loss)
CONV = wb.Task(model=pictures, dataset=list, loss=summed)
SPARE = wb.Task(model=Skipping, dataset=list, loss=summed)
CASES: dict[str, tuple[wb.Task, Tensor, dict[str, Any]]] = {
    "ddp": (GPT, BATCH, {}),
    "ddp, small buckets": (GPT, BATCH, {"bucket_cap_mb": 0.25}),
    "ddp, accumulation": (GPT, BATCH, {"accumulation": 3}),
    "ddp, unused": (SPARE, torch.zeros(2, 8), {"find_unused_parameters": True}),
    "ddp, static graph": (GPT, BATCH, {"static_graph": True}),
    "ddp, static graph, unused": (SPARE, torch.zeros(2, 8), {"static_graph": True}),
    "ddp, buffers": (CONV, PICTURES, {}),
    "zero1": (ODD, BATCH, {"parallel": "zero1"}),
    "zero2": (ODD, BATCH, {"parallel": "zero2", "accumulation": 2}),
    "fsdp": (GPT, BATCH, {"parallel": "fsdp"}),
    "fsdp, bf16, uneven": (ODD, BATCH, {"parallel": "fsdp", "precision": "amp_bf16"}),
    "fsdp, accumulation": (GPT, BATCH, {"parallel": "fsdp", "accumulation": 2}),
    "fsdp, clipped": (GPT, BATCH, {"parallel": "fsdp", "clip_grad_norm": 1.0}),
    "fsdp, checkpointing": (GPT, BATCH, {"parallel": "fsdp", "checkpointing": "full"}),
    "tensor": (GPT, BATCH, {"tensor_parallel": 2}),
}
"""Name → what is trained, a batch, and the knobs."""


def seen(one: Any) -> list[tuple[str, int]]:
    """Kind and bytes of each collective of a profile, sorted."""
    with tempfile.TemporaryDirectory() as folder:
        one.export_chrome_trace(os.path.join(folder, "trace.json"))
        with open(os.path.join(folder, "trace.json")) as file:
            events = json.load(file)["traceEvents"]
    width = {}  # of those whose tensors come in a list gloo alone tells the type
    for event in events:
        if event.get("name", "").startswith("gloo:"):
            width[json.dumps(event["args"]["Input Dims"][:1])] = BYTES[event["args"]["Input type"][0]]
    found = []
    for event in events:
        space, _, name = event.get("name", "").partition("::")
        if space != "c10d" or event.get("cat") != "cpu_op":
            continue
        dims, types = event["args"]["Input Dims"], event["args"]["Input type"]
        if types[0] == "TensorList":
            size = sum(math.prod(shape) * width[json.dumps([shape])] for shape in dims[0])
        else:
            size = max(math.prod(shape) * BYTES[kind] for shape, kind in zip(dims[:2], types[:2], strict=True))
        found.append((KINDS[name], size))
    return sorted(found)


def main() -> None:
    base = wb.RunSpec(task="cases", micro_batch=2, nproc_per_node=2, device="cpu")
    ranks = Ranks.join(base)
    for name, (task, batch, knobs) in CASES.items():
        spec = base.replace(**knobs)
        trainer = Trainer(spec, task, ranks, loader=SimpleNamespace(pin_memory=False))  # type: ignore[arg-type]
        warm = 3 if spec.static_graph else 1 if spec.parallel == "fsdp" else 2  # of DDP, buckets are made anew in the second step, or third
        for _ in range(warm):
            trainer.step([batch] * spec.accumulation)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as one:
            trainer.step([batch] * spec.accumulation)
        if ranks.rank == 0:
            print(json.dumps({"case": name, "seen": seen(one)}), flush=True)
        del trainer, one
        gc.collect()
    ranks.agree(True)
    Ranks.leave()


if __name__ == "__main__":
    sys.exit(main())
