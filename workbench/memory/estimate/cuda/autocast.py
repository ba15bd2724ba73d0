"""Autocast: which operators run in which precision on CUDA, by overriding `torch.autocast("cpu", …)`.

The lists are those of `torch/include/ATen/autocast_mode.h` (`AT_FORALL_LOWER_PRECISION_FP`, `…_FP32`, `…_FP32_SET_OPT_DTYPE`,
`…_DIFFERENT_REDISPATCH_SIGNATURE`, `…_PROMOTE`), which CUDA uses whole (`aten/src/ATen/autocast_mode.cpp`, `TORCH_LIBRARY_IMPL(aten,
AutocastCUDA, m)`); the CPU has lists of its own. A wheel without CUDA still registers CUDA's kernels, so the names are checked against
the dispatcher: an operator that this torch does not autocast on CUDA is left alone.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.amp import autocast_mode
from torch.utils._pytree import tree_leaves, tree_map

from workbench.memory.estimate.cuda.overrides import Overrides, operator, replaced


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOWER_PRECISION = _names(
    """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
    """
)
"""Run in the precision of autocast; a leaf's cast copy is kept until autocast ends."""

FULL_PRECISION = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
    softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss
    mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
    upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    """
)
"""Run in fp32: their arguments are cast first."""

FULL_PRECISION_RESULT = _names(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord
    sum sum.dim_IntList
    """
)
"""Return fp32 unless the caller gives a dtype; their arguments are not cast."""

NORMS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Likewise, by way of another overload, which takes the result's dtype last."""

PROMOTE = _names(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """
)
"""Run in the widest type among their arguments."""

UNREACHED = ("cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn")
"""Registered beside the lists, in lower precision; not called on CPU tensors."""

NAMED = _names(
    """
    cumprod.dimname cumsum.dimname log_softmax.Dimname norm.names_ScalarOpt_dim prod.dim_Dimname softmax.Dimname sum.dim_DimnameList
    """
)
"""Of tensors with named dimensions, in full precision; rare, and in torch up to 2.11 only."""

BANNED = ("binary_cross_entropy",)
"""Refused under CUDA's autocast."""


def on_cuda() -> frozenset[str]:
    """The operators that this torch autocasts on CUDA, as its dispatcher says."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return frozenset(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


def on_cpu() -> frozenset[str]:
    """The operators that this torch autocasts on the CPU, as its dispatcher says."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    return frozenset(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


def unlisted() -> frozenset[str]:
    """Operators that this torch autocasts on CUDA and that are not in this module; they run uncast."""
    return on_cuda() - {*LOWER_PRECISION, *FULL_PRECISION, *FULL_PRECISION_RESULT, *NORMS, *PROMOTE, *BANNED, *UNREACHED, *NAMED}


def eligible(value: Any) -> bool:
    """Whether autocast may cast it (`is_eligible` in autocast_mode.h): a floating-point tensor, not of double precision."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64


class Weights:
    """Cast copies of leaves, as `cached_cast` keeps them in C++, for the operators that the CPU's own autocast does not cast."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor in the given precision; a leaf that requires a gradient is cast once."""
        if tensor.dtype is dtype:
            return tensor
        lasting = tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        if not (lasting and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        kept = self._kept.get(id(tensor))
        if kept is None or kept[0] is not tensor or kept[1].dtype is not dtype:
            kept = self._kept[id(tensor)] = (tensor, tensor.to(dtype))
        return kept[1]

    def clear(self) -> None:
        """Drop all copies."""
        self._kept.clear()


def _uncast(run: Callable[[], Any]) -> Any:
    """Call a function with autocast off, as all autocast kernels do."""
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU)):
        return run()


