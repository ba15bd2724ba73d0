"""Defines what is trained (Task), and finds a task by its name: `"file.py:function"`, `"package.module:function"` or a sample's name.

A learning-rate schedule of the user's own is found in the same way. Nothing of a spec is imported but by `resolve` and `resolve_schedule`.
"""

import ast
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.core.checks import did_you_mean, is_number, near_script, nearest
from workbench.core.synonyms import check_fields
from workbench.runs.training_knobs import is_own_schedule

SAMPLES = {
    "clipart-resnet": "workbench.train.tasks:clipart_resnet",
    "text-gpt": "workbench.train.tasks:text_gpt",
    "fashion-mlp": "workbench.train.tasks:fashion_mlp",
}
"""Sample tasks by name."""

TRIED = 10_000
"""Steps at which a schedule of the user's own is tried before the first, about: a wrong one is not to end a run in its midst."""
HARMLESS = (
    "Path",
    "pathlib.Path",
    "os.environ.get",
    "os.getenv",
    "os.path.join",
    "os.path.dirname",
    "int",
    "float",
    "str",
    "dict",
    "torch.device",
)
"""Calls that train nothing, nor do the methods of what they return: constants of a file may be made by them."""
_FORMS = '"path/file.py:function", "package.module:function", or a sample: ' + ", ".join(f'"{name}"' for name in SAMPLES)


class TaskError(ValueError):
    """A task that cannot be found, built or used; the message says what was given, what is allowed and what to try."""


@check_fields(TaskError)
@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained. Model and dataset are given as functions, so that each process builds its own."""

    model: Callable[[], Any]
    """Builds the `torch.nn.Module`; takes no argument."""
    dataset: Callable[[], Any]
    """Builds the training `torch.utils.data.Dataset`; takes no argument."""
    loss: Callable[[Any, Any], Any]
    """`loss(model, batch)` → a tensor with one number, the mean over the batch. A Hugging Face model: `lambda m, b: m(**b).loss`."""
    optimizer: Callable[[Any], Any] | str = "adamw"
    """Takes the parameters and returns an optimizer; or a name with options, such as "sgd(lr=0.1, momentum=0.9)"."""
    collate: Callable[[list[Any]], Any] | None = None
    """The loader's `collate_fn`; None = torch's own."""
    weight: Callable[[Any], Any] | None = None
    """`weight(batch)` → what a micro-batch counts in the mean over those of a step and over the ranks: the number over which its loss is a
    mean, such as its targets that are not padding, `lambda batch: (batch[1] != -100).sum()`; None = each counts the same."""
    evaluate: Callable[..., Any] | None = None
    """`evaluate(model)` → figures by name, such as accuracy; called on rank 0, without gradients and in evaluation mode. With `validation`,
    `evaluate(model, batch)`, called on all ranks: {"logits": …, "targets": …}, of which accuracy, loss, calibration, figures per class and
    the worst examples are made; or figures by name, each the mean over the batch or a tensor with a number per sample."""
    validation: Callable[[], Any] | None = None
    """Builds the dataset of the evaluation, which has a length; its batches are shared among the ranks. Without `evaluate`, the mean of
    `loss` is its figure."""
    tensor_parallel: Mapping[str, str] | None = None
    """Which layers are split over ranks with `RunSpec(tensor_parallel=…)`: pattern of module names → "colwise" (by outputs) or "rowwise"
    (by inputs), such as {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}; None = a Hugging Face model's own plan, if it has
    one."""
    pipeline: Callable[[Any], Any] | None = None
    """`pipeline(model)` → the model's parts in the order in which they are called, each with what the one before gave, for
    `RunSpec(pipeline_parallel=…)`: `lambda model: [model.embedding, *model.layers, nn.Sequential(model.norm, model.head)]`. Modules of the
    model, or such that hold some of them; None = the children of an `nn.Sequential`."""
    name: str = ""
    """For people; the function's name is used where this is empty."""

    def __post_init__(self) -> None:
        for field in ("model", "dataset", "loss"):
            if not callable(value := getattr(self, field)):
                builds = "AutoModelForCausalLM.from_config(config)" if hasattr(value, "architectures") else "…"
                extra = "" if field == "loss" else f": write {field}=lambda: {builds} so that each process builds its own"
                raise TaskError(f"Task({field}=…) got a {type(value).__name__}, expected a function{extra}")
        if hasattr(self.model, "parameters") and not isinstance(self.model, type):
            kind = type(self.model).__name__
            raise TaskError(
                f"Task(model=…) got a {kind} that is built already: write model=lambda: {kind}(…) so that each process builds its own"
            )
        for field in ("collate", "weight", "evaluate", "validation", "pipeline"):
            if (value := getattr(self, field)) is not None and not callable(value):
                raise TaskError(f"Task({field}=…) got a {type(value).__name__}, expected a function or None")
        if not (callable(self.optimizer) or isinstance(self.optimizer, str)):
            raise TaskError(f"Task(optimizer=…) got a {type(self.optimizer).__name__}, expected a name or a function of the parameters")
        plan = self.tensor_parallel
        if plan is not None and not (isinstance(plan, Mapping) and all(isinstance(text, str) for pair in plan.items() for text in pair)):
            raise TaskError(
                f"Task(tensor_parallel={plan!r:.100}): expected names of layers and how each is split, such as "
                '{"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}'
            )


