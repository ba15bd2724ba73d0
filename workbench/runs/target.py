"""Checks what a public function is given as its target (step, spec, run, task or script), with the same messages everywhere.

A function that runs a training step takes a step function with its loader, a RunSpec, or a run that it has made (`Measured.read`).
One that works on a model without running it takes a RunSpec, a Task, or something that builds a model (`read_program`).
One that turns knobs takes a RunSpec alone (`read_spec`), and `launch` a RunSpec or a script (`check_launchable`).
In the place of a RunSpec all of them take the name of a task, such as "my_task.py:build" (`named_task`).
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

from workbench.core import late, run_directory
from workbench.core.checks import did_you_mean, is_module, is_number
from workbench.core.checks import shown as shown
from workbench.core.device import Device
from workbench.core.synonyms import needs_task
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec
from workbench.runs.task import SAMPLES, Task, seen_from_here

P = ParamSpec("P")
R = TypeVar("R")
AS_SPEC = 'wb.RunSpec(task="my_task.py:build")'
"""How a task is given where a RunSpec is."""
STEP = "optimizer.zero_grad(); loss = …; loss.backward(); optimizer.step(); return loss"
"""The body of a step function, in messages."""
ARGUMENTS = ("loss", "optimizer", "sequence", "image", "world_size", "rank", "batch")
"""Those of `estimate_memory` beside the knobs, which also functions take that pass on its options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step function and its loader, to be run in this process."""

    step: Callable[[Any], Any]
    """`step(batch)` does one whole optimizer step."""
    loader: Iterable[Any]
    """Gives its batches."""
    model: Any = None
    """The module, or several; None = found by looking at the step."""
    optimizer: Any = None
    """The optimizer, or several; None = found as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Reads the target of a function that takes a step with its loader, a RunSpec, or a run; has the names for its messages.

    >>> Measured(name="diagnose", verb="diagnosed", script="a script by a run of it").read("clipart-resnet")
    RunSpec(task='clipart-resnet')
    """

    name: str
    """As users call it."""
    verb: str
    """What it does to a target, as a participle: "measured"."""
    script: str
    """What to do with a script instead."""
    file: str = ""
    """What to do with a file that is neither a task nor a script; "" = no such file is likely."""
    also: str = ""
    """What is allowed besides, as in ", a script"."""
    returns: str = ""
    """What the step function has to return, as in "and returns the loss"; "" = nothing."""

    def read(
        self,
        target: Any,
        loader: Any = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        step_only: Mapping[str, Any] | None = None,
        spec_only: Mapping[str, Any] | None = None,
        steps: Any = None,
    ) -> RunSpec | Run | Step:
        """What was given: a RunSpec to launch, a Run to read, or a step to run here.

        Args:
            target: a RunSpec, the name of a task, a run, the path of a run directory, or a step function.
            loader: with a step: its batches.
            model: with a step: its module.
            optimizer: with a step: its optimizer.
            step_only: further arguments that only go with a step; None among them = not given.
            spec_only: arguments that only go with a spec; None among them = not given.
            steps: how many are to be taken, which does not go with a run; None = not given.

        Raises:
            ValueError: something else was given, or arguments that do not go with it.
        """
        if isinstance(target, Task | ScriptSpec):
            raise ValueError(f"{self.name}({shown(target)}): {self._instead()}")
        if isinstance(target, str | os.PathLike):
            target = self.run_at(target)
        if isinstance(target, RunSpec | Run):
            given = {"loader": loader, "model": model, "optimizer": optimizer, **(step_only or {})}
            self.refuse(target, given, "a step", "step, loader")
        if not isinstance(target, RunSpec):
            self.refuse(target, spec_only or {}, "a spec", "spec, …")
        if isinstance(target, Run) and steps is not None:
            raise ValueError(
                f"{self.name}({target!r}, steps={steps!r}): a run has taken its steps; {self.name}(spec, steps=…) takes new ones"
            )
        if isinstance(target, RunSpec | Run):
            return target
        check_step(self.name, target, loader, returns=self.returns, others=f", a RunSpec, a Run or the path of a run directory{self.also}")
        return Step(step=target, loader=loader, model=model, optimizer=optimizer)

    def _instead(self) -> str:
        return f"a task is {self.verb} by its spec, {self.name}({AS_SPEC}); {self.script}"

    def refuse(self, target: Any, given: Mapping[str, Any], goes_with: str, call: str) -> None:
        """Raise if an argument was given that does not go with this target.

        Raises:
            ValueError: there is such an argument.
        """
        extra = ", ".join("a loader" if name == "loader" else f"{name}=" for name, value in given.items() if value is not None)
        if extra:
            raise ValueError(f"{self.name}({shown(target)}, …) was given {extra}, which only goes with {goes_with}: {self.name}({call})")

    def run_at(self, path: str | os.PathLike[str]) -> RunSpec | Run:
        """The run in a directory, or the spec of the task that has this name."""
        try:
            return Run.load(path)
        except run_directory.DamagedRunError:
            text, folder = os.fspath(path), os.path.isdir(os.path.expanduser(path))
            if not folder and (spec := named_task(path)):
                return spec
            if folder or not (text.endswith(".py") or (self.file and os.path.splitext(text)[1])):
                raise
            why = f"{self.name}({text!r}): expected the path of a run directory or the name of a task; {self._instead()}"
            raise ValueError(f"{why}; {self.file}" if self.file else why) from None


def named_task(target: object) -> RunSpec | None:
    """The RunSpec of a task that is given by its name: a sample's, "path/file.py:function" or "package.module:function".

    Returns:
        None if this is no such name, or the path of a folder or of a script.
    """
    if not isinstance(target, str) or target.endswith(".py"):  # r"C:\train.py" is a path as well
        return None
    named = target in SAMPLES or ":" in target
    return RunSpec(task=target) if named and not os.path.isdir(os.path.expanduser(target)) else None


def spec_of_run(target: object) -> RunSpec | None:
    """The RunSpec of a run, or of the path of its directory, with its files as seen from here; None = neither, or the run of a script.

    Raises:
        LaunchError: its code, which would be executed, is somebody else's.
    """
    if isinstance(target, str | os.PathLike) and is_run_directory(target):
        target = Run.load(target)
    if not (isinstance(target, Run) and isinstance(target.spec, RunSpec)):
        return None
    late.load("refuse_code_of_others")(target)
    spec: RunSpec = seen_from_here(target.spec, run_directory.read_json(target.path / run_directory.RUN_JSON).get("cwd"))
    return spec


def check_step(name: str, step: Any, loader: Any, *, returns: str = "", others: str = "") -> None:
    """Raise unless this is a step function with its loader.

    Raises:
        ValueError: a module, the two in the wrong order, no function, or no loader.
    """
    if is_module(step):
        does = f"one whole optimizer step {returns}".rstrip()
        raise ValueError(
            f"{name}({shown(step)}, …): expected a function that does {does}: def step(batch): {STEP}, then {name}(step, loader); "
            "a module goes into model="
        )
    if not callable(step):
        if callable(loader) and (hasattr(step, "__iter__") or hasattr(step, "__getitem__")):
            raise ValueError(f"{name}(loader, step): it is the other way round, {name}(step, loader)")
        raise ValueError(f"{name}({shown(step)}, …): allowed are a step function with its loader{others}")
    if loader is None:
        raise ValueError(f"{name}({shown(step)}): a step needs the loader of its batches: {name}(step, loader)")
    if _is_dataset(loader):
        raise ValueError(
            f"{name}({shown(step)}, {shown(loader)}): a dataset gives single samples, and step takes batches: "
            f"{name}(step, torch.utils.data.DataLoader(dataset, batch_size=32)), with the batch_size of your training; "
            "batch_size=None where its items are whole batches"
        )


def _is_dataset(loader: object) -> bool:
    """Is it a dataset with numbered samples, of torch or of Hugging Face? (One that is iterated over may give batches.)"""
    data = sys.modules.get("torch.utils.data")
    numbered = data is not None and isinstance(loader, data.Dataset) and not isinstance(loader, data.IterableDataset)
    return numbered or (type(loader).__name__ == "Dataset" and type(loader).__module__.startswith("datasets."))


def read_spec(name: str, spec: Any, *, because: str = "", instead: str = "", error: type[ValueError] = ValueError) -> RunSpec:
    """The RunSpec given, itself, by its task's name or by a run of it; else an error, with why (`because`) and what to give `instead`."""
    spec = named_task(spec) or spec_of_run(spec) or spec
    if not isinstance(spec, RunSpec):
        expected = "expected a RunSpec" + (f", {because}" if because else "")
        raise error(f"{name}({shown(spec)}): " + "; ".join(part for part in (expected, _its_spec(name, spec), instead) if part))
    return spec


