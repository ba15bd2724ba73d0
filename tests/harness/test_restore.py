"""Keep: after whatever an experiment does, training goes on as if nothing had happened, bit for bit."""

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from workbench.harness.discover import discover
from workbench.harness.restore import SavedState


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * 36, 5))


class Average:
    """A moving average of the weights, as users write it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, value in model.named_parameters():
            self.shadow[name].mul_(0.9).add_(value.detach(), alpha=0.1)


def training(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Callable[[], float], dict[str, Any]]:
    """A step with state of every kind behind it, and that state."""
    model = network()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    average, losses, recent, total = Average(model), [], deque(maxlen=3), torch.zeros(())
    scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=4.0, growth_interval=3)
    count = 0

    def step() -> float:
        nonlocal count
        count += 1
        x = torch.randn(6, 3, 8, 8) + random.random() + np.random.rand()
        optimizer.zero_grad(set_to_none=count % 2 == 0)
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update(model)
        losses.append(loss.item())
        recent.append(count)
        total.add_(loss.detach())
        return loss.item()

    names = ("model", "optimizer", "scheduler", "average", "losses", "recent", "total", "scaler")
    return step, dict(zip(names, (model, optimizer, scheduler, average, losses, recent, total, scaler), strict=True))


def picture(parts: dict[str, Any]) -> dict[str, Any]:
    """All of the state, to be compared."""
    model, optimizer, scaler = parts["model"], parts["optimizer"], parts["scaler"]
    return copy.deepcopy(
        {
            "weights": model.state_dict(),
            "grads": [weight.grad for weight in model.parameters()],
            "training": [part.training for part in model.modules()],
            "optimizer": optimizer.state_dict(),
            "scheduler": {name: value for name, value in parts["scheduler"].state_dict().items() if not callable(value)},
            "scaler": scaler.state_dict(),
            "average": parts["average"].shadow,
            "updates": parts["average"].updates,
            "losses": parts["losses"],
            "recent": parts["recent"],
            "total": parts["total"],
            "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        }
    )


def assert_same(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other), path
        assert one.stride() == other.stride(), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple | deque):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}/{i}")
    else:
        assert one == other, path


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5),
}


@pytest.mark.parametrize("before", [0, 3], ids=["new", "trained"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_happened(name: str, before: int) -> None:
    step, parts = training(OPTIMIZERS[name])
    torch.manual_seed(2)
    for _ in range(before):
        step()
    state, memory = picture(parts), [weight.data_ptr() for weight in parts["model"].parameters()]
    keep = SavedState(discover(step))
    first = [step() for _ in range(4)]
    parts["model"].eval()
    keep.restore_weights()
    step()
    keep.restore()
    assert_same(picture(parts), state)
    assert [weight.data_ptr() for weight in parts["model"].parameters()] == memory
    assert [step() for _ in range(4)] == first


def test_what_did_not_exist_vanishes_and_who_held_a_tensor_holds_the_same() -> None:
    step, parts = training(OPTIMIZERS["adamw"])
    model, optimizer = parts["model"], parts["optimizer"]
    keep = SavedState(discover(step))
    step()
    assert optimizer.state
    keep.restore()
    assert not optimizer.state
    assert all(weight.grad is None for weight in model.parameters())
    step()
    moments = [id(value) for state in optimizer.state.values() for value in state.values()]
    gradients = [id(weight.grad) for weight in model.parameters()]
    keep = SavedState(discover(step))
    step(), step()
    keep.restore()
    assert [id(value) for state in optimizer.state.values() for value in state.values()] == moments
    assert [id(weight.grad) for weight in model.parameters()] == gradients


def test_weights_that_moved_to_other_memory_come_back() -> None:
    model = network()
    keep = SavedState(discover(model))
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model[1].running_mean = torch.ones(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    keep.restore()
    for name, value in model.state_dict(keep_vars=True).items():
        address, old = before[name]
        assert value.data_ptr() == address
        assert torch.equal(value, old)


def test_options_of_the_groups_come_back() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([{"params": [weight], "lr": 0.1}], betas=(0.5, 0.6))
    keep = SavedState(discover(optimizer))
    optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"] = 3.0, (0.1, 0.2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    keep.restore()
    assert len(optimizer.param_groups) == 1
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (0.1, (0.5, 0.6))


def test_lists_of_tensors_in_an_optimizer_come_back() -> None:
    weight = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = torch.optim.LBFGS([weight], max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight.square() * torch.tensor([1.0, 5.0])).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    value, state = weight.detach().clone(), copy.deepcopy(optimizer.state_dict())
    keep = SavedState(discover(optimizer))
    optimizer.step(closure)
    assert not torch.equal(weight, value)
    keep.restore()
    assert torch.equal(weight, value)
    assert_same(optimizer.state_dict(), state)


STEPS = 0


def test_globals_that_a_step_assigns_and_attributes_of_self_come_back() -> None:
    class Loop:
        def __init__(self) -> None:
            self.model, self.seen, self.best = nn.Linear(2, 1), {"a": [1]}, None

        def step(self) -> None:
            global STEPS
            STEPS += 1
            self.seen["a"].append(STEPS)
            self.seen["b"] = [2]
            self.best, self.new = STEPS, 3  # type: ignore[assignment]
            self.model.weight.data.add_(1)

    loop = Loop()
    before = loop.model.weight.detach().clone()
    keep = SavedState(discover(loop.step))
    loop.step()
    assert STEPS == 1
    keep.restore()
    assert STEPS == 0
    assert (loop.seen, loop.best, hasattr(loop, "new")) == ({"a": [1]}, None, False)
    assert torch.equal(loop.model.weight, before)


def test_shared_and_computed_weights() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    parametrize.register_parametrization(model[0], "bias", Twice())
    before = copy.deepcopy(model.state_dict())
    keep = SavedState(discover(model))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    keep.restore()
    assert_same(dict(model.state_dict()), dict(before))
    assert model[1].weight is model[0].weight


def test_one_thing_that_cannot_be_put_back_does_not_keep_the_rest_from_being_so() -> None:
    model = nn.Linear(2, 2)
    wide = torch.zeros(3, 1).expand(3, 4)  # one number of each row lies in memory

    before = model.weight.detach().clone()

    def step() -> None:
        model(wide[:2, :2])

    keep = SavedState(discover(step))
    keep._undo.insert(len(keep._undo), lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    with torch.no_grad():
        model.weight.add_(1)
        wide[:, 0] += 1
    with pytest.warns(UserWarning, match="could not be put back, the first: division by zero"):
        keep.restore()
    assert torch.equal(model.weight, before)
    assert not wide.any()


def test_generators_arrays_and_what_variables_stand_for_are_put_back() -> None:
    numbers, python = np.random.default_rng(3), random.Random(3)
    counts, tensor = np.zeros(3), torch.zeros(2)
    first = tensor

    def step() -> None:
        nonlocal tensor
        numbers.random(), python.random()
        counts[1] += 1
        tensor = tensor + 1

    expected = np.random.default_rng(3).random(), random.Random(3).random()
    keep = SavedState(discover(step))
    for _ in range(3):
        step()
    keep.restore()
    assert (numbers.random(), python.random()) == expected
    assert not counts.any()
    assert tensor is first


class Slotted:
    """State in slots, one of them with a mangled name and one not assigned yet."""

    __slots__ = ("__hidden", "late", "seen", "weights")

    def __init__(self) -> None:
        self.seen, self.__hidden, self.weights = 0, [1], torch.ones(2)

    def step(self) -> None:
        self.seen += 1
        self.__hidden.append(2)
        self.weights.mul_(3)
        self.late = 1

    @property
    def hidden(self) -> list[int]:
        return self.__hidden


class SlottedToo(Slotted):
    """And in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.more = 0

    def step(self) -> None:
        super().step()
        self.more += 1


