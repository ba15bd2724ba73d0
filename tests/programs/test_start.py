"""How a rank of ours starts: what is there before the task is out of the collector's way, and torch's compiler is not there."""

import gc
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.core import run_directory
from workbench.programs import start
from workbench.programs.start import libraries
from workbench.runs.entrypoints import CHOOSE_MICRO_BATCH, COUNTING, ESTIMATE_WORKER, TORCHRUN, TRAIN, entrypoint
from workbench.runs.spec import RunSpec
from workbench.train import lazy_dynamo

PROGRAM = """
import gc, json, sys, weakref
import torch

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Task: ...

class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))

def trained(kind, compiled):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = kind(model.parameters(), lr=0.1)
    forward = torch.compile(model, backend="eager") if compiled else model
    update = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(torch.ones(4, 3)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        update()
        assert not model.module.weight.grad.requires_grad and torch.is_grad_enabled()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    return [*map(float, model.module.weight.flatten())]

def losses(compiled):
    # compiled, AdamW calculates in another order
    return [trained(torch.optim.SGD, compiled), trained(torch.optim.AdamW, False)]

def code():
    functions = torch.optim.SGD.step.__wrapped__, torch.optim.Optimizer.zero_grad
    codes = [function.__code__ for function in functions]
    return [[code.co_filename, code.co_name, sorted({*code.co_names} & {"graph_break", "disable"})] for code in codes]

def main():
    task = Task()
    task.itself, dead = task, weakref.ref(task)
    frozen = gc.get_freeze_count()
    seen = any(one is task for one in gc.get_objects())
    del task
    swept = len(gc.get_objects())
    gc.collect()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with Mode():
        before = losses(False)
    loaded, replaced = "torch._dynamo" in sys.modules, code()
    after = losses(True)
    dist.destroy_process_group()
    collector = [gc.isenabled(), frozen, swept, seen, dead() is None]
    print(json.dumps([sys.argv, collector, loaded, before, after, replaced, code(), torch._dynamo is sys.modules["torch._dynamo"]]))
"""


def test_the_first_things_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "program_of_a_rank.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, *entrypoint("program_of_a_rank", tmp_path / "one", tmp_path / "two")],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=True,
    )
    argv, (enabled, frozen, swept, seen, dead), loaded, before, after, replaced, code, same = json.loads(done.stdout)
    assert argv == ["program_of_a_rank", f"{tmp_path / 'one'}", f"{tmp_path / 'two'}"]
    # libraries are frozen, and what a task makes is collected
    assert enabled
    assert frozen > 100 * swept
    assert seen
    assert dead
    # a training loads no compiler; compiled, it does the same, and torch's functions are its own again
    assert not loaded
    assert before == after
    assert [(Path(file).name, *rest) for file, *rest in code] == [
        ("optimizer.py", "_use_grad", ["graph_break"]),
        ("_compile.py", "inner", ["disable"]),
    ]
    assert replaced == [[file, name, []] for file, name, _ in code]  # traces show torch's own
    assert same


def test_functions_of_a_torch_that_is_different_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def disable(fn: Any, recursive: Any) -> Any:
        def inner(*args: Any) -> Any:
            return fn(recursive, *args)

        return inner

    changed, plain = disable(max, 2), (lambda: lambda: 0)
    own = changed.__code__
    monkeypatch.setattr(lazy_dynamo, "_compile", types.SimpleNamespace(_disable_dynamo=disable))
    monkeypatch.setattr(lazy_dynamo, "optimizer", types.SimpleNamespace(_use_grad_for_differentiable=plain))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(torch, "_dynamo", None, raising=False)
    lazy_dynamo.defer()  # loaded: nothing to do
    assert torch._dynamo is None
    monkeypatch.delitem(sys.modules, lazy_dynamo.NAME)
    lazy_dynamo.defer()
    assert changed.__code__ is own
    assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"


