"""Programs of the frameworks that people use, as the how-to pages have them: watched, diagnosed, traced, and estimated."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.conftest import HandMade
from tests.forked import Forks
from tests.test_docs import PAGES, ROOT, blocks
from workbench.diagnosis.analysis.script_remedies import SETTINGS_OF
from workbench.diagnosis.analysis.verdict import VERDICTS
from workbench.runs.entrypoints import SCRIPT, spec_entrypoint
from workbench.runs.profile import Profile
from workbench.runs.spec import ScriptSpec

SCRIPTS = {
    block.title: block.code for page in ("frameworks", "training-loops") for block in blocks(PAGES / f"how-to/{page}.md") if block.title
}
NEEDS = ("transformers", "accelerate", "lightning", "timm")
SLOW_LOADER = """\
import time, torch.utils.data._utils.fetch as fetch
for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
    kind.fetch = (lambda plain: lambda self, index: (time.sleep(0.1), plain(self, index))[1])(kind.fetch)
"""
"""Makes each batch of a DataLoader of the script slow."""
SLOW_FUNCTION = {
    "train_nanogpt.py": ("def get_batch():\n", "    import time; time.sleep(0.1)\n"),
    "train_generator.py": ("    for _ in range(60):\n", "        import time; time.sleep(0.1)\n"),
}
"""Script without a DataLoader → the line after which its batches become slow, and what is put there."""


def planted(name: str) -> str:
    """A script of the pages, with slow batches."""
    if name not in SLOW_FUNCTION:
        return SLOW_LOADER + SCRIPTS[name]
    line, pause = SLOW_FUNCTION[name]
    assert line in SCRIPTS[name]
    return SCRIPTS[name].replace(line, line + pause)


def can_run(name: str, folder: Path, forks: Forks) -> bool:
    """Are the packages here that a script imports, and do they load?"""
    needed = [package for package in NEEDS if f"import {package}" in SCRIPTS[name] or f"from {package}" in SCRIPTS[name]]
    if "timm" in needed and find_spec("timm"):  # torchvision of another build than torch cannot be imported
        return not forks.run(folder, "-c", "import timm").returncode
    return all(find_spec(package) for package in needed)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_is_watched_diagnosed_and_traced(name: str, by_hand: Callable[..., HandMade], forks: Forks, tmp_path: Path) -> None:
    """As a launch runs it, but in a fork; the pages launch three of them (test_docs.py)."""
    if not can_run(name, tmp_path, forks):
        pytest.skip(f"{name} needs packages that are not installed, or do not load")
    (tmp_path / name).write_text(planted(name))
    spec = ScriptSpec(script=str(tmp_path / name), watch=True, profile=Profile(steps=3))
    made = by_hand(spec=spec.to_json())
    words = spec_entrypoint(spec, made.path)
    done = forks.program(SCRIPT, 1, tmp_path, *words[words.index(SCRIPT) + 1 :], launched=made.path)
    assert done.returncode == 0, done.stderr
    run = wb.Run.load(made.ended("finished").path)
    assert run.state == "finished", run.error
    timeline = run.timelines[0]
    phases = {phase: timeline.mean(phase) for phase in ("data_wait", "forward", "backward", "optimizer", "other")}
    assert len(timeline.steps) >= 20, timeline
    assert min(phases[phase] for phase in ("forward", "backward", "optimizer")) > 0
    assert sum(phases.values()) == pytest.approx(timeline.mean(), rel=0.01)
    where = "other" if name in SLOW_FUNCTION else "data_wait"
    assert 0.09 < phases[where] / (2 if name == "train_nanogpt.py" else 1) < 0.2, timeline  # it accumulates over two batches
    diagnosis = wb.diagnose(run)
    if where == "data_wait":
        assert (diagnosis.verdict, diagnosis.cause) == ("input-bound", "loader"), diagnosis
        assert wb.trace(run).breakdown().mean("data_wait") > 0.09
    else:
        assert (diagnosis.verdict, diagnosis.cause) == ("inconclusive", "time outside all phases"), diagnosis
        assert "no DataLoader was seen, so that is making the batches" in diagnosis.why
        assert wb.trace(run).breakdown().mean("compute") > 0


def test_the_settings_of_the_frameworks_exist() -> None:
    transformers = pytest.importorskip("transformers")
    pytorch = pytest.importorskip("lightning.pytorch")
    known = {
        "TrainingArguments": set(transformers.TrainingArguments.__dataclass_fields__),
        "Trainer": set(inspect.signature(pytorch.Trainer).parameters),
        "ModelCheckpoint": set(inspect.signature(pytorch.callbacks.ModelCheckpoint).parameters),
        "DataLoader": set(inspect.signature(torch.utils.data.DataLoader).parameters),
    }
    calls = [call for _, settings in SETTINGS_OF.values() for text in settings.values() for call in re.findall(r"(\w+)\(([^)]*)\)", text)]
    assert len(calls) >= 14
    for name, arguments in calls:
        assert set(re.findall(r"(\w+)=", arguments)) <= known[name], name


# --- memory


def cross_entropy(model: Any, batch: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def imported(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script of the pages as a module."""
    (folder / name).write_text(SCRIPTS[name])
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module(Path(name).stem)


def measured(build: Callable[[], Any], batch: Any, loss: Callable[[Any, Any], Any]) -> wb.MemoryBreakdown:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return wb.measure_memory(step, [batch] * 4)


