"""Knobs of the recipe of a training: learning-rate schedules in closed form, and which knobs do not go together. Needs no torch."""

import ast
import functools
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from workbench.core.checks import choice, is_number, real_number, whole_number
from workbench.runs.knobs import SHARDED, SpecError

SCHEDULES: Mapping[str, Mapping[str, float]] = {
    "constant": {},
    "cosine": {"end": 0.0},
    "polynomial": {"power": 1.0, "end": 0.0},
    "step": {"every": 1 / 3, "factor": 0.1},
    "inverse_sqrt": {},
    "warmup_stable_decay": {"decay": 0.2, "end": 0.0},
}
"""Name of a schedule → its options with their defaults."""
_ENDLESS = ("constant", "inverse_sqrt")
DECAYED = ("all", "matrices")
"""Parameters that weight decay shrinks."""

COMPRESSIONS: Mapping[str, Mapping[str, Any]] = {"none": {}, "fp16": {}, "bf16": {}, "powersgd": {"rank": 1, "start": 10}}
"""What DDP may reduce in place of gradients → its options with their defaults."""
EARLIEST_POWERSGD = 2
"""Steps that torch reduces without PowerSGD at least, until DDP has its final buckets."""


PIPELINES: Mapping[str, Mapping[str, Any]] = {"gpipe": {}, "1f1b": {}, "interleaved": {"chunks": 2}, "zero_bubble": {}}
"""Order in which the ranks of a pipeline compute → its options with their defaults."""

LOCAL_SGD: Mapping[str, Mapping[str, Any]] = {"none": {}, "periodic": {"period": 4, "start": 100, "local_ranks": 1}}
"""When ranks average their parameters in place of gradients → its options with their defaults."""

COMPILES: Mapping[str, Mapping[str, Any]] = {"none": {}, "model": {"backend": "inductor"}, "blocks": {"backend": "inductor"}}
"""What torch.compile compiles → its options with their defaults."""

_RANGES = {"end": (0, 1), "every": (1e-6, 1), "decay": (1e-6, 1), "power": (1e-3, 1000), "factor": (1e-3, 10)}
"""Smallest and largest value of each option of a schedule: all give a finite learning rate at each step."""


def is_own_schedule(text: Any) -> bool:
    """Does a schedule name a function of the user's own, as a task does: "path/file.py:function" or "package.module:function"?"""
    return isinstance(text, str) and ":" in text


@functools.lru_cache(maxsize=64)
def parse_schedule(text: str) -> tuple[str, Mapping[str, float]]:
    """Name of a schedule, and all of its options; of the user's own it has none. Nothing is imported.

    >>> parse_schedule("polynomial(power=2)")
    ('polynomial', mappingproxy({'power': 2, 'end': 0.0}))

    Raises:
        SpecError: not of this form, an unknown name or option, or a value that is not allowed.
    """
    if is_own_schedule(text):
        where, _, function = text.rpartition(":")
        if not function.isidentifier() or not (where.endswith(".py") or all(part.isidentifier() for part in where.split("."))):
            raise SpecError(
                f'schedule={text!r:.80}: a function of your own is named "path/file.py:function" or "package.module:function", and is '
                f"called with the step; or take one of {', '.join(map(repr, SCHEDULES))}"
            )
        return text, MappingProxyType({})
    name, options = parse_call("schedule", text, SCHEDULES, "polynomial(power=2.0, end=0.1)")
    for option, value in options.items():
        least, most = _RANGES[option]
        if not is_number(value, least=least, most=most):
            raise SpecError(f"schedule={text!r:.80}: {option}={value!r:.80}: a number from {least:g} to {most:g} is allowed")
    return name, options


