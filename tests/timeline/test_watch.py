"""wb.watch: the phases of an unedited loop, exact with a fake clock that real torch modules move; and nothing of it left behind."""

import contextlib
import copy
import gc
import io
import pickle
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import workbench as wb
from tests.timeline.test_step_timer import Clock, phases
from workbench.core.system_load import LoadMeter, Noise
from workbench.timeline import hooks
from workbench.timeline.watch import Watch


class Spend(torch.autograd.Function):
    """Costs 5 s in forward and 7 s in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        clock.sleep(5)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.clock.sleep(7)
        return grads[0], None


class Net(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.inner = clock, nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Spend.apply(self.inner(x), self.clock)
        return y


class Slow(torch.optim.SGD):
    """Costs 11 s a step."""

    def __init__(self, model: Net) -> None:
        super().__init__(model.parameters(), 0.01)
        self.clock = model.clock

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.clock.sleep(11)


BACKWARD, TO = torch.autograd.backward, torch.Tensor.to


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def model(clock: Clock) -> Iterator[Net]:
    net = Net(clock)
    yield net
    assert_nothing_left(net)


@pytest.fixture
def optimizer(model: Net) -> Slow:
    return Slow(model)


def assert_nothing_left(net: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    assert torch.autograd.backward is BACKWARD
    assert torch.Tensor.to is TO
    for module in net.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
        assert module._compiled_call_impl is None
    for optimizer in optimizers:
        assert not optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
        assert not optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
    assert hooks.OPEN_LOOPS.top is None


def data(clock: Clock, *waits: float) -> Iterator[Tensor]:
    for wait in waits:
        clock.sleep(wait)
        yield torch.ones(4, 2)


def watched(clock: Clock, *waits: float, model: Any = None, optimizer: Any = None) -> Watch[Tensor]:
    return Watch(data(clock, *waits), model=model, optimizer=optimizer, recorder=clock.recorder)


def loss_of(model: Net, x: Tensor) -> Tensor:
    y = model(x)
    model.clock.sleep(3)  # the loss is forward
    return y.sum()


def update(model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()


STEP = {"data_wait": 1, "forward": 8, "backward": 7, "optimizer": 11}


# Where the time goes


def test_an_unedited_loop(clock: Clock, model: Net, optimizer: Slow) -> None:
    loop = watched(clock, 1, 1, model=model, optimizer=optimizer)
    for x in loop:
        clock.sleep(0.5)
        update(model, optimizer, x)
        clock.sleep(0.25)
    assert phases(loop.timeline) == [STEP | {"other": 0.75}] * 2
    assert [step.samples for step in loop.timeline.steps] == [4, 4]
    assert loop.timeline.notes == ()
    assert_nothing_left(model, optimizer)


def test_what_follows_a_forward_without_backward_is_other(clock: Clock, model: Net, optimizer: Slow) -> None:
    loop = watched(clock, 1, model=model, optimizer=optimizer)
    for x in loop:
        update(model, optimizer, x)
        with torch.no_grad():
            model(x)
        clock.sleep(100)
    assert phases(loop.timeline) == [STEP | {"forward": 13, "other": 100}]


def test_accumulation(clock: Clock, model: Net, optimizer: Slow) -> None:
    loop = watched(clock, 1, 1, 1, 1, 1, model=model, optimizer=optimizer)
    for number, x in enumerate(loop):
        loss_of(model, x).backward()
        if number % 2:
            optimizer.step()
    assert phases(loop.timeline) == [{"data_wait": 2, "forward": 16, "backward": 14, "optimizer": 11}] * 2
    assert [step.samples for step in loop.timeline.steps] == [8, 8]
    assert "1 batches with no optimizer step" in loop.timeline.notes[0]


def test_two_models_and_optimizers_as_in_a_gan(clock: Clock) -> None:
    one, two = Net(clock), Net(clock)
    optimizers = [Slow(one), Slow(two)]
    loop = watched(clock, 1, 1, model=(one, two), optimizer=optimizers)
    for x in loop:
        update(one, optimizers[0], x)
        update(two, optimizers[1], x)
    assert phases(loop.timeline) == [{"data_wait": 1, "forward": 16, "backward": 14, "optimizer": 22}] * 2
    assert_nothing_left(one, *optimizers)
    assert_nothing_left(two)


def test_a_model_and_its_part_are_not_counted_twice(clock: Clock, model: Net, optimizer: Slow) -> None:
    loop = watched(clock, 1, model=[model, model.inner], optimizer=optimizer)
    for x in loop:
        update(model, optimizer, x)
    assert phases(loop.timeline) == [STEP]


def test_a_closure_runs_inside_the_optimizer_and_is_timed_apart(clock: Clock, model: Net) -> None:
    class Closing(Slow):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.enable_grad():
                closure()
            self.clock.sleep(11)

    optimizer = Closing(model)
    loop = watched(clock, 1, model=model, optimizer=optimizer)
    for x in loop:
        optimizer.step(lambda x=x: loss_of(model, x).backward())
    assert phases(loop.timeline) == [STEP]


def test_what_follows_a_forward_without_backward_in_a_closure_is_the_optimizers(clock: Clock, model: Net) -> None:
    class Searching(Slow):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.enable_grad():
                closure()
            self.clock.sleep(11)

    optimizer = Searching(model)
    loop = watched(clock, 1, model=model, optimizer=optimizer)
    for x in loop:
        loss_of(model, x).backward()
        optimizer.step(lambda x=x: model(x))
        loss_of(model, x).backward()
    assert phases(loop.timeline) == [{"data_wait": 1, "forward": 8 + 5 + 8, "backward": 14, "optimizer": 11}]


class Scored(Net):
    """Returns its loss, as models of transformers and nanoGPT do."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"logits": y, "loss": y.sum()}


