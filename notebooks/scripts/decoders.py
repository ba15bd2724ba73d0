"""Language models of notebook 04, with the sizes of real ones: nothing of them is ever allocated there."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import workbench as wb


class Layer(nn.Module):
    """A transformer layer as in Korthikanti et al. 2022 (arXiv 2205.05198): three dropouts, an MLP four times as wide."""

    def __init__(self, width: int, heads: int, explicit: bool = False) -> None:
        super().__init__()
        self.heads, self.explicit = heads, explicit
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention that writes down its matrix of scores, or a fused kernel that does not."""
        if not self.explicit:
            return F.scaled_dot_product_attention(q, k, v)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return self.dropout(scores.softmax(-1)) @ v

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.dropout(self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


def layers(count: int, *, explicit: bool = False) -> nn.Module:
    """Some layers of width 1024 with 16 heads, in 16 bits throughout, as the formula assumes."""
    return nn.Sequential(*(Layer(1024, 16, explicit) for _ in range(count))).to(torch.bfloat16)


class Decoder(nn.Module):
    """Embedding, layers, logits."""

    def __init__(self, vocab: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.logits(self.norm(x))


class Tokens(torch.utils.data.Dataset[Tensor]):
    """Random tokens: for memory only their number counts."""

    def __init__(self, vocab: int, length: int) -> None:
        self.vocab, self.length = vocab, length

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(self.vocab, (self.length + 1,))


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    """The usual loss of a language model."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def gpt_124m() -> wb.Task:
    """12 layers of width 768, sequences of 1024: the smallest GPT-2."""
    return wb.Task(model=lambda: Decoder(50257, 1024, 768, 12, 12), dataset=lambda: Tokens(50257, 1024), loss=next_token)


def decoder_7b() -> wb.Task:
    """32 layers of width 4096, sequences of 4096."""
    return wb.Task(model=lambda: Decoder(32000, 4096, 4096, 32, 32), dataset=lambda: Tokens(32000, 4096), loss=next_token)
