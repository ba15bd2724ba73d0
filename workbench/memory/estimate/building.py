"""Builds a model with fake tensors, from a function that makes it or from a model that exists, which stays as it is.

A model's hooks come along: they are found, bound to its copy, and what they write to is restored after a dry run.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.harness.batches import map_tensors
from workbench.memory.estimate.compiled import too_old
from workbench.memory.estimate.cuda.device_redirection import CallsMeanHome, cuda_means
from workbench.memory.estimate.cuda.overrides import replaced
from workbench.runs.task import TaskError

MANY = 4096
"""Items of a container up to which those within it are looked at, too."""


def hook_tables(module: nn.Module) -> Iterator[tuple[str, dict[Any, Any]]]:
    """A module's tables of hooks, whatever kind, with their names."""
    for name, value in vars(module).items():
        if name.endswith("_hooks") and isinstance(value, dict):
            yield name, value


def rebound(hook: Any, memo: dict[int, Any]) -> Any:
    """A hook as it is for the copy: what `memo` has a copy of is replaced by it; objects are copied, plain functions are not."""
    if isinstance(hook, types.FunctionType):
        cells = hook.__closure__ or ()
        contents = [_content(cell) for cell in cells]
        if all(_twin(content, memo) is content for content in contents):
            return hook
        closure = tuple(
            cell if _twin(content, memo) is content else types.CellType(_twin(content, memo))
            for cell, content in zip(cells, contents, strict=True)
        )
        made = types.FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, closure)
        made.__kwdefaults__ = hook.__kwdefaults__
        made.__dict__.update(vars(hook))
        return made
    if type(hook) is functools.partial:
        named = {key: _twin(value, memo) for key, value in hook.keywords.items()}
        return functools.partial(rebound(hook.func, memo), *(_twin(value, memo) for value in hook.args), **named)
    return copy.deepcopy(hook, memo)


def _twin(value: Any, memo: dict[int, Any]) -> Any:
    return memo.get(id(value), value)


def _content(cell: types.CellType) -> Any:
    with contextlib.suppress(ValueError):  # an empty one
        return cell.cell_contents
    return None


def called(hook: Any) -> str:
    """A hook's name, for messages."""
    return str(getattr(hook, "__qualname__", type(hook).__name__))


@contextlib.contextmanager
def kept_by_hooks(model: nn.Module) -> Iterator[None]:
    """On leaving, the lists, dicts and sets that a model's hooks write to are as they were: those in closures, arguments and globals."""
    containers: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        for _, table in hook_tables(module):
            for hook in table.values():
                for value in _reached(hook):
                    _remember(value, containers)
    try:
        yield
    finally:
        for container, before in containers.values():
            container.clear()
            (container.extend if isinstance(container, list | collections.deque) else container.update)(before)


def _reached(hook: Any) -> Iterator[Any]:
    if str(getattr(hook, "__module__", "")).partition(".")[0] in ("torch", "workbench"):
        return
    if isinstance(hook, types.FunctionType):
        yield from map(_content, hook.__closure__ or ())
        yield from hook.__defaults__ or ()
        yield from (hook.__globals__.get(name) for name in hook.__code__.co_names)
    elif type(hook) is functools.partial:
        yield from (*hook.args, *hook.keywords.values(), *_reached(hook.func))
    else:
        yield getattr(hook, "__self__", None)  # such as seen.append


def _remember(value: Any, containers: dict[int, tuple[Any, Any]], deep: int = 2) -> None:
    if id(value) in containers or not isinstance(value, list | dict | set | collections.deque):
        return
    containers[id(value)] = value, dict(value) if isinstance(value, dict) else list(value)
    if deep and len(value) <= MANY:
        for item in value.values() if isinstance(value, dict) else value:
            _remember(item, containers, deep - 1)


LARGE = 4096
"""Elements from which on a constructor's random numbers are not drawn."""
_FILLS = (
    *("fill_", "zero_", "copy_", "mul_", "add_", "clamp_", "erfinv_"),
    *("normal_", "trunc_normal_", "uniform_", "bernoulli_", "exponential_"),
)
"""Operators that give a new weight its values."""


COMPILED = (
    "torch.compile is left out: estimated is the module as it was before (model._orig_mod). A compiled step may take less, since it keeps "
    "fewer activations, or more: "
    + ("" if too_old() else 'compile="model" estimates that for device="cpu", and ')
    + "wb.measure_memory measures it"
)
"""Note on a model that torch.compile compiled, where the knob `compile` is "none"."""
_NOTES: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
"""Model that was built or copied → notes on what was left out."""


class BuildError(ValueError):
    """A model that cannot be built or copied; the message says why and what to try."""


class _Unfilled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves large new weights without values: memory that is never written is never taken."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _FILLS and isinstance(args[0], Tensor) and args[0].numel() >= LARGE and args[0].is_floating_point():
            return args[0]
        return func(*args, **(kwargs or {}))


def build(make: Callable[[], Any], *, on_meta: bool = True) -> Any:
    """The result of a function, without values where that is possible.

    Args:
        make: builds a model.
        on_meta: on torch's meta device, where tensors are shapes only. False: on the CPU, with large weights left unfilled, for
            constructors that read numbers from tensors.

    Raises:
        BuildError: it cannot be made on the meta device.
    """
    home = torch.device("meta" if on_meta else "cpu")
    with torch.inference_mode(False), torch.enable_grad(), cuda_means(home), CallsMeanHome(home), _compiling_nothing() as left_out:
        if not on_meta:
            with _Unfilled():  # type: ignore[no-untyped-call]
                return _built(make(), left_out)
        try:
            with home:
                return _built(make(), left_out)
        except (BuildError, TaskError):
            raise
        except Exception as error:
            raise BuildError(f"the model cannot be built without values: {type(error).__name__}: {error}") from error


