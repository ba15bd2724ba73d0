"""Check: whether this torch lets CPU tensors cost what CUDA's would; seconds, and known bytes."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from workbench.estimate import autocast
from workbench.estimate.semantics import cuda_semantics


def _saved(function: Callable[[], object]) -> int:
    """Bytes of all storages that the graph keeps."""
    kept: dict[int, int] = {}
    alive: list[object] = []

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive.append(function())
    return sum(kept.values())


def _dropout() -> bool:
    x = torch.randn(1000, requires_grad=True)
    return _saved(lambda: functional.dropout(x, 0.5)) == 1000


def _attention() -> bool:
    x = torch.randn(1, 2, 128, 64, dtype=torch.bfloat16, requires_grad=True)
    known = 2 * x.numel() * 2 + 2 * 128 * 4  # input, output, logsumexp
    return known <= _saved(lambda: functional.scaled_dot_product_attention(x, x, x)) <= known + 64


def _autocast() -> bool:
    x = torch.randn(4, 4)
    with torch.autocast("cuda", torch.float16):
        return (x @ x).dtype is torch.float16 and functional.softmax(x @ x, -1).dtype is torch.float32


def _recurrent() -> bool:
    layer, x = nn.LSTM(8, 8), torch.randn(5, 3, 8)
    weights, states = sum(parameter.numel() for parameter in layer.parameters()), 2 * 3 * 8
    return _saved(lambda: layer(x)) == 4 * (weights + states + x.numel() + 15 * 8 * (1 + 5))


def _device() -> bool:
    return torch.zeros(3, device="cuda").to("cuda:0").device.type == "cpu"


CLAIMS: dict[str, Callable[[], bool]] = {
    "dropout with a mask of bytes": _dropout,
    "fused attention": _attention,
    "CUDA's autocast lists": _autocast,
    "recurrent layers in one operator": _recurrent,
    '"cuda" as a device': _device,
}
"""What is said to work → its test, under `cuda_semantics` and fake tensors."""


def check() -> list[str]:
    """What this torch cannot do of CUDA's semantics, in sentences; empty = all is well."""
    found = []
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), cuda_semantics(None):
            for claim, holds in CLAIMS.items():
                try:
                    wrong = "" if holds() else "gives other bytes than expected"
                except Exception as error:
                    wrong = f"raises {type(error).__name__}: {error}"
                if wrong:
                    found.append(f"CUDA's semantics on torch {torch.__version__}: {claim} {wrong}.")
    except Exception as error:
        found.append(f"CUDA's semantics cannot be set up on torch {torch.__version__}: {type(error).__name__}: {error}.")
    if autocast.unlisted():
        found.append(
            f"Autocast on torch {torch.__version__} knows operators that are not known here: {', '.join(sorted(autocast.unlisted()))}."
        )
    return found