def _casting(name: str, dtype_for: Callable[[list[Tensor]], torch.dtype], weights: Weights) -> Callable[..., Any]:
    """A kernel that casts all eligible arguments to the type that `dtype_for` says."""
    op = operator(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            dtype = dtype_for([leaf for leaf in tree_leaves((args, kwargs)) if eligible(leaf)])
            lower = dtype is torch.get_autocast_dtype("cpu")

            def cast(value: Any) -> Any:
                if not eligible(value):
                    return value
                return weights.cast(value, dtype) if lower else value.to(dtype)

            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

        return _uncast(run)

    return kernel


def _returning_full_precision(name: str) -> Callable[..., Any]:
    """A kernel that asks for an fp32 result where the caller asked for none (`fp32_set_opt_dtype`)."""
    op = operator(name)
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("dtype", args[position] if len(args) > position else None)
        if eligible(args[0]) and asked is None:
            args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
        return _uncast(lambda: op(*args, **kwargs))

    return kernel


def _norm(name: str) -> Callable[..., Any]:
    """A kernel for `torch.norm`, which takes its dtype in another overload (`fp32_append_dtype`)."""
    op, with_dtype = operator(name), operator(NORMS[name])

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if eligible(args[0]):
            return _uncast(lambda: with_dtype(*args, **kwargs, dtype=torch.float32))
        return _uncast(lambda: op(*args, **kwargs))

    return kernel


def _banned(name: str) -> Callable[..., Any]:
    """A kernel that raises CUDA's error."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name} is unsafe to autocast on CUDA: it is refused there. Give the logits to binary_cross_entropy_with_logits "
            f"(BCEWithLogitsLoss), or leave autocast around the loss."
        )

    return kernel


def _widest(tensors: list[Tensor]) -> torch.dtype:
    """The type that `promote` casts to."""
    return torch.float32 if any(tensor.dtype is torch.float32 for tensor in tensors) else torch.get_autocast_dtype("cpu")


def install(overrides: Overrides) -> Weights:
    """Override the CPU's autocast by CUDA's lists.

    Returns:
        The cast copies it keeps, to be cleared when autocast ends.
    """
    cuda, cpu, weights = on_cuda(), on_cpu(), Weights()
    known: dict[str, Callable[..., Any]] = {}
    for name in cuda.intersection(LOWER_PRECISION) - cpu:  # those of both are the same already, with torch's own cache of weights
        known[name] = _casting(name, lambda tensors: torch.get_autocast_dtype("cpu"), weights)
    for name in cuda.intersection(FULL_PRECISION):
        known[name] = _casting(name, lambda tensors: torch.float32, weights)
    for name in cuda.intersection(PROMOTE):
        known[name] = _casting(name, _widest, weights)
    known |= {name: _returning_full_precision(name) for name in cuda.intersection(FULL_PRECISION_RESULT)}
    known |= {name: _norm(name) for name in cuda.intersection(NORMS)}
    known |= {name: _banned(name) for name in cuda.intersection(BANNED)}
    for name, kernel in known.items():
        overrides.autocast(name, kernel)
    for name in cpu - known.keys() - cuda.intersection(LOWER_PRECISION):
        overrides.autocast(name, None)
    return weights


@contextlib.contextmanager
def cuda_means_cpu(weights: Weights) -> Iterator[None]:
    """Let `torch.autocast("cuda", …)`, `torch.cuda.amp.autocast` and questions about them mean the CPU's; clear the cast copies in time."""
    open_autocast, enabled, dtype_of = autocast_mode.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype
    clear = torch.clear_autocast_cache

    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or dtype_of("cuda")
        open_autocast(self, device_type, dtype, *args, **kwargs)

    def cpu(device_type: str | None = None) -> str:
        return "cpu" if device_type in (None, "cuda") else str(device_type)

    def clear_all() -> None:
        weights.clear()
        clear()

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (autocast_mode.autocast, "__init__", init),
            (torch, "is_autocast_enabled", lambda device_type=None: enabled(cpu(device_type))),
            (torch, "get_autocast_dtype", lambda device_type: dtype_of(cpu(device_type))),
            (torch, "get_autocast_gpu_dtype", lambda: dtype_of("cpu")),
            (torch, "clear_autocast_cache", clear_all),
        ):
            stack.enter_context(replaced(owner, name, value))
        stack.callback(weights.clear)
        yield
