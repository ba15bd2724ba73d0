"""The training that `wb.sanity` checks, of a Task or of a step with its loader, and what its first steps show."""

import contextlib
import fnmatch
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import IterableDataset, default_collate

from workbench.batch.analysis.lr_range import LrRangeError
from workbench.batch.measure.lr_range import loss_in
from workbench.diagnosis.measure.watched_forward import Watched
from workbench.harness.feed import Exhausted, Feed
from workbench.harness.observe import check_arguments, discover_training
from workbench.runs.spec import AUTO, RunSpec
from workbench.runs.target import Step
from workbench.runs.task import Task
from workbench.train.loader import to_device
from workbench.train.optimizers import build_optimizer
from workbench.train.random_numbers import seed_all
from workbench.train.ranks import choose_device
from workbench.train.step_weights import weight_of
from workbench.train.trainer import build_model, loss_of
from workbench.train.validation import evaluate_alone, validation_data

OBSERVED = 4
"""Steps that are watched: a layer that begins at zero gets its gradient after the first."""
MOST_OBSERVED = 64
"""Steps that are taken until each optimizer has stepped, which need not be in each call: gradients may add up over several."""
FEW = 8
"""Samples to learn by heart."""
ENOUGH = 8
"""Numbers in a gradient whose direction says something. Chosen: two directions at random lie far apart then."""


class Line(Protocol):
    """What the progress line offers."""

    @property
    def left(self) -> float:
        """Seconds."""

    def say(self, now: str, known: str | None = None) -> None:
        """Tell what comes now."""


class Unjudged(Exception):
    """A check cannot be made; the message says why."""


