"""Targets of public functions: a step with its loader, a RunSpec or a run is recognised; anything else is refused with what to try."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workbench import Run, RunSpec, Task
from workbench.runs import task
from workbench.runs.launch.launch import launch
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.spec import ScriptSpec
from workbench.runs.target import Measured, Step, check_launchable, check_step, device_or_batch, named_task, read_program, read_spec, shown

TARGET = Measured(name="weigh", verb="weighed", script="a script by a run of it", file="a picture is shown", returns="and returns the loss")
SPEC = RunSpec(task="text-gpt")


def a_step(batch: Any) -> None: ...


def a_task() -> Task:
    return Task(model=dict, dataset=list, loss=a_step)  # type: ignore[arg-type]


class Two:
    def __init__(self, classes: int) -> None: ...


class Module:
    def parameters(self) -> list[Any]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def __call__(self, batch: Any) -> None: ...


def test_what_is_allowed(by_hand: Any) -> None:
    assert TARGET.read(SPEC, steps=3, spec_only={"ranks": [1]}) is SPEC
    run = Run.load(by_hand().path)
    assert TARGET.read(run) is run
    for path in (run.path, str(run.path)):
        read = TARGET.read(path)
        assert isinstance(read, Run)
        assert read.path == run.path
    loader = [1, 2]
    assert TARGET.read(a_step, loader, model=3, step_only={"into": "x"}) == Step(step=a_step, loader=loader, model=3)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ((Task,), {}, r"weigh\(Task\): a step needs the loader"),
        (
            (a_task(),),
            {},
            r"weigh\(Task\): a task is weighed by its spec, weigh\(wb.RunSpec\(task=\"my_task.py:build\"\)\); a script by a run",
        ),
        ((ScriptSpec(script="a.py"),), {}, r"weigh\(ScriptSpec\): a task is weighed by its spec"),
        ((Path("train.py"),), {}, r"a script by a run of it; a picture is shown$"),
        (("x.png",), {}, "a picture is shown"),
        (("nowhere",), {}, "is not a run directory"),
        ((SPEC, [1]), {"model": 2}, r"weigh\(RunSpec, …\) was given a loader, model=, which only goes with a step: weigh\(step, loader\)"),
        ((SPEC,), {"step_only": {"into": "x"}}, r"was given into=, which only goes with a step"),
        ((a_step, [1]), {"spec_only": {"ranks": 0}}, r"weigh\(a_step, …\) was given ranks=, which only goes with a spec: weigh\(spec, …\)"),
        ((Module(), [1]), {}, "one whole optimizer step and returns the loss, def step.*; a module goes into model="),
        (([1], a_step), {}, r"weigh\(loader, step\): it is the other way round, weigh\(step, loader\)"),
        ((None,), {}, r"weigh\(NoneType, …\): allowed are a step function with its loader, a RunSpec, a Run or the path"),
        ((a_step,), {}, r"weigh\(a_step\): a step needs the loader of its batches: weigh\(step, loader\)"),
    ],
)
def test_what_is_refused(given: tuple[Any, ...], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TARGET.read(*given, **options)


def test_a_run_has_taken_its_steps(by_hand: Any) -> None:
    with pytest.raises(ValueError, match=r"steps=3\): a run has taken its steps; weigh\(spec, steps=…\)"):
        TARGET.read(by_hand().path, steps=3)
    with pytest.raises(ValueError, match=r"was given ranks=, which only goes with a spec"):
        TARGET.read(by_hand().path, spec_only={"ranks": "all"})


def test_a_damaged_run_directory_is_named_as_one(tmp_path: Path) -> None:
    folder = tmp_path / "of:colon.py"
    folder.mkdir()
    (folder / "run.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        TARGET.read(folder)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("text_gpt", r"turn\(str\): expected a RunSpec, whose knobs turn; did you mean 'text-gpt'\? .*; or not"),
        (a_task(), r"a task is given by its spec, turn\(wb.RunSpec\(task=\"my_task.py:build\"\)\)"),
        (3, r"turn\(int\): expected a RunSpec, whose knobs turn; or not"),
    ],
)
def test_a_spec_alone(by_hand: Any, given: Any, said: str) -> None:
    assert read_spec("turn", SPEC) is SPEC
    with pytest.raises(LaunchError, match=said):
        read_spec("turn", given, because="whose knobs turn", instead="or not", error=LaunchError)
    with pytest.raises(ValueError, match=r"a run has its spec: turn\(run.spec\)"):
        read_spec("turn", Run.load(by_hand(spec=SPEC.to_json()).path))


def test_a_program() -> None:
    for good in (SPEC, a_task()):
        assert read_program("guess", good, None) is good
    assert read_program("guess", Module, [1]) is Module
    with pytest.raises(ValueError, match=r"missing a required argument: 'classes'; give it: guess\(lambda: Two\(…\), …\)"):
        read_program("guess", Two, 1)
    with pytest.raises(ValueError, match=r"guess\(Module\): a model needs a batch: guess\(model, batch=…\)"):
        read_program("guess", Module, None)
    with pytest.raises(ValueError, match=r"guess\('text_gpt'\): expected a hat, a RunSpec, a Task.*not a str"):
        read_program("guess", "text_gpt", None, others="a hat, ")
    with pytest.raises(ValueError, match=r"guess\(\[1\]\): expected .*; it is the other way round, guess\(model, batch\)"):
        read_program("guess", [1], SimpleNamespace(parameters=list))
    with pytest.raises(ValueError, match=r"guess\(Module, SimpleNamespace\): a loader is no batch: guess\(model, next\(iter\(loader\)\)\)"):
        read_program("guess", Module, SimpleNamespace(batch_sampler=[1]))
    with pytest.raises(ValueError, match=r"^run=<function.*>: expected a Run, or the path of its directory"):
        Run.load(test_a_program)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["text-gpt", "b.py:build", "package.module:build"])
def test_the_name_of_a_task_stands_for_its_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    spec = RunSpec(task=name)
    assert TARGET.read(name) == read_spec("turn", name) == read_program("guess", name, None) == named_task(name) == spec
    (tmp_path / name).mkdir()
    assert named_task(name) is None


def test_a_folder_in_the_home_is_no_name_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs 12:30").mkdir()
    assert named_task("~/runs 12:30") is None


def test_other_texts_and_values_are_no_name_of_a_task() -> None:
    assert [named_task(value) for value in ("train.py", "runs/1", "", 3, None, Path("b.py:build"))] == [None] * 6


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda run: a_task(), r"launch\(Task\): .* a task is launched by its spec"),
        (lambda run: run, r"launch\(Run\): .* launch\(resume=run\), and is repeated by launch\(run.spec\)"),
        (lambda run: ScriptSpec(script="a.py"), r"by its path, launch\(spec.script\)"),
        (lambda run: a_step, r"launch\(a_step\): .* is not launched: wb.watch\(loader\)"),
        (lambda run: 3, r"launch\(int\): expected a RunSpec, the name of a task or the path of a script$"),
        (lambda run: None, r"launch\(\) needs a RunSpec"),
    ],
)
def test_what_can_be_launched(by_hand: Any, given: Callable[[Any], Any], said: str) -> None:
    for good in (SPEC, "train.py", Path("train.py")):
        check_launchable(good)
    with pytest.raises(LaunchError, match=said):
        launch(given(Run.load(by_hand().path)))


def test_what_is_launched_may_be_named() -> None:
    with pytest.raises(LaunchError, match=r"launch\(Task\): .* a task is launched by its spec"):
        launch(task=a_task())
    with pytest.raises(task.TaskError, match=r"there is no file .*nowhere\.py"):
        launch(task="nowhere.py:build", micro_batch=2)


class Sized:
    """What needs a device and a batch."""

    @staticmethod
    @device_or_batch
    def device_first(target: Any, device: Any, *, batch: Any = None) -> tuple[Any, ...]:
        return target, device, batch

    @staticmethod
    @device_or_batch
    def batch_first(target: Any, batch: Any = None, *, device: Any = "cuda") -> tuple[Any, ...]:
        return target, device, batch


def test_a_device_and_a_batch_come_in_either_order() -> None:
    def a_model() -> None:
        """Stands for what builds a model."""

    for call in (Sized.device_first, Sized.batch_first):
        function: Any = call
        assert function(a_model, [1], device="H200") == function(a_model, "H200", batch=[1]) == (a_model, "H200", [1])
        assert function(target=a_model, batch=[1], device="H200") == function(a_model, "H200", [1]) == (a_model, "H200", [1])
        with pytest.raises(ValueError, match=r"_first\(a_model\): a model needs a batch: (device|batch)_first\(model, batch=…\)"):
            function(a_model, "H200")
        with pytest.raises(ValueError, match=r"_first\(…, batch=8\): batch= is a batch of tensors; for a number of samples: micro_batch=8"):
            function(SPEC, device="H100", batch=8)
        with pytest.raises(ValueError, match=r"_first\(…, batch=8\.0\): .* samples: micro_batch=8$"):
            function(SPEC, 8.0, device="H100")
        with pytest.raises(ValueError, match=r"_first\(…, batch=8\): .* samples: micro_batch=8$"):
            function(SPEC, device="H100", batch=np.int64(8))
        with pytest.raises(ValueError, match=r"_first\(…, batch=True\): batch= is a batch of tensors$"):
            function(SPEC, device="H100", batch=True)
        with pytest.raises(ValueError, match="device is given twice, 'H100' and 'H200'"):
            function(a_model, "H100", [1], device="H200")
    assert Sized.batch_first(SPEC) == (SPEC, "cuda", None)
    with pytest.raises(ValueError, match=r'device_first\(RunSpec\): for which device\? device_first\(…, device="H200"\)'):
        Sized.device_first("text-gpt")  # type: ignore[call-arg]


def test_the_configuration_of_a_hugging_face_model_builds_it() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 4}
    made = {}
    for names in (None, ["GPT2ForSequenceClassification"]):
        build = read_program("guess", transformers.GPT2Config(architectures=names, **sizes), [1])
        made[shown(build)] = type(build()).__name__
    assert made == {"GPT2Config": "GPT2LMHeadModel", "GPT2ForSequenceClassification": "GPT2ForSequenceClassification"}
    with pytest.raises(task.TaskError, match=r"write model=lambda: AutoModelForCausalLM.from_config\(config\) so that"):
        Task(model=transformers.GPT2Config(), dataset=list, loss=a_step)


def test_a_dataset_is_not_a_loader() -> None:
    import torch

    samples = torch.utils.data.TensorDataset(torch.rand(8, 2))
    with pytest.raises(ValueError, match=r"diagnose\(a_step, TensorDataset\): a dataset gives .*DataLoader\(dataset, batch_size=32\)"):
        check_step("diagnose", a_step, samples)
    check_step("diagnose", a_step, torch.utils.data.DataLoader(samples, batch_size=4))
    check_step("diagnose", a_step, [torch.rand(4, 2)])


def test_a_file_or_a_misspelt_name_in_the_place_of_a_task() -> None:
    with pytest.raises(ValueError, match=r'estimate_memory\("my_task.py:build"\)'):
        read_program("estimate_memory", "my_task.py", None)
    with pytest.raises(ValueError, match="did you mean 'clipart-resnet'"):
        read_program("estimate_memory", "clipart-resnett", None)
    with pytest.raises(ValueError, match=r'climb\("train.py:build"\)'):
        read_spec("climb", "train.py")
    with pytest.raises(ValueError, match=r'no such task, but a file. Name the function .*, as in "train.py:build"'):
        task.check("train.py")
