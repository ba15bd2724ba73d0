"""Watches a forward from outside: which module runs, calls of torch's losses, ReLUs that are never active, what a module returns."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workbench.harness.batches import map_tensors, tensors_of

LOSSES: dict[Any, str] = {
    getattr(F, name): name
    for name in (
        *("cross_entropy", "nll_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy"),
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    )
}
ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
"""Losses that compare numbers, and broadcast outputs and targets of different shapes."""
NOISE = {
    *(torch.randn, torch.randn_like, torch.normal, Tensor.normal_, F.gumbel_softmax, Tensor.exponential_, torch.multinomial),
    *(torch.randint, torch.randint_like, torch.randperm),
}
"""What a model calls to draw on purpose: noise, as a variational autoencoder does, times of a diffusion, or an order of places to mask."""
UNIFORM = {torch.rand, torch.rand_like, Tensor.uniform_}
"""What draws times or an order as well, or, where its numbers are compared with a probability, a dropout by hand."""
COMPARISONS = {"lt", "le", "gt", "ge", "less", "greater", "floor", "floor_", "item", "__float__"}
"""Names of functions that make a dropout of numbers between 0 and 1."""
DROPOUTS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, torch.dropout, F.scaled_dot_product_attention),
    *(torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_),
}
NORMALISE = {F.normalize, F.cosine_similarity}
"""What makes logits that are cosines."""
SHAPES = (
    *("Squeeze", "Unsqueeze", "Select", "Slice", "Index", "View", "UnsafeView", "Transpose", "Permute", "T", "Unbind", "Split"),
    *("Cat", "Clone", "ToCopy", "Clamp"),
)
"""Nodes of the autograd graph that keep values or bound them."""
OUT_OF_RANGE = 0.25
"""How far targets that are probabilities may lie outside 0 … 1: those of masks that were resized by cubic interpolation may a little."""
RELUS = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu6}
NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def named_modules(models: Sequence[nn.Module]) -> dict[int, str]:
    """Id of a module → its name; the model itself has its class's."""
    names: dict[int, str] = {}
    for model in models:
        for name, part in model.named_modules():
            names.setdefault(id(part), name.replace("_orig_mod.", "") or type(part).__name__)
    return names


@dataclass(slots=True)
class LossCall:
    """A call of one of torch's losses."""

    name: str
    input: Tensor
    target: Tensor
    options: dict[str, Any]
    source: str = ""
    """The operation that has made its input, as its node in the autograd graph is called: Sigmoid, Addmm; "" = not known."""

    def mean(self) -> float:
        """The loss as a mean over its targets, whatever reduction was asked for, in fp32."""
        function: Any = getattr(F, self.name)
        options = {name: value for name, value in self.options.items() if name not in ("reduction", "size_average", "reduce")}
        return float(function(self.input.float(), _in_fp32(self.target), reduction="mean", **map_tensors(_in_fp32, options)))

    def outside(self) -> str:
        """From where to where the targets of a binary cross entropy lie, if these are no probabilities; "" = they are, or may be.

        Targets that the loss leaves out do not count: those of weight 0, and, if the loss of each target is asked for, a single value
        besides several probabilities, such as -1 for a label that is missing.
        """
        if not self.name.startswith("binary"):
            return ""
        weight = self.options.get("weight")
        values = (self.target if weight is None else self.target[weight.expand_as(self.target) != 0]).unique()  # type: ignore[no-untyped-call]
        far = (values < -OUT_OF_RANGE) | (values > 1 + OUT_OF_RANGE)
        left_out = self.options.get("reduction") == "none" and int(far.sum()) == 1 and len(values) > 2
        if left_out or not bool(far.any()):
            return ""
        return f"{float(values.min()):.3g} … {float(values.max()):.3g}"

    @property
    def targets(self) -> int:
        """Over how many targets it goes."""
        ignored = self.options.get("ignore_index")
        whole = self.target if self.name in ("cross_entropy", "nll_loss") else self.input
        count = whole.numel()
        if ignored is not None and not self.target.is_floating_point():
            count = int((self.target != ignored).sum())
        elif self.name == "cross_entropy" and self.target.is_floating_point():
            count = len(self.target)
        return count


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _source(tensor: Tensor) -> str:
    node = tensor.grad_fn
    while node is not None and (name := type(node).__name__.split("Backward")[0]) in SHAPES:
        node = node.next_functions[0][0]
    return "" if node is None else name


