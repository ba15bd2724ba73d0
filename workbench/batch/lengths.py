"""`batch_lengths`: memory and time over the dataset's own lengths: which step runs out of memory, what padding costs, what would help."""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from workbench.batch.analysis.lengths import BatchLengths, DryRuns, LengthGrid, LengthsError, LengthsProof, parts_of
from workbench.cluster.analysis.step_time import CPU
from workbench.core import codec
from workbench.core.checks import check_budget, is_number, whole_number
from workbench.core.device import Device
from workbench.core.progress import INTERRUPTED, Waiting, say_what_was_interrupted
from workbench.core.synonyms import accept_synonyms
from workbench.memory.analysis.fit import MARGIN, device_name, usable_memory
from workbench.memory.analysis.whatif import needed
from workbench.memory.api import breakdown_of, record
from workbench.memory.ladder import timed_estimate
from workbench.runs import task as tasks
from workbench.runs.spec import RunSpec
from workbench.runs.target import read_spec
from workbench.runs.task import Task

NODES = 5
"""Lengths at which a dry run is made; time between them follows a parabola, the memory of the border is made sure by more dry runs."""
MOST_SAMPLES = 1_000_000
"""Samples whose length is read at most."""


@accept_synonyms
def batch_lengths(
    target: RunSpec | str,
    *,
    device: str | Device,
    capacity: int | None = None,
    steps: int | None = None,
    length: Callable[[Any], int] | None = None,
    tokenizer: Any = None,
    margin: float = MARGIN,
    budget_s: float | None = 60.0,
    **knobs: Any,
) -> BatchLengths:
    """Predict from the lengths of the samples which step of a training runs out of memory, and what padding costs.

    Seed, ranks, micro-batch and accumulation of the spec give the order of the samples, epoch by epoch. Each sample is read once for its
    length. Dry runs at a few lengths give memory and time; further dry runs find the length from which a batch no longer fits. What-ifs:
    samples sorted by length within 50 micro-batches ("bucketed"), and several samples in a row as long as the longest one ("packed"; loss
    and attention must keep them apart).

    Args:
        target: a RunSpec or the name of a task, whose collate function pads each batch to its longest sample.
        device: a name such as "A100-80GB", a Device, or "cpu".
        capacity: bytes available to one rank; None = the device's memory, of "cpu" this machine's, in equal shares for the ranks.
        steps: how many optimizer steps to predict; None = those of an epoch.
        length: a function from a sample to its number of tokens; None = the length of "input_ids", or else of the first list, text, or
            tensor of at most two dimensions. The length of a text is in characters, that of floats in values or rows, and the answer says
            so.
        tokenizer: counts the tokens of a text: a function from a text to its tokens or to "input_ids" (Hugging Face), or an object with
            `encode`.
        margin: share of the memory that stays free.
        budget_s: approximate seconds, half of them for reading; None = no limit. Steps whose samples were not read by then, or by Ctrl-C,
            are left out, and fewer lengths are tried to find the longest that fits. `notes` say so.
        **knobs: fields of the RunSpec to change.

    Raises:
        LengthsError: not a RunSpec, a dataset or samples without a length, texts mixed with other samples, both `length` and `tokenizer`,
            or batches that are not padded to their longest sample; or the budget ended within the first step.
        ValueError: as `estimate_memory`.
        KeyboardInterrupt: Ctrl-C came before the first sample was read, or after the reading.
    """
    check_budget(budget_s, error=LengthsError)
    because = "whose seed, ranks and batches make the order of the samples"
    target = read_spec("batch_lengths", target, because=because, error=LengthsError)
    from workbench.data.resumable_sampler import ResumableSampler

    spec = target.replace(**knobs) if knobs else target
    device_name(device)
    name, room = usable_memory(device, capacity, margin, ranks=spec.nproc_per_node)
    task = tasks.resolve(spec.task)
    dataset = task.dataset()
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise LengthsError(f"the dataset of {spec.task} is a {type(dataset).__name__}: expected one with a length, which has an order")
    count = len(dataset)
    if count > MOST_SAMPLES:
        raise LengthsError(f"the dataset of {spec.task} has {count:,} samples, and each is read: give one of at most {MOST_SAMPLES:,}")
    unit, count_of = _measure(dataset, count, length, tokenizer)
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
    where = CPU if device == "cpu" else device if isinstance(device, Device) else Device.named(device)
    begin = f"reading the lengths of {count:,} samples, then dry runs at some of them"
    with say_what_was_interrupted("batch_lengths"), Waiting("batch_lengths", budget_s, begin=begin) as line:
        grid = LengthGrid.of(range(count), orders, ranks=ranks, accumulation=spec.accumulation, micro_batch=spec.micro_batch)
        sizes, why = _read(dataset, count_of, dict.fromkeys((*grid.in_order, *range(count))), line)
        grid, notes = grid.read(sizes), []
        if why:
            whole = len(grid.of_steps(wanted))
            if not whole:
                raise LengthsError(f"{why} after {len(sizes):,} samples, before the first step's were read: give a larger budget_s")
            notes.append(f"{why} after {len(sizes):,} of {count:,} samples were read: {whole:,} of {wanted:,} steps are looked at")
            wanted = whole
        model = _Model(spec, task, dataset, sizes, where)
        fitting = model.fitting(grid.longest, room, line)
        if model.unsure:
            notes.append(f"{why or 'the budget ended'}: whether lengths from {fitting + 1:,} to {model.unsure:,} fit is not known")
        dry = DryRuns(nodes=model.nodes, bytes_at=model.bytes_at, held_alone=_held_alone)
        plans = grid.plans(wanted, dry, room)
    return BatchLengths(
        title=f"{spec.task}, {spec.micro_batch} samples",
        device=name,
        capacity=room,
        micro_batch=spec.micro_batch,
        steps=wanted,
        lengths=grid.of_steps(wanted),
        plans=plans,
        memory=dict(sorted(model.memory.items())),
        fitting=fitting,
        unsure=model.unsure,
        unit=unit,
        notes=tuple(notes),
        prover=functools.partial(_prove, spec, grid, dry),
    )


