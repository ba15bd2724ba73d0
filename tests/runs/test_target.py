"""Targets of public functions: a step with its loader, a RunSpec or a run is recognised; anything else is refused with what to try."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import workbench as wb
from workbench import Run, RunSpec, Task
from workbench.core import run_directory
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
        ((Module(), [1]), {}, "one whole optimizer step and returns the loss: def step.*; a module goes into model="),
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


def test_a_run_stands_for_its_spec(by_hand: Any) -> None:
    run = Run.load(by_hand(spec=SPEC.to_json()).path)
    (listed,) = wb.list_runs(run.path.parent).runs
    for given in (run, run.path, str(run.path), listed):
        assert read_spec("turn", given) == SPEC
        assert read_program("guess", given, None) == SPEC
    script = by_hand(spec=ScriptSpec(script="train.py").to_json())
    for read in (lambda given: read_spec("turn", given), lambda given: read_program("guess", given, None)):
        with pytest.raises(ValueError, match=r"it is the run of a script, which has no task"):
            read(Run.load(script.path))


def test_the_files_of_a_run_are_those_of_the_folder_where_it_was_launched(
    by_hand: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("there", "here"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my.py").write_text("def build(): ...\n")
    made = by_hand(spec=RunSpec(task="my.py:build").to_json(), cwd=str(tmp_path / "there"))
    monkeypatch.chdir(tmp_path / "here")
    assert read_spec("turn", made.path).task == f"{tmp_path / 'there' / 'my.py'}:build"
    monkeypatch.chdir(tmp_path / "there")
    assert read_spec("turn", made.path).task == "my.py:build"


def test_the_code_in_a_run_directory_is_not_executed(by_hand: Any) -> None:
    made = by_hand(spec=RunSpec(task="evil.py:build").to_json())
    info = run_directory.read_json(made.path / run_directory.RUN_JSON)
    run_directory.write_json(made.path / run_directory.RUN_JSON, info | {"cwd": str(made.path)})
    (made.path / "evil.py").write_text("raise SystemExit('executed')\n")
    for read in (lambda run: read_spec("turn", run), lambda run: wb.estimate_memory(run, device="H100")):
        with pytest.raises(LaunchError, match="inside its own run directory"):
            read(made.path)


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
    with pytest.raises(
        ValueError, match=r"guess\(Module, SimpleNamespace\): a loader is not a batch: guess\(model, next\(iter\(loader\)\)\)"
    ):
        read_program("guess", Module, SimpleNamespace(batch_sampler=[1]))
    with pytest.raises(ValueError, match=r"^run=test_a_program: expected a Run, or the path of its directory"):
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
        (lambda run: a_step, r"launch\(a_step\): .* a function is not launched by itself: .*; wb.watch\(loader\)"),
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


class Lightning(Module):
    """A LightningModule without a forward, as many are."""

    def training_step(self, batch: Any, batch_idx: int) -> None: ...


def a_directory(by_hand: Any) -> str:
    return str(by_hand(spec=SPEC.to_json()).path)


DRY_RUNS: dict[str, dict[str, Any]] = {"estimate_memory": {}, "estimate_time": {"device": "H100"}, "collectives": {}}
ON_DEVICE: dict[str, dict[str, Any]] = {"max_micro_batch": {"device": "H100"}, "memory_ladder": {"device": "H100"}}
LOOPS = ("diagnose", "find_lr", "noise_scale", "measure_memory", "find_leaks", "trace", "sanity")
LAUNCHED = ("batch_plan", "climb", "sweep", "steps_to_target", "same_twice", "prove_resume", "why_not_linear", "launch")
SPECS: dict[str, dict[str, Any]] = {
    **{verb: {} for verb in LAUNCHED},
    "scaling_curve": {"over": "nproc_per_node"},
    "scaling_law": {"samples": [10, 20]},
    "batch_lengths": {"device": "H100"},
}
"""Verb → arguments that it needs beside its target, of those that run a task in a launch."""
IN_A_TASK = r'return wb\.Task\(model=.*into my_task\.py, then {verb}\(wb\.RunSpec\(task="my_task\.py:build"\), …\)'
A_STEP = r"def step\(batch\): optimizer\.zero_grad\(\); loss = …; loss\.backward\(\); optimizer\.step\(\).*{verb}\(step, loader\)"


@pytest.mark.parametrize("verb", [*SPECS])
def test_a_verb_that_launches_a_task_says_how_everything_else_becomes_one(by_hand: Any, verb: str) -> None:
    """A model with its batch, a step with its loader, a Task, a script, a run and its directory."""
    call, given = getattr(wb, verb), SPECS[verb]
    for target in ((Module(), [1]), (Lightning(), [1]), (Module,), (a_step, [1]), (a_step,)):
        with pytest.raises((ValueError, TypeError), match=IN_A_TASK.format(verb=verb)) as caught:
            call(*target, **given)
        assert " at 0x" not in str(caught.value)
    with pytest.raises(ValueError, match=rf'^{verb}\(Task\): .*{verb}\(wb\.RunSpec\(task="my_task\.py:build"\)\)'):
        call(a_task(), **given)
    if verb not in ("launch", "why_not_linear", "prove_resume"):  # they take a script
        with pytest.raises(ValueError, match=rf'{verb}\("train\.py:build"\)'):
            call("train.py", **given)
    if verb == "launch":  # the others train its spec; here it could be meant to go on
        path = a_directory(by_hand)
        for run in (path, Run.load(path)):
            with pytest.raises(ValueError, match=r"launch\((wb\.Run\.load\(.*\)|run)\.spec\)"):
                call(run, **given)


def test_what_takes_a_loop_of_ones_own_is_named_by_the_verbs_that_take_none() -> None:
    with pytest.raises(TypeError, match=r"wb\.max_micro_batch\(model, batch, device=…\) says which batch fits"):
        wb.batch_plan(Module(), [1])  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError, match=r"wb\.noise_scale\(step, loader\) and wb\.find_lr\(step, loader\) measure a loop of your own"):
        wb.batch_plan(a_step, [1])  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError, match=r"wb\.diagnose\(step, loader\) takes a loop of your own"):
        wb.climb(a_step, [1])  # type: ignore[call-arg, arg-type]


def test_what_takes_no_spec_asks_for_none() -> None:
    with pytest.raises(TypeError, match=r"energy\(Module, list\): only target \(a Run, a Plan.*\) is given by place"):
        wb.energy(Module(), [1])  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize("verb", LOOPS)
def test_a_verb_that_takes_a_loop_says_how_a_model_gets_one(by_hand: Any, verb: str) -> None:
    call = getattr(wb, verb)
    for target in ((Module(), [1]), (Lightning(), [1])):
        with pytest.raises(ValueError, match=A_STEP.format(verb=verb)):
            call(*target)
    if verb not in ("sanity", "find_leaks"):  # the one takes a Task, the other a loop alone
        with pytest.raises(ValueError, match=rf'{verb}\(wb\.RunSpec\(task="my_task\.py:build"\)\)'):
            call(a_task())
    if verb not in ("diagnose", "find_leaks"):
        with pytest.raises(ValueError, match=r"^[\w(]+'train\.py'\): .*(step|watch=True|watch:)"):
            call("train.py")


@pytest.mark.parametrize("verb", [*DRY_RUNS, *ON_DEVICE])
def test_a_verb_of_dry_runs_takes_every_kind_of_model(by_hand: Any, verb: str) -> None:
    torch = pytest.importorskip("torch")
    call, given, batch = getattr(wb, verb), {**DRY_RUNS, **ON_DEVICE}[verb], (torch.rand(6, 8), torch.randint(0, 4, (6,)))

    def loss(model: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    task = Task(model=lambda: torch.nn.Linear(8, 4), dataset=lambda: [(torch.rand(8), 1)] * 64, loss=loss)
    run = Run.load(by_hand(spec=RunSpec(task="fashion-mlp").to_json()).path)
    for target in ((torch.nn.Linear(8, 4), batch), (lambda: torch.nn.Linear(8, 4), batch), (task,), ("fashion-mlp",), (run,), (run.path,)):
        assert call(*target, **given) is not None
    with pytest.raises(ValueError, match=rf"a loader is not a batch: {verb}\(model, next\(iter\(loader\)\)\)"):
        call(a_step, torch.utils.data.DataLoader([1, 2]), **given)
    with pytest.raises(ValueError, match=rf'{verb}\("train\.py:build"\)'):
        call("train.py", **given)


def test_a_plan_and_a_comparison_say_where_a_batch_goes() -> None:
    torch = pytest.importorskip("torch")
    model, batch = torch.nn.Linear(8, 4), torch.rand(6, 8)
    with pytest.raises(ValueError, match=r"plan\(Linear, Tensor\): .*: plan\(model, \"DGX-H100\", batch=…\)"):
        wb.plan(model, batch)
    with pytest.raises(ValueError, match=r"compare_memory\(Linear, Tensor\): .*compare_memory\(model, changes, batch=…\)"):
        wb.compare_memory(model, batch)
    with pytest.raises(ValueError, match=r"would_fit\(Linear\): .*wb\.memory_ladder\(build, device, batch=batch\)"):
        wb.would_fit(model)


def test_a_model_of_hugging_face_with_its_batch_of_names() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 4, "bos_token_id": 0, "eos_token_id": 0}
    model, ids = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), torch.zeros(7, 4, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    for verb in (*DRY_RUNS, *ON_DEVICE):
        assert getattr(wb, verb)(model, batch, **{**DRY_RUNS, **ON_DEVICE}[verb]) is not None
    with pytest.raises(ValueError, match=r"compare_memory\(GPT2LMHeadModel, dict\): .*batch=…\)"):
        wb.compare_memory(model, batch)
    with pytest.raises(TypeError, match="a model needs its loss and its data: write def build"):
        wb.batch_plan(model, batch)  # type: ignore[call-arg, arg-type]
    with pytest.raises(ValueError, match=r"find_lr\(GPT2LMHeadModel, …\): .*then find_lr\(step, loader\)"):
        wb.find_lr(model, batch)
