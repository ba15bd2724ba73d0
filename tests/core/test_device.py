"""Hardware by name."""

import json
from dataclasses import asdict

import pytest

from workbench.core.device import DEVICES, Device


@pytest.mark.parametrize("name", ["H200", "nvidia h200", "NVIDIA A100-SXM4-80GB", "Tesla T4", "NVIDIA GeForce RTX 4090"])
def test_names_as_drivers_print_them(name: str) -> None:
    assert Device.named(name).memory > 0


def test_an_unknown_device_is_unknown() -> None:
    with pytest.raises(
        ValueError, match=r"unknown device 'H20O': did you mean 'H200'\? Known are B200, .*For another one make it: Device\("
    ):
        Device.named("H20O")


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
        assert device.capability
        assert device.watts
        assert device.watts_source
        assert Device(**json.loads(json.dumps(asdict(device)))) == device
    assert Device.known("NVIDIA H100 80GB HBM3") is Device.named("H100-SXM")
    assert Device.known("cuda") is None
