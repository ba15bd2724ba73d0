"""How a device is filled, and what is copied: exact on files written by hand, in the words that files of CUDA machines have."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traced import event, launched, on_cpu, on_device, op, write
from workbench.traces.analysis.copies import Copies, curve, kind_of
from workbench.traces.analysis.kernels import Kernels, could_use_tensor_cores, highest, uses_tensor_cores
from workbench.traces.analysis.trace import Trace

US = 1e-6


def load(tmp_path: Path, *events: Any, **header: Any) -> Trace:
    return Trace.load(write(tmp_path / "a.json", events, **header))


def told(blocks: float | None = None, occupancy: float | None = None) -> dict[str, Any]:
    given = {"blocks per SM": blocks, "est. achieved occupancy %": occupancy}
    return {name: value for name, value in given.items() if value is not None}


def filled() -> list[Any]:
    """100 µs without marks: a product in fp32 without tensor cores, a convolution with them, an addition that tells nothing."""
    return [
        op("aten::mm", 0, 10, args={"Input Dims": [[8, 8], [8, 8]], "Input type": ["float", "float"]}),
        *launched("ampere_sgemm_128x64_tn", 2, 10, 30, 1, **told(0.5, 20)),
        op("aten::conv2d", 20, 12, args={"Input type": ["c10::Half"]}),
        op("aten::cudnn_convolution", 20, 10, args={"Input type": ["c10::Half"]}),
        *launched("sm80_xmma_fprop_implicit_gemm_tensor16x8x8_execute", 22, 40, 10, 2, **told(4, 50)),
        *launched("nchwToNhwcKernel", 24, 50, 10, 3, **told(8, 100)),
        op("aten::add", 40, 5),
        *launched("add", 42, 60, 40, 4, **told(-1)),
    ]


def test_kernels(tmp_path: Path) -> None:
    found = load(tmp_path, *filled()).kernels()
    assert [(one.name, one.count, round(one.seconds / US)) for one in found.rows[:2]] == [("add", 1, 40), ("ampere_sgemm_128x64_tn", 1, 30)]
    rows = {one.name: one for one in found.rows}
    assert (rows["ampere_sgemm_128x64_tn"].occupancy, rows["ampere_sgemm_128x64_tn"].blocks_per_sm) == (0.2, 0.5)
    assert (rows["add"].occupancy, rows["add"].blocks_per_sm) == (None, None)
    assert found.occupancy == pytest.approx((30 * 0.2 + 10 * 0.5 + 10 * 1) / 50)
    assert found.blocks_per_sm == pytest.approx((30 * 0.5 + 10 * 4 + 10 * 8) / 50)
    assert found.utilization == pytest.approx(0.9)
    assert found.sm_efficiency == pytest.approx((30 * 0.5 + 20) / 100)
    assert found.tensor_share == pytest.approx(10 / 90)
    assert found.eligible_share == pytest.approx(50 / 90)


def test_who_could_use_tensor_cores(tmp_path: Path) -> None:
    """The innermost operator that could, with all that it launches, by the type of its input."""
    found = load(tmp_path, *filled()).kernels()
    shown = [(one.name, one.dtype, one.count, round(one.seconds / US), one.tensor_share) for one in found.products]
    assert shown == [("aten::mm", "fp32", 1, 30, 0), ("aten::cudnn_convolution", "fp16", 2, 20, 0.5)]
    assert "by aten::cudnn_convolution in fp16" in str(found)
    assert "• 11 % of kernel time on tensor cores, by their names\n• 56 % launched by operators that could use them" in str(found)


def test_a_kernel_is_weighed_by_its_time(tmp_path: Path) -> None:
    rows = [*launched("k", 0, 10, 10, 1, **told(1, 10)), *launched("k", 2, 20, 30, 2, **told(3, 50)), *launched("k", 4, 60, 40, 3)]
    (row,) = load(tmp_path, *rows).kernels().rows
    assert (row.occupancy, row.blocks_per_sm) == (pytest.approx(0.4), pytest.approx(2.5))


def test_an_occupancy_that_cannot_be(tmp_path: Path) -> None:
    """0 may be a rounded little of a small grid; of one with a block for each multiprocessor it is an estimate that failed."""
    rows = [*launched("full", 0, 10, 30, 1, **told(2, 0)), *launched("small", 2, 50, 10, 2, **told(0.01, 0))]
    found = load(tmp_path, *rows).kernels()
    assert {one.name: one.occupancy for one in found.rows} == {"full": None, "small": 0}
    assert "for 75 % of kernel time the profiler's occupancy is 0, which is impossible" in found.notes[0]


def test_collectives_and_copies_are_no_kernels(tmp_path: Path) -> None:
    trace = load(tmp_path, *on_device())
    found = trace.kernels()
    assert {one.name for one in found.rows} == {"sgemm_128x64", "multi_tensor_apply_kernel"}
    assert "the file does not say occupancy and blocks per SM" in found.notes[0]
    assert (found.occupancy, found.sm_efficiency) == (None, None)
    assert found.utilization == pytest.approx(0.6)


def test_a_collective_keeps_the_device_busy(tmp_path: Path) -> None:
    """Of 100 µs a product runs for 30, NCCL for 60, of which 10 beside it: its blocks are few."""
    rows = [
        op("aten::mm", 0, 100),
        *launched("gemm", 0, 10, 30, 1, **told(2)),
        *launched("ncclDevKernel_AllReduce", 2, 30, 60, 2, **told(0.2)),
    ]
    found = load(tmp_path, *rows).kernels()
    assert found.utilization == pytest.approx(0.8)
    assert found.sm_efficiency == pytest.approx((30 * 1 + 50 * 0.2) / 100)
    assert ([one.name for one in found.rows], found.seconds) == (["gemm"], pytest.approx(30 * US))
    assert "kernels run in 80 % of the steps, those of collectives included" in found.caption
    alone = load(tmp_path, *rows[:1], *rows[3:]).kernels()
    assert (alone.rows, alone.utilization, alone.sm_efficiency) == ((), pytest.approx(0.6), pytest.approx(0.12))
    assert alone.caption == "the trace has no kernels that compute"


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "N/A", ""])
def test_blocks_that_are_no_number(tmp_path: Path, value: Any) -> None:
    """Where the number of multiprocessors is not known; what else the kernel tells is there all the same."""
    rows = [*launched("strange", 0, 10, 10, 1, **told(value, 20)), *launched("other", 2, 20, 10, 2, **told(0.5, value))]
    trace = load(tmp_path, *rows)
    found = {one.name: (one.blocks_per_sm, one.occupancy) for one in trace.kernels().rows}
    assert found == {"strange": (None, 0.2), "other": (0.5, None)}
    assert trace.details.notes == trace.notes == ()


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(…)", True),
        ("void cutlass::Kernel<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(…)", False),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas",
            False,
        ),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel", True),
        ("volta_h884gemm_64x64_ldg8_nn", True),
        ("turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1", True),
        ("volta_scudnn_128x64_relu_interior_nn_v1", False),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", True),
        ("void pytorch_flash::flash_fwd_kernel<…>(pytorch_flash::Flash_fwd_params)", True),
        ("void pytorch_flash::flash_bwd_convert_dq_kernel<…>", False),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(…)", True),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(…)", False),
        ("Cijk_Alik_Bljk_HHS_BH_MT128x128x32_MI16x16x16x1_SN_1LDSB0", True),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", False),
        ("triton_poi_fused_add_0", False),
    ],
)
def test_names_of_kernels_on_tensor_cores(name: str, on: bool) -> None:
    assert uses_tensor_cores(name) is on


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "_scaled_mm", "convolution_backward", "cudnn_convolution", "linear", "_cudnn_rnn"])
def test_operators_that_could(name: str) -> None:
    assert could_use_tensor_cores(f"aten::{name}")
    assert not could_use_tensor_cores(f"aten::{name}x mul")


def test_attention_could_and_others_could_not() -> None:
    assert could_use_tensor_cores("aten::_scaled_dot_product_flash_attention_backward")
    assert could_use_tensor_cores("aten::_flash_attention_forward")
    assert not any(
        could_use_tensor_cores(f"aten::{name}")
        for name in ("_convert_weight_to_int4pack", "add", "sum", "comma", "addcmul", "native_layer_norm", "moveaxis")
    )


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10), st.sampled_from([0.0, 0.25, 0.5, 1.0])), max_size=8))
def test_the_highest_at_any_time(rows: list[tuple[int, int, float]]) -> None:
    spans = np.array([[start, start + length] for start, length, _ in rows], dtype=np.int64).reshape(-1, 2)
    pieces, tops = highest(spans, np.array([value for _, _, value in rows], dtype=np.float64))
    for time in range(45):
        there = [value for start, length, value in rows if start <= time < start + length]
        found = [top for (start, end), top in zip(pieces.tolist(), tops.tolist(), strict=True) if start <= time < end]
        assert found == ([max(there)] if there else [])


def copied() -> list[Any]:
    return [
        *launched("Memcpy HtoD (Pinned -> Device)", 0, 10, 10, 1, "gpu_memcpy", bytes=10_000),
        *launched("Memcpy HtoD (Pinned -> Device)", 2, 30, 10, 2, "gpu_memcpy", bytes=30_000),
        *launched("Memcpy DtoH (Device -> Pageable)", 4, 50, 5, 3, "gpu_memcpy", bytes=0),
        *launched("Memset (Device)", 6, 60, 1, 4, "gpu_memset", bytes=1000, **{"memory bandwidth (GB/s)": 0.5}),
        event("sgemm", "kernel", 35, 10, 20),
    ]


def test_copies(tmp_path: Path) -> None:
    found = load(tmp_path, *copied()).copies()
    first, back, memset = found.rows
    assert (first.kind, first.memory, first.count, first.bytes) == ("HtoD", "Pinned → Device", 2, 40_000)
    assert (first.seconds, first.overlapped) == (pytest.approx(20 * US), pytest.approx(5 * US))
    assert (first.bandwidth, first.median, first.best) == (pytest.approx(2e9), pytest.approx(2e9), pytest.approx(3e9))
    assert (back.kind, back.bytes, back.bandwidth) == ("DtoH", 0, None)
    assert (memset.kind, memset.bandwidth) == ("memset", pytest.approx(5e8)), "the file's own, where lengths are whole microseconds"
    assert "pin_memory=True" in found.notes[0]


def test_bytes_over_time(tmp_path: Path) -> None:
    found = load(tmp_path, *copied()).copies()
    piece = found.times[1] - found.times[0]
    assert [sum(one) * piece for one in found.curves] == pytest.approx([40_000, 0, 1000], rel=1e-6)
    assert max(found.curves[0]) == pytest.approx(3e9)
    assert len(found.times) == len(found.curves[0]) + 1, "edges"
    assert (found.times[0], found.times[-1]) == (pytest.approx(10 * US), pytest.approx(61 * US))


def test_a_rate_of_no_time(tmp_path: Path) -> None:
    """Kineto writes "N/A" for the bandwidth of what has no length; everything else of the event is there, and the file is whole."""
    rate = "memory bandwidth (GB/s)"
    rows = [
        *launched("Memset (Device)", 0, 10, 0, 1, "gpu_memset", bytes=300, **{rate: "N/A"}),
        *launched("Memset (Device)", 2, 20, 10, 2, "gpu_memset", bytes=1000, **{rate: 0.5}),
        *launched("Memset (Device)", 4, 40, 10, 3, "gpu_memset", bytes=5000, **{rate: "0.5"}),
    ]
    path = write(tmp_path / "a.json", rows)
    trace = Trace.load(path)
    assert trace.notes == ()
    assert trace.columns.correlation.tolist() == [1, 1, 2, 2, 3, 3]
    (row,) = trace.copies().rows
    assert (row.count, row.bytes) == (3, 6300)
    assert (row.bandwidth, row.best) == (pytest.approx(5e8), pytest.approx(5e8))
    for _ in range(2):
        assert Trace.load(path, cache=True).copies() == trace.copies()


@pytest.mark.parametrize(("size", "sum", "rate"), [(2**64 - 1, None, None), (2**63 - 1, 2**64 - 2, 2**63 / 5e-6)])
def test_bytes_that_do_not_fit(tmp_path: Path, size: int, sum: int | None, rate: float | None) -> None:
    """Who overflows tells nothing; what fits is added up without overflowing."""
    rows = [one for i in range(2) for one in launched("Memset (Device)", 2 * i, 10 + 10 * i, 5, i, "gpu_memset", bytes=size)]
    found = load(tmp_path, *rows).copies()
    assert (found.rows[0].bytes, found.rows[0].bandwidth) == (sum, pytest.approx(rate))
    assert str(found)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(100, 10**6), st.integers(0, 10**6)), max_size=8))
def test_a_curve_has_all_bytes(rows: list[tuple[int, int, int]]) -> None:
    spans = np.array([[start, start + length] for start, length, _ in rows], dtype=np.int64).reshape(-1, 2)
    edges = np.linspace(0, 1.1e9, 60)
    found = curve(spans, np.array([size for _, _, size in rows], dtype=np.int64), edges)
    assert (found * np.diff(edges)).sum() / 1e9 == pytest.approx(sum(size for _, _, size in rows), rel=1e-4, abs=1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Memcpy DtoD (Device -> Device)", ("DtoD", "Device → Device")),
        ("Memcpy PtoP (Device -> Device)", ("PtoP", "Device → Device")),
        ("Memcpy HtoD (Pageable -> Device)", ("HtoD", "Pageable → Device")),
        ("CopyDeviceToHost", ("DtoH", "")),
        ("Memset (Unknown)", ("memset", "Unknown")),
        ("something else", ("something else", "")),
    ],
)
def test_kinds_of_copies(name: str, kind: tuple[str, str]) -> None:
    assert kind_of(name) == kind


def test_what_is_not_told(tmp_path: Path) -> None:
    """ROCm's files have no bytes; and nobody believes an endless bandwidth."""
    silent = load(tmp_path, *launched("Memcpy HtoD (Host -> Device)", 0, 10, 10, 1, "gpu_memcpy")).copies()
    assert (silent.rows[0].bytes, silent.rows[0].bandwidth, sum(silent.curves[0])) == (None, None, 0)
    assert "does not give them" in str(silent)
    strange = {"memory bandwidth (GB/s)": 1e308}
    assert load(tmp_path, *launched("Memset (Device)", 0, 10, 10, 1, "gpu_memset", bytes=100, **strange)).copies().rows[
        0
    ].best == pytest.approx(1e7)


def test_a_cpu_has_neither(tmp_path: Path) -> None:
    trace = load(tmp_path, *on_cpu())
    assert (trace.kernels().rows, trace.copies().rows) == ((), ())
    assert (trace.kernels().tensor_share, trace.kernels().utilization) == (None, None)
    assert "the trace has no kernels" in str(trace.kernels())
    assert "no copies of a device" in str(trace.copies())


def test_from_the_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", [*filled(), *copied()])
    for _ in range(2):
        again = Trace.load(path, cache=True)
        assert again.copies() == Trace.load(path).copies()
        assert again.kernels() == Trace.load(path).kernels()


def test_they_survive_json(tmp_path: Path) -> None:
    trace = load(tmp_path, *filled(), *copied())
    for answer, kind in ((trace.kernels(), Kernels), (trace.copies(), Copies)):
        assert kind.from_json(json.loads(json.dumps(answer.to_json()))) == answer  # type: ignore[attr-defined]
        assert str(answer) == str(answer.table)
        assert len(answer.to_frame().columns) > 2
        assert "\n" not in repr(answer)
