"""`batch_lengths`: memory and time over the dataset's own lengths: which step runs out of memory, what padding costs, what would help."""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.batch.analysis.lengths import (
    WINDOW,
    BatchLengths,
    DryRuns,
    LengthGrid,
    LengthsError,
    LengthsProof,
    bucketed_order,
)
from workbench.cluster.analysis.step_time import CPU
from workbench.core import codec
from workbench.core.checks import whole_number
from workbench.core.device import Device
from workbench.data.analysis.packing import pack
from workbench.memory.analysis.fit import MARGIN, usable_memory
from workbench.memory.analysis.whatif import needed
from workbench.memory.ladder import timed_estimate
from workbench.runs import task as tasks
from workbench.runs.spec import RunSpec
from workbench.runs.task import Task

if TYPE_CHECKING:
    from workbench.train.trainer import Trainer

NODES = 5
"""Lengths at which a dry run is made; time between them follows a parabola, the memory of the border is made sure by more dry runs."""
MOST_SAMPLES = 1_000_000
"""Samples whose length is read at most."""
LEAST_BATCHES = 4
"""Micro-batches that a proof has at least."""
PASSES = 50
"""Passes over its batches, of both sides together, that a proof takes: warm-up, and pairs until the interval is narrow."""


def batch_lengths(
    target: RunSpec,
    *,
    device: str | Device,
    capacity: int | None = None,
    steps: int | None = None,
    length: Callable[[Any], int] | None = None,
    tokenizer: Any = None,
    margin: float = MARGIN,
    **knobs: Any,
) -> BatchLengths:
    """Predict from the lengths of the samples, in the order of the training, which step runs out of memory, and what padding costs.

    The order is that of the run: seed, ranks, micro-batch and accumulation of the spec, epoch by epoch. Each sample is read once for its
    length. Dry runs at a few lengths say memory and time; the length from which a batch no longer fits is found by more of them.
    What-ifs: samples sorted by length within 50 micro-batches ("bucketed"), and several in a row of the longest one ("packed", whose loss
    and attention must keep them apart).

    Args:
        target: a RunSpec, whose task's collate function pads each batch to its longest sample.
        device: a name such as "A100-80GB", or a Device; "cpu" with a capacity.
        capacity: bytes that one rank can have; None = the device's.
        steps: optimizer steps to look at; None = those of an epoch.
        length: sample → its tokens; None = the length of "input_ids", else of its first tensor, list or text. Of a text these are
            characters, and the answer says so.
        tokenizer: text → its tokens, or "input_ids" of them (Hugging Face), or an object with `encode`: counts the tokens of a text.
        margin: share of the memory that stays free.
        **knobs: of the RunSpec.

    Raises:
        LengthsError: no RunSpec, a dataset without a length, samples without one, texts beside other samples, both `length` and
            `tokenizer`, or batches that are not padded to their longest sample.
        ValueError: as `estimate_memory`.
    """
    if not isinstance(target, RunSpec):
        raise LengthsError(
            f"batch_lengths({target!r:.60}): expected a RunSpec, whose seed, ranks and batches make the order of the samples"
        )
    from workbench.data.resumable_sampler import ResumableSampler

    spec = target.replace(**knobs) if knobs else target
    name, room = usable_memory(device, capacity, margin)
    task = tasks.resolve(spec.task)
    dataset = task.dataset()
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise LengthsError(f"the dataset of {spec.task} is a {type(dataset).__name__}: expected one with a length, which has an order")
    count = len(dataset)
    if count > MOST_SAMPLES:
        raise LengthsError(f"the dataset of {spec.task} has {count:,} samples, and each is read: give one of at most {MOST_SAMPLES:,}")
    unit, count_of = _measure(dataset, count, length, tokenizer)
    sizes = [count_of(dataset[number]) for number in range(count)]
    ranks, per_rank = spec.data_ranks, spec.micro_batch * spec.accumulation
    whole = count // ranks // per_rank
    if not whole:
        raise LengthsError(f"one optimizer step takes {per_rank * ranks} samples, and the dataset has {count}: try a smaller micro_batch")
    wanted = whole if steps is None else whole_number("steps", steps, least=1, error=LengthsError)
    epochs = -(-wanted // whole)
    samplers = [ResumableSampler(count, rank=rank, world_size=ranks, seed=spec.seed) for rank in range(ranks)]
    orders = []
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
    grid = LengthGrid.of(sizes, orders, ranks=ranks, accumulation=spec.accumulation, micro_batch=spec.micro_batch)
    where = CPU if device == "cpu" else device if isinstance(device, Device) else Device.named(device)
    model = _Model(spec, task, dataset, sizes, where)
    fitting = model.fitting(grid.longest, room)
    dry = DryRuns(nodes=model.nodes, bytes_at=model.bytes_at)
    return BatchLengths(
        title=f"{spec.task}, {spec.micro_batch} samples",
        device=name,
        capacity=room,
        micro_batch=spec.micro_batch,
        steps=wanted,
        lengths=grid.of_steps(wanted),
        plans=grid.plans(wanted, dry, room),
        memory=dict(sorted(model.memory.items())),
        fitting=fitting,
        unit=unit,
        prover=functools.partial(prove_lengths, spec, grid, dry),
    )


def command(given: argparse.Namespace, knobs: Mapping[str, Any], show: Callable[[Any, argparse.Namespace], None]) -> int:
    """The command `batch-lengths`; returns the exit status, 1 if a step does not fit.

    Raises:
        ValueError: no such task, device or knob, or as `batch_lengths`.
    """
    found = batch_lengths(RunSpec(task=given.target).replace(**knobs), device=given.device, capacity=given.capacity, steps=given.steps)
    proof = found.prove() if given.prove else None
    if given.json:
        plans = [codec.to_json(plan) | {"gain": found.gain(plan.name)} for plan in found.plans]
        facts = {name: getattr(found, name) for name in ("title", "device", "unit", "steps", "first_over", "over", "fitting", "word")}
        show({**facts, "plans": plans, "proof": proof}, given)
    else:
        show(found, given)
        if proof:
            print(f"\n{proof}")
    return 0 if found.first_over is None else 1


def _measure(dataset: Any, count: int, length: Callable[[Any], int] | None, tokenizer: Any) -> tuple[str, Callable[[Any], int]]:
    """What a length counts, and sample → length."""
    if length is not None and tokenizer is not None:
        raise LengthsError("length= and tokenizer= both count tokens: give one of them")
    if length is not None:
        return "tokens", length
    if tokenizer is not None:
        return "tokens", functools.partial(_tokens, tokenizer)
    unit = _unit(dataset[0]) if count else "tokens"

    def of_one_unit(sample: Any) -> int:
        if _unit(sample) != unit:
            raise LengthsError(f"a sample has {_unit(sample)}, the first one {unit}, which cannot be compared: give tokenizer= or length=")
        return length_of(sample)

    return unit, of_one_unit


def _tokens(tokenizer: Any, sample: Any) -> int:
    """Of a sample's text."""
    text = next((part for part in _parts(sample) if isinstance(part, str)), None)
    if text is None:
        raise LengthsError(f"tokenizer=: a sample, a {type(sample).__name__}, has no text; give length=, a function of a sample")
    given = tokenizer(text) if callable(tokenizer) else tokenizer.encode(text)
    return len(given["input_ids"] if isinstance(given, Mapping) else given)


def _parts(sample: Any) -> Sequence[Any]:
    return list(sample.values()) if isinstance(sample, Mapping) else sample if isinstance(sample, tuple) else [sample]


def _unit(sample: Any) -> str:
    """What `length_of` counts of it."""
    first = _lengthy(sample)
    return "characters" if isinstance(first, str) else "bytes" if isinstance(first, bytes) else "tokens"


def _lengthy(sample: Any) -> Any:
    """The part of a sample that has its length."""
    if isinstance(sample, Mapping) and "input_ids" in sample:
        return sample["input_ids"]
    return next(iter(_parts(sample)), None)


def length_of(sample: Any) -> int:
    """Length of "input_ids", or of a sample's first tensor, list or text (its characters).

    Raises:
        LengthsError: it has none.
    """
    first = _lengthy(sample)
    if hasattr(first, "shape"):
        if len(first.shape):
            return int(first.shape[0])
    elif isinstance(first, str | bytes | Sequence):
        return len(first)
    raise LengthsError(f"a sample's length is not known from a {type(first).__name__}: give length=, a function of a sample")


class _Model:
    """Memory and seconds of a micro-batch over the length of its longest sample, by dry runs."""

    def __init__(self, spec: RunSpec, task: Task, dataset: Any, sizes: Sequence[int], device: Device) -> None:
        self._spec, self._device, self._task, self._dataset = spec, device, task, dataset
        order = sorted(range(len(sizes)), key=sizes.__getitem__)
        self._sample = {sizes[place]: place for place in order}
        self.memory: dict[int, int] = {}
        self.nodes: dict[int, float] = {}
        for number in range(NODES):
            self._run(sizes[order[number * (len(order) - 1) // (NODES - 1)]])
        self._check_padding(dataset[order[0]], dataset[order[-1]])

    def _batch(self, samples: list[Any]) -> Any:
        """A micro-batch of some samples in turns, collated as the loader would."""
        from workbench.memory.estimate.examples import sample_batch

        return sample_batch(dataclasses.replace(self._task, dataset=lambda: samples), self._spec.micro_batch)

    def _check_padding(self, short: Any, long: Any) -> None:
        from workbench.harness.batches import tensors_of

        if self._spec.micro_batch < 2:
            return
        shapes = [[tuple(tensor.shape) for tensor in tensors_of(self._batch(samples))] for samples in ([short, long], [long])]
        if shapes[0] != shapes[1]:
            raise LengthsError(
                f"a batch with the shortest and the longest sample has tensors of {shapes[0]}, one of longest ones {shapes[1]}: expected a "
                "collate function that pads to the longest sample of the batch"
            )

    def _run(self, size: int) -> None:
        if size in self.memory:
            return
        batch = self._batch([self._dataset[self._sample[size]]])
        breakdown, seconds = timed_estimate(self._spec, device=self._device, batch=batch)
        self.memory[size] = needed(breakdown)
        self.nodes[size] = seconds * self._spec.micro_batch

    def fitting(self, lengths: Sequence[int], room: int) -> int:
        """The longest of some lengths whose batch fits; 0 = none."""
        self._run(lengths[-1])
        low, high = -1, len(lengths)
        for place, size in enumerate(lengths):
            if size in self.memory:
                low, high = (max(low, place), high) if self.memory[size] <= room else (low, min(high, place))
        while high - low > 1:
            middle = (low + high) // 2
            self._run(lengths[middle])
            low, high = (middle, high) if self.memory[lengths[middle]] <= room else (low, middle)
        return lengths[low] if low >= 0 else 0

    def bytes_at(self, size: int) -> int:
        """Of a step with such a batch."""
        self._run(size)
        return self.memory[size]


def prove_lengths(spec: RunSpec, grid: LengthGrid, dry: DryRuns, name: str, *, fitting: int, budget_s: float) -> LengthsProof:
    """Train on batches as they are and by a plan, in turns; see `BatchLengths.prove`.

    Args:
        spec: of the training.
        grid: its samples in their order.
        dry: seconds over the length.
        name: of the plan: "bucketed" or "packed".
        fitting: the longest sample that is taken; 0 = all.
        budget_s: seconds it may take, about.

    Raises:
        LengthsError: too few samples fit, there is too little time, or the samples cannot be packed.
    """
    from torch.utils.data import default_collate

    from workbench.harness.ab_test import run_ab_test
    from workbench.harness.peers import Peers
    from workbench.harness.restore import process_settings

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
        times = run_ab_test(*sides, budget_s=budget_s, peers=Peers())
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
        notes=(*notes, *([times.note] if times.note else [])),
    )


def _alone(spec: RunSpec, task: Task) -> "Trainer":
    """The training of one rank, without a loader and without the others."""
    from types import SimpleNamespace

    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from workbench.train.ranks import Layout, Ranks, choose_device
    from workbench.train.trainer import Trainer

    own = {"nproc_per_node": 1, "nnodes": 1, "parallel": "ddp", "tensor_parallel": 1, "pipeline_parallel": 1, "expert_parallel": 1}
    spec = spec.replace(**own, local_sgd="none", gradient_compression="none", noise_scale=False)
    ranks = Ranks(rank=0, world_size=1, device=choose_device(spec, 0, 1), store=HashStore())
    unused: Any = SimpleNamespace(pin_memory=False)  # batches are made here
    return Trainer(spec, task, ranks, layout=Layout(readers=ranks, data=None), alone=True, loader=unused)


class _Side:
    """A pass over some batches, as a side of an A/B test."""

    def __init__(self, trainer: "Trainer", batches: Sequence[Any], accumulation: int) -> None:
        self.batches, self._trainer, self._accumulation = batches, trainer, accumulation

    def step(self) -> None:
        """Train on each of them once."""
        for start in range(0, len(self.batches), self._accumulation):
            self._trainer.step(self.batches[start : start + self._accumulation])

    def drain(self) -> None:
        """Nothing is loaded."""

    def timed(self) -> float:
        """Seconds of a pass."""
        import time

        from workbench.harness.device_clock import synchronize

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

    Args:
        samples: of one kind.
        sizes: length of each.

    Raises:
        LengthsError: nothing in them is as long as the samples are.
    """
    first = samples[0]
    if not any(_is_joined(part, sizes[0]) for part in _parts(first)):
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
    import torch

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
    from workbench.harness.batches import tensors_of

    return next((tensor.shape[0] * tensor.shape[1] for tensor in tensors_of(batch) if tensor.dim() > 1), 1)
