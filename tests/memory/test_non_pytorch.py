"""Memory outside of the allocator: published ranges, fitted ones, and the workspace of cuBLAS."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core.device import DEVICES
from workbench.memory.analysis.non_pytorch import (
    CONTEXT,
    NCCL,
    NonPyTorchFit,
    NonPyTorchMemory,
    cublas_workspace,
    fit_non_pytorch,
    fits_file,
    is_known,
    load_fits,
    non_pytorch_memory,
    save_fit,
)

GIB = 2**30


def test_an_unknown_gpu_has_the_stated_range_and_no_other_gpu_s_figure(tmp_path: Path) -> None:
    none = tmp_path / "none.json"
    for name in ("cuda", "a new one", "H200"):
        assert non_pytorch_memory(name, path=none) == CONTEXT
    published = non_pytorch_memory("GeForce RTX 3090", path=none)
    assert published.high == 1001 * 2**20
    assert is_known("GeForce RTX 3090", path=none)
    for known in (CONTEXT, NCCL, *(non_pytorch_memory(device.name, path=none) for device in DEVICES)):
        assert 0 < known.low <= known.mid <= known.high
        assert "#" in known.source


def test_several_ranks_add_nccl(tmp_path: Path) -> None:
    two = non_pytorch_memory("cuda", 2, path=tmp_path / "none.json")
    assert two == CONTEXT + NCCL
    assert two.mid == CONTEXT.mid + NCCL.mid
    assert "NCCL" in str(two)
    assert NonPyTorchMemory.from_json(two.to_json()) == two


def test_the_workspace_of_cublas() -> None:
    assert cublas_workspace((8, 6)) == cublas_workspace(None) == 8_519_680
    assert cublas_workspace((9, 0)) == cublas_workspace((10, 0)) == 32 * 2**20


@settings(max_examples=50, deadline=None)
@given(
    base=st.integers(2**27, 2**31),
    slope=st.floats(1.0, 1.2),
    reserved=st.lists(st.integers(2**28, 2**36), min_size=3, max_size=20, unique=True),
)
def test_a_line_is_found_again(base: int, slope: float, reserved: list[int]) -> None:
    fit = fit_non_pytorch([(r, round(base + slope * r)) for r in reserved], "H100")
    for r in reserved:
        assert fit.base + fit.slope * r == pytest.approx(base + slope * r, rel=1e-6)
    assert fit.worst < 1e-6


def test_a_fit_is_kept_and_used(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "fits.json"
    points = [(r * GIB, int(0.5 * GIB + 1.01 * r * GIB) + noise) for r, noise in ((1, 2**20), (4, -(2**20)), (16, 2**21), (64, 0))]
    fit = fit_non_pytorch(points, "NVIDIA H100 80GB HBM3", driver="570.1", torch="2.11")
    assert load_fits(path) == []
    assert save_fit(fit, path) == path
    assert load_fits(path) == [fit]
    assert is_known("H100-SXM", path)
    assert not is_known("H200", path)
    found = non_pytorch_memory("H100", reserved=10 * GIB, path=path)
    assert found.mid == pytest.approx(0.6 * GIB, rel=0.02)
    assert found.low < found.mid < found.high
    for word in ("fitted on 20", "4 runs", "driver 570.1", "torch 2.11"):
        assert word in found.source
    assert non_pytorch_memory("H200", path=path) == CONTEXT
    assert "NCCL" in non_pytorch_memory("H100", 8, path=path).source


def test_a_new_fit_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "fits.json"
    points = [(GIB, 2 * GIB), (2 * GIB, 3 * GIB), (3 * GIB, 4 * GIB)]
    for torch in ("2.11", "2.13", "2.11"):
        save_fit(fit_non_pytorch(points, "H100", torch=torch), path)
    assert [fit.torch for fit in load_fits(path)] == ["2.13", "2.11"]
    assert not list(tmp_path.glob("*.new"))


def test_a_file_that_cannot_be_read_is_no_fit(tmp_path: Path) -> None:
    path = tmp_path / "fits.json"
    for text in ("{", "[1]", '[{"device": "H100"}]', "{}"):
        path.write_text(text)
        assert load_fits(path) == []
        assert non_pytorch_memory("H100", path=path) == CONTEXT


def test_the_file_lies_with_the_user_s_other_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    assert fits_file() == tmp_path / "memory-outside.json"
    monkeypatch.delenv("WORKBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fits_file() == tmp_path / "workbench" / "memory-outside.json"


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([(1, 2), (3, 4)], "2 runs: a fit needs at least 3"),
        ([(5, 7), (5, 7), (5, 8)], "all runs reserved the same"),
        ([(5, 7), (6, 7), (7, 6)], "a run used less of the device than its allocator reserved"),
    ],
)
def test_points_that_make_no_line(points: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit_non_pytorch(points, "H100")


def test_json_goes_out_and_in() -> None:
    fit = NonPyTorchFit(device="H100", base=1.5, slope=1.0, residuals=(0.1, -0.2), spread=(-3, 4))
    assert NonPyTorchFit.from_json(fit.to_json()) == fit