def code_names(spec: Any) -> dict[str, str]:
    """The knobs of a spec that name code, and their values: its task, and a schedule of the user's own."""
    return {"task": spec.task, **({"schedule": spec.schedule} if is_own_schedule(spec.schedule) else {})}


def code_files(spec: Any) -> list[str]:
    """The files that these knobs name, where they name files and not modules."""
    return [where for name in code_names(spec).values() if (where := name.rpartition(":")[0]).endswith(".py")]


def with_files_at(spec: Any, path_of: Callable[[str], str]) -> Any:
    """The same spec with other paths of these files, by `path_of`."""
    parts = {knob: name.rpartition(":") for knob, name in code_names(spec).items()}
    return spec.replace(**{knob: f"{path_of(file)}:{name}" for knob, (file, _, name) in parts.items() if file.endswith(".py")})


def seen_from_here(spec: Any, folder: str | None) -> Any:
    """The same spec, the files that it names found in the folder where it was launched, where they are there; else in this one."""

    def path_of(file: str) -> str:
        there = os.path.join(folder or "", file)
        return there if os.path.exists(there) and not (os.path.exists(file) and os.path.samefile(file, there)) else file

    return with_files_at(spec, path_of)


def check(name: str) -> None:
    """Check that a task's file and function are there, without importing anything (the notebook's kernel stays free of torch).

    Raises:
        TaskError: no such file or function, or the function takes arguments. Nothing is checked that needs an import.
    """
    if name in SAMPLES:
        return
    where, function = _split(name)
    if not where.endswith(".py") or (read := _bound("task", name, where)) is None:
        return
    tree, bound = read
    if _set_to_tasks(tree, function):
        raise TaskError(_is_a_task(name, function))
    if function not in bound:
        functions = _functions(tree)
        raise TaskError(f"task={name!r}: {_missing(function, Path(where).name, functions)}")
    if isinstance(node := bound[function], ast.FunctionDef):
        given = node.args.posonlyargs + node.args.args
        needed = [a.arg for a in given[: len(given) - len(node.args.defaults)]]
        needed += [a.arg for a, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default is None]
        if needed:
            raise TaskError(_takes_arguments(name, function, needed))


def check_schedule(name: str) -> None:
    """The same for a schedule of the user's own.

    Raises:
        TaskError: no such file or function.
    """
    where, _, function = name.rpartition(":")
    if where.endswith(".py") and (read := _bound("schedule", name, where)) is not None and function not in read[1]:
        functions = _functions(read[0])
        raise TaskError(f"schedule={name!r}: {_missing(function, Path(where).name, functions)}")


def _no_file(path: Path) -> str:
    """That a file is missing, and what its folder holds instead."""
    return f"there is no file {path.absolute()}; {near_script(path)}"


def _bound(knob: str, name: str, where: str) -> tuple[ast.Module, dict[str, ast.AST]] | None:
    """The syntax tree of a file, and what it defines by name; None = only an import can tell."""
    path = Path(where)
    if not path.is_file():
        raise TaskError(f"{knob}={name!r}: {_no_file(path)}")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise TaskError(f"{knob}={name!r}: {path} is not valid Python: {error}") from error
    bound: dict[str, ast.AST] = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}  # not a method of the same name
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bound.setdefault(node.name, node)
            case ast.Name(ctx=ast.Store()):
                bound.setdefault(node.id, node)
            case ast.ImportFrom() | ast.Import():
                for alias in node.names:
                    bound.setdefault(alias.asname or alias.name, node)
                    if alias.name == "*":
                        return None
    return tree, bound


