"""CPU tensors under `emulate_cuda`: what autograd saves and kernels take are CUDA's, to the byte; and nothing is left behind."""

import gc
import math
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp import autocast_mode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout as imported_by_name
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests import attention_values
from workbench.memory.estimate.cuda import attention, autocast, emulation, operators
from workbench.memory.estimate.cuda import recurrent as semantics_recurrent
from workbench.memory.estimate.cuda.emulation import emulate_cuda

HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def values_of_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real CPU tensors go through fused attention, too."""
    monkeypatch.setattr(emulation, "MODULES", (*emulation.MODULES, attention_values))


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def saved(function: Callable[..., Any], *inputs: Any, besides: Any = ()) -> dict[tuple[torch.dtype, tuple[int, ...]], int]:
    """What the graph keeps besides its inputs: (type, shape) → bytes, each storage once."""
    known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((inputs, list(besides))) if isinstance(leaf, Tensor)}
    kept, holders = {}, []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known and storage.nbytes() > 16:  # seeds and offsets of random numbers
            known.add(storage._cdata)
            holders.append(storage)
            kept[tensor.dtype, tuple(tensor.shape)] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        holders.append(function(*inputs))
    return kept


class Held(TorchDispatchMode):
    """Bytes alive, and the most there were, of storages born while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.ops: list[str] = []
        self.born: list[tuple[torch.dtype, tuple[int, ...]]] = []
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.5
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.ops.append(func.__name__)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self.known | before:
                storage = leaf.untyped_storage()
                self.known.add(storage._cdata)
                self.born.append((leaf.dtype, tuple(leaf.shape)))
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes()).atexit = False
        return result

    def gone(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.now -= size


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for _ in range(3)]


# ------------------------------------------------------------------------------------------------ dropout
@given(rows=st.integers(2, 50), columns=st.integers(2, 50))
@settings(max_examples=10, deadline=None)
def test_dropout_keeps_one_byte_per_element(rows: int, columns: int) -> None:
    with FakeTensorMode(), emulate_cuda(None):
        x = torch.randn(rows, columns, 8, requires_grad=True)
        for drop in (functional.dropout, imported_by_name, nn.Dropout(0.5), torch.dropout):
            kept = saved(drop, x, *((0.5, True) if drop is torch.dropout else ()))
            assert kept == {(torch.bool, (rows, columns, 8)): rows * columns * 8}


def test_dropout_works_on_values_and_does_nothing_in_evaluation() -> None:
    x = torch.ones(1000, requires_grad=True)
    with emulate_cuda(None):
        y = functional.dropout(x, 0.5)
        y.sum().backward()
        assert functional.dropout(x, 0.5, training=False) is x
        assert torch.equal(functional.dropout(x, 1.0), torch.zeros(1000))
        with torch.inference_mode():
            assert set(functional.dropout(x, 0.5).tolist()) == {0.0, 2.0}
    assert set(y.tolist()) == {0.0, 2.0}
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("drop", [functional.dropout2d, functional.alpha_dropout, lambda x: functional.dropout(x * 1, 0.5, inplace=True)])
def test_other_dropouts_are_the_same_on_both(fake: FakeTensorMode, drop: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 6, 5, 5, requires_grad=True)
    before = saved(drop, x)
    with emulate_cuda(None):
        assert saved(drop, x) == before


# ------------------------------------------------------------------------------------------------ attention
CHOICES = [
    ("fp32", {}, "efficient"),
    ("bf16", {"dtype": torch.bfloat16}, "flash"),
    ("fp16", {"dtype": torch.float16}, "flash"),
    ("mask", {"dtype": torch.bfloat16, "mask": (7, 7)}, "efficient"),
    ("mask of a batch", {"dtype": torch.bfloat16, "mask": (2, 1, 1, 7)}, "efficient"),
    ("mask of three dimensions", {"dtype": torch.bfloat16, "mask": (4, 7, 7)}, "math"),
    ("double", {"dtype": torch.float64}, "math"),
    ("three dimensions", {"shape": (2, 7, 16)}, "math"),
    ("odd heads in 16 bits", {"shape": (2, 4, 7, 20), "dtype": torch.bfloat16}, "flash"),
    ("odd heads with a mask", {"shape": (2, 4, 7, 20), "dtype": torch.bfloat16, "mask": (7, 7)}, "math"),
    ("odd heads in fp32", {"shape": (2, 4, 7, 18)}, "math"),
    ("wide heads", {"shape": (2, 4, 7, 264), "dtype": torch.bfloat16}, "efficient"),
    ("V100", {"dtype": torch.float16, "capability": (7, 0)}, "efficient"),
    ("bf16 on a V100", {"dtype": torch.bfloat16, "capability": (7, 0)}, "math"),
    ("RTX 4090", {"shape": (2, 4, 7, 200), "dtype": torch.float16, "capability": (8, 9)}, "efficient"),
    ("H100 with cuDNN", {"dtype": torch.bfloat16, "capability": (9, 0), "prefer_cudnn": True}, "cudnn"),
    ("grouped", {"dtype": torch.bfloat16, "groups": 2}, "flash"),
    ("grouped in fp32", {"groups": 2}, "math"),
]


