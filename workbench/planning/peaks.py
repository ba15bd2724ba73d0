"""Peaks: FLOP/s of a GPU in a precision; the one place from which predicted seconds, counted operators and MFU take it."""

from workbench.checks import choice
from workbench.device import Device
from workbench.planning.ranges import PlanError

FORMATS = {"fp32": "fp32", "amp_bf16": "bf16", "amp_fp16": "fp16"}
"""Precision → format of its products. fp32 is not tf32: torch leaves that off, and so do runs of the workbench."""


def peak_of(device: Device, precision: str) -> float:
    """Dense FLOP/s by the datasheet.

    Raises:
        PlanError: a precision that is not known, or that the datasheet does not have.
    """
    choice("precision", precision, FORMATS, error=PlanError)
    if FORMATS[precision] not in device.flops_per_sec:
        raise PlanError(
            f"precision={precision!r} on {device.name}: its datasheet has {', '.join(device.flops_per_sec)} only; "
            "try another precision or GPU"
        )
    return device.flops_per_sec[FORMATS[precision]]