class Watched(TorchFunctionMode):
    """Inside, modules, losses and ReLUs are watched."""

    def __init__(self, models: Sequence[nn.Module], *, shuffle: torch.Generator | None = None) -> None:
        """
        Args:
            models: the models whose modules are named.
            shuffle: draws an order for the targets of each loss; None = they stay.
        """
        super().__init__()
        self.losses: list[LossCall] = []
        self.active: dict[str, Tensor] = {}
        """Place of a ReLU → which of its units were active at least once."""
        self.ran: set[int] = set()
        """Ids of the modules that were called."""
        self.attached: set[int] = set()
        """Ids of those that returned something with a path to its parameters."""
        self.root: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """Arguments of the first call of the first model."""
        self.scales: dict[str, tuple[float, float]] = {}
        """Layer of torch that is given data → their root mean square and deviation; if it normalises them, those of its output."""
        self.shuffle = shuffle
        self.moved = 0
        """Calls of losses in which the shuffling has changed a target."""
        self.noise: list[str] = []
        """Functions of `NOISE` that were called."""
        self.uniform: list[str] = []
        """Those of `UNIFORM`."""
        self.compared = False
        """Whether their numbers went into one of `COMPARISONS`."""
        self._drawn: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self.divergence: Tensor | None = None
        """What the first `kl_div` was given as log-probabilities."""
        self.broadcast: tuple[list[int], list[int]] | None = None
        """Shapes [N, 1] and [N], in either order, of outputs and targets that a loss subtracts by itself."""
        self.normalises = False
        """Whether one of `NORMALISE` was called."""
        self.dropped = False
        """Whether one of `DROPOUTS` was active."""
        self._models, self._names, self._stack = models, named_modules(models), list[int]()
        self._relus: dict[str, int] = {}

    @contextlib.contextmanager
    def on(self) -> Iterator["Watched"]:
        """Watch inside the block."""
        before = nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        root = self._models[0].register_forward_pre_hook(self._called, with_kwargs=True) if self._models else None
        try:
            with self:
                yield self
        finally:
            for handle in (before, after, root):
                if handle is not None:
                    handle.remove()
            self._stack.clear()

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._relus.clear()
        self.root = self.root or (args, dict(kwargs))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(id(module))
        self.ran.add(id(module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack and self._stack[-1] == id(module):
            self._stack.pop()
        if any(tensor.requires_grad for tensor in tensors_of(output)):
            self.attached.add(id(module))
        if (place := self._names.get(id(module))) and place not in self.scales and type(module).__module__.startswith("torch.nn."):
            self._measure(place, module, args, output)

    def _measure(self, place: str, module: nn.Module, args: Any, output: Any) -> None:
        """Measure what a layer is given, if no trained layer has made it, or if it is the first layer."""
        weights = list(module.parameters(recurse=False))
        data = [tensor for tensor in tensors_of(args[:1]) if tensor.is_floating_point() and tensor.numel() > 1]
        trained = any(weight.requires_grad for weight in weights) and torch.is_grad_enabled()
        if weights and data and not data[0].requires_grad and (trained or not self.scales):
            used = (output if isinstance(module, NORMALISATIONS) else data[0]).detach().double()
            self.scales[place] = float(used.square().mean().sqrt()), float(used.std())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LOSSES:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            target = given["target"]
            if self.shuffle is not None and isinstance(target, Tensor) and target.ndim:
                given["target"] = target[torch.randperm(len(target), generator=self.shuffle).to(target.device)]
                self.moved += not torch.equal(given["target"], target)
            options = {name: value for name, value in given.items() if name not in ("input", "target")}
            self.losses.append(LossCall(LOSSES[func], given["input"].detach(), target, options, _source(given["input"])))
            return func(*bound.args, **bound.kwargs)
        if func in NOISE or func in UNIFORM:
            calls = self.noise if func in NOISE else self.uniform
            owner = "Tensor" if func.__name__.endswith("_") else "torch.nn.functional" if func is F.gumbel_softmax else "torch"
            calls.append(f"{owner}.{func.__name__}")
        if func is F.kl_div and self.divergence is None:
            self.divergence = (args[0] if args else kwargs["input"]).detach()
        if getattr(func, "__name__", "") in ("sub", "__rsub__") and not self._stack:
            self._compare_shapes(*args[:2])
        self.normalises = self.normalises or func in NORMALISE
        self.dropped = self.dropped or (func in DROPOUTS and _active(func, args, kwargs))
        result = func(*args, **kwargs)
        drawn = any(isinstance(given, Tensor) and id(given) in self._drawn for given in args)
        self.compared = self.compared or (drawn and func.__name__ in COMPARISONS)
        if func in UNIFORM or (drawn and func.__name__ in ("add", "add_", "sub", "__rsub__")):  # as 0.9 + torch.rand(…), rounded down
            self._drawn[id(result)] = result
        if func in RELUS and result.ndim > 1:
            self._count(result.detach())
        return result

    def _compare_shapes(self, *given: Any) -> None:
        """Note the shapes of outputs and targets, of which one is subtracted from the other, if these are [N, 1] and [N]."""
        if len(given) < 2 or not all(isinstance(each, Tensor) and each.ndim for each in given):
            return
        output, target = sorted(given, key=lambda each: not each.requires_grad)
        shapes = list(output.shape), list(target.shape)
        if output.requires_grad and not target.requires_grad and sorted(shapes, key=len) == [[len(output)], [len(output), 1]]:
            self.broadcast = shapes if len(output) > 1 else self.broadcast

    def _count(self, result: Tensor) -> None:
        place = next((name for part in reversed(self._stack) if (name := self._names.get(part))), "")
        number = self._relus[place] = self._relus.get(place, 0) + 1
        unit = 1 if result.ndim > 3 else result.ndim - 1
        active = (result > 0).any(dim=[dim for dim in range(result.ndim) if dim != unit])
        key = f"{place} (ReLU {number})" if number > 1 else place
        known = self.active.get(key)
        self.active[key] = active if known is None or known.shape != active.shape else known | active


def _active(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a dropout is in training mode, or attention has one; other functions always draw."""
    if func is F.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if "dropout" not in func.__name__:
        return True
    given = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(given)


@contextlib.contextmanager
def module_outputs(model: nn.Module, keep: Callable[[Any], Any]) -> Iterator[list[tuple[str, Any]]]:
    """Collects (name of a module, what `keep` makes of its output) in the order in which modules return."""
    outputs: list[tuple[str, Any]] = []

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, output: outputs.append((name, keep(output)))

    handles = [part.register_forward_hook(hook(name or type(model).__name__)) for name, part in model.named_modules()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
