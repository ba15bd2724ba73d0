"""Subject: the step under experiment, as far as it can be told before and while it is called: models, optimizers, precision, samples."""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.checks import real_number, whole_number
from workbench.measure.arms import DTYPES
from workbench.measure.blocks import DiagnoseError
from workbench.measure.found import Found, describe, find, name_of
from workbench.measure.loop import samples_in


def check(step: Any, budget_s: float, accumulation: int = 1) -> None:
    """Refuse what cannot work before anything is started.

    Raises:
        DiagnoseError: no function of one argument; no time; no whole number of batches.
    """
    if not callable(step):
        raise DiagnoseError(f"step is a {type(step).__name__}: wanted is a function, step(batch), that does one optimizer step")
    try:
        signature = inspect.signature(step)
    except ValueError:  # functions written in C have none
        signature = None
    if signature is not None:
        try:
            signature.bind(None)
        except TypeError as error:
            raise DiagnoseError(
                f"step cannot be called with one argument, the batch: {name_of(step)}{signature}, {error}. "
                "Try lambda batch: …, or functools.partial for the other arguments"
            ) from None
    real_number("budget_s", budget_s, above=0, what="seconds", also="; try budget_s=60", error=DiagnoseError, finite=False)
    whole_number("accumulation", accumulation, least=1, error=DiagnoseError)


def look_around(step: Any, model: Any, optimizer: Any, loader: Any, notes: list[str]) -> Found:
    """The models and optimizers that are given, and everything else that the step reaches; what was found without being given is noted.

    Raises:
        DiagnoseError: no module, no optimizer.
    """
    models = _several(model, nn.Module, "model", "a torch.nn.Module")
    optimizers = _several(optimizer, Optimizer, "optimizer", "a torch.optim.Optimizer")
    found = find(step, *models, *optimizers, but=[loader])
    if models:
        found.models[:] = models
    elif found.models:
        notes.append(f"found behind step: the model {', '.join(map(describe, found.models))}")
    else:
        notes.append("no model was found behind step: it could not be put back to what it was before. Try model=…")
    if optimizers:
        found.optimizers[:] = [*optimizers, *(one for one in found.optimizers if one not in optimizers)]
    elif found.optimizers:
        notes.append(f"found behind step: the optimizer {', '.join(map(describe, found.optimizers))}")
    return found


def _several(given: Any, kind: type, name: str, what: str) -> list[Any]:
    parts = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    for part in parts:
        if not isinstance(part, kind):
            shown = f"the class {part.__name__}" if isinstance(part, type) else f"a {type(part).__name__}"
            raise DiagnoseError(f"{name}= was given {shown}: it takes {what}, or a list of them; leave it out if there is none")
    return parts


def device_of(models: Sequence[nn.Module]) -> torch.device:
    """Where the models are; without one, the current CUDA device if that is in use."""
    weight = next((weight for model in models for weight in model.parameters()), None)
    if weight is not None:
        return weight.device
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if in_use else torch.device("cpu")


def weights_of(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Their parameters, each once."""
    return list({id(weight): weight for model in models for weight in model.parameters()}.values())


def samples_of(batch: Any, accumulation: int) -> int | None:
    """Samples in what one step takes; None if it cannot be told."""
    sizes = [samples_in(one) for one in (batch if accumulation > 1 else [batch])]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def dtype_of(models: Sequence[nn.Module]) -> str:
    """The precision of the weights."""
    weights = {weight.dtype for weight in weights_of(models)}
    return "fp32" if not weights or torch.float32 in weights else ", ".join(sorted(str(one).removeprefix("torch.") for one in weights))


@contextlib.contextmanager
def autocast_seen(models: Sequence[nn.Module], device: torch.device) -> Iterator[list[str]]:
    """Collects in which precision the innermost modules with weights are called."""
    seen: list[str] = []
    names = {dtype: name for name, dtype in DTYPES.items()}

    def called(*_: Any) -> None:
        if torch.is_autocast_enabled(device.type):
            seen.append(names.get(torch.get_autocast_dtype(device.type), "fp32"))

    handles = [
        part.register_forward_pre_hook(called)
        for model in models
        if not any(getattr(one, "_compiled_call_impl", None) or "_orig_mod" in one._modules for one in model.modules())
        for part in model.modules()
        if not list(part.children()) and next(part.parameters(), None) is not None
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
