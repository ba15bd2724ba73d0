"""Which knobs of a RunSpec do not go together, and which a CPU or a sample task does not take. Needs no torch: it is asked before a launch.

`check` is a part of making a RunSpec. Whatever launches one asks the others, too (`runs.launch.launch.check`), and estimates ask
`check_task`. What a user's own task does not take only its ranks find out, since nothing here imports it.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from workbench.core.checks import real_number, whole_number
from workbench.core.optimizer_table import OPTIMIZERS
from workbench.runs.task import SAMPLES
from workbench.runs.training_knobs import (
    BETTER,
    COMPILES,
    COMPRESSIONS,
    EARLIEST_POWERSGD,
    IMPLEMENTATIONS,
    SCHEDULES,
    SHARD_RANKS,
    SHARDED,
    SpecError,
    parse_best,
    parse_call,
    parse_evaluate,
    parse_local_sgd,
    parse_optimizer,
    parse_pipeline,
    parse_schedule,
    parse_stop,
)

WAYS = ("tensor_parallel", "pipeline_parallel", "expert_parallel")
"""Knobs that say among how many ranks parts of the model are divided."""
WHOLE = {"muon": "whole matrices", "adafactor": "the means of whole rows and columns"}
"""Optimizer that cannot step on parts of parameters → what it needs."""
BF16 = 'gradient_compression="bf16": torch reduces gradients in bf16 on GPUs with NCCL only; try "fp16"'
"""Why it is refused elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What is known of a sample task without building it."""

    samples: int
    """In its dataset."""
    figures: tuple[str, ...]
    """That its evaluation gives."""
    optimizer: str = "adamw"
    """Its own, without options."""
    decays: bool = True
    """Has its own optimizer weight decay?"""
    blocks: bool = True
    """Has its model blocks that repeat?"""
    pieces: int = 0
    """Those with parameters, into which a pipeline can cut its model; 0 = it does not say how."""
    experts: int = 0
    """Of each layer that has experts."""
    plan: bool = False
    """Does it say how tensor parallelism splits its layers?"""


_TEXT = ("bits_per_byte", "validation_loss")
KNOWN: Mapping[str, Sample] = {
    SAMPLES["clipart-resnet"]: Sample(samples=1027, figures=("accuracy", "validation_loss"), pieces=6),
    SAMPLES["text-gpt"]: Sample(samples=9629, figures=_TEXT, pieces=4, plan=True),
    SAMPLES["fashion-mlp"]: Sample(samples=8000, figures=("accuracy", "loss"), optimizer="sgd", decays=False, blocks=False, pieces=2),
    "workbench.train.tasks:moe_gpt": Sample(samples=9629, figures=_TEXT, experts=4),
}
"""Where a sample task is → what is known of it; a test compares this with the tasks."""


def check(spec: Any) -> None:
    """Check the knobs of the recipe, alone and together.

    Raises:
        SpecError: a value that is not allowed, or a combination that is not possible.
    """
    if not isinstance(spec.schedule, str):
        raise SpecError(f"schedule={spec.schedule!r:.80}: a name is allowed: {', '.join(map(repr, SCHEDULES))}")
    parse_schedule(spec.schedule)
    when, _ = parse_evaluate(spec.evaluate)
    if when == "checkpoint" and not spec.checkpoint_every:
        example = f"checkpoint_every={some_steps(spec, 500)}"
        raise SpecError(f'evaluate="checkpoint" with checkpoint_every=None: say after how many steps, as in {example}')
    if spec.evaluate_batches and not when:
        raise SpecError(f'evaluate_batches={spec.evaluate_batches} with evaluate=False: say when, as in evaluate="end"')
    _check_compile(spec)
    _check_stop(spec)
    _check_best(spec)
    _check_pipeline(spec)
    _check_experts(spec)
    _check_local_sgd(spec)
    _check_static_graph(spec)
    _, options = parse_call("gradient_compression", spec.gradient_compression, COMPRESSIONS, "powersgd(rank=2)")
    for option, least in (("rank", 1), ("start", EARLIEST_POWERSGD)):
        if option in options:
            whole_number(f'gradient_compression="{spec.gradient_compression}": {option}', options[option], least=least, error=SpecError)
    real_number("label_smoothing", spec.label_smoothing, least=0, below=1, error=SpecError)
    if spec.gradient_compression != "none" and (spec.parallel in SHARDED or spec.tensor_parallel > 1):
        beside = given(spec, "tensor_parallel" if spec.tensor_parallel > 1 else "parallel")
        raise SpecError(
            f'{given(spec, "gradient_compression")} with {beside}: it is a hook of DDP, which "ddp" and "zero1" use; leave it out, or try '
            'parallel="ddp" with tensor_parallel=1'
        )
    if spec.ema is not None:
        real_number("ema", spec.ema, above=0, below=1, what="a decay per step", also=", such as 0.999, or None", error=SpecError)
    _check_parallel(spec)
    if not _of_a_run.get():
        _check_optimizer(spec)
    if spec.noise_scale:
        _check_noise(spec)


_of_a_run: ContextVar[bool] = ContextVar("_of_a_run", default=False)


@contextlib.contextmanager
def read_from_a_run() -> Iterator[None]:
    """While the spec of a run is read: an older version may have launched an optimizer that is refused now."""
    token = _of_a_run.set(True)
    try:
        yield
    finally:
        _of_a_run.reset(token)


def check_task(spec: Any) -> None:
    """Check that a sample task takes the knobs of a spec; of other tasks nothing is known.

    Raises:
        SpecError: it does not.
    """
    if (sample := KNOWN.get(SAMPLES.get(spec.task, spec.task))) is None:
        return
    _, chunks = parse_pipeline(spec.pipeline_schedule)
    stages, own = spec.pipeline_parallel * chunks, spec.optimizer in (None, *IMPLEMENTATIONS)
    optimizer, options = (sample.optimizer, {}) if own else parse_optimizer(spec.optimizer)
    decays = sample.decays if own else options.get("weight_decay", OPTIMIZERS[optimizer].defaults["weight_decay"])
    need, ways = spec.expert_parallel, spec.pipeline_parallel
    fewer = 'pipeline_schedule="gpipe"' if chunks > 1 and ways <= sample.pieces else f"pipeline_parallel={sample.pieces // chunks}"
    for knob, clashes, why in (
        ("expert_parallel", need > 1 and not sample.experts, "its model has no layers of experts; leave it out"),
        (
            "expert_parallel",
            need > 1 and sample.experts and sample.experts % need,
            f"it does not divide its {sample.experts} experts; try expert_parallel={nearest_divisor(sample.experts or 1, need)}",
        ),
        ("tensor_parallel", spec.tensor_parallel > 1 and not sample.plan, "it has no plan of how its layers are split; leave it out"),
        ("pipeline_parallel", ways > 1 and not sample.pieces, "it does not say how its model is cut; leave it out"),
        (
            "pipeline_schedule" if chunks > 1 else "pipeline_parallel",
            ways > 1 and sample.pieces and stages > sample.pieces,
            f"it needs {stages} stages, and its model has {sample.pieces} pieces with parameters; try {fewer}",
        ),
        ("checkpointing", spec.checkpointing != "none" and not sample.blocks, "its model has no blocks that repeat; leave it out"),
        (
            "compile",
            parse_call("compile", spec.compile, COMPILES, "blocks")[0] == "blocks" and not sample.blocks,
            'its model has no blocks that repeat; try compile="model"',
        ),
        (
            "weight_decay_on",
            spec.weight_decay_on == "matrices" and not decays,
            f'its {optimizer} has no weight decay; leave it out, or try optimizer="adamw(weight_decay=0.1)"',
        ),
    ):
        if clashes:
            raise SpecError(f"{given(spec, knob)} with task={spec.task!r}: {why}")
    if spec.optimizer == "fused":
        _check_parts(spec, sample.optimizer, fused=True)
    figures = [("stop_when", parse_stop(spec.stop_when)[0])] if spec.stop_when else []
    for knob, figure in [*figures, ("best", parse_best(spec.best)[0])] if spec.best else figures:
        if not figure_in(sample.figures, figure):
            known = next(name for name in BETTER if name in sample.figures)
            raise SpecError(
                f'{given(spec, knob)} with task={spec.task!r}: its evaluation has {" and ".join(sample.figures)}; try {knob}="{known}"'
            )


def check_samples(spec: Any) -> None:
    """Check that a sample task's dataset has enough samples for one optimizer step.

    Raises:
        SpecError: it has too few.
    """
    sample = KNOWN.get(SAMPLES.get(spec.task, spec.task))
    if sample and spec.micro_batch != "auto" and sample.samples < spec.global_batch:
        most = max(1, sample.samples // (spec.accumulation * spec.data_ranks))
        raise SpecError(
            f"micro_batch={spec.micro_batch} with task={spec.task!r}: one optimizer step takes {spec.global_batch} samples, and its "
            f"dataset has {sample.samples}; try micro_batch={most}, or fewer ranks, or less accumulation"
        )


def on_cpu(spec: Any) -> str:
    """Why a run with these knobs cannot compute on the CPU; "" = it can."""
    if spec.offload != "none":
        return (
            f'offload="{spec.offload}" on the CPU: there is nothing to offload from, all memory is the host\'s; try offload="none". '
            "What it would save on a GPU can be estimated here: wb.estimate_memory(spec)"
        )
    if spec.tf32:
        return "tf32=True on the CPU: only NVIDIA GPUs compute in TF32, from Ampere on; leave tf32 out"
    if spec.optimizer and spec.optimizer not in IMPLEMENTATIONS and parse_optimizer(spec.optimizer)[1].get("capturable"):
        return f'optimizer="{spec.optimizer}" on the CPU: only GPUs can capture a step; leave capturable out'
    if spec.gradient_compression == "bf16":
        return BF16
    if spec.gradient_compression.startswith("powersgd") and spec.bucket_cap_mb is not None:
        return (
            f'bucket_cap_mb={spec.bucket_cap_mb:g} with gradient_compression="{spec.gradient_compression}": on CPUs the gradients have to '
            "be in one bucket, since with two, PowerSGD waits for ever in the threads of gloo; leave bucket_cap_mb out: the bucket then "
            "takes them all"
        )
    return ""


def figure_in(figures: Iterable[str], name: str) -> str:
    """What a figure is called among those of an evaluation, whose loss may have a prefix; "" = there is none of this name."""
    return next((each for each in (name, name.removeprefix("validation_"), f"validation_{name}") if each in figures), "")


def _check_optimizer(spec: Any) -> None:
    """Check the optimizer that a spec names, and that it can step on what ranks have of the parameters."""
    if spec.optimizer in (None, *IMPLEMENTATIONS):
        return
    name, options = parse_optimizer(spec.optimizer)
    if options.get("differentiable"):
        raise SpecError(f'optimizer="{spec.optimizer}": differentiable=True: the training steps outside of autograd; leave it out')
    if options.get("fused") and options.get("foreach"):
        raise SpecError(f'optimizer="{spec.optimizer}": fused and foreach are two implementations; leave one of them out')
    _check_parts(spec, name, fused=bool(options.get("fused")))


def _check_parts(spec: Any, name: str, *, fused: bool) -> None:
    for knob, divided, instead in (
        ("parallel", spec.parallel in SHARDED, 'try parallel="ddp" or'),
        ("tensor_parallel", spec.tensor_parallel > 1, "leave one of them out, or try"),
        ("expert_parallel", spec.expert_parallel > 1, "leave one of them out, or try"),
    ):
        if divided and name in WHOLE:
            raise SpecError(
                f'optimizer="{spec.optimizer}" with {given(spec, knob)}: it needs {WHOLE[name]}, and sees parts of them where ranks share '
                f'the parameters; {instead} optimizer="adamw"'
            )
    if fused and spec.parallel in SHARDED and name not in ("adam", "adamw"):
        raise SpecError(
            f'optimizer="{spec.optimizer}" with {given(spec, "parallel")}: for sharded parameters torch has fused steps of adam and adamw '
            "only; try foreach instead"
        )


def some_steps(spec: Any, most: int = 100) -> int:
    """Steps between two checkpoints or evaluations, as an example for a spec: several of them before its last step."""
    return int(min(most, -(-spec.steps // 6)))


def _check_compile(spec: Any) -> None:
    what, options = parse_call("compile", spec.compile, COMPILES, "blocks(backend=aot_eager)")
    if what == "none":
        return
    if not isinstance(options["backend"], str):
        raise SpecError(f'compile={spec.compile!r:.80}: backend={options["backend"]!r}: a name is allowed, such as "inductor"')
    for knob, clashes, why in (
        ("micro_batch", spec.micro_batch == "auto", "it is chosen for the step as it is without torch.compile; give a number"),
        ("tensor_parallel", spec.tensor_parallel > 1, "split layers exchange data in the midst of the graph; leave one of them out"),
        ("checkpointing", spec.checkpointing != "none", "torch.compile decides itself what the backward recomputes; leave one of them out"),
        ("offload", spec.offload == "activations", "what a compiled graph keeps for its backward is not moved; leave one of them out"),
        (
            "bucket_cap_mb",
            spec.parallel not in SHARDED and spec.bucket_cap_mb is not None and spec.bucket_cap_mb < 1,
            "torch.compile cuts the graph at DDP's buckets, of which it takes the first for 1 MiB; give 1 or more",
        ),
        ("parallel", what == "model" and spec.parallel in SHARDED, 'the model is gathered block by block; try compile="blocks"'),
    ):
        if clashes:
            raise SpecError(f'compile="{spec.compile}" with {given(spec, knob)}: {why}')


def _check_pipeline(spec: Any) -> None:
    name, _ = parse_pipeline(spec.pipeline_schedule)
    stages, given_stages = spec.pipeline_parallel, f"pipeline_parallel={spec.pipeline_parallel}"
    if stages == 1:
        return
    fewest = {"1f1b": stages, "zero_bubble": 2 * stages}.get(name, 1)
    if spec.accumulation < fewest or (name == "interleaved" and spec.accumulation % stages):
        needs = f"a multiple of {stages}" if name == "interleaved" else f"{fewest} or more"
        raise SpecError(
            f'accumulation={spec.accumulation} with {given_stages} and pipeline_schedule="{spec.pipeline_schedule}": the micro-batches of '
            f"a step flow through the pipeline, and this schedule takes {needs} of them; try accumulation="
            f"{max(fewest, -(-spec.accumulation // stages) * stages)}" + ', or pipeline_schedule="gpipe"' * (spec.accumulation > 1)
        )
    for knob, clashes, why in (
        ("parallel", spec.parallel not in ("ddp", "zero1"), 'stages that are sharded are not built here; try parallel="ddp" or "zero1"'),
        ("tensor_parallel", spec.tensor_parallel > 1, "stages of split layers are not built here; leave one of them out"),
        ("micro_batch", spec.micro_batch == "auto", "a size is tried out on each rank alone, and none has the whole model; give a number"),
        ("precision", spec.precision == "amp_fp16", 'each stage would scale its gradients by itself; try precision="amp_bf16"'),
        ("compile", spec.compile != "none", "a schedule takes the backward of a stage apart; leave one of them out"),
        ("offload", spec.offload != "none", "several micro-batches are under way at once; leave one of them out"),
        ("gradient_compression", spec.gradient_compression != "none", "it has not been tried on stages; leave one of them out"),
        ("find_unused_parameters", spec.find_unused_parameters, "each stage uses all of its parameters; leave it out"),
        ("noise_scale", spec.noise_scale, "no rank has the whole gradient of a sample; measure it with pipeline_parallel=1"),
        ("gradient_norms", spec.gradient_norms, "rank 0, which writes them, has the layers of its own stages only; leave it out"),
    ):
        if clashes:
            raise SpecError(f"{given(spec, knob)} with {given_stages}: {why}")


def _check_experts(spec: Any) -> None:
    if spec.expert_parallel == 1:
        return
    alone = "a size is tried out on each rank alone, and ranks need each other's experts; give a number"
    for knob, clashes, why in (
        ("parallel", spec.parallel != "ddp", 'experts that are divided and sharded are not built here; try parallel="ddp"'),
        ("tensor_parallel", spec.tensor_parallel > 1, "split layers beside divided experts are not built here; leave one of them out"),
        ("pipeline_parallel", spec.pipeline_parallel > 1, "experts that are divided inside of stages are not built here; leave one out"),
        ("micro_batch", spec.micro_batch == "auto", alone),
        ("precision", spec.precision == "amp_fp16", 'a rank whose experts overflow would leave out a step alone; try "amp_bf16"'),
        ("compile", spec.compile != "none", "tokens are exchanged in the midst of the graph; leave one of them out"),
        ("offload", spec.offload != "none", "it has not been tried on divided experts; leave one of them out"),
        ("gradient_compression", spec.gradient_compression != "none", "DDP does not reduce the experts; leave one of them out"),
        ("noise_scale", spec.noise_scale, "an expert's gradient is of samples of all ranks; measure it with expert_parallel=1"),
    ):
        if clashes:
            raise SpecError(f"{given(spec, knob)} with expert_parallel={spec.expert_parallel}: {why}")


def _check_local_sgd(spec: Any) -> None:
    options = parse_local_sgd(spec.local_sgd)
    if not options["period"]:
        return
    if spec.world_size % options["local_ranks"]:
        raise SpecError(f'local_sgd="{spec.local_sgd}": local_ranks={options["local_ranks"]} does not divide the {spec.world_size} ranks')
    when, _ = parse_evaluate(spec.evaluate)
    apart = "between two averages each rank has parameters of its own, and this needs those of all"
    for knob, clashes, why in (
        ("parallel", spec.parallel != "ddp", 'the ranks share the optimizer or the model there; try parallel="ddp"'),
        ("tensor_parallel", spec.tensor_parallel > 1, "ranks that split layers have no parameters to average; leave one of them out"),
        ("pipeline_parallel", spec.pipeline_parallel > 1, "it has not been tried on stages; leave one of them out"),
        ("expert_parallel", spec.expert_parallel > 1, "parameters are averaged over all ranks, and each has other experts"),
        ("offload", spec.offload == "optimizer", "it steps on copies in host memory, which would not be averaged; leave one of them out"),
        ("precision", spec.precision == "amp_fp16", 'a rank whose gradients overflow would leave out a step alone; try "amp_bf16"'),
        ("gradient_compression", spec.gradient_compression != "none", "DDP has one hook for both; leave one of them out"),
        ("evaluate", when not in ("", "end"), f'{apart}; try evaluate="end", before which they are averaged'),
        ("ema", spec.ema is not None, f"{apart}; leave one of them out"),
        ("noise_scale", spec.noise_scale, "the gradients of all ranks are not reduced; leave one of them out"),
        ("micro_batch", spec.micro_batch == "auto", "a micro-batch that is split would be reduced twice; give a number"),
    ):
        if clashes:
            raise SpecError(f'{given(spec, knob)} with local_sgd="{spec.local_sgd}": {why}')


def _check_static_graph(spec: Any) -> None:
    if not spec.static_graph:
        return
    one = "DDP looks at one whole backward, that of the first step"
    for knob, clashes, why in (
        ("parallel", spec.parallel in SHARDED, 'it is a knob of DDP, which "ddp" and "zero1" use; leave it out, or try parallel="ddp"'),
        (
            "find_unused_parameters",
            spec.find_unused_parameters,
            "one says that all steps use the same parameters, and the other that they "
            "may not; static_graph alone finds those that are never used",
        ),
        ("accumulation", spec.accumulation > 1, f"{one}, and fails where its micro-batches are not reduced; leave one of them out"),
        ("pipeline_parallel", spec.pipeline_parallel > 1, f"{one}, and a stage has several in each; leave one of them out"),
        ("micro_batch", spec.micro_batch == "auto", f"{one}, and a micro-batch that is split has several; give a number"),
    ):
        if clashes:
            raise SpecError(f"{given(spec, knob)} with static_graph=True: {why}")


def _check_parallel(spec: Any) -> None:
    if spec.parallel in SHARDED:
        for name in ("find_unused_parameters", "gradient_as_bucket_view", "bucket_cap_mb"):
            if getattr(spec, name):
                raise SpecError(
                    f'{name}={getattr(spec, name)} with parallel="{spec.parallel}": it is a knob of DDP, which "ddp" and "zero1" use; '
                    f'leave {name} out, or try parallel="ddp"'
                )
    if spec.shard_ranks is not None and spec.parallel != "hsdp":
        raise SpecError(
            f'shard_ranks={spec.shard_ranks} with parallel="{spec.parallel}": only "hsdp" has groups that shard; try parallel="hsdp"'
        )
    for name in WAYS:
        if spec.world_size % (ways := getattr(spec, name)):
            of = "nproc_per_node" if spec.nnodes == 1 else "nnodes × nproc_per_node"
            raise SpecError(
                f"{name}={ways} does not divide the {spec.world_size} ranks ({of}): try {name}={nearest_divisor(spec.world_size, ways)}"
            )
    if spec.parallel == "hsdp":
        ranks_per_shard(spec, spec.data_ranks)
    if spec.tensor_parallel > 1 and spec.precision == "amp_fp16" and spec.parallel not in SHARDED:
        raise SpecError(
            f'precision="amp_fp16" with tensor_parallel={spec.tensor_parallel} and parallel="{spec.parallel}": each rank would '
            'scale its part of a layer by itself; try precision="amp_bf16", or parallel="fsdp"'
        )


def _check_stop(spec: Any) -> None:
    if spec.stop_when is None:
        return
    parse_stop(spec.stop_when)
    if parse_evaluate(spec.evaluate)[0] in ("", "end"):
        raise SpecError(
            f'stop_when="{spec.stop_when}" with evaluate={spec.evaluate!r}: it looks at evaluations while the training lasts; try '
            f'evaluate="epoch" or "every(steps={some_steps(spec, 500)})"'
        )


def _check_best(spec: Any) -> None:
    if spec.best is None:
        return
    parse_best(spec.best)
    if parse_evaluate(spec.evaluate)[0] in ("", "end") or not spec.checkpoint_every:
        raise SpecError(
            f'best="{spec.best}" with evaluate={spec.evaluate!r} and checkpoint_every={spec.checkpoint_every}: an evaluation before a '
            f'checkpoint says how good it is; try evaluate="checkpoint" and checkpoint_every={some_steps(spec)}'
        )


def _check_noise(spec: Any) -> None:
    """Check `RunSpec.noise_scale`, where it is given.

    Raises:
        SpecError: a value that is not allowed, or a step in which there is nothing to measure.
    """
    if not isinstance(spec.noise_scale, int) or spec.noise_scale < 0:
        raise SpecError(
            f"noise_scale={spec.noise_scale!r}: allowed are True (each fourth step, or fewer), n (each n-th; 1 = each), and False"
        )
    if spec.tensor_parallel > 1:
        raise SpecError(
            f"noise_scale={spec.noise_scale} with tensor_parallel={spec.tensor_parallel}: a sample's gradient is spread over ranks there, "
            "and its norm is not measured; the noise scale does not depend on it, so measure it with tensor_parallel=1 and a smaller "
            "micro_batch"
        )
    if spec.accumulation * spec.data_ranks < 2:
        half = "" if spec.micro_batch == "auto" or spec.micro_batch < 2 else f" with micro_batch={spec.micro_batch // 2}"
        raise SpecError(
            f"noise_scale={spec.noise_scale} with one rank and accumulation=1: noise shows in the difference between groups of samples, "
            f"so a step needs two; try accumulation=2{half}, or wb.noise_scale(spec), which does so by itself"
        )


def ranks_per_shard(spec: Any, data_ranks: int) -> int:
    """Ranks that share one copy of the model under "hsdp"; `data_ranks` work on different samples.

    Raises:
        SpecError: it does not divide them.
    """
    wanted = spec.shard_ranks or min(SHARD_RANKS, data_ranks)
    if data_ranks % wanted:
        default = "" if spec.shard_ranks else " (its default)"
        raise SpecError(
            f"shard_ranks={wanted}{default} does not divide the {data_ranks} ranks that work on different samples: "
            f"try shard_ranks={nearest_divisor(data_ranks, wanted)}"
        )
    return wanted


def nearest_divisor(whole: int, wanted: int) -> int:
    """The largest divisor of `whole` that is not above `wanted`."""
    return next(n for n in range(min(whole, wanted), 0, -1) if whole % n == 0)


def given(spec: Any, knob: str) -> str:
    """A knob and its value, as it is written in Python."""
    value = getattr(spec, knob)
    return f'{knob}="{value}"' if isinstance(value, str) else f"{knob}={value}"
