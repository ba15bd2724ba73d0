"""Roofline: the least time that a device needs for a step's operators, counted in the dry run that gives the memory."""

from collections import Counter
from collections.abc import Callable
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from workbench.core.device import Device
from workbench.harness.tf32 import uses_tf32
from workbench.memory.estimate.fake_tensors import asked_device


class Call(NamedTuple):
    """An operator with its sizes, as often as it was called."""

    name: str
    """Such as "aten.mm"."""
    phase: str
    """"forward", "backward" or "update"."""
    dtype: str
    """Number format in which it computes."""
    flops: int
    bytes: int
    """That its kernels read and write; 0 = it runs none."""
    elements: int = 0
    """That a kernel handles one by one; 0 = 16 bytes at a time."""
    stride: int = 0
    """Of a product in 16 bits: a leading dimension, in elements, that is not a multiple of 16 bytes; 0 = each of its matrices has one."""


_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Roofline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up, operator by operator, the longer of two times: its floating point operations at the device's dense peak, and the bytes of
    its tensors at the device's bandwidth (Williams, Waterman and Patterson 2009).

    That is a floor, for one device: kernels reach less than the peak, launches and communication cost time that is not counted. Ratios
    between two programs of the same model hold better than either.

    Attributes:
        seconds: the floor.
        computing: the same by floating point operations alone.
        flops: floating point operations.
        bytes: read and written.
        operators: that do something (views do nothing).
        calls: each of them with its sizes → how often it was called; without those by which an optimizer makes its states, once.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.seconds, self.computing, self.flops, self.bytes, self.operators = 0.0, 0.0, 0, 0, 0
        self.calls: Counter[Call] = Counter()
        self._last = ""  # phase of the last operator of forward or backward; "" after an optimizer's step
        self._updating = 0  # optimizers whose step() runs: one may call another's, as Lookahead does

    def __enter__(self) -> "Roofline":
        self._hooks = [register_optimizer_step_pre_hook(self._begin_update), register_optimizer_step_post_hook(self._end_update)]
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _begin_update(self, *_: Any) -> None:
        self._updating += 1

    def _end_update(self, *_: Any) -> None:
        self._updating -= 1
        self._last = ""

    def _phase(self, name: str) -> str:
        """Of a step: an operator of the engine's threads is of the backward. One without gradients is of the update, if an optimizer runs,
        or if it comes after the backward or changes lists of tensors, as clipping and moving averages do; else of the forward, as metrics
        in the loss and a frozen teacher are.
        """
        if torch._C._current_graph_task_id() != -1:
            self._last = "backward"
        elif not self._updating and torch.is_grad_enabled():
            self._last = "forward"
        elif self._updating or self._last == "backward" or name.startswith("_foreach"):
            return "update"
        else:
            return "forward"
        return self._last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := asked_device(func, args)) is not None:
            return device
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it unwraps itself, and its local tensors come back here
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not _is_view(func) and getattr(func, "namespace", "") != "prim":  # prim.device asks a tensor where it is
            self._add(func, args, kwargs, out)
        return out

    def _add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        short = getattr(getattr(func, "overloadpacket", func), "__name__", "")
        moved = _moved(short, args, kwargs, out)
        count: Callable[..., int] | None = flop_registry.get(getattr(func, "overloadpacket", None))
        flops = count(*args, **kwargs, out_val=out) if count else _attention_flops(func, args)
        if flops and "attention" in getattr(func, "__name__", ""):
            flops = round(flops * _attended(func, args, kwargs))
        self.operators += 1
        self.flops += flops
        self.bytes += moved
        dtype, peak = self._format(func, tensors)
        computing = flops / peak
        stride = _unaligned(tensors) if flops and short.endswith("mm") else 0
        elements = _one_by_one(short, getattr(func, "tags", ()), tensors)
        if short not in STATES or not any(isinstance(frame.f_locals.get("self"), Optimizer) for frame, _ in walk_stack(None)):
            self.calls[
                Call(f"{getattr(func, 'namespace', '')}.{short or func}", self._phase(short), dtype, int(flops), moved, elements, stride)
            ] += 1
        self.computing += computing
        self.seconds += max(computing, moved / self._device.bandwidth)

    def _format(self, func: Any, tensors: list[Tensor]) -> tuple[str, float]:
        """The format in which an operator computes, and its FLOP/s: 16 bits if its largest tensor has them, else fp32 as set up."""
        peaks = self._device.flops_per_sec
        widest = max(tensors, key=Tensor.numel, default=None)
        name = _NAMES.get(widest.dtype, "fp32") if widest is not None else "fp32"
        if name == "fp32" and uses_tf32(convolution="convolution" in func.__name__):
            name = "tf32"
        return name, peaks.get(name) or peaks.get("fp32") or max(peaks.values())