@pytest.mark.parametrize("kind", [Slotted, SlottedToo])
def test_slots_come_back(kind: type[Slotted]) -> None:
    loop = kind()
    keep = SavedState(discover(loop.step))
    loop.step()
    loop.step()
    keep.restore()
    assert (loop.seen, loop.hidden, hasattr(loop, "late"), getattr(loop, "more", 0)) == (0, [1], False, 0)
    assert torch.equal(loop.weights, torch.ones(2))
    loop.late = 5
    keep = SavedState(discover(loop.step))
    loop.step()
    keep.restore()
    assert loop.late == 5


def test_attributes_that_stand_for_something_new_come_back() -> None:
    class Moments:
        def __init__(self, mean: float) -> None:
            self.mean = mean

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.hidden, self.moments = nn.LSTMCell(2, 3), (torch.zeros(1, 3), torch.zeros(1, 3)), Moments(0.0)

    class Loop:
        def __init__(self) -> None:
            self.model, self.window, self.best, self.moments = Recurrent(), (1, 2), frozenset({1}), Moments(1.0)

        def step(self) -> None:
            self.model.hidden[0].add_(1)
            self.model.hidden = tuple(part.detach() for part in self.model.cell(torch.ones(1, 2), self.model.hidden))  # type: ignore[assignment]
            self.window, self.best = (*self.window[1:], self.window[-1] + 1), self.best | {2}  # type: ignore[assignment]
            self.moments, self.model.moments = Moments(self.moments.mean + 1), Moments(3.0)
            self.made = Moments(2.0)

    loop = Loop()
    before = loop.model.hidden, loop.window, loop.best, loop.moments, loop.model.moments
    keep = SavedState(discover(loop.step))
    for _ in range(3):
        loop.step()
        loop.moments.mean = -1.0
    keep.restore()
    now = loop.model.hidden, loop.window, loop.best, loop.moments, loop.model.moments
    assert all(a is b for a, b in zip(now, before, strict=True))
    assert (loop.moments.mean, loop.model.moments.mean, hasattr(loop, "made")) == (1.0, 0.0, False)
    assert not any(part.any() for part in loop.model.hidden)


