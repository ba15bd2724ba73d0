"""RunSpec: every knob of a run as a field. A what-if is a changed spec: `spec.replace(num_workers=2)`."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

PRECISIONS = ("fp32", "amp_bf16", "amp_fp16")
SCHEDULES = ("constant", "cosine")
_MEANT = {"gpu": "cuda", "bf16": "amp_bf16", "bfloat16": "amp_bf16", "fp16": "amp_fp16", "float16": "amp_fp16", "float32": "fp32"}
"""What is often typed → what it is called here."""
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
IMPLEMENTATIONS = ("foreach", "fused")
"""Ways in which torch runs an optimizer; the update is the same."""


class SpecError(ValueError):
    """A knob that does not exist or a value that it does not take; the message says what is allowed and what to try."""


class _Spec:
    """What both kinds of spec can do: be changed, be written, be read back."""

    __slots__ = ()

    def replace(self, **changes: Any) -> Self:
        """The same spec with some knobs turned.

        Raises:
            SpecError: no such knob, or a value it does not take.
        """
        check_names(type(self), changes)
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def changes(self, other: Self) -> dict[str, tuple[Any, Any]]:
        """Knobs that differ: name → (here, in `other`)."""
        mine, theirs = self.to_json(), other.to_json()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs.get(name)}

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"kind": _KINDS[type(self)], **dataclasses.asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`."""
        fields = {name: item for name, item in value.items() if name != "kind"}
        check_names(cls, fields)
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec(_Spec):
    """A run of a Task, with every knob a field.

    >>> spec = RunSpec(task="clipart-resnet", micro_batch=32, nproc_per_node=2)
    >>> spec.replace(accumulation=4).global_batch
    256
    """

    task: str
    """Name of a sample task, `"path/file.py:function"` or `"package.module:function"`; the function returns a Task."""
    micro_batch: int = 32
    """Samples per rank in one forward and backward."""
    accumulation: int = 1
    """Micro-batches per optimizer step; gradients are reduced across ranks in the last one only."""
    precision: str = "fp32"
    """"fp32", "amp_bf16" or "amp_fp16" (with a GradScaler)."""
    num_workers: int = 0
    """Processes of each rank's DataLoader; 0 = batches are made in the loop itself."""
    prefetch_factor: int | None = None
    """Batches each worker keeps ready; None = torch's own 2. Needs num_workers."""
    persistent_workers: bool = False
    """Keep the workers from one epoch to the next. Needs num_workers."""
    pin_memory: bool = False
    """Batches in page-locked memory, so that the copy to a GPU can overlap with compute."""
    nproc_per_node: int = 1
    """Ranks on this machine; on GPUs one rank each."""
    steps: int = 60
    """Optimizer steps."""
    optimizer: str | None = None
    """Name with options, such as "sgd(momentum=0.9)"; "fused" or "foreach": its own in that implementation; None = the task's own."""
    lr: float | None = None
    """Peak learning rate; None = the optimizer's own."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its peak."""
    schedule: str = "constant"
    """After the warm-up: "constant", or "cosine" down to zero at the last step."""
    clip_grad_norm: float | None = None
    """Largest allowed norm of the gradient; None = no clipping."""
    device: str = "auto"
    """"cpu", "cuda", or "auto": the GPUs if there is one for each rank."""
    backend: str = "auto"
    """"gloo", "nccl", or "auto": nccl on GPUs, gloo on CPUs."""
    threads: int = 1
    """Threads of each rank for one operator on the CPU (OMP_NUM_THREADS)."""
    bucket_cap_mb: float | None = None
    """Size of DDP's gradient buckets in MiB; None = torch's own 25."""
    find_unused_parameters: bool = False
    """Let DDP look for parameters without a gradient in every step; needed where some layers are skipped, and slower."""
    channels_last: bool = False
    """Weights and images in memory as (batch, height, width, channel), which many convolutions prefer."""
    gc: bool = True
    """Python's cyclic garbage collector runs when it likes; False = in every thousandth step only."""
    seed: int = 0
    """Seed of the model, the data order and the augmentation."""
    evaluate: bool = False
    """Run the task's evaluation after the last step."""

    def __post_init__(self) -> None:
        if not isinstance(self.task, str) or not self.task:
            raise SpecError(f'task={self.task!r}: a name is wanted, such as "clipart-resnet" or "my_task.py:build"')
        for name in ("micro_batch", "accumulation", "nproc_per_node", "steps", "threads"):
            _whole(self, name, 1)
        for name in ("num_workers", "warmup_steps", "seed"):
            _whole(self, name, 0)
        if self.prefetch_factor is not None:
            _whole(self, "prefetch_factor", 1)
        for name in ("lr", "clip_grad_norm", "bucket_cap_mb"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf")):
                raise SpecError(f"{name}={value!r}: a number above 0 is allowed, or None")
        for name in ("persistent_workers", "pin_memory", "find_unused_parameters", "channels_last", "gc", "evaluate"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name}={getattr(self, name)!r}: True or False is allowed")
        if self.optimizer is not None and (not isinstance(self.optimizer, str) or not self.optimizer):
            raise SpecError(f'optimizer={self.optimizer!r}: a name with options is allowed, such as "sgd(momentum=0.9)", or None')
        if self.seed >= 2**32:
            raise SpecError(f"seed={self.seed}: a whole number from 0 to 4294967295 is allowed")
        _one_of(self, "precision", PRECISIONS)
        _one_of(self, "schedule", SCHEDULES)
        _one_of(self, "device", DEVICES)
        _one_of(self, "backend", BACKENDS)
        if not self.num_workers and (self.prefetch_factor is not None or self.persistent_workers):
            knob = "persistent_workers" if self.persistent_workers else "prefetch_factor"
            raise SpecError(f"{knob} needs workers, and num_workers is 0: set num_workers to 1 or more, or leave {knob} out")
        if self.device == "cpu" and self.backend == "nccl":
            raise SpecError('backend="nccl" with device="cpu": nccl reduces on GPUs only; use backend="gloo" or "auto"')

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks: micro_batch × accumulation × world size."""
        return self.micro_batch * self.accumulation * self.nproc_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSpec(_Spec):
    """A run of a script that knows nothing of us."""

    script: str
    """Path of the script."""
    args: tuple[str, ...] = ()
    """Its arguments."""
    nproc_per_node: int = 1
    """Ranks on this machine."""
    watch: bool = False
    """Find the script's loaders, modules and optimizers as it runs and write their timelines."""
    threads: int = 1
    """OMP_NUM_THREADS of each rank."""

    def __post_init__(self) -> None:
        if isinstance(self.args, str):
            raise SpecError(f"args={self.args!r}: a list of words is wanted, such as {self.args.split()!r}")
        object.__setattr__(self, "args", tuple(str(word) for word in self.args))
        for name in ("nproc_per_node", "threads"):
            _whole(self, name, 1)
        if not isinstance(self.watch, bool):
            raise SpecError(f"watch={self.watch!r}: True or False is allowed")


Spec = RunSpec | ScriptSpec
_KINDS: dict[type, str] = {RunSpec: "task", ScriptSpec: "script"}


def spec_from_json(value: Mapping[str, Any]) -> Spec:
    """The spec that a run.json holds, of whichever kind.

    Raises:
        SpecError: a kind, knob or value this workbench does not know.
    """
    for cls, kind in _KINDS.items():
        if value.get("kind") == kind:
            return cls.from_json(value)  # type: ignore[attr-defined,no-any-return]
    raise SpecError(f"a spec of kind {value.get('kind')!r}: allowed are {', '.join(_KINDS.values())}")


def check_names(cls: type, names: Mapping[str, Any]) -> None:
    """Refuse knobs that `cls` does not have, and name the nearest one.

    Raises:
        SpecError: no such knob.
    """
    known = [field.name for field in dataclasses.fields(cls)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise SpecError(f"{cls.__name__} has no knob {name!r}: {hint}It has {', '.join(known)}")


def _whole(spec: Spec, name: str, least: int) -> None:
    value = getattr(spec, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{name}={value!r}: a whole number of at least {least} is allowed")


def _one_of(spec: Spec, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(spec, name)
    if value not in allowed:
        near = [_MEANT[value]] if value in _MEANT and _MEANT[value] in allowed else difflib.get_close_matches(str(value), allowed, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise SpecError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}{hint}")