@pytest.mark.parametrize(("case", "backend"), [choice[1:] for choice in CHOICES], ids=[choice[0] for choice in CHOICES])
def test_backend_of_attention(fake: FakeTensorMode, case: dict[str, Any], backend: str) -> None:
    q, k, v = heads(*case.get("shape", (2, 4, 7, 16)), dtype=case.get("dtype", torch.float32))
    if "groups" in case:
        k, v = k[:, : case["groups"]], v[:, : case["groups"]]
    mask = torch.zeros(case["mask"], dtype=q.dtype) if "mask" in case else None
    options = {"prefer_cudnn": case.get("prefer_cudnn", False)}
    with emulate_cuda(None, case.get("capability"), **options) as semantics:
        out = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa="groups" in case)
        out.sum().backward()
    assert dict(semantics.attention.taken) == {backend: 1}
    assert q.grad.shape == q.shape
    assert any("unfused" in note for note in semantics.notes) is (backend == "math")


def test_chosen_kernels_are_heeded(fake: FakeTensorMode) -> None:
    with emulate_cuda(None) as semantics, sdpa_kernel(SDPBackend.MATH):
        functional.scaled_dot_product_attention(*heads(2, 4, 7, 16))
    assert dict(semantics.attention.taken) == {"math": 1}


@given(batch=st.integers(1, 3), number=st.integers(1, 4), queries=st.integers(2, 70), width=st.sampled_from([8, 16, 64]))
@settings(max_examples=10, deadline=None)
def test_attention_saves_output_and_logsumexp(batch: int, number: int, queries: int, width: int) -> None:
    elements, rows = batch * number * queries * width, -(-queries // 32) * 32
    with FakeTensorMode(), emulate_cuda(None):
        for dtype, lengths in ((torch.float32, rows), (torch.bfloat16, queries)):
            inputs = heads(batch, number, queries, width, dtype=dtype)
            kept = saved(functional.scaled_dot_product_attention, *inputs)
            assert sum(kept.values()) == elements * dtype.itemsize + (4 * batch * number * lengths if batch * number * lengths > 4 else 0)


@pytest.mark.parametrize(("keys", "columns"), [(48, 48), (33, 48), (32, 32)])
def test_masks_become_additive_and_aligned(fake: FakeTensorMode, keys: int, columns: int) -> None:
    q, k, v = (torch.randn(2, 4, length, 16, requires_grad=True) for length in (32, keys, keys))
    with emulate_cuda(None):
        kept = saved(lambda: functional.scaled_dot_product_attention(q, k, v, torch.ones(2, 1, 32, keys, dtype=torch.bool)))
    assert kept[torch.float32, (2, 4, 32, keys)] == 2 * 32 * columns * 4  # of one head: the others see the same storage


def test_flash_backward_sums_dq_in_fp32(fake: FakeTensorMode) -> None:
    inputs = heads(2, 4, 100, 40, dtype=torch.bfloat16)
    with emulate_cuda(None):
        out = functional.scaled_dot_product_attention(*inputs)
        with Held() as held:
            out.backward(torch.empty(2, 100, 4, 40, dtype=torch.bfloat16).transpose(1, 2))
    assert (torch.float32, (2, 128, 4, 64)) in held.born
    assert (torch.float32, (2, 4, 128)) in held.born
    assert held.most == 4 * 2 * 4 * 128 * 65 + 2 * 4 * 2 * 4 * 100 * 40  # those two; the gradient from above and three of its size


@pytest.mark.parametrize(
    ("dtype", "width", "tiles"), [(torch.float32, 32, (2, 64)), (torch.float32, 80, (1, 128)), (torch.bfloat16, 64, (2, 64))]
)
def test_efficient_backward_sums_dq_in_tiles(fake: FakeTensorMode, dtype: torch.dtype, width: int, tiles: tuple[int, int]) -> None:
    inputs = heads(2, 4, 100, width, dtype=dtype)
    number, side = tiles
    with emulate_cuda(None), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = functional.scaled_dot_product_attention(*inputs)
        above = torch.empty_like(out)
        with Held() as held:
            out.backward(above)
    workspace = 2 * 4 * (100 + number * (side * side + 4)) * 4
    assert held.most == workspace + 3 * 2 * 4 * 100 * width * dtype.itemsize


def test_grouped_queries_widen_dk_and_dv(fake: FakeTensorMode) -> None:
    q, k, v = (torch.randn(1, number, 64, 32, dtype=torch.bfloat16, requires_grad=True) for number in (8, 2, 2))
    with emulate_cuda(None):
        kept = saved(lambda: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        out = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        with Held() as held:
            out.sum().backward()
    assert (torch.bfloat16, (1, 8, 64, 32)) in kept
    assert held.born.count((torch.bfloat16, (1, 64, 8, 32))) + held.born.count((torch.bfloat16, (1, 8, 64, 32))) >= 2


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_modules_holds_no_square(fake: FakeTensorMode, masked: bool) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    x = torch.randn(2, 50, 64, requires_grad=True)
    padding = torch.zeros(2, 50, dtype=torch.bool) if masked else None
    with emulate_cuda(None) as semantics:
        kept = saved(lambda: layer(x, src_key_padding_mask=padding))
    assert dict(semantics.attention.taken) == {"efficient": 1}
    assert max(kept.values()) <= 2 * 50 * 128 * 4
    squares = {shape: size for (_, shape), size in kept.items() if shape[-2:] == (50, 50)}
    assert squares == ({(2, 4, 50, 50): 2 * 4 * 64 * 4} if masked else {})  # one row of the mask per head, padded to 64 keys


@pytest.mark.parametrize("kind", ["plain", "causal", "boolean", "bias", "grouped"])
def test_attention_on_values_is_right(kind: str) -> None:
    torch.manual_seed(0)
    inputs = heads(2, 4, 9, 16, dtype=torch.float32)
    mask = torch.rand(2, 1, 9, 9) > 0.3
    mask[..., 0] = True
    bias = torch.randn(9, 9, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        if kind == "grouped":
            q, k, v = q.half(), k[:, :2].half(), v[:, :2].half()
        given = {"boolean": mask, "bias": bias}.get(kind)
        return functional.scaled_dot_product_attention(q, k, v, given, is_causal=kind == "causal", enable_gqa=kind == "grouped")

    def run() -> list[Tensor]:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (*inputs, bias)]
        out = attend(*leaves)
        out.float().square().sum().backward()
        return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    expected = run()
    with emulate_cuda(None):
        found = run()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if kind == "grouped" else 1e-4, atol=1e-2 if kind == "grouped" else 1e-5)


def test_attention_on_values_drops_the_same_in_backward() -> None:
    q, k, v = heads(1, 1, 8, 8)
    v.data = torch.eye(8)[None, None]
    with emulate_cuda(None):
        out = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        out.backward(torch.eye(8)[None, None])
    probabilities = out.detach()[0, 0]  # with v the identity
    torch.testing.assert_close(v.grad[0, 0], probabilities.T)
    assert (probabilities == 0).any()


# ------------------------------------------------------------------------------------------------ autocast
def test_lists_are_those_of_the_header() -> None:
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text().replace("\\\n", " ")
    lists = {
        "LOWER_PRECISION_FP": autocast.LOWER_PRECISION,
        "FP32": autocast.FULL_PRECISION,
        "FP32_SET_OPT_DTYPE": autocast.FULL_PRECISION_RESULT,
        "PROMOTE": autocast.PROMOTE,
    }
    for macro, ours in lists.items():
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*)", text).group(1)
        listed = [".".join(re.split(r",\s*", names)) for names in re.findall(r"_\(([\w, ]+)\)", body)]
        here = autocast.on_cuda()  # an older torch lacks some: rms_norm came after 2.11
        assert [name for name in listed if name not in autocast.NAMED] == [name for name in ours if name in here], macro


