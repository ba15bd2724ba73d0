"""Writes a digest of all that a step depends on, and of what it computes, per step and rank: where two runs differ first.

A run directory with a folder `fingerprints` gets them: `rank<r>-<attempt>.jsonl`. `wb.prove_resume`, `wb.recompute` and
`step_digests=True` make such runs. Of a script, rank 0 writes what global hooks of torch see (`follow_script`).
"""

import contextlib
import functools
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from workbench.core import run_directory
from workbench.harness.batches import map_tensors, tensors_of
from workbench.train.random_numbers import random_state
from workbench.train.sample_order import StepSamples
from workbench.train.sharded_tensors import local_part

if TYPE_CHECKING:
    from workbench.train.trainer import Trainer


class Fingerprints:
    """The fingerprints of a rank."""

    def __init__(self, folder: Path, trainer: "Trainer", done: int, samples: StepSamples) -> None:
        """Open the file of this attempt.

        Args:
            folder: of the fingerprints. A file `kill.json` in it says which rank ends itself by SIGKILL, in which step, or
                which step is the `last`.
            trainer: the trainer whose steps are written.
            done: steps that were taken before.
            samples: which samples each step took.
        """
        rank = trainer.ranks.rank
        attempt = 1 + len(list(folder.glob(f"rank{rank}-*.jsonl")))
        self._writer = run_directory.LineWriter(folder / f"rank{rank}-{attempt}.jsonl")
        self._trainer, self._step, self._parts, self._more = trainer, done + 1, dict[str, str](), dict[str, Any]()
        self._batches = hashlib.blake2b(digest_size=8)
        self._samples = samples
        kill = folder / run_directory.KILL
        planned = run_directory.read_json(kill) if kill.exists() else {}
        self.kills, self.last = "step" in planned, planned.get("last")
        """Is a rank to be killed? The step after which the training ends; None = the last of its spec."""
        self._killed_in = planned.get("step") if planned.get("rank") == rank else None
        self._own: dict[str, Any] = {}
        reduced = isinstance(trainer.model, DistributedDataParallel)
        self._hooks: list[Any] = [
            weight.register_hook(functools.partial(self._own_gradient, name))  # type: ignore[no-untyped-call]
            for name, weight in (trainer.module.named_parameters() if reduced else ())
            if weight.requires_grad  # called before DDP has the gradient
        ]
        self._apart: Any = trainer.model.process_group if reduced else None
        # as the class has them: what it gives when it is asked for them is bound to no group any more, once it is put back
        self._messages, self._calls = 0, {name: vars(dist.ProcessGroup)[name] for name in ("send", "recv", "recv_anysource")}
        for name, call in self._calls.items():
            setattr(dist.ProcessGroup, name, self._counted(call))
        self._exchanged = self._exchanges()

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that sends or receives, which NCCL does not count."""

        def message(*args: Any, **named: Any) -> Any:
            self._messages += 1
            return call(*args, **named)

        return message

    def _exchanges(self) -> int:
        """What this process has exchanged with others so far, but for the reductions of gradients by DDP, which has a group of its own.

        By it, what one rank has computed may show on another: in a forward, a backward or an update. Where DDP has the group of all
        ranks, its reductions count as well.
        """
        groups = [group for group in dist.distributed_c10d._world.pg_map if group is dist.group.WORLD or group is not self._apart]
        return self._messages + sum(map(collectives, groups))

    def batch(self, batch: Any) -> None:
        """Called with each micro-batch, before it is used."""
        if not self._parts:
            self._parts = self._states()
            self._parts["random"] = digest(self._trainer.random_state())
            self._own.clear()
        self._batches.update(digest(batch).encode())

    def _own_gradient(self, name: str, gradient: Tensor) -> None:
        self._own.setdefault(name, []).append(digest(gradient))

    def step(self, loss: Tensor) -> None:
        """Called with the loss of a step when its gradients are complete, before the optimizer uses them."""
        if (samples := self._samples.of(self._step)) is not None:
            self._parts["samples"] = digest(samples)
            self._more["samples"] = str(sum(int(digest(sample), 16) for sample in samples))  # in any order, over any ranks
        self._parts["batch"] = self._batches.hexdigest()
        self._parts["loss"] = digest(loss)
        self._more["value"] = float(loss)
        if (counted := self._trainer.counted) is not None:
            self._more["count"] = float(counted)
        if self._own:
            self._parts["own gradients"] = digest(self._own)
        self._parts["gradients"] = digest({name: weight.grad for name, weight in self._trainer.module.named_parameters()})
        if self._step == self._killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        self._write()
        self._batches = hashlib.blake2b(digest_size=8)

    def end(self) -> None:
        """Write a last row: the states with which the run ends."""
        self._parts = self._states()
        self._write()

    def close(self) -> None:
        """Close the file, and leave the weights alone: their hooks hold the trainer, and so the workers of its loader."""
        for hook in self._hooks:
            hook.remove()
        for name, call in self._calls.items():
            setattr(dist.ProcessGroup, name, call)
        self._writer.close()

    def _states(self) -> dict[str, str]:
        state, trainer = self._trainer.state(), self._trainer
        names = {name for name, _ in trainer.module.named_parameters()}
        buffers = {name: value for name, value in state["module"].items() if name not in names}
        if trainer.ranks.rank and isinstance(trainer.model, DistributedDataParallel) and trainer.model.broadcast_buffers:
            buffers = {}  # those of rank 0 replace them before they are used
        return {
            "weights": digest({name: value for name, value in state["module"].items() if name in names}),
            "buffers": digest(buffers),
            "optimizer": digest(state["optimizer"]),
            "schedule": digest(state["scheduler"]),
            "scaler": digest(state["scaler"]),
            **{name: digest(state[name]) for name in ("ema", "compression") if name in state},
        }

    def _write(self) -> None:
        before, self._exchanged = self._exchanged, self._exchanges()
        exchanges = {"exchanges": True} if self._exchanged > before else {}
        self._writer.write([{"step": self._step, "time": time.time(), "parts": self._parts, **self._more, **exchanges}])
        self._step, self._parts, self._more = self._step + 1, {}, {}


def follow_script(folder: Path) -> None:
    """Write for each optimizer step of a script what it depends on; the samples are the first inputs of a module since the last step."""
    writer, row = run_directory.LineWriter(folder / "rank0-1.jsonl"), dict[str, str]()
    called = dict[int, torch.nn.Module]()  # since the last step

    def forward(module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled() and id(module) not in called:  # evaluations may come at other moments after a resume
            called.update((id(part), part) for part in module.modules())
        if not row and module.training and tensors_of(args):
            with contextlib.suppress(Exception):  # of a tensor without a digest: the script is to go on
                state = random_state(tensors_of(args)[0].device)
                row.update(samples=digest(_sampled(args)), others=digest([state.pop("numpy"), state.pop("python")]), random=digest(state))

    def step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        parts = {"weights": weights, "gradients": [weight.grad for weight in weights], "schedule": options}
        parts["optimizer"] = [dict(optimizer.state.get(weight, {})) for weight in weights]
        with contextlib.suppress(Exception):  # an unusual tensor: the script is to go on, and the row to be written
            parts["modules"] = sorted(digest(_sampled(tensor)) for tensor in _saved(called.values(), but=weights))
        with contextlib.suppress(Exception):
            writer.write([row | {name: digest(_sampled(value)) for name, value in parts.items()}])
        row.clear()
        called.clear()

    torch.nn.modules.module.register_module_forward_pre_hook(forward)
    register_optimizer_step_pre_hook(step)


def _saved(modules: Iterable[torch.nn.Module], *, but: Sequence[Tensor]) -> Iterator[Tensor]:
    """The dense parameters and buffers of modules that a state_dict has, without those of their submodules, and but for some."""
    left_out = set(map(id, but))
    for module in modules:
        buffers = (value for name, value in module._buffers.items() if name not in module._non_persistent_buffers_set)
        for value in (*module._parameters.values(), *buffers):
            if value is None or id(value) in left_out or torch.nn.parameter.is_lazy(value):
                continue
            if value.layout == torch.strided:
                yield value


def _sampled(value: Any) -> Any:
    """At most some 100,000 values of each tensor."""
    return map_tensors(lambda tensor: local_part(tensor.detach()).flatten()[:: 1 + tensor.numel() // 100_000], value)


def collectives(group: Any) -> int:
    """How many collectives a process group has begun here; 0 where its backend does not count them."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def digest(value: Any) -> str:
    """A digest of tensors, arrays, numbers and texts in containers, in the order of their keys; of other things, of their type.

    Of a sharded tensor it is that of this rank's part.
    """
    total = hashlib.blake2b(digest_size=8)
    _add(total, value)
    return total.hexdigest()


def _add(total: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        value = local_part(value.detach())
        total.update(f"{value.dtype} {tuple(value.shape)} {value.layout}".encode())
        if value.layout != torch.strided:
            value = value.to_dense()
        flat = value.to("cpu").contiguous().reshape(-1)
        total.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    elif isinstance(value, np.ndarray):
        total.update(f"{value.dtype} {value.shape}".encode())
        total.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            total.update(f"{key}:".encode())
            _add(total, value[key])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        total.update(f"{len(value)}[".encode())
        for part in value:
            _add(total, part)
    elif isinstance(value, str | bytes | int | float | complex | None):
        total.update(repr(value).encode())
    elif hasattr(value, "__dict__"):
        _add(total, {"": type(value).__qualname__, **vars(value)})
    else:
        total.update(type(value).__qualname__.encode())