NOTHING = ("_local_scalar_dense", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operators without a kernel. (`.item()`: those of a step are of the optimizer's step counts, which lie on the host.)"""
STATES = ("full_like", "zeros_like")
"""Operators by which an optimizer makes its states, in its first step only."""
DRAWS = ("bernoulli_", "cauchy_", "exponential_", "log_normal_", "normal_", "rand_like", "randn_like", "random_", "uniform_")
FILLS = (*STATES, *DRAWS, "fill_", "full", "nll_loss_backward", "nll_loss2d_backward", "ones", "ones_like", "zero_", "zeros")
"""Operators that only write; the losses' fill their result with zeros, and then write one value per target."""
PUTS = ("index_add", "index_copy", "index_put", "_index_put_impl", "scatter", "scatter_add", "scatter_reduce")
"""Operators that change some elements of their first tensor, or, without "_" at the end, of a copy of it."""
PICKS = ("embedding", "gather", "index", "index_select", "nll_loss_forward", "nll_loss2d_forward")
"""Operators that read no more of each tensor than they write."""


def _bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor; of a sparse one those of its indices and values."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def _moved(name: str, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that the operator's CUDA kernels read and write: a tensor counts once for each kernel, or loop over long rows, that does."""
    read = {id(leaf): _bytes_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    written: int = sum(_bytes_of(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
    if name in NOTHING:
        return 0
    if sparse := sum(_bytes_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.layout != torch.strided):
        return min(written, sparse) + sum(min(size, sparse) for size in read.values())  # of a dense one, the rows that it has
    if name in (*FILLS, "copy_"):
        return written + (_bytes_of(args[1]) if name == "copy_" else 0)
    if name in ("_foreach_zero_", "_foreach_copy_"):
        return sum(_bytes_of(leaf) for leaf in tree_leaves(args[:2]) if isinstance(leaf, Tensor))
    if name.removesuffix("_") in PUTS:
        whole, given = args[0], [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor)]
        adds = "add" in name or "reduce" in name or ("index_put" in name and (kwargs.get("accumulate") or args[3:4] == (True,)))
        touched = min(_bytes_of(whole), max(leaf.numel() for leaf in given) * whole.element_size())
        return int(
            sum(_bytes_of(leaf) for leaf in given) + touched * (2 if adds else 1) + (0 if name.endswith("_") else 2 * _bytes_of(whole))
        )
    if name in PICKS:
        return written + sum(min(size, written) for size in read.values())
    if ("_foreach" in name or "_fused" in name) and not written:  # lists in place; a fused optimizer leaves its gradients as they are
        changed = args[:1] if "_foreach" in name else (args[0], args[2:5])
        written = sum(_bytes_of(leaf) for leaf in tree_leaves(changed) if isinstance(leaf, Tensor))
    return sum(read.values()) + written + _again(name, args)


def _again(name: str, args: Any) -> int:
    """Bytes that go through memory a second or third time, by torch's sources (aten/src/ATen/native/cuda)."""
    if name == "masked_fill":  # a copy, which is filled in place
        return 2 * int(args[0].nbytes)
    if name == "native_layer_norm_backward":  # a kernel for the input's gradient, and one for those of weight and bias
        return int(args[0].nbytes + args[1].nbytes) if any(args[7][1:]) else 0
    if "batch_norm" in name and ("no_training" in name or any(each is False for each in args[5:6])):  # with running statistics
        return 0
    if "batch_norm" in name or name.startswith("native_group_norm"):  # statistics first
        return sum(each.nbytes for each in args[: 2 if name.endswith("backward") else 1])
    if "softmax" not in name or not args[0].dim():
        return 0
    dim = args[2 if name.endswith("backward_data") else 1] % args[0].dim()
    whole, row = args[0].nbytes, args[0].shape[dim] * args[0].element_size()  # SoftMax.cu
    long, strided = row > 4096 or args[0].shape[dim] > 1024, args[0].shape[dim + 1 :].numel() > 1
    if name.endswith("backward_data"):  # long rows are added up first; gradient times output is a kernel of its own
        return int(whole * (long + 3 * (name == "_softmax_backward_data")))
    return 2 * int(whole) if long and (strided or row >= 48 * 1024 or row % 16) else 0  # largest, sum, result, unless 48 KiB hold a row


def _one_by_one(name: str, tags: Any, tensors: list[Tensor]) -> int:
    """Elements of an elementwise operator or copy whose kernel cannot move 16 bytes at a time (TensorIterator; cat): tensors with other
    strides than the result's, or numbers that change their format, but for those from fp32 to 16 bits, which have their own kernel.
    """
    if not tensors or not (torch.Tag.pointwise in tags or name in ("_to_copy", "cat", "copy_", "masked_fill_")):
        return 0
    several, last = [tensor for tensor in tensors if tensor.numel() > 1], tensors[-1]
    alike = all(each.is_contiguous() if name == "cat" else (each.stride(), each.shape) == (last.stride(), last.shape) for each in several)
    formats = [tensor.dtype for tensor in several if tensor.is_floating_point()]
    narrowing = name in ("_to_copy", "copy_") and torch.float32 in formats and formats[-1] in _NAMES
    return 0 if alike and (narrowing or len({*formats}) < 2) else last.numel()


def _unaligned(tensors: list[Tensor]) -> int:
    """The first leading dimension of matrices in 16 bits that is not a multiple of 8; 0 = there is none. Not for TF32, whose is 4."""
    matrices = [tensor for tensor in tensors if tensor.dim() > 1 and tensor.element_size() == 2 and min(tensor.shape[-2:]) > 1]
    strides = (int(tensor.stride(-2 if tensor.stride(-1) == 1 else -1)) for tensor in matrices)
    return next((stride for stride in strides if stride % 8), 0)


def _attention_flops(func: Any, args: Any) -> int:
    """FLOPs of the CPU's fused attention, which torch's counter lacks (pytorch #195460): two products forward, five backward."""
    name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
    if not name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        return 0
    query, key = (args[1], args[2]) if name.endswith("backward") else (args[0], args[1])
    *batch, rows, width = query.shape
    product: int = 2 * torch.Size(batch).numel() * rows * key.shape[-2] * width
    return product * (5 if name.endswith("backward") else 2)


def _attended(func: Any, args: Any, kwargs: Any) -> float:
    """Share of the scores that a fused attention computes: with a causal mask its kernels skip what lies above the diagonal; 1 without.

    torch's counter counts all, which is what attention made of single products (the math backend) computes.
    """
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if not given.get("is_causal") and given.get("custom_mask_type") != 1:  # 1: of `_efficient_attention_forward`, from the top left
        return 1.0
    length = -2 if func.__name__.startswith("_scaled") else 1  # (samples, heads, length, width), or the length second
    rows, columns = given["query"].shape[length], given["key"].shape[length]
    full = max(0, rows - columns)  # rows below the diagonal's end, which attend to all columns
    part = rows - full
    return float((part * (part + 1) // 2 + full * columns) / (rows * columns))


def _is_view(func: Any) -> bool:
    """Is its result only a view of another tensor's memory?"""
    schema = getattr(func, "_schema", None)
    aliases = [result.alias_info for result in schema.returns] if schema is not None else []
    return any(alias is not None and not alias.is_write for alias in aliases)