def notes_of(model: nn.Module) -> list[str]:
    """Notes on what was left out of a model of `build` or `copied`."""
    return list(_NOTES.get(model, ()))


def copied(model: nn.Module) -> nn.Module:
    """The structure of a model; its tensors are shared, not copied, and the model itself is not touched.

    Hooks come along. Those that are bound to a module, or hold one in a closure, are bound to its copy; plain functions are shared.

    Raises:
        BuildError: it cannot be copied.
    """
    eager, notes = _eager(model)
    tables = [(module, name, table) for module in eager.modules() for name, table in hook_tables(module)]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in _tensors_in(eager)}
    memo |= {id(table): type(table)() for _, _, table in tables}  # filled one by one below: a hook may be all that cannot be copied
    try:
        for part in reversed(list(eager.modules())):  # the inner ones first
            if isinstance(uncompiled := part._modules.get("_orig_mod"), nn.Module):
                memo[id(part)] = copy.deepcopy(uncompiled, memo)
        twin: nn.Module = copy.deepcopy(eager, memo)
    except Exception as error:
        raise BuildError(
            f"the model, a {type(model).__name__}, cannot be copied ({type(error).__name__}: {str(error)[:200]}): "
            f"give a function that builds it, such as lambda: {type(model).__name__}(…)"
        ) from error
    for module, name, table in tables:
        kept: dict[Any, Any] = vars(memo.get(id(module), twin)).setdefault(name, type(table)())
        for key, hook in table.items():
            try:
                kept[key] = rebound(hook, memo)
            except Exception as error:
                notes.append(
                    f"a hook of a {type(module).__name__}, {called(hook)}, was left out: it cannot be copied ({type(error).__name__}: "
                    f"{str(error)[:80]}); give a function that builds the model"
                )
    if notes:
        _NOTES[twin] = notes
    return twin


def _built(model: Any, left_out: list[str]) -> Any:
    """The result of a user's function."""
    if isinstance(model, nn.Module):
        model, notes = _eager(model)
        if notes or left_out:
            _NOTES[model] = [*_NOTES.get(model, ()), *(notes or left_out[:1])]
    return model


@contextlib.contextmanager
def _compiling_nothing() -> Iterator[list[str]]:
    """Inside, torch.compile gives back what it was given; yields what to say of that. It would write down what is replaced here."""
    left_out: list[str] = []

    def same(model: Any = None, **options: Any) -> Any:
        left_out.append(COMPILED)
        return model if model is not None else lambda function: function

    with replaced(torch, "compile", same):
        yield left_out


def _is_compiled(part: nn.Module) -> bool:
    """Is this module, one of its methods, or a function that it holds compiled?"""
    if "_orig_mod" in part._modules or getattr(part, "_compiled_call_impl", None):
        return True
    own = (kind for kind in type(part).__mro__ if kind not in nn.Module.__mro__)
    return any(hasattr(value, "_torchdynamo_orig_callable") for table in (part, *own) for value in list(vars(table).values()))


def _eager(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """A model without torch.compile's wrapper, and what to say of that."""
    notes, wrapped = [], getattr(model, "_orig_mod", None)
    if isinstance(wrapped, nn.Module):
        model = wrapped
    if isinstance(wrapped, nn.Module) or any(map(_is_compiled, model.modules())):
        notes.append(COMPILED)
    for name, module in model.named_modules():
        what = f"the module {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise BuildError(
                f"{what} is a torch.jit.{type(module).__name__}, whose memory cannot be estimated: give the module as it was before "
                "torch.jit.script or torch.jit.trace"
            )
        if any(is_lazy(tensor) for table in (module._parameters, module._buffers) for tensor in table.values()):
            raise BuildError(
                f"{what}, a {type(module).__name__}, has no shapes yet, as lazy modules until their first batch: build the model, run a "
                "batch through it, model(batch[0]), and estimate that model"
            )
    return model, notes


def materialise(model: nn.Module, fake: Callable[[Tensor], Tensor]) -> nn.Module:
    """Put fakes in the place of all tensors of a model, in place; one for each, so that tied weights stay tied."""
    memo: dict[int, tuple[Tensor, Tensor]] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in memo:
            made = fake(tensor)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = tensor, made
        return memo[id(tensor)][1]

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = once(tensor)  # type: ignore[assignment]
        for name, value in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules") and _holds_tensors(value):
                module.__dict__[name] = map_tensors(once, value)
    return model


def fake_like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides and type on the CPU; within `fake_tensors` it is a fake."""
    if tensor.layout != torch.strided:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, list | tuple):
        return any(_holds_tensors(item) for item in value)
    if isinstance(value, dict):
        return any(_holds_tensors(item) for item in value.values())
    return False


def _tensors_in(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        yield from _tensors_of(vars(module))
        for _, table in hook_tables(module):
            for hook in table.values():
                owner = getattr(hook, "__self__", hook)
                if not isinstance(owner, nn.Module | type) and hasattr(owner, "__dict__"):
                    yield from _tensors_of(vars(owner))


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        if (value.is_leaf or value.retains_grad) and value.grad is not None:  # of others torch warns
            yield value.grad
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors_of(vars(value) if hasattr(value, "__dict__") else {})
