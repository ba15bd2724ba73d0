"""Recurrent layers as cuDNN runs them: one operator for the whole sequence, with a reserve space in place of tensors per step.

Saved for backward are the input, the initial states, the output and the reserve; under autocast also a flat copy of the weights in
16 bits (derivatives.yaml `_cudnn_rnn`; aten/src/ATen/native/cudnn/RNN.cpp `_cudnn_rnn`, `_cudnn_rnn_backward`; cudnn/AutocastRNN.cpp).

cuDNN does not publish the size of its reserve space. `reserve_bytes` counts what backward needs; it gives the two sizes that a maintainer
printed in pytorch issue 2895 (2017; 4 layers of 320, 123 inputs: LSTM 736,000,000, GRU 864,000,000 bytes, if those are 25,000 positions).
Its workspace (there 18 and 13 million bytes) is not modelled.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from workbench.memory.estimate.cuda.overrides import Overrides, aten, composed, exists, has_values, temporary

STEPS = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
"""Values kept per step, hidden unit, layer and direction. LSTM: four gates and the cell; GRU: 6 fits the figure above."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Arguments of a call of a recurrent operator."""

    mode: str
    """"lstm", "gru", "rnn_tanh" or "rnn_relu"."""
    layers: int
    directions: int
    dropout: float
    train: bool
    batch_first: bool
    dtype: torch.dtype
    """In which it computes: that of the input, or of autocast."""
    values: Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]
    """Runs it step by step, from input, states and weights: for tensors with values."""


def reserve_bytes(layers: Layers, positions: int, hidden: int, output: int) -> int:
    """Bytes that cuDNN keeps from forward to backward, in a training step.

    Args:
        layers: of which kind, how many.
        positions: steps × batch; with packed sequences, their elements.
        hidden: hidden units of a layer and direction.
        output: hidden units of a layer and direction after projection.

    Returns:
        per position and direction: `STEPS` × hidden for every layer, and the outputs of all layers but the last (with dropout between
        layers a mask of one byte, too).
    """
    size = layers.dtype.itemsize
    between = (layers.layers - 1) * output * (size + (1 if layers.dropout else 0))
    return positions * layers.directions * (layers.layers * STEPS[layers.mode] * hidden * size + between)