def _functions(tree: ast.Module) -> list[str]:
    """The functions that a file has outside of classes and of other functions, those under an `if` or a `try` left out."""
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def _set_to_tasks(tree: ast.AST, name: str) -> bool:
    """Is this name only ever assigned the result of a call of Task in the file? Otherwise only an import shows what it is."""
    stored = tasks = 0
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                stored += node.name == name
            case ast.ImportFrom() | ast.Import():
                stored += any((alias.asname or alias.name) == name for alias in node.names)
            case ast.Name(ctx=ast.Store()):
                stored += node.id == name
            case (
                ast.Assign(targets=[ast.Name(id=target)], value=ast.Call(func=ast.Name(id="Task") | ast.Attribute(attr="Task")))
                | ast.AnnAssign(target=ast.Name(id=target), value=ast.Call(func=ast.Name(id="Task") | ast.Attribute(attr="Task")))
            ):
                tasks += target == name
    return stored == tasks > 0


def _is_a_task(name: str, function: str) -> str:
    return f"task={name!r}: {function} is a Task, expected a function that returns one: def {function}(): return wb.Task(…)"


def resolve(name: str) -> Task:
    """Import a task by its name and build it.

    Raises:
        TaskError: it cannot be found, does not import, takes arguments or does not return a Task.
    """
    task = built(name)
    if not isinstance(task, Task):
        called = f"task={name!r}: {name.rpartition(':')[2]}()"
        raise TaskError(f"{called} returned a {type(task).__name__}, expected a wb.Task(model=…, dataset=…, loss=…)")
    return task


def built(name: str) -> Any:
    """What the function of a task's name returns.

    Raises:
        TaskError: it cannot be found, does not import, takes arguments or fails.
    """
    where, function = _split(SAMPLES.get(name, name))
    factory = imported("task", f"{where}:{function}")
    if isinstance(factory, Task):
        raise TaskError(_is_a_task(name, function))
    if not callable(factory):
        raise TaskError(f"task={name!r}: {function} is a {type(factory).__name__}, expected a function that returns a wb.Task")
    parameters = inspect.signature(factory).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise TaskError(_takes_arguments(name, function, needed))
    try:
        return factory()
    except TaskError:
        raise
    except SystemExit as error:
        raise TaskError(
            f"task={name!r}: {function}() ended the process (SystemExit: {error}). If it parses the command line, it is a script's main, "
            f"not a function that returns a wb.Task: write one beside it, def build(): return wb.Task(…)"
        ) from error
    except Exception as error:
        raise TaskError(f"task={name!r}: {function}() raised {type(error).__name__}: {error}") from error


def lone_builder(script: str | os.PathLike[str]) -> str | None:
    """The function that returns a wb.Task in a file that, run as a script, does nothing: it only imports, defines and assigns."""
    passive = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
    try:
        body = ast.parse(Path(script).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None
    idle = all(isinstance(each, passive) or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)) for each in body)
    called = [
        node for each in body if isinstance(each, ast.Assign | ast.AnnAssign) for node in ast.walk(each) if isinstance(node, ast.Call)
    ]
    if not idle or any(ast.unparse(call.func).partition("(")[0] not in HARMLESS for call in called):
        return None
    ours = [(each, name) for each in body if isinstance(each, ast.Import | ast.ImportFrom) for name in each.names]
    tasks = {f"{name.asname or name.name}.Task" for each, name in ours if isinstance(each, ast.Import) and name.name == "workbench"}
    tasks |= {name.asname or name.name for each, name in ours if getattr(each, "module", "") == "workbench" and name.name == "Task"}
    for function in (each for each in body if isinstance(each, ast.FunctionDef)):
        inner = list(ast.walk(function))
        set_to = [(target, node.value) for node in inner if isinstance(node, ast.Assign) for target in node.targets]
        set_to += [(node.target, node.value) for node in inner if isinstance(node, ast.AnnAssign) and node.value]
        made = {target.id: value for target, value in set_to if isinstance(target, ast.Name)}
        returned = (node.value for node in inner if isinstance(node, ast.Return))
        values = (made.get(value.id) if isinstance(value, ast.Name) else value for value in returned)
        if any(isinstance(value, ast.Call) and ast.unparse(value.func) in tasks for value in values):
            return function.name
    return None


