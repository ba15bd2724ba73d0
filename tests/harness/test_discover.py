"""What a step reaches, found without being given."""

import functools
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from workbench.harness.discover import describe, discover

MODEL = nn.Linear(2, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)
LOSS = nn.MSELoss()


def inner(batch: Any) -> None:
    OPTIMIZER.zero_grad()
    LOSS(MODEL(batch), batch[:, :1]).backward()


def outer(batch: Any) -> None:
    inner(batch)
    [OPTIMIZER.step() for _ in range(1)]


class Loop:
    def __init__(self) -> None:
        self.parts = {"model": nn.Linear(3, 3)}
        self.optimizer = torch.optim.Adam(self.parts["model"].parameters())

    def step(self, batch: Any) -> None: ...

    def __call__(self, batch: Any) -> None:
        inner(batch)


def test_globals_of_the_functions_that_it_calls() -> None:
    found = discover(outer)
    assert found.models == [MODEL]
    assert found.optimizers == [OPTIMIZER]
    assert LOSS in found.modules


def test_what_a_step_reads_of_a_module_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import parts`, and a step that calls parts.model: its parameters were counted as 0 B, and nothing was put back."""
    package, parts = types.ModuleType("my_package"), types.ModuleType("my_package.parts")
    package.parts, parts.model, parts.other = parts, nn.Linear(1, 1), nn.Linear(1, 2)  # type: ignore[attr-defined]
    for module in (package, parts):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    space: dict[str, Any] = {"my_package": package, "parts": parts, "torch": torch, "__name__": "my_script"}
    exec("def step(batch): parts.model(batch); torch.zeros(1)\ndef far(batch): my_package.parts.model(batch)", space)
    for step in (space["step"], space["far"]):
        assert discover(step).models == [parts.model]  # type: ignore[attr-defined]


def test_a_closure_a_default_a_partial() -> None:
    model, other, third = nn.Linear(1, 1), nn.Linear(1, 2), nn.Linear(1, 3)

    def step(batch: Any, extra: nn.Module, more: nn.Module = other) -> None:
        def deeper() -> nn.Module:
            return model

        deeper()

    assert {id(one) for one in discover(functools.partial(step, extra=third)).models} == {id(model), id(other), id(third)}


def test_self_of_a_method_and_of_a_callable_object() -> None:
    loop = Loop()
    assert discover(loop.step).models == [loop.parts["model"]]
    assert discover(loop.step).optimizers == [loop.optimizer]
    assert {id(one) for one in discover(loop).models} == {id(loop.parts["model"]), id(MODEL)}


def test_a_decorated_step() -> None:
    model = nn.Linear(1, 1)

    def decorated(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args)

        return wrapper

    @decorated
    def step(batch: Any) -> Any:
        return model(batch)

    assert discover(step).models == [model]


def test_only_the_outermost_module() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    wrapper = nn.DataParallel(net)
    assert discover(lambda batch: (net, wrapper)).models == [wrapper]
    assert describe(wrapper) == "DataParallel(Sequential)"


def test_it_stops_at_the_loader() -> None:
    class Owner:
        def __init__(self) -> None:
            self.model = nn.Linear(2, 2)

    hidden, data = Owner(), DataLoader(torch.zeros(4, 2))  # type: ignore[arg-type]
    data.dataset.owner = hidden  # type: ignore[attr-defined]
    assert discover(lambda batch: (data, hidden), but=[hidden]).models == []
    assert discover(lambda batch: data).models == []


def test_nothing_there() -> None:
    found = discover(lambda batch: batch + 1)
    assert (found.models, found.optimizers, found.objects) == ([], [], [])
