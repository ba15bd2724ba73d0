"""Defines every knob of a run as a field of RunSpec. A what-if is a changed spec: `spec.replace(num_workers=2)`."""

import ast
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from workbench.core.checks import choice, real_number, unknown_names, whole_number
from workbench.core.synonyms import check_fields
from workbench.runs import combinations
from workbench.runs.combinations import WAYS
from workbench.runs.profile import Profile
from workbench.runs.training_knobs import AUTO as AUTO
from workbench.runs.training_knobs import (
    BACKENDS,
    CHECKPOINTINGS,
    DECAYED,
    DEVICES,
    MEANT,
    OFFLOADS,
    PARALLELS,
    PRECISIONS,
    AutoBatch,
    Knob,
    knob,
)
from workbench.runs.training_knobs import IMPLEMENTATIONS as IMPLEMENTATIONS
from workbench.runs.training_knobs import SHARDED as SHARDED
from workbench.runs.training_knobs import SpecError as SpecError


class _Spec:
    """What both kinds of spec share: change, write and read back."""

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

    def __repr__(self) -> str:
        """The knobs that are not at their default."""
        fields = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        turned = ", ".join(f"{field.name}={value!r}" for field, value in fields if value != field.default)
        return f"{type(self).__name__}({turned})"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        values = ((name, getattr(self, name)) for name in _names(type(self)))  # type: ignore[arg-type]
        return {
            "kind": _KINDS[type(self)],
            **{name: dataclasses.asdict(value) if isinstance(value, Profile) else value for name, value in values},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{name: item for name, item in value.items() if name != "kind"})


_checked_names = check_fields(SpecError, lambda cls, knobs: check_names(cls, knobs))