def read_program(name: str, target: Any, batch: Any, *, others: str = "", error: type[ValueError] = ValueError) -> Any:
    """What was given, a task's name and a run as its RunSpec. Raise unless it is a RunSpec, a Task, or builds a model and has a batch."""
    target = named_task(target) or spec_of_run(target) or target
    if isinstance(target, RunSpec | Task):
        return target
    configured = is_config(target)
    if configured:
        target = _model_of(target)
    if not callable(target):
        hint = f"it is the other way round, {name}(model, batch)" if hasattr(batch, "parameters") else _its_spec(name, target)
        raise error(
            f"{name}({' '.join(repr(target).split()):.80}): expected {others}a RunSpec, a Task, a function that builds a model, "
            f"or a torch.nn.Module, not a {type(target).__name__}" + (f"; {hint}" if hint else "")
        )
    if batch is None:
        made = "; the configuration's model is built for you" if configured else ""
        raise error(f"{name}({shown(target)}): a model needs a batch: {name}(model, batch=…), of tensors on any device, even meta{made}")
    if hasattr(batch, "batch_sampler"):
        raise error(f"{name}({shown(target)}, {shown(batch)}): a loader is not a batch: {name}(model, next(iter(loader)))")
    if inspect.isclass(target) or inspect.isfunction(target):
        try:
            inspect.signature(target).bind()
        except TypeError as missing:
            raise error(f"{name}({shown(target)}): {missing}; give it: {name}(lambda: {target.__name__}(…), …)") from None
        except ValueError:  # it has no signature that Python knows
            pass
    return target


