"""Lets public functions take their arguments by other usual names, and says of calls that do not fit what is missing or was meant."""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from workbench.core import late
from workbench.core.checks import did_you_mean, is_module, nearest, shown, unknown_names

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "budget_s": ("budget", "seconds", "timeout"),
    "world_size": ("ranks",),
    "nproc_per_node": ("ranks", "gpus"),
    "repeat": ("repeats",),
    "runs_dir": ("into",),
}
"""Name of an argument → its other names, where a function has no other argument of that name. Documentation uses the first alone."""
EXAMPLES: Mapping[str, str] = {
    "device": '"H100"',
    "cluster": '"DGX-H100"',
    "network": '"DGX-H100"',
    "world_size": "8",
    "changes": '[{"micro_batch": 64}]',
    "budgets": '{"step": "120 ms"}',
    "to": '"tensorboard"',
    "good": '"v1.2"',
    "image": '"registry/image:tag"',
    "lr": "1e-3",
    "batch": "256",
    "to_batch": "1024",
    "samples": "(10_000, 40_000, 160_000)",
    "length": "2048",
    "batch_size": "32",
    "classes": "10",
    "seed": "0",
    "count": "1_000_000",
    "payload": "100e9",
    "run": '"runs/NAME"',
    "run_a": '"runs/NAME"',
    "run_b": '"runs/OTHER"',
    "folder": '"exported"',
    "path": '"FOLDER"',
    "out": '"FOLDER"',
    "name": '"H100"',
    "value": "result.to_json()",
    "micro_batch": "32",
}
"""Argument without a default → what an example call gives it; those that are not here are variables of the user, such as spec or loader."""
MAKERS: Mapping[str, str] = {
    'Cluster.named("DGX-H100")': "Cluster Cluster.named",
    'Device.named("H100")': "Device",
    'Run.load("runs/NAME")': "Run Run.load Failure",
    "ScalingCurve([(1, 100.0), (2, 190.0)])": "ScalingCurve",
    'Trace.load("trace.json")': "Trace Trace.load",
    'TraceSet.load("FOLDER")': "TraceSet TraceSet.load",
    'check_run("runs/NAME", {"step": "120 ms"})': "RunCheck",
    "compare(run_a, run_b)": "Comparison",
    "data.audit(dataset)": "DataAudit",
    "data.compare_formats(dataset)": "FormatComparison",
    "data.compare_packing(lengths, 2048)": "Packing PackingPolicies",
    'data.convert("FOLDER", "OTHER")': "Conversion",
    'data.describe("FOLDER")': "DataCard Manifest",
    "data.doctor(loader)": "LoaderReport",
    "data.plan_shards(count=1_000_000, payload=100e9)": "ShardPlan",
    "data.prove_resumable(sampler)": "ResumeHistories",
    'data.verify("FOLDER")': "Verification",
    "diagnose(step, loader)": "Diagnosis Evidence Proof",
    'estimate_memory(spec, device="H100")': "MemoryBreakdown",
    "prove_resume(spec)": "ResumeProof LayoutResumeProof ScriptResumeProof",
    'recompute("runs/NAME")': "Recomputation",
    "same_twice(spec)": "RepeatProof",
    "scaling_law(spec)": "ScalingLaw",
    "why_not_linear(spec)": "WhyNotLinear",
}
"""A call in `wb` → the classes of its results, which nobody makes by hand, and the class methods that it is an example of."""
TASK = "write def build(): return wb.Task(model=lambda: …, dataset=…, loss=lambda model, batch: …) into my_task.py"
SPEC = 'wb.RunSpec(task="my_task.py:build")'
"""How a model with its loss and data is given to a function that takes a RunSpec."""
OTHER_VERBS: Mapping[str, tuple[str, str]] = {
    "batch_plan": (
        "wb.max_micro_batch(model, batch, device=…) says which batch fits",
        "wb.noise_scale(step, loader) and wb.find_lr(step, loader) measure a loop of your own",
    ),
    "climb": ("", "wb.diagnose(step, loader) takes a loop of your own"),
    "launch": ("", "wb.watch(loader) and wb.diagnose(step, loader) take a loop of your own"),
}
"""Function that takes a RunSpec → what there is for a model without its data, and for a step function; "" = nothing."""
MOST = 5
"""Missing arguments that a message names."""


