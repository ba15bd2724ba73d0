"""Computes what each tool predicts for a case of `memory_cases.py`, and the true peak of some training steps on a CPU.

Each runs in a process of its own: `python benchmarks/memory.py --judge TOOL CASE`.
"""

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import published_formulas as formulas
import torch
from memory_cases import Case, loss
from torch import nn
from torch.optim import Optimizer

from workbench.train.activation_checkpointing import apply_checkpointing
from workbench.train.blocks import compile_parts
from workbench.train.optimizers import OPTIMIZERS, parse_optimizer

STEPS = 3


class Cannot(Exception):
    """The tool has no answer to such a case; says why."""


def _prepared(case: Case) -> tuple[nn.Module, Optimizer]:
    model = case.model()
    apply_checkpointing(model, case.checkpointing)
    compile_parts(model, case.compile)
    name, options = parse_optimizer(case.optimizer)
    return model, OPTIMIZERS[name](model.parameters(), **options)


def _train(case: Case, model: nn.Module, optimizer: Optimizer, after_step: Callable[[], None] = lambda: None) -> None:
    """A plain loop, as anybody would write it."""
    for _ in range(STEPS):
        for _ in range(case.accumulation):
            batch = case.batch()
            with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "amp_bf16"):
                value = loss(model, batch) / case.accumulation
            value.backward()
            del value
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_step()


def truth(case: Case) -> int:
    """The allocator's word: the running sum of all requests and returns that torch's profiler saw, from before the model was built."""
    gc.collect()
    gc.disable()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model, optimizer = _prepared(case)
        _train(case, model, optimizer)
    result: Any = profile.profiler
    taken = sorted((event.start_ns(), event.nbytes()) for event in result.kineto_results.events() if event.name() == "[memory]")
    held = peak = 0
    for _, size in taken:
        held += size
        peak = max(peak, held)
    return peak


def ours(case: Case) -> int:
    """The workbench."""
    import workbench as wb

    knobs = {"precision": case.precision, "accumulation": case.accumulation, "checkpointing": case.checkpointing, "compile": case.compile}
    found = wb.estimate_memory(case.model, case.batch(), loss=loss, optimizer=case.optimizer, device="cpu", steps=STEPS, **knobs)
    return found.total


def eager(case: Case) -> int:
    """The workbench, of the same step without torch.compile."""
    return ours(dataclasses.replace(case, compile="none"))


def tracker(case: Case) -> int:
    """torch's MemTracker, on torch's fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True):
        model, optimizer = _prepared(case)
        watching: Any = MemTracker()
        watching.track_external(model, optimizer)
        with watching:
            _train(case, model, optimizer, watching.reset_mod_stats)
        (snapshot,) = watching.get_tracker_snapshot("peak").values()
    return int(snapshot["Total"])


def accelerate(case: Case) -> int:
    """accelerate's `estimate-memory`: the largest of what it lists for training with Adam."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils.modeling import calculate_maximum_sizes

    if not case.optimizer.startswith("adam"):
        raise Cannot("Adam only")
    with torch.device("meta"):
        total, _ = calculate_maximum_sizes(case.model())
    return int(max(estimate_training_usage(total, "float32" if case.precision == "fp32" else "bfloat16").values()))


def deepspeed(case: Case) -> int:
    """DeepSpeed's formula for one GPU, ZeRO-2."""
    if not case.optimizer.startswith("adam"):
        raise Cannot("Adam only")
    with torch.device("meta"):
        count = sum(weight.numel() for weight in case.model().parameters())
    return int(formulas.deepspeed(parameters=count).total)


def kitsune(case: Case) -> int:
    """torch-kitsune's `predict_memory`."""
    from kitsune.predict import predict_memory  # type: ignore[import-not-found]

    first = case.batch()[0]
    if not first.is_floating_point():
        raise Cannot("inputs of floating-point numbers only")
    kind = case.optimizer.partition("(")[0]
    if kind not in ("adam", "adamw", "sgd"):
        raise Cannot("Adam and SGD only")
    if case.checkpointing != "none" or case.accumulation > 1 or case.precision != "fp32":
        raise Cannot("no such knob")
    return int(predict_memory(case.model(), tuple(first.shape[1:]), batch_size=first.shape[0], optimizer=kind).total_bytes)


JUDGES: dict[str, Callable[[Case], int]] = {
    "truth": truth,
    "workbench": ours,
    "MemTracker": tracker,
    "accelerate": accelerate,
    "DeepSpeed": deepspeed,
    "kitsune": kitsune,
}
COMPILERS: dict[str, Callable[[Case], int]] = {"truth": truth, "workbench": ours, "eager": eager}
"""Those of compiled steps."""
