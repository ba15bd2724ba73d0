"""What users give: hooks, .cuda() in a builder, compiled, lazy and scripted models, errors of their own, loops that values end."""

import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm, weight_norm

import workbench as wb
from workbench.memory.estimate.building import copied

X, Y = torch.randn(64, 128), torch.randint(0, 10, (64,))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10))


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def total(target: Any, **options: Any) -> int:
    return wb.estimate_memory(target, (X, Y), device=options.pop("device", "cpu"), **options).total


def refused(target: Any, batch: Any = (X, Y), **options: Any) -> str:
    with pytest.raises(ValueError, match=r"[a-z]") as caught:
        wb.estimate_memory(target, batch, device=options.pop("device", "cpu"), **options)
    return str(caught.value)


# --- hooks


def weighted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(weight_norm(nn.Linear(128, 512)), nn.ReLU(), nn.Linear(512, 10))


def spectral() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(128, 512)), nn.ReLU(), nn.Linear(512, 10))


def pruned() -> nn.Module:
    model = mlp()
    prune.random_unstructured(model[0], "weight", amount=0.5)  # type: ignore[no-untyped-call]
    return model


class Keeps(nn.Module):
    """Reads what its own hook, a closure, keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.kept = nn.Linear(128, 2048), nn.Linear(2048, 10), dict[str, Tensor]()
        self.one.register_forward_hook(lambda _module, _args, out: self.kept.__setitem__("a", out * 2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        out: Tensor = self.two(F.relu(hidden)) + self.kept["a"][:, :10]
        return out


class Bound(nn.Module):
    """Its hooks are methods, before and after, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(128, 2048), nn.Linear(2048, 10)
        self.scale = nn.Parameter(torch.ones(2048))
        self.two.register_forward_pre_hook(self.scaled)
        self.two.register_full_backward_hook(self.seen)
        self.one.register_forward_hook(partial(self.rectified, self), with_kwargs=True)
        self.times = 0

    def scaled(self, _module: nn.Module, args: Any) -> Any:
        return (args[0] * self.scale,)

    def seen(self, *_: Any) -> None:
        self.times += 1

    @staticmethod
    def rectified(self: "Bound", _module: nn.Module, _args: Any, _kwargs: Any, out: Tensor) -> Tensor:
        return F.relu(out) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(x))
        return out


@pytest.mark.parametrize("make", [weighted, spectral, pruned, Keeps, Bound])
@pytest.mark.parametrize("device", ["cpu", "H200"])
def test_a_model_with_hooks_is_estimated_as_its_builder(make: Callable[[], nn.Module], device: str) -> None:
    model = make()
    gradients = [weight.grad for weight in model.parameters()]
    breakdown = wb.estimate_memory(model, (X, Y), loss=loss, device=device)
    assert breakdown.total == total(make, loss=loss, device=device)
    assert [weight.grad for weight in model.parameters()] == gradients
    assert not any("hook" in note for note in breakdown.notes)
    assert getattr(model, "times", 0) == 0
    assert getattr(model, "kept", {}) == {}


def test_plain_functions_are_shared_and_objects_copied() -> None:
    seen: list[str] = []

    def plain(*_: Any) -> None:
        seen.append("once")

    model = mlp()
    model[0].register_forward_hook(plain)
    model[2].register_forward_pre_hook(lambda _module, args: (args[0] * model.get_parameter("2.bias")[0],))
    twin = copied(model)
    assert next(iter(twin.get_submodule("0")._forward_hooks.values())) is plain
    rebound: Any = next(iter(twin.get_submodule("2")._forward_pre_hooks.values()))
    assert rebound.__closure__[0].cell_contents is twin
    assert len(model[0]._forward_hooks) == len(model[2]._forward_pre_hooks) == 1


def test_what_hooks_store_is_there_for_the_loss_and_put_back() -> None:
    store: dict[str, list[Any]] = {"features": ["mine"]}

    def keep(_module: nn.Module, _args: Any, out: Tensor) -> None:
        store["features"].append(out)
        store["last"] = [out]

    model = mlp()
    model[0].register_forward_hook(keep)
    assert total(model, loss=lambda m, b: loss(m, b) + store["last"][0].mean()) > total(mlp, loss=loss)
    assert store == {"features": ["mine"]}


