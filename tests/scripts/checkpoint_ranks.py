"""Ranks write checkpoints in each parallel mode, go on from them in the same and in other modes, and compare what they have then.

Rank 0 writes what came of it, name → text ("" = equal), into the JSON file that is named.
"""

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.scripts import sharing
from workbench.runs.spec import RunSpec
from workbench.train.checkpoints import Checkpoints
from workbench.train.fingerprints import digest
from workbench.train.named_state import local_optimizer
from workbench.train.ranks import Layout, Ranks, join_group_creation
from workbench.train.sharded_tensors import dtensor_spec, from_local_part, full_tensor, is_dtensor, local_part
from workbench.train.trainer import Trainer

MODES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, averaged": {"ema": 0.9},
    "zero1": {"parallel": "zero1", "ema": 0.9},
    "zero2": {"parallel": "zero2", "ema": 0.9},
    "fsdp": {"parallel": "fsdp", "ema": 0.9},
    "hsdp": {"parallel": "hsdp", "shard_ranks": 2, "ema": 0.9},
    "split": {"tensor_parallel": 2, "ema": 0.9},
    "split, zero1": {"tensor_parallel": 2, "parallel": "zero1", "ema": 0.9},
    "split, fsdp": {"tensor_parallel": 2, "parallel": "fsdp", "ema": 0.9},
    "averages": {"local_sgd": "periodic(period=4, start=1)"},
    "powersgd": {"gradient_compression": "powersgd(rank=1, start=2)"},
    "powersgd, zero1": {"gradient_compression": "powersgd(rank=2, start=5)", "parallel": "zero1"},
    "static graph": {"static_graph": True},
    "static graph, after one": {"static_graph": True},
    "stages": {"pipeline_parallel": 2, "accumulation": 2, "ema": 0.9},
    "stages, zero1": {"pipeline_parallel": 2, "accumulation": 4, "pipeline_schedule": "zero_bubble", "parallel": "zero1", "ema": 0.9},
}
MIXED = {"task": "mixture", "ema": 0.9}
MODES |= {"experts": {**MIXED, "expert_parallel": 2}, "experts of 4": {**MIXED, "expert_parallel": 4}, "experts, ddp": MIXED}
MODES |= {"experts, zero1": {**MIXED, "parallel": "zero1"}, "experts, fsdp": {**MIXED, "parallel": "fsdp"}}
MODES |= {"experts, hsdp": {**MIXED, **MODES["hsdp"]}, "split, hsdp": {**MODES["split"], **MODES["hsdp"], "shard_ranks": 1}}
STAGES = [("stages", 2, "fsdp"), ("stages", 1, "ddp"), ("zero1", 2, "stages")]
IN_MAKE_TEST: dict[str, Any] = {
    "names": ["zero1", "fsdp", "split", "stages", "experts", "averages", "static graph", "powersgd"],
    "others": [
        ("zero1", 2, "split"),
        ("fsdp", 2, "ddp"),
        ("split", 2, "fsdp"),
        ("stages", 2, "fsdp"),
        ("stages", 1, "ddp"),
        ("zero1", 2, "stages"),
        ("experts", 1, "experts, ddp"),
    ],
}
OPTIMIZER = "adamw(lr=0.01, weight_decay=0.1)"


def spec_of(ranks: int, knobs: dict[str, Any]) -> RunSpec:
    samples = 8 // (ranks // knobs.get("tensor_parallel", 1) // knobs.get("pipeline_parallel", 1))
    return RunSpec(
        device="cpu", nproc_per_node=ranks, micro_batch=samples // knobs.get("accumulation", 1), steps=6, checkpoint_every=3,
        schedule="cosine", clip_grad_norm=0.5, optimizer=OPTIMIZER, weight_decay_on="matrices", **{"task": "gpt", **knobs},
    )  # fmt: skip