@dataclass
class Training:
    """What is checked: a step that can be tried, and the parts of it that are known."""

    step: Callable[[Any], Any]
    models: list[nn.Module]
    optimizers: list[Optimizer]
    stream: Callable[[], Iterator[Any]]
    """Batches of another order, each sample once at most."""
    few: Callable[[int], Any] | None = None
    """A batch of so many samples; None = only the loader's batches are known."""
    part: Callable[[int, int], Any] | None = None
    """A batch of the samples from a number to another, the first ones of `few`."""
    loss: Callable[[Any], Tensor] | None = None
    """The loss of a batch, without a step."""
    weight: Callable[[Any], float] | None = None
    """What a micro-batch counts; None = each the same."""
    evaluate: Callable[[], object] | None = None
    frozen: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)
    batch_size: int | None = None
    """Samples of a full batch; None = not known."""
    accumulates: bool = False
    """Whether its spec adds up the gradients of several micro-batches."""

    def __post_init__(self) -> None:
        named = [(self.prefix(number), name) for number, model in enumerate(self.models) for name, _ in model.named_parameters()]
        for pattern in self.frozen:
            if not any(_matches(pattern, which, plain_name(name)) for which, name in named):
                known = "".join(f"; the last one is called {which}{plain_name(name)}" for which, name in named[-1:])
                self.notes.append(f"No parameter matches frozen={pattern!r}{known}.")

    def prefix(self, number: int) -> str:
        """What stands before the names of a model's parameters, if there are several models."""
        return f"model[{number}]." if len(self.models) > 1 else ""

    def is_frozen(self, which: str, name: str) -> bool:
        """Whether the user has said that a parameter is frozen on purpose."""
        return any(_matches(pattern, which, name) for pattern in self.frozen)


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile puts into it."""
    return name.lstrip(".").replace("_orig_mod.", "")


def _matches(pattern: str, which: str, name: str) -> bool:
    """Whether a pattern fits a parameter's name, with or without its model's; `model[1].*` is the second model, no class of characters."""
    patterns = pattern, pattern.replace("model[", "model[[]")
    return any(fnmatch.fnmatch(full, each) for each in patterns for full in (name, which + name))


@dataclass
class Seen:
    """What the first steps have shown."""

    watched: Watched
    batches: list[Any]
    losses: list[float]
    modes: list[str] = field(default_factory=list)
    """Modules whose training mode a step has changed."""
    got: set[int] = field(default_factory=set)
    """Ids of parameters with a gradient."""
    arrived: set[int] = field(default_factory=set)
    """Ids of parameters to which a backward brought a gradient that is not zero, whether or not an optimizer used it."""
    stepped: bool = False
    """Whether an optimizer has stepped."""
    changed: set[int] = field(default_factory=set)
    """Ids of parameters whose values the steps have changed."""
    nonzero: set[int] = field(default_factory=set)
    nonfinite: set[int] = field(default_factory=set)
    same_units: set[int] = field(default_factory=set)
    """Ids of matrices whose rows are all equal after the steps."""
    steps_by_heart: int = 0
    """Steps in which a few samples were learnt by heart; 0 = not known."""
    unregistered: list[str] = field(default_factory=list)
    """Modules that get gradients, but are in plain containers, where neither model nor optimizer has them."""
    added_up: set[int] = field(default_factory=set)
    """Ids of parameters whose gradient was that of all steps so far, as none was set to zero."""


def of_task(task: Task, spec: RunSpec, frozen: Sequence[str]) -> Training:
    """The training of a task, without a launch: in fp32, on one device.

    Raises:
        TaskError, SpecError: it cannot be built.
    """
    device = choose_device(spec, 0, 1)
    seed_all(spec.seed)
    model = build_model(task).to(device).train()
    optimizer = build_optimizer(model, task.optimizer, override=spec.optimizer, lr=spec.lr, decayed=spec.weight_decay_on)
    dataset, collate = task.dataset(), task.collate or default_collate
    size = 32 if spec.micro_batch == AUTO else spec.micro_batch
    order: list[int] = []
    if not isinstance(dataset, IterableDataset):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(spec.seed)).tolist()

    def fetch(indices: Sequence[int]) -> Any:
        several = getattr(dataset, "__getitems__", None)
        return to_device(collate(several(list(indices)) if several else [dataset[index] for index in indices]), device)

    def stream() -> Iterator[Any]:
        if order:
            whole = range(0, len(order) - size + 1, size) if len(order) >= size else [0]
            yield from (fetch(order[first : first + size]) for first in whole)
            return
        items = iter(dataset)
        while len(samples := list(itertools.islice(items, size))) == size:
            yield to_device(collate(samples), device)

    kept: list[Any] = []

    def samples(first: int, last: int) -> Any:
        if not kept:
            kept.extend(itertools.islice(dataset, FEW) if not order else (dataset[index] for index in order[:FEW]))
        chosen = kept[first:last]
        return to_device(collate(chosen), device)

    def loss(batch: Any) -> Tensor:
        return loss_of(task, model, batch)

    def step(batch: Any) -> Tensor:
        value = loss(batch)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return Training(
        step,
        [model],
        [optimizer],
        stream,
        few=lambda count: samples(0, count),
        part=samples,
        loss=loss,
        evaluate=(lambda: evaluate_alone(task, model, task.validation and validation_data(task), FEW, device)) if task.evaluate else None,
        frozen=frozen,
        notes=["The checks take the loss without label_smoothing."] if spec.label_smoothing else [],
        weight=(lambda batch: float(weight_of(task, batch))) if task.weight else None,
        accumulates=spec.accumulation > 1,
    )


@contextlib.contextmanager
def of_step(given: Step, frozen: Sequence[str]) -> Iterator[Training]:
    """The training of a step function and its loader."""
    check_arguments(given.step, 1.0)
    notes: list[str] = []
    state = discover_training(given.step, given.model, given.optimizer, given.loader, notes)
    with Feed(given.loader) as feed:

        def stream() -> Iterator[Any]:
            if feed.kind != "once":
                feed.restart()
            until = feed.passes + 1
            with contextlib.suppress(Exhausted):
                while True:
                    batch = feed.next()
                    if feed.passes > until:
                        return
                    yield batch

        yield Training(given.step, state.models, state.optimizers, stream, frozen=frozen, notes=notes, batch_size=feed.batch_size)


def loss_value(loss: Any) -> float:
    """The loss that a step has returned; nan = none."""
    try:
        return loss_in(loss)
    except LrRangeError:
        return math.nan


class _Arrived:
    """The gradients that backwards bring to a parameter, beside what it has as its gradient at an update."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._since_update = torch.zeros_like(weight)
        self._used: Tensor | None = None
        """Its gradient at the last update."""
        self._handle = weight.register_hook(self._arrives)  # type: ignore[no-untyped-call]

    def _arrives(self, grad: Tensor) -> None:
        if grad.layout == torch.strided:
            self._since_update += grad

    def was_kept(self) -> bool:
        """Whether the gradient at this update is that of the last one plus what arrived since, and not what arrived alone; up to a factor,
        as clipping its norm multiplies it by one.
        """
        grad, kept = self.weight.grad, False
        if grad is not None and grad.layout == torch.strided:
            if self._used is not None:
                kept = _turned(grad, self._used + self._since_update) < 1e-3 and _turned(grad, self._since_update) > 1e-2
            self._used = grad.detach().clone()
        self._since_update.zero_()
        return kept

    def remove(self) -> None:
        self._handle.remove()


