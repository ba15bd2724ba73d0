"""What a knob of a run is: its values, what it is called elsewhere, where it can be turned; and the error of a wrong one."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

T = TypeVar("T")
PRECISIONS = ("fp32", "amp_bf16", "amp_fp16")
MEANT = {
    "gpu": "cuda",
    "bf16": "amp_bf16",
    "bfloat16": "amp_bf16",
    "fp16": "amp_fp16",
    "float16": "amp_fp16",
    "float32": "fp32",
    "zero3": "fsdp",
    "fsdp2": "fsdp",
}
"""What is often typed → what it is called here."""
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
IMPLEMENTATIONS = ("foreach", "fused")
"""Ways in which torch runs an optimizer; the update is the same."""
CHECKPOINTINGS = ("none", "full", "selective")
PARALLELS = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
OFFLOADS = ("none", "activations", "optimizer")
SHARDED = ("zero2", "fsdp", "hsdp")
"""Those of PARALLELS in which no rank holds all of the parameters, gradients and optimizer states (torch's FSDP2)."""
AUTO = "auto"
"""The micro_batch of a run that is to choose it when it starts."""
SHARD_RANKS = 8
"""Ranks that share one copy of the model under "hsdp", where the spec does not say: the GPUs of a common node."""


class SpecError(ValueError):
    """A knob that does not exist or a value that it does not take; the message says what is allowed and what to try."""


class AutoBatch(str):
    """The value of micro_batch="auto": comparing it or computing with it raises an error that says to give a number."""

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise SpecError(
            'micro_batch="auto" is chosen when a run starts (wb.launch, wb.sweep), and here a number is needed: '
            "give one, such as wb.max_micro_batch(spec, device).micro_batch"
        )

    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __mul__ = __rmul__ = __mod__ = __index__ = _refuse
    __radd__ = __sub__ = __rsub__ = __rmod__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __int__ = __float__ = _refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Metadata of a field of RunSpec, for panels, plans and the command line."""

    default: Any = None
    """Its default."""
    choices: tuple[str, ...] = ()
    """All of its values, where they are names."""
    turned_in: Literal["", "loader", "step"] = ""
    """Where an experiment can turn it without a RunSpec: in a user's own loader or step; empty = in neither."""
    predicted: bool = False
    """Does `diagnosis.model.StepModel` predict a step with another value of it?"""
    elsewhere: tuple[str, ...] = ()
    """Its names in torchrun, Hugging Face's Trainer, Accelerate, Lightning, DeepSpeed and nanoGPT, and in everyday speech."""
    panels: tuple[str, ...] = ()
    """Panels that let it be turned: "doctor" (what-if of a step's time), "memory" (the memory explorer)."""

    def also(self, value: Any) -> str:
        """What may be meant by a value that is no choice, and is had in another way."""
        if self.choices == PRECISIONS and value in ("bf16", "bfloat16"):
            return " (weights stay in fp32; to keep them in bf16, build the model that way: lambda: build().to(torch.bfloat16))"
        return ""


def knob(default: T, **about: Any) -> T:
    """A field of RunSpec, with what a Knob says of it."""
    field: T = dataclasses.field(default=default, metadata={"knob": Knob(default=default, **about)})
    return field
