"""Dry run: takes training steps on fake tensors, recorded in a MemoryLog; nothing is computed, and the process stays as it was."""

import contextlib
import operator
import os
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from workbench.core import progress
from workbench.harness.batches import map_tensors
from workbench.harness.observe import uncompiled
from workbench.memory.estimate import building
from workbench.memory.estimate.compiled import NOTHING, compiling_on_fakes, quietly
from workbench.memory.estimate.cuda.emulation import emulate_cuda
from workbench.memory.estimate.cuda.overrides import replaced
from workbench.memory.estimate.errors import EstimateError
from workbench.memory.estimate.external_tensors import CapturedTensors
from workbench.memory.estimate.fake_tensors import asked_device, fake_tensors, foreach_on_fakes, movable_modules, real_tensors
from workbench.memory.estimate.values import KnownValues
from workbench.memory.measure.recorder import Recorder, fake_mode
from workbench.runs.spec import RunSpec
from workbench.runs.task import Task

ENDLESS = 10_000
"""Answers at one line in one forward or backward, from which on it counts as a loop that a value has to end."""
_OURS = ("torch", "workbench")
"""Packages whose frames are not the user's program."""
_DRIVER = "workbench.memory.api"
"""The module that takes the steps of a dry run."""
TRUE = ("all", "isfinite", "eq", "ge", "le", "lt", "isclose", "logical_and", "bitwise_and")
"""Reductions to a truth value, by their operator: "are all …", "is it finite", "is it equal". Assertions hold, masks mask nothing."""
FALSE = ("any", "isnan", "isinf", "isposinf", "isneginf")
"""Checks for unusual values, answered with no."""
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "ne": operator.ne,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
}
"""Comparisons with a given number: the tensor's value counts as 1, so that it is below a number of classes."""


def name_of(func: Any) -> str:
    """`aten.all.dim` → "all"."""
    return str(func.overloadpacket.__name__) if hasattr(func, "overloadpacket") else str(func)


def _is_ours(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in _OURS)


