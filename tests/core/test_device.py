"""Hardware by name."""

import json
from dataclasses import asdict

import pytest

from workbench.core.device import DEVICES, Device


@pytest.mark.parametrize(
    ("name", "known", "capability", "memory"),
    [
        ("nvidia h200", "H200", (9, 0), 141),
        ("NVIDIA B300 SXM6 AC", "B300", (10, 3), 270),
        ("NVIDIA GB300", "GB300", (10, 3), 279),
        ("NVIDIA GB200", "GB200", (10, 0), 186),
        ("NVIDIA B200", "B200", (10, 0), 180),
        ("NVIDIA H200 NVL", "H200-NVL", (9, 0), 141),
        ("NVIDIA GH200 480GB", "GH200", (9, 0), 96),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB", (9, 0), 144),
        ("NVIDIA H100 80GB HBM3", "H100-SXM", (9, 0), 80),
        ("NVIDIA H100 PCIe", "H100-PCIe", (9, 0), 80),
        ("NVIDIA H100 NVL", "H100-NVL", (9, 0), 94),
        ("NVIDIA H20", "H20", (9, 0), 96),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", (8, 0), 80),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", (8, 0), 40),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB", (8, 0), 80),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB", (8, 0), 40),
        ("NVIDIA A30", "A30", (8, 0), 24),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000", (12, 0), 96),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada", (8, 9), 48),
        ("NVIDIA L40", "L40", (8, 9), 48),
        ("NVIDIA L40S", "L40S", (8, 9), 48),
        ("NVIDIA L4", "L4", (8, 9), 24),
        ("NVIDIA A40", "A40", (8, 6), 48),
        ("NVIDIA RTX A6000", "RTX-A6000", (8, 6), 48),
        ("NVIDIA A10G", "A10G", (8, 6), 24),
        ("NVIDIA A10", "A10", (8, 6), 24),
        ("Tesla V100-SXM2-16GB", "V100-16GB", (7, 0), 16),
        ("Tesla V100-SXM2-32GB", "V100-32GB", (7, 0), 32),
        ("Tesla V100-PCIE-16GB", "V100-PCIe-16GB", (7, 0), 16),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32GB", (7, 0), 32),
        ("Tesla V100S-PCIE-32GB", "V100S", (7, 0), 32),
        ("Tesla T4", "T4", (7, 5), 16),
        ("NVIDIA GeForce RTX 5090", "RTX-5090", (12, 0), 32),
        ("NVIDIA GeForce RTX 4090", "RTX-4090", (8, 9), 24),
        ("NVIDIA GeForce RTX 3090", "RTX-3090", (8, 6), 24),
        ("AMD Instinct MI355X", "MI355X", None, 288),
        ("AMD Instinct MI325X", "MI325X", None, 256),
        ("AMD Instinct MI300X", "MI300X", None, 192),
        ("AMD Instinct MI250X", "MI250X", None, 64),
        ("AMD Instinct MI210", "MI210", None, 64),
    ],
)
def test_names_as_drivers_print_them(name: str, known: str, capability: tuple[int, int] | None, memory: int) -> None:
    device = Device.named(name)
    assert (device.name, device.capability, device.gb) == (known, capability, memory)
    assert 0.89 < device.memory / (memory * 2**30) < 1  # GB are no GiB, or the driver and ECC keep some