def test_a_hook_that_cannot_be_copied_is_left_out_with_a_word() -> None:
    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, *_: Any) -> None:
            raise ZeroDivisionError

    model = mlp()
    model[0].register_forward_hook(Locked())
    breakdown = wb.estimate_memory(model, (X, Y), device="cpu")
    assert breakdown.total == total(mlp)
    assert [note for note in breakdown.notes if "a hook of a Linear, Locked, was left out" in note]


# --- devices in a builder


class Constant(nn.Module):
    def __init__(self, device: Any) -> None:
        super().__init__()
        self.layers = mlp().to(device)
        self.scale = nn.Buffer(torch.ones(128, device=device))
        self.other = torch.zeros(128).to(device) + torch.arange(128, device=device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x * self.scale + self.other)
        return out


@pytest.mark.parametrize("device", ["cpu", "H200"])
def test_cuda_in_a_builder(device: str) -> None:
    plain = total(mlp, device=device)
    before = nn.Module.to, nn.Module.cuda, torch.cuda._lazy_init
    for make in (
        lambda: mlp().cuda(),
        lambda: mlp().to("cuda"),
        lambda: mlp().to(torch.device("cuda", 0)),
        lambda: nn.Sequential(nn.Linear(128, 512, device="cuda"), nn.ReLU(), nn.Linear(512, 10, device="cuda")),
    ):
        assert total(make, device=device) == plain
    half = wb.estimate_memory(lambda: mlp().to("cuda", torch.bfloat16), (X.bfloat16(), Y), device=device)
    assert half.parameters < wb.estimate_memory(mlp, (X, Y), device=device).parameters
    assert total(lambda: Constant("cuda"), device=device) == total(lambda: Constant("cpu"), device=device)
    assert before == (nn.Module.to, nn.Module.cuda, torch.cuda._lazy_init)

    def reads_numbers() -> nn.Module:  # not possible without values
        model = mlp().cuda()
        assert int(torch.tensor(3, device="cuda")) == 3
        return model

    assert total(reads_numbers, device=device) == plain


# --- values


class Formats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        assert f"{out.mean():.3f} {out.mean():>8}" == "1.000      1.0"
        return out


def test_values_are_formatted() -> None:
    assert total(Formats) == total(mlp)
    assert total(Formats, device="H200")
    assert f"{torch.tensor(2.0):.1f}" == "2.0"


class Converges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        error = x.abs().max()
        while error > 1e-3:
            error = error * 0.5
        out: Tensor = self.layer(x * error)
        return out


def test_a_loop_that_a_value_has_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.memory.estimate.dry_run.ENDLESS", 300)
    text = refused(Converges)
    line = Converges.forward.__code__.co_firstlineno + 2
    assert f"test_building.py:{line}" in text
    assert "values decide how often this runs" in text


# --- errors


def test_nothing_is_written_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    assert "does not accept the batch" in refused(mlp, torch.randn(4, 5))
    assert capfd.readouterr().err == ""


class Fails(nn.Module):
    def __init__(self, how: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(128, 10), how

    def forward(self, x: Tensor) -> Tensor:
        self.how()
        out: Tensor = self.layer(x)
        return out


def own_bug() -> None:
    raise ValueError("my own bug")


def own_runtime_error() -> None:
    raise RuntimeError("my state is bad")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (own_bug, "raised ValueError: my own bug"),
        (own_runtime_error, "raised RuntimeError: my state is bad"),
        (lambda: dict[str, int]()["a"], "raised KeyError: 'a'"),
        (lambda: 1 / 0, "raised ZeroDivisionError"),
        (lambda: None + 1, "raised TypeError: unsupported operand"),  # type: ignore[operator]
    ],
)
def test_errors_of_the_users_own(how: Callable[[], Any], said: str) -> None:
    text = refused(lambda: nn.Sequential(Fails(how)))
    assert f"the module '0' (Fails) {said}" in text
    assert "does not accept" not in text
    assert "test_building.py:" in text