@pytest.mark.filterwarnings("ignore")
def test_an_estimate_of_nanogpt_is_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nanogpt = imported("train_nanogpt.py", tmp_path, monkeypatch)
    batch = nanogpt.get_batch()

    def loss(model: Any, batch: Any) -> Any:
        loss.logits, value = model(*batch)  # type: ignore[attr-defined]
        return value

    estimate = wb.estimate_memory(nanogpt.GPT, batch, loss=loss, device="cpu", steps=3)
    assert estimate.total == pytest.approx(measured(nanogpt.GPT, batch, loss).total, rel=0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_estimate_of_a_lightning_module_is_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning", reason="needs lightning (pip install lightning)")
    net = imported("train_lightning.py", tmp_path, monkeypatch).Net
    batch = (torch.randn(32, 64), torch.randint(0, 10, (32,)))

    def loss(model: Any, batch: Any) -> Any:
        return model.training_step(batch, 0)

    estimate = wb.estimate_memory(net, batch, device="cpu", steps=3)  # by its own training_step and configure_optimizers
    assert estimate.total == pytest.approx(measured(net, batch, loss).total, rel=0.02)


TIMM = Path(sys.prefix) / "timm"
"""Where `make slow` installs timm and torchvision."""
IMPORT_TIMM = """\
import sys, torch
try:
    import torchvision
except RuntimeError:  # built for another torch: its operators, which no model of timm calls, are declared here
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]: del sys.modules[name]
    for name in ("nms", "qnms"): torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
"""
TIMM_TASK = """
import timm, timm.loss, workbench as wb

def build(name="resnet10t", **more):
    data = torch.utils.data.TensorDataset(torch.randn(160, 3, 32, 32), torch.randint(0, 10, (160,)))
    smooth = timm.loss.LabelSmoothingCrossEntropy()
    model = lambda: timm.create_model(name, num_classes=10, **more)
    loss = lambda model, batch: smooth(model(batch[0]), batch[1])
    return wb.Task(model=model, dataset=lambda: data, loss=loss, optimizer="adamw(lr=0.001)")

def vit():
    return build("vit_tiny_patch16_224", img_size=32)
"""
USE_TIMM = """
import json, my_timm, workbench as wb

if __name__ == "__main__":
    for name in ("build", "vit"):
        spec = wb.RunSpec(task=f"my_timm.py:{name}", device="cpu", micro_batch=8)
        weights = 4 * sum(weight.numel() for weight in getattr(my_timm, name)().model().parameters())
        estimate, fits = wb.estimate_memory(spec, device="cpu"), wb.estimate_memory(spec, device="T4").fits("T4")
        found = {"weights": weights, "parameters": estimate.parameters, "estimate": estimate.total, "fits": bool(fits)}
        print(json.dumps(found | {"measured": wb.measure_memory(spec).total}))
    run = wb.launch(spec, steps=12).wait()
    print(json.dumps({"state": run.state, "error": str(run.error), "steps": run.progress[0]}))
    print(json.dumps({"verdict": wb.diagnose(spec, budget_s=15).verdict}))
    script = wb.launch("train_timm.py", watch=True).wait()
    print(json.dumps({"state": script.state, "error": str(script.error), "steps": script.timelines[0].count}))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_models_of_timm_are_estimated_launched_and_diagnosed(tmp_path: Path) -> None:
    """Without weights from elsewhere. In processes of their own, since a torchvision of another build breaks other imports."""
    if not (TIMM / "timm").is_dir():
        pytest.skip("timm is not installed (make slow does it)")
    (tmp_path / "my_timm.py").write_text(IMPORT_TIMM + TIMM_TASK)
    (tmp_path / "train_timm.py").write_text(IMPORT_TIMM + SCRIPTS["train_timm.py"])
    (tmp_path / "use_timm.py").write_text(USE_TIMM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TIMM), str(ROOT)))}
    done = subprocess.run([sys.executable, "use_timm.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *models, run, diagnosis, script = map(json.loads, done.stdout.splitlines())
    assert len(models) == 2
    for found in models:
        assert found["parameters"] == found["weights"]
        assert found["estimate"] == pytest.approx(found["measured"], rel=0.02)
        assert found["fits"]
    assert (run["state"], run["steps"]) == ("finished", 12), run
    assert diagnosis["verdict"] in VERDICTS
    assert (script["state"], script["steps"] > 5) == ("finished", True), script


def test_an_estimate_of_a_gan_is_what_is_measured() -> None:
    from torch import nn

    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 784))
            self.critic = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))

    def loss(gan: Any, real: Any) -> Any:
        fake = gan.generator(torch.randn(len(real), 16))
        return gan.critic(real).mean() + gan.critic(fake.detach()).mean() - gan.critic(fake).mean()

    gan = Gan()
    optimizers = [torch.optim.Adam(part.parameters()) for part in (gan.generator, gan.critic)]

    def step(real: Any) -> None:
        fake = gan.generator(torch.randn(len(real), 16))
        optimizers[1].zero_grad()
        (gan.critic(real).mean() + gan.critic(fake.detach()).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-gan.critic(fake).mean()).backward()
        optimizers[0].step()

    batch = torch.randn(32, 784)
    estimate = wb.estimate_memory(Gan, batch, loss=loss, optimizer="adam", device="cpu", steps=3)
    assert estimate.total == pytest.approx(wb.measure_memory(step, [batch] * 4).total, rel=0.1)
