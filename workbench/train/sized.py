"""Sample tasks for scaling laws: a small GPT on a novel in any width; `"workbench.train.sized:gpt_32"` is 32 wide."""

import re
from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from workbench.data.samples import ByteText
from workbench.runs.task import Task
from workbench.train.models import Gpt
from workbench.train.tasks import WINDOW

HEAD = 8
"""Width of an attention head, the same for all models: wider ones have more heads."""
REACH = 4
"""Kernel of the convolution before the first layer: a byte and the three before it."""
BASE_WIDTH, BASE_LR = 64, 0.01
"""The width of `text-gpt` and its learning rate, from which those of other widths follow."""
WINDOWS = 512
"""Windows of the validation text that are evaluated: the same for every size, so that all share their noise."""


class Mixing(Gpt):
    """A Gpt with a convolution over each token and those just before it.

    Without it, attention first has to learn where the neighbours are. Until then, for hundreds of steps of such a small model, the loss
    stays at that of byte pairs, and then falls abruptly: no scaling law describes such a step.

    Args:
        length: longest input, in tokens.
        width: size of the residual stream.
    """

    def __init__(self, *, length: int, width: int) -> None:
        super().__init__(length=length, width=width, layers=1, heads=width // HEAD)
        self.mixing = nn.Conv1d(width, width, REACH)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) integers → (batch, length, vocabulary) logits."""
        x = self.tokens(tokens)
        mixed = self.mixing(F.pad(x.transpose(1, 2), (REACH - 1, 0))).transpose(1, 2)
        x = x + mixed + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.layers(x)))  # type: ignore[no-any-return]


def __getattr__(name: str) -> Callable[[], Task]:
    """`gpt_<width>`: a function that returns the task of that width, as `workbench.runs.task.resolve` expects."""
    match = re.fullmatch(r"gpt_(\d+)", name)
    if not match:
        raise AttributeError(f"workbench.train.sized has no {name!r}: it offers gpt_<width>, such as gpt_32")
    return partial(gpt, int(match[1]))


def gpt(width: int) -> Task:
    """The task of a width. The learning rate falls with it: Adam moves each weight by as much, and an output sums `width` of them.

    Raises:
        ValueError: the width is not a multiple of HEAD.
    """
    if width < HEAD or width % HEAD:
        raise ValueError(f"gpt_{width}: expected a width that is a multiple of {HEAD}, such as gpt_{max(HEAD, width // HEAD * HEAD)}")
    return Task(
        model=partial(Mixing, length=WINDOW, width=width),
        dataset=partial(ByteText, length=WINDOW),
        loss=_next_byte,
        optimizer=f"adamw(lr={BASE_LR * BASE_WIDTH / width:.4g}, betas=(0.9, 0.95), weight_decay=0.1)",
        evaluate=_validation_loss,
        name=f"gpt-{width}",
    )


def _next_byte(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def _validation_loss(model: nn.Module) -> dict[str, float]:
    """Nats that the model needs for a byte of text it has not seen."""
    data = Subset(ByteText("validation", length=WINDOW), range(WINDOWS))
    device = next(model.parameters()).device
    batches = [batch.to(device) for batch in DataLoader(data, batch_size=128)]
    return {"validation_loss": sum(float(_next_byte(model, batch)) * len(batch) for batch in batches) / WINDOWS}