def test_shapes_and_arguments_do_not_fit() -> None:
    assert "the model (Linear) does not accept the batch" in refused(lambda: nn.Linear(8, 8), {"pixels": X})
    assert "does not accept the batch" in refused(lambda: nn.Linear(8, 8), X)
    assert "does not accept the batch" in refused(lambda: nn.Conv2d(3, 8, 3), torch.randn(4, 8))
    assert "does not accept the batch" in refused(mlp, (X, Y[:3]), loss=loss)


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), F.mse_loss], ids=["module", "function"])
def test_a_criterion_is_no_loss(criterion: Any) -> None:
    assert "write loss=lambda model, batch: criterion(model(batch[0]), batch[1])" in refused(mlp, loss=criterion)


# --- around the call


def test_what_is_around_the_call_does_not_count() -> None:
    model = mlp()
    plain = total(model), total(mlp, device="H200")
    with torch.no_grad():
        assert (total(model), total(mlp, device="H200")) == plain
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        assert (total(model), total(mlp, device="H200")) == plain
        assert torch.is_inference_mode_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (total(model), total(mlp, device="H200")) == plain
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_are_estimated_as_they_were() -> None:
    compiled: Any = torch.compile(mlp())
    for target in (compiled, lambda: torch.compile(mlp())):
        breakdown = wb.estimate_memory(target, (X, Y), device="cpu")
        assert breakdown.total == total(mlp)
        assert any("torch.compile is left out" in note for note in breakdown.notes)
    assert not any("torch.compile" in note for note in wb.estimate_memory(compiled._orig_mod, (X, Y), device="cpu").notes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parts_that_are_compiled_are_estimated_as_they_were() -> None:
    """A layer, in the way of `torch.compile(layer)` and of `layer.compile()`, a method and a function."""

    class CompiledForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        @torch.compile
        def forward(self, x: Tensor) -> Tensor:
            return cast("Tensor", self.layers(x))

    class CompiledFunction(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.function = mlp(), torch.compile(F.relu)

        def forward(self, x: Tensor) -> Tensor:
            return cast("Tensor", self.function(self.layers(x)))

    def wrapped() -> nn.Module:
        model = mlp()
        model[0] = torch.compile(model[0])
        return model

    def in_place() -> nn.Module:
        model = mlp()
        model[0].compile()
        return model

    for make, plain in ((wrapped, mlp), (in_place, mlp), (CompiledForward, None), (CompiledFunction, None)):
        model = make()
        parts = list(model.modules())
        if known := getattr(torch._dynamo.trace_rules, "get_torch_obj_rule_map", None):
            known.cache_clear()  # as in a process that has compiled nothing yet: on a GPU that is emulated, torch would learn wrong ones
        assert wb.estimate_memory(model, (X, Y), device="H100").total == wb.estimate_memory(make, (X, Y), device="H100").total
        for target in (model, make):
            breakdown = wb.estimate_memory(target, (X, Y), device="cpu")
            assert len([note for note in breakdown.notes if "torch.compile is left out" in note]) == 1
            assert plain is None or breakdown.total == total(plain)
        assert all(one is other for one, other in zip(parts, model.modules(), strict=True)), "the model itself is not touched"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_that_cannot_be_run_on_fakes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted: Any = torch.jit.script(mlp())
        assert "before torch.jit.script" in refused(scripted)
        assert "before torch.jit.script" in refused(lambda: scripted)
    for target in (lambda: nn.Sequential(nn.LazyLinear(10)), nn.Sequential(nn.LazyLinear(10))):
        text = refused(target)
        assert "the module '0', a LazyLinear, has no shapes yet" in text
        assert "run a batch through it" in text
    lazy = nn.Sequential(nn.LazyLinear(10))
    lazy(X)
    assert total(lazy) == total(lambda: nn.Sequential(nn.Linear(128, 10)))
