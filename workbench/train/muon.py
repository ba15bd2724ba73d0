"""Muon: orthogonalised momentum for the matrices of a model's blocks, by torch's own Muon; AdamW, as torch recommends, for all others."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.train.blocks import find_blocks

_MUONS = ("momentum", "nesterov", "ns_steps")
_OWN = {"ns_coefficients": (3.4445, -4.775, 2.0315), "adjust_lr_fn": "match_rms_adamw"}


def hidden_names(model: nn.Module) -> frozenset[str]:
    """The names of the matrices in a whole model's repeated blocks, or, if it has none, of all matrices but embeddings: those for Muon."""
    parts = find_blocks(model).values() or [model]
    embedded = {id(weight) for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) for weight in part.parameters()}
    hidden = {id(weight) for part in parts for weight in part.parameters() if weight.dim() == 2} - embedded
    return frozenset(name for name, weight in model.named_parameters() if id(weight) in hidden)


def hidden_matrices(model: nn.Module, hidden: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The parameters of a model in two groups: those for Muon, and the rest.

    Args:
        model: the whole model, or a part of it that keeps the names, such as a stage of a pipeline.
        hidden: the `hidden_names` of the whole model; None = of `model`.
    """
    hidden = hidden_names(model) if hidden is None else hidden
    groups = [
        {"params": [weight for name, weight in model.named_parameters() if (name in hidden) is matrices], "muon": matrices}
        for matrices in (True, False)
    ]
    return [group for group in groups if group["params"]]


class MuonWithAdamW(Optimizer):
    """torch.optim.Muon for groups with `muon=True`, torch.optim.AdamW for the others, as one optimizer with one learning rate.

    Muon's step is scaled to the size of AdamW's ("match_rms_adamw"), so that both take the same learning rate and weight decay.
    `betas` and `eps` are AdamW's, `momentum`, `nesterov` and `ns_steps` (of its Newton-Schulz iteration) are Muon's.
    Source: Liu et al. 2025, arXiv:2502.16982. Given plain parameters, matrices are Muon's; or groups, as `hidden_matrices` makes them.

    Raises:
        RuntimeError: this torch has no Muon.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(f"torch {torch.__version__} has no Muon, which came with torch 2.9; try adamw")
        given = list(params)
        if given and not isinstance(given[0], dict):
            matrices, others = ([weight for weight in given if (weight.dim() == 2) is two] for two in (True, False))
            given = [{"params": part, "muon": two} for part, two in ((matrices, True), (others, False)) if part]
        self._inner: dict[bool, Optimizer] = {}
        options = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        super().__init__(given, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for muon in (True, False):
            groups = [group for group in self.param_groups if bool(group.get("muon")) is muon]
            if not groups:
                continue
            if muon not in self._inner:
                kind: Any = torch.optim.Muon if muon else torch.optim.AdamW
                names = ("lr", "weight_decay", *(_MUONS if muon else ("betas", "eps")))
                options = {**(_OWN if muon else {}), **{name: groups[0][name] for name in names}}
                self._inner[muon] = kind([weight for group in groups for weight in group["params"]], **options)
            inner = self._inner[muon]
            inner.param_groups = [{**inner.defaults, **group, **({"eps": inner.defaults["eps"]} if muon else {})} for group in groups]
            inner.state = self.state
            inner.step()
        return loss
