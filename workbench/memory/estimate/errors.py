"""Turns errors of a dry run into EstimateErrors in plain words: in which module it happened, why, and what to try."""

import contextlib
import linecache
import re
import traceback
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from workbench.harness.batches import tensors_of
from workbench.memory.estimate.building import BuildError, kept_by_hooks, notes_of
from workbench.memory.measure.recorder import Recorder
from workbench.runs.spec import SpecError
from workbench.runs.task import TaskError

DOING = {
    "init": "preparation of the model",
    "data": "batch",
    "forward": "forward",
    "backward": "backward",
    "between": "backward",
    "optimizer": "optimizer step",
    "end": "optimizer step",
}
"""Phase of the log → its name in messages."""


_ARGUMENTS = re.compile(
    r"positional argument|keyword argument|required .*argument|multiple values for|argument .* must be|invalid combination"
)
"""Texts of TypeErrors about the arguments of a function."""
_TORCHS = re.compile(r"[\\/](torch|workbench[\\/](memory|harness|timeline|train|programs))[\\/]")
"""Parts of paths of torch's files that check shapes."""
_NOT_THEIRS = re.compile(r"[\\/](torch|workbench[\\/](memory|harness|timeline|train|cluster|programs))[\\/]")
"""Parts of paths of files that are not the user's."""

_FAKE_IS_MISSING = (
    r"no fake impl registered for \D*?(\w+::\w+)",
    r"(\w+::\w+)[^\n]*(?:fake impl|fake kernel|Meta|no fake)",
    r"Could not run '(\w+::\w+)",
)
"""Texts of errors about an operator without a fake implementation: of `torch.library.custom_op`, and of others."""


class EstimateError(ValueError):
    """A program whose memory cannot be estimated; the message says where it went wrong and what to try."""


@contextlib.contextmanager
def estimate_errors(recorder: Recorder, model: nn.Module, batch: Any) -> Iterator[None]:
    """Inside, other errors become EstimateErrors."""
    recorder.log.notes += notes_of(model)
    answers: Any = getattr(recorder, "assumed", None)
    if answers is not None:
        answers.moment = lambda: (recorder.step, recorder.now)
    try:
        with kept_by_hooks(model):
            yield
    except (TaskError, SpecError, EstimateError, BuildError):
        raise
    except Exception as error:
        module = recorder.tracker.failed(error)
        kind = recorder.log.modules.get(module or "", type(model).__name__)
        raise explained(error, module=module, kind=kind, batch=batch, doing=DOING[recorder.now]) from error
    finally:
        if answers is not None:
            answers.moment = _nothing


def explained(error: BaseException, *, module: str | None, kind: str, batch: Any, doing: str) -> EstimateError:
    """The error that a user should see.

    Args:
        error: what was raised on fake tensors.
        module: the innermost module whose forward it left; "" = the model itself, None = none.
        kind: class of that module, or of the model.
        batch: what was given to the model.
        doing: what was being done, such as "forward".
    """
    where = _where(module, kind, doing)
    text = f"{type(error).__name__}: {_first_line(error)}"
    chain = list(_chain(error))
    if operator := next(filter(None, map(_sized_by_values, chain)), None):
        return EstimateError(
            f"{where} uses {operator}: the size of its result depends on values, which a dry run has not. Try an equivalent of fixed shape "
            "there, such as torch.where or multiplying by a mask; or measure it: wb.measure_memory(…)"
        )
    if operator := next(filter(None, map(_without_fake, chain)), None):
        return EstimateError(
            f"{where} uses the operator {operator}, which does not say what comes out for tensors without values. Register that once: "
            f'@torch.library.register_fake("{operator}") def _(…): return torch.empty_like(…); or measure it: wb.measure_memory(…)'
        )
    if any(map(_wants_values, chain)):
        return EstimateError(
            f"{where} needs real values ({text}): it reads a tensor's memory, in numpy or in code of its own, and a dry run has none. "
            "Try torch's operators there; or measure it: wb.measure_memory(…)"
        )
    if doing == "forward" and _about_arguments(error):
        try_ = ". The loss says how it is called: give loss=lambda model, batch: …" * (module == "" and isinstance(error, TypeError))
        return EstimateError(f"{where} does not accept the batch ({described(batch)}): {text}{try_}")
    if place := _place(error):
        given = f", given the batch ({described(batch)})" if doing == "forward" else ""
        return EstimateError(f"{where} raised {text} ({place[0]}:{place[1]}{given})")
    return EstimateError(f"{where}: {text}")


def described(batch: Any) -> str:
    """The tensors of a batch in words: `int64 8 × 128, int64 8 × 128`."""
    return ", ".join(_shape(tensor) for tensor in tensors_of(batch)) or f"a {type(batch).__name__} without tensors"


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {' × '.join(map(str, tensor.shape)) or 'scalar'}"


def _where(module: str | None, kind: str, doing: str) -> str:
    if module is None:
        return "the loss function" if doing == "forward" else f"the {doing}"
    return f"the model ({kind})" if module == "" else f"the module {module!r} ({kind})"


def _about_arguments(error: BaseException) -> bool:
    """Is an error about unsuitable arguments: their number or kind of arguments, or its shapes; not an exception of the user's own."""
    frames = traceback.extract_tb(error.__traceback__)
    text = str(error)
    if isinstance(error, TypeError):
        return _ARGUMENTS.search(text) is not None
    if "values to unpack" in text or (frames and _TORCHS.search(frames[-1].filename)):
        return True
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip() if frames else ""
    return isinstance(error, RuntimeError | IndexError) and not line.startswith(("raise", "assert"))


def _place(error: BaseException) -> tuple[str, int] | None:
    """File and line of the user's code that an error came from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _NOT_THEIRS.search(frame.filename)]
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else None


def _nothing() -> None:
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else "no message"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _operator(error: BaseException) -> str | None:
    """The operator in an error of torch's fake tensors: `aten.nonzero.default` → "aten::nonzero"."""
    func: Any = getattr(error, "func", None)
    if hasattr(func, "overloadpacket"):
        return str(func.name()).partition(".")[0]
    match = re.search(r"\b(\w+(?:::|\.)\w+)\b", str(error))
    return match[1].replace(".", "::") if match else None


def _sized_by_values(error: BaseException) -> str | None:
    name = type(error).__name__
    return _operator(error) or "an operator" if name in ("DynamicOutputShapeException", "DataDependentOutputException") else None


def _without_fake(error: BaseException) -> str | None:
    text = str(error)
    if type(error).__name__ == "UnsupportedOperatorException":
        return _operator(error) or "an operator"
    match = next(filter(None, (re.search(pattern, text) for pattern in _FAKE_IS_MISSING)), None)
    return match[1] if match and ("Meta" in text or "fake" in text.lower()) else None


def _wants_values(error: BaseException) -> bool:
    text = str(error)
    return any(
        sign in text
        for sign in ("data pointer", "data_ptr", ".numpy()", "numpy() is not supported", "storage has been released", "from Triton")
    )