def test_what_a_training_loads_anyway_is_loaded_first(tmp_path: Path) -> None:
    def of(**knobs: Any) -> set[str]:
        spec = RunSpec(task="clipart-resnet", nproc_per_node=4, **knobs).to_json()
        run_directory.write_json(tmp_path / run_directory.RUN_JSON, {"spec": spec})
        return set(libraries(TRAIN, str(tmp_path)))

    compiler = "torch._dynamo"
    assert of() == set(libraries(TRAIN, str(tmp_path / "missing"))) == set()
    assert of(parallel="zero1") == {"torch.distributed.optim"}
    assert of(parallel="fsdp") == of(parallel="zero2") == {compiler, "torch.distributed.fsdp"}
    assert of(tensor_parallel=2) == {compiler, "torch.distributed.tensor.parallel"}
    assert of(checkpointing="full") == {compiler}
    assert compiler in [*libraries(CHOOSE_MICRO_BATCH)] == [*libraries(ESTIMATE_WORKER, "1234")]
    assert not [*libraries(COUNTING, "clipart-resnet")]
    run_directory.write_json(tmp_path / run_directory.RUN_JSON, {"spec": {"kind": "script"}})
    assert not [*libraries(TRAIN, str(tmp_path))]


@pytest.mark.parametrize("program", [TORCHRUN, TRAIN])
def test_torchrun_alone_does_without_what_computes_tensors_that_have_no_data(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    loaded = []
    there = types.SimpleNamespace(main=lambda: loaded.append(sys.modules.get(start.NOT_COMPUTED)))
    monkeypatch.setattr(start.importlib, "import_module", lambda _: there)
    monkeypatch.setattr(start, "gc", types.SimpleNamespace(disable=lambda: None, freeze=lambda: None, enable=lambda: None))
    monkeypatch.setattr(start, "use_multiprocessing_folder", lambda: None)
    monkeypatch.setattr(lazy_dynamo, "defer", lambda: None)
    monkeypatch.setattr(sys, "argv", ["start", program])
    monkeypatch.delitem(sys.modules, start.NOT_COMPUTED)
    start.main()
    assert [type(module) for module in loaded] == [start.Later if program == TORCHRUN else type(None)]


def test_what_is_asked_for_after_all_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loaded_later.py").write_text("value = 3")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "loaded_later", later := start.Later("loaded_later"))
    assert not hasattr(later, "__file__")  # as `inspect` asks of all modules
    assert sys.modules["loaded_later"] is later
    from loaded_later import value

    assert (value, later.value) == (3, 3)
    assert sys.modules["loaded_later"] is not later


def test_an_import_that_fails_is_on_record(tmp_path: Path) -> None:
    (tmp_path / "program_of_a_rank.py").write_text("raise ImportError('no such library')")
    done = subprocess.run(
        [sys.executable, *entrypoint("program_of_a_rank", tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
            run_directory.ENV_RUN_DIR: str(tmp_path),
            "RANK": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    found = run_directory.read_json(tmp_path / run_directory.ERRORS / "rank1.json")
    assert (found["rank"], found["message"]) == (1, "ImportError: no such library")
    assert "program_of_a_rank.py" in found["traceback"]


@pytest.mark.parametrize(("program", "recorded"), [(TRAIN, True), (CHOOSE_MICRO_BATCH, False), (ESTIMATE_WORKER, False), (COUNTING, False)])
def test_an_import_that_fails_in_a_worker_is_not_the_rank_s_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, recorded: bool
) -> None:
    def broken(name: str) -> Any:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(start.importlib, "import_module", broken)
    monkeypatch.setattr(start.gc, "disable", lambda: None)
    monkeypatch.setattr(sys, "argv", ["start", program])
    monkeypatch.setenv(run_directory.ENV_RUN_DIR, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ImportError, match=program):
        start.main()
    assert (tmp_path / run_directory.ERRORS / "rank0.json").exists() == recorded


def test_what_keeps_torchrun_from_starting_is_no_rank_s_doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while it loaded torch was recorded as one of rank 0, who did not exist yet."""

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv(run_directory.ENV_RUN_DIR, str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    for program, recorded in ((TORCHRUN, []), (TRAIN, ["rank0.json"])):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["start", program, str(tmp_path)])
            patch.setattr(start.importlib, "import_module", interrupted)
            try:
                with pytest.raises(KeyboardInterrupt):
                    start.main()
            finally:
                gc.enable()
        assert sorted(path.name for path in tmp_path.glob(f"{run_directory.ERRORS}/*")) == recorded