def _read(dataset: Any, count_of: Callable[[Any], int], order: Iterable[int], line: Waiting) -> tuple[dict[int, int], str]:
    """Lengths of samples by their place in the dataset, read in an order; and why they are not all."""
    sizes: dict[int, int] = {}
    end = line.left / 2
    try:
        for place in order:
            if line.left < end:
                return sizes, "the budget ended"
            sizes[place] = count_of(dataset[place])
            line.say("reading lengths", f"{len(sizes):,} samples are read")
    except KeyboardInterrupt:
        if not sizes:
            raise
        line.spend()
        return sizes, INTERRUPTED
    return sizes, ""


def _held_alone(spec: RunSpec, batch: Any, device: str) -> int:
    from workbench.memory.estimate.plan import plan_of

    plan = dataclasses.replace(plan_of(spec, batch, device=device), own_loop=True)
    return breakdown_of(plan, *record(plan)).total


def _prove(*given: Any, **options: Any) -> LengthsProof:
    from workbench.batch.measure.length_proof import prove_lengths

    return prove_lengths(*given, **options)


def command(given: argparse.Namespace, knobs: Mapping[str, Any], show: Callable[[Any, argparse.Namespace], None]) -> int:
    """The command `batch-lengths`; returns the exit status, 1 if a step does not fit, or if that is not known.

    Raises:
        ValueError: no such task, device or knob, or as `batch_lengths`.
    """
    found = batch_lengths(RunSpec(task=given.target).replace(**knobs), device=given.device, capacity=given.capacity, steps=given.steps)
    proof = found.prove() if given.prove else None
    if given.json:
        plans = [codec.to_json(plan) | {"gain": found.gain(plan.name)} for plan in found.plans]
        facts = {
            name: getattr(found, name) for name in ("title", "device", "unit", "steps", "first_over", "over", "fitting", "unsure", "word")
        }
        show({**facts, "plans": plans, "proof": proof}, given)
    else:
        show(found, given)
        if proof:
            print(f"\n{proof}")
    return 0 if found.first_over is None and found.first_unsure is None else 1


