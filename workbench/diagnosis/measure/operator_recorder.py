"""Records a sketch of what every operator and module computes in a step, forward, backward and optimizer, with the module that it is of.

torch tells which module a backward operator belongs to only by functions with an underscore: they are used here alone. Where they are
gone, such operators have no module.
"""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from workbench.diagnosis.analysis.divergence import WHOLE
from workbench.harness.batches import tensors_of

PROJECTIONS = 4
UNDEFINED = ("aten.empty", "aten.new_empty", "aten.set_", "aten.resize_")
"""Operators whose result has no values yet."""
INSIDE = ("scaled_dot_product", "_rnn", "lstm", "gru")
"""Operators that may draw random numbers inside."""
RANDOM = ("bernoulli", "dropout", "rand", "normal_", "uniform_", "multinomial", "exponential_")


@dataclass(frozen=True, slots=True)
class Sketch:
    """A tensor in few numbers: its norm, and its projections on fixed random signs. Those of two tensors differ as the tensors do."""

    shape: tuple[int, ...]
    norm: float
    projections: tuple[float, ...]

    def distance(self, other: "Sketch") -> float:
        """An estimate of the norm of the difference; inf = one of them is not finite."""
        if self == other:
            return 0.0
        pairs = list(zip((*self.projections, self.norm), (*other.projections, other.norm), strict=True))
        if not all(math.isfinite(x) and math.isfinite(y) for x, y in pairs):
            return 0.0 if math.isfinite(self.norm) == math.isfinite(other.norm) else math.inf
        return math.sqrt(sum((x - y) ** 2 for x, y in pairs[:PROJECTIONS]) / PROJECTIONS)


_signs: dict[int, Tensor] = {}


def sketch(tensor: Tensor) -> Sketch:
    flat = tensor.detach().to("cpu", torch.float64).reshape(-1)
    if flat.numel() not in _signs:
        if len(_signs) > 256:
            _signs.clear()
        generator = torch.Generator().manual_seed(flat.numel())
        _signs[flat.numel()] = torch.randint(0, 2, (PROJECTIONS, flat.numel()), generator=generator).double() * 2 - 1
    values = (_signs[flat.numel()] @ flat).tolist()
    return Sketch(tuple(tensor.shape), float(flat.norm()), tuple(values))


@dataclass(frozen=True, slots=True)
class Entry:
    """A recorded result."""

    kind: str
    """"operator", "module" or "value". Three more explain where values differ: "update", an operator of an optimizer's step, its `module`
    the parameter, "options", those of the parameter's group as JSON in `operator`, and "modes", which modules are in training mode."""
    key: tuple[Any, ...]
    """By which two recordings are aligned."""
    step: int
    phase: str
    module: str
    operator: str
    sketches: tuple[Sketch, ...]

    @property
    def random(self) -> bool:
        """Does it draw random numbers?"""
        return any(word in self.operator for word in RANDOM)

    @property
    def perhaps_random(self) -> bool:
        """Does it draw random numbers, or may it?"""
        return self.random or any(word in self.operator for word in INSIDE)


def uncompiled(name: str) -> str:
    """The name of a module in the model before it was compiled."""
    return name.replace("_orig_mod.", "").replace("_orig_mod", "") or WHOLE


def options_of(optimizer: torch.optim.Optimizer, model: nn.Module, step: int) -> list[Entry]:
    """The options that a step updates each parameter of the model with."""
    names = {id(weight): uncompiled(name) for name, weight in model.named_parameters()}
    entries = []
    for group in optimizer.param_groups:
        options = json.dumps({name: _plain(value) for name, value in group.items() if name not in ("params", "param_names")}, default=str)
        for name in (names[id(weight)] for weight in group["params"] if id(weight) in names):
            entries.append(Entry("options", (step, "options", name), step, "optimizer", name, options, ()))
    return entries


def modes_of(model: nn.Module, step: int) -> Entry:
    """Which modules of the model are in training mode when a step begins, as JSON in `operator`."""
    modes = {uncompiled(name): part.training for name, part in model.named_modules()}
    return Entry("modes", (step, "modes"), step, "start", "", json.dumps(modes), ())


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


