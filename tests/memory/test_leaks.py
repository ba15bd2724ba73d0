"""Memory that grows: the classic leaks are found with the variable that keeps them, and a healthy step is not blamed."""

import copy
import gc
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench.core import gc as collector
from workbench.memory.analysis.log import ALLOC, FREE, MARK, Event, Mark, MemoryLog, Record
from workbench.memory.api import find_leaks, measure_memory
from workbench.memory.measure.leaks import Holding, Leak, Leaks, Referrers, find, held_after, leaks_of, left_behind

DATA = [torch.randn(32, 64) for _ in range(4)]
BY_ALL: list[Tensor] = []
HIDDEN = 32 * 128 * 4
"""Bytes of one output of the hidden layer."""


@pytest.fixture(autouse=True)
def only_what_the_test_makes_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a session has imported and collected stays frozen: a look at all of it, of which each search takes many, is a good second."""
    monkeypatch.setattr(collector, "live_objects", lambda: [*gc.get_objects(), *DATA])


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


def trained(model: nn.Module, after: Callable[[Tensor], object] = lambda loss: None) -> Callable[[Tensor], None]:
    """A whole step; `after` gets its loss."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Tensor) -> None:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(loss)

    return step


def only(leaks: Leaks) -> Leak:
    assert len(leaks.found) == 1, str(leaks)
    return leaks.found[0]


def test_losses_with_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the list was there before
    leak = only(find(trained(network(), lambda loss: BY_ALL.append(loss)), DATA))
    assert leak.holder == "BY_ALL (a list, a global variable of test_leaks.py)"
    assert (leak.graph, leak.tensors, leak.per_step) == (True, 1, 4)
    assert BY_ALL == []  # put back