class Made:
    """A trainer on the first ranks of the launch; none on the others, which take part in making its groups."""

    trainer: Any = None
    stepped = False
    numbers = itertools.count(1)

    def __init__(self, all_ranks: Ranks, count: int, knobs: dict[str, Any]) -> None:
        members = list(range(count))
        group = dist.new_group(members)
        self.spec = spec_of(count, knobs)
        self.ranks = dataclasses.replace(all_ranks, world_size=count, agreements=100 * next(self.numbers))  # no topic is used twice
        if all_ranks.rank >= count:
            join_group_creation(self.spec, members)
            return
        layout = Layout.of(self.spec, self.ranks, group)
        self.trainer = Trainer(self.spec, getattr(sharing, self.spec.task)(), self.ranks, layout.data or group, layout=layout)
        self.group = group

    def steps(self, done: int, count: int) -> None:
        batches = self.trainer.batches(done)
        for step in range(count):
            micro = [next(batches) for _ in range(self.spec.accumulation)]
            if done and not step and not self.stepped and self.trainer.has_buckets:
                self.trainer.rehearse(micro[0])  # as the loop does when it resumes
            self.trainer.step(micro)
            self.stepped = True
        batches.close()

    def local(self) -> str:
        """A digest of all that this rank has."""
        return digest([self.trainer.state(), self.trainer.random_state()])

    def whole(self) -> dict[str, torch.Tensor]:
        """The whole weights, averages and states of the optimizer, by name, from all ranks."""
        weights, found = dict(self.trainer.module.named_parameters()), {}
        names = {id(weight): name for name, weight in weights.items()}
        for name, weight in weights.items():
            found[name] = full_tensor(weight)
            if self.trainer.averages:
                found[f"ema {name}"] = put_together(self.trainer.averages[name], weight)
        for weight, states in local_optimizer(self.trainer.optimizer).state.items():
            for kind, value in states.items():
                found[f"{names[id(weight)]} {kind}"] = put_together(value, weight)
        found = {name: value.detach().clone() for name, value in found.items()}
        every: list[Any] = [None] * self.spec.world_size
        dist.all_gather_object(every, found, group=self.group)
        return {name: value for part in every for name, value in part.items()}


def put_together(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    spec = dtensor_spec(weight)
    if spec is not None and not is_dtensor(value) and value.dim() and value.shape == local_part(weight).shape:
        value = from_local_part(value, spec)
    return full_tensor(value)


def agreed(ranks: Ranks, text: str) -> str:
    every: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(every, text)
    return "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(every) if said)


def differs(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str:
    if strange := [name for name in one.keys() ^ other.keys() if not name.startswith("ema ")]:
        return f"only one has {strange[:3]}"
    return ", ".join(name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name]))


def compare(ranks: Ranks, folder: Path, names: list[str], others: list[tuple[str, int, str]]) -> dict[str, str]:
    """What differs after a checkpoint was loaded, by case; "" = nothing does.

    Args:
        ranks: this process among the others.
        folder: for the checkpoints.
        names: modes that go on in the same layout, bit for bit.
        others: mode that wrote, number of ranks and mode that loads: weights, averages and states are the same.
    """
    results, before = dict[str, str](), dict[str, dict[str, torch.Tensor]]()
    for name in names:
        run_dir = folder / name.replace(", ", "-")
        if not ranks.rank:
            run_dir.mkdir()
        dist.barrier()
        made, again = (Made(ranks, ranks.world_size, MODES[name]) for _ in range(2))
        done = 1 if name.endswith("after one") else 3  # DDP makes its buckets anew after the first step, or after the second
        made.steps(0, done)
        Checkpoints(run_dir, made.ranks, done).write(done, made.trainer)
        before[name] = made.whole()
        made.steps(done, 2)
        want = made.local()
        checkpoints = Checkpoints(run_dir, again.ranks, done)
        dist.barrier()
        assert checkpoints.resume(again.trainer, checkpoints.latest()) == done
        loaded = differs(before[name], again.whole())
        again.steps(done, 2)
        results[name] = agreed(ranks, loaded or ("" if again.local() == want else "differs"))
    for source, count, target in others:
        made = Made(ranks, count, MODES[target])
        text = ""
        if made.trainer:
            checkpoints = Checkpoints(folder / source.replace(", ", "-"), made.ranks, 3)
            checkpoints.resume(made.trainer, checkpoints.latest())
            text = differs(before[source], made.whole())
            made.steps(3, 1)
        results[f"{source} → {target} on {count}"] = agreed(ranks, text)
    return results


def main() -> None:
    path, names, others = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
    ranks = Ranks.join(RunSpec(task="gpt", device="cpu"))
    results = compare(ranks, path.parent, names, others)
    if not ranks.rank:
        path.write_text(json.dumps(results))
    ranks.agree(True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