def test_what_follows_a_model_that_returns_its_loss_is_other(clock: Clock) -> None:
    model = Scored(clock)
    optimizer = Slow(model)
    loop = watched(clock, 1, 1, model=model, optimizer=optimizer)
    for number, x in enumerate(loop):
        output = model(x)
        clock.sleep(100)  # the next batch is made here
        loss = output["loss"] if number == 0 else output["logits"].mean()
        (loss / 4).backward()
        optimizer.step()
    assert phases(loop.timeline) == [
        {"data_wait": 1, "forward": 5, "backward": 7, "optimizer": 11, "other": 100},
        {"data_wait": 1, "forward": 105, "backward": 7, "optimizer": 11},  # that loss was computed outside
    ]
    assert_nothing_left(model, optimizer)


def test_a_loss_with_a_further_part_was_computed_outside(clock: Clock) -> None:
    model = Scored(clock)
    for x in (loop := watched(clock, 1, model=model)):
        output = model(x)
        clock.sleep(3)
        (output["loss"] + output["logits"].mean()).backward()
    assert phases(loop.timeline)[0]["forward"] == 8


def test_a_wrapper_that_passes_its_attributes_on_is_not_called_by_what_it_wraps(clock: Clock, model: Net) -> None:
    class Wrapper(nn.Module):  # like Fabric's
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name != "inner" and "inner" in self._modules:
                setattr(self.inner, name, value)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    wrapper, optimizer = Wrapper(model), Slow(model)
    loop = watched(clock, 1, model=wrapper, optimizer=optimizer)
    for x in loop:
        loss = wrapper(x).sum()
        clock.sleep(3)
        loss.backward()
        optimizer.step()
    assert phases(loop.timeline) == [STEP]
    assert_nothing_left(wrapper)