class _Recurrent(torch.autograd.Function):
    """The operator and its derivative, by the memory they take."""

    @staticmethod
    def forward(ctx: Any, layers: Layers, states: int, input: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        initial, weights = rest[:states], rest[states:]
        source, initial = input.to(layers.dtype), tuple(state.to(layers.dtype) for state in initial)
        flat = None if weights[0].dtype is layers.dtype else source.new_empty(sum(weight.numel() for weight in weights))
        moved = None if _sequence_first(source, layers).is_contiguous() else temporary(*source.shape, like=source)
        width = initial[0].size(-1)
        shape = (*source.shape[:-1], width * layers.directions)
        turned = layers.batch_first  # cuDNN's output is steps first
        output = source.new_empty(shape[1], shape[0], shape[2]).transpose(0, 1) if turned else source.new_empty(shape)
        final = [torch.empty_like(state, memory_format=torch.contiguous_format) for state in initial]
        positions = source.numel() // max(source.size(-1), 1)
        size = reserve_bytes(layers, positions, initial[-1].size(-1), width) if layers.train else 0
        reserve = torch.empty(size, dtype=torch.uint8, device=source.device)
        del moved
        ctx.layers, ctx.states, ctx.random = layers, states, None
        if has_values(input):
            ctx.random = torch.get_rng_state() if layers.dropout else None
            _fill((output, *final), layers, input, rest, states)
        ctx.save_for_backward(source, *initial, *weights, output, reserve, flat)
        return output, *final

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layers, states = ctx.layers, ctx.states
        source, *rest = ctx.saved_tensors[:-3]
        held = [
            temporary(*tensor.shape, like=tensor)
            for tensor in (source, gradients[0])
            if not _sequence_first(tensor, layers).is_contiguous()
        ]
        of_input, *of_states = [torch.empty_like(tensor) for tensor in (source, *rest[:states])]
        weights = rest[states:]
        flat = source.new_zeros(sum(weight.numel() for weight in weights))
        views = [part.view_as(weight) for part, weight in zip(flat.split([w.numel() for w in weights]), weights, strict=True)]
        del held
        if has_values(source):
            _fill_gradients((of_input, *of_states, *views), layers, source, rest, states, gradients, ctx.random)
        return None, None, of_input, *of_states, *(view.to(weight.dtype) for view, weight in zip(views, weights, strict=True))


def _sequence_first(tensor: Tensor, layers: Layers) -> Tensor:
    return tensor.transpose(0, 1) if layers.batch_first else tensor


def _fill(results: Sequence[Tensor], layers: Layers, input: Tensor, rest: Sequence[Tensor], states: int) -> None:
    """Values for real tensors, not recorded in a log."""
    with _disable_current_modes(), torch.no_grad():
        for result, value in zip(results, layers.values(input, rest[:states], rest[states:]), strict=True):
            result.copy_(value)


def _fill_gradients(
    results: Sequence[Tensor], layers: Layers, input: Tensor, rest: Sequence[Tensor], states: int, gradients: Sequence[Tensor], random: Any
) -> None:
    """Gradients for real tensors, by running the layers again step by step; dropout draws what it drew before."""
    with _disable_current_modes(), torch.enable_grad(), torch.random.fork_rng(devices=[], enabled=random is not None):
        if random is not None:
            torch.set_rng_state(random)
        leaves = [tensor.detach().float().requires_grad_() for tensor in (input, *rest)]
        outputs = layers.values(leaves[0], leaves[1 : 1 + states], leaves[1 + states :])
        computed = torch.autograd.grad(outputs, leaves, [g.float() for g in gradients], allow_unused=True)
        with torch.no_grad():
            for result, value in zip(results, computed, strict=True):
                result.copy_(value) if value is not None else result.zero_()


def _kernel(mode: str, packed: bool) -> Callable[..., tuple[Tensor, ...]]:
    """The kernel of `lstm.input`, `lstm.data`, `gru.input`, …"""
    name = f"{mode}.{'data' if packed else 'input'}"

    def kernel(input: Tensor, *args: Any) -> tuple[Tensor, ...]:
        batch_sizes, args = ((args[0],), args[1:]) if packed else ((), args)
        given, weights, biases, number, dropout, train, bidirectional, *batch_first = args
        states = list(given) if mode == "lstm" else [given]
        options = (biases, number, dropout, train, bidirectional, *batch_first)

        def values(input: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
            initial = list(states) if mode == "lstm" else states[0]
            result: tuple[Tensor, ...] = composed(name, input, *batch_sizes, initial, list(weights), *options)
            return result

        autocast = torch.is_autocast_enabled("cpu") and input.dtype is not torch.float64
        layers = Layers(
            mode=mode,
            layers=number,
            directions=2 if bidirectional else 1,
            dropout=dropout if train else 0.0,
            train=train,
            batch_first=bool(batch_first and batch_first[0]),
            dtype=torch.get_autocast_dtype("cpu") if autocast else input.dtype,
            values=values,
        )
        result: tuple[Tensor, ...] = _Recurrent.apply(layers, len(states), input, *states, *weights)  # type: ignore[no-untyped-call]
        return result

    return kernel


def _lstm_cell(
    input: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, ...]:
    """One step of an LSTM: on CUDA two matrix products and a fused operator that saves the gates (RNN.cpp, `LSTMCell`)."""
    if has_values(input):
        values: tuple[Tensor, ...] = composed("lstm_cell", input, hx, w_ih, w_hh, b_ih, b_hh)
        return values
    gates = torch.nn.functional.linear(input, w_ih), torch.nn.functional.linear(hx[0], w_hh)
    hidden, cell, _ = aten._thnn_fused_lstm_cell(*gates, hx[1], b_ih, b_hh)
    return hidden, cell


def install(overrides: Overrides) -> None:
    """Override torch's recurrent operators."""
    for mode in STEPS:
        overrides.composite(f"{mode}.input", _kernel(mode, packed=False))
        overrides.composite(f"{mode}.data", _kernel(mode, packed=True))
    if exists("_thnn_fused_lstm_cell"):
        overrides.composite("lstm_cell", _lstm_cell)