def test_attributes_of_functions_and_items_of_a_class_that_is_a_container_come_back() -> None:
    class History(list[int]):
        best = 0

    history = History()

    def step() -> None:
        step.calls += 1  # type: ignore[attr-defined]
        history.append(1)
        history.best += 1

    step.calls = 0  # type: ignore[attr-defined]
    keep = SavedState(discover(step))
    step()
    keep.restore()
    assert (step.calls, history, history.best) == (0, [], 0)  # type: ignore[attr-defined]


def test_a_file_that_was_closed_is_not_taken_back(tmp_path: Path) -> None:
    class Loop:
        def __init__(self) -> None:
            self.log = (tmp_path / "0.log").open("w")

        def step(self) -> None:
            self.log.close()
            self.log = (tmp_path / "1.log").open("w")

    loop = Loop()
    keep = SavedState(discover(loop.step))
    loop.step()
    keep.restore()
    assert not loop.log.closed
    loop.log.close()


def test_what_cannot_be_read_is_named() -> None:
    def numbers() -> Iterator[int]:
        yield from range(9)

    class Broken:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("out of order")

    given, pairs, broken, wide, log = numbers(), zip("ab", "cd", strict=True), Broken(), torch.eye(2).to_sparse(), sys.stdout
    keep = SavedState(discover(lambda: (given, pairs, broken, wide, log)), most_bytes=1000)
    said = "; ".join(keep.left_out)
    assert len(keep.left_out) == 4
    for part in (
        "a generator (",
        "numbers)",
        "a zip",
        "a Broken (RuntimeError: out of order)",
        "a Tensor (its layout is torch.sparse_coo)",
    ):
        assert part in said
    large = torch.zeros(2**18)
    assert SavedState(discover(lambda: large), most_bytes=1000).left_out == ["a Tensor (of 1 MiB: too large)"]


def test_the_numbers_of_an_optimizer_within_an_optimizer_come_back() -> None:
    class Averaged(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    weight = nn.Parameter(torch.ones(2))
    optimizer = Averaged(torch.optim.Adam([weight]))
    weight.grad = torch.ones(2)
    optimizer.step()
    before = copy.deepcopy(optimizer.inner.state_dict())
    found = discover(optimizer)
    assert found.optimizers == [optimizer]
    keep = SavedState(found, most_bytes=0)  # they are always kept, however large
    optimizer.step()
    keep.restore()
    assert_same(optimizer.inner.state_dict(), before)
