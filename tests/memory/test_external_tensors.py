"""Tensors with values that a program reaches in a dry run: they are counted, and left as they were."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import workbench as wb

X, Y = torch.randn(64, 128), torch.randint(0, 10, (64,))


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)

    def forward(self, out: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(out), labels)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10))


@pytest.mark.parametrize("device", ["cpu", "H200"])
@pytest.mark.parametrize("held", [False, True])
def test_a_criterion_with_parameters(device: str, held: bool) -> None:
    model, criterion = nn.Linear(128, 10), Criterion()
    if held:
        criterion(model(X), Y).backward()
    before = [(parameter.grad, None if parameter.grad is None else parameter.grad.clone()) for parameter in criterion.parameters()]
    found = wb.estimate_memory(model, (X, Y), loss=lambda m, b: criterion(m(b[0]), b[1]), device=device)
    for parameter, (grad, values) in zip(criterion.parameters(), before, strict=True):
        assert parameter.grad is grad
        assert grad is None or torch.equal(grad, values)
        assert parameter.is_leaf
    said = "2 tensors that are not the model's were reached by the loss: 2 parameters; they are counted"
    assert any(said in note for note in found.notes)
    steps = torch.optim.SGD(criterion.parameters(), lr=0.1)
    weight = criterion.layer.weight.detach().clone()
    criterion(model(X), Y).backward()
    steps.step()
    assert not torch.equal(weight, criterion.layer.weight)


def test_it_is_counted_with_its_gradients() -> None:
    big = nn.Parameter(torch.randn(10, 100_000))
    without = wb.estimate_memory(net, (X, Y), device="cpu", loss=lambda m, b: m(b[0]).sum(), optimizer="sgd")
    found = wb.estimate_memory(net, (X, Y), device="cpu", loss=lambda m, b: m(b[0]).sum() + (big * 1).mean(), optimizer="sgd")
    assert found.parameters == without.parameters + 4_000_000
    assert found.gradients == 4_000_000  # at the peak, in a forward, the model's are cleared
    assert big.grad is None
    big.grad = torch.ones_like(big)
    held = wb.estimate_memory(net, (X, Y), device="cpu", loss=lambda m, b: m(b[0]).sum() + (big * 1).mean(), optimizer="sgd")
    assert held.gradients == found.gradients
    assert bool((big.grad == 1).all())


def test_the_model_from_outside() -> None:
    model = net()
    grads = [torch.ones_like(p) for p in model.parameters()]
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad
    with pytest.raises(
        ValueError, match=r"uses the model from outside instead of its argument.*'0\.weight'.*write loss=lambda model, batch"
    ):
        wb.estimate_memory(model, (X, Y), loss=lambda _, b: F.cross_entropy(model(b[0]), b[1]), device="cpu")
    assert all(parameter.grad is grad and bool((grad == 1).all()) for parameter, grad in zip(model.parameters(), grads, strict=True))
    part = nn.Parameter(torch.ones(10))

    def raises(m: Any, b: Any) -> Tensor:
        (m(b[0]) * part).sum().backward()
        raise RuntimeError("mine")

    with pytest.raises(ValueError, match="mine"):
        wb.estimate_memory(model, (X, Y), loss=raises, device="cpu")
    assert part.grad is None


@pytest.mark.parametrize("device", ["cpu", "H200"])
def test_what_is_written_to_in_place(device: str) -> None:
    model, teacher, norm = nn.Linear(128, 10), nn.Linear(128, 10), nn.BatchNorm1d(10)
    counter, bank, scalar, sums = torch.zeros(3), torch.ones(100, 10), torch.zeros(()), torch.zeros(64, 10)
    states = nn.ModuleList([teacher, norm])
    kept = {name: tensor.clone() for name, tensor in states.state_dict().items()}
    several = [torch.ones(4), torch.ones(5)]

    def loss(m: Any, b: Any) -> Tensor:
        out = m(b[0])
        counter.add_(1)
        bank[:64] = 0.0
        bank.mul_(2)
        bank[0].add_(out[0])
        sums.add_(out)
        scalar.add_(out.detach().mean())
        torch._foreach_mul_(several, 2)
        torch.add(counter, 1, out=counter)
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), m.parameters(), strict=True):
                mine.mul_(0.99).add_(its, alpha=0.01)
                mine.data.mul_(3)
        return F.mse_loss(out, norm(teacher(b[0])).detach())

    found = wb.estimate_memory(model, (X, Y), loss=loss, device=device)
    assert counter.tolist() == [0, 0, 0]
    assert bool((bank == 1).all())
    assert float(scalar) == 0
    assert not sums.requires_grad
    assert not bank.requires_grad
    assert bool((sums == 0).all())
    assert all(bool((one == 1).all()) for one in several)
    assert not [name for name, tensor in states.state_dict().items() if not torch.equal(kept[name], tensor)]
    assert all(parameter.grad is None for parameter in [*teacher.parameters(), *norm.parameters()])
    assert any("reached by the loss: 4 parameters, " in note for note in found.notes)


def test_an_optimizer_of_the_losss_own() -> None:
    critic = nn.Linear(10, 1)
    steps = torch.optim.Adam(critic.parameters())
    weight = critic.weight.detach().clone()

    def loss(m: Any, b: Any) -> Tensor:
        out = m(b[0])
        critic(out.detach()).mean().backward()
        steps.step()
        steps.zero_grad()
        return critic(out).mean()

    wb.estimate_memory(nn.Linear(128, 10), (X, Y), loss=loss, device="cpu")
    assert not steps.state
    assert torch.equal(weight, critic.weight)
    assert critic.weight.grad is None


def test_constants_of_the_program_are_its_own() -> None:
    def loss(m: Any, b: Any) -> Tensor:
        scale = torch.tensor([2.0] * 10)
        count = torch.tensor(3).item()
        return (m(b[0]) * scale).sum() * count * torch.tensor(0.5) + 1

    found = wb.estimate_memory(net, (X, Y), loss=loss, device="cpu")
    assert not any("not the model's" in note for note in found.notes)


def test_a_builder_that_gives_a_model_which_is_there() -> None:
    model = nn.Sequential(net(), nn.BatchNorm1d(10)).eval()
    model.register_buffer("extra", torch.ones(3))
    vars(model)["kept"] = [torch.ones(2)]
    tensors = [*model.parameters(), *model.buffers(), vars(model)["kept"][0]]
    values = [tensor.detach().clone() for tensor in tensors]
    for build in (lambda: model, lambda: nn.Sequential(model, nn.ReLU())):
        wb.estimate_memory(build, (X, Y), device="cpu")
        assert all(a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers(), vars(model)["kept"][0]], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(tensors, values, strict=True))
        assert all(parameter.grad is None for parameter in model.parameters())
