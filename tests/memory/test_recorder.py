"""The Recorder on real tensors: every byte of a small step known by hand, modules named, nothing kept alive and no hook left behind."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint

from workbench.core.gc import collected_before
from workbench.memory.analysis.log import ALLOC, FREE, MARK, RESIZE, MemoryLog
from workbench.memory.measure.recorder import Recorder, storages


class Net(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return self.head(y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Recorder, steps: int = 2, accumulation: int = 1) -> MemoryLog:
    with collected_before(), recorder, recorder.hooks():
        for recorder.step in range(steps):
            for _ in range(accumulation):
                recorder.mark("data")
                x, y = torch.randn(16, 8), torch.zeros(16, dtype=torch.int64)
                recorder.track(x, "input")
                recorder.track(y, "input")
                with recorder.phase("forward"):
                    loss = F.cross_entropy(model(x), y)
                with recorder.phase("backward"):
                    loss.backward()
                del x, y, loss
            with recorder.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    return recorder.log


def bytes_of(log: MemoryLog, category: str, **where: object) -> int:
    return sum(r.size for r in log.records if r.category == category and all(getattr(r, name) == value for name, value in where.items()))


def live(log: MemoryLog) -> int:
    return sum(record.size for record in log.records if record.freed_at is None)


def test_every_byte_of_a_step_has_its_category() -> None:
    model = Net()
    weights = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    log = train(model, optimizer, Recorder(model))
    assert bytes_of(log, "parameter") == weights
    assert bytes_of(log, "buffer") == 3 * 4
    assert bytes_of(log, "input", step=1) == 16 * 8 * 4 + 16 * 8
    assert bytes_of(log, "gradient", step=1) == weights
    assert bytes_of(log, "optimizer_state") == weights
    assert live(log) == 2 * weights + 12


def test_what_is_born_dies_once_and_in_the_order_of_the_events() -> None:
    model = Net()
    log = train(model, torch.optim.Adam(model.parameters()), Recorder(model))
    for index, record in enumerate(log.records):
        assert log.events[record.allocated_at][:2] == (ALLOC, index)
        if record.freed_at is not None:
            assert record.freed_at > record.allocated_at
            assert log.events[record.freed_at] == (FREE, index, 0)
    assert sum(event.kind == FREE for event in log.events) == sum(record.freed_at is not None for record in log.records)


def test_phases_are_marked_with_step_and_micro_step() -> None:
    model = Net()
    log = train(model, torch.optim.SGD(model.parameters()), Recorder(model), accumulation=2)
    step = ["data", "forward", "backward", "between", "data", "forward", "backward", "between", "optimizer", "end"]
    assert [mark.phase for mark in log.marks] == 2 * step
    assert [mark.micro for mark in log.marks if mark.phase == "backward"] == [0, 1, 2, 3]
    assert [mark.step for mark in log.marks if mark.phase == "optimizer"] == [0, 1]
    assert [event.index for event in log.events if event.kind == MARK] == list(range(len(log.marks)))


def test_backward_is_told_by_the_module_whose_forward_made_it() -> None:
    model = Net()
    log = train(model, torch.optim.SGD(model.parameters()), Recorder(model))
    found = {(r.module, r.category) for r in log.records if r.phase == "backward" and r.step == 1}
    assert {("inner.0", "gradient"), ("inner.2", "gradient"), ("head", "gradient"), ("inner.1", "temp_backward")} <= found
    assert not any(category == "recompute" for _, category in found)
    assert log.modules["inner.1"] == "GELU"


def test_recomputation_is_told_from_backward() -> None:
    model = Net(checkpointed=True)
    log = train(model, torch.optim.SGD(model.parameters()), Recorder(model))
    again = {r.module for r in log.records if r.category == "recompute"}
    assert again == {"inner.0", "inner.1"}  # the last layer's result is not wanted again


def test_counters_of_the_host_are_left_out_where_the_tensors_stand_for_a_gpus() -> None:
    sizes = []
    for host in (False, True):
        model = nn.Linear(4, 4)
        recorder = Recorder(model, host_counters=host)
        optimizer = torch.optim.Adam(model.parameters())
        with recorder, recorder.hooks():
            with recorder.phase("backward"):
                model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        sizes.append(bytes_of(recorder.log, "optimizer_state"))
    assert sizes == [2 * 20 * 4 + 2 * 4, 2 * 20 * 4]


def test_what_a_communication_hook_keeps_is_found_though_another_thread_makes_it() -> None:
    """As PowerSGD makes its errors anew in each step, in threads of gloo."""
    model, state = Net(), SimpleNamespace(error_dict={}, p_memory_dict={}, q_memory_dict={})
    recorder = Recorder()
    recorder.attach(model, hooks=[(state, state)])
    recorder.attach(model)

    def keep(*_: object) -> None:
        thread = threading.Thread(target=lambda: state.error_dict.update({0: torch.zeros(1000)}))
        thread.start()
        thread.join()

    handle = model.head.weight.register_hook(keep)
    log = train(model, torch.optim.SGD(model.parameters(), lr=0.1), recorder, steps=3)
    handle.remove()
    kept = [record for record in log.records if record.size == 4000]
    assert [(record.category, record.step) for record in kept] == [("temp_backward", step) for step in range(3)]
    assert [record.freed_at is None for record in kept] == [False, False, True]


def test_a_resized_storage_counts_as_it_is() -> None:
    recorder = Recorder()
    with recorder, recorder.hooks():
        tensor = torch.zeros(100)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(80)
        tensor.resize_(1000)
    (record,) = recorder.log.records
    assert record.size == 4000
    assert [(event.kind, event.size) for event in recorder.log.events] == [(ALLOC, 400), (RESIZE, 0), (RESIZE, 80), (RESIZE, 4000)]


def test_what_is_elsewhere_does_not_count_nor_what_an_optimizer_makes_there() -> None:
    model = nn.Linear(4, 4, bias=False)
    recorder = Recorder(model)
    with recorder, recorder.hooks():
        recorder.leave_out(model.weight)
        with recorder.phase("backward"):
            model(torch.ones(1, 4)).sum().backward()
        torch.optim.Adam(model.parameters()).step()
    assert bytes_of(recorder.log, "parameter") == 0
    assert bytes_of(recorder.log, "gradient") == 0
    assert bytes_of(recorder.log, "optimizer_state") == 0


def test_a_pause_sees_no_birth() -> None:
    recorder = Recorder()
    with recorder:
        kept = torch.zeros(10)
        with recorder.pause():
            unseen = torch.zeros(10)
        del unseen, kept
    assert len(recorder.log.records) == 1
    assert recorder.log.records[0].freed_at == 1


def test_charged_bytes_stay() -> None:
    recorder = Recorder()
    recorder.charge(1000, "workspace", "cublas")
    assert live(recorder.log) == 1000


def test_views_and_tied_weights_are_one_storage() -> None:
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    model[1].weight = model[0].weight
    recorder = Recorder(model)
    with recorder:
        model[0].weight.detach().view(2, 8)[0]
    assert [(record.size, record.category) for record in recorder.log.records] == [(64, "parameter")]


def test_only_one_kind_of_device_if_asked() -> None:
    recorder = Recorder(device="cuda")
    with recorder:
        torch.zeros(10)
    assert not recorder.log.records


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 warns although they are asked for
def test_sparse_tensors_have_two_storages() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True)
    assert sorted(storage.nbytes() for storage in storages(sparse)) == [8, 16]


def test_the_module_that_an_error_left_is_known() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("here")

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Broken()))
    recorder = Recorder(model)
    with pytest.raises(KeyError) as caught, recorder, recorder.hooks():
        model(torch.ones(1, 2))
    assert recorder.tracker.failed(caught.value) == "1.0"
    assert recorder.tracker.failed(ValueError()) is None


def test_an_error_that_the_model_catches_keeps_no_tensor_alive() -> None:
    dead = []

    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            local = x + 1
            dead.append(weakref.ref(local))
            raise ValueError

    class Patient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picky = Picky()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.picky(x)
            except ValueError:
                return x

    model = Patient()
    recorder = Recorder(model)
    with collected_before(), recorder, recorder.hooks():
        model(torch.ones(2))
        assert dead[0]() is None


def test_nothing_is_left_behind() -> None:
    def hooks() -> list[int]:
        tables = (modules._global_forward_hooks, modules._global_forward_pre_hooks)
        return [*map(len, tables), len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)]

    model, before, resize, was = Net(), hooks(), torch.UntypedStorage.resize_, gc.isenabled()
    recorder = Recorder(model)
    with pytest.raises(RuntimeError), collected_before(), recorder, recorder.hooks():
        model(torch.ones(3, 3))
    assert hooks() == before
    assert torch.UntypedStorage.resize_ is resize
    assert gc.isenabled() == was
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