class Recorder(TorchDispatchMode):
    """Records inside `on` and `update`."""

    def __init__(self, model: nn.Module, *, operators: bool) -> None:
        """
        Args:
            model: the model whose modules are named.
            operators: record each operator, and the modules inside; False = the model as a whole, as for one that is compiled.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self.phase, self.step = "forward", 1
        self._operators, self._model = operators, model
        self._names = {id(part): uncompiled(name) for name, part in model.named_modules()}
        self._stack: list[str] = []
        self._left = ""  # the module that returned last
        self._by_sequence: dict[int, str] = {}
        self._calls: Counter[Any] = Counter()
        self._inputs: dict[int, list[str]] = {}
        self._alive: list[Tensor] = []
        self._quiet = False
        self.takers = {id(buffer): "" for buffer in model.buffers()}  # the last operator that was given a buffer, and may have changed it
        self._owners = WeakIdKeyDictionary()  # tensor of an optimizer's step → its parameter

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Record inside."""
        handles = list[RemovableHandle]()
        enter, leave = self._enter, self._leave
        if not self._operators:  # torch.compile would compile the sketches, too
            enter, leave = map(torch.compiler.disable, (enter, leave))
        for part in self._model.modules() if self._operators else [self._model]:
            handles.extend((part.register_forward_pre_hook(enter), part.register_forward_hook(leave, always_call=True)))
        try:
            with self if self._operators else contextlib.nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def update(self, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
        """Record an optimizer's step inside: its options, and its operators with the parameters whose tensors they make."""
        self.phase = "optimizer"
        if optimizer:
            self.entries.extend(options_of(optimizer, self._model, self.step))
        for name, weight in self._model.named_parameters():
            for tensor in (weight, weight.grad):
                if tensor is not None:
                    self._owners[tensor] = uncompiled(name)
        with self if self._operators else contextlib.nullcontext():
            yield

    def _add_update(self, name: str, result: Any, args: Any, kwargs: Any) -> None:
        """An operator of the optimizer's step. One that takes lists of tensors has an entry for each tensor that it makes or changes."""
        made = tensors_of(result) or (tensors_of(args[0]) if args and name.endswith("_") else [])
        owners = [self._owners.get(tensor, "") for tensor in tensors_of((args, kwargs))]  # type: ignore[no-untyped-call]
        several = bool(args) and isinstance(args[0], list | tuple) and len(args[0]) == len(made)
        for number, tensor in enumerate(made):
            owner = owners[number] if several else next(filter(None, owners), "")
            if owner:
                self._owners[tensor] = owner
                self._add("update", (self.step, "update", owner, name), "optimizer", owner, name, tensor)

    @contextlib.contextmanager
    def phase_of_step(self, phase: str) -> Iterator[None]:
        """Inside, the phase is that of a trainer's step, if it is recorded."""
        before, self.phase = self.phase, phase if phase in ("forward", "backward") else self.phase
        yield
        self.phase = before

    def begin(self, step: int) -> None:
        self.step, self.phase, self._left = step, "forward", ""
        self._calls.clear()
        self._by_sequence.clear()
        self._inputs.clear()
        self._alive.clear()
        self.entries.append(modes_of(self._model, step))

    def value(self, phase: str, name: str, value: Any, operator: str = "") -> None:
        """Record a value of the training by its name, and the operator that made it, if that is known."""
        self._add("value", (self.step, phase, name), phase, name, operator, value)

    def _add(self, kind: str, key: tuple[Any, ...], phase: str, module: str, operator: str, value: Any) -> None:
        before, self._quiet = self._quiet, True
        try:
            tensors = [tensor for tensor in tensors_of(value) if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel()]
            sketches = tuple(sketch(tensor) for tensor in tensors if not tensor.is_complex())
            self.entries.append(Entry(kind, key, self.step, phase, module, operator, sketches))
        finally:
            self._quiet = before

    def _count(self, *key: Any) -> tuple[Any, ...]:
        self._calls[key] += 1
        return (self.step, *key, self._calls[key])

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module), "")
        if self._stack and self.phase == "forward":  # code between modules has no module of its own: what it makes is an input of the next
            place = f"between {self._left} and {name}" if self._left else f"before {name}"
            self._add("module", self._count("input", name), "forward", place, "", args)
        self._stack.append(name)
        for tensor in tensors_of(args):
            if not tensor.requires_grad:
                continue
            if id(tensor) in self._inputs:  # a container hands it on: the inner module's is the better name
                self._inputs[id(tensor)][0] = name
                continue
            holder = self._inputs[id(tensor)] = [name]
            self._alive.append(tensor)
            tensor.register_hook(lambda grad, holder=holder: self._gradient(holder[0], grad))  # type: ignore[no-untyped-call]

    def _gradient(self, name: str, grad: Tensor) -> None:
        self._add("module", self._count("gradient", name), "backward", name, "", grad)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(id(module), "")
        if self._stack and self._stack[-1] == name:
            self._stack.pop()
        if self.phase == "forward":
            self._left = name
            self._add("module", self._count("output", name), "forward", name, "", output)
            if module is self._model:
                for tensor in tensors_of(output):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda grad: self._gradient("the loss", grad))  # type: ignore[no-untyped-call]

    def _place(self) -> str:
        if self._stack:
            return self._stack[-1]
        if self.phase != "backward":
            return ""
        try:
            node = torch._C._current_autograd_node()
            return self._by_sequence.get(node._sequence_nr(), "") if node is not None else ""
        except AttributeError:
            return ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._quiet:
            return result
        name = str(func).rpartition(".")[0]
        if self.phase == "optimizer":
            if not name.startswith(UNDEFINED):
                self._add_update(name, result, args, kwargs)
            return result
        if self.phase == "forward":
            self.takers |= {id(value): name for value in args if id(value) in self.takers}
            with contextlib.suppress(AttributeError):
                self._by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, self._place())  # type: ignore[attr-defined]
        if not name.startswith(UNDEFINED) and (tensors := tensors_of(result)):
            self._add("operator", (self.step, self.phase, name), self.phase, self._place(), name, tensors)
        return result