def test_the_grad_scaler_is_seen_through(clock: Clock, model: Net, optimizer: Slow) -> None:
    scaler = torch.amp.GradScaler("cpu")
    loop = watched(clock, 1, model=model, optimizer=optimizer)
    for x in loop:
        scaler.scale(loss_of(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert phases(loop.timeline) == [STEP]


def test_a_wrapped_optimizer_without_hooks_is_unwrapped(clock: Clock, model: Net, optimizer: Slow) -> None:
    class Wrapper(torch.optim.Optimizer):  # like Accelerate's
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.optimizer.step(closure)

    loop = watched(clock, 1, model=model, optimizer=Wrapper(optimizer))
    for x in loop:
        loss_of(model, x).backward()
        Wrapper(optimizer).step()
    assert phases(loop.timeline) == [STEP]


def test_a_model_inside_the_loader_waits_for_data(clock: Clock, model: Net, optimizer: Slow) -> None:
    def loader() -> Iterator[Tensor]:
        yield model(torch.ones(4, 2)).detach() * torch.ones(4, 2)

    loop = Watch(loader(), model=model, optimizer=optimizer, recorder=clock.recorder)
    for x in loop:
        update(model, optimizer, x)
    assert phases(loop.timeline) == [STEP | {"data_wait": 5}]


def test_a_step_of_1500_forward_calls(clock: Clock, model: Net, optimizer: Slow) -> None:
    loop = watched(clock, 1, model=model, optimizer=optimizer)
    for x in loop:
        update(model, optimizer, x)
        with torch.no_grad():
            for _ in range(1499):
                model(x)
                clock.sleep(2)
    assert phases(loop.timeline) == [STEP | {"forward": 1499 * 5 + 8, "other": 1499 * 2}]


def test_what_other_threads_do_is_not_part_of_the_loop(clock: Clock, model: Net, optimizer: Slow) -> None:
    twin = Net(clock)
    loop = watched(clock, 1, 1, model=[model, twin], optimizer=optimizer)
    for x in loop:
        thread = threading.Thread(target=lambda: twin(torch.ones(1, 2)).sum().backward())
        thread.start()
        thread.join()
        update(model, optimizer, x)
    assert phases(loop.timeline) == [STEP | {"other": 12}] * 2


def test_an_optimizer_that_has_others_step_within_its_step(clock: Clock, model: Net) -> None:
    inner, elsewhere = Slow(Net(clock)), Slow(Net(clock))

    class Outer(Slow):
        def step(self, closure: Any = None) -> None:
            thread = threading.Thread(target=elsewhere.step)
            thread.start()
            thread.join()
            inner.step()
            super().step(closure)

    optimizer = Outer(model)
    loop = watched(clock, 1, 1, model=model, optimizer=[optimizer, inner, elsewhere])
    for x in loop:
        update(model, optimizer, x)
        clock.sleep(2)
    assert phases(loop.timeline) == [STEP | {"optimizer": 33, "other": 2}] * 2


def test_cuda_is_not_asked_for_before_the_script_does(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("this may initialise the driver"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("this may initialise the driver"))
    for version in ("12.6", None):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.version, "hip", None)
        for _ in watched(clock, 1):
            assert (torch.Tensor.to is TO) is (version is None)


def test_copies_to_the_device_are_h2d(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.6")

    def copy(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        clock.sleep(2)
        return tensor

    copy.__name__ = "to"
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", copy)
        patched.setattr(torch.Tensor, "cuda", copy)
        loop = watched(clock, 1)
        for x in loop:
            x.to("cuda:0", non_blocking=True).to(device=torch.device("cuda")).to(torch.float64)
            clock.sleep(3)
        assert torch.Tensor.to is copy
        assert torch.Tensor.cuda is copy
    assert torch.Tensor.to is TO
    assert phases(loop.timeline) == [{"data_wait": 1, "h2d": 4, "other": 5}]


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        (("cuda",), {}, True),
        ((torch.device("cuda", 1), torch.float16), {}, True),
        ((0,), {}, True),
        ((), {"device": "cuda:1"}, True),
        (("cpu",), {}, False),
        ((torch.float16,), {}, False),
        ((torch.zeros(1),), {}, False),
        ((), {"other": torch.zeros(1)}, False),
        ((), {"dtype": torch.float16}, False),
        ((True,), {}, False),
    ],
)
def test_which_arguments_name_a_device(args: Any, kwargs: Any, expected: bool) -> None:
    assert hooks.to_cuda(args, kwargs) is expected


# What is known without a model or an optimizer


def test_without_anything_waits_and_backward_are_known(clock: Clock, model: Net, optimizer: Slow) -> None:
    loop = watched(clock, 1, 1)
    for x in loop:
        update(model, optimizer, x)
    assert phases(loop.timeline) == [{"data_wait": 1, "backward": 7, "other": 19}] * 2
    assert [note.rpartition(": ")[2] for note in loop.timeline.notes] == [
        "wb.watch was not given a model=",
        "wb.watch was not given an optimizer=",
    ]


def test_a_model_that_is_not_the_one_in_use_is_told(clock: Clock, model: Net, optimizer: Slow) -> None:
    loop = watched(clock, 1, model=nn.Linear(1, 1), optimizer=optimizer)
    for x in loop:
        update(model, optimizer, x)
    assert "the watched model was never called" in loop.timeline.notes[0]


def test_evaluation_is_no_step(clock: Clock, model: Net, optimizer: Slow) -> None:
    loop = watched(clock, 1, 1, 1, model=model, optimizer=optimizer)
    for x in loop:
        model(x)
    assert loop.timeline.steps == ()
    assert "3 batches with no optimizer step" in loop.timeline.notes[0]


# Several loops


def test_validation_inside_training_has_a_timeline_of_its_own(clock: Clock, model: Net, optimizer: Slow) -> None:
    outer = watched(clock, 1, 1, model=model, optimizer=optimizer)
    validation = []
    for x in outer:
        update(model, optimizer, x)
        inner = watched(clock, 2, 2, model=model)
        with torch.no_grad():
            for y in inner:
                model(y)
        validation.append(inner)
    assert phases(outer.timeline) == [STEP | {"other": 14}] * 2
    assert [phases(inner.timeline) for inner in validation] == [[{"data_wait": 2, "forward": 5}] * 2] * 2


def test_a_watch_goes_on_over_epochs(clock: Clock, model: Net, optimizer: Slow) -> None:
    batches = [torch.ones(4, 2)] * 3
    loop = Watch(batches, model=model, optimizer=optimizer, recorder=clock.recorder)
    for _ in range(2):
        for x in loop:
            update(model, optimizer, x)
        clock.sleep(1000)
    assert [step.seconds for step in loop.timeline.steps] == [26.0] * 6
    assert len(loop) == 3


def test_the_load_is_that_of_the_busiest_epoch(monkeypatch: pytest.MonkeyPatch, model: Net, optimizer: Slow) -> None:
    loads = [0.2, 1.5, 0.1]

    class Meter(LoadMeter):
        def __init__(self) -> None:
            super().__init__()
            self.foreign = loads.pop(0)

        def noise(self, spread: float = 0.0, gpu: tuple[str, ...] = ()) -> Noise:
            return Noise(cores=2.0, foreign=self.foreign)

    monkeypatch.setattr("workbench.timeline.recording.LoadMeter", Meter)
    watched = wb.watch([torch.zeros(1)] * 3, model=model, optimizer=optimizer)
    seen = []
    for _epoch in range(3):
        for _batch in watched:
            pass
        noise = watched.timeline.noise
        seen.append(noise.foreign if noise else None)
    assert seen == [0.2, 1.5, 1.5]


def test_one_loader_watched_twice(clock: Clock, model: Net, optimizer: Slow) -> None:
    batches = [torch.ones(4, 2)] * 3
    for _ in range(2):
        loop = Watch(batches, model=model, optimizer=optimizer, recorder=clock.recorder)
        for x in loop:
            update(model, optimizer, x)
        assert len(loop.timeline.steps) == 3


def test_two_watched_loaders_side_by_side(clock: Clock, model: Net, optimizer: Slow) -> None:
    first, second = watched(clock, 1, 1, 1, model=model, optimizer=optimizer), watched(clock, 2, 2, 2, model=model, optimizer=optimizer)
    for x, _ in zip(first, second, strict=True):
        update(model, optimizer, x)
    steps = phases(first.timeline) + phases(second.timeline)
    assert [step["forward"] for step in steps] == [8] * 3
    assert [step["data_wait"] for step in steps] == [3, 3, 2]


def test_a_watch_that_was_left_open_does_not_disturb_the_next(clock: Clock, model: Net, optimizer: Slow) -> None:
    left = iter(watched(clock, 1, 1, model=model, optimizer=optimizer))
    next(left)
    loop = watched(clock, 1, 1, model=model, optimizer=optimizer)
    for x in loop:
        update(model, optimizer, x)
    assert phases(loop.timeline) == [STEP] * 2
    assert model._compiled_call_impl is not None
    del left
    gc.collect()
    assert_nothing_left(model, optimizer)


# Nothing is left behind


def test_break_exception_and_collection_take_everything_away(clock: Clock, model: Net, optimizer: Slow) -> None:
    for x in watched(clock, 1, 1, model=model, optimizer=optimizer):
        assert torch.autograd.backward is not BACKWARD
        update(model, optimizer, x)
        break
    assert_nothing_left(model, optimizer)

    def fail() -> None:
        for _ in watched(clock, 1, 1, model=model, optimizer=optimizer):
            model(torch.ones(4, 3))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fail()
    assert_nothing_left(model, optimizer)

    def broken() -> Iterator[Tensor]:
        raise OSError
        yield

    with contextlib.suppress(OSError):
        for _ in Watch(broken(), model=model, optimizer=optimizer):
            pass
    assert_nothing_left(model, optimizer)
    iterator = iter(watched(clock, 1, 1, model=model, optimizer=optimizer))
    assert_nothing_left(model, optimizer)  # not begun
    next(iterator)
    del iterator
    gc.collect()
    assert_nothing_left(model, optimizer)


def test_an_exception_in_forward_that_the_loop_survives(clock: Clock, model: Net, optimizer: Slow) -> None:
    loop = watched(clock, 1, 1, model=model, optimizer=optimizer)
    for x in loop:
        with contextlib.suppress(RuntimeError):
            model(torch.ones(4, 3))
        clock.sleep(100)
        update(model, optimizer, x)
    assert [step.seconds for step in loop.timeline.steps] == [127.0] * 2
    assert {step["forward"] for step in phases(loop.timeline)} == {108}  # between a forward and a backward


def test_a_loop_that_is_left_within_a_call_of_the_model(clock: Clock, model: Net, optimizer: Slow) -> None:
    class Leaving(Net):
        def forward(self, x: Tensor) -> Tensor:
            batches.close()
            return super().forward(x)

    last = Leaving(clock)
    loop = watched(clock, 1, 1, 1, model=[model, last], optimizer=optimizer)
    batches: Any = iter(loop)
    update(model, optimizer, next(batches))
    last(next(batches))
    assert phases(loop.timeline) == [STEP]
    assert not loop._recording._loops
    assert_nothing_left(last)


def test_copies_of_a_watched_model_are_free_of_us(clock: Clock) -> None:
    model = nn.Linear(2, 1)
    for _ in watched(clock, 1, model=model):
        twin = copy.deepcopy(model)
        stored = io.BytesIO()
        torch.save(model, stored)
        assert b"workbench" not in stored.getvalue()
        assert b"workbench" not in pickle.dumps(model)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=False)
    loop = watched(clock, 1, model=model)
    for x in loop:
        twin(x)
        loaded(x)
    assert any("never called" in note for note in loop.timeline.notes)


def test_a_wrapper_put_around_ours_meanwhile_stays(clock: Clock) -> None:
    calls = []

    def wrap(backward: Any) -> Any:
        return lambda *args, **kwargs: calls.append(backward(*args, **kwargs))

    for number, x in enumerate(watched(clock, 1, 1)):
        if number == 0:
            torch.autograd.backward = wrap(torch.autograd.backward)
        x.requires_grad_().sum().backward()
    for x in watched(clock, 1):
        x.requires_grad_().sum().backward()
    x.sum().backward()
    torch.autograd.backward = BACKWARD
    assert len(calls) == 4


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_compiled_as_without_us(clock: Clock, in_place: bool) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).relu()

    model = Block()
    if in_place:
        model.compile(backend=backend, fullgraph=True)
        called: nn.Module = model
    else:
        called = torch.compile(model, backend=backend, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch about itself
        loop = wb.watch([torch.ones(4, 2)] * 3, model=called)
        for x in loop:
            called(x).sum().backward()
    assert len(graphs) == 1
    assert all(step.phases[2] > 0 for step in loop.timeline.steps)
    assert not model._forward_hooks


# What is refused


def test_times_of_the_host_are_called_that_where_the_device_has_another_clock(
    clock: Clock, model: Net, optimizer: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Net, "parameters", lambda self: iter([SimpleNamespace(device=torch.device("xpu", 0))]))
        loop = wb.watch([torch.ones(4, 2)] * 2, model=model, optimizer=optimizer)
        for _ in range(2):
            for x in loop:
                update(model, optimizer, x)
    assert loop.timeline.clock == "host"
    (note,) = loop.timeline.notes
    assert "the model is on xpu:0, and times are from the host's clock, which runs ahead of that device" in note


def test_what_is_refused(clock: Clock, model: Net, optimizer: Slow) -> None:
    with pytest.raises(
        ValueError, match=r"wb\.watch was given None: it takes a DataLoader or any other iterable of batches, e\.g\. wb\.wat"
    ):
        wb.watch(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a spec is launched: wb\.launch\(spec\)$"):
        wb.watch(wb.RunSpec(task="text-gpt"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"which is measured already: give it the loader itself"):
        wb.watch(wb.watch([1]))
    with pytest.raises(ValueError, match=r"which is measured already"):
        wb.watch(wb.StepTimer().batches([1]))
    with pytest.raises(ValueError, match=r"model=…\) was given a function: it takes the module that your loop calls, or a list"):
        wb.watch([1], model=lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model=…\) was given the class Net: "):
        wb.watch([1], model=Net)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"optimizer=…\) was given a str: it takes a torch\.optim\.Optimizer, or a list"):
        wb.watch([1], optimizer="sgd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"optimizer=…\) was given a Net"):
        wb.watch([1], optimizer=[optimizer, model])  # type: ignore[list-item]


def test_faces(clock: Clock) -> None:
    loop = watched(clock, 1)
    assert repr(loop) == "wb.watch(…)"
    assert "data_wait" in loop._repr_html_()