class AssumedValues:
    """Answers to `.item()`, `bool(tensor)` and the like.

    Every number is 1, so sizes that are computed from it are small, and every question for something unusual (is anything not a number, is
    anything above, did any gradient overflow) is answered no: the step is an ordinary one.

    Attributes:
        asked: how often a value was requested.
        moment: tells the step and what is being done.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.moment: Callable[[], object] = lambda: None
        self._first = ""  # the line that requested a value first
        self._places: Counter[tuple[str, int]] = Counter()  # file and line → questions there at this moment
        self._last: object = None
        self._truth: dict[int, bool] = {}  # address of a storage of truth values → what they say
        self._zeros: dict[int, weakref.ref[Any]] = {}  # address → a storage of flags that are zero unless something is wrong

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.asked:
            return ()
        times = "once" if self.asked == 1 else f"{self.asked} times"
        where = f"; first in {self._first}" if self._first else ""
        return (f"the program asked for the value of a tensor {times} (.item(), bool()): answered 1, and no to what is unusual{where}",)

    def of(self, tensor: Any, *, count: bool = True) -> Any:
        """The value of a fake tensor with one element, of which nothing is known.

        Args:
            tensor: a fake tensor of one element, whose value is requested.
            count: it is worth a note: the answer may decide what memory is needed.

        Raises:
            EstimateError: the program asks again and again.
        """
        if count:
            self._count()
        address = tensor.untyped_storage()._cdata
        if tensor.dtype == torch.bool:
            return self._truth.get(address, False)
        value = self._number(tensor)
        return float(value) if tensor.dtype.is_floating_point else value

    def same(self, first: Tensor, second: Tensor) -> bool:
        """Are two tensors equal? Yes, if they can be."""
        self._count()
        return first.shape == second.shape

    def _count(self) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and _is_ours(module := str(frame.f_globals.get("__name__", ""))):
            if module == _DRIVER:
                return  # nothing of the program is in between: torch asked by itself, as for the first message of a pipeline
            frame = frame.f_back
        self.asked += 1
        if (now := self.moment()) != self._last:
            self._last = now
            self._places.clear()
        if frame is None:
            return
        place = frame.f_code.co_filename, frame.f_lineno
        self._first = self._first or f"{os.path.basename(place[0])}:{place[1]}"
        self._places[place] += 1
        if self._places[place] >= ENDLESS:
            raise EstimateError(
                f"{place[0]}:{place[1]} asked for the value of a tensor {ENDLESS} times in one step: values decide how often this runs, "
                "and a dry run has none. Give the loop an end that is counted, such as for _ in range(…), or measure it: "
                "wb.measure_memory(…)"
            )

    def learn(self, name: str, args: Any, out: Any) -> None:
        """Remember what an operator that ran implies about its result."""
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            self._is_zero(args[1])  # found_inf of a GradScaler
        elif isinstance(out, Tensor) and out.dtype == torch.bool and out.layout == torch.strided:
            address, says = out.untyped_storage()._cdata, self._says(name, args)
            if says is None:
                self._truth.pop(address, None)
            else:
                self._truth[address] = says
        elif name in ("sum", "count_nonzero") and self._known(args[0]) is False:
            self._is_zero(out)  # of those that are unusual there are none

    def _says(self, name: str, args: Any) -> bool | None:
        known = self._known(args[0]) if args else None
        if name in ("logical_not", "bitwise_not"):
            return not known
        if name in COMPARISONS and isinstance(args[1], int | float):
            return COMPARISONS[name](self._number(args[0]), args[1])
        if name in TRUE:
            return True if known is None or name != "all" else known
        return False if name in COMPARISONS or name in FALSE else known

    def _is_zero(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        self._zeros[storage._cdata] = weakref.ref(storage)

    def _number(self, tensor: Any) -> int:
        """Known values of numbers."""
        zero = self._zeros.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        return 0 if zero is not None and zero() is not None else 1

    def _known(self, tensor: Any) -> bool | None:
        """Meaning of truth values, where it is known."""
        strided = isinstance(tensor, Tensor) and tensor.dtype == torch.bool and tensor.layout == torch.strided
        return self._truth.get(tensor.untyped_storage()._cdata) if strided else None


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "_grouped_mm", "_scaled_mm")
"""Operators that go to cuBLAS."""

_ON_CPU = {
    "mkldnn_rnn_layer": "recurrent layers on the CPU: what oneDNN keeps for their backward is not known, and taken as 0",
    "convolution": "convolutions on the CPU: what oneDNN takes inside them is not known, and left out; with several threads it is more",
}
"""Operator → a note on memory that oneDNN takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The GPU that a dry run emulates."""

    precision: torch.dtype | None = None
    """Of autocast; None = no autocast."""
    capability: tuple[int, int] | None = None
    """Compute capability; None = not known."""
    workspace: int = 0
    """Bytes that cuBLAS takes from the allocator at its first matrix product in a thread."""


class FakeRecorder(Recorder):  # type: ignore[no-untyped-call]
    """A Recorder of fake tensors that also answers requests for values.

    Attributes:
        answers: what was said.
        captured: tensors with values that the program reached.
        values: what is known of those that are fake.
    """

    def __init__(self, gpu: Gpu | None) -> None:
        super().__init__(host_counters=gpu is not None)
        self.assumed, self.values = AssumedValues(), KnownValues()
        self.captured = CapturedTensors(_bytes_like, lambda tensor, category: self.track(tensor, category, module=""), self._is_dry)
        self._workspace = gpu.workspace if gpu else 0
        self._on_cpu = gpu is None
        self._handles: set[bool] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = asked_device(func, args)
        return self.recorded(func, types, args, kwargs) if device is None else device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in a dry run, so torch need not look at each operator whether it would be."""
        return False

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on fake tensors, or answer it."""
        progress.tick()
        name = name_of(func)
        args, kwargs = self.captured.instead(name, func, args, kwargs)
        if name == "_local_scalar_dense" and isinstance(args[0], FakeTensor):
            number = self.values.number(args[0])
            return self.assumed.of(args[0], count=self.now != "optimizer") if number is None else number
        if name == "equal":
            same = self.values.same(args[0], args[1])
            return self.assumed.same(args[0], args[1]) if same is None else same
        if self._on_cpu and (note := _ON_CPU.get(name)) and note not in self.log.notes:
            self.log.notes.append(note)
        if self._workspace and name in _PRODUCTS:
            self._take_workspace()
        plainly = _AS_THEY_ARE.get(name, lambda func, args, kwargs: func(*args, **kwargs))
        out = self.values.call(func, args, kwargs, plainly) if self._is_dry() else plainly(func, args, kwargs)
        self.assumed.learn(name, args, out)
        self.captured.made(out, args)
        return out

    def listed(self, tensor: Any) -> Any:
        """Answer `tensor.tolist()`. If its values are assumed, that is one question of the program, of however many elements."""
        known = self.values.of(tensor)
        if known is None:
            count = self.now != "optimizer" and tensor.numel() > 0
            return _nested(self.assumed.of(tensor, count=count), tensor.shape)
        with real_tensors():
            return known.tolist()

    def around_compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return quietly(call)

    def mark(self, phase: str) -> None:
        """Begin a phase, as a Recorder does."""
        if phase in ("between", "optimizer", "end"):
            for leaf in self.captured.leaves:
                if isinstance(leaf.grad, FakeTensor):
                    self.track(leaf.grad, "gradient", module="")
        super().mark(phase)

    def _is_dry(self) -> bool:
        return fake_mode() is self._mode

    def _take_workspace(self) -> None:
        """Once in a thread: CUDA's backward runs in one of its own, and cuBLAS has a handle for each."""
        if (backward := self.now == "backward") not in self._handles:
            self._handles.add(backward)
            self.log.records[self.charge(self._workspace, "workspace", "cublas")].module = ""  # it is nobody's in particular


