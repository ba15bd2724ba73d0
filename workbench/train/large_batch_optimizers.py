"""LARS and LAMB: optimizers for large batches, whose step is proportional to the norm of each layer's weights.

Nado et al. 2021 (arXiv 2102.06356) found them no better than equally well tuned SGD and AdamW; try it on your task.

Biases and norms, parameters of one dimension, take the plain step without weight decay, as in published code. Norms are those of full
parameters, also where they are sharded (FSDP2, tensor parallelism): one reduction per step for all of them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from workbench.train.sharded_tensors import dtensor_spec, local_part, shard_groups


@dataclass(frozen=True, slots=True)
class _Layers:
    """This rank's parts of parameters that are stepped together: one device, one dtype, one sharding, adapted or not."""

    groups: tuple[dist.ProcessGroup, ...]
    reduces_on: torch.device | None
    adapted: bool
    states: list[dict[str, Any]] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def norms(self, tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        """fp32 norms of the full tensors of which these are this rank's parts."""
        norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
        if not self.groups:
            return norms
        squares = norms.square().to(self.reduces_on)
        for group in self.groups:
            dist.all_reduce(squares, group=group)
        return squares.sqrt().to(norms.device)

    def state(self, name: str) -> list[Tensor]:
        """This rank's parts of an optimizer state."""
        return [local_part(state[name]) for state in self.states]


class LayerWise(Optimizer):
    """Base of LARS and LAMB: groups parameters that are stepped together."""

    MOMENTS: tuple[str, ...] = ()
    """Names of the states that are as large as the parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step.

        Raises:
            ValueError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for layers in self._layers(group):
                self._update(layers, group)
        return loss

    def _layers(self, group: dict[str, Any]) -> Iterable[_Layers]:
        by_place: dict[Any, _Layers] = {}
        for weight in group["params"]:
            if weight.grad is None:
                continue
            if weight.grad.is_sparse:
                raise ValueError(f"{type(self).__name__} takes no sparse gradients: try the embedding with sparse=False")
            state = self.state[weight]
            if not state:
                state["step"] = 0
                state |= {name: torch.zeros_like(weight, memory_format=torch.preserve_format) for name in self._moments(group)}
            state["step"] += 1
            spec, adapted = dtensor_spec(weight), weight.dim() > 1 or not group["exclude_1d"]
            part, groups = local_part(weight), shard_groups(weight)
            reduces_on = None if spec is None else torch.device(spec.mesh.device_type)
            layers = by_place.setdefault((groups, adapted, part.device, part.dtype), _Layers(groups, reduces_on, adapted))
            layers.states.append(state)
            layers.weights.append(part)
            layers.gradients.append(local_part(weight.grad))
        return by_place.values()

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.MOMENTS

    def _update(self, layers: _Layers, group: dict[str, Any]) -> None:
        raise NotImplementedError


def _ratio(over: Tensor, under: Tensor) -> Tensor:
    """The ratio of norms; 1 where one of them is 0, as for weights that start at 0. Without a branch, so that it works in a dry run."""
    return torch.where((over > 0) & (under > 0), over / under, torch.ones_like(over))


def _scaled(tensors: list[Tensor], factors: Tensor) -> None:
    """Multiply each tensor with its factor, in place."""
    torch._foreach_mul_(tensors, [factor.to(tensor.dtype) for factor, tensor in zip(factors.unbind(), tensors, strict=True)])


def _check_ranges(values: dict[str, Any]) -> None:
    for name, value in values.items():
        below_one = name in ("momentum", "betas")
        for number in value if isinstance(value, tuple | list) else (value,):
            if not 0 <= number < (1 if below_one else float("inf")):
                raise ValueError(f"{name}={value!r}: {'from 0 to below 1' if below_one else 'a number from 0 on'} is allowed")


class LARS(LayerWise):
    """SGD with momentum and a learning rate per layer, in proportion to its weights' norm.

    rate = lr · trust_coefficient · |w| / (|g| + weight_decay · |w|); v ← momentum · v + rate · (g + weight_decay · w); w ← w - v.
    Of `exclude_1d` parameters: rate = lr, weight_decay = 0.

    Source: You, Gitman and Ginsburg 2017, "Large Batch Training of Convolutional Networks", arXiv 1708.03888, algorithm 1. The learning
    rate is inside the momentum's average, as there.
    """

    MOMENTS = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        exclude_1d: bool = True,
    ) -> None:
        """Create the optimizer for parameters.

        Args:
            lr: global learning rate.
            momentum: 0 to below 1; 0 keeps no states.
            weight_decay: part of the gradient.
            trust_coefficient: how far a layer moves in a step, as a part of its norm, at lr 1. Biases and norms know lr alone: where they
                diverge before the layers move far enough, raise this and not lr.
            exclude_1d: biases and norms are neither adapted nor decayed.

        Raises:
            ValueError: a number out of its range.
        """
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient}
        _check_ranges(numbers)
        super().__init__(params, {**numbers, "exclude_1d": exclude_1d})

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.MOMENTS if group["momentum"] else ()

    def _update(self, layers: _Layers, group: dict[str, Any]) -> None:
        if layers.adapted:
            decay, trust = group["weight_decay"], group["trust_coefficient"]
            over = layers.norms(layers.weights)
            rates = _ratio(trust * over, layers.norms(layers.gradients) + decay * over) * group["lr"]
            updates = list(torch._foreach_add(layers.gradients, layers.weights, alpha=decay))
            _scaled(updates, rates)
        else:
            updates = list(torch._foreach_mul(layers.gradients, group["lr"]))
        if group["momentum"]:
            moments = layers.state("momentum_buffer")
            torch._foreach_mul_(moments, group["momentum"])
            torch._foreach_add_(moments, updates)
            updates = moments
        torch._foreach_sub_(layers.weights, updates)


class LAMB(LayerWise):
    """Adam whose step, weight decay included, is made as long as the layer's weights are, times the learning rate.

    m ← β₁m + (1-β₁)g; v ← β₂v + (1-β₂)g²; u = m̂ / (√v̂ + eps) + weight_decay · w; w ← w - lr · |w| / |u| · u, where m̂ and v̂ are m and v
    over 1 - β₁ᵗ and 1 - β₂ᵗ. Of `exclude_1d` parameters: w ← w - lr · u with weight_decay = 0.

    Source: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962, algorithm 2 with
    φ the identity.
    """

    MOMENTS = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        exclude_1d: bool = True,
    ) -> None:
        """Create the optimizer for parameters.

        Args:
            lr: how far a layer moves in a step, as a part of its norm.
            betas: of the averages of the gradient and of its square.
            eps: added to the root.
            weight_decay: added to the step before its norm is taken.
            exclude_1d: biases and norms are neither adapted nor decayed.

        Raises:
            ValueError: a number out of its range.
        """
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _check_ranges(numbers)
        super().__init__(params, {**numbers, "exclude_1d": exclude_1d})

    def _update(self, layers: _Layers, group: dict[str, Any]) -> None:
        (first, second), gradients = group["betas"], layers.gradients
        means, squares = layers.state("exp_avg"), layers.state("exp_avg_sq")
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        steps = [state["step"] for state in layers.states]
        roots = torch._foreach_div(squares, [1 - second**step for step in steps])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, [1 - first**step for step in steps])
        torch._foreach_div_(updates, roots)
        del roots
        if not layers.adapted:
            torch._foreach_add_(layers.weights, updates, alpha=-group["lr"])
            return
        torch._foreach_add_(updates, layers.weights, alpha=group["weight_decay"])
        rates = _ratio(layers.norms(layers.weights), layers.norms(updates)) * group["lr"]
        _scaled(list(updates), rates)
        torch._foreach_sub_(layers.weights, updates)
