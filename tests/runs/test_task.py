"""Finding a task by name: in the kernel without importing it, in a rank by importing it."""

import sys
from pathlib import Path

import pytest
import torch

import workbench as wb
from workbench.runs import task
from workbench.runs.task import Task, TaskError

GOOD = """
from workbench import Task
from helper import width

def build():
    return Task(model=lambda: width, dataset=list, loss=lambda model, batch: 0, name="mine")
"""


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def written(tmp_path: Path, text: str, name: str = "my_task.py") -> str:
    (tmp_path / name).write_text(text)
    (tmp_path / "helper.py").write_text("width = 3\n")
    return str(tmp_path / name)


def test_a_file_with_a_function(tmp_path: Path) -> None:
    name = written(tmp_path, GOOD) + ":build"
    task.check(name)
    assert "my_task" not in sys.modules  # looked at, not imported
    found = task.resolve(name)
    assert (found.name, found.model()) == ("mine", 3)


@pytest.mark.parametrize("taken", ["random.py", "test_task.py", "torch.py"])
def test_a_file_with_a_name_that_is_taken(tmp_path: Path, taken: str) -> None:
    before = sys.modules.get("random")
    assert task.resolve(written(tmp_path, GOOD, taken) + ":build").name == "mine"
    assert sys.modules.get("random") is before


def test_what_is_there_instead_of_a_file_is_said_where_it_is_imported(tmp_path: Path) -> None:
    written(tmp_path, GOOD)
    with pytest.raises(TaskError, match=r"there is no file .*missing\.py; the folder has helper\.py, my_task\.py"):
        task.resolve(str(tmp_path / "missing.py:build"))


CASES = {
    "no file": (None, "missing.py:build", r"there is no file .*missing\.py; the folder has helper\.py, my_task\.py"),
    "no function": (GOOD, "my_task.py:bild", r"my_task\.py has no function 'bild': did you mean 'build'\? It defines build"),
    "arguments": (
        "def build(width, *, depth): ...",
        "my_task.py:build",
        r"build needs the arguments width, depth; a task's function has none.*def build_default",
    ),
    "syntax": ("def build(:", "my_task.py:build", "is not valid Python"),
    "a task": (
        "import workbench as wb\nbuild = wb.Task(model=int)",
        "my_task.py:build",
        r"build is a Task, expected a function that returns one",
    ),
    "methods": (
        "def train(): ...\nclass Data:\n    def __len__(self): return 3",
        "my_task.py:biuld",
        r"has no function 'biuld': it defines train$",
    ),
    "method": ("class Build:\n    def build(self): ...\ndef build(): ...", "my_task.py:biuld", r"did you mean 'build'\? It defines build$"),
    "file": (GOOD, "my_task.yp", r'^there is no file my_task\.yp; did you mean "my_task\.py"\?$'),
    "no such file": (GOOD, "strain.yp", r"'strain\.yp': no such task or file; the folder has helper\.py, my_task\.py\. A task is named"),
    "stem": (GOOD, "my-task", r'no such task; did you mean "my_task\.py"\?'),
    "form": (GOOD, "my_task.py", r"no such task, but a file\. .* A task is named"),
    "sample": (GOOD, "clipart-resnt", r'no such task; did you mean "clipart-resnet"\?'),
}


@pytest.mark.parametrize(("text", "name", "said"), CASES.values(), ids=CASES)
def test_what_the_kernel_can_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, name: str, said: str) -> None:
    written(tmp_path, text or GOOD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match=said):
        task.check(name)


IMPORTS = {
    "import error": ("import nothing_like_it\ndef build(): ...", "does not import: ModuleNotFoundError: No module named 'nothing_like_it'"),
    "no function": ("x = 1", "has no function 'build': it defines no function"),
    "arguments": ("def build(width): ...", r"build needs the argument width; .*def build_default\(\): return build\(width=…\)"),
    "a main": ("import argparse\ndef build(): argparse.ArgumentParser().parse_args(['--x'])", "it is a script's main, not a function that"),
    "raises": ("def build(): 1 / 0", r"build\(\) raised ZeroDivisionError: division by zero"),
    "something else": ("def build(): return 5", r"build\(\) returned a int, expected a wb\.Task"),
    "a task": (
        "from workbench import Task\nbuild = Task(model=int, dataset=list, loss=max)",
        r"build is a Task, expected a function that returns one",
    ),
    "a number": ("build = 5", "build is a int, expected a function that returns a wb.Task"),
    "a model": (
        "from workbench import Task\ndef build(): return Task(model=5, dataset=list, loss=max)",
        r"Task\(model=…\) got a int.*lambda",
    ),
}