def _nested(answer: Any, shape: Sequence[int]) -> Any:
    """Lists of this shape, all of whose elements are the answer; without a shape, the answer itself."""
    return [_nested(answer, shape[1:]) for _ in range(shape[0])] if shape else answer


def _bytes_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="cpu")


def _product(func: Any, args: Any, kwargs: Any) -> Any:
    """A grouped product, of which torch's shape rule wants bf16, where the product itself takes other types, too."""
    dtype = args[0].dtype
    if dtype == torch.bfloat16:
        return func(*args, **kwargs)
    as_wanted = [arg.to(torch.bfloat16) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
    like = func(*as_wanted, **kwargs | ({"out_dtype": None} if "out_dtype" in kwargs else {}))
    return torch.empty_strided(like.shape, like.stride(), dtype=dtype)


def _norms_gradient(func: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of a layer norm, which is contiguous; torch's shape rule gives it the strides of what came in."""
    first, *others = func(*args, **kwargs)
    return (first if first is None else torch.empty(first.shape, dtype=first.dtype), *others)


_AS_THEY_ARE: dict[str, Callable[[Any, Any, Any], Any]] = {"_grouped_mm": _product, "native_layer_norm_backward": _norms_gradient}
"""Operators that return other shapes or strides for fake tensors than for real ones."""


@dataclass(slots=True, kw_only=True)
class DryRun:
    """The setting of a dry run: fake tensors, and the recorder."""

    recorder: FakeRecorder
    """Recorder, active inside; enter its `hooks()` once the model is built."""

    def model(self, model: nn.Module) -> None:
        """Replace a model's tensors by fake ones, in place; they are not recorded yet."""
        self.recorder.captured.owned(model)
        with self.recorder.pause():
            building.materialise(model, building.fake_like)

    @contextlib.contextmanager
    def host(self, model: nn.Module) -> Iterator[None]:
        """Inside, a model's parameters are in host memory; on leaving, those that are still there move to the device.

        In between they may have been replaced by parts of them, which are on the device.
        """
        whole = list(model.parameters())
        for parameter in whole:
            self.recorder.leave_out(parameter)
        yield
        kept = {id(parameter) for parameter in model.parameters()}
        for parameter in whole:
            if id(parameter) in kept:
                self.recorder.bring(parameter)

    def between_stages(self, model: nn.Module, task: Task, spec: RunSpec, example: Any) -> list[tuple[Tensor, ...]]:
        """What passes between the stages of a pipeline; not recorded."""
        from workbench.train.pipeline import passed_between  # takes long

        with self.recorder.pause():
            return passed_between(model, task, spec, map_tensors(building.fake_like, example))

    def batch(self, example: Any) -> Any:
        """A fresh fake batch with the shapes of an example, recorded as an input."""

        def make(tensor: Tensor) -> Tensor:
            with self.recorder.pause():
                fake = building.fake_like(tensor)
            self.recorder.values.know(fake, tensor)
            self.recorder.track(fake, "input")
            return fake

        return map_tensors(make, example)


@contextlib.contextmanager
def dry_run(gpu: Gpu | None, *, compiled: bool = False) -> Iterator[DryRun]:
    """Inside, tensors are fake and recorded; on leaving, an error or not, nothing is changed in this process.

    Args:
        gpu: to emulate; None = a CPU.
        compiled: what `torch.compile` compiles runs as it would then.

    Garbage collection should be off around it (`gc.collected_before`), and the state kept (`kept_state`).
    """
    with contextlib.ExitStack() as stack:
        afterwards = stack.enter_context(contextlib.ExitStack())  # left last, where tensors are real again
        graphs = stack.enter_context(compiling_on_fakes() if compiled else uncompiled())
        for change in (fake_tensors(), movable_modules(), foreach_on_fakes(), no_graph_capture()):
            stack.enter_context(change)
        semantics = emulate_cuda(gpu.precision, gpu.capability) if gpu else contextlib.nullcontext()
        if compiled:  # where a graph ends at `.item()`, Dynamo would go on to compile what answers
            answering = torch.compiler.disable(FakeRecorder.__torch_dispatch__)  # type: ignore[no-untyped-call]
            stack.enter_context(replaced(FakeRecorder, "__torch_dispatch__", answering))
        with semantics as met:
            recorder = FakeRecorder(gpu)
            afterwards.callback(recorder.captured.put_back)
            stack.callback(register_optimizer_step_pre_hook(recorder.captured.stepping).remove)
            with recorder, replaced(FakeTensor, "tolist", lambda tensor: recorder.listed(tensor)):
                yield DryRun(recorder=recorder)
            about = [NOTHING] if graphs and not graphs() else []
            recorder.log.notes += [*(met.notes if met else ()), *about, *recorder.assumed.notes, *recorder.captured.notes]


@contextlib.contextmanager
def no_graph_capture() -> Iterator[None]:
    """Make optimizers not ask whether a CUDA graph is being captured, which makes a context on the GPU, where this machine has one.

    Source: torch/optim/optimizer.py `_accelerator_graph_capture_health_check`, before torch 2.10 `_cuda_graph_capture_health_check`.
    """
    with contextlib.ExitStack() as stack:
        for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
            if hasattr(torch.optim.Optimizer, name):
                stack.enter_context(replaced(torch.optim.Optimizer, name, lambda self: None))
        yield


@contextlib.contextmanager
def kept_state() -> Iterator[None]:
    """On leaving, the random generators and the number of threads are as they were; inside, tensors are made on the CPU by default."""
    threads, generators = torch.get_num_threads(), (torch.get_rng_state(), np.random.get_state(), random.getstate())
    elsewhere = torch.empty(0).device.type != "cpu"  # get_default_device() of torch 2.6 fails after set_default_device(None)
    try:
        with torch.device("cpu") if elsewhere else contextlib.nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(generators[0])
        np.random.set_state(generators[1])
        random.setstate(generators[2])