def _measure(dataset: Any, count: int, length: Callable[[Any], int] | None, tokenizer: Any) -> tuple[str, Callable[[Any], int]]:
    """What a length counts, and sample → length."""
    if length is not None and tokenizer is not None:
        raise LengthsError("length= and tokenizer= both count tokens: give one of them")
    if length is not None:
        if not callable(length):
            raise LengthsError(f"length={length!r:.60}: a function of a sample that returns its number of tokens is expected")
        return "tokens", functools.partial(_given_length, length)
    if tokenizer is not None:
        return "tokens", functools.partial(_tokens, tokenizer)
    unit = _unit(dataset[0]) if count else "tokens"

    def of_one_unit(sample: Any) -> int:
        if _unit(sample) != unit:
            raise LengthsError(f"a sample has {_unit(sample)}, the first one {unit}, which cannot be compared: give tokenizer= or length=")
        return length_of(sample)

    return unit, of_one_unit


def _given_length(length: Callable[[Any], Any], sample: Any) -> int:
    """What the user's function says of a sample."""
    count: Any = length(sample)
    if not is_number(count, numpy=True) or count < 0 or count != int(count):
        raise LengthsError(f"length= returned {count!r:.60} for a sample: a whole number of tokens is expected")
    return int(count)


def _tokens(tokenizer: Any, sample: Any) -> int:
    """Of a sample's text."""
    text = next((part for part in parts_of(sample) if isinstance(part, str)), None)
    if text is None:
        raise LengthsError(f"tokenizer=: a sample, a {type(sample).__name__}, has no text; give length=, a function of a sample")
    given = tokenizer(text) if callable(tokenizer) else tokenizer.encode(text)
    return len(given["input_ids"] if isinstance(given, Mapping) else given)


def _unit(sample: Any) -> str:
    """What `length_of` counts of it."""
    first = _lengthy(sample)
    if "float" in str(getattr(first, "dtype", "")):
        return "values" if len(first.shape) == 1 else "rows"
    return "characters" if isinstance(first, str) else "bytes" if isinstance(first, bytes) else "tokens"


def _lengthy(sample: Any) -> Any:
    """The part of a sample that has its length."""
    if isinstance(sample, Mapping) and "input_ids" in sample:
        return sample["input_ids"]
    return next(iter(parts_of(sample)), None)


def length_of(sample: Any) -> int:
    """Length of "input_ids", or of a sample's first list, text (in characters), or tensor of at most two dimensions.

    Raises:
        LengthsError: it has none.
    """
    first = _lengthy(sample)
    if hasattr(first, "shape"):
        if len(first.shape) > 2:
            shape = " × ".join(map(str, first.shape))
            raise LengthsError(f"a sample has the shape {shape}, such as an image, and no length: give length=, a function of a sample")
        if len(first.shape):
            return int(first.shape[0])
    elif isinstance(first, str | bytes | Sequence):
        return len(first)
    raise LengthsError(f"a sample's length is not known from a {type(first).__name__}: give length=, a function of a sample")


class _Model:
    """Memory and seconds of a micro-batch over the length of its longest sample, by dry runs."""

    def __init__(self, spec: RunSpec, task: Task, dataset: Any, sizes: Mapping[int, int], device: Device) -> None:
        self._spec, self._device, self._task, self._dataset = spec, device, task, dataset
        order = sorted(sorted(sizes), key=sizes.__getitem__)
        self._sample = {sizes[place]: place for place in order}
        self.memory: dict[int, int] = {}
        self.nodes: dict[int, float] = {}
        self.unsure = 0
        """The longest of which it is not known whether its batch fits; 0 = it is known of all."""
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

    def fitting(self, lengths: Sequence[int], room: int, line: Waiting) -> int:
        """The longest of some lengths whose batch fits, as far as the budget lets it be found; 0 = none."""
        self._run(lengths[-1])
        low, high = -1, len(lengths)
        for place, size in enumerate(lengths):
            if size in self.memory:
                low, high = (max(low, place), high) if self.memory[size] <= room else (low, min(high, place))
        while high - low > 1:
            line.say("dry runs", f"{max(low, 0)} of {len(lengths)} lengths fit")
            if line.left <= 0:
                self.unsure = lengths[high - 1]
                break
            middle = (low + high) // 2
            self._run(lengths[middle])
            low, high = (middle, high) if self.memory[lengths[middle]] <= room else (low, middle)
        return lengths[low] if low >= 0 else 0

    def bytes_at(self, size: int) -> int:
        """Of a step with such a batch."""
        self._run(size)
        return self.memory[size]
