"""Small models of several kinds, and the training steps whose memory `memory.py` predicts and measures."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 2048


class Mlp(nn.Module):
    """Linear layers."""

    def __init__(self, width: int = 1024, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Block(nn.Module):
    """A decoder's block: causal attention and a feed-forward part, each after a norm."""

    def __init__(self, width: int, heads: int, inner: int, norm: type[nn.Module] = nn.LayerNorm, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList(norm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.dropout, self.training)


class Decoder(nn.Module):
    """A language model; returns its loss."""

    def __init__(
        self,
        width: int = 256,
        depth: int = 4,
        heads: int = 4,
        inner: int | None = None,
        vocabulary: int = VOCABULARY,
        tied: bool = True,
        **kinds: Any,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(4096, width))
        self.blocks = nn.ModuleList(Block(width, heads, inner or 4 * width, **kinds) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class RootMeanSquare(nn.Module):
    """Llama's norm, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class LlamaBlock(nn.Module):
    """A decoder's block with rotated queries and keys, attention written out (Hugging Face's "eager"), and a gated feed-forward part."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(RootMeanSquare(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        half = q.shape[-1] // 2
        angles = torch.arange(length)[:, None] / 1e4 ** (torch.arange(half) / half)
        cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
        q, k = (each * cos + torch.cat((-each[..., half:], each[..., :half]), -1) * sin for each in (q, k))
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + torch.full((length, length), -torch.inf).triu(1)
        weights = F.dropout(scores.softmax(-1), 0.1, self.training)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        y = self.norms[1](x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(Decoder):
    """A language model of such blocks."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__(width, depth)
        self.blocks, self.norm = nn.ModuleList(LlamaBlock(width, 4, 704) for _ in range(depth)), RootMeanSquare(width)


class Encoder(nn.Module):
    """torch's own encoder, with a mask for padding; returns its loss."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Bottleneck(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        sizes = ((width, inner, 1), (inner, inner, 3), (inner, width, 1))
        self.layers = nn.Sequential(
            *(part for a, b, side in sizes for part in (nn.Conv2d(a, b, side, padding=side // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU()))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


class Residual(nn.Module):
    """A small ResNet."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(*(Bottleneck(width, width // 4) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return out


class Normed(nn.Module):
    """Linear layers, each with a norm, an activation and a residual connection."""

    def __init__(self, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.dropout(F.gelu(layer(norm(x))), 0.1, self.training)
        out: Tensor = self.head(x)
        return out


class Recommender(nn.Module):
    """Tables of embeddings and a small network."""

    def __init__(self, tables: int = 8, rows: int = 20_000, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.top = Mlp(tables * width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.top(torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1))
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training step, fully specified."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    optimizer: str = "adamw"
    precision: str = "fp32"
    accumulation: int = 1
    checkpointing: str = "none"
    compile: str = "none"

    @property
    def title(self) -> str:
        """In words."""
        words = [self.optimizer, self.precision]
        words += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        words += [f"checkpointing {self.checkpointing}"] if self.checkpointing != "none" else []
        words += [f"compile {self.compile}"] if self.compile != "none" else []
        return ", ".join(words)


def tokens(batch: int = 8, length: int = 128, vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Token numbers and their targets; none is 0."""
    return torch.randint(1, vocabulary, (batch, length)), torch.randint(1, vocabulary, (batch, length))


def labelled(*shape: int) -> tuple[Tensor, Tensor]:
    """Numbers and a class for each sample."""
    return torch.randn(*shape), torch.randint(0, 10, shape[:1])


def bags() -> tuple[Tensor, Tensor]:
    """Bags of row numbers and a class for each sample."""
    return torch.randint(0, 20_000, (512, 8, 4)), torch.randint(0, 10, (512,))


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """A language model's own; else the cross-entropy."""
    if isinstance(getattr(model, "module", model), Decoder | Encoder):
        own: Tensor = model(*batch)
        return own
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def _mlp() -> tuple[Tensor, Tensor]:
    return labelled(512, 1024)


def _rows() -> tuple[Tensor, Tensor]:
    return labelled(2048, 256)


def _pictures() -> tuple[Tensor, Tensor]:
    return labelled(16, 3, 96, 96)


CASES: dict[str, Case] = {
    "mlp": Case(model=Mlp, batch=_mlp),
    "mlp sgd": Case(model=Mlp, batch=_mlp, optimizer="sgd(lr=0.1, momentum=0.9)"),
    "mlp bf16": Case(model=Mlp, batch=_mlp, precision="amp_bf16"),
    "decoder": Case(model=Decoder, batch=tokens),
    "decoder bf16": Case(model=Decoder, batch=tokens, precision="amp_bf16"),
    "decoder checkpointed": Case(model=Decoder, batch=tokens, checkpointing="full"),
    "decoder bf16 checkpointed": Case(model=Decoder, batch=tokens, precision="amp_bf16", checkpointing="full"),
    "decoder selective": Case(model=Decoder, batch=tokens, checkpointing="selective"),
    "decoder accumulating": Case(model=Decoder, batch=tokens, accumulation=4, optimizer="sgd"),
    "decoder rmsprop": Case(model=Decoder, batch=tokens, optimizer="rmsprop"),
    "encoder": Case(model=Encoder, batch=tokens),
    "encoder bf16": Case(model=Encoder, batch=tokens, precision="amp_bf16", optimizer="adam"),
    "residual": Case(model=Residual, batch=_pictures, optimizer="sgd(lr=0.1, momentum=0.9)"),
    "residual bf16": Case(model=Residual, batch=_pictures, precision="amp_bf16"),
    "recommender": Case(model=Recommender, batch=bags),
    "recommender adagrad": Case(model=Recommender, batch=bags, optimizer="adagrad"),
}


def _compiled() -> dict[str, Case]:
    sources = {
        **{name: CASES[name] for name in ("mlp", "residual", "residual bf16", "decoder", "decoder bf16", "encoder")},
        "normed": Case(model=Normed, batch=_rows),
        "llama": Case(model=Llama, batch=tokens),
        "llama bf16": Case(model=Llama, batch=tokens, precision="amp_bf16"),
    }
    kinds = [(name, "model") for name in sources] + [(name, "blocks") for name in ("residual", "decoder", "llama")]
    return {f"{name} {kind}": replace(sources[name], compile=kind) for name, kind in kinds}


COMPILED = _compiled()
"""Steps that torch.compile compiles."""
