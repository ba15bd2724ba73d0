"""Trains on batches as they are and by another plan of their lengths, in turns, on one rank: the proof of `batch_lengths`."""

import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import default_collate

from workbench.batch.analysis.lengths import WINDOW, DryRuns, LengthGrid, LengthsError, LengthsProof, bucketed_order, parts_of
from workbench.data.analysis.packing import pack
from workbench.harness import ab_test
from workbench.harness.batches import tensors_of
from workbench.harness.device_clock import synchronize
from workbench.harness.peers import Peers
from workbench.harness.restore import process_settings
from workbench.memory.measure.memory import STEPS, measure
from workbench.runs import task as tasks
from workbench.runs.spec import RunSpec
from workbench.runs.task import Task
from workbench.train.ranks import Layout, Ranks, choose_device
from workbench.train.trainer import Trainer

LEAST_BATCHES = 4
"""Micro-batches that a proof has at least."""
PASSES = 50
"""Passes over its batches, of both sides together, that a proof takes: warm-up, and pairs until the interval is narrow."""


def prove_lengths(spec: RunSpec, grid: LengthGrid, dry: DryRuns, name: str, *, fitting: int, budget_s: float) -> LengthsProof:
    """Train on batches as they are and by a plan, in turns; see `BatchLengths.prove`.

    `name` is "bucketed" or "packed"; samples longer than `fitting` are left out (0 = none are).

    Raises:
        LengthsError: too few samples fit, there is too little time, or the samples cannot be packed.
    """
    micro = spec.micro_batch
    places, sizes = (np.moveaxis(of, 1, 0)[0].reshape(-1) for of in (grid.places, grid.sizes))
    if fitting:
        places, sizes = places[sizes <= fitting], sizes[sizes <= fitting]
    whole = min(WINDOW, len(sizes) // micro)
    if whole < LEAST_BATCHES:
        raise LengthsError(f"{len(sizes)} samples of a rank fit, {whole} micro-batches of {micro}: a proof takes {LEAST_BATCHES}")
    task = tasks.resolve(spec.task)
    dataset, collate = task.dataset(), task.collate or default_collate
    notes: tuple[str, ...] = ("one rank, without communication",) if spec.world_size > 1 else ()
    with process_settings():
        trainer = _alone(spec, task)
        few = _Side(trainer, [collate([dataset[int(place)] for place in row]) for row in places[: 2 * micro].reshape(2, micro)], 1)
        few.timed()
        each = few.timed() / 2
        count = min(whole, int(budget_s / PASSES / each))
        if count < LEAST_BATCHES:
            raise LengthsError(
                f"budget_s={budget_s:g}: a micro-batch takes {each:.3g} s, and a proof {PASSES} passes over {LEAST_BATCHES} of them at "
                f"least; give budget_s={PASSES * LEAST_BATCHES * each * 1.2:.0f}"
            )
        if count < whole:
            notes += (f"the first {count} micro-batches, for which there is time; bucketing gains more over {WINDOW}",)
        places, sizes = places[: count * micro], sizes[: count * micro]
        samples = [dataset[int(place)] for place in places]
        rows, lengths = _made(name, samples, sizes, micro)
        plain = [samples[start : start + micro] for start in range(0, len(samples), micro)]
        usual = sizes.reshape(-1, micro).max(1)
        sides = [_Side(trainer, [collate(row) for row in some], spec.accumulation) for some in (plain, rows)]
        times = ab_test.run_ab_test(*sides, budget_s=budget_s, peers=Peers())
        order = usual.argsort()
        memory = {int(usual[place]): _memory(trainer, sides[0].batches[place], dry) for place in (order[len(order) // 2], order[-1])}
    shares = [len(row) / micro for row in rows]
    predicted = dry.seconds(usual) / (dry.seconds(lengths) * sum(shares) / len(rows))
    said = [sum(int(size) * len(row) for size, row in zip(*both, strict=True)) for both in ((usual, plain), (lengths, rows))]
    counted = [sum(largest(batch) for batch in side.batches) for side in sides]
    return LengthsProof(
        name=name,
        device=str(trainer.ranks.device),
        micro_batches=count,
        predicted=float(predicted),
        measured=times.speedup,
        places=said[1] / said[0],
        measured_places=counted[1] / counted[0],
        held_bytes=memory,
        notes=(*notes, *([times.note] if times.note else [])),
    )


def _alone(spec: RunSpec, task: Task) -> Trainer:
    """The training of one rank, without a loader and without the others."""
    own = {"nproc_per_node": 1, "nnodes": 1, "parallel": "ddp", "tensor_parallel": 1, "pipeline_parallel": 1, "expert_parallel": 1}
    spec = spec.replace(**own, local_sgd="none", gradient_compression="none", noise_scale=False)
    ranks = Ranks(rank=0, world_size=1, device=choose_device(spec, 0, 1), store=HashStore())
    unused: Any = SimpleNamespace(pin_memory=False)  # batches are made here
    return Trainer(spec, task, ranks, layout=Layout(readers=ranks, data=None), alone=True, loader=unused)


def _memory(trainer: Trainer, batch: Any, dry: DryRuns) -> tuple[int, int]:
    """Bytes that a step with such batches holds at its peak: predicted by a dry run, and counted by the allocator."""
    assert dry.held_alone is not None
    predicted = dry.held_alone(trainer.spec, batch, trainer.ranks.device.type)
    step = [batch] * trainer.spec.accumulation
    measured = measure(trainer.step, [step] * STEPS, model=trainer.module, optimizer=trainer.optimizer, steps=STEPS)
    return predicted, measured.total


class _Side:
    """A pass over some batches, as a side of an A/B test."""

    def __init__(self, trainer: Trainer, batches: Sequence[Any], accumulation: int) -> None:
        self.batches, self._trainer, self._accumulation = batches, trainer, accumulation

    def step(self) -> None:
        """Train on each of them once."""
        for start in range(0, len(self.batches), self._accumulation):
            self._trainer.step(self.batches[start : start + self._accumulation])

    def drain(self) -> None:
        """Nothing is loaded."""

    def timed(self) -> float:
        """Seconds of a pass."""
        before = time.perf_counter()
        self.step()
        synchronize(self._trainer.ranks.device)
        return time.perf_counter() - before


def _made(name: str, samples: Sequence[Any], sizes: Any, micro: int) -> tuple[list[list[Any]], Any]:
    """Micro-batches of the same samples by a plan, before they are collated, and the length of the longest sample of each."""
    if name == "bucketed":
        order = bucketed_order(sizes, micro)
        rows = [[samples[int(place)] for place in order[start : start + micro]] for start in range(0, len(order), micro)]
        return rows, sizes[order].reshape(-1, micro).max(1)
    length = int(sizes.max())
    owners: dict[int, list[int]] = {}
    for row, sample, *_ in pack(sizes.tolist(), length).pieces:
        owners.setdefault(row, []).append(sample)
    packed = [joined([samples[sample] for sample in own], [int(sizes[sample]) for sample in own]) for own in owners.values()]
    return [packed[start : start + micro] for start in range(0, len(packed), micro)], np.full(-(-len(packed) // micro), length)


def joined(samples: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Samples in a row as one sample; what does not have their length, such as a class, is the first one's.

    Raises:
        LengthsError: nothing in them is as long as the samples are.
    """
    first = samples[0]
    if not any(_is_joined(part, sizes[0]) for part in parts_of(first)):
        raise LengthsError(f"samples such as {first!r:.60} cannot be put into one row here; prove('bucketed') can be run")
    if isinstance(first, Mapping):
        return {key: _joined_part([sample[key] for sample in samples], sizes) for key in first}
    if isinstance(first, tuple):
        return tuple(_joined_part(parts, sizes) for parts in zip(*samples, strict=True))
    return _joined_part(samples, sizes)


def _is_joined(part: Any, size: int) -> bool:
    if hasattr(part, "shape"):
        return bool(len(part.shape)) and part.shape[0] == size
    return isinstance(part, str | bytes) or (isinstance(part, list | tuple) and len(part) == size)


def _joined_part(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = parts[0]
    if not _is_joined(first, sizes[0]):
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if hasattr(first, "shape"):
        return np.concatenate(list(parts))
    if isinstance(first, str | bytes):
        return type(first)().join(parts)
    return [value for part in parts for value in part]


def largest(batch: Any) -> int:
    """Places of a batch: samples × length of its first tensor that has both."""
    return next((tensor.shape[0] * tensor.shape[1] for tensor in tensors_of(batch) if tensor.dim() > 1), 1)