def is_config(value: object) -> bool:
    """Is it the configuration of a Hugging Face model?"""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(value, transformers.PretrainedConfig)


def _model_of(config: Any) -> Callable[[], Any]:
    """Builds the model of a configuration, of the class that it names; a language model where it names none."""
    transformers = sys.modules["transformers"]
    kind = getattr(transformers, (config.architectures or [""])[0], None)

    def build() -> Any:
        return kind(config) if kind else transformers.AutoModelForCausalLM.from_config(config)

    build.__name__ = kind.__name__ if kind else type(config).__name__
    return build


def device_or_batch(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function of a target take its device or a batch second, whichever its own order is; their types tell which it is.

    A target that it does not take, or a missing device, is refused in its name.
    """
    needs_device = inspect.signature(function).parameters["device"].default is inspect.Parameter.empty
    name = function.__name__

    def by_name(*args: Any, **given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with device and batch by name; `accept_synonyms` looks at a call only then."""
        if len(args) > 3:
            return args, given
        for word, value in [("device" if isinstance(value, str | Device) else "batch", value) for value in args[1:]]:
            if word in given:
                raise ValueError(f"{name}(…): {word} is given twice, {value!r:.40} and {given[word]!r:.40}")
            given[word] = value
        return args[:1], given

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> R:
        args, given = by_name(*args, **given)
        if isinstance(count := given.get("batch"), bool) or is_number(count, numpy=True):
            samples = "" if isinstance(count, bool) else f"; for a number of samples: micro_batch={count:.0f}"
            raise ValueError(f"{name}(…, batch={count}): batch= is a batch of tensors{samples}")
        target = args[0] if args else given.pop("target", None)
        target = read_program(name, target, given.get("batch"))
        if needs_device and "device" not in given:
            raise ValueError(f'{name}({shown(target)}): for which device? {name}(…, device="H200"), a name or a wb.Device')
        return function(target, **given)

    call.by_name = by_name  # type: ignore[attr-defined]
    return cast(Callable[P, R], call)


def check_launchable(target: Any, *, error: type[ValueError] = ValueError) -> None:
    """Raise unless this is a RunSpec, the name of a task, or the path of a script."""
    if isinstance(target, str | os.PathLike) and is_run_directory(target):
        path = os.fspath(target)
        raise error(f'launch("{path}"): a run goes on with launch(resume="{path}"), and is repeated by launch(wb.Run.load("{path}").spec)')
    if isinstance(target, RunSpec | str | os.PathLike):
        return
    if target is None:
        raise error("launch() needs a RunSpec, the path of a script, or resume= with a run that has ended")
    hint = (
        f"; a task is launched by its spec, launch({AS_SPEC})"
        if isinstance(target, Task)
        else "; a run goes on with launch(resume=run), and is repeated by launch(run.spec)"
        if isinstance(target, Run)
        else "; a script that was launched is launched again by its path, launch(spec.script)"
        if isinstance(target, ScriptSpec)
        else ""
    )
    hint = hint or (f"; {why}" if (why := needs_task("launch", target)) else "")
    raise error(f"launch({shown(target)}): expected a RunSpec, the name of a task or the path of a script{hint}")


def _its_spec(name: str, target: Any) -> str:
    """How to give a task, a run or a script to a function that takes a RunSpec; "" = it is none of them."""
    if isinstance(target, str | os.PathLike) and os.fspath(target).endswith(".py"):
        return f'a file is given with the function in it that returns a wb.Task: {name}("{os.fspath(target)}:build")'
    if isinstance(target, Run) or (isinstance(target, str | os.PathLike) and is_run_directory(target)):
        return "it is the run of a script, which has no task"
    if isinstance(target, str):
        return f'{did_you_mean(target, SAMPLES)}a task has the name of a sample ({", ".join(SAMPLES)}), or is "my_task.py:build"'
    if isinstance(target, Task):
        return f"a task is given by its spec, {name}({AS_SPEC})"
    return needs_task(name, target)


def is_run_directory(path: str | os.PathLike[str]) -> bool:
    """Is it the path of a run directory?"""
    return os.path.isfile(os.path.join(os.path.expanduser(path), run_directory.RUN_JSON))
