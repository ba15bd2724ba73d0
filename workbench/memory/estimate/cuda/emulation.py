"""Emulates CUDA: CPU tensors that cost in memory what CUDA tensors would, through forward, backward, recomputation and optimizer.

    with FakeTensorMode(allow_non_fake_inputs=True), emulate_cuda(torch.bfloat16) as emulation:
        with torch.autocast("cpu", torch.bfloat16):     # or "cuda": the same here
            loss = model(batch)
        loss.backward()
    print(emulation.notes)

Enter it inside the fake mode. The overrides are in the dispatcher, so it does not matter how a function was imported, and calls from C++,
from checkpointing's recomputation and from autograd's threads come through them. What is modelled is CUDA 11 and newer, eager, with the
operators of the torch that is installed here:

| what | how | where |
|---|---|---|
| dropout | mask of 1 byte per element (in place and by channel: as on the CPU) | operators |
| softmax, log_softmax of fp16 to fp32 | no fp32 copy of the input | operators |
| group norm | saves a contiguous copy of a channels-last input | operators |
| RMS norm | fused: input, weight and one fp32 per row (torch 2.9 and newer) | operators |
| attention | flash, memory-efficient or math as CUDA chooses; the saved set of each; dq in fp32 and other scratch in backward | attention |
| autocast | CUDA's five lists; fp32 results without fp32 inputs; bf16 and fp16; `torch.autocast("cuda")` | autocast |
| LSTM, GRU, RNN | one operator with a reserve space, flat 16-bit weights under autocast | recurrent |
| LSTM cell | fused, saves the gates | recurrent |
| embedding | sorting scratch in backward (distinct rows: as if drawn uniformly); bags of indices kept | operators |
| indexing, gather, max, topk, … | sorting scratch in backward; gradients in place also for fake tensors | operators |
| sum, mean | partial sums in global memory where few outputs are summed over many rows, as a bias's gradient is | reductions |
| CTC loss | runs on fake tensors; targets as long as their tensor is wide | operators |
| convolution | no scratch of the CPU; cuDNN's by `convolution_workspace`, 0 unless given | operators |
| optimizers, clip_grad_norm_ | foreach by default | device_redirection |
| "cuda" in a model | factories, `.to`, `.cuda()`, `.pin_memory()`, some of `torch.cuda` | device_redirection |

The same on both, so nothing is done: batch and layer norm (statistics), pooling (int64 indices), gelu, silu, losses, upsampling,
scatter, grid_sample, padding, `nn.MultiheadAttention` (through attention, or its explicit products), autocast's cache.

Not modelled: cuDNN's and cuBLAS's workspaces unless given; the reserve of cuDNN's batch norm in channels-last 16 bits; copies cuDNN makes
of tensors in odd strides; the GRU cell (as on the CPU); flash attention's split over keys for few queries; nested tensors; bf16 recurrent
layers where cuDNN refuses them; fused optimizers' lack of temporaries (those run as they are); `torch.compile`; custom CUDA extensions;
SyncBatchNorm (it refuses CPU tensors); `torch.autocast("cuda")` objects made before the block, such as decorators (no effect); on fake
tensors unfused attention adds its mask to a copy of the scores.

`tensor.is_cuda` and `torch.cuda.is_available()` stay False: what libraries choose by them are kernels that cannot run here.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

from workbench.memory.estimate.cuda import attention, autocast, device_redirection, operators, recurrent, reductions
from workbench.memory.estimate.cuda.overrides import Overrides

AMPERE = (8, 0)
"""Compute capability taken where none is given: all of attention's backends, bf16."""

MODULES: tuple[ModuleType, ...] = (operators, device_redirection, recurrent)
"""Modules with overrides; each has a function `install(overrides)`."""

_active: list["CudaEmulation"] = []


