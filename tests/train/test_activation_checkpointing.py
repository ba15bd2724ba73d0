"""Checkpointing: which blocks a model repeats, that gradients stay the same bit for bit, and what is computed again."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.runs.spec import SpecError
from workbench.train import activation_checkpointing
from workbench.train.activation_checkpointing import apply_checkpointing
from workbench.train.blocks import find_blocks
from workbench.train.models import Gpt, ResNet


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """A layer with a list of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum((expert(x) for expert in self.experts), x)


class Stage(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Expert() for _ in range(depth))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]


class Bare(nn.Module):
    """A block without parts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).tanh()


class Layer(nn.Module):
    """A list of different parts, of which the decoder has one more."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Layer(Bare(), Expert())])
        self.decoder = nn.ModuleList(Layer(Bare(), Bare(), Expert()) for _ in range(2))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Expert() for _ in range(2))
        self.decoder = nn.ModuleList(Mixture() for _ in range(2))


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: Gpt(layers=2), ["layers.0", "layers.1"]),
        (lambda: ResNet(classes=2), ["stages.0.0", "stages.1.0", "stages.2.0", "stages.3.0"]),
        (lambda: nn.Sequential(Mixture(), Mixture()), ["0", "1"]),
        (lambda: nn.Sequential(Stage(1), Stage(2)), ["0.blocks.0", "1.blocks.0", "1.blocks.1"]),
        (lambda: nn.Sequential(Bare(), nn.Linear(4, 4), Bare()), ["0", "2"]),
        (lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU())), ["0", "1"]),
        (Halves, ["encoder.0", "decoder.0", "decoder.1"]),
        (EncoderDecoder, ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2, enable_nested_tensor=False), ["layers.0", "layers.1"]),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []),
        (lambda: nn.Linear(4, 4), []),
    ],
)
def test_the_blocks_of_a_model(build: Callable[[], nn.Module], names: list[str]) -> None:
    assert list(find_blocks(build())) == names


def dropping() -> nn.Module:
    torch.manual_seed(0)
    model = Gpt(length=8, width=16, layers=3, heads=2)
    for layer in model.layers:
        layer.mlp.append(nn.Dropout(0.2))  # type: ignore[operator,union-attr]
    return model


class Counting(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def stepped(model: nn.Module) -> tuple[list[Tensor], Counter[str]]:
    """Gradients of a forward and backward, and the operators of the backward."""
    torch.manual_seed(1)
    loss = model(torch.arange(16).view(2, 8)).square().mean()
    with Counting() as counting:
        loss.backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None], counting.calls


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_gradients_are_the_same_bit_for_bit(kind: str, precision: torch.dtype | None) -> None:
    usual, other = dropping(), dropping()
    assert list(apply_checkpointing(other, kind)) == ["layers.0", "layers.1", "layers.2"]
    with torch.autocast("cpu", dtype=precision or torch.bfloat16, enabled=precision is not None):
        expected, _ = stepped(usual)
        gradients, _ = stepped(other)
    assert len(gradients) == len(expected)
    assert all(torch.equal(one, two) for one, two in zip(expected, gradients, strict=True))