def test_the_dispatcher_knows_no_others() -> None:
    assert autocast.unlisted() == frozenset()
    assert {"softmax.int", "layer_norm"} <= autocast.on_cuda() - autocast.on_cpu()
    assert "cat" in autocast.on_cpu() - autocast.on_cuda()


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_types_under_autocast(fake: FakeTensorMode, precision: torch.dtype, device: str) -> None:
    full, low = torch.randn(4, 4), torch.randn(4, 4, dtype=precision)
    with emulate_cuda(precision), torch.autocast(device, precision):
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is precision
        for lowered in (
            full @ full,
            functional.linear(full, full),
            torch.einsum("ij,jk", full, full),
            functional.relu(low),
            torch.mv(full, full[0]),
        ):
            assert lowered.dtype is precision
        for raised in (
            low.exp(),
            low.pow(2),
            functional.layer_norm(low, (4,)),
            functional.softmax(low, -1),
            low.sum(),
            low.sum(0),
            low.norm(),
            torch.linalg.vector_norm(low),
            functional.mse_loss(low, low),
            functional.cross_entropy(low, torch.zeros(4, dtype=torch.int64)),
            torch.cat([full, low]),
            torch.addcmul(low, low, full),
            functional.group_norm(low[None], 2),
        ):
            assert raised.dtype is torch.float32
        assert torch.addcmul(low, low, low).dtype is precision
        assert functional.softmax(low, -1, dtype=torch.float64).dtype is torch.float64
        assert torch.exp(full.double()).dtype is torch.float64
        assert functional.gelu(low).dtype is precision
    assert functional.softmax(low, -1).dtype is precision


