"""The models of the sample tasks: a small residual network for small images and a small GPT on bytes, also as a mixture of experts."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3 × 3 convolutions and a shortcut (He et al. 2015, "basic block")."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network for pictures of about 64 × 64 pixels.

    Args:
        classes: number of outputs.
        width: channels of the first stage; each further stage doubles them and halves the sides.
        blocks: blocks per stage.
    """

    def __init__(self, *, classes: int, width: int = 16, blocks: tuple[int, ...] = (1, 1, 1, 1)) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2))
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            outputs = width << stage
            stages.append(
                nn.Sequential(*(Block(channels if i == 0 else outputs, outputs, 2 if stage and i == 0 else 1) for i in range(count)))
            )
            channels = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, height, width) → (batch, classes)."""
        return self.head(self.stages(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]

    def pieces(self) -> list[nn.Module]:
        """The parts of its forward, in order, for a pipeline."""
        stages: list[Any] = list(self.stages)
        return [self.stem, *(block for stage in stages for block in stage), nn.Sequential(_MeanOfPixels(), self.head)]


class _MeanOfPixels(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and a two-layer perceptron, each after a LayerNorm and beside a shortcut (pre-norm, as in GPT-2)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Decoder-only transformer.

    Args:
        vocabulary: number of tokens; 256 for bytes.
        length: longest input, in tokens.
        width: size of the residual stream.
        layers: number of layers.
        heads: attention heads; divides `width`.
    """

    def __init__(self, *, vocabulary: int = 256, length: int = 128, width: int = 96, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) integers → (batch, length, vocabulary) logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.layers(x)))  # type: ignore[no-any-return]

    def pieces(self) -> list[nn.Module]:
        """The parts of its forward, in order, for a pipeline."""
        return [_Embedding(self.tokens, self.positions), *self.layers, nn.Sequential(self.norm, self.head)]


class _Embedding(nn.Module):
    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Perceptrons of which a router gives each token to a few, in the place of a layer's own (GShard, Lepikhin et al. 2020).

    An expert takes so many tokens of a sequence and no more; those beyond go on without it. Capacity and balance are counted in each
    sequence by itself, so that what a sample adds to the gradient does not depend on its batch, and all shapes are known beforehand.

    Args:
        width: numbers per token in the residual stream.
        experts: perceptrons.
        top: experts of each token.
        spare: an expert takes so many times its even share of a sequence.

    Attributes:
        imbalance: of the last forward: 1 if all experts get as much, up to `experts` (Fedus et al. 2021, equation 4).
        routed: choices of each expert in training since this was set to None, and behind them those for which it had no room.
        exchange: with other ranks, each of which has some of the experts; None = all are here. See `expert_parallel`.
    """

    expert_parameters = ("up", "down")
    """Parameters whose first dimension counts the experts."""

    def __init__(self, width: int, experts: int, top: int = 2, spare: float = 1.25) -> None:
        super().__init__()
        self.experts, self.top, self.spare, self.imbalance = experts, top, spare, torch.zeros(())
        self.routed: Tensor | None = None
        self.exchange: Any = None
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 2 * width))
        self.down = nn.Parameter(torch.empty(experts, 2 * width, width))
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        batch, length, width = x.shape
        experts = self.experts
        capacity = math.ceil(self.spare * self.top * length / experts)
        chances = self.router(x).float().softmax(2)
        shares, chosen = chances.topk(self.top, dim=2)
        shares = (shares / shares.sum(2, keepdim=True)).flatten(1)
        taken = F.one_hot(chosen.flatten(1), experts)
        self.imbalance = experts * (taken.float().mean(1) * chances.mean(1)).sum(1).mean()
        place = (taken.cumsum(1) * taken).sum(2) - 1
        place = torch.where(place < capacity, chosen.flatten(1) * capacity + place, experts * capacity)  # the last is thrown away
        where = place[..., None].expand(-1, -1, width)
        rows = x.new_zeros(batch, experts * capacity + 1, width).scatter(1, where, x.repeat_interleave(self.top, 1))
        inputs = rows[:, :-1].reshape(batch, experts, capacity, width).transpose(0, 1).flatten(1, 2)
        sizes = self.exchange.sizes(inputs) if self.exchange else []
        inputs = self.exchange.to_experts(inputs, sizes) if self.exchange else inputs
        outputs = torch.bmm(F.gelu(torch.bmm(inputs, self.up)), self.down)
        outputs = self.exchange.back(outputs, sizes) if self.exchange else outputs
        outputs = outputs.view(experts, batch, capacity, width).transpose(0, 1)
        if self.training:
            counts = torch.cat([taken.sum((0, 1)), (place == experts * capacity).sum()[None]])
            self.routed = counts if self.routed is None else self.routed + counts
        outputs = F.pad(outputs.flatten(1, 2), (0, 0, 0, 1)).gather(1, where) * shares[..., None].to(x.dtype)
        summed: Tensor = outputs.view(batch, length, self.top, width).sum(2)
        return summed


class MoeGpt(Gpt):
    """A Gpt in which each layer's perceptron is a mixture of experts.

    Args:
        experts: number of perceptrons in each layer.
        **sizes: of the Gpt.
    """

    def __init__(self, *, experts: int = 4, **sizes: int) -> None:
        super().__init__(**sizes)
        for layer in self.layers:
            layer.mlp = Experts(self.tokens.embedding_dim, experts)

    @property
    def imbalance(self) -> Tensor:
        """Mean of the layers' in the last forward."""
        layers: list[Any] = list(self.layers)
        return torch.stack([layer.mlp.imbalance for layer in layers]).mean()