def _turned(one: Tensor, other: Tensor) -> float:
    """How far the directions of two tensors lie apart: 0 = a positive factor, 2 = a negative one, nan = one of them is 0."""
    return float((one / one.norm() - other / other.norm()).norm())


def _unregistered(model: nn.Module, known: set[int]) -> Iterator[str]:
    """Names of modules in plain lists, tuples and dictionaries with gradients of weights that are not known."""
    for path, part in model.named_modules():
        for name, value in vars(part).items():
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
            for key, module in items:
                weights = list(module.parameters()) if isinstance(module, nn.Module) else []
                if any(weight.grad is not None and id(weight) not in known for weight in weights):
                    yield f"{path}.{name}[{key!r}]".lstrip(".")


def observe(training: Training, *, seconds: float = math.inf) -> Seen:
    """Take the first steps, and watch them; and more, for so many seconds, until each optimizer has stepped.

    Raises:
        ValueError: the loader gave no batch.
    """
    seen = Seen(Watched(training.models), [], [])

    def note(weight: Tensor) -> None:
        if weight.grad is not None:
            grad = weight.grad.coalesce().values() if weight.grad.is_sparse else weight.grad
            seen.got.add(id(weight))
            if bool(torch.count_nonzero(grad)):
                seen.nonzero.add(id(weight))
            if not bool(torch.isfinite(grad).all()):
                seen.nonfinite.add(id(weight))

    weights = [weight for model in training.models for weight in model.parameters()]

    stepped = set[int]()

    def stepping(optimizer: Optimizer, *_: Any) -> None:
        stepped.add(id(optimizer))
        seen.stepped = True
        held = [weight for group in optimizer.param_groups for weight in group["params"]]
        for weight in {id(weight): weight for weight in [*weights, *held]}.values():
            note(weight)
        for one in arrived.get(id(optimizer), ()):
            if one.was_kept():
                seen.added_up.add(id(one.weight))

    arrived = {
        id(optimizer): [
            _Arrived(min(trained, key=lambda weight: (weight.numel() < ENOUGH, weight.numel())))
            for group in optimizer.param_groups
            if (trained := [weight for weight in group["params"] if weight.requires_grad])
        ]
        for optimizer in training.optimizers
    }

    def arrives(weight: Tensor, grad: Tensor) -> None:
        if id(weight) not in seen.arrived and grad.layout == torch.strided and bool(torch.count_nonzero(grad)):
            seen.arrived.add(id(weight))

    handles: list[Any] = [register_optimizer_step_pre_hook(stepping)]
    handles += [weight.register_hook(partial(arrives, weight)) for weight in weights if weight.requires_grad]  # type: ignore[no-untyped-call]
    sizes = [float(weight.detach().double().norm()) for weight in weights]
    before = [(name, part, part.training) for model in training.models for name, part in model.named_modules()]
    try:
        with seen.watched.on():
            until, batches = time.monotonic() + seconds, training.stream()
            for batch in itertools.islice(batches, OBSERVED):
                seen.batches.append(batch)
                seen.losses.append(loss_value(training.step(batch)))
                seen.modes += [name or type(part).__name__ for name, part, mode in before if part.training != mode and not seen.modes]
        for batch in itertools.islice(batches, MOST_OBSERVED - OBSERVED):
            if stepped >= {id(optimizer) for optimizer in training.optimizers} or time.monotonic() > until:
                break
            training.step(batch)
    finally:
        for one in itertools.chain(handles, *arrived.values()):
            one.remove()
    now = [float(weight.detach().double().norm()) for weight in weights]
    seen.changed = {id(weight) for weight, old, new in zip(weights, sizes, now, strict=True) if old != new}
    layers = [part for model in training.models for part in model.modules() if not isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    matrices = [weight for part in layers for weight in part.parameters(recurse=False) if weight.ndim > 1 and len(weight) > 1]
    seen.same_units = {id(weight) for weight in matrices if bool((weight == weight[:1]).all())}
    held = {id(weight) for optimizer in training.optimizers for group in optimizer.param_groups for weight in group["params"]}
    if held:
        known = held | {id(weight) for weight in weights}
        seen.unregistered = [name for model in training.models for name in _unregistered(model, known)]
    if not seen.batches:
        raise ValueError("the loader gave no batch: is its dataset empty, or smaller than batch_size with drop_last=True?")
    return seen