def test_cuda_autocast_without_a_type_means_fp16(fake: FakeTensorMode) -> None:
    x = torch.randn(4, 4)
    with emulate_cuda(None), torch.autocast("cuda"):
        assert (x @ x).dtype is torch.float16
        with torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype is torch.float32


def test_sums_do_not_cast_their_input(fake: FakeTensorMode) -> None:
    x = torch.randn(1000, dtype=torch.bfloat16)
    with emulate_cuda(torch.bfloat16), torch.autocast("cpu", torch.bfloat16), Held() as held:
        x.sum()
    assert held.most == 4


@pytest.mark.parametrize("multiply", [torch.mm, lambda x, w: torch.einsum("ij,jk", x, w)], ids=["mm", "einsum"])
def test_weights_are_cast_once_until_autocast_ends(fake: FakeTensorMode, multiply: Callable[..., Tensor]) -> None:
    x, weight = torch.randn(8, 64), nn.Parameter(torch.randn(64, 64))
    with emulate_cuda(torch.bfloat16), Held() as held:
        with torch.autocast("cuda", torch.bfloat16):
            for _ in range(3):
                multiply(x, weight)
            assert held.now == 64 * 64 * 2
            assert held.born.count((torch.bfloat16, (64, 64))) == 1
        assert held.now == 0


def test_losses_that_cuda_refuses_are_refused(fake: FakeTensorMode) -> None:
    x = torch.rand(4)
    with emulate_cuda(torch.bfloat16), torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="with_logits"):
        functional.binary_cross_entropy(x, x)


@pytest.mark.parametrize(("precision", "most"), [(torch.float16, 4), (torch.bfloat16, 8)])
def test_softmax_of_fp16_needs_no_fp32_copy(fake: FakeTensorMode, precision: torch.dtype, most: int) -> None:
    x = torch.randn(10, 100, dtype=precision, requires_grad=True)
    for function in (functional.softmax, functional.log_softmax):
        with emulate_cuda(None), Held() as held:
            out = function(x, -1, dtype=torch.float32)
            assert held.most == most * 1000
            out.sum().backward()
        assert x.grad.dtype is precision


# ------------------------------------------------------------------------------------------------ norms
@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="not fused before torch 2.9")
def test_rms_norm_is_fused(fake: FakeTensorMode) -> None:
    x, norm = torch.randn(6, 10, 64, requires_grad=True), nn.RMSNorm(64)
    with emulate_cuda(None):
        assert saved(norm, x) == {(torch.float32, (64,)): 256, (torch.float32, (6, 10, 1)): 6 * 10 * 4}
        norm(x).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm"), reason="not fused before torch 2.9")
def test_rms_norm_on_values_is_right() -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        x, norm = torch.randn(5, 7, 16, requires_grad=True), nn.RMSNorm(16)
        out = norm(x)
        out.pow(3).sum().backward()
        return [out, x.grad, norm.weight.grad]

    expected = run()
    with emulate_cuda(None):
        torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)


def test_group_norm_saves_a_contiguous_copy(fake: FakeTensorMode) -> None:
    x = torch.randn(2, 8, 5, 5, requires_grad=True)
    last = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    size = x.numel() * 4
    with emulate_cuda(None):
        assert sum(saved(functional.group_norm, last, 2).values()) - sum(saved(functional.group_norm, x, 2).values()) == size


# ------------------------------------------------------------------------------------------------ recurrent layers
@given(
    kind=st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]),
    layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    batch_first=st.booleans(),
    hidden=st.sampled_from([8, 24]),
)
@settings(max_examples=12, deadline=None)
def test_recurrent_layers_save_output_and_reserve(kind: Any, layers: int, bidirectional: bool, batch_first: bool, hidden: int) -> None:
    directions = 2 if bidirectional else 1
    per_step = {nn.LSTM: 5, nn.GRU: 6, nn.RNN: 1}[kind]
    with FakeTensorMode(), emulate_cuda(None):
        layer = kind(16, hidden, layers, bidirectional=bidirectional, batch_first=batch_first)
        x = torch.randn(7, 9, 16, requires_grad=True)
        kept = saved(layer, x, besides=layer.parameters())
        out, _ = layer(x)
        out.sum().backward()
    units = 7 * 9 * hidden * directions * 4
    states = sum(size for (_, shape), size in kept.items() if shape == (layers * directions, 9 if not batch_first else 7, hidden))
    assert sum(kept.values()) == states + units + units * (per_step * layers + layers - 1)
    assert out.shape == (7, 9, hidden * directions)
    assert all(parameter.grad.shape == parameter.shape for parameter in layer.parameters())