def test_a_list_of_the_program_is_named_by_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing has a second name for the module `__main__`, and the last name used to win."""
    main = sys.modules["__main__"]
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    assert Referrers()._modules[id(vars(main))] == "__main__"


def test_a_holder_that_was_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    kept: list[Tensor] = []
    train = trained(network(), lambda loss: kept.append(loss))
    gc.freeze()
    assert only(find(train, DATA)).holder == "kept (a list in test_a_holder_that_was_frozen())"


def test_a_graph_that_no_backward_has_used() -> None:
    model, losses = network(), []
    train = trained(model)

    def step(batch: Tensor) -> None:
        train(batch)
        losses.append(model(batch).square().mean())

    leak = only(find(step, DATA))
    assert leak.holder == "losses (a list in test_a_graph_that_no_backward_has_used())"
    assert leak.graph
    assert leak.per_step >= HIDDEN
    assert leak.module == "1"


def test_a_hook_that_stores_outputs() -> None:
    model, stored = network(), defaultdict(list)
    model[1].register_forward_hook(lambda module, args, output: stored["relu"].append(output))
    leak = only(find(trained(model), DATA))
    assert leak.holder == "stored (a defaultdict in test_a_hook_that_stores_outputs())"
    assert (leak.per_step, leak.operator, leak.module) == (HIDDEN, "aten.relu.default", "1")


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.cache[len(self.cache)] = out.detach()
        return out


def test_a_cache_in_a_module() -> None:
    model = nn.Sequential(Caching(), nn.ReLU(), nn.Linear(64, 4))
    leak = only(find(trained(model), DATA))
    assert leak.holder == "cache (a dict, an attribute of the module 0, a Caching)"
    assert (leak.per_step, leak.module, leak.graph) == (32 * 64 * 4, "0.inner", False)
    assert model[0].cache == {}


def test_a_graph_that_goes_on_over_the_steps() -> None:
    cell = nn.GRUCell(64, 64)
    state = torch.zeros(32, 64)

    def step(batch: Tensor) -> None:
        nonlocal state
        state = cell(batch, state)
        state.square().mean().backward(retain_graph=True)
        cell.zero_grad()

    leak = only(find(step, DATA, model=cell))
    assert leak.holder == "state (a Tensor in test_a_graph_that_goes_on_over_the_steps())"
    assert leak.graph
    assert leak.per_step > 3 * 32 * 64 * 4


def hidden_in_a_closure() -> Callable[[Tensor], None]:
    outputs: list[Tensor] = []

    def step(batch: Tensor) -> None:
        outputs.append(batch * 2)

    return step


def test_a_variable_of_a_function_that_has_returned() -> None:
    leak = only(find(hidden_in_a_closure(), DATA))
    assert leak.holder == "outputs (a list, a variable around step())"


def test_an_attribute_of_the_step_itself() -> None:
    class Collector:
        def __init__(self) -> None:
            self.outputs: list[Tensor] = []

        def __call__(self, batch: Tensor) -> None:
            self.outputs.append(batch * 2)

    leak = only(find(Collector(), DATA))
    assert leak.holder == "outputs (a list, an attribute of a Collector)"


def test_a_healthy_step_is_not_blamed() -> None:
    model, figures, last, total = network(), [], {}, [0.0]
    queue: deque[Tensor] = deque(maxlen=3)
    average = copy.deepcopy(model)

    def after(loss: Tensor) -> None:
        figures.append(loss.detach())  # a number per step
        queue.append(torch.ones(256, 256))  # a replay buffer, full after a while
        last["output"] = model(DATA[0])  # the last one only
        total[0] += loss.item()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)

    leaks = find(trained(model, after), DATA)
    assert not leaks, str(leaks)
    assert leaks.per_step == 0
    assert "nothing grows" in str(leaks)


def test_a_reference_cycle_is_no_leak() -> None:
    class Node:
        pass

    def after(_loss: Tensor) -> None:
        node: Any = Node()
        node.itself, node.tensor = node, torch.zeros(10_000)

    leaks = find(trained(network(), after), DATA)
    assert not leaks, str(leaks)
    assert leaks.cyclic == 40_000
    assert "39.1 KiB of each step lie in reference cycles: no leak, but freed by gc only" in str(leaks)
    (note,) = (note for note in measure_memory(trained(network(), after), DATA).notes if "gc only" in note)
    assert note.startswith("78.1 KiB of it lie in reference cycles: freed by gc only")


def test_a_list_that_only_a_hook_reaches_is_put_back() -> None:
    model = network()
    stored = kept_by_a_hook(model)
    leak = only(find(trained(model), DATA))
    assert leak.per_step == HIDDEN
    assert stored() == 0


def kept_by_a_hook(model: nn.Module) -> Callable[[], int]:
    stored: list[Tensor] = []
    model.get_submodule("1").register_forward_hook(lambda module, args, output: stored.append(output.detach()))
    return lambda: len(stored)


def test_a_holder_that_python_does_not_show() -> None:
    arrays: list[Any] = []
    leaks = find(trained(network(), lambda _loss: arrays.append(torch.ones(1000).numpy())), DATA)
    assert only(leaks).holder is None
    assert "a numpy array" in str(leaks).lower()
    assert "clear it" not in str(leaks)


def test_batches_that_lived_before_are_no_leak() -> None:
    assert not find(trained(network()), [torch.randn(32, 64) for _ in range(20)], steps=10)


def test_everything_is_put_back() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    find(trained(model), DATA)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_how_leaks_show_themselves() -> None:
    leak = Leak(per_step=2048, tensors=1, holder="losses (a list)", operator="aten.mean.default", module="head", graph=True)
    leaks = Leaks(title="step", found=(leak,), after=(10, 2058))
    assert str(leak) == "losses (a list): 2.00 KiB more with each step (1 tensor, made by aten.mean.default in head), and a graph with them"
    assert leaks
    assert "loss.item()" in (leaks.hint or "")
    assert "losses (a list)" in str(leaks)
    assert "<table>" in leaks._repr_html_()
    assert leaks.to_frame().per_step.tolist() == [2048]
    assert Leaks(title="step").hint is None


# --- what is refused


@pytest.mark.parametrize("steps", [4, 0, True, 2.5, "8"])
def test_too_few_steps(steps: Any) -> None:
    with pytest.raises(ValueError, match="a whole number of at least 5 is allowed"):
        find_leaks(trained(network()), DATA, steps=steps)


def test_what_is_no_step() -> None:
    with pytest.raises(ValueError, match="a module goes into model="):
        find_leaks(network(), DATA)
    with pytest.raises(ValueError, match="it is the other way round"):
        find_leaks(DATA, trained(network()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs the loader"):
        find_leaks(trained(network()), None)  # type: ignore[arg-type]


# --- arithmetic, from a log by hand


def by_hand(lifetimes: dict[int, list[tuple[int, int | None]]], steps: int) -> MemoryLog:
    """Step → (size, step in which it dies) of what is born in it."""
    log = MemoryLog()
    dying: dict[int, list[int]] = defaultdict(list)
    for step in range(steps):
        for index in dying[step]:
            log.records[index].freed_at = len(log.events)
            log.events.append(Event(FREE, index, 0))
        for size, death in lifetimes.get(step, ()):
            log.records.append(Record(size, None, "forward", step, step, "", "op", len(log.events)))
            log.events.append(Event(ALLOC, len(log.records) - 1, size))
            if death is not None:
                dying[death].append(len(log.records) - 1)
        log.events.append(Event(MARK, len(log.marks), 0))
        log.marks.append(Mark("end", step, step))
    return log


def test_what_is_left_behind() -> None:
    log = by_hand(
        {0: [(100, None)], 1: [(5000, None), (7, 2)], 2: [(5000, None)], 3: [(5000, None)], 4: [(5000, None)], 5: [(9, None)]}, steps=6
    )
    assert left_behind(log) == {1: [1], 2: [3], 3: [4]}
    assert left_behind(log, but={3}) == {1: [1], 2: [], 3: [4]}
    assert held_after(log) == {0: 100, 1: 5107, 2: 10100, 3: 15100, 4: 20100, 5: 20109}
    (leak,) = leaks_of(log, left_behind(log), {})
    assert (leak.per_step, leak.tensors, leak.holder) == (5000, 1, None)
    assert leaks_of(log, left_behind(log), {index: Holding("queue", bounded=True) for index in (1, 3, 4)}) == ()


def test_once_is_no_leak() -> None:
    log = by_hand({1: [(10**6, None)]}, steps=8)
    assert leaks_of(log, left_behind(log), {}) == ()
