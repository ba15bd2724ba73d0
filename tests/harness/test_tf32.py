"""TF32 is read and switched right, whichever of torch's ways was used before."""

import json
import subprocess
import sys

import pytest
import torch

SETTINGS = {
    "": (False, True),
    "matmul.allow_tf32 = True": (True, True),
    "matmul.allow_tf32 = False; cudnn.allow_tf32 = False": (False, False),
    "torch.set_float32_matmul_precision('high')": (True, True),
    "torch.set_float32_matmul_precision('high'); torch.set_float32_matmul_precision('highest')": (False, True),
}
NEWER = {
    "matmul.fp32_precision = 'tf32'": (True, True),
    "matmul.fp32_precision = 'ieee'": (False, True),
    "cudnn.conv.fp32_precision = 'ieee'": (False, False),
    "torch.backends.fp32_precision = 'tf32'": (True, True),
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": (False, True),
}
"""How torch was set up → whether products and convolutions run in TF32."""
SETTINGS |= NEWER if hasattr(torch.backends, "fp32_precision") else {}
CODE = """
import json, os, sys, warnings
import torch
from workbench.harness.tf32 import set_tf32, tf32, uses_tf32
matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
def both(): return [uses_tf32(), uses_tf32(convolution=True)]
for setting in json.loads(sys.argv[1]):
    if os.fork():
        os.wait()
        continue
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(setting)
    warnings.simplefilter("error")
    seen = [both()]
    for on in (True, False):
        with tf32(on):
            seen.append(both())
        seen.append(both())
    for on in (True, False, None, True, None):
        set_tf32(on)
        seen.append(both())
    print(json.dumps([setting, seen]), flush=True)
    os._exit(0)
"""


def test_it_is_read_and_switched_whatever_was_set_before() -> None:
    done = subprocess.run([sys.executable, "-c", CODE, json.dumps([*SETTINGS])], capture_output=True, text=True, check=True)
    seen = dict(json.loads(line) for line in done.stdout.splitlines())
    on, off = [True, True], [False, False]
    for setting, own in SETTINGS.items():
        assert seen[setting] == [[*own], on, [*own], off, [*own], on, off, [*own], on, [*own]], setting


@pytest.mark.skipif(not NEWER.keys() <= SETTINGS.keys(), reason="this torch has only the older way")
def test_a_floor_by_tf32_is_found_after_the_newer_way_was_used() -> None:
    """Reading `allow_tf32` then raises."""
    code = """
import torch, workbench as wb
from workbench.memory.estimate.roofline_time import Roofline
from workbench.core.device import Device
seconds = []
for precision in ("ieee", "tf32"):
    torch.backends.cuda.matmul.fp32_precision = precision
    with Roofline(Device.named("H100-SXM")) as floor:
        torch.ones(512, 512) @ torch.ones(512, 512)
    seconds.append(floor.computing)
print(round(seconds[0] / seconds[1], 2))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(494.7 / 66.9, rel=0.01)
