"""Lets torch.compile run in a dry run: TorchInductor plans the buffers of a compiled step, and its plan runs on fake tensors.

Dynamo traces the model, AOTAutograd decides what the forward saves for the backward, and Inductor fuses operators, orders them and writes a
Python program that allocates and frees the buffers which are left. That program is run as it is, on tensors without values; only its
kernels are left out, so that no C++ compiler or Triton is needed, and nothing is compiled. Inductor plans for a CPU here.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from workbench.memory.estimate.cuda.overrides import replaced
from workbench.runs.training_knobs import COMPILES, parse_call

DRY = ("inductor", "eager", "aot_eager")
"""Backends that compile nothing by themselves, or none of it in a dry run."""
NOT_COMPILED = "is left out, so that the eager step is estimated: a compiled one may keep fewer activations, or more"
NOTHING = "torch.compile found nothing to compile: the step is the eager one"


TOO_OLD = f"torch {torch.__version__} is too old for a dry run of compiled steps: a newer one is needed"


def too_old() -> bool:
    """Does this torch lack what compiles under a dispatch mode, or what plans the backward together with the forward?"""
    from torch._functorch import config

    return not (hasattr(TorchDispatchMode, "ignore_compile_internals") and hasattr(config, "force_non_lazy_backward_lowering"))


def left_out(knob: str, device: str) -> str:
    """Why a dry run cannot compile with this value of the knob `compile` for a device; "" = it can."""
    if device != "cpu":
        return 'what Inductor plans is known for device="cpu" only'
    if too_old():
        return TOO_OLD
    backend = parse_call("compile", knob, COMPILES, "blocks")[1]["backend"]
    return "" if backend in DRY else f"the backend {backend!r} cannot run without values"


def _set(config: Any, **options: Any) -> AbstractContextManager[Any]:
    """Inside, these options of a part of the compiler are set, as far as this torch has them."""
    changes: AbstractContextManager[Any] = config.patch({name: value for name, value in options.items() if hasattr(config, name)})
    return changes


def _graphs() -> int:
    """How many graphs were compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def compiling_on_fakes() -> Iterator[Callable[[], int]]:
    """Inside a dry run, what is compiled runs on fake tensors; on leaving, torch has forgotten it. Yields what counts the graphs so far.

    Raises:
        AttributeError, ImportError: this torch's compiler is another than is known here.
    """
    import torch._inductor.compile_fx  # all that refers to the class of fake tensors, before that is hidden
    from torch._C._dynamo import eval_frame
    from torch._dynamo import config as dynamo
    from torch._dynamo import convert_frame
    from torch._functorch import config as functorch
    from torch._inductor import async_compile, codecache, cpu_vec_isa
    from torch._inductor import config as inductor

    codes = convert_frame.Tracker()
    own = dict.fromkeys(("fx_graph_cache", "fx_graph_remote_cache", "autotune_local_cache", "bundled_autotune_remote_cache"), False)
    with contextlib.ExitStack() as stack:
        for change in (
            torch.compiler.set_stance("default"),
            _set(dynamo, automatic_dynamic_shapes=False, assume_static_by_default=True, recompile_limit=1 << 16),
            _set(functorch, enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
            _set(inductor, **own, compile_threads=1),
            replaced(convert_frame, "input_codes", codes),
            replaced(convert_frame, "_compile", _without_modes(convert_frame._compile)),
            replaced(FakeTensorMode, "ignore_compile_internals", classmethod(lambda cls: True)),
            replaced(cpu_vec_isa, "pick_vec_isa", lambda: cpu_vec_isa.invalid_vec_isa),  # it would compile something
            replaced(async_compile.AsyncCompile, "cpp_pybinding", lambda self, arguments, source: _no_kernel),
            replaced(codecache.PyCodeCache, "load_by_key_path", classmethod(_load)),
        ):
            stack.enter_context(change)
        try:
            _warm_up()
            before = _graphs()
            yield lambda: _graphs() - before
        finally:
            for code in [code for each in codes.seen if (code := each()) is not None]:
                if eval_frame._debug_get_cache_entry_list(code):
                    eval_frame.reset_code(code)


@functools.cache
def _warm_up() -> None:
    """Let torch's compiler fill its tables once, before functions of torch are replaced."""
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.ones(2, 2, requires_grad=True)
        torch.compile(lambda x: (x @ x).relu().sum())(weight).backward()


def quietly(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a compiled module, during which torch sees the class of fake tensors where it looks for it."""

    @functools.wraps(call)
    def seen(*args: Any, **kwargs: Any) -> Any:
        with replaced(torch._subclasses, "FakeTensor", FakeTensor):
            return call(*args, **kwargs)

    return seen


def _without_modes(compile_frame: Callable[..., Any]) -> Callable[..., Any]:
    """Torch compiles without dispatch modes, except where it cuts the graph at DDP's buckets."""

    @functools.wraps(compile_frame)
    def apart(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return compile_frame(*args, **kwargs)

    return apart


def _load(cls: Any, /, key: str, path: str, linemap: Any = None, attrs: Any = None, **options: Any) -> ModuleType:
    """A program that Inductor wrote, with substitutes for the functions that take memory; a fresh module, which no other run gets."""
    module = ModuleType(f"{__name__}.{key}")
    module.__file__, names = path, vars(module)
    with open(path) as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), names)
    names.update(attrs or {})
    names.update(empty_strided_cpu=_empty, reinterpret_tensor=_view, assert_size_stride=_no_kernel, assert_alignment=_no_kernel)
    return module


def _no_kernel(*args: Any) -> None:
    """A kernel, or a check."""


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _view(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)
