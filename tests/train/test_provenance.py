"""What a training depends on beside its spec is recorded, and a run that goes on is compared with it."""

import functools
from pathlib import Path

import pytest
import torch

from tests import toy_tasks
from workbench.batch.measure.noise_watch import NoiseLog
from workbench.core import run_directory
from workbench.memory.measure.at_oom import held
from workbench.runs.spec import RunSpec
from workbench.train.loop import train
from workbench.train.ranks import Ranks

SPEC = RunSpec(task="toy", device="cpu", micro_batch=8, checkpoint_every=6)


class Changed(toy_tasks.Numbers):
    def __init__(self, added: float, noise: float) -> None:
        super().__init__()
        self.targets += added
        self.noise = noise

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] + self.noise * torch.randn(4), self.targets[index]


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "workers"), [(0.0, 0), (0.1, 0), (0.1, 1)])
def test_data_of_the_same_length_with_another_content_are_said(
    alone: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], noise: float, workers: int
) -> None:
    """Pictures that are augmented differ by themselves: their targets do not."""
    for steps, added, said in ((12, 0.0, False), (18, 0.0, False), (24, 0.5, True), (30, 0.5, True)):
        task = toy_tasks.numbers(dataset=functools.partial(Changed, added, noise))
        train(SPEC.replace(steps=steps, num_workers=workers), task, alone, tmp_path, held=held, noise_log=NoiseLog)
        assert ("the content of the data's first samples differs from before" in capsys.readouterr().out) == said, steps


def test_variables_that_imported_files_name_are_recorded(alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This file is one, and names them."""
    for name in ("NAMED_IN_A_FILE", "NAMED_TOKEN", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("NAMED_" + "NOWHERE", "0")
    train(SPEC.replace(steps=6), toy_tasks.numbers(), alone, tmp_path, held=held, noise_log=NoiseLog)
    kept = run_directory.read_json(tmp_path / run_directory.ENVIRONMENT)["variables"]
    assert {name: value for name, value in kept.items() if name.startswith(("NAMED", "LOCAL"))} == {"NAMED_IN_A_FILE": "0"}