@_checked_names
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunSpec(_Spec):
    """A run of a Task; every knob is a field.

    >>> spec = RunSpec(task="clipart-resnet", micro_batch=32, nproc_per_node=2)
    >>> spec.replace(accumulation=4).global_batch
    256
    """

    task: str
    """Name of a sample task, `"path/file.py:function"` or `"package.module:function"`; the function returns a Task."""
    micro_batch: int | Any = knob(  # noqa: RUF009
        32,
        elsewhere=("batch", "batch_size", "per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu"),
        turned_in="loader",
        predicted=True,
        panels=("doctor", "memory"),
    )
    """Samples per rank in one forward and backward; or "auto": the largest number that fits, chosen when the run starts, and split if
    memory runs out nevertheless (see `train.choose_micro_batch` and `train.split_on_oom`)."""
    accumulation: int = knob(1, predicted=True, panels=("memory",), elsewhere=("gradient_accumulation_steps", "accumulate_grad_batches"))
    """Micro-batches per optimizer step; gradients are reduced across ranks only in the last one."""
    precision: str = knob(
        "fp32",
        choices=PRECISIONS,
        turned_in="step",
        predicted=True,
        panels=("doctor", "memory"),
        elsewhere=("dtype", "amp", "mixed_precision", "bf16", "fp16"),
    )
    """"fp32", "amp_bf16" or "amp_fp16" (with a GradScaler)."""
    tf32: bool | None = knob(None, turned_in="step", predicted=True)
    """Whether fp32 matrix products and convolutions run in TF32 (True; NVIDIA GPUs from Ampere on) or in strict fp32 (False). None = as
    torch is configured; its default is strict fp32 for products and TF32 for convolutions."""
    num_workers: int = knob(0, turned_in="loader", predicted=True, panels=("doctor",), elsewhere=("workers", "dataloader_num_workers"))
    """Worker processes of each rank's DataLoader; 0 = the training loop makes the batches itself."""
    prefetch_factor: int | None = knob(None, turned_in="loader", predicted=True, panels=("doctor",))
    """Batches that each worker keeps ready; None = torch's default of 2. Needs num_workers."""
    persistent_workers: bool = knob(False, turned_in="loader", predicted=True)
    """Keep the workers from one epoch to the next. Needs num_workers. If the dataset has `set_epoch` and does not keep the epoch in shared
    memory, they would not see it, and are started anew with each epoch."""
    pin_memory: bool = knob(False, turned_in="loader", predicted=True)
    """Put batches into page-locked memory, so that copies to a GPU can overlap with compute."""
    nproc_per_node: int = knob(
        1, predicted=True, panels=("doctor", "memory"), elsewhere=("nproc", "gpus", "devices", "processes", "world_size")
    )
    """Ranks on each machine; on GPUs, one per GPU."""
    nnodes: int = knob(1, elsewhere=("nodes", "num_nodes", "machines", "num_machines"))
    """Number of machines. They share the run directory and meet through a rendezvous."""
    steps: int = knob(60, elsewhere=("max_steps", "num_steps", "iterations", "max_iters"))
    """Number of optimizer steps."""
    optimizer: str | None = knob(None, turned_in="step", predicted=True, panels=("memory",), elsewhere=("optim",))
    """Name with options, such as "sgd(momentum=0.9)"; "fused" or "foreach": the task's own optimizer in that implementation; None = the
    task's own."""
    lr: float | None = knob(None, elsewhere=("learning_rate",))
    """Peak learning rate; of several groups of parameters that of the first, to which others keep their ratio; None = the optimizer's
    own."""
    warmup_steps: int = knob(0, elsewhere=("warmup", "num_warmup_steps", "warmup_iters"))
    """Steps over which the learning rate rises linearly to its peak."""
    schedule: str = knob("constant", elsewhere=("lr_scheduler", "lr_scheduler_type", "scheduler"))
    """Name with options, for the steps after the warm-up: "constant"; "cosine" or "polynomial(power=1.0)": down to zero at the last step,
    or to a fraction of the peak (`end=0.1`); "step(every=0.34, factor=0.1)": × factor after each such fraction of the steps;
    "inverse_sqrt"; "warmup_stable_decay(decay=0.2)": the peak, then in the last fifth of the steps linearly down to zero, or to `end`. Or
    your own function, "my_task.py:rate" or "package.module:rate", from a step (the first is 0) to a fraction of the peak; only runs import
    it."""
    weight_decay_on: str = knob("all", choices=DECAYED)
    """Which parameters weight decay shrinks: "all", or "matrices": those with two or more dimensions, so neither norms nor biases."""
    ema: float | None = knob(None, elsewhere=("ema_decay", "use_ema", "model_ema", "polyak"))
    """Also keep an exponential moving average of the parameters, with this decay per step, such as 0.999, and evaluate it instead of them;
    None = none. It takes as much memory as the parameters; where these are sharded, each rank averages its part."""
    label_smoothing: float = knob(0.0, elsewhere=("label_smoothing_factor", "smoothing"))
    """Fraction of the target's probability that is spread over all classes, in training, in each `cross_entropy` that the task's loss calls
    without its own label smoothing; 0 = none."""
    clip_grad_norm: float | None = knob(None, elsewhere=("max_grad_norm", "gradient_clip_val", "grad_clip", "max_norm"))
    """Largest allowed norm of the gradient; None = no clipping."""
    device: str = knob("auto", choices=DEVICES)
    """"cpu", "cuda", or "auto": GPUs if there is one for each rank."""
    backend: str = knob("auto", choices=BACKENDS)
    """"gloo", "nccl", or "auto": nccl on GPUs, gloo on CPUs."""
    threads: int = knob(1, turned_in="step", predicted=True)
    """Threads of each rank for one operator on the CPU (OMP_NUM_THREADS)."""
    bucket_cap_mb: float | None = knob(None, predicted=True)
    """Size of DDP's gradient buckets in MiB; None = torch's default of 25; PowerSGD on CPUs has one bucket, and takes None only."""
    find_unused_parameters: bool = False
    """Let DDP look for parameters without a gradient in every step. Needed if some layers are skipped, and slower."""
    static_graph: bool = False
    """Promise DDP that each step uses the same parameters in the same way. DDP then looks for those without a gradient only in the first
    step, at no cost in later ones. A step that breaks the promise ends the training."""
    gradient_as_bucket_view: bool = False
    """Let gradients be views of DDP's buckets, which saves one copy of the gradients during the optimizer's step."""
    gradient_compression: str = knob("none", elsewhere=("ddp_comm_hook", "comm_hook"))
    """What DDP reduces instead of fp32 gradients, through one of torch's communication hooks: "none"; "fp16" or "bf16": half the bytes
    (fp16 overflows above 65,504; bf16 needs GPUs and NCCL); "powersgd(rank=1, start=10)": from step `start` on, two thin matrices with
    `rank` columns for each matrix. From these, each rank computes an approximation of the mean, and adds what was left out in the next
    step. It keeps that error, as large as the gradients, on each rank: estimates include it as it is from `start` on, and so do
    checkpoints."""
    parallel: str = knob("ddp", choices=PARALLELS, panels=("memory",), elsewhere=("strategy", "fsdp", "zero", "sharding", "zero_stage"))
    """What the ranks share: "ddp" nothing, "zero1" optimizer states, "zero2" optimizer states and gradients, and the weights between steps,
    "fsdp" everything; "hsdp": as "fsdp" within groups of `shard_ranks`, as "ddp" between groups. Under the last three, amp_bf16 keeps the
    weights in fp32, gathers them in bf16, computes in bf16 (batch norms and the output in fp32) and reduces in fp32, without autocast; see
    `train.sharding`. They refuse hooks on parameters, and parameters that the forward changes, such as those of a momentum teacher."""
    shard_ranks: int | None = None
    """Ranks that share one copy of the model under "hsdp"; None = 8, or all if there are fewer."""
    tensor_parallel: int = knob(1, elsewhere=("tp", "tensor_parallel_size", "tensor_model_parallel_size"))
    """Ranks that split each layer in the Task's `tensor_parallel` plan; they work on the same samples."""
    pipeline_parallel: int = knob(
        1, elsewhere=("pp", "pipeline_stages", "pipeline_parallel_size", "pipeline_parallel_degree", "pipeline_model_parallel_size")
    )
    """Number of ranks among which the layers are divided. Each rank has consecutive layers (a stage), and the `accumulation` micro-batches
    of a step flow through all stages. A model that is not an `nn.Sequential` needs a `Task.pipeline` that splits it."""
    pipeline_schedule: str = knob("1f1b", elsewhere=("pipeline_parallel_schedule", "pp_schedule"))
    """Order in which the stages of a pipeline compute: "gpipe": all forwards, then all backwards; "1f1b": each backward as soon as
    possible, which keeps fewer activations; "interleaved(chunks=2)": several smaller stages on each rank, which wait less and send more;
    "zero_bubble" (ZBV): two stages on each rank and the backward in two parts, the second of which fills the waiting time."""
    expert_parallel: int = knob(1, elsewhere=("ep", "expert_parallel_size", "moe_expert_parallel_size", "expert_model_parallel_size"))
    """Number of ranks among which the experts of a mixture of experts are divided. They read different samples, and send each token to the
    ranks of its experts and back; everything else is as with "ddp". With more ranks, there are several copies of the experts."""
    local_sgd: str = knob("none", elsewhere=("post_local_sgd", "localsgd", "periodic_averaging"))
    """Post-local SGD: "none", or "periodic(period=4, start=100, local_ranks=1)": after `start` steps, gradients are reduced only among
    `local_ranks` neighbours (1 = not at all), and the parameters are averaged over all ranks in every `period`-th step. This sends less,
    but the result differs from DDP's, since ranks differ between two averages."""
    checkpointing: str = knob(
        "none", choices=CHECKPOINTINGS, panels=("memory",), elsewhere=("gradient_checkpointing", "activation_checkpointing", "recompute")
    )
    """What the backward recomputes instead of keeping: "none"; "full": each of the model's repeated blocks; or "selective": all of each
    block except matrix products, convolutions and attention."""
    compile: str = knob("none", elsewhere=("torch_compile", "compile_model", "use_compile"))
    """What `torch.compile` compiles: "none", "model", or "blocks": each repeated block by itself, which compiles faster, since blocks of
    one class share the compiled code. With a backend other than inductor, which needs a C++ compiler: "blocks(backend=aot_eager)".
    Compiling happens in the first step: all means leave that step out, and the log and `run.metrics` say how long it took."""
    offload: str = knob("none", choices=OFFLOADS)
    """What is kept in host memory, on GPUs: "none"; "activations" from forward to backward; or "optimizer": the optimizer's states, and its
    step runs on the host."""
    channels_last: bool = knob(False, turned_in="step", predicted=True)
    """Store weights and images as (batch, height, width, channel), which many convolutions prefer; sharded weights stay as they are."""
    gc: bool = knob(True, turned_in="step", predicted=True)
    """Let Python's cyclic garbage collector run at any time; False = only in every thousandth step."""
    deterministic: bool = knob(False, turned_in="step", predicted=True, elsewhere=("use_deterministic_algorithms", "full_determinism"))
    """Use only deterministic algorithms (torch, cuDNN, cuBLAS), and give each batch of a loader's worker its own seed, so that two runs are
    equal bit for bit. An operator that has no such algorithm fails, and the error names it."""
    seed: int = 0
    """Seed of the model, the data order and the augmentation."""
    evaluate: bool | str = False
    """When the task's evaluation runs: "end" (or True) after the last step; "epoch", "checkpoint" (before each) or "every(steps=500)" in
    addition. The training continues bit for bit as if it had not been evaluated. False = never."""
    stop_when: str | None = knob(None, elsewhere=("early_stopping", "early_stopping_patience"))
    """End the training early when a figure of its evaluations stops improving: "validation_loss(patience=3)": for 3 evaluations;
    "score(patience=5, best=max, by=0.001)": larger is better, by more than 0.001; accuracy needs no `best=`. Needs evaluate="epoch",
    "every(steps=…)" or "checkpoint". If the evaluations have no such figure, a warning says which they have; None = all steps are taken."""
    evaluate_batches: int | None = None
    """Number of batches of micro_batch samples in an evaluation, over all ranks; None = the whole `Task.validation`."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints in the run directory, from which a run can continue: a job that Slurm requeues (`Slurm(requeue=True)`),
    or a run of this machine with `wb.launch(resume=run)`; None = none. See `train.checkpoints`."""
    keep_checkpoints: int = knob(2, elsewhere=("save_total_limit", "save_top_k", "max_to_keep"))
    """How many of the latest checkpoints are kept, besides the best one and the last with finite weights. With 1, nothing is
    left if the only one is damaged."""
    best: str | None = knob(None, elsewhere=("metric_for_best_model", "monitor"))
    """The evaluation's figure that decides which checkpoint is the best: "accuracy", "validation_loss", "perplexity", "bits_per_byte" or
    "ece", or one of the task's own with its direction: "score(max)" or "score(min)"; None = of the evaluations' figures "validation_loss",
    else "perplexity", "bits_per_byte" or "accuracy". Needs evaluate="checkpoint", or evaluations at steps with a checkpoint. If they have
    no such figure, a warning says which they have, and no checkpoint is the best."""
    noise_scale: bool | int = False
    """Record the gradient norms for `run.noise_scale`: n = in every n-th step, at 1/n of the cost (1 = in every step; in a long run 10 is
    enough), True = in every fourth step, or less often if that took more than 5 % of the time. Needs two groups of samples in a step:
    ranks, or accumulation."""
    gradient_norms: int | None = None
    """Record the norm of each layer's gradients in every n-th step, before clipping, in `run.gradient_norms`; None = never."""
    step_digests: bool = False
    """Write a digest of everything that each step depends on and computes, on each rank. With these, `wb.recompute` names the rank and the
    part of a step that was computed wrongly. This copies weights, optimizer states and gradients to the host in each step, and under DDP
    also the gradients of each micro-batch."""
    profile: Profile | Any = None
    """Trace some steps with torch.profiler, into `traces/` of the run directory: the number of steps, or a mapping of `Profile`'s fields:
    steps, ranks ("all" or a list), wait, shapes, stacks, memory, flops. The run's figures leave these steps out. None = none."""

    def __post_init__(self) -> None:
        if not isinstance(self.task, str) or not self.task:
            raise SpecError(f'task={self.task!r:.80}: expected a name, such as "clipart-resnet" or "my_task.py:build"')
        if self.micro_batch == AUTO:
            object.__setattr__(self, "micro_batch", AutoBatch(AUTO))
        else:
            _check_whole(self, "micro_batch", 1, ', or "auto"')
        for name in ("accumulation", "nproc_per_node", "nnodes", "steps", "threads", "keep_checkpoints", *WAYS):
            _check_whole(self, name, 1)
        for name in ("num_workers", "warmup_steps"):
            _check_whole(self, name, 0)
        for name in ("prefetch_factor", "shard_ranks", "checkpoint_every", "evaluate_batches", "gradient_norms"):
            if getattr(self, name) is not None:
                _check_whole(self, name, 1)
        for name in ("lr", "clip_grad_norm", "bucket_cap_mb"):
            value = getattr(self, name)
            if value is not None:
                real_number(name, value, above=0, also=", or None", error=SpecError)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name}={getattr(self, name)!r}: True or False is allowed")
        if self.tf32 not in (None, True, False) or isinstance(self.tf32, int) != isinstance(self.tf32, bool):
            raise SpecError(f"tf32={self.tf32!r}: True, False or None (as torch is set up) is allowed")
        if self.tf32 and self.device == "cpu":
            raise SpecError('tf32=True with device="cpu": only GPUs compute in TF32; leave tf32 out, or try device="cuda"')
        if self.optimizer is not None and (not isinstance(self.optimizer, str) or not self.optimizer):
            raise SpecError(f'optimizer={self.optimizer!r}: a name with options is allowed, such as "sgd(momentum=0.9)", or None')
        whole_number("seed", self.seed, least=0, most=2**32 - 1, error=SpecError)
        for name, about in KNOBS.items():
            if about.choices:
                choice(name, getattr(self, name), about.choices, meant=MEANT, also=about.also(getattr(self, name)), error=SpecError)
        if not self.num_workers and (self.prefetch_factor is not None or self.persistent_workers):
            knob = "persistent_workers" if self.persistent_workers else "prefetch_factor"
            raise SpecError(f"{knob} needs workers, and num_workers is 0: set num_workers to 1 or more, or leave {knob} out")
        if self.device == "cpu" and self.backend == "nccl":
            raise SpecError('backend="nccl" with device="cpu": nccl reduces on GPUs only; use backend="gloo" or "auto"')
        combinations.check(self)
        _profile(self)

    @property
    def queue(self) -> int:
        """Steps whose batches the loader's workers make ahead at most; 0 without workers."""
        return -(-self.num_workers * (self.prefetch_factor or 2) // self.accumulation)

    @property
    def world_size(self) -> int:
        """Ranks on all machines: nnodes × nproc_per_node."""
        return self.nnodes * self.nproc_per_node

    @property
    def whole_models(self) -> bool:
        """Whether each rank has the whole model (optimizer states may be sharded)."""
        return self.parallel not in SHARDED and all(getattr(self, name) == 1 for name in WAYS)

    @property
    def data_ranks(self) -> int:
        """Ranks that work on different samples: all, divided by `tensor_parallel` and `pipeline_parallel`."""
        return self.world_size // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks: micro_batch × accumulation × data_ranks.

        Raises:
            SpecError: micro_batch is "auto".
        """
        return self.micro_batch * self.accumulation * self.data_ranks


@_checked_names
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ScriptSpec(_Spec):
    """A run of an unedited script."""

    script: str
    """Path of the script."""
    args: tuple[str, ...] = ()
    """Its arguments."""
    nproc_per_node: int = 1
    """Ranks on each machine."""
    nnodes: int = 1
    """Machines."""
    watch: bool = False
    """Find the script's loaders, modules and optimizers as it runs and write their timelines."""
    threads: int = 1
    """OMP_NUM_THREADS of each rank."""
    profile: Profile | Any = None
    """Trace some steps, as a RunSpec does; needs `watch`, which knows where they end."""

    def __post_init__(self) -> None:
        if isinstance(self.args, str):
            raise SpecError(f"args={self.args!r}: expected a list of words, such as {self.args.split()!r}")
        object.__setattr__(self, "args", tuple(str(word) for word in self.args))
        for name in ("nproc_per_node", "nnodes", "threads"):
            _check_whole(self, name, 1)
        if not isinstance(self.watch, bool):
            raise SpecError(f"watch={self.watch!r}: True or False is allowed")
        _profile(self)
        if self.profile is not None and not self.watch:
            raise SpecError("profile of a script needs watch=True, which finds out where its steps end")

    @property
    def world_size(self) -> int:
        """Ranks on all machines: nnodes × nproc_per_node."""
        return self.nnodes * self.nproc_per_node


Spec = RunSpec | ScriptSpec
_KINDS: dict[type, str] = {RunSpec: "task", ScriptSpec: "script"}


def spec_from_json(value: Mapping[str, Any]) -> Spec:
    """The spec that a run.json holds, of whichever kind.

    Raises:
        SpecError: a kind, knob or value this workbench does not know.
    """
    for cls, kind in _KINDS.items():
        if value.get("kind") == kind:
            with combinations.read_from_a_run():
                return cls.from_json(value)  # type: ignore[attr-defined,no-any-return]
    raise SpecError(f"a spec of kind {value.get('kind')!r:.80}: allowed are {', '.join(_KINDS.values())}")


def parse_knob(word: str) -> tuple[str, Any]:
    """A knob and its value, from text such as `micro_batch=16`.

    >>> parse_knob("micro_batch=16"), parse_knob("precision=amp_bf16"), parse_knob("static_graph=true")
    (('micro_batch', 16), ('precision', 'amp_bf16'), ('static_graph', True))
    """
    name, _, value = word.partition("=")
    value = value.title() if value.lower() in ("true", "false") else value
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


@functools.cache
def _names(cls: type) -> tuple[str, ...]:
    """The knobs of a kind of spec."""
    return tuple(field.name for field in dataclasses.fields(cls))


def check_names(cls: type, names: Mapping[str, Any], also: Sequence[str] = ()) -> None:
    """Raise for all knobs that `cls` does not have, and say what each is called here, or which name is the nearest; `also` is known, too.

    Raises:
        SpecError: no such knob.
    """
    if names.keys() <= set(known := (*also, *_names(cls))):
        return
    elsewhere = {other: knob for knob, about in KNOBS.items() if knob in known for other in about.elsewhere}
    if told := unknown_names(f"{cls.__name__} has no knob", names, known, meant=elsewhere, listed="workbench launch --help"):
        raise SpecError(told)


KNOBS: Mapping[str, Knob] = {
    field.name: field.metadata.get("knob") or Knob(default=None if field.default is dataclasses.MISSING else field.default)
    for field in dataclasses.fields(RunSpec)
}
"""Name of a field of RunSpec → what is known of it."""
_SWITCHES = tuple(field.name for field in dataclasses.fields(RunSpec) if field.type is bool)


def _profile(spec: Spec) -> None:
    try:
        object.__setattr__(spec, "profile", Profile.of(spec.profile))
    except ValueError as error:
        raise SpecError(f"profile={spec.profile!r}: {error}") from None


def check_profile(spec: Spec) -> None:
    """Check that a run has the steps and ranks that are to be traced. Called at the launch, since knobs are changed one by one before.

    Raises:
        SpecError: it does not have them.
    """
    if spec.profile is None:
        return
    steps, queue = (spec.steps, spec.queue) if isinstance(spec, RunSpec) else (None, 0)
    if trouble := spec.profile.trouble(steps=steps, queue=queue, ranks=spec.world_size):
        raise SpecError(trouble)


def _check_whole(spec: Spec, name: str, least: int, other: str = "") -> None:
    whole_number(name, getattr(spec, name), least=least, also=other, error=SpecError)