def parse_call(knob: str, text: Any, known: Mapping[str, Mapping[str, Any]], example: str) -> tuple[str, Mapping[str, Any]]:
    """Name and all options of a knob whose value is written like a call; options are plain values, or a word.

    >>> parse_call("compile", "blocks(backend=eager)", COMPILES, "blocks")
    ('blocks', mappingproxy({'backend': 'eager'}))

    Raises:
        SpecError: not of this form, or an unknown name or option.
    """
    form = f'{knob}={text!r:.80}: expected a name, with options if you like: "{example}"'
    if not isinstance(text, str):
        raise SpecError(f"{knob}={text!r:.80}: a name is allowed: {', '.join(map(repr, known))}")
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise SpecError(form) from None
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name) or call.args:
        raise SpecError(form)
    name = call.func.id
    choice(knob, name, known, error=SpecError)
    options = dict(known[name])
    given = [keyword.arg for keyword in call.keywords]
    if twice := next((option for option in given if given.count(option) > 1), None):
        raise SpecError(f"{knob}={text!r:.80}: {twice!r:.80} is given twice")
    for keyword in call.keywords:
        if keyword.arg not in options:
            raise SpecError(f"{knob}={text!r:.80}: {name} has no option {keyword.arg!r:.80}; it has {', '.join(options) or 'none'}")
        try:
            options[keyword.arg] = keyword.value.id if isinstance(keyword.value, ast.Name) else ast.literal_eval(keyword.value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise SpecError(f"{knob}={text!r:.80}: {keyword.arg} is not a number or a word") from None
    return name, MappingProxyType(options)


@functools.lru_cache(maxsize=64)
def parse_pipeline(text: Any) -> tuple[str, int]:
    """Name of a pipeline's schedule, and the stages of each rank.

    >>> parse_pipeline("1f1b"), parse_pipeline("interleaved(chunks=4)"), parse_pipeline("zero_bubble")
    (('1f1b', 1), ('interleaved', 4), ('zero_bubble', 2))

    Raises:
        SpecError: not of this form, or an unknown name or option.
    """
    if isinstance(text, str) and text.strip() == "1f1b":  # which is no name in Python
        return "1f1b", 1
    name, options = parse_call("pipeline_schedule", text, PIPELINES, "interleaved(chunks=2)")
    if name == "interleaved":
        whole_number(f'pipeline_schedule="{text}": chunks', options["chunks"], least=2, error=SpecError)
        return name, int(options["chunks"])
    return name, 2 if name == "zero_bubble" else 1


@functools.lru_cache(maxsize=64)
def parse_local_sgd(text: Any) -> Mapping[str, int]:
    """The options of `RunSpec.local_sgd`; with a period of 0 where it is "none".

    >>> dict(parse_local_sgd("periodic(period=8)"))
    {'period': 8, 'start': 100, 'local_ranks': 1}

    Raises:
        SpecError: not of this form, an unknown name or option, or a value that is not allowed.
    """
    kind, options = parse_call("local_sgd", text, LOCAL_SGD, "periodic(period=4, start=100)")
    for option, value in options.items():
        whole_number(f'local_sgd="{text}": {option}', value, least=int(option != "start"), error=SpecError)
    return MappingProxyType({"period": 0, "start": 0, "local_ranks": 1} if kind == "none" else dict(options))


def averaging_at_once(spec: Any) -> str:
    """`spec.local_sgd` with an average after each step, for dry runs of few steps."""
    options = parse_local_sgd(spec.local_sgd)
    return f"periodic(period=1, start=0, local_ranks={options['local_ranks']})" if options["period"] else "none"


def compressing_at_once(spec: Any) -> str:
    """`spec.gradient_compression` with the earliest start of PowerSGD, for measurements of few steps.

    >>> from types import SimpleNamespace
    >>> compressing_at_once(SimpleNamespace(gradient_compression="powersgd(rank=4, start=1000)"))
    'powersgd(rank=4, start=2)'
    """
    kind, options = parse_call("gradient_compression", spec.gradient_compression, COMPRESSIONS, "powersgd(rank=2)")
    return f"powersgd(rank={options['rank']}, start={EARLIEST_POWERSGD})" if kind == "powersgd" else str(spec.gradient_compression)


def parse_evaluate(value: bool | str) -> tuple[str, int]:
    """When an evaluation runs: "" (never), "end", "epoch", "checkpoint" or "every", and the steps between two of the last.

    >>> parse_evaluate(True), parse_evaluate("every(steps=500)")
    (('end', 0), ('every', 500))

    Raises:
        SpecError: a value that is not allowed.
    """
    if isinstance(value, bool):
        return "end" if value else "", 0
    if isinstance(value, str) and value in ("end", "epoch", "checkpoint"):
        return value, 0
    if isinstance(value, str) and (match := re.fullmatch(r"every\((?:steps *= *)?([1-9]\d{0,15})\)", value.strip())):
        return "every", int(match[1])
    raise SpecError(f'evaluate={value!r:.80}: True, False, "end", "epoch", "checkpoint" or "every(steps=500)" is allowed')


UNEVALUATED: Mapping[str, Any] = MappingProxyType({"evaluate": False, "evaluate_batches": None, "stop_when": None, "best": None})
"""Knobs of a run without evaluations: all that says when, of what and what for."""


def depends_on_steps(schedule: str) -> bool:
    """Does the learning rate of a step depend on how many steps there will be? One of the user's own is given the step alone."""
    return parse_schedule(schedule)[0] not in _ENDLESS and not is_own_schedule(schedule)


def lr_factor(step: int, *, steps: int, warmup_steps: int, schedule: str, own: Callable[[int], float] | None = None) -> float:
    """Learning rate of a step as a fraction of its peak: a linear warm-up, then the schedule.

    The warm-up gives (step + 1) / warmup_steps, so that the first step moves. Below, t goes from 0 at the first step after the warm-up to
    1 at `steps`, one past the last step, so that the last step still moves, and e is the option `end`:

    * cosine: e + (1 - e) (1 + cos(pi t)) / 2
    * polynomial: e + (1 - e) (1 - t) ** power
    * step: factor ** floor(t / every)
    * inverse_sqrt: sqrt(w / (step + 1)), where w is warmup_steps, or 1. Source: Vaswani et al. 2017, arXiv:1706.03762, 5.3
    * warmup_stable_decay: 1; in the last `decay` of all steps linearly to e. Source: Hägele et al. 2024, arXiv:2405.18392

    Args:
        step: from 0.
        steps: of the whole run.
        warmup_steps: steps until the peak is reached.
        schedule: after the warm-up, as in a RunSpec.
        own: the user's function that `schedule` names, of `runs.task.resolve_schedule`; it is not asked beyond the last step.

    Raises:
        SpecError: `schedule` names a function of the user's own, and `own` was not given.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if own is not None:
        return own(min(step, steps - 1))
    if is_own_schedule(schedule):
        raise SpecError(f"schedule={schedule!r:.80}: it is a function of your own, which only a run imports")
    name, options = parse_schedule(schedule)
    t = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    end = options.get("end", 0.0)
    match name:
        case "cosine":
            return float(end + (1 - end) * (1 + math.cos(math.pi * t)) / 2)
        case "polynomial":
            return float(end + (1 - end) * (1 - t) ** options["power"])
        case "step":
            return float(options["factor"] ** math.floor(t / options["every"] + 1e-9))
        case "inverse_sqrt":
            return math.sqrt(max(1, warmup_steps) / max(step + 1, warmup_steps))
        case "warmup_stable_decay":
            left = max(0.0, min(1.0, (steps - step) / (options["decay"] * steps)))
            return float(end + (1 - end) * left)
    return 1.0


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
        raise SpecError('evaluate="checkpoint" with checkpoint_every=None: say after how many steps, as in checkpoint_every=500')
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
        given = f"tensor_parallel={spec.tensor_parallel}" if spec.tensor_parallel > 1 else f'parallel="{spec.parallel}"'
        raise SpecError(
            f'gradient_compression="{spec.gradient_compression}" with {given}: it is a hook of DDP, which "ddp" and "zero1" use; leave it '
            'out, or try parallel="ddp" with tensor_parallel=1'
        )
    if spec.ema is not None:
        real_number("ema", spec.ema, above=0, below=1, what="a decay per step", also=", such as 0.999, or None", error=SpecError)


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


def parse_stop(text: Any) -> tuple[str, Mapping[str, Any]]:
    """The figure that ends a training, and its options: patience, best and by.

    >>> parse_stop("validation_loss(patience=3)")
    ('validation_loss', mappingproxy({'patience': 3, 'best': 'min', 'by': 0.0}))

    Raises:
        SpecError: not of this form.
    """
    figure = text.partition("(")[0].strip() if isinstance(text, str) else ""
    known = {figure: {"patience": 5, "best": "min", "by": 0.0}} if figure.isidentifier() else {}
    if not known:
        raise SpecError(f'stop_when={text!r:.80}: a figure of the evaluation is allowed, such as "validation_loss(patience=3)", or None')
    figure, options = parse_call("stop_when", text, known, "accuracy(patience=3, best=max)")
    whole_number("stop_when: patience", options["patience"], least=1, error=SpecError)
    choice("stop_when: best", options["best"], ("min", "max"), error=SpecError)
    real_number("stop_when: by", options["by"], least=0, error=SpecError)
    return figure, options


def _check_stop(spec: Any) -> None:
    if spec.stop_when is None:
        return
    parse_stop(spec.stop_when)
    if parse_evaluate(spec.evaluate)[0] in ("", "end"):
        raise SpecError(
            f'stop_when="{spec.stop_when}" with evaluate={spec.evaluate!r}: it looks at evaluations while the training lasts; try '
            'evaluate="epoch" or "every(steps=500)"'
        )


BETTER = {"validation_loss": "min", "loss": "min", "ece": "min", "accuracy": "max"}
"""Figure of the workbench's own evaluation → which of its values is the best."""


def parse_best(text: Any) -> tuple[str, str]:
    """The figure by which a checkpoint is the best, and which of its values is: "min" or "max".

    >>> parse_best(None), parse_best("accuracy"), parse_best("score(max)")
    (('validation_loss', 'min'), ('accuracy', 'max'), ('score', 'max'))

    Raises:
        SpecError: not of this form, or a figure whose direction is not known.
    """
    form = re.fullmatch(r"(\w+)(?:\((min|max)\))?", "validation_loss" if text is None else text.strip() if isinstance(text, str) else "")
    if not form or not form[1].isidentifier():
        raise SpecError(f'best={text!r:.80}: a figure of the evaluation is allowed, such as "accuracy" or "score(max)", or None')
    figure = form[1]
    if not (direction := form[2] or BETTER.get(figure)):
        raise SpecError(f'best={text!r:.80}: say which value is the best: "{figure}(max)" or "{figure}(min)"')
    return figure, direction


def _check_best(spec: Any) -> None:
    if spec.best is None:
        return
    parse_best(spec.best)
    if parse_evaluate(spec.evaluate)[0] in ("", "end") or not spec.checkpoint_every:
        raise SpecError(
            f'best="{spec.best}" with evaluate={spec.evaluate!r} and checkpoint_every={spec.checkpoint_every}: an evaluation before a '
            'checkpoint says how good it is; try evaluate="checkpoint" and checkpoint_every=100'
        )


def check_noise(spec: Any) -> None:
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


def given(spec: Any, knob: str) -> str:
    """A knob and its value, as it is written in Python."""
    value = getattr(spec, knob)
    return f'{knob}="{value}"' if isinstance(value, str) else f"{knob}={value}"
