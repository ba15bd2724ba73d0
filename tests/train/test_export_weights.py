"""Weights leave a run as safetensors in the layout of the Hugging Face hub, and come back."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import workbench as wb
from tests import toy_tasks
from tests.train.test_checkpoints import names, spec_of
from workbench.runs.spec import ScriptSpec
from workbench.train.checkpoints import Checkpoints
from workbench.train.ranks import Ranks
from workbench.train.sharded_tensors import full_tensor
from workbench.train.trainer import Trainer

safetensors = pytest.importorskip("safetensors.torch")


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_weights_go_out_and_come_back(alone: Ranks, tmp_path: Path, parallel: str) -> None:
    knobs = {"ema": 0.5} if parallel == "ddp" else {}
    trainer = Trainer(spec_of(parallel=parallel, **knobs), toy_tasks.numbers(model=tied), alone)
    before = next(trainer.module.parameters()).detach().clone()
    trainer.step([next(trainer.batches())])
    Checkpoints(tmp_path, alone, 6).write(6, trainer)
    folder = wb.export_weights(tmp_path, tmp_path / "out")
    files = safetensors.load_file(folder / "model.safetensors")
    assert "1.weight" not in files  # the hub keeps a tied weight once
    model = wb.import_weights(tied(), folder)
    mine = {name: full_tensor(value) for name, value in trainer.module.state_dict().items()}
    assert all(torch.equal(value, mine[name]) for name, value in model.state_dict().items())
    split = wb.export_weights(tmp_path, tmp_path / "split", file_bytes=30)
    index = json.loads((split / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    again = wb.import_weights(tied(), split)
    assert all(torch.equal(value, mine[name]) for name, value in again.state_dict().items())
    with pytest.raises(ValueError, match=r"out2.safetensors': give the folder that the files are written into, such as '.*out2'"):
        wb.export_weights(tmp_path, tmp_path / "out2.safetensors")
    with pytest.raises(ValueError, match="it has weights already; give another folder"):
        wb.export_weights(tmp_path, split)
    if parallel == "ddp":
        average = safetensors.load_file(wb.export_weights(tmp_path, tmp_path / "average", average=True) / "model.safetensors")
        assert torch.allclose(average["0.weight"], (before + files["0.weight"]) / 2)
        assert average.keys() == files.keys()
    else:
        with pytest.raises(ValueError, match=r"keeps no averaged weights; launch it with ema=0\.999"):
            wb.export_weights(tmp_path, tmp_path / "average", average=True)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    safetensors.save_file({"weight": torch.zeros(3, 2), "more": torch.zeros(1)}, tmp_path / "model.safetensors")
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    words = r"1 are missing, such as bias; 1 are unknown here, such as more; weight is \(3, 2\) there and \(2, 2\) here"
    with pytest.raises(ValueError, match=words):
        wb.import_weights(model, tmp_path)
    assert torch.equal(model.weight, before)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="has no checkpoint to export: launch it with checkpoint_every="):
        wb.export_weights(tmp_path, tmp_path / "out")
    info = {"spec": ScriptSpec(script="train.py").to_json()}
    (tmp_path / "run.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match="runs of scripts keep their own checkpoints; only a task's can be exported"):
        wb.export_weights(tmp_path, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"wb\.export_weights needs the package safetensors: pip install safetensors"):
        wb.export_weights(tmp_path, tmp_path / "out")


@pytest.mark.slow
def test_a_model_of_transformers_is_loaded_by_from_pretrained(alone: Ranks, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16)
    task = wb.Task(
        model=lambda: transformers.GPT2LMHeadModel(config), dataset=lambda: [torch.arange(8)] * 64,
        loss=lambda model, batch: model(input_ids=batch, labels=batch).loss,
    )  # fmt: skip
    trainer = Trainer(spec_of(parallel="fsdp"), task, alone)
    trainer.step([next(trainer.batches())])
    Checkpoints(tmp_path, alone, 6).write(6, trainer)
    folder = wb.export_weights(tmp_path, tmp_path / "out", config=config)
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    back = wb.import_weights(transformers.GPT2LMHeadModel(config), folder)
    for name, value in trainer.module.state_dict().items():
        assert torch.equal(full_tensor(value), loaded.state_dict()[name])
        assert torch.equal(full_tensor(value), back.state_dict()[name])


def test_the_best_checkpoint_is_kept_and_exported(alone: Ranks, tmp_path: Path) -> None:
    trainer, checkpoints = Trainer(spec_of(), toy_tasks.numbers(model=tied), alone), Checkpoints(tmp_path, alone, 1)
    for step, loss in enumerate((3.0, 1.0, 2.0, float("nan"), 1.0, None), 1):
        checkpoints.write(step, trainer, score=loss)
        if step == 2:
            wanted = trainer.module[3].weight.detach().clone()
        trainer.step([next(trainer.batches())])
    assert names(tmp_path) == ["step00000002.pt", "step00000005.pt", "step00000006.pt"]
    again = Checkpoints(tmp_path, alone, 1)
    again.resume(trainer, again.latest())
    again.write(7, trainer, score=1.5)
    assert names(tmp_path) == ["step00000002.pt", "step00000006.pt", "step00000007.pt"]
    assert torch.equal(wb.import_weights(tied(), wb.export_weights(tmp_path, tmp_path / "out", best=True))[3].weight, wanted)
    (tmp_path / "other").mkdir()
    Checkpoints(tmp_path / "other", alone, 1).write(1, trainer)
    with pytest.raises(ValueError, match=r"best=True: .* was not validated where checkpoints were written"):
        wb.export_weights(tmp_path / "other", tmp_path / "out2", best=True)