class Scribbling(nn.Module):
    """Writes into the results of products."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(x[:, None].expand(-1, 3, -1, -1), x[:, None].transpose(-1, -2))
        scores += self.one(x).mean()
        hidden = self.one(x).mul_(2).add_(1)
        return x + scores.softmax(-1).mean((1, 3))[..., None] * self.other(hidden).tanh()


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_block_may_write_into_what_is_kept(kind: str) -> None:
    gradients = []
    for chosen in ("none", kind):
        torch.manual_seed(0)
        model = nn.Sequential(Scribbling(), Scribbling())
        apply_checkpointing(model, chosen)
        x = torch.randn(2, 5, 8, requires_grad=True)
        model(x).square().sum().backward()
        gradients.append([x.grad, *(weight.grad for weight in model.parameters())])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_a_second_backward_computes_all_of_it_again() -> None:
    apply_checkpointing(model := dropping(), "selective")
    torch.manual_seed(1)
    loss = model(torch.arange(16).view(2, 8)).square().mean()
    loss.backward(retain_graph=True)
    once = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    loss.backward()
    assert all(
        torch.allclose(2 * one, weight.grad) for one, weight in zip(once, model.parameters(), strict=True) if weight.grad is not None
    )


def test_what_is_computed_again() -> None:
    calls = {}
    for kind in ("none", "full", "selective"):
        apply_checkpointing(model := dropping(), kind)
        calls[kind] = stepped(model)[1]
    names = ("addmm", "_scaled_dot_product_flash_attention_for_cpu", "gelu")
    again = {kind: [some[name] - calls["none"][name] for name in names] for kind, some in calls.items()}
    assert again["full"][1:] == [3, 3]
    assert again["full"][0] >= 3 * 3  # three layers; torch stops before a last product that nobody needs
    assert again["selective"] == [0, 0, 3]


def test_a_recorder_can_see_whose_operators_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[nn.Module] = []

    @contextmanager
    def recomputing(block: nn.Module) -> Iterator[None]:
        seen.append(block)
        yield

    monkeypatch.setattr(activation_checkpointing, "recomputing", recomputing)
    for kind in ("full", "selective"):
        apply_checkpointing(model := dropping(), kind)
        stepped(model)
        assert seen == list(reversed(model.layers))  # type: ignore[call-overload]
        seen.clear()


def test_names_stay_and_a_copy_is_one_of_its_own() -> None:
    model = dropping()
    names = list(model.state_dict())
    apply_checkpointing(model, "full")
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.layers[0].norm1.weight.zero_()  # type: ignore[index,union-attr,operator]
        model.layers[0].norm1.bias.fill_(9)  # type: ignore[index,union-attr,operator]
    expected, _ = stepped(dropping())
    gradients, _ = stepped(twin)
    assert all(torch.equal(one, two) for one, two in zip(expected, gradients, strict=True))


def test_nothing_is_kept_for_a_backward_that_does_not_come() -> None:
    apply_checkpointing(model := dropping().eval(), "full")
    with torch.no_grad(), Counting() as counting:
        output = model(torch.arange(16).view(2, 8))
    assert not output.requires_grad
    assert torch.equal(output, dropping().eval()(torch.arange(16).view(2, 8)))
    assert counting.calls["gelu"] == 3


class Library(nn.Module):
    """As Hugging Face's: it can do it by itself."""

    supports_gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Expert() for _ in range(2))
        self.options: Any = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        self.options = gradient_checkpointing_kwargs


def test_a_model_that_can_do_it_by_itself() -> None:
    model = nn.ModuleDict({"inner": Library()})
    assert apply_checkpointing(model, "full") == {}
    assert model["inner"].options == {"use_reentrant": False}
    assert apply_checkpointing(model, "selective") == {}
    assert set(model["inner"].options) == {"use_reentrant", "context_fn"}
    assert len(model["inner"].options["context_fn"]()) == 2
    newer: list[Any] = []  # the name in later versions of transformers, where the other one warns
    model["inner"].activation_checkpointing_enable = lambda activation_checkpointing_kwargs: newer.append(activation_checkpointing_kwargs)
    model["inner"].options = None
    assert apply_checkpointing(model, "full") == {}
    assert newer == [{"use_reentrant": False}]
    assert model["inner"].options is None
    model["inner"].supports_gradient_checkpointing = False
    assert list(apply_checkpointing(model, "full")) == ["inner.layers.0", "inner.layers.1"]


def test_a_model_without_blocks() -> None:
    said = (
        'checkpointing="full": the model, a Sequential, has Linear, Tanh, and no blocks that repeat: .* do it by hand, in the model\'s '
        r"forward: torch\.utils\.checkpoint\.checkpoint\(self\.part, x, use_reentrant=False\)"
    )
    with pytest.raises(SpecError, match=said):
        apply_checkpointing(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), "full")
    with pytest.raises(SpecError, match=r'checkpointing="selective": the model, a Linear, has no parts'):
        apply_checkpointing(nn.Linear(2, 2), "selective")