class CudaEmulation:
    """Returned by `emulate_cuda`: its options, and notes on the operators that ran.

    Attributes:
        precision: of autocast; None = the program opens none.
        capability: compute capability of the GPU, as (9, 0).
        attention: which backends attention took, and how often.
        workspaces: how many convolutions ran.
    """

    def __init__(
        self,
        precision: torch.dtype | None,
        capability: tuple[int, int],
        convolution_workspace: Callable[[operators.Convolution, tuple[int, int]], int],
        prefer_cudnn: bool,
    ) -> None:
        self.precision, self.capability = precision, capability
        self.attention = attention.Attention(capability, prefer_cudnn)
        self.workspaces = operators.Workspaces(convolution_workspace, capability)
        self._measured = convolution_workspace is not operators.convolution_workspace

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for a reader of the estimate."""
        notes = []
        if self.precision is torch.bfloat16 and self.capability < AMPERE:
            notes.append(
                f"bf16 on a GPU of compute capability {self.capability[0]}.{self.capability[1]}: emulated; attention runs unfused."
            )
        if self.attention.taken["math"]:
            notes.append(
                f"{self.attention.taken['math']} calls of attention run unfused (math): their type, shape or mask has no fused kernel."
            )
        if self.workspaces.convolutions and not self._measured:
            notes.append("cuDNN's convolution workspace is not measured: taken as 0.")
        unlisted = autocast.unlisted()
        if self.precision is not None and unlisted:
            notes.append(f"Autocast on this torch knows operators that this version of workbench does not: {', '.join(sorted(unlisted))}.")
        return tuple(notes)


@contextlib.contextmanager
def emulate_cuda(
    precision: torch.dtype | None,
    capability: tuple[int, int] | None = None,
    *,
    convolution_workspace: Callable[[operators.Convolution, tuple[int, int]], int] = operators.convolution_workspace,
    prefer_cudnn: bool = False,
) -> Iterator[CudaEmulation]:
    """Let CPU tensors cost in memory what CUDA tensors would, until the end of the block; then all is as it was. They may be real ones,
    except where attention is fused: those kernels are CUDA's alone.

    Args:
        precision: what the program's autocast runs in: torch.bfloat16, torch.float16, or None (or torch.float32) for none. The program
            opens the autocast itself, as `torch.autocast("cpu", precision)` or `torch.autocast("cuda", precision)`.
        capability: compute capability of the GPU, as (9, 0); None = (8, 0) or newer.
        convolution_workspace: bytes that cuDNN takes for a convolution; says 0 by itself.
        prefer_cudnn: whether attention takes cuDNN's kernels first, as torch on Hopper with cuDNN 9.15.1 or newer does; it saves the same.

    Yields:
        What was met, with notes.

    Raises:
        ValueError: when it is already on, or for a precision or capability that is none.
    """
    if _active:
        raise ValueError("emulate_cuda is already on: it cannot be nested, nor used in two threads at once. Leave the outer block first.")
    if precision not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"precision is {precision!r}. CUDA's autocast takes torch.bfloat16 or torch.float16; None (or torch.float32) means no autocast."
        )
    given = AMPERE if capability is None else capability
    if len(given) != 2 or not all(isinstance(part, int) and part >= 0 for part in given):
        raise ValueError(f"capability is {capability!r}: give two numbers, such as (8, 0) for an A100 or (9, 0) for an H100, or None.")
    emulation = CudaEmulation(None if precision is torch.float32 else precision, given, convolution_workspace, prefer_cudnn)
    with contextlib.ExitStack() as stack:
        _active.append(emulation)
        stack.callback(_active.remove, emulation)
        overrides = Overrides()
        stack.callback(overrides.close)
        for module in MODULES:
            module.install(overrides)
        emulation.attention.install(overrides)
        emulation.workspaces.install(overrides)
        reductions.install(overrides, given)
        weights = autocast.install(overrides)
        for change in (autocast.cuda_means_cpu(weights), device_redirection.cuda_means_cpu(given), device_redirection.foreach_by_default()):
            stack.enter_context(change)
        yield emulation
