"""Each arm does what its name says while it is on, and nothing of it is left afterwards."""

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from workbench.core.gc import without_gc
from workbench.core.system_load import Noise
from workbench.diagnosis.measure.trials import treatments
from workbench.harness import ablations
from workbench.harness.batches import CachedBatches


class Setup:
    """A small training."""

    def __init__(self, optimizer: str = "AdamW", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.01, **options)
        self.batch = torch.randn(5, 3, 6, 6)
        self.seen: list[Any] = []

    def step(self, batch: Tensor) -> float:
        self.optimizer.zero_grad()
        out = self.model(batch)
        self.seen.append(out.dtype)
        loss: Tensor = out.float().square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @property
    def weights(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value.clone() for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def test_without_optimizer_the_weights_stay_and_gradients_come() -> None:
    setup = Setup()
    before = setup.weights
    with ablations.without_optimizer([setup.optimizer]):
        setup.step(setup.batch)
        assert all(weight.grad is not None for weight in setup.model.parameters())
    assert same(before, setup.weights)
    assert "step" not in vars(setup.optimizer)
    setup.step(setup.batch)
    assert not same(before, setup.weights)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_gradients_that_overflow_are_skipped_in_fp16(kind: str) -> None:
    setup = Setup(kind)
    scheduler = torch.optim.lr_scheduler.StepLR(setup.optimizer, 1)
    setup.step(setup.batch)
    before, state, own = setup.weights, states_of(setup.optimizer), vars(setup.optimizer)["step"]
    with warnings.catch_warnings(), ablations.overflows_skipped([setup.optimizer], "amp_fp16"):
        warnings.simplefilter("error")
        setup.step(setup.batch * float("inf"))
        scheduler.step()
        assert same(before, setup.weights)
        assert same(state, states_of(setup.optimizer))
        setup.step(setup.batch)
        assert not same(before, setup.weights)
    assert all(values.isfinite().all() for values in (*setup.weights, *states_of(setup.optimizer)))
    assert vars(setup.optimizer)["step"] is own
    with ablations.overflows_skipped([setup.optimizer], "amp_bf16"):  # whose range is that of fp32
        setup.step(setup.batch * float("inf"))
    assert not all(weight.isfinite().all() for weight in setup.weights)


def test_fp16_arms_and_changes_skip_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup()
    setup.step(setup.batch)
    before = setup.weights
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    replay = CachedBatches()
    replay.hold([setup.batch])
    monkeypatch.setattr("workbench.diagnosis.measure.trials.has_tf32", lambda device: False)
    arms: dict[str, Any] = {"device": torch.device("cuda"), "precision": "fp32", "micro_batches": 1, "world_size": 1, "gc_share": 0.0}
    arms["noise"] = Noise(cores=2.0)
    (variant,) = [one for one in treatments([setup.model], [setup.optimizer], replay, **arms) if one.name == "precision=amp_fp16"]
    for context in (variant.on(), ablations.changed_step({"precision": "amp_fp16"}, [setup.model], [setup.optimizer])):
        with context:
            setup.step(setup.batch * float("nan"))
        assert same(before, setup.weights)


def test_without_optimizer_closures_and_schedulers_work() -> None:
    setup = Setup("SGD")
    scheduler = torch.optim.lr_scheduler.StepLR(setup.optimizer, 1)
    own = vars(setup.optimizer)["step"]  # the scheduler has put one of its own there
    called = []
    with warnings.catch_warnings(), ablations.without_optimizer([setup.optimizer]):
        warnings.simplefilter("error")
        assert setup.optimizer.step(lambda: called.append(torch.is_grad_enabled()) or 3.0) == 3.0
        scheduler.step()
    assert called == [True]
    assert vars(setup.optimizer)["step"] is own


def test_without_optimizer_a_scaler_goes_on() -> None:
    setup, scaler = Setup(), torch.amp.GradScaler("cpu")
    before = setup.weights
    with ablations.without_optimizer([setup.optimizer]):
        scaler.scale(setup.model(setup.batch).square().mean()).backward()
        scaler.step(setup.optimizer)
        scaler.update()
    assert same(before, setup.weights)


@pytest.mark.parametrize("name", ["fused", "foreach"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("trained", [False, True])
def test_another_implementation_and_back(kind: str, name: str, trained: bool) -> None:
    setup, plain = Setup(kind), Setup(kind)
    if trained:
        setup.step(setup.batch), plain.step(plain.batch)
    assert ablations.has_unused_implementation([setup.optimizer], name)
    with ablations.optimizer_implementation([setup.optimizer], name):
        assert ablations.implementation_of(setup.optimizer) == name
        setup.step(setup.batch)
    plain.step(plain.batch)
    assert ablations.implementation_of(setup.optimizer) == "single"
    for a, b in zip(setup.weights, plain.weights, strict=True):
        torch.testing.assert_close(a, b)
    groups = [{key: value for key, value in one.optimizer.param_groups[0].items() if key != "params"} for one in (setup, plain)]
    assert groups[0] == groups[1]
    setup.step(setup.batch)  # it goes on in the old one


@pytest.mark.parametrize(("fused", "name"), [(False, "fused"), (True, "foreach"), (False, "foreach")])
def test_a_scaler_trains_the_same_with_another_implementation(fused: bool, name: str) -> None:
    """The fused one unscales gradients itself; to another they came unscaled by nobody, and 65,536 times too large."""
    changed, plain = Setup(fused=fused), Setup(fused=fused)
    own = vars(changed.optimizer).get("_step_supports_amp_scaling")

    def step(setup: Setup, scaler: torch.amp.GradScaler) -> None:
        setup.optimizer.zero_grad()
        scaler.scale(setup.model(setup.batch).square().mean()).backward()
        scaler.step(setup.optimizer)
        scaler.update()

    left_to_the_optimizer = list[bool]()
    changed.optimizer.register_step_pre_hook(lambda optimizer, *_: left_to_the_optimizer.append(hasattr(optimizer, "grad_scale")))
    with ablations.optimizer_implementation([changed.optimizer], name):
        step(changed, torch.amp.GradScaler("cpu"))
    step(plain, torch.amp.GradScaler("cpu"))
    for a, b in zip(changed.weights, plain.weights, strict=True):
        torch.testing.assert_close(a, b)
    assert left_to_the_optimizer == [name == "fused"]
    assert vars(changed.optimizer).get("_step_supports_amp_scaling") is own


@pytest.mark.parametrize(("name", "place"), [("foreach", "cpu"), ("fused", "meta")])
def test_steps_are_counted_where_the_implementation_reads_them(name: str, place: str) -> None:
    """On the device by the fused one; any other would wait for the device once per tensor."""
    moved = []

    class Count(Tensor):
        def to(self, *args: Any, **_: Any) -> Tensor:  # type: ignore[override]
            moved.append(str(args[0]))
            return torch.tensor(3.0)

    weight = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.AdamW([weight])
    count = torch.tensor(3.0).as_subclass(Count)
    optimizer.state[weight]["step"] = count
    with ablations.optimizer_implementation([optimizer], name):
        assert moved == [place]
    assert optimizer.state[weight]["step"] is count


def test_what_an_optimizer_cannot_be() -> None:
    setup = Setup("LBFGS")
    assert not ablations.has_unused_implementation([setup.optimizer], "fused")
    assert not ablations.has_unused_implementation([], "fused")
    assert not ablations.has_unused_implementation([Setup(fused=True).optimizer], "fused")
    assert ablations.implementation_of(setup.optimizer) == ""


def test_channels_last_inside_and_the_same_memory_afterwards() -> None:
    setup = Setup("SGD", momentum=0.9)
    setup.step(setup.batch)
    weight = setup.model[0].weight
    assert isinstance(weight, nn.Parameter)
    momentum = setup.optimizer.state[weight]["momentum_buffer"]
    address, values, gradient = weight.data_ptr(), copy.deepcopy(setup.weights), weight.grad
    with ablations.channels_last([setup.model], [setup.optimizer]):
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert setup.optimizer.state[weight]["momentum_buffer"].is_contiguous(memory_format=torch.channels_last)
        setup.step(ablations.to_channels_last(setup.batch))
        assert weight.grad is not None
        assert weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert weight.data_ptr() == address
    assert torch.equal(weight, values[0])
    assert weight.grad is gradient
    assert setup.optimizer.state[weight]["momentum_buffer"] is momentum


def test_images_last_leaves_the_rest_as_it_is() -> None:
    images, labels = ablations.to_channels_last((torch.randn(2, 3, 4, 4), torch.arange(2)))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(labels, torch.arange(2))


def test_mixed_precision_converts_the_weights_anew_in_each_step() -> None:
    setup = Setup()
    mixed = ablations.in_precision(setup.step, "amp_bf16", torch.device("cpu"))
    first, second = mixed(setup.batch), mixed(setup.batch)
    assert setup.seen == [torch.bfloat16] * 2
    assert first != second  # the cache of converted weights would make them equal
    assert not torch.is_autocast_enabled("cpu")
    assert all(weight.dtype == torch.float32 for weight in setup.model.parameters())


def island(x: Tensor, seen: list[Any]) -> Tensor:
    """Keeps its operators in fp32, as numerically delicate parts of models do."""
    with torch.autocast("cpu", enabled=False):
        seen.append(torch.is_autocast_enabled("cpu"))
        return x.float().square() @ torch.eye(2)


class Island(nn.Module):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(island, x, self.seen, use_reentrant=False)  # calls it again in the backward


class Square(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cpu")
        return 2 * grad * ctx.saved_tensors[0]


def test_an_autocast_that_the_step_has_switched_off_is_switched_on() -> None:
    """As in `with torch.autocast("cuda", enabled=args.amp)`: without this, the backward alone would be in mixed precision."""
    setup, seen = Setup(), list[Any]()
    setup.model.append(Island(seen))
    off, enter = torch.autocast("cpu", dtype=torch.bfloat16, enabled=False), torch.autocast.__enter__

    def step(batch: Tensor) -> None:
        with off:
            first: Tensor = setup.model[0](batch)
            setup.seen.append(first.dtype)
            out = Square.apply(setup.model(batch))
        out.sum().backward()

    mixed = ablations.in_precision(step, "amp_bf16", torch.device("cpu"))
    mixed(setup.batch)
    assert setup.seen == [torch.bfloat16]
    assert seen == [False] * 2  # off inside a model stays off, and where autograd calls it once more
    assert not off._enabled
    assert torch.autocast.__enter__ is enter
    step(setup.batch)
    assert setup.seen[1] == torch.float32


def test_a_compiled_step_is_compiled_once_for_an_experiment() -> None:
    compiled = list[Any]()

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    weight = torch.randn(4, 4)

    @torch.compile(backend=backend)
    def step(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            return batch @ weight

    mixed = ablations.in_precision(step, "amp_bf16", torch.device("cpu"))
    for _ in range(4):
        mixed(torch.randn(2, 4))
    assert len(compiled) == 1


def test_threads_and_collector() -> None:
    before = torch.get_num_threads()
    with ablations.threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_all_is_given_back_when_the_step_raises() -> None:
    setup = Setup()
    switches: list[Callable[[], AbstractContextManager[Any]]] = [
        lambda: ablations.without_optimizer([setup.optimizer]),
        lambda: ablations.optimizer_implementation([setup.optimizer], "fused"),
        lambda: ablations.channels_last([setup.model], [setup.optimizer]),
        lambda: ablations.threads(2),
        without_gc,
        lambda: ablations.without_reduction([setup.model]),
    ]
    reduce, threads, addresses = dist.all_reduce, torch.get_num_threads(), [weight.data_ptr() for weight in setup.model.parameters()]
    for switch in switches:
        with contextlib.suppress(KeyboardInterrupt), switch():
            raise KeyboardInterrupt
    assert (dist.all_reduce, torch.get_num_threads(), gc.isenabled()) == (reduce, threads, True)
    assert ablations.implementation_of(setup.optimizer) == "single"
    assert "step" not in vars(setup.optimizer)
    assert [weight.data_ptr() for weight in setup.model.parameters()] == addresses


def test_a_change_of_several_things() -> None:
    setup = Setup()
    change = {"optimizer": "fused", "channels_last": True, "threads": 2, "gc": False, "precision": "amp_bf16"}
    step = ablations.wrap_step(setup.step, change, torch.device("cpu"))
    with ablations.changed_step(change, [setup.model], [setup.optimizer]):
        assert (ablations.implementation_of(setup.optimizer), torch.get_num_threads(), gc.isenabled()) == ("fused", 2, False)
        step(setup.batch)
    assert setup.seen == [torch.bfloat16]
    assert (ablations.implementation_of(setup.optimizer), gc.isenabled()) == ("single", True)


@pytest.fixture
def alone() -> Any:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_reduction_nothing_is_reduced(alone: Any) -> None:
    reduced: list[str] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        reduced.append("bucket")
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = DistributedDataParallel(nn.Linear(3, 1))
    model.register_comm_hook(None, hook)

    def step() -> None:
        model(torch.ones(2, 3)).sum().backward()
        value = torch.ones(1)
        work = dist.all_reduce(value, async_op=True)
        work.wait()
        dist.all_reduce(value)

    step()
    assert reduced == ["bucket"]
    original = dist.all_reduce
    with ablations.without_reduction([model]):
        step()
        with model.no_sync():  # the step's own accumulation
            step()
        step()
    assert reduced == ["bucket"]
    assert dist.all_reduce is original
    step()
    assert reduced == ["bucket"] * 2
