"""Estimates what does not fit this machine: GPT-2, a step of 7 billion weights on 64 ranks, and sliders against fresh runs.

Each runs in a process of its own: `python benchmarks/memory.py --judge scale NAME`.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from memory_cases import Decoder, loss, tokens
from torch import nn

from workbench.core import units
from workbench.core.vocabulary import GROUPS

DEVICE = "H100-SXM"
BATCHES, LENGTHS = (2, 5, 11, 16, 24, 48), (96, 160, 224, 384, 640, 1000)
"""Stops of the sliders; the family is made at others."""


def gpt2() -> Decoder:
    """GPT-2, small: 124 million weights."""
    return Decoder(width=768, depth=12, heads=12, vocabulary=50_257)


def seven_billion() -> Decoder:
    """A decoder with 7 billion weights."""
    return Decoder(width=4096, depth=32, heads=32, inner=4 * 4096, vocabulary=32_000, tied=False, dropout=0.0)


def small() -> dict[str, Any]:
    """GPT-2 small, 8 × 1,024 tokens, on a GPU."""
    import workbench as wb

    with torch.device("meta"):
        batch = tokens(8, 1024, 50_257)
    began = time.process_time()
    found = wb.estimate_memory(gpt2, batch, loss=loss, optimizer="adamw", precision="amp_bf16", device=DEVICE)
    return {"says": units.bytes_(found.total), "seconds": time.process_time() - began}


def ours() -> dict[str, Any]:
    """The workbench on 7 billion weights, FSDP2 on 64 ranks."""
    import workbench as wb

    with torch.device("meta"):
        batch = tokens(1, 4096, 32_000)
    knobs = {"parallel": "fsdp", "world_size": 64, "precision": "amp_bf16", "checkpointing": "full"}
    began = time.process_time()
    found = wb.estimate_memory(seven_billion, batch, loss=loss, optimizer="adamw", device=DEVICE, **knobs)
    return {"says": f"{units.bytes_(found.total)}, reserved {units.bytes_(found.reserved or 0)}", "seconds": time.process_time() - began}


def trackers() -> dict[str, Any]:
    """torch's FSDPMemTracker on the same step."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from workbench.train.activation_checkpointing import apply_checkpointing

    began = time.process_time()
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    mesh = dist.init_device_mesh("cpu", (64,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = seven_billion()
        apply_checkpointing(model, "full")
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        batch = tokens(1, 4096, 32_000)
        watching: Any = FSDPMemTracker(model, optimizer)
        watching.track_inputs(batch)
        with watching:
            for _ in range(2):
                loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                watching.reset_mod_stats()
        (snapshot,) = watching.get_tracker_snapshot("peak").values()
    dist.destroy_process_group()
    return {"says": units.bytes_(int(snapshot["Total"])), "seconds": time.process_time() - began}


def slider(number: str, made_at: tuple[int, ...], stops: tuple[int, ...], build: Callable[[], nn.Module] = Decoder) -> dict[str, Any]:
    """A family of runs against fresh ones: the largest difference, in bytes."""
    import workbench as wb
    from workbench.memory.analysis.family import Family
    from workbench.memory.api import record
    from workbench.memory.estimate.plan import plan_of

    def example(value: int) -> Any:
        with torch.device("meta"):
            return tokens(value, 256) if number == "batch" else tokens(4, value)

    options: dict[str, Any] = {"loss": loss, "optimizer": "adamw", "precision": "amp_bf16", "device": DEVICE}
    family = Family({at: record(plan_of(build, example(at), **options))[0] for at in made_at})
    family.breakdown(made_at[0], title="", device=DEVICE)  # the first makes what the others use
    worst, times, peaks = 0, [], []
    for stop in stops:
        fresh = wb.estimate_memory(build, example(stop), **options)
        began = time.process_time()
        moved = family.breakdown(stop, title="", device=DEVICE)
        times.append(time.process_time() - began)
        began = time.process_time()
        family.peak(stop, 512)
        peaks.append(time.process_time() - began)
        off = (moved.total - fresh.total, (moved.reserved or 0) - (fresh.reserved or 0))
        off += tuple(getattr(moved, group) - getattr(fresh, group) for group in GROUPS)
        worst = max(worst, *map(abs, off))
    said = f"{len(stops)} stops, at most {worst:,} bytes off in peak, reserved and groups; a peak in {units.seconds(max(peaks))}"
    return {"says": said, "seconds": max(times)}


SCALE: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "gpt2": ("GPT-2 small, 8 × 1,024 tokens, amp_bf16: estimate", small),
    "ours": ("7B decoder, FSDP2 on 64 ranks, checkpointed: workbench", ours),
    "tracker": ("the same: torch's FSDPMemTracker in a fresh process", trackers),
    "batch": ("slider of the batch: the slowest stop", lambda: slider("batch", (3, 7), BATCHES)),
    "sequence": ("slider of the sequence: the slowest stop", lambda: slider("sequence", (128, 256), LENGTHS)),
}
