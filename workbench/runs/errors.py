"""Recognises errors by their text: their kind, what to do about them, and whether another rank's error caused them."""

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KINDS = (
    *("exception", "exit", "out-of-memory", "killed", "crash", "address-in-use", "task"),
    *("disk-full", "timeout", "launcher", "node", "rendezvous", "hang"),
)
"""Kinds of failure. `exit`: left with an exit code; `killed`: by a signal from outside; `crash`: by one of its own making.
`node`: a machine died; `rendezvous`: machines did not find each other; `hang`: a rank held up the others until the end."""

LESS_MEMORY = "Try a smaller micro_batch (accumulation keeps the global batch), fewer num_workers, or on a GPU precision='amp_bf16'."

_CONSEQUENCES = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Connection was likely closed|Broken pipe|connection was aborted"
    r"|remote process exited|remote server shutdown|recvValue failed|sendBytes failed|failed to recv, got 0 bytes|DistNetworkError"
    r"|killed by signal: Terminated|NCCL communicator was aborted|ncclRemoteError|ncclSystemError|SignalException",
    re.IGNORECASE,
)
"""Messages of ranks that fail because another rank is gone, or because they are stopped (gloo, the TCP store, NCCL, a DataLoader)."""

PROBABLY_FULL = "memory had probably run out"
"""What `failure.describe` adds to an error that does not say so."""
OUT_OF_DEVICE_MEMORY = (
    rf"{PROBABLY_FULL}|"
    r"OutOfMemoryError|(CUDA|HIP|XPU|MPS|C10)(?: backend)? [Oo]ut of [Mm]emory"  # torch's caching allocators
    r"|(CUDA|HIP|XPU)(?: driver)? error: out of memory|(CUDA|HIP)\]: out of memory"  # an allocation past them, and Triton's
    r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipError(OutOfMemory|MemoryAllocation)"  # the runtimes and drivers
    r"|(CUDA|Cuda|cuda|HIP|hip) failure(?: \d+)? '?out of memory|unhandled (cuda|hip) error[\s\S]*out of memory"  # NCCL, RCCL
    r"|Failed to CUDA [cm]alloc"  # NCCL 2.28, as a full H200 showed
    r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|HIPSOLVER|HIPSPARSE|MIOPEN)_STATUS_ALLOC_FAILED|(CUFFT|HIPFFT)_ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED|rocblas_status_memory_error|miopenStatusAllocFailed"
    r"|_ERROR_OUT_OF_DEVICE_MEMORY|PI_ERROR_OUT_OF_RESOURCES"  # SYCL and Level Zero
    r"|Invalid buffer size: [\d.]+ [KMGT]i?B|kIOGPUCommandBufferCallbackErrorOutOfMemory"  # Metal
)
"""How errors say that a device has no memory left: torch's allocator in its own class, the libraries below it in plain RuntimeErrors.
Source: torch's c10/{cuda,xpu}, aten/src/ATen/{cuda,mps,native/cudnn}, NCCL's checks.h, cudnn_graph.h of cuDNN 9, hipify's tables."""
LIBRARY_FAILED = (
    r"(CUDNN|CUSOLVER|CUBLAS|CUSPARSE|CUFFT)_(STATUS_)?(INTERNAL_ERROR|NOT_INITIALIZED)\b"
    r"|[Uu]nable to find (an engine to execute|a valid cuDNN algorithm)"
)
"""How libraries of CUDA fail that get no memory from the driver, and for other reasons, too. On a full H100, cuDNN's convolution and
cuSOLVER's handle fail so."""
MAX_FREE = 512 * 2**20
"""Bytes: with no more free, memory is taken for the reason. Chosen: a library's handle, kernels and workspace take tens or hundreds
of MiB. With twice as much, errors of another kind on a nearly full GPU are called probably out of memory; with half as much, some
that are remain plain exceptions."""
OUT_OF_HOST_MEMORY = (
    r"DefaultCPUAllocator|not enough memory|Cannot allocate|^MemoryError|bad_alloc|Unable to allocate [\d.]+ [KMGTPE]?i?B"
    r"|_ERROR_OUT_OF_HOST_MEMORY"
)
"""How errors say that main memory has run out."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """A known kind of error."""

    pattern: str
    """Regular expression found in "Type: message", case and all."""
    kind: str
    """One of KINDS."""
    hint: str | None
    """What to do; None where the message itself says it."""


_SYMPTOMS = (
    Symptom(
        r"Bus error|insufficient shared memory|unable to (open|write to|allocate) shared memory",
        "killed",
        "The shared memory in /dev/shm is too small for the loader's workers: try fewer num_workers, or docker run --shm-size=2g.",
    ),
    Symptom(
        r"DataLoader worker .* killed by signal: Killed",
        "killed",
        "A worker of the loader was killed, most often because memory ran out: try fewer num_workers or a smaller prefetch_factor.",
    ),
    Symptom(f"{OUT_OF_DEVICE_MEMORY}|{OUT_OF_HOST_MEMORY}", "out-of-memory", LESS_MEMORY),
    Symptom(
        r"Duplicate GPU detected",
        "exception",
        "Two ranks use the same GPU, and NCCL takes one rank per GPU. Try as many ranks as there are visible GPUs, or in a script "
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group. backend="gloo" lets ranks share a GPU.',
    ),
    Symptom(
        r"EADDRINUSE|[Aa]ddress already in use",
        "address-in-use",
        "Another process has that port. Leave MASTER_PORT to the launch, which finds a free one, or choose another.",
    ),
    Symptom(r"^TaskError", "task", None),
    Symptom(
        r"No space left on device|Disk quota exceeded|File too large|DiskFullError",
        "disk-full",
        "Make room, or start the run with runs_dir= on another disk.",
    ),
    Symptom(
        r"device-side assert", "exception", "Most often a label or index outside its range: the same run with device='cpu' names the line."
    ),
    Symptom(
        r"illegal memory access|CUDA error|CUBLAS_STATUS|CUDNN_STATUS",
        "exception",
        "GPU errors are reported late: with the environment variable CUDA_LAUNCH_BLOCKING=1 the traceback is exact.",
    ),
    Symptom(
        r"Rendezvous(Connection|Timeout)?Error",
        "rendezvous",
        "The machines did not meet: is the first one still up, is its port open (firewall), does its name mean the same to all? "
        'wb.launch(…, rdzv_endpoint="ADDRESS:PORT") says where to meet.',
    ),
    Symptom(
        r"[Tt]imed out|collective operation timeout|Socket Timeout|wait timeout",
        "timeout",
        "It waited for something that did not come. If that was another rank: do all ranks take the same branches? See run.logs().",
    ),
    Symptom(r"No module named", "exception", "The ranks run in the same Python as the process that launched them: install it there."),
    Symptom(
        r"not compatible with static_graph set to True",
        "exception",
        "static_graph=True promises that each step uses the same parameters. Leave it out; where some get no gradient in some steps: "
        "find_unused_parameters=True in its place.",
    ),
    Symptom(
        r"Expected to have finished reduction in the prior iteration",
        "exception",
        "Some parameters get no gradient in some steps: find_unused_parameters=True, for a spec or in DistributedDataParallel(…).",
    ),
    Symptom(
        r"'DistributedDataParallel' object has no attribute",
        "exception",
        "The model is called through DistributedDataParallel, which averages the gradients of the ranks only if it is called itself: put "
        "what needs gradients, such as encode and decode, into the model's forward. Attributes are those of model.module.",
    ),
    Symptom(
        r"got mixed torch.Tensor and DTensor",
        "exception",
        "Where ranks share the parameters (FSDP2, tensor parallelism), these are whole only inside of the model's forward: put what "
        'computes with them there, such as encode and decode or a penalty on weights, and call model(…) itself; or try parallel="zero1".',
    ),
    Symptom(
        r"setStorage: .* out of bounds for storage of size 0",
        "exception",
        "FSDP2 frees the parameters that it has gathered: compute with them in the forward only. It has no second derivatives, as of a "
        'gradient penalty (create_graph=True): try parallel="zero1".',
    ),
    Symptom(
        r"FSDP expects uniform original parameter dtype",
        "exception",
        'FSDP2 gathers parameters together, which needs one dtype: try parallel="zero1", or give them one, such as model.float(), and '
        "complex ones as torch.view_as_real gives them.",
    ),
)


def symptom_of(message: str) -> Symptom | None:
    """The first known symptom in "Type: message", if there is one.

    >>> symptom_of("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB").kind
    'out-of-memory'
    """
    return next((symptom for symptom in _SYMPTOMS if re.search(symptom.pattern, message)), None)


def full_device(error: BaseException) -> str:
    """Why memory is probably the reason of a library's failure that does not say so, in the words of torch; "" where it is not.

    Call it before anything is freed: it looks at the GPU in use, and at errors of memory that led to this one.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not re.search(LIBRARY_FAILED, str(error)) or re.search(OUT_OF_DEVICE_MEMORY, str(error)):
        return ""
    with contextlib.suppress(Exception):  # a context that is broken answers nothing
        if not torch.cuda.is_initialized():
            return ""
        device = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(device)
        if free > MAX_FREE and not any(map(is_out_of_memory, _before(error))):
            return ""
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        sizes = (f"{size / 2**20:.2f} MiB" for size in (total, free, allocated, reserved - allocated))
        return (
            "{}: GPU {} has a total capacity of {} of which {} is free. Of the allocated memory {} is allocated by PyTorch, and {} is "
            "reserved by PyTorch but unallocated"
        ).format(PROBABLY_FULL, device, *sizes)
    return ""


def _before(error: BaseException) -> Iterator[BaseException]:
    """The errors that led to one."""
    seen = {id(error)}
    while (cause := error.__cause__ or error.__context__) is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield (error := cause)


def is_out_of_memory(error: BaseException) -> bool:
    """Does this error say that a device, or main memory, is full, or does the device say so?

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    """
    if not isinstance(error, RuntimeError | MemoryError | OSError):
        return False
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    symptom = symptom_of(f"{type(error).__name__}: {error}")
    return bool(full_device(error)) if symptom is None or symptom.kind == "exception" else symptom.kind == "out-of-memory"


def is_consequence(message: str) -> bool:
    """Was another rank the cause of this message, because it was gone or too late?

    >>> is_consequence("RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:35211")
    True
    """
    symptom = symptom_of(message)
    return _CONSEQUENCES.search(message) is not None or (symptom is not None and symptom.kind == "timeout")
