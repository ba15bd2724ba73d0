"""What a knob of a run is: its values, the forms in which they are written, and learning-rate schedules in closed form. Needs no torch."""

import ast
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeVar

from workbench.core.checks import choice, did_you_mean, is_number, real_number, whole_number
from workbench.core.optimizer_table import OPTIMIZERS

T = TypeVar("T")
PRECISIONS = ("fp32", "amp_bf16", "amp_fp16")
MEANT = {
    "gpu": "cuda",
    "bf16": "amp_bf16",
    "bfloat16": "amp_bf16",
    "fp16": "amp_fp16",
    "float16": "amp_fp16",
    "float32": "fp32",
    "zero3": "fsdp",
    "fsdp2": "fsdp",
}
"""What is often typed → what it is called here."""
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
IMPLEMENTATIONS = ("foreach", "fused")
"""Ways in which torch runs an optimizer; the update is the same."""
CHECKPOINTINGS = ("none", "full", "selective")
PARALLELS = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
OFFLOADS = ("none", "activations", "optimizer")
SHARDED = ("zero2", "fsdp", "hsdp")
"""Those of PARALLELS in which no rank holds all of the parameters, gradients and optimizer states (torch's FSDP2)."""
AUTO = "auto"
"""The micro_batch of a run that is to choose it when it starts."""
SHARD_RANKS = 8
"""Ranks that share one copy of the model under "hsdp", where the spec does not say: the GPUs of a common node."""


class SpecError(ValueError):
    """A knob that does not exist or a value that it does not take; the message says what is allowed and what to try."""


class AutoBatch(str):
    """The value of micro_batch="auto": comparing it or computing with it raises an error that says to give a number."""

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise SpecError(
            'micro_batch="auto" is chosen when a run starts (wb.launch, wb.sweep), and here a number is needed: '
            "give one, such as wb.max_micro_batch(spec, device).micro_batch"
        )

    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __mul__ = __rmul__ = __mod__ = __index__ = _refuse
    __radd__ = __sub__ = __rsub__ = __rmod__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __int__ = __float__ = _refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Metadata of a field of RunSpec, for panels, plans and the command line."""

    default: Any = None
    """Its default."""
    choices: tuple[str, ...] = ()
    """All of its values, where they are names."""
    turned_in: Literal["", "loader", "step"] = ""
    """Where an experiment can turn it without a RunSpec: in a user's own loader or step; empty = in neither."""
    predicted: bool = False
    """Does `diagnosis.model.StepModel` predict a step with another value of it?"""
    elsewhere: tuple[str, ...] = ()
    """Its names in torchrun, Hugging Face's Trainer, Accelerate, Lightning, DeepSpeed and nanoGPT, and in everyday speech."""
    panels: tuple[str, ...] = ()
    """Panels that let it be turned: "doctor" (what-if of a step's time), "memory" (the memory explorer)."""

    def also(self, value: Any) -> str:
        """What may be meant by a value that is no choice, and is had in another way."""
        if self.choices == PRECISIONS and value in ("bf16", "bfloat16"):
            return " (weights stay in fp32; to keep them in bf16, build the model that way: lambda: build().to(torch.bfloat16))"
        return ""


def knob(default: T, **about: Any) -> T:
    """A field of RunSpec, with what a Knob says of it."""
    field: T = dataclasses.field(default=default, metadata={"knob": Knob(default=default, **about)})
    return field


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
ONE_BUCKET = 2.0**20
"""MiB of a bucket that takes all gradients, for PowerSGD over gloo: it waits for a reduction in gloo's threads, of which there are two."""


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


def parse_optimizer(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of an optimizer; options are Python literals, which are never executed.

    >>> parse_optimizer("sgd(lr=0.1, momentum=0.9)")
    ('sgd', {'lr': 0.1, 'momentum': 0.9})
    >>> parse_optimizer("adamw")
    ('adamw', {})

    Raises:
        SpecError: not of this form, an unknown name or an unknown option.
    """
    form = 'expected a name, with options if you like: "sgd(lr=0.1, momentum=0.9)"'
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
        if not isinstance(call.func, ast.Name):
            raise ValueError
        name = call.func.id.lower()
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise SpecError(f"optimizer={text!r}: {form}") from None
    if name not in OPTIMIZERS:
        hint = did_you_mean(name, OPTIMIZERS)
        raise SpecError(f"optimizer={text!r}: no optimizer {name!r}; {hint}Allowed are {', '.join(OPTIMIZERS)}; a Task may give a function")
    allowed = OPTIMIZERS[name].options
    options = {}
    for keyword in call.keywords:
        if keyword.arg not in allowed:
            raise SpecError(f"optimizer={text!r}: {name} has no option {keyword.arg!r}; it has {', '.join(allowed)}")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise SpecError(f"optimizer={text!r}: {keyword.arg}={ast.unparse(keyword.value)} is not a plain value; {form}") from None
    if call.args:
        raise SpecError(f"optimizer={text!r}: give each option its name; {form}")
    return name, options


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
        steps: number of steps of the whole run.
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


def parse_stop(text: Any) -> tuple[str, Mapping[str, Any]]:
    """The figure that ends a training, and its options: patience, best and by.

    >>> parse_stop("validation_loss(patience=3)")
    ('validation_loss', mappingproxy({'patience': 3, 'best': 'min', 'by': 0.0}))

    Raises:
        SpecError: not of this form.
    """
    figure = text.partition("(")[0].strip() if isinstance(text, str) else ""
    known = {figure: {"patience": 5, "best": BETTER.get(figure, "min"), "by": 0.0}} if figure.isidentifier() else {}
    if not known:
        raise SpecError(f'stop_when={text!r:.80}: a figure of the evaluation is allowed, such as "validation_loss(patience=3)", or None')
    figure, options = parse_call("stop_when", text, known, "accuracy(patience=3, best=max)")
    whole_number("stop_when: patience", options["patience"], least=1, error=SpecError)
    choice("stop_when: best", options["best"], ("min", "max"), error=SpecError)
    real_number("stop_when: by", options["by"], least=0, error=SpecError)
    return figure, options


BETTER = {"validation_loss": "min", "loss": "min", "perplexity": "min", "bits_per_byte": "min", "accuracy": "max", "ece": "min"}
"""Figure of an evaluation → which of its values is the best. Where a spec names none, the first that there is decides."""


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
        raise SpecError(
            f"best={text!r:.80}: {did_you_mean(figure, BETTER)}evaluations of the workbench have {', '.join(BETTER)}. If it is a figure of "
            f'the task\'s evaluate(), say which of its values is the best: "{figure}(max)" or "{figure}(min)"'
        )
    return figure, direction
