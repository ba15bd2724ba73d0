"""Compiled steps in a dry run: what Inductor would allocate is predicted, equals what a compiled step allocates, and leaves no trace."""

import copy
import pkgutil
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import workbench as wb
from workbench.memory.estimate import building, compiled
from workbench.memory.measure.module_tracker import UNSEEN
from workbench.runs.spec import SpecError
from workbench.train.blocks import compile_parts

pytestmark = pytest.mark.filterwarnings("ignore")  # Dynamo and Inductor warn, and fail where that is an error
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
needs_newer_torch = pytest.mark.skipif(compiled.too_old(), reason=compiled.TOO_OLD)


class Layer(nn.Module):
    """A residual layer with many operators that can be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + F.dropout(F.gelu(self.linear(self.norm(x))) * 2, 0.1)
        return out


class Breaking(Layer):
    """The same in two graphs: between them is what Dynamo cannot trace."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x)


def layered(kind: Callable[[], nn.Module] = Layer) -> nn.Module:
    return nn.Sequential(*(kind() for _ in range(2)))


BATCH = torch.zeros(512, 32)


def loss(model: nn.Module, batch: Any) -> Tensor:
    out: Tensor = model(batch).square().mean()
    return out


def estimated(model: Any = layered, **knobs: Any) -> wb.MemoryBreakdown:
    return wb.estimate_memory(model, BATCH, loss=loss, optimizer="sgd(lr=0.1)", device="cpu", **knobs)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def measured(
    model: nn.Module, knob: str = "none", *, called: Callable[[Tensor], Tensor] | None = None, before: bool = True
) -> wb.MemoryBreakdown:
    """Measure a step of a model; `called`: what the step calls in place of it; `before`: a step is taken before the measurement."""
    compile_parts(model, knob)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call: Any = called or model

    def step(batch: Tensor) -> None:
        loss(call, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    if before:
        step(BATCH)  # compiles
    return wb.measure_memory(step, [BATCH] * 3, model=model, optimizer=optimizer)


def parts(found: wb.MemoryBreakdown) -> tuple[int, ...]:
    return found.parameters, found.gradients, found.activations, found.temporaries, found.inputs, found.total


@needs_compiler
@needs_newer_torch
@pytest.mark.parametrize(("knob", "kind"), [("model", Layer), ("blocks", Breaking)])
def test_a_compiled_step_takes_what_was_predicted(knob: str, kind: Callable[[], nn.Module]) -> None:
    predicted, eager = estimated(lambda: layered(kind), compile=knob), estimated(lambda: layered(kind))
    found = measured(layered(kind), knob)
    assert predicted.total < 0.9 * eager.total, "fused operators keep less"
    assert found.total == pytest.approx(predicted.total, rel=0.01)
    assert found.activations == pytest.approx(predicted.activations, rel=0.01)
    assert not any("compile" in note for note in predicted.notes)


@needs_compiler
@needs_newer_torch
def test_a_model_that_torch_compile_wraps_is_measured_as_it_is_compiled() -> None:
    model = layered()
    found, eager = measured(torch.compile(copy.deepcopy(model)), "none"), measured(model, "none")  # type: ignore[arg-type]
    assert found.total == pytest.approx(estimated(compile="model").total, rel=0.01)
    assert found.total < 0.9 * eager.total
    assert found.activations < 0.9 * eager.activations


@needs_compiler
@needs_newer_torch
@pytest.mark.parametrize("before", [True, False])
def test_a_step_is_split_alike_whatever_compiled_object_it_calls(before: bool) -> None:
    expected = parts(measured(layered(), "model"))
    for compile_call in (torch.compile, lambda model: torch.compile(lambda x: model(x))):
        torch._dynamo.reset()
        model = layered()
        assert parts(measured(model, called=compile_call(model), before=before)) == pytest.approx(expected, rel=0.001)


@needs_compiler
@needs_newer_torch
def test_the_input_of_a_compiled_loss_is_an_activation() -> None:
    criterion = torch.compile(lambda y: (F.gelu(y * 2) * F.gelu(y * 3)).sin())
    model = nn.Linear(32, 128)
    found = measured(model, called=lambda x: criterion(model(x)))
    assert found.activations >= 512 * 128 * 4


@needs_compiler
@needs_newer_torch
def test_programs_in_cpp_are_not_seen_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor
    from torch._inductor.codecache import PyCodeCache

    monkeypatch.setattr(PyCodeCache, "modules", [])
    assert UNSEEN not in measured(layered(), "model").notes
    torch._dynamo.reset()
    with inductor.patch(cpp_wrapper=True):
        assert UNSEEN in measured(layered(), "model").notes


@needs_newer_torch
def test_no_kernel_is_compiled_and_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("PATH", "")
    model = layered()
    calls = 0

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        return graph.forward

    own = torch.compile(model, backend=counted)
    own(BATCH)
    assert estimated(compile="model").total < estimated().total
    torch.compile(lambda x: x + 1, backend=counted)(BATCH)
    own(BATCH)
    assert calls in (2, 3), "one for each function; a function that the dry run has compiled is compiled again"
    assert type(own(BATCH)) is Tensor


@needs_newer_torch
def test_of_a_model_that_is_compiled_no_note_says_that_this_is_left_out() -> None:
    """`compile` is in effect; the note is one for a step that is estimated as it was before torch.compile."""
    expected = estimated(compile="model").total
    for target in (torch.compile(layered()), lambda: torch.compile(layered())):
        assert any("torch.compile is left out" in note for note in estimated(target).notes)
        found = estimated(target, compile="model")
        assert found.total == expected
        assert not any("compile" in note for note in found.notes)
    (note,) = (note for note in wb.estimate_memory(target, BATCH, loss=loss, device="H100", compile="model").notes if "compile" in note)
    assert note.startswith('compile="model" is left out'), "one reason, not two"


@needs_newer_torch
def test_where_it_cannot_be_compiled_the_eager_step_is_estimated_and_a_note_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("no such function\nin this torch")

    monkeypatch.setattr(compiled, "_load", broken)
    found = estimated(compile="model")
    assert found.total == estimated().total
    (note,) = (note for note in found.notes if "compile" in note)
    assert note.startswith('compile="model" is left out, so that the eager step is estimated')
    assert "RuntimeError: no such function in this torch" in note
    for knob, device, why in (("model(backend=cudagraphs)", "cpu", "backend 'cudagraphs'"), ("model", "H100", 'device="cpu" only')):
        found = wb.estimate_memory(layered, BATCH, loss=loss, device=device, compile=knob)
        assert any("is left out" in note and why in note for note in found.notes)


class Older:
    """Something of torch without one of its attributes."""

    def __init__(self, newer: Any, lacks: str) -> None:
        self._newer, self._lacks = newer, lacks

    def __getattr__(self, name: str) -> Any:
        if name == self._lacks:
            raise AttributeError(name)
        return getattr(self._newer, name)


@pytest.mark.parametrize(
    ("place", "lacks"),
    [
        ("torch._functorch.config", "force_non_lazy_backward_lowering"),
        ("workbench.memory.estimate.compiled.TorchDispatchMode", "ignore_compile_internals"),
    ],
)
def test_an_older_torch_is_said_to_be_too_old(monkeypatch: pytest.MonkeyPatch, place: str, lacks: str) -> None:
    monkeypatch.setattr(place, Older(pkgutil.resolve_name(place), lacks))
    found = estimated(compile="model")
    assert found.total == estimated().total
    assert [note for note in found.notes if "compile" in note] == [f'compile="model" {compiled.NOT_COMPILED} ({compiled.TOO_OLD})']


def test_the_note_on_a_compiled_module_names_the_knob_only_where_it_is_followed() -> None:
    assert ('compile="model" estimates that' in building.COMPILED) == (not compiled.too_old())


def test_only_options_that_this_torch_has_are_set() -> None:
    from torch._functorch import config

    was = config.enable_autograd_cache
    with compiled._set(config, enable_autograd_cache=not was, no_such_option=True):
        assert config.enable_autograd_cache is not was
    assert config.enable_autograd_cache is was


class Asking(Layer):
    """The same, in graphs that end where a value is read."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if x.sum() > 0:
            x = x * x.mean().item()
        return super().forward(x)


@needs_newer_torch
def test_a_value_that_is_read_between_graphs_is_answered_as_in_an_eager_step() -> None:
    found = estimated(Asking, compile="model")
    assert any("asked for the value of a tensor" in note for note in found.notes)
    assert not any("is left out" in note for note in found.notes)
    assert found.total < 0.9 * estimated(Asking).total


@needs_newer_torch
def test_recurrent_layers_are_not_compiled_and_what_is_not_known_of_them_is_said() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.lstm(x[None])[0]
            return out

    found, eager = estimated(Recurrent, compile="model"), estimated(Recurrent)
    assert found.total == eager.total
    assert any("oneDNN" in note for note in eager.notes)
    assert found.notes == (*eager.notes, compiled.NOTHING)


@needs_newer_torch
def test_the_callers_inference_mode_does_not_matter() -> None:
    compiled._warm_up.cache_clear()
    with torch.inference_mode():
        assert not any("compile" in note for note in estimated(compile="blocks").notes)


@needs_newer_torch
def test_nothing_to_compile_is_said() -> None:
    class Disabled(Layer):
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    found = estimated(Disabled, compile="model")
    assert compiled.NOTHING in found.notes
    assert found.total == estimated(Disabled).total
    with pytest.raises(SpecError, match="no blocks that repeat"):
        estimated(lambda: nn.Linear(32, 32), compile="blocks")


@needs_newer_torch
def test_the_largest_micro_batch_is_that_of_the_compiled_step() -> None:
    options: dict[str, Any] = {"batch": BATCH, "loss": loss, "capacity": 8 << 20}
    eager, fused = (wb.max_micro_batch(layered, "cpu", **options, compile=knob) for knob in ("none", "model"))
    assert fused.micro_batch > 1.1 * eager.micro_batch
    assert fused.breakdown.total <= 0.95 * (8 << 20) < fused.next.total
    assert fused.runs < 15, "no bisection"
