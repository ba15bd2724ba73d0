"""A LightningModule is estimated by its own training_step and configure_optimizers, as the same training written as a Task is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import workbench

wb: Any = workbench  # a batch may come second, which its types do not say
lightning = pytest.importorskip("lightning")
BATCH = (torch.rand(6, 8), torch.randint(0, 4, (6,)))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 640), nn.ReLU(), nn.Linear(640, 4))


def its_loss(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def its_optimizer(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Has no forward; logs; returns a dict; its optimizer has two groups and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = its_loss(self.net, batch)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"again": loss})
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [{"params": self.net[0].parameters(), "lr": 0.2}, {"params": self.net[2].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]


class WithForward(Lit):
    """Calls itself in its step, which takes no index, and returns the loss."""

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.net(inputs)
        return out

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return its_loss(self, batch)

    def configure_optimizers(self) -> Any:
        return {"optimizer": its_optimizer(self.parameters())}


@pytest.mark.parametrize("kind", [Lit, WithForward])
def test_it_needs_what_the_same_training_written_out_needs(kind: Any) -> None:
    about: Any = {"loss": its_loss, "optimizer": its_optimizer, "device": "H100"}
    for knobs in ({}, {"world_size": 2}, {"world_size": 2, "parallel": "fsdp"}, {"precision": "amp_bf16", "micro_batch": 64}):
        plain = wb.estimate_memory(layers, BATCH, **about, **knobs)
        lit = wb.estimate_memory(kind(), BATCH, device="H100", **knobs)
        assert lit.largest == plain.largest
        assert lit.total == plain.total
    assert any("that of training_step" in note for note in lit.notes)
    assert "configure_optimizers" in lit.title


def test_every_verb_of_dry_runs_takes_one_and_leaves_it_as_it_is() -> None:
    lit = WithForward().eval()
    before = dict(vars(lit))
    plain = wb.max_micro_batch(layers, "RTX 4090", BATCH, loss=its_loss, optimizer=its_optimizer)
    for target in (lit, WithForward, lambda: WithForward()):
        assert wb.max_micro_batch(target, "RTX 4090", BATCH).micro_batch == plain.micro_batch
    assert wb.memory_ladder(lit, BATCH, device="RTX 4090").fits
    assert wb.estimate_time(lit, BATCH, device="H100").samples == len(BATCH[0])
    assert wb.collectives(lit, BATCH, world_size=2).calls
    assert type(lit) is WithForward
    assert dict(vars(lit)) == before
    assert lit(BATCH[0]).shape == (6, 4)


def test_it_is_told_by_the_module_that_a_function_builds() -> None:
    """It is built once, also where its constructor reads numbers, which the meta device does not have."""

    class Reading(WithForward):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]

    calls = 0

    def counted(kind: Any) -> Any:
        nonlocal calls
        calls += 1
        return kind()

    for kind, times in ((WithForward, 1), (layers, 1), (Reading, 2)):  # the last one on the meta device, which fails, and on the CPU
        own, calls = wb.estimate_memory(kind(), BATCH, device="cpu"), 0
        found = wb.estimate_memory(lambda kind=kind: counted(kind), BATCH, device="cpu")
        assert calls == times
        assert (found.total, found.notes) == (own.total, own.notes)
        assert ("configure_optimizers" in found.title) is (kind is not layers)


@pytest.mark.parametrize("knobs", [{}, {"world_size": 2, "parallel": "fsdp"}, {"loss": lambda model, batch: model(batch[0]).missing}])
def test_a_module_that_a_function_returns_stays_as_it_is(knobs: dict[str, Any]) -> None:
    lit = WithForward()
    before = dict(vars(lit))
    for _ in range(2):
        if "loss" in knobs:
            with pytest.raises(ValueError, match="missing"):
                wb.estimate_memory(lambda: lit, BATCH, device="cpu", **knobs)
        else:
            found = wb.estimate_memory(lambda: lit, BATCH, device="cpu", **knobs)
            assert found.total == wb.estimate_memory(lit, BATCH, device="cpu", **knobs).total
        wb.collectives(lambda: lit, BATCH, world_size=2)
        assert type(lit) is WithForward
        assert dict(vars(lit)) == before
        assert lit(BATCH[0]).shape == (6, 4)


@pytest.mark.parametrize(
    "step",
    [
        lambda self, batch, **options: its_loss(self, batch),
        lambda self, batch, *, scale=1: its_loss(self, batch),
        lambda self, batch, batch_idx=None: its_loss(self, batch) * (1 + batch_idx),
        lambda self, batch, *rest: its_loss(self, batch) * (1 + rest[0]),
        lambda self, *args: its_loss(self, args[0]) * (1 + args[1]),
        lambda self, batch, batch_idx, /: its_loss(self, batch) * (1 + batch_idx),
    ],
)
def test_a_step_gets_the_index_where_lightning_gives_it(step: Any) -> None:
    found = wb.estimate_memory(type("Own", (WithForward,), {"training_step": step}), BATCH, device="cpu")
    assert found.optimizer_states == wb.estimate_memory(WithForward, BATCH, device="cpu").optimizer_states
    assert any("that of training_step" in note for note in found.notes)


def test_what_is_given_goes_before_its_own() -> None:
    adamw = wb.estimate_memory(WithForward, BATCH, optimizer="adamw")
    sgd = wb.estimate_memory(WithForward, BATCH)
    assert adamw.largest["optimizer_states"] > 1.9 * sgd.largest["optimizer_states"]
    assert wb.estimate_memory(WithForward, BATCH, loss=lambda model, batch: model(batch[0]).mean()).notes != sgd.notes


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"automatic_optimization": False}, "automatic_optimization = False: .* Give loss=lambda model, batch: … and optimizer="),
        (
            {"training_step": lambda self, batch, index: None},
            r"training_step of Odd returned a NoneType: expected the loss, .* or give loss=",
        ),
        ({"configure_optimizers": lambda self: None}, r"configure_optimizers of Odd made 0 optimizers: give one, optimizer="),
        (
            {"configure_optimizers": lambda self: [its_optimizer(self.parameters()), its_optimizer(self.parameters())]},
            "made 2 optimizers: give one",
        ),
        (
            {"configure_optimizers": lambda self: self.trainer.estimated_stepping_batches},
            r"configure_optimizers of Odd raised RuntimeError: .* Give optimizer=",
        ),
        ({"training_step": lambda self, batch, index: self.trainer.global_step}, "is not attached to a `Trainer`"),
    ],
)
def test_what_cannot_be_known_without_its_trainer(members: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wb.estimate_memory(type("Odd", (Lit,), members)(), BATCH)
