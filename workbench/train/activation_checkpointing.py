"""Activation checkpointing: the backward recomputes a model's repeated blocks instead of keeping their activations.

"selective" keeps the results of expensive operators for the recomputation. torch's own `create_selective_checkpoint_contexts` keeps the
tensor itself; where the model writes into it later (`scores += bias`), the recomputation starts from wrong numbers, undetected for a matmul
(its result is an "unsafe" view). Here such a result is copied before it is written to.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from workbench.runs.spec import SpecError
from workbench.train.blocks import find_blocks
from workbench.train.sharded_tensors import local_part

_KEPT_NAMES = """
    mm addmm bmm baddbmm linear convolution _convolution cudnn_convolution mkldnn_convolution _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable _scaled_grouped_mm _grouped_mm _scaled_mm
"""
KEPT = frozenset(getattr(torch.ops.aten, name).default for name in _KEPT_NAMES.split() if hasattr(torch.ops.aten, name))
"""Operators whose results are kept under "selective": products, convolutions and attention, which take most of the time."""


def apply_checkpointing(model: nn.Module, kind: str) -> dict[str, nn.Module]:
    """Recompute a model's repeated blocks (see `find_blocks`) in the backward; only the inputs of a block are kept.

    Gradients are the same bit for bit: random numbers are drawn again from the same state. A Hugging Face model uses its own
    `gradient_checkpointing_enable`, which also disables its cache of keys and values.

    Args:
        model: changed in place; names of modules and parameters stay.
        kind: "none", "full" or "selective".

    Returns:
        The blocks by name; empty where the model checkpoints itself.

    Raises:
        SpecError: the model has no repeated blocks.
    """
    if kind == "none":
        return {}
    own = _checkpointing_themselves(model)
    if own:
        options = {"use_reentrant": False} | ({"context_fn": partial(selecting, KEPT)} if kind == "selective" else {})
        for part in own:
            if callable(enable := getattr(part, "activation_checkpointing_enable", None)):
                enable(activation_checkpointing_kwargs=options)
            else:  # the name in older versions of transformers; later ones warn of it
                part.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]
        return {}
    blocks = find_blocks(model)
    if not blocks:
        raise SpecError(
            f'checkpointing="{kind}": {_described(model)}, and no blocks that repeat: modules of one class, with parts of their own, in an '
            "nn.ModuleList or nn.Sequential. Put its layers into one; or do it by hand, in the model's forward: "
            'torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False), with checkpointing="none"'
        )
    for block in blocks.values():
        block.forward = Recomputed(block, block.forward, kind)
    return blocks


class Recomputed:
    """The forward of a block that is recomputed in the backward.

    An object, not a closure, so that a copy of the model gets its own.
    """

    def __init__(self, block: nn.Module, forward: Callable[..., Any], kind: str) -> None:
        self._block, self._forward, self._kind = block, forward, kind

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **options)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=partial(_contexts, self._block, self._kind), **options)


@contextlib.contextmanager
def recomputing(block: nn.Module) -> Any:
    """Entered while a block is recomputed in the backward, where none of its hooks is called.

    A recorder that attributes operators to modules replaces this function by its own context manager.
    """
    yield


def _contexts(block: nn.Module, kind: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    keeping, using = selecting(KEPT) if kind == "selective" else (contextlib.nullcontext(), contextlib.nullcontext())
    return keeping, _Recomputation(block, using)


class _Recomputation:
    """Context of a block's recomputation; entered again in a second backward."""

    def __init__(self, block: nn.Module, using: AbstractContextManager[Any]) -> None:
        self._block, self._using = block, using
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(recomputing(self._block))
        self._entered.enter_context(self._using)

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


def _checkpointing_themselves(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that can checkpoint themselves, as Hugging Face's do."""
    outermost: dict[str, nn.Module] = {}
    for name, part in model.named_modules():
        able = callable(getattr(part, "gradient_checkpointing_enable", None)) and getattr(part, "supports_gradient_checkpointing", True)
        if able and not any(not outer or name.startswith(outer + ".") for outer in outermost):
            outermost[name] = part
    return list(outermost.values())


def _described(model: nn.Module) -> str:
    kinds = [type(part).__name__ for part in model.children()]
    parts = f"has {', '.join(dict.fromkeys(kinds))}" if kinds else "has no parts"
    return f"the model, a {type(model).__name__}, {parts}"


def selecting(kept: Collection[Any]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """A context for a block's forward, and one for its recomputation.

    Args:
        kept: operators (overloads of torch.ops) whose results are kept.
    """
    results: dict[Any, deque[_Result]] = defaultdict(deque)
    return _Keeping(kept, results), _Using(results)


class _Result:
    """The result of one call of an operator."""

    def __init__(self, value: Any) -> None:
        self.value = tree_map_only(Tensor, torch.detach, value)

    @property
    def memories(self) -> list[int]:
        return [_memory(tensor) for tensor in tree_leaves(self.value) if isinstance(tensor, Tensor)]

    def copy(self) -> None:
        self.value = tree_map_only(Tensor, torch.clone, self.value)


def _memory(tensor: Tensor) -> int:
    return int(local_part(tensor).untyped_storage()._cdata)


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, kept: Collection[Any], results: dict[Any, "deque[_Result]"]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._results = kept, results
        self._by_memory: dict[int, _Result] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs or {}):
                if result := self._by_memory.pop(_memory(tensor), None):
                    result.copy()
        output = func(*args, **(kwargs or {}))
        if func in self._kept:
            result = _Result(output)
            self._results[func].append(result)
            self._by_memory.update(dict.fromkeys(result.memories, result))
        return output


class _Using(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, results: dict[Any, "deque[_Result]"]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if results := self._results.get(func):
            return results.popleft().value
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        self._results.clear()  # it may have stopped early; when entered again, it recomputes everything
        super().__exit__(*error)  # type: ignore[no-untyped-call]


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operator writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
