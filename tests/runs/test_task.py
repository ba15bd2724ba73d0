"""Finding a task by name: in the kernel without importing it, in a rank by importing it."""

import sys
from pathlib import Path

import pytest
import torch

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


CASES = {
    "no file": (None, "missing.py:build", r"there is no file .*missing\.py; that folder holds helper\.py, my_task\.py"),
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
    "no function": ("x = 1", "has no function 'build': It defines no function"),
    "arguments": ("def build(width): ...", r"build needs the argument width; .*def build_default\(\): return build\(width=…\)"),
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