def test_reserve_is_what_cudnn_asked_for() -> None:
    """Source: pytorch issue 2895, 4 layers of 320; 25,000 positions are inferred from both figures being multiples of 32,000,000."""
    for mode, size in (("lstm", 736_000_000), ("gru", 864_000_000)):
        layers = semantics_recurrent.Layers(
            mode=mode, layers=4, directions=1, dropout=0.0, train=True, batch_first=True, dtype=torch.float32, values=lambda *_: ()
        )
        assert semantics_recurrent.reserve_bytes(layers, 25_000, 320, 320) == size


def test_recurrent_weights_are_flattened_in_16_bits(fake: FakeTensorMode) -> None:
    layer, x = nn.LSTM(16, 32), torch.randn(5, 3, 16)
    count = sum(parameter.numel() for parameter in layer.parameters())
    with emulate_cuda(torch.float16), torch.autocast("cuda", torch.float16):
        kept = saved(layer, x, besides=layer.parameters())
        out, _ = layer(x)
    out.sum().backward()
    assert kept[torch.float16, (count,)] == 2 * count
    assert out.dtype is torch.float16
    assert layer.weight_hh_l0.grad.dtype is torch.float32


def recurrent(case: str) -> Callable[[Tensor], Tensor]:
    if case == "packed":
        layer = nn.LSTM(8, 16)
        return lambda x: layer(nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2]))[0].data
    if case == "projected":
        layer = nn.LSTM(8, 16, 2, proj_size=4)
    elif case == "lstm":
        layer = nn.LSTM(8, 16, 2, bidirectional=True)
    else:
        layer = {"gru": nn.GRU, "rnn": nn.RNN}[case](8, 16, batch_first=True)
    return lambda x: torch.cat([part.flatten() for part in tree_leaves(layer(x))])


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("case", ["lstm", "gru", "rnn", "packed", "projected"])
def test_recurrent_layers_on_values_are_right(case: str) -> None:
    torch.manual_seed(0)
    layer, given = recurrent(case), torch.randn(5, 3, 8)

    def run() -> list[Tensor]:
        x = given.clone().requires_grad_()
        out = layer(x)
        out.square().sum().backward()
        return [out, x.grad]

    expected = run()
    with emulate_cuda(None):
        torch.testing.assert_close(run(), expected, rtol=1e-5, atol=1e-6)


def test_a_cell_saves_its_gates(fake: FakeTensorMode) -> None:
    cell, x = nn.LSTMCell(8, 16), torch.randn(4, 8, requires_grad=True)
    state = torch.randn(4, 16), torch.randn(4, 16)
    with emulate_cuda(None):
        kept = saved(cell, x, state, besides=cell.parameters())
        sum(cell(x, state)).sum().backward()
    assert kept[torch.float32, (4, 64)] == 4 * 64 * 4
    assert x.grad is not None