def resolve_schedule(name: str, steps: int) -> Callable[[int], float]:
    """Import a learning-rate schedule of the user's own, and try it at all steps, or at some of a long run.

    Args:
        name: `"path/file.py:function"` or `"package.module:function"`; `function(step)`, with steps from 0, returns the learning rate of
            a step as a fraction of its peak.
        steps: number of steps of the run.

    Raises:
        TaskError: it cannot be found, does not import, fails, or returns something else.
    """
    function, called = imported("schedule", name), name.rpartition(":")[2]
    if not callable(function):
        raise TaskError(f"schedule={name!r}: {called} is a {type(function).__name__}; expected a function: def {called}(step): return 1.0")

    def factor(step: int) -> float:
        try:
            value = function(step)
        except Exception as error:
            hint = f"; it is called with the step alone: def {called}(step): return 1.0" if isinstance(error, TypeError) else ""
            raise TaskError(f"schedule={name!r}: {called}({step}) raised {type(error).__name__}: {error}{hint}") from error
        if not is_number(value, least=0, numpy=True):
            raise TaskError(
                f"schedule={name!r}: {called}({step}) returned {value!r:.80}; expected a number of at least 0, the learning rate of that "
                "step as a fraction of its peak"
            )
        return float(value)

    for step in range(0, steps, max(1, steps // TRIED)):
        factor(step)
    return factor


def label(name: str) -> str:
    """A short form of a task's name, fit for a folder's name: `"my_task.py:build"` → `"my_task-build"`.

    >>> label("code/my_task.py:build"), label("package.module:build"), label("text-gpt")
    ('my_task-build', 'module-build', 'text-gpt')
    """
    where, _, function = name.rpartition(":")
    stem = Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]
    text = f"{stem}-{function}" if where else name
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in text)


def _split(name: str) -> tuple[str, str]:
    where, colon, function = name.rpartition(":")
    if not colon or not where or not function.isidentifier():
        near = nearest(name, SAMPLES)
        hint = f'; did you mean "{near}"?' if near else "."
        if name.endswith(".py"):
            hint = f', but a file. Name the function in it that returns a wb.Task, as in "{name}:build".'
        elif not near and Path(name).parent.is_dir():
            script = near_script(Path(name))
            if script.endswith("?") and Path(name).suffix:
                raise TaskError(f"there is no file {name}; {script}")
            hint = f"; {script}" if script.endswith("?") else f" or file; {script}."
        raise TaskError(f"task={name!r}: no such task{hint} A task is named {_FORMS}")
    return where, function


def imported(knob: str, name: str) -> Any:
    """What a knob names; its module is imported.

    Args:
        knob: name of the knob, for messages.
        name: `"path/file.py:function"` or `"package.module:function"`.

    Raises:
        TaskError: it cannot be found or does not import.
    """
    where, _, function = name.rpartition(":")
    module = _import(knob, name, where)
    found = getattr(module, function, None)
    if found is None:
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise TaskError(f"{knob}={name!r}: {_missing(function, where, functions)}")
    return found


def _import(knob: str, name: str, where: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where).resolve()
        if not path.is_file():
            raise TaskError(f"{knob}={name!r}: {_no_file(path)}")
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))  # its neighbours import, also in the loader's workers
        module = importlib.import_module(path.stem)
        return module if Path(getattr(module, "__file__", None) or "").resolve() == path else _load(path)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"{knob}={name!r}: {where} does not import: {type(error).__name__}: {error}") from error


def _load(path: Path) -> ModuleType:
    """Import a file whose name another module already has (`test.py`, `random.py`) under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"workbench_task_{path.stem}", path)
    assert spec  # a .py file always has a spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _missing(function: str, where: str, functions: list[str]) -> str:
    begin = f"{hint}It" if (hint := did_you_mean(function, functions)) else "it"
    return f"{where} has no function {function!r}: {begin} defines {', '.join(functions[:8]) or 'no function'}"


def _takes_arguments(name: str, function: str, needed: list[str]) -> str:
    values = ", ".join(f"{n}=…" for n in needed)
    return (
        f"task={name!r}: {function} needs the argument{'s' * (len(needed) > 1)} {', '.join(needed)}; a task's function has none. "
        f"Try a second one: def {function}_default(): return {function}({values})"
    )
