"""Trains a small GPT on all ranks in each way of sharing, and writes what this rank sends and holds (notebook 16 launches it)."""

import dataclasses
import gc
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import workbench as wb
from workbench.cluster.analysis.collective_call import CollectiveCall
from workbench.train.models import Gpt
from workbench.train.ranks import Ranks
from workbench.train.sharded_tensors import local_part
from workbench.train.tasks import WINDOW, text_gpt
from workbench.train.trainer import Trainer

SAMPLES, WIDTH, LAYERS = 32, 64, 4
PLAN = {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}
MODES: dict[str, dict[str, Any]] = {
    "DDP": {},
    "ZeRO-1": {"parallel": "zero1"},
    "FSDP": {"parallel": "fsdp"},
    "TP": {"tensor_parallel": 2},
    "PP": {"pipeline_parallel": 2, "accumulation": 4},
}
"""How the ranks share → knobs."""
MORE: dict[str, dict[str, Any]] = {
    "small buckets": {"bucket_cap_mb": 0.25},
    "4 micro-batches": {"accumulation": 4},
    "without no_sync": {"accumulation": 4},
}
KINDS = {
    "allreduce_": "all_reduce", "broadcast_": "broadcast", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "send": "send",
}  # fmt: skip
"""torch's names of collectives → ours."""


def gpt() -> wb.Task:
    """Four layers of width 64; the large products of each may be split."""
    model = partial(Gpt, length=WINDOW, width=WIDTH, layers=LAYERS, heads=4)
    return dataclasses.replace(text_gpt(), model=model, tensor_parallel=PLAN, name="gpt")


def spec(knobs: Mapping[str, Any], ranks: int = 2) -> wb.RunSpec:
    """The same samples in a step, however the ranks share."""
    made = wb.RunSpec(task="scripts/several.py:gpt", device="cpu", nproc_per_node=ranks, **knobs)
    return made.replace(micro_batch=SAMPLES // made.accumulation // made.data_ranks)


def sends(one: Any, ranks: int) -> list[tuple[str, float]]:
    """Kind, and bytes that this rank sends in a ring, of each collective that a profile has; all tensors here have 4 bytes an element."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        one.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = []
    for event in events:
        space, _, name = event.get("name", "").partition("::")
        if space != "c10d" or event.get("cat") != "cpu_op" or name not in KINDS:
            continue
        dims, types = event["args"]["Input Dims"], event["args"]["Input type"]
        shapes = dims[0] if types[0] == "TensorList" else dims[:2]
        count = sum(map(math.prod, shapes)) if types[0] == "TensorList" else max(map(math.prod, shapes))
        call = CollectiveCall(kind=KINDS[name], size=4 * count, ranks=ranks, phase="backward")
        found.append((KINDS[name], call.sent))
    return found


def size(tensors: Any) -> int:
    """Bytes of this rank's parts."""
    return sum(part.numel() * part.element_size() for part in map(local_part, tensors))


def measured(name: str, knobs: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """What this rank sends in its third step, and holds then."""
    made = spec(knobs, ranks.world_size)
    trainer = Trainer(made, gpt(), ranks, alone=made.data_ranks == 1)  # DDP of one rank would reduce with nobody
    batches = trainer.batches()

    def step() -> int:
        count = trainer.spec.accumulation
        for micro in range(count):
            trainer.micro_step(next(batches), last=micro == count - 1 or name == "without no_sync")
        gradients = size(weight.grad for weight in trainer.module.parameters() if weight.grad is not None)
        trainer.update()
        return gradients

    step(), step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as one:
        gradients = step()
    batches.close()
    inner = getattr(trainer.optimizer, "optim", trainer.optimizer)  # ZeRO-1 has one for its part
    states = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor) and value.dim()]
    return {
        "sent": sends(one, ranks.world_size),
        "parameters": size(trainer.module.parameters()),
        "gradients": gradients,
        "optimizer_states": size(states),
    }


def main(folder: str) -> None:
    ranks = Ranks.join(wb.RunSpec(task="text-gpt", device="cpu"))
    found = {}
    for name, knobs in (MODES | MORE).items():
        found[name] = measured(name, knobs, ranks)
        gc.collect()
    Path(folder, f"several{ranks.rank}.json").write_text(json.dumps(found))
    ranks.agree(True)
    Ranks.leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
