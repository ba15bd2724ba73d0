"""The models of the sample tasks: a small residual network for small images and a small GPT on bytes."""

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
