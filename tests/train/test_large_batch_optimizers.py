"""LARS and LAMB: the published formulas, exactly; the same on ranks that share the model; and what they take is known beforehand."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import workbench as wb
from workbench.batch.analysis.optimizer_description import OptimizerDescription
from workbench.runs.spec import SpecError
from workbench.train.large_batch_optimizers import LAMB, LARS
from workbench.train.optimizers import OPTIMIZERS, build_optimizer, described

TOYS = Path(__file__).parents[1] / "toy_tasks.py"


def layers() -> list[nn.Parameter]:
    """A matrix, a bias, a matrix of zeros, one that gets no gradient."""
    generator = torch.Generator().manual_seed(1)
    matrix, bias = torch.randn(3, 4, generator=generator), torch.randn(3, generator=generator)
    return [nn.Parameter(tensor) for tensor in (matrix, bias, torch.zeros(2, 2), torch.ones(2, 2))]


def with_gradients(weights: list[nn.Parameter], step: int) -> None:
    for place, weight in enumerate(weights[:-1]):
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(10 * step + place))


def quotient(over: Tensor, under: Tensor) -> Tensor:
    return over / under if over > 0 and under > 0 else torch.ones(())


def plain_lars(weights: list[Tensor], *, lr: float, momentum: float, decay: float, trust: float, exclude: bool, steps: int) -> list[Tensor]:
    """Algorithm 1 of You et al. 2017, one parameter after the other."""
    moments = [torch.zeros_like(weight) for weight in weights]
    like = [nn.Parameter(weight.clone()) for weight in weights]
    for step in range(steps):
        with_gradients(like, step)
        for weight, moment, slope in zip(weights[:-1], moments, [one.grad for one in like], strict=False):
            assert slope is not None
            if weight.ndim == 1 and exclude:
                moment.mul_(momentum).add_(lr * slope)
            else:
                rate = quotient(trust * weight.norm(), slope.norm() + decay * weight.norm())
                moment.mul_(momentum).add_(lr * rate * (slope + decay * weight))
            weight.sub_(moment)
    return weights


def plain_lamb(
    weights: list[Tensor], *, lr: float, betas: tuple[float, float], eps: float, decay: float, exclude: bool, steps: int
) -> list[Tensor]:
    """Algorithm 2 of You et al. 2020, one parameter after the other."""
    means, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    like = [nn.Parameter(weight.clone()) for weight in weights]
    for step in range(steps):
        with_gradients(like, step)
        for weight, mean, square, slope in zip(weights[:-1], means, squares, [one.grad for one in like], strict=False):
            assert slope is not None
            mean.copy_(betas[0] * mean + (1 - betas[0]) * slope)
            square.copy_(betas[1] * square + (1 - betas[1]) * slope**2)
            adam = (mean / (1 - betas[0] ** (step + 1))) / ((square / (1 - betas[1] ** (step + 1))).sqrt() + eps)
            if weight.ndim == 1 and exclude:
                weight.sub_(lr * adam)
            else:
                update = adam + decay * weight
                weight.sub_(lr * quotient(weight.norm(), update.norm()) * update)
    return weights


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 0.1), (0.0, 0.1), (0.9, 0.0)])
def test_lars_is_the_published_formula(momentum: float, decay: float, exclude: bool) -> None:
    weights = layers()
    wanted = plain_lars(
        [weight.detach().clone() for weight in weights], lr=2.0, momentum=momentum, decay=decay, trust=0.02, exclude=exclude, steps=5
    )
    optimizer = LARS(weights, lr=2.0, momentum=momentum, weight_decay=decay, trust_coefficient=0.02, exclude_1d=exclude)
    for step in range(5):
        with_gradients(weights, step)
        optimizer.step()
    for weight, want in zip(weights, wanted, strict=True):
        torch.testing.assert_close(weight.detach(), want, rtol=1e-6, atol=1e-7)
    assert torch.equal(weights[-1], torch.ones(2, 2))  # it had no gradient
    assert all("momentum_buffer" in state for state in optimizer.state.values()) is bool(momentum)


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_is_the_published_formula(decay: float, exclude: bool) -> None:
    weights, betas = layers(), (0.8, 0.95)
    wanted = plain_lamb(
        [weight.detach().clone() for weight in weights], lr=0.01, betas=betas, eps=1e-6, decay=decay, exclude=exclude, steps=5
    )
    optimizer = LAMB(weights, lr=0.01, betas=betas, weight_decay=decay, exclude_1d=exclude)
    for step in range(5):
        with_gradients(weights, step)
        optimizer.step()
    for weight, want in zip(weights, wanted, strict=True):
        torch.testing.assert_close(weight.detach(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_the_size_of_the_loss_does_not_matter(kind: type[torch.optim.Optimizer]) -> None:
    """A layer's step is as long as its weights, whatever the gradient's size."""
    ends = []
    for factor in (1.0, 1000.0):
        weights = [layers()[0]]
        optimizer = kind(weights, lr=0.1, weight_decay=0.0)  # type: ignore[call-arg]
        for step in range(3):
            weights[0].grad = factor * torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        ends.append(weights[0].detach())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_state_goes_out_and_in_again(kind: type[torch.optim.Optimizer]) -> None:
    def build() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        weights = layers()
        return weights, kind(weights, lr=0.05)  # type: ignore[call-arg]

    weights, optimizer = build()
    for step in range(3):
        with_gradients(weights, step)
        optimizer.step()
    others, twin = build()
    with torch.no_grad():
        for other, weight in zip(others, weights, strict=True):
            other.copy_(weight)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for some, one in ((weights, optimizer), (others, twin)):
        with_gradients(some, 3)
        one.step()
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_a_closure_and_groups() -> None:
    matrix, bias = layers()[:2]
    optimizer = LAMB([{"params": [matrix], "lr": 0.0}, {"params": [bias]}], lr=0.1)
    before = matrix.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = matrix.square().sum() + bias.square().sum()
        loss.backward()
        return loss.detach()

    losses = [float(optimizer.step(closure)) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert torch.equal(matrix, before)


def test_what_they_refuse() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(SpecError, match=r"lars refuses it: momentum=1\.0: from 0 to below 1 is allowed"):
        build_optimizer(model, "lars(momentum=1.0)")
    with pytest.raises(SpecError, match=r"lamb refuses it: betas=\(0\.9, 1\.5\): from 0 to below 1"):
        build_optimizer(model, "lamb(betas=(0.9, 1.5))")
    with pytest.raises(SpecError, match=r"lamb refuses it: weight_decay=-1: a number from 0 on is allowed"):
        build_optimizer(model, "lamb(weight_decay=-1)")
    with pytest.raises(SpecError, match="lamb has no option 'momentum'; it has betas, eps, exclude_1d, lr, weight_decay"):
        build_optimizer(model, "lamb(momentum=0.9)")
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="LAMB takes no sparse gradients: try the embedding with sparse=False"):
        LAMB(embedding.parameters()).step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_is(name: str) -> None:
    """What the rules take for its options by default are its options."""
    found = described(build_optimizer(nn.Linear(2, 2), name))
    known = OptimizerDescription.of(name)
    assert found["name"] == name
    assert found["lr"] == known.default_lr
    assert found["betas"] == known.betas
    for option in ("eps", "momentum", "weight_decay"):
        assert found[option] == known.get(option)
    assert OptimizerDescription.of(found).text == name


def test_what_another_optimizer_is() -> None:
    class Mine(torch.optim.SGD):
        pass

    found = described(Mine(nn.Linear(2, 2).parameters(), lr=torch.tensor(0.5), weight_decay=0.1))
    assert found == {"name": "Mine", "lr": 0.5, "betas": None, "eps": None, "momentum": 0, "weight_decay": 0.1}


def test_memory_is_known_beforehand() -> None:
    """As many states as AdamW, or half of them; on ranks that share the model."""
    states = {}
    for name in ("adamw", "lamb", "lars"):
        spec = wb.RunSpec(task=f"{TOYS}:numbers", micro_batch=2, device="cpu", optimizer=name, nproc_per_node=2, parallel="fsdp")
        states[name] = wb.estimate_memory(spec).largest["optimizer_states"]
    assert states["lamb"] == pytest.approx(states["adamw"], rel=1e-3)
    assert states["lars"] == pytest.approx(states["adamw"] / 2, rel=1e-3)