# ------------------------------------------------------------------------------------------------ CTC
@pytest.mark.parametrize("lengths", ["tensor", "list"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ctc_runs_and_saves_its_alphas(fake: FakeTensorMode, lengths: str, reduction: str) -> None:
    scores, targets = torch.randn(30, 4, 10, requires_grad=True), torch.ones(4, 7, dtype=torch.int64)
    of_inputs, of_targets = ([30] * 4, [7, 3, 2, 1]) if lengths == "list" else (torch.ones(4, dtype=torch.int64),) * 2

    def lose() -> Tensor:
        return functional.ctc_loss(scores.log_softmax(-1), targets, of_inputs, of_targets, reduction=reduction, zero_infinity=True)

    with emulate_cuda(None):
        kept = saved(lose, besides=[targets])
        losses = lose()
        losses.sum().backward()
    assert kept[torch.float32, (4, 30, 15)] == 4 * 30 * 15 * 4
    assert losses.shape == ((4,) if reduction == "none" else ())
    assert scores.grad.shape == scores.shape


def test_ctc_on_values_is_torchs_own() -> None:
    scores = torch.randn(12, 2, 5).log_softmax(-1)
    arguments = scores, torch.ones(2, 3, dtype=torch.int64), (12, 10), (3, 2)
    expected = functional.ctc_loss(*arguments)
    with emulate_cuda(None):
        assert torch.equal(functional.ctc_loss(*arguments), expected)


# ------------------------------------------------------------------------------------------------ workspaces
def test_convolutions_ask_for_a_workspace(fake: FakeTensorMode) -> None:
    asked: list[operators.Convolution] = []

    def measured(convolution: operators.Convolution, capability: tuple[int, int]) -> int:
        assert capability == (9, 0)
        asked.append(convolution)
        return 12_345_678

    layer = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    with emulate_cuda(None, (9, 0), convolution_workspace=measured) as semantics:
        for most in (12_345_678, 12_345_678):
            with Held() as held:
                out = layer(torch.randn(2, 3, 16, 16))
                out.sum().backward()
            assert held.most > most
            assert (torch.uint8, (12_345_678,)) in held.born
    assert [call.direction for call in asked] == ["forward", "backward"] * 2
    assert asked[0].input == (2, 3, 16, 16)
    assert (asked[0].stride, asked[0].padding, asked[0].groups) == ((2, 2), (1, 1), 1)
    assert not asked[0].channels_last
    assert semantics.notes == ()
    with emulate_cuda(None) as semantics:
        layer(torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)).sum().backward()
    assert semantics.notes == ("cuDNN's convolution workspace is not measured: taken as 0.",)


def test_convolutions_can_be_differentiated_twice() -> None:
    x = torch.randn(1, 2, 5, 5, requires_grad=True, dtype=torch.float64)
    weight = torch.randn(2, 2, 3, 3, requires_grad=True, dtype=torch.float64)
    with emulate_cuda(None):
        assert torch.autograd.gradgradcheck(functional.conv2d, (x, weight))


def test_embeddings_sort_in_backward(fake: FakeTensorMode) -> None:
    layer = nn.Embedding(1000, 8)
    for count, scratch in ((3072, 0), (4000, 5 * 8 * 4000 + (operators.distinct(4000, 1000) + 400) * 8 * 4)):
        indices = torch.zeros(count, dtype=torch.int64)
        with emulate_cuda(None):
            out = layer(indices)
            gradient = torch.empty_like(out)
            with Held() as held:
                out.backward(gradient)
        assert held.most == scratch + 1000 * 8 * 4
        layer.weight.grad = None


@given(indices=st.integers(0, 10**6), rows=st.integers(1, 10**6))
def test_distinct_rows_are_no_more_than_there_are(indices: int, rows: int) -> None:
    assert 0 <= operators.distinct(indices, rows) <= min(indices, rows)


def test_bags_are_kept_for_backward(fake: FakeTensorMode) -> None:
    layer, indices = nn.EmbeddingBag(100, 8, mode="sum"), torch.zeros(50, 20, dtype=torch.int64)
    with emulate_cuda(None), Held() as held:
        out = layer(indices)
        before = held.now
        del out
        assert before - held.now >= 50 * 8 * 4 + 1000 * 8
        assert held.now == 0


def test_indexing_sorts_in_backward(fake: FakeTensorMode) -> None:
    x = torch.randn(100, 8, requires_grad=True)
    rows, columns = torch.zeros(30, 1, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64)
    with emulate_cuda(None):
        out = x[rows, columns]
        with Held() as held:
            out.sum().backward()
    assert (torch.int64, (5, 150)) in held.born


@pytest.mark.parametrize(
    "take",
    [
        lambda x: x[torch.zeros(5, dtype=torch.int64)],
        lambda x: x.gather(1, torch.zeros(100, 3, dtype=torch.int64)),
        lambda x: x.index_select(0, torch.zeros(5, dtype=torch.int64)),
        lambda x: x.max(1).values,
        lambda x: x.topk(2).values,
        lambda x: x.take(torch.zeros(3, dtype=torch.int64)),
    ],
    ids=["index", "gather", "index_select", "max", "topk", "take"],
)
def test_gradients_of_indexing_are_written_in_place(take: Callable[[Tensor], Tensor]) -> None:
    def gradient() -> tuple[Tensor, int]:
        x = torch.arange(20_000.0).view(100, 200).requires_grad_()
        out = take(x)
        above = torch.ones_like(out)
        with Held() as held:
            out.backward(above)
        return x.grad, held.most

    expected, _ = gradient()
    with emulate_cuda(None):
        assert torch.equal(gradient()[0], expected)
        with FakeTensorMode():
            assert gradient()[1] < 1.1 * 20_000 * 4


# ------------------------------------------------------------------------------------------------ optimizers
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop"])
def test_optimizers_go_foreach_unless_told_otherwise(fake: FakeTensorMode, name: str) -> None:
    for foreach in (None, False):
        parameters = [nn.Parameter(torch.randn(50)) for _ in range(2)]
        optimizer = getattr(torch.optim, name)(parameters, lr=0.1, foreach=foreach)
        for parameter in parameters:
            parameter.grad = torch.randn(50)
        with emulate_cuda(None), Held() as held:
            optimizer.step()
        assert any("_foreach" in op for op in held.ops) is (foreach is None)


def test_foreach_adam_takes_one_more_of_everything(fake: FakeTensorMode) -> None:
    most = {}
    for foreach in (None, False):
        parameters = [nn.Parameter(torch.randn(1000)) for _ in range(10)]
        optimizer = torch.optim.Adam(parameters, foreach=foreach)
        with emulate_cuda(None):
            for _ in range(2):
                for parameter in parameters:
                    parameter.grad = torch.randn(1000)
                with Held() as held:
                    optimizer.step()
        most[foreach] = held.most
    assert most[None] == pytest.approx(10 * 4000, rel=0.01)
    assert most[False] == 3 * 4000  # of one parameter at a time


def test_clipping_goes_foreach(fake: FakeTensorMode) -> None:
    parameter = nn.Parameter(torch.randn(50))
    parameter.grad = torch.randn(50)
    with emulate_cuda(None), Held() as held:
        nn.utils.clip_grad_norm_([parameter], 1.0)
    assert any(op.startswith("_foreach_norm") for op in held.ops)


def test_gradient_scaling_runs(fake: FakeTensorMode) -> None:
    layer = nn.Linear(8, 8)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    with emulate_cuda(torch.float16), Held():
        with torch.autocast("cuda", torch.float16):
            loss = layer(torch.randn(4, 8)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


# ------------------------------------------------------------------------------------------------ devices
class SaysCuda(nn.Module):
    """A model that names its device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, device="cuda")
        self.to("cuda")
        self.cuda()

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(8, device="cuda").to(torch.float32) + torch.tensor([1.0], device="cuda:0")
        with torch.device("cuda"):
            position = position + torch.ones(8)
        return self.layer(x.to("cuda") + position.cuda() + x.new_zeros(8, device="cuda")).to("cuda", torch.float64)


def test_cuda_in_a_model_means_here(fake: FakeTensorMode) -> None:
    with emulate_cuda(None):
        x = torch.randn(4, 8).pin_memory()
        torch.cuda.synchronize()
        assert torch.cuda.current_device() == 0
        out = SaysCuda()(x)
        out.sum().backward()
        assert out.dtype is torch.float64
        with Held() as held:
            assert x.to("cuda", non_blocking=True) is x
            assert x.cuda() is x
        assert held.now == 0
    assert not torch.cuda.is_available()


def test_cuda_means_here_for_values() -> None:
    with emulate_cuda(None):
        assert torch.equal(torch.arange(3, device="cuda").to("cuda"), torch.arange(3))


def test_modules_still_change_type() -> None:
    with emulate_cuda(None):
        assert nn.Linear(2, 2).to("cuda", torch.bfloat16).weight.dtype is torch.bfloat16


# ------------------------------------------------------------------------------------------------ the whole
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + functional.dropout(self.narrow(functional.gelu(self.wide(x))), 0.1)


@pytest.mark.parametrize("precision", [None, *HALF])
@pytest.mark.parametrize("reentrant", [False, True])
def test_convolutional_layers_run(fake: FakeTensorMode, precision: torch.dtype | None, reentrant: bool) -> None:
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.GroupNorm(2, 8),
        nn.SiLU(inplace=True),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 8, 2, stride=2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Dropout2d(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    layout = torch.channels_last if reentrant else torch.contiguous_format
    x = torch.randn(2, 3, 16, 16).to(memory_format=layout)
    with emulate_cuda(precision):
        with torch.autocast("cuda", precision, enabled=precision is not None):
            kept = saved(lambda: functional.cross_entropy(layers(x), torch.zeros(2, dtype=torch.int64)))
            loss = functional.cross_entropy(layers(x), torch.zeros(2, dtype=torch.int64))
        loss.backward()
    assert (precision or torch.float32, (2, 8, 16, 16)) in kept
    assert (torch.int64, (2, 8, 8, 8)) in kept
    assert all(parameter.grad.dtype is torch.float32 for parameter in layers.parameters())


@pytest.mark.parametrize("precision", [None, *HALF])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_same(fake: FakeTensorMode, precision: torch.dtype | None, reentrant: bool) -> None:
    block, x = Block(), torch.randn(2, 10, 32, requires_grad=True)
    with emulate_cuda(precision) as semantics:
        with torch.autocast("cuda", precision, enabled=precision is not None):
            out = checkpoint(block, x, use_reentrant=reentrant)
        out.float().sum().backward()
    assert semantics.attention.taken.total() == 2
    assert x.grad is not None


def test_nothing_waits_for_the_garbage_collector(fake: FakeTensorMode) -> None:
    block, lstm = Block(), nn.LSTM(32, 32)
    gc.collect()
    gc.disable()
    try:
        with emulate_cuda(torch.bfloat16), Held() as held:
            with torch.autocast("cuda", torch.bfloat16):
                out = lstm(block(torch.randn(2, 10, 32)))[0].float().square().mean()
            out.backward()
            del out
            for parameter in (*block.parameters(), *lstm.parameters()):
                parameter.grad = None
            assert held.now == 0
    finally:
        gc.enable()


def state() -> dict[str, Any]:
    """What `emulate_cuda` touches."""
    names = torch._C._dispatch_get_all_op_names()
    touched = [name for name in names if name.startswith("aten::") and not name.endswith("out")]
    return {
        "kernels": {name: torch._C._dispatch_dump(name) for name in touched},
        "attributes": [
            autocast_mode.autocast.__init__,
            torch.is_autocast_enabled,
            torch.get_autocast_dtype,
            torch.clear_autocast_cache,
            torch.cuda._lazy_init,
            torch.cuda.current_device,
            nn.Module.to,
            nn.Module.cuda,
            optimizers._get_foreach_kernels_supported_devices,
            list(optimizers._foreach_supported_types),
            functional.dropout,
            functional.scaled_dot_product_attention,
        ],
        "modes": torch._C._len_torch_dispatch_stack(),
    }


def test_all_is_as_it_was() -> None:
    with emulate_cuda(None):
        pass  # torch writes down some of its own at first use
    before = state()
    with emulate_cuda(torch.bfloat16):
        assert state() != before
    assert state() == before
    with pytest.raises(KeyError), emulate_cuda(torch.float16):
        raise KeyError
    assert state() == before


def test_nesting_is_refused() -> None:
    with emulate_cuda(None):
        with pytest.raises(ValueError, match="already on"), emulate_cuda(None):
            pass
        assert functional.dropout(torch.ones(3, requires_grad=True), 0.5).grad_fn.name() == "NativeDropoutBackward0"
    with emulate_cuda(None):
        pass


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"torch\.int8.*bfloat16"), emulate_cuda(torch.int8):
        pass
    with pytest.raises(ValueError, match=r"\(8, 0\) for an A100"), emulate_cuda(None, (9,)):  # type: ignore[arg-type]
        pass


def test_old_gpus_are_noted(fake: FakeTensorMode) -> None:
    with emulate_cuda(torch.bfloat16, (7, 5)) as semantics:
        pass
    assert any("7.5" in note for note in semantics.notes)
    with emulate_cuda(torch.float32) as semantics:
        assert semantics.precision is None


def test_alignment_of_heads() -> None:
    assert [attention.up(number, 32) for number in (0, 1, 32, 33)] == [0, 32, 32, 64]
    assert math.isclose(operators.distinct(10**9, 100), 100)


def _kept_bytes(function: Callable[[], object]) -> int:
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
    return _kept_bytes(lambda: functional.dropout(x, 0.5)) == 1000


def _attention() -> bool:
    x = torch.randn(1, 2, 128, 64, dtype=torch.bfloat16, requires_grad=True)
    known = 2 * x.numel() * 2 + 2 * 128 * 4  # input, output, logsumexp
    return known <= _kept_bytes(lambda: functional.scaled_dot_product_attention(x, x, x)) <= known + 64


def _autocast() -> bool:
    x = torch.randn(4, 4)
    with torch.autocast("cuda", torch.float16):
        return (x @ x).dtype is torch.float16 and functional.softmax(x @ x, -1).dtype is torch.float32


def _recurrent() -> bool:
    layer, x = nn.LSTM(8, 8), torch.randn(5, 3, 8)
    weights, states = sum(parameter.numel() for parameter in layer.parameters()), 2 * 3 * 8
    return _kept_bytes(lambda: layer(x)) == 4 * (weights + states + x.numel() + 15 * 8 * (1 + 5))


def _device() -> bool:
    return torch.zeros(3, device="cuda").to("cuda:0").device.type == "cpu"


CLAIMS: dict[str, Callable[[], bool]] = {
    "dropout with a mask of bytes": _dropout,
    "fused attention": _attention,
    "CUDA's autocast lists": _autocast,
    "recurrent layers in one operator": _recurrent,
    '"cuda" as a device': _device,
}
"""What is said to work with this torch → its test, under `emulate_cuda` and fake tensors."""


@pytest.mark.parametrize("claim", CLAIMS)
def test_this_torch_lets_tensors_cost_what_those_of_cuda_do(claim: str, fake: FakeTensorMode) -> None:
    with emulate_cuda(None):
        assert CLAIMS[claim]()


def test_all_operators_of_autocast_are_known() -> None:
    assert not autocast.unlisted()
