"""Checkpoints go to torch.distributed.checkpoint and come from there, and nothing in such a directory is executed."""

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import workbench as wb
from tests import toy_tasks
from tests.forked import Forks
from tests.scripts.sharing import SIZES
from tests.train.test_checkpoints import spec_of
from tests.train.test_export_weights import tied
from tests.train.test_named_state import Bomb
from workbench.__main__ import main
from workbench.core import run_directory
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.task import Task, TaskError
from workbench.train.checkpoints import Checkpoints
from workbench.train.dcp import Directory, begin_with
from workbench.train.models import Gpt, MoeGpt
from workbench.train.ranks import Ranks
from workbench.train.sharded_tensors import full_tensor
from workbench.train.trainer import Trainer

SCRIPT = Path(__file__).parents[1] / "scripts" / "dcp_ranks.py"


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return weights, dict(states)


def loaded(folder: Path, model: nn.Module, **more: Any) -> tuple[torch.optim.AdamW, dict[str, Any]]:
    """What a script in one process reads: the model is changed; its optimizer, and what else it asks for."""
    optimizer = torch.optim.AdamW(model.parameters())
    weights, states = states_of(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": states, **more}
    with warnings.catch_warnings(action="ignore"):
        load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return optimizer, {name: state[name] for name in more}


SLOW = {
    "fsdp": ["zero1", "zero2", "split, fsdp", "stages"],
    "mixture": ["experts", "experts, fsdp"],
    "experts": ["experts, ddp", "experts, zero1", "experts, fsdp"],
}
ON_FOUR = {"hsdp": ["hsdp", "fsdp", "split, hsdp"], "fsdp": ["hsdp"], "experts": ["experts", "experts of 4", "experts, hsdp"]}


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [
        (2, {"fsdp": ["fsdp", "split"], "experts": ["experts"]}),
        pytest.param(2, SLOW, marks=pytest.mark.slow),
        pytest.param(4, ON_FOUR, marks=pytest.mark.slow),
    ],
)
def test_ranks_write_and_read(tmp_path: Path, forks: Forks, ranks: int, kinds: dict[str, list[str]]) -> None:
    """What a script saves begins a run, and checkpoints of runs become what the script loads, bit for bit, weights and optimizer."""
    done = forks.ranks(ranks, tmp_path, SCRIPT, tmp_path, json.dumps(kinds), env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    pairs = [(f"{kind} script", mode) for kind, modes in kinds.items() for mode in modes]
    cases = [f"{one} → {other}" for pair in pairs for one, other in (pair, pair[::-1])]
    assert json.loads((tmp_path / "out.json").read_text()) == dict.fromkeys(cases, "")
    for kind, modes in kinds.items():
        build = MoeGpt if kind in ("mixture", "experts") else Gpt
        for mode in modes:
            model, want = build(**SIZES), torch.load(tmp_path / f"{kind}, {mode}" / "whole.pt")
            optimizer, _ = loaded(tmp_path / f"{kind}, {mode}" / "dcp", model)
            for name, weight in model.named_parameters():
                assert torch.equal(weight, want[name])
                assert all(torch.equal(value, want[f"{name} {state}"]) for state, value in optimizer.state[weight].items())
        imported, want = wb.import_weights(build(**SIZES), tmp_path / f"{kind} script"), torch.load(tmp_path / f"{kind} script.pt")
        assert all(torch.equal(weight, want[name]) for name, weight in imported.named_parameters())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_of_a_checkpoint_goes_out(alone: Ranks, tmp_path: Path, parallel: str) -> None:
    knobs = {"ema": 0.5} if parallel == "ddp" else {}
    spec = spec_of(parallel=parallel, optimizer="adamw(weight_decay=0.1)", weight_decay_on="matrices", schedule="cosine", **knobs)
    trainer = Trainer(spec, toy_tasks.numbers(model=tied), alone)
    trainer.step([next(trainer.batches())])
    Checkpoints(tmp_path, alone, 6).write(6, trainer)
    folder = wb.export_weights(tmp_path, tmp_path / "out", format="dcp")
    model = tied()  # a shared weight has both of its names in a state_dict
    more = {"step": 0, "scheduler": {"last_epoch": 0, "_last_lr": []}, "spec": {"schedule": ""}}
    optimizer, more = loaded(folder, model, **more)
    assert more == {"step": 6, "scheduler": {"last_epoch": 1, "_last_lr": [trainer.lr] * 2}, "spec": {"schedule": "cosine"}}
    mine = {name: full_tensor(value) for name, value in trainer.module.state_dict().items()}
    assert all(torch.equal(value, mine[name]) for name, value in model.state_dict().items())
    assert len(optimizer.state) == len(list(model.parameters()))
    assert torch.equal(wb.import_weights(tied(), folder).get_parameter("3.weight"), model.get_parameter("3.weight"))
    assert main(["export", str(tmp_path), "dcp", str(tmp_path / "typed")]) == 0
    assert torch.equal(wb.import_weights(tied(), tmp_path / "typed").get_parameter("3.weight"), model.get_parameter("3.weight"))
    with pytest.raises(ValueError, match="it has weights already; give another folder"):
        wb.export_weights(tmp_path, folder, format="dcp")
    with pytest.raises(ValueError, match="format='pt': allowed are 'safetensors', 'dcp'"):
        wb.export_weights(tmp_path, tmp_path / "other", format="pt")  # type: ignore[arg-type]
    if knobs:
        average = wb.import_weights(tied(), wb.export_weights(tmp_path, tmp_path / "average", average=True, format="dcp"))
        assert torch.equal(average.get_parameter("3.weight"), trainer.averages["3.weight"])


def saved(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings(action="ignore"):
        save(state, checkpoint_id=folder)
    return folder


def script(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = toy_tasks.network()
    optimizer = kind(model.parameters(), **options)
    model(torch.ones(4, model.get_parameter("0.weight").shape[1])).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_run_begins_with_a_directory(tmp_path: Path, forked_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its weights; the options of the optimizer are those of the spec."""
    model, optimizer = script(lr=0.1, momentum=0.9)
    weights, states = states_of(model, optimizer)
    folder = saved(tmp_path / "dcp", {"model": weights, "optimizer": states})
    knobs = {"optimizer": "sgd(momentum=0.5)", "lr": 1e-30, "checkpoint_every": 1}
    spec = wb.RunSpec(task="tests.toy_tasks:numbers", device="cpu", micro_batch=8, steps=2, **knobs)  # type: ignore[arg-type]
    run = wb.launch(spec, resume=folder, runs_dir=tmp_path / "runs").wait(check=True)
    assert run.state == "finished"
    assert f"it took weights and states of the optimizer from {folder}" in str(run.notes)
    first = torch.load(run.path / run_directory.CHECKPOINTS / "step00000002.pt")
    assert all(torch.equal(first["module"][name], value) for name, value in weights.items())
    monkeypatch.chdir(tmp_path)
    changed = [f"{name}={value}" for name, value in knobs.items()]
    typed = ["launch", spec.task, "--resume", "dcp", "--steps", "2", "--set", "device=cpu", "micro_batch=8", *changed]
    assert main(typed) == 0
    again = max((tmp_path / "runs").iterdir()) / run_directory.CHECKPOINTS / "step00000002.pt"
    assert all(torch.equal(torch.load(again)["module"][name], value) for name, value in weights.items())
    with pytest.raises(LaunchError, match=r"a run without checkpoints reads none; add checkpoint_every="):
        wb.launch(spec.replace(checkpoint_every=None), resume=folder, runs_dir=tmp_path / "runs")
    with pytest.raises(LaunchError, match=r"it has momentum_buffer, and adamw needs exp_avg, exp_avg_sq, step.*Nothing was launched"):
        wb.launch(spec.replace(optimizer="adamw"), resume=folder, runs_dir=tmp_path / "runs")
    with pytest.raises(LaunchError, match=r"it has momentum_buffer, and sgd uses none of them"):
        wb.launch(spec.replace(optimizer="sgd"), resume=folder, runs_dir=tmp_path / "runs")
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_flattened_states_and_averages(alone: Ranks, tmp_path: Path) -> None:
    """As torchtitan saves them: the model at the top, the optimizer by names; a run with averages begins with the weights as those."""
    model, optimizer = script(torch.optim.AdamW)
    weights, states = states_of(model, optimizer, flatten_optimizer_state_dict=True)
    folder = saved(tmp_path / "dcp", {**weights, "optimizer": states})
    spec = spec_of(optimizer="adamw", ema=0.9)
    begin_with(folder, tmp_path, spec)
    trainer, checkpoints = Trainer(spec, toy_tasks.numbers(), alone), Checkpoints(tmp_path, alone, 6)
    assert checkpoints.resume(trainer, checkpoints.latest()) == 0
    for name, weight in trainer.module.named_parameters():
        assert torch.equal(weight, weights[name])
        assert torch.equal(trainer.averages[name], weights[name])
        assert all(torch.equal(value, states[f"state.{name}.{kind}"]) for kind, value in trainer.optimizer.state[weight].items())


def named(module: str, name: str) -> bytes:
    """What a pickle of protocol 4 begins with that names a class or a function."""
    return b"\x80\x04" + b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)) + b"\x93"


def malicious_index(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(folder / "bang")))


def dotted_name(folder: Path) -> None:
    """Which protocol 4 looks up inside of what may be named."""
    (folder / ".metadata").write_bytes(named("pathlib", "PosixPath.touch") + b"\x8c\x04bang\x85R.")


def changed_class(folder: Path) -> None:
    """BUILD with a class in the place of an object changes it for the whole process."""
    (folder / ".metadata").write_bytes(named("torch.distributed.checkpoint.metadata", "Metadata") + b"N}\x8c\x01x\x88s\x86b.")


def malicious_state(folder: Path) -> None:
    model, _ = script(lr=0.1)
    states = {name: {"note": Bomb(folder / "bang")} for name, _ in model.named_parameters()}
    for path in folder.iterdir():
        path.unlink()
    saved(folder, {"model": model.state_dict(), "optimizer": {"state": states, "param_groups": [{"lr": 0.1}]}})
    assert not (folder / "bang").exists()


def elsewhere(folder: Path) -> None:
    change(folder, "relative_path", lambda name: f"../{name}")


def change(folder: Path, field: str, how: Any) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    for info in index.storage_data.values():
        setattr(info, field, how(getattr(info, field)))
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def entry(how: Any) -> Any:
    """Changes what an index says of 0.weight, of 8 × 4 values."""

    def become(folder: Path) -> None:
        index = pickle.loads((folder / ".metadata").read_bytes())
        how(index.state_dict_metadata["model.0.weight"])
        (folder / ".metadata").write_bytes(pickle.dumps(index))

    return become


def chunks(*rows: int) -> Any:
    """Four rows each, which begin at these; so many bytes are stored for the first."""

    def divide(weight: Any) -> None:
        weight.chunks[:] = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([4, 4])) for row in rows]

    return entry(divide)


def sized(*size: Any) -> Any:
    def resize(weight: Any) -> None:
        weight.size = size
        weight.chunks[0].sizes = size

    return entry(resize)


def short(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("become", "why"),
    [
        (
            malicious_index,
            r"names pathlib(\._local)?\.Path\.touch, which no index of torch.distributed.checkpoint does. Nothing of it was executed",
        ),
        (dotted_name, "names pathlib.PosixPath.touch, which no index"),
        (changed_class, "its index, .metadata, cannot be read"),
        (malicious_state, "torch cannot read it: Weights only load failed"),
        (elsewhere, "names a file elsewhere: '../__0_0.distcp'"),
        (entry(lambda weight: weight.chunks.clear()), "it has 0 of .* values of model.0.weight"),
        (chunks(0, 0), "its index is damaged: parts of model.0.weight overlap"),
        (chunks(0, 2), "its index is damaged: parts of model.0.weight overlap"),
        (chunks(0, 6), "its index is damaged: a part of model.0.weight lies outside of it"),
        (chunks(0, 4), "nothing is stored of model.0.weight from 4, 0"),
        (sized(2**45, 4), "it stores .* bytes of model.0.weight, which has 562,949,953,421,312"),
        (sized(2**62, 4), "it stores .* bytes of model.0.weight"),
        (sized(-8, -4), "its index is damaged: a part of model.0.weight lies outside of it"),
        (sized(2**80, 4), "it stores .* bytes of model.0.weight"),
        (entry(lambda weight: setattr(weight.properties, "dtype", torch.quint8)), "torch cannot read it: .*"),
        (lambda folder: change(folder, "offset", str), "its index, .metadata, cannot be read: TypeError"),
        (lambda folder: change(folder, "relative_path", lambda name: ".."), "names a file elsewhere: '..'"),
        (lambda folder: change(folder, "relative_path", lambda name: name * 99), "__0_0.distcp.* is missing"),
        (lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04Nr\xff\xff\xff\x7f."), "its index, .metadata, cannot be read"),
        (short, "__0_0.distcp has .* bytes; its end is missing"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda folder: (folder / ".metadata").write_bytes(b"\x80"), "its index, .metadata, cannot be read"),
        (lambda folder: change(folder, "length", lambda length: length - 9), "torch cannot read it"),
    ],
)
def test_what_is_refused_says_why_and_executes_nothing(tmp_path: Path, become: Any, why: str) -> None:
    model, _ = script(lr=0.1)
    folder = saved(tmp_path / "dcp", {"model": model.state_dict()})
    become(folder)
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match=why):
        begin_with(folder, tmp_path / "run", spec_of())
    assert not list(tmp_path.rglob("bang"))
    assert not hasattr(Metadata, "x")


def test_what_is_not_clear_is_refused(tmp_path: Path) -> None:
    model, optimizer = script(lr=0.1, momentum=0.9)
    both = saved(tmp_path / "both", {"teacher": model.state_dict(), "student": model.state_dict()})
    with pytest.raises(ValueError, match=r"which of its entries is the model.* It has tensors in 'teacher', 'student'"):
        Directory(both)
    numbered = saved(tmp_path / "numbered", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    with pytest.raises(ValueError, match="have numbers in the place of names"):
        begin_with(numbered, tmp_path, spec_of())
    assert torch.equal(wb.import_weights(toy_tasks.network(), numbered).get_parameter("0.weight"), model.get_parameter("0.weight"))
    with pytest.raises(ValueError, match="these are weights of another model"):
        wb.import_weights(nn.Linear(2, 2), numbered)


class LikeAnOptimizer(nn.Module):
    """Its state_dict has names with state. and param_groups., as an optimizer's has."""

    def __init__(self) -> None:
        super().__init__()
        self.param_groups = nn.ParameterList([nn.Parameter(torch.ones(2))])
        self.state = nn.Linear(2, 2)


@pytest.mark.parametrize("nested", [True, False])
def test_a_model_may_have_names_as_an_optimizer_has(tmp_path: Path, nested: bool) -> None:
    model = LikeAnOptimizer()
    optimizer = torch.optim.AdamW(model.parameters())
    sum(weight.sum() for weight in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    weights, states = states_of(model, optimizer, flatten_optimizer_state_dict=not nested)
    assert Directory(saved(tmp_path / "weights", {"model": weights})).weights.keys() == weights.keys()
    both = Directory(saved(tmp_path / "both", {"model": weights, "optimizer": states}))
    assert both.weights.keys() == weights.keys()
    assert {name for name, _ in both.states} == weights.keys()
    assert {kind for _, kind in both.states} == {"step", "exp_avg", "exp_avg_sq"}


def test_lists_of_states_are_refused(tmp_path: Path) -> None:
    model, optimizer = script(torch.optim.AdamW)
    weights, states = states_of(model, optimizer)
    lists = {name: {"factors": [each["exp_avg"], each["exp_avg"]]} for name, each in states["state"].items()}
    folder = saved(tmp_path / "dcp", {"model": weights, "optimizer": {**states, "state": lists}})
    with pytest.raises(ValueError, match=r"the state factors of 0.weight is a list or a dict, of which nothing is read here"):
        begin_with(folder, tmp_path, spec_of())
    assert torch.equal(wb.import_weights(toy_tasks.network(), folder).get_parameter("0.weight"), weights["0.weight"])


def begun(folder: Path, run_dir: Path, alone: Ranks, task: Task) -> Trainer:
    """A trainer whose optimizer is the task's own, after it has begun with a directory."""
    run_dir.mkdir()
    begin_with(folder, run_dir, spec_of())
    trainer, checkpoints = Trainer(spec_of(), task, alone), Checkpoints(run_dir, alone, 6)
    assert checkpoints.resume(trainer, checkpoints.latest()) == 0
    return trainer


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("rest", [{"param_groups": [{"lr": 0.1}]}, {}])
def test_names_with_the_prefix_of_a_wrapper(alone: Ranks, tmp_path: Path, prefix: str, rest: dict[str, Any]) -> None:
    """Such as DDP's, which a script has left in the names of the optimizer's states and not in those of the weights."""
    model, optimizer = script(torch.optim.AdamW)
    weights, states = states_of(model, optimizer)
    wrapped = {f"{prefix}{name}": value for name, value in states["state"].items()}
    folder = saved(tmp_path / "dcp", {"net": weights, "optimizer": {"state": wrapped, **rest}})
    trainer = begun(folder, tmp_path / "run", alone, toy_tasks.numbers(optimizer="adamw"))
    for name, weight in trainer.module.named_parameters():
        assert all(torch.equal(value, states["state"][name][kind]) for kind, value in trainer.optimizer.state[weight].items())
    wrapped = {name.replace("0.bias", "0.shift"): value for name, value in wrapped.items()}
    folder = saved(tmp_path / "strange", {"model": weights, "optimizer": {"state": wrapped, **rest}})
    with pytest.raises(ValueError, match=r"its optimizer has states of \S*0.weight, which is no name in its model, such as"):
        begin_with(folder, tmp_path, spec_of())


@pytest.mark.slow
def test_states_that_do_not_fit_the_optimizer_of_the_task(alone: Ranks, tmp_path: Path) -> None:
    adam, sgd = toy_tasks.numbers(optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True)), toy_tasks.numbers()
    model, optimizer = script(lr=0.1, momentum=0.9)
    weights, states = states_of(model, optimizer)
    folder = saved(tmp_path / "sgd", {"model": weights, "optimizer": states})
    with pytest.raises(
        TaskError, match=r"sgd: it is of another optimizer: it has momentum_buffer, and AdamW needs exp_avg, exp_avg_sq, step"
    ):
        begun(folder, tmp_path / "1", alone, adam)
    weights, states = states_of(*script(torch.optim.AdamW))
    folder = saved(tmp_path / "adam", {"model": weights, "optimizer": states})
    with pytest.raises(TaskError, match=r"it has exp_avg, exp_avg_sq, step, and SGD uses none of them. To take the weights alone"):
        begun(folder, tmp_path / "2", alone, sgd)
    some = {name: value for name, value in states["state"].items() if name != "2.bias"}
    part = saved(tmp_path / "part", {"model": weights, "optimizer": {**states, "state": some}})
    with pytest.raises(TaskError, match=r"it has no states of 2.bias, and has those of other parameters. To take the weights alone"):
        begun(part, tmp_path / "3", alone, adam)

    def frozen() -> nn.Module:
        model = toy_tasks.network()
        model.get_parameter("2.bias").requires_grad_(False)
        return model

    begun(part, tmp_path / "4", alone, toy_tasks.numbers(model=frozen, optimizer="adamw"))
    wrong = {**states["state"], "0.bias": {**states["state"]["0.bias"], "exp_avg": torch.zeros(7)}}
    folder = saved(tmp_path / "wrong", {"model": weights, "optimizer": {**states, "state": wrong}})
    with pytest.raises(TaskError, match=r"its exp_avg of 0.bias has the shape \(7,\), the parameter has \(8,\)"):
        begun(folder, tmp_path / "5", alone, adam)


class Scaled(nn.Module):
    """Has a parameter without dimensions, as CLIP has."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.scale = toy_tasks.network(), nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.network(inputs) * self.scale
        return outputs


class NeedsMore(torch.optim.SGD):
    """Cannot be made from parameters and options alone, so nobody knows which states it needs."""

    def __init__(self, parameters: Any, model: nn.Module) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda weights: NeedsMore(weights, nn.Linear(1, 1))])
def test_parameters_and_optimizers_of_any_kind(alone: Ranks, tmp_path: Path, kind: Any) -> None:
    model = Scaled()
    optimizer = kind(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    weights, states = states_of(model, optimizer)
    folder = saved(tmp_path / "dcp", {"model": weights, "optimizer": states})
    trainer = begun(folder, tmp_path / "run", alone, toy_tasks.numbers(model=Scaled, optimizer=kind))
    for name, weight in trainer.module.named_parameters():
        assert all(torch.equal(value, states["state"][name][kind]) for kind, value in trainer.optimizer.state[weight].items())


def test_weights_of_another_shape(alone: Ranks, tmp_path: Path) -> None:
    folder = saved(tmp_path / "dcp", {"model": nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)).state_dict()})
    with pytest.raises(TaskError, match=r"it is of another model: its 0.weight has the shape \(9, 4\), this model's has \(8, 4\)") as error:
        begun(folder, tmp_path / "run", alone, toy_tasks.numbers())
    assert str(folder) in str(error.value)
    assert "damaged" not in str(error.value)


@pytest.mark.parametrize("name", ["adam", "adafactor", "muon", "lars", "lamb", "rmsprop", "sgd(momentum=0.9)", "sgd", "adagrad"])
def test_states_of_any_optimizer_go_out_and_in(alone: Ranks, tmp_path: Path, name: str) -> None:
    task = toy_tasks.numbers(optimizer=name)
    trainer = Trainer(spec_of(), task, alone)
    trainer.step([next(trainer.batches())])
    Checkpoints(tmp_path, alone, 6).write(6, trainer)
    again = begun(wb.export_weights(tmp_path, tmp_path / "out", format="dcp"), tmp_path / "run", alone, task)
    before, after = (each.optimizer.state_dict()["state"] for each in (trainer, again))
    assert before.keys() == after.keys()
    for number, values in before.items():
        assert all(
            value is None or torch.equal(torch.as_tensor(value), torch.as_tensor(after[number][kind])) for kind, value in values.items()
        )