@pytest.mark.parametrize(
    ("name", "known", "memory", "bandwidth", "bf16"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100-40GB MIG 1g.5gb", 5, 1555 / 8, 312 / 7),
        ("NVIDIA A100-SXM4-40GB MIG 1g.10gb", "A100-40GB MIG 1g.10gb", 10, 1555 / 4, 312 / 7),
        ("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", "A100-40GB MIG 1c.3g.20gb", 20, 1555 / 2, 312 / 7),
        ("NVIDIA A100 80GB PCIe MIG 1g.10gb+me", "A100-PCIe-80GB MIG 1g.10gb", 10, 1935 / 8, 312 / 7),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "H100-SXM MIG 3g.40gb", 40, 3350 / 2, 989.4 * 3 / 7),
        ("NVIDIA H200 MIG 7g.141gb", "H200 MIG 7g.141gb", 141, 4800, 989.4),
        ("NVIDIA H200 MIG 1g.18gb", "H200 MIG 1g.18gb", 18, 4800 / 8, 989.4 / 7),
        ("NVIDIA A30 MIG 2g.12gb", "A30 MIG 2g.12gb", 12, 933 / 2, 165 / 2),
        ("h100-sxm mig 2g.20gb", "H100-SXM MIG 2g.20gb", 20, 3350 / 4, 989.4 * 2 / 7),
    ],
)
def test_a_slice_has_its_memory_and_its_share_of_the_peaks(name: str, known: str, memory: int, bandwidth: float, bf16: float) -> None:
    part = Device.named(name)
    assert (part.name, part.memory) == (known, memory * 10**9)
    assert (part.bandwidth, part.flops_per_sec["bf16"]) == pytest.approx((bandwidth * 1e9, bf16 * 1e12))
    whole = Device.named(known.partition(" MIG")[0])
    assert (part.capability, part.nvlink, part.watts) == (whole.capability, None, None)
    assert Device.named(part.name) == part
    assert "of the peaks" in part.source


def test_a_slice_of_an_unknown_gpu_is_unknown() -> None:
    assert Device.known("NVIDIA Z9 MIG 1g.5gb") is None


def test_an_unknown_device_is_unknown() -> None:
    with pytest.raises(
        ValueError,
        match=r"unknown device 'H100-SMX': did you mean 'H100-SXM'\? Known GPUs of that series are H200 \(141 GB\), ",
    ) as refused:
        Device.named("H100-SMX")
    assert "A100" not in str(refused.value)
    assert "MI300X" not in str(refused.value)
    assert refused.value.__notes__[0].startswith("For another one, define it: wb.Device(name=")
    with pytest.raises(ValueError, match=r"unknown device 'Z9': known are GB300 \(279 GB\), .*MI210"):
        Device.named("Z9")
    with pytest.raises(ValueError, match="device 'cuda:0' does not say which GPU: name one, such as 'H100'"):
        Device.named("cuda:0")
    with pytest.raises(ValueError, match=r"unknown device 'A4090': did you mean 'RTX-4090'\? Known GPUs of that series are RTX"):
        Device.named("A4090")
    with pytest.raises(
        ValueError, match=r"'24GB' is an amount of memory; name a GPU that has it, or nearly: A30 \(24 GB\), L4 .*RTX-4090 \(24 GB\)"
    ):
        Device.named("24GB")
    with pytest.raises(ValueError, match=r"name a GPU that has it, or nearly: .*V100-16GB \(16 GB\)"):
        Device.named("15 GiB")


def test_names_are_unique_and_peaks_are_dense() -> None:
    names = [name for device in DEVICES for name in (device.name, *device.aliases)]
    assert len(set(names)) == len(names)
    for device in DEVICES:
        peaks = device.flops_per_sec
        assert 0 < peaks["fp32"] < peaks["fp16"]
        assert "without sparsity" in device.source
    assert Device.named("H100-SXM").flops_per_sec["bf16"] == pytest.approx(989.4e12)
    assert "989 TFLOP/s" in str(Device.named("H200"))


def test_a_device_carries_all_that_is_known_of_it_and_comes_back_from_json() -> None:
    for device in DEVICES:
        assert device.capability or device.name.startswith("MI")
        assert device.watts
        assert device.watts_source
        assert Device(**json.loads(json.dumps(asdict(device)))) == device
    assert Device.known("NVIDIA H100 80GB HBM3") is Device.named("H100-SXM")
    assert Device.known("cuda") is None
