"""What a dry run answers where a program asks for values: the step is an ordinary one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import workbench as wb
from workbench.memory.estimate.fake_tensors import fake_tensors


class Asking(nn.Module):
    """Refuses to go on if a question is not answered as in an ordinary step."""

    def __init__(self, question: object) -> None:
        super().__init__()
        self.layer, self.question = nn.Linear(4, 4), question

    def forward(self, x: Tensor) -> Tensor:
        if not self.question(x):  # type: ignore[operator]
            raise ValueError("not an ordinary step")
        out: Tensor = self.layer(x).sum()
        return out


ORDINARY = {
    "all of a mask": lambda x: (x == 1).all(),
    "nothing masked": lambda x: not (x == 0).any(),
    "one after the other": lambda x: (x.cumsum(0) == 0).all(),
    "classes": lambda x: not x.long().max() >= 32,
    "classes below": lambda x: x.long().max() < 32,
    "none negative": lambda x: not (x < 0).any(),
    "all positive": lambda x: (x > 0).all(),
    "no overflow": lambda x: not torch.isinf(x).any() and not torch.isnan(x).any() and torch.isfinite(x).all(),
    "none counted": lambda x: not torch.isnan(x).sum() > 0,
    "some counted": lambda x: (x > 0).sum() > 0,
    "a mask of its own": lambda x: x.bool().all(),
    "numbers": lambda x: x.sum().item() == 1,
}


@pytest.mark.parametrize("question", ORDINARY.values(), ids=list(ORDINARY))
def test_the_step_is_an_ordinary_one(question: object) -> None:
    assert wb.estimate_memory(lambda: Asking(question), torch.randn(2, 4), device="cpu").total


def test_who_asks_for_fakes_finds_none() -> None:
    before = torch._subclasses.FakeTensor
    with fake_tensors():
        fake = torch.zeros(2)
        assert isinstance(fake, FakeTensor)  # torch's own
        assert not isinstance(fake, torch._subclasses.FakeTensor)
        assert issubclass(FakeTensor, torch._subclasses.FakeTensor)
        within = torch._subclasses.FakeTensor
    assert torch._subclasses.FakeTensor is before
    assert isinstance(fake, within), "who kept the class is told the truth afterwards"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_optimizer_does_not_ask_the_gpu(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Whether a graph is being captured: the answer takes a context there, of half a GiB."""
    asked: list[str] = []
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        monkeypatch.setattr(torch.optim.Optimizer, name, lambda self, name=name: asked.append(name), raising=False)
    own = vars(torch.optim.Optimizer).copy()
    wb.estimate_memory(nn.Linear(4, 2), torch.zeros(3, 4), optimizer="adam", device=device)
    assert not asked
    assert vars(torch.optim.Optimizer) == own


def test_it_is_put_back_after_an_error() -> None:
    before = torch._subclasses.FakeTensor
    with pytest.raises(ZeroDivisionError), fake_tensors():
        raise ZeroDivisionError
    assert torch._subclasses.FakeTensor is before


class Masked(nn.Module):
    """As timm's vision transformers: what comes second is a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x * mask[:, :4]
        out: Tensor = self.layer(x)
        return out


class Named(Masked):
    """What comes second is the classes."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:  # type: ignore[override]
        out: Tensor = self.layer(x)
        return out if targets is None else nn.functional.cross_entropy(out, targets)


def test_classes_are_no_mask() -> None:
    batch = torch.randn(2, 4), torch.tensor([0, 1])
    assert "cross-entropy of the output and the batch's last part" in " ".join(wb.estimate_memory(Masked, batch, device="cpu").notes)
    assert "the output itself" in " ".join(wb.estimate_memory(Named, batch, device="cpu").notes)
    assert "mean of the output" in " ".join(wb.estimate_memory(Masked, (batch[0], torch.ones(2, 4)), device="cpu").notes)


@pytest.mark.parametrize(("device", "noted"), [("cpu", True), ("H100", False)])
def test_what_convolutions_on_a_cpu_take_inside_is_noted_as_left_out(device: str, noted: bool) -> None:
    """The estimate of a small U-Net was 15 % below the measured peak, without a word."""
    found = wb.estimate_memory(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), torch.randn(2, 3, 8, 8), device=device)
    assert any("convolutions on the CPU: what oneDNN takes" in note for note in found.notes) is noted


def test_a_list_of_values_is_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate was refused for `.tolist()` of 64 × 64 values of each picture, as if it were a loop without an end."""
    monkeypatch.setattr("workbench.memory.estimate.dry_run.ENDLESS", 20)

    def lists(x: Tensor) -> bool:
        total: Any = x.sum().tolist()
        empty = x[:0].tolist() == [] and x.new_empty(2, 0).tolist() == [[], []]
        assumed = (x[:, None] * x).tolist() == [[[1.0] * 4] * 3] * 3 and (x > 9).tolist() == [[False] * 4] * 3
        return empty and assumed and total == 1.0 and torch.arange(6).view(3, 2).tolist()[2] == [4, 5]

    found = wb.estimate_memory(lambda: Asking(lists), torch.ones(3, 4), device="cpu", loss=lambda model, batch: model(batch))
    assert any("asked for the value of a tensor 6 times" in note and "test_dry_run.py:" in note for note in found.notes), found.notes
