"""What a step would be made of if some knobs were turned: one call of the model, and what follows from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.diagnosis.model import StepModel
from workbench.diagnosis.parts import PARTS, Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A predicted step beside the one it came from."""

    changes: Mapping[str, Any]
    """Knobs that were turned."""
    parts: Parts | None
    """Predicted; None if the model cannot."""
    speedup: float
    """Throughput in samples over that of now."""
    complaint: str = ""
    """Why the model cannot."""

    def pieces(self, now: Parts) -> dict[str, float]:
        """Seconds per part for as many samples as the step has now, so that a bar half as long is twice the throughput."""
        assert self.parts is not None
        scale = now.step / self.speedup / self.parts.step
        return {part: self.parts.seconds(part) * scale for part in PARTS}


def what_if(model: StepModel, now: Parts, changes: Mapping[str, Any], samples: float = 1.0) -> WhatIf:
    """Ask the model, once; cheap enough to follow a slider.

    Args:
        model: of the step as it is.
        now: its parts.
        changes: knobs to turn.
        samples: in a step then, relative to now.
    """
    try:
        parts = model.parts(**changes)
    except ValueError as error:
        return WhatIf(changes=dict(changes), parts=None, speedup=float("nan"), complaint=str(error))
    if not parts.step > 0:
        return WhatIf(changes=dict(changes), parts=None, speedup=float("nan"), complaint="the model leaves nothing of the step")
    return WhatIf(changes=dict(changes), parts=parts, speedup=samples * now.step / parts.step)