@pytest.mark.parametrize(("text", "said"), IMPORTS.values(), ids=IMPORTS)
def test_what_a_rank_can_tell(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        task.resolve(written(tmp_path, text) + ":build")


def test_what_only_an_import_can_tell_is_left_to_it(tmp_path: Path) -> None:
    task.check(written(tmp_path, "from helper import *") + ":anything")
    task.check(written(tmp_path, "def build():\n    build = Task()\n    return build") + ":build")
    task.check(written(tmp_path, "build = Task()\nbuild = wrapped(build)") + ":build")
    task.check("package.module:function")
    task.check("text-gpt")


def test_functions_that_are_none() -> None:
    with pytest.raises(TaskError, match=r"got a Linear that is built already: write model=lambda: Linear\(…\)"):
        Task(model=torch.nn.Linear(1, 1), dataset=list, loss=max)
    assert Task(model=torch.nn.Identity, dataset=list, loss=max).model is torch.nn.Identity
    with pytest.raises(TaskError, match=r"Task\(evaluate=…\) got a float, expected a function or None"):
        Task(model=int, dataset=list, loss=max, evaluate=0.5)  # type: ignore[arg-type]


def test_an_optimizer_of_the_wrong_kind() -> None:
    with pytest.raises(TaskError, match="a name or a function of the parameters"):
        Task(model=int, dataset=list, loss=max, optimizer=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", ["colwise", {"head": 1}, ["head"]])
def test_a_plan_of_the_wrong_kind(plan: object) -> None:
    with pytest.raises(TaskError, match=r"Task\(tensor_parallel=.*expected names of layers and how each is split, such as"):
        Task(model=int, dataset=list, loss=max, tensor_parallel=plan)  # type: ignore[arg-type]


def test_a_task_with_other_arguments() -> None:
    with pytest.raises(TaskError, match=r"Task has no argument 'my_model': did you mean 'model'\?"):
        Task(my_model=int, dataset=list, loss=int)
    with pytest.raises(TaskError, match="Task: dataset=…, loss=… are missing"):
        Task(model=int)  # type: ignore[call-arg]
    with pytest.raises(TaskError, match=r"Task\(3\): its arguments are given by name, Task\(model=…\)"):
        Task(3)


RATE = "import helper\ndef rate(step):\n    return 1 / (1 + step)\n"


def test_a_schedule_of_ones_own(tmp_path: Path) -> None:
    name = written(tmp_path, RATE, "my_rates.py") + ":rate"
    task.check_schedule(name)
    assert "my_rates" not in sys.modules  # looked at, not imported
    factor = task.resolve_schedule(name, steps=10)
    assert [factor(step) for step in (0, 1, 3)] == [1.0, 0.5, 0.25]
    task.check_schedule("package.module:rate")


SCHEDULES = {
    "no function": ("x = 1", r"my_rates.py has no function 'rate': it defines no function"),
    "import error": ("import nothing_like_it\ndef rate(step): ...", "does not import: ModuleNotFoundError"),
    "a number": ("rate = 5", r"rate is a int; expected a function: def rate\(step\): return 1.0"),
    "nothing": ("def rate(step): pass", r"rate\(0\) returned None; expected a number of at least 0, the learning rate of that step"),
    "negative": ("def rate(step): return 1 - step", r"rate\(2\) returned -1; expected a number of at least 0"),
    "not finite": ("def rate(step): return float('nan')", r"rate\(0\) returned nan"),
    "raises": ("def rate(step): return [1, 1][step]", r"rate\(2\) raised IndexError: list index out of range"),
    "arguments": ("def rate(): return 1.0", r"raised TypeError: .*it is called with the step alone: def rate\(step\): return 1.0"),
}


@pytest.mark.parametrize(("text", "said"), SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_of_ones_own_is_tried_at_its_steps(tmp_path: Path, text: str, said: str) -> None:
    """A list with a rate for each step is enough: none is asked for beyond the last."""
    with pytest.raises(TaskError, match=said):
        task.resolve_schedule(written(tmp_path, text, "my_rates.py") + ":rate", steps=3)
    task.resolve_schedule(written(tmp_path, "def rate(step): return [1, 1, 0][step]", "rates_of_3.py") + ":rate", steps=3)


@pytest.mark.parametrize(("name", "said"), [("my_rate.py:rate", "there is no file"), ("my_rates.py:rat", "did you mean 'rate'")])
def test_a_schedule_that_is_not_there_is_refused_before_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    written(tmp_path, RATE, "my_rates.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match=f"schedule='{name}': .*{said}"):
        wb.launch(wb.RunSpec(task="text-gpt", device="cpu", schedule=name), runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