def accept_synonyms(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function take SYNONYMS of its arguments, and say of a call that does not fit what is missing, or which name is near.

    Functions and methods have it where they are defined: put on later, it would make another object, which cannot be pickled.

    >>> @accept_synonyms
    ... def wait(run: str, *, budget_s: float = 60.0) -> float:
    ...     return budget_s
    >>> wait("a", timeout=5.0)
    5.0
    >>> wait("a", budgets=5.0)
    Traceback (most recent call last):
    ...
    TypeError: wait(budgets=…): did you mean 'budget_s'? It takes run, budget_s
    >>> wait(budget_s=5.0)
    Traceback (most recent call last):
    ...
    TypeError: wait(budget_s=…): missing: run. For example: wb.wait("runs/NAME")
    """
    takes = _Parameters(function.__name__, inspect.signature(function), inspect.getdoc(function), _public_name(function))

    @functools.wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> R:
        for word in [word for word in given if word in takes.meant]:
            name = takes.meant[word]
            if name in given:
                raise TypeError(f"{function.__name__}({name}=…, {word}=…): both names are of one argument; give {name} alone")
            given[name] = given.pop(word)
        if by_name := getattr(function, "by_name", None):
            args, given = by_name(*args, **given)
        if complaint := takes.complaint(args, given):
            raise TypeError(complaint)
        return function(*args, **given)

    return call


def explain_calls(cls: Any, space: str = "wb") -> None:
    """Let a class say of calls of its constructor and class methods that do not fit what is missing or meant, as public functions do.

    Args:
        cls: the class, which is changed.
        space: name of the package under which users find it.
    """

    def explained(function: Callable[..., R], name: str) -> Callable[..., R]:
        @functools.wraps(function)
        def call(this: Any, /, *args: Any, **given: Any) -> R:
            try:
                return function(this, *args, **given)
            except TypeError:
                signature = inspect.signature(function)
                rest = signature.replace(parameters=list(signature.parameters.values())[1:])
                makers = [maker for maker, made in MAKERS.items() if name in made.split() and space != "wb.widgets"]
                example = f"wb.{makers[0]}" if makers else f"{space}.{name}"
                if complaint := _Parameters(name, rest, inspect.getdoc(function), example).complaint(args, given):
                    raise TypeError(complaint) from None
                raise

        return call

    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if name == "__init__" and inspect.isfunction(function) and not hasattr(function, "__wrapped__"):
            cls.__init__ = explained(function, cls.__name__)
        elif isinstance(function, classmethod) and not name.startswith("_") and function.__func__.__module__.startswith("workbench."):
            setattr(cls, name, classmethod(explained(function.__func__, f"{cls.__name__}.{name}")))


def _knobs() -> list[str]:
    """Names of knobs of RunSpec, here and elsewhere."""
    return [name for knob, about in late.load("KNOBS").items() for name in (knob, *about.elsewhere)]


def needs_task(name: str, given: object) -> str:
    """What to write where a function that takes a RunSpec was given a model or a step function; "" = it is neither."""
    if not callable(given) or dataclasses.is_dataclass(given):
        return ""
    other = OTHER_VERBS.get(name, ("", ""))[not is_module(given)]
    what = "a model needs its loss and its data" if is_module(given) else "a function is not launched by itself"
    return f"{what}: {TASK}, then {name}({SPEC}, …)" + (f"; {other}" if other else "")


class _Parameters:
    """What a function takes; says of a call that does not fit what is missing, or which name is near."""

    def __init__(self, name: str, signature: inspect.Signature, doc: str | None, example: str) -> None:
        self._name, self._doc, self._example, self._all = name, doc or "", example, signature.parameters
        many = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        self._others = next((name for name, each in self._all.items() if each.kind is many[0]), "")
        self._names = [name for name, each in self._all.items() if each.kind not in many]
        self._places = [name for name in self._names if self._all[name].kind is not inspect.Parameter.KEYWORD_ONLY]
        self._needed = [name for name in self._names if self._all[name].default is inspect.Parameter.empty]
        self._most = math.inf if any(each.kind is many[1] for each in self._all.values()) else len(self._places)
        self.meant = {word: name for name in self._names for word in SYNONYMS.get(name, ()) if word not in self._names}

    def complaint(self, args: Sequence[Any], given: Mapping[str, Any]) -> str:
        """The message about a call that does not fit; "" = it fits."""
        said = f"{self._name}({', '.join([*map(shown, args), *(f'{name}=…' for name in given)])})"
        for word in [word for word in given if word not in self._names]:
            if not self._others:
                takes = ", ".join(name for name in self._names if name != "self") or "no argument by name"
                if word in ("nproc_per_node", "gpus") and "world_size" in self._names:
                    meant = "did you mean 'world_size', the ranks to come? Those of now belong in the spec"
                    return f"{self._name}({word}=…): {meant}. It takes {takes}"
                if self._names[:1] == ["spec"] and word in ("model", "loss", "batch", "dataset"):
                    return f"{self._name}({word}=…): {word} belongs in a task: {TASK}, then {self._name}({SPEC}, …). It takes {takes}"
                if self._names[:1] == ["spec"] and word in late.load("KNOBS"):
                    return f"{self._name}({word}=…): {word} belongs in the spec: {self._name}(spec.replace({word}=…), …). It takes {takes}"
                return f"{self._name}({word}=…): {did_you_mean(word, self._names, cutoff=0.5)}It takes {takes}"
            if (near := nearest(word, [*self._names, *_knobs()], cutoff=0.75)) in self._names:
                more = "the knobs of RunSpec" if self._others == "knobs" else f"other options: help({self._example})"
                return f"{self._name}({word}=…): did you mean {near!r}? It also takes {more}"
        if len(args) > self._most:
            takes_spec = self._places in (["spec"], ["target"]) and re.search(r"\bspec\b|RunSpec", self._described(self._places))
            if takes_spec and (why := needs_task(self._name, args[0])):
                return f"{said}: {why}"
            rest = ", ".join(f"{name}=…" for name in self._names if name not in self._places)
            return (
                f"{said}: only {self._described(self._places) or 'nothing'} {'is' if len(self._places) < 2 else 'are'} given by place"
                f"{f'; all else by name: {rest}' * bool(rest)}"
            )
        if twice := [name for name in self._places[: len(args)] if name in given]:
            return f"{said}: {twice[0]} is given by place and by name; give it once"
        if missing := [name for name in self._needed if name not in given and name not in self._places[: len(args)]]:
            more = f" and {len(missing) - MOST} more" * (len(missing) > MOST)
            return f"{said}: missing: {self._described(missing[:MOST])}{more}. For example: {self._call()}"
        return ""

    def _described(self, names: list[str]) -> str:
        """The arguments, each with what its docstring begins with."""
        texts = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", self._doc, re.MULTILINE))
        said = {name: re.split(r"[.;]\s|\.$", " ".join(texts[name].split()))[0] for name in names if name in texts}
        return ", ".join(f"{name} ({re.sub(r' [(][^)]*$', '', said[name])})" if name in said else name for name in names)

    def _call(self) -> str:
        """An example: a call with the arguments that it needs."""
        if self._example.endswith(")"):
            return self._example
        given = [
            f"{name}=" * (self._all[name].kind is inspect.Parameter.KEYWORD_ONLY) + EXAMPLES.get(name, name)
            for name in self._needed
            if name != "self"
        ]
        return f"{self._example if 'self' not in self._needed else self._name}({', '.join(given)})"


def _public_name(function: Callable[..., Any]) -> str:
    """What a user calls a public function."""
    return f"{'wb.data' if function.__module__.startswith('workbench.data.') else 'wb'}.{function.__name__}"


def check_fields(
    error: type[ValueError], check_names: Callable[[type, Mapping[str, Any]], None] | None = None
) -> Callable[[type[T]], type[T]]:
    """Let a dataclass refuse arguments that are misspelt, missing or without a name, with messages that say what is allowed.

    Args:
        error: to raise.
        check_names: raises for names that the class does not have; None = the fields are all that there is to know.
    """

    def checked_class(cls: type[T]) -> type[T]:
        initialise, fields = cls.__init__, dataclasses.fields(cls)  # type: ignore[arg-type]
        names = [field.name for field in fields]
        needed = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]

        @functools.wraps(initialise)
        def checked(self: T, /, *args: Any, **given: Any) -> None:
            if args:
                raise error(f"{cls.__name__}({args[0]!r:.80}): its arguments are given by name, {cls.__name__}({needed[0]}=…)")
            if check_names:
                check_names(cls, given)
            elif told := unknown_names(f"{cls.__name__} has no argument", given, names):
                raise error(told)
            if missing := [f"{name}=…" for name in needed if name not in given]:
                raise error(f"{cls.__name__}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
            initialise(self, **given)

        cls.__init__ = checked  # type: ignore[method-assign,assignment]
        return cls

    return checked_class
