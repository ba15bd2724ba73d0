"""BatchPlan: a global batch as micro_batch × accumulation × world_size, with its learning rate, each number with its reason."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.batch.analysis.lr_scaling_rules import scale_lr
from workbench.batch.analysis.optimizer_description import OptimizerDescription
from workbench.batch.analysis.scaled_lr import VALIDITY_TEXT, ScaledLr, check_arguments, number, python_number
from workbench.core import units
from workbench.core.checks import whole_number
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display

WASTEFUL = 2
"""A micro-batch this many times below the largest possible wastes the device: a neighbouring global batch is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """A global batch as micro-batches of one rank."""

    micro_batch: int
    """Samples in one forward and backward."""
    accumulation: int
    """Micro-batches per optimizer step."""
    why_micro_batch: str
    why_accumulation: str
    notes: tuple[str, ...] = ()
    """Global batches that divide better."""


def split_batch(global_batch: int, world_size: int, most: int) -> BatchSplit:
    """Split a global batch over ranks without a remainder, into as few micro-batches of one size, at most `most`, as possible.

    >>> split = split_batch(96, 2, 20)
    >>> split.micro_batch, split.accumulation
    (16, 3)

    Raises:
        ValueError: a number that is not whole and positive, or the ranks do not divide the batch.
    """
    for name, value in {"global_batch": global_batch, "world_size": world_size, "micro_batch": most}.items():
        whole_number(name, value, least=1, numpy=True)
    global_batch, world_size, most = int(global_batch), int(world_size), int(most)
    share, rest = divmod(global_batch, world_size)
    if rest:
        near = [batch for batch in (share * world_size, (share + 1) * world_size) if batch]
        raise ValueError(
            f"global_batch={global_batch} cannot be divided over {world_size} ranks without a remainder: "
            f"try {' or '.join(map(number, near))}, or other ranks"
        )
    micro = next(size for size in range(min(most, share), 0, -1) if share % size == 0)
    notes: tuple[str, ...] = ()
    if micro * WASTEFUL < min(most, share):
        near = sorted({most * max(1, share // most + more) * world_size for more in (0, 1)})
        notes = (
            f"{number(share)} samples per rank have no better divisor up to {number(most)} than {number(micro)}: "
            f"a global batch of {' or '.join(map(number, near))} would take larger micro-batches",
        )
    return BatchSplit(
        micro_batch=micro,
        accumulation=share // micro,
        why_micro_batch=f"the largest divisor of the {number(share)} samples per rank that is not above {number(most)}",
        why_accumulation="one micro-batch is enough" if micro == share else f"{number(share)} samples per rank / {number(micro)} at once",
        notes=notes,
    )


_KNOBS = ("micro_batch", "accumulation", "world_size")
_REASONED = (*_KNOBS, "lr", "warmup_steps", "optimizer")
_GIVEN = "as given"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan(display.Shown, JsonDataclass):
    """A global batch, its micro-batch, accumulation and ranks, and its learning rate.

    >>> plan = BatchPlan(micro_batch=32, accumulation=1, world_size=2, lr=0.1, optimizer="sgd(momentum=0.9)")
    >>> bigger = plan.scaled_to(global_batch=512)
    >>> bigger.micro_batch, bigger.accumulation, bigger.world_size, bigger.lr
    (32, 8, 2, 0.8)
    """

    micro_batch: int
    """Samples per rank in one forward and backward."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    world_size: int = 1
    """Ranks that work on different samples."""
    lr: float
    """Peak learning rate."""
    warmup_steps: int = 0
    """Optimizer steps until it is reached."""
    optimizer: str | None = None
    """Name with options; None = not known, and only rules that do not depend on the optimizer can scale the plan."""
    own: bool = False
    """Is `optimizer` the task's own? `changes` leave it out as long as no rule has changed its options."""
    tensor_parallel: int = 1
    """Ranks that work on the same samples: there are world_size × tensor_parallel processes."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Number → its reason."""
    notes: tuple[str, ...] = ()
    """Further remarks."""
    scaled: ScaledLr | None = None
    """How the learning rate was scaled, and whether the rule is valid; None = the learning rate was given."""

    def __post_init__(self) -> None:
        whole = {name: getattr(self, name) for name in (*_KNOBS, "tensor_parallel", "warmup_steps")}
        check_arguments(self.lr, "auto", **whole)
        for name in (*whole, "lr"):
            object.__setattr__(self, name, python_number(getattr(self, name)))
        if self.optimizer is not None:
            described = OptimizerDescription.of(self.optimizer)
            if not isinstance(self.optimizer, str):
                object.__setattr__(self, "optimizer", described.text)
        object.__setattr__(self, "reasons", {name: self.reasons.get(name, _GIVEN) for name in _REASONED})

    @classmethod
    def of(cls, spec: Any, *, lr: float | None = None, optimizer: str | Mapping[str, Any] | None = None) -> "BatchPlan":
        """The plan of a RunSpec.

        Args:
            spec: a RunSpec.
            lr: the learning rate, if the spec leaves it to the optimizer; None = as in the spec or in its optimizer's options.
            optimizer: the optimizer, if the spec leaves it to the task: a name with options, or a mapping of its settings.

        Raises:
            ValueError: the learning rate is in neither, or micro_batch is "auto".
        """
        named = spec.optimizer if spec.optimizer not in (None, "foreach", "fused") else None
        given = optimizer if optimizer is not None else named
        described = None if given is None else OptimizerDescription.of(given)
        if lr is None:
            lr = spec.lr
        if lr is None and described is not None:
            lr = described.default_lr
        if lr is None:
            raise ValueError(
                "the spec leaves the learning rate to the task's own optimizer: give lr=… and optimizer=… as they are there, "
                'such as BatchPlan.of(spec, lr=0.1, optimizer="sgd(momentum=0.9)"), or name them in the spec'
            )
        if not isinstance(spec.micro_batch, int):
            raise ValueError(f'micro_batch="{spec.micro_batch}" is chosen when a run starts: give the spec a number')
        return cls(
            micro_batch=spec.micro_batch,
            accumulation=spec.accumulation,
            world_size=spec.data_ranks,
            lr=lr,
            warmup_steps=spec.warmup_steps,
            optimizer=None if described is None else described.text,
            own=named is None,
            tensor_parallel=spec.tensor_parallel * spec.pipeline_parallel,
            reasons=dict.fromkeys(_REASONED, "as in the spec") | ({"optimizer": "the task's own"} if named is None else {}),
        )

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step: micro_batch × accumulation × world_size."""
        return self.micro_batch * self.accumulation * self.world_size

    def scaled_to(
        self,
        *,
        global_batch: int | None = None,
        world_size: int | None = None,
        micro_batch: int | None = None,
        rule: str = "auto",
        noise_scale: Any = None,
        critical_batch: Any = None,
        dataset_size: int | None = None,
        strict: bool = False,
    ) -> "BatchPlan":
        """The plan for another global batch, another number of ranks, or both.

        With `world_size` alone each rank keeps its share, so the global batch grows with the ranks. A `global_batch` is divided over the
        ranks exactly, in as few micro-batches as possible.

        Args:
            global_batch: samples per optimizer step; None = as many per rank as before.
            world_size: ranks that work on different samples; None = as before.
            micro_batch: the largest micro-batch that fits; None = the present one.
            rule: rule for the learning rate; for this and the following arguments see `scale_lr`.
            noise_scale: in samples, or the result that has it.
            critical_batch: in samples, or the result that has it.
            dataset_size: samples in an epoch.
            strict: raise an error if the rule does not hold.

        Raises:
            ValueError: neither batch nor ranks were given, the batch cannot be divided among the ranks, or `scale_lr` raises.
        """
        if global_batch is None and world_size is None:
            raise ValueError("scaled_to() needs global_batch=…, world_size=… or both")
        ranks = self.world_size if world_size is None else world_size
        most = self.micro_batch if micro_batch is None else micro_batch
        check_arguments(self.lr, rule, world_size=ranks, micro_batch=most)
        ranks, most, global_batch = map(python_number, (ranks, most, global_batch))
        if global_batch is None:
            micro, accumulation = self.micro_batch, self.accumulation
            global_batch = micro * accumulation * ranks
            reasons = dict.fromkeys(("micro_batch", "accumulation"), "as before: each rank keeps its share")
            hints: tuple[str, ...] = ()
        else:
            split = split_batch(global_batch, ranks, most)
            micro, accumulation, hints = split.micro_batch, split.accumulation, split.notes
            reasons = {"micro_batch": split.why_micro_batch, "accumulation": split.why_accumulation}
        if self.optimizer is None and rule == "auto":
            raise ValueError(
                'rule="auto" depends on the optimizer, and this plan does not say which: BatchPlan(…, optimizer="sgd(momentum=0.9)"), '
                'or rule="linear", "sqrt" or "none"'
            )
        scaled = scale_lr(
            self.lr,
            batch=self.global_batch,
            to_batch=global_batch,
            optimizer=self.optimizer or "sgd",
            rule=rule,
            noise_scale=noise_scale,
            critical_batch=critical_batch,
            warmup_steps=self.warmup_steps,
            dataset_size=dataset_size,
            strict=strict,
        )
        changed = self.optimizer is not None and scaled.optimizer() != scaled.base
        reasons |= {
            "world_size": _GIVEN if world_size else "as before",
            "lr": f"{scaled.why}: {number(self.lr)} × {number(scaled.factor)}; {VALIDITY_TEXT[scaled.valid]}",
            "warmup_steps": next(note for note in scaled.notes if note.startswith("warm-up")).removeprefix("warm-up: "),
            "optimizer": "its averages keep their length in samples" if changed else self.reasons["optimizer"],
        }
        return dataclasses.replace(
            self,
            micro_batch=micro,
            accumulation=accumulation,
            world_size=ranks,
            lr=scaled.lr,
            warmup_steps=scaled.warmup_steps,
            optimizer=scaled.optimizer() if changed else self.optimizer,
            own=self.own and not changed,
            reasons=reasons,
            notes=(*hints, *(note for note in scaled.notes if not note.startswith("warm-up"))),
            scaled=scaled,
        )

    def changes(self) -> dict[str, Any]:
        """The plan as knobs of a RunSpec: `spec.replace(**plan.changes())`."""
        changes: dict[str, Any] = {
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "nproc_per_node": self.world_size * self.tensor_parallel,
            "lr": self.lr,
            "warmup_steps": self.warmup_steps,
        }
        return changes if self.optimizer is None or self.own else {**changes, "optimizer": self.optimizer}

    @property
    def table(self) -> display.Table:
        """A row per number, with its reason."""
        product = " × ".join(number(getattr(self, name)) for name in _KNOBS)
        rows: list[list[object]] = [[name, number(getattr(self, name)), self.reasons[name]] for name in _KNOBS]
        rows.append(["global batch", number(self.global_batch), f"{product} samples per optimizer step"])
        rows.append(["learning rate", number(self.lr), self.reasons["lr"]])
        rows.append(["warm-up steps", number(self.warmup_steps), self.reasons["warmup_steps"]])
        rows.append(["optimizer", self.optimizer or units.MISSING, self.reasons["optimizer"]])
        return display.Table(columns=("", "value", "why"), rows=rows, title="Batch plan", note="\n".join(self.notes) or None)

    def to_frame(self) -> Any:
        """A DataFrame with one row per number: its value and why."""
        return display.frame(
            [{"name": "global_batch", "value": self.global_batch, "why": " × ".join(_KNOBS)}]
            + [{"name": name, "value": getattr(self, name), "why": self.reasons[name]} for name in _REASONED]
        )

    def plot(self, ax: Any = None) -> Any:
        """`plot.scaled_lr`, of a plan that was scaled; returns the Axes.

        Raises:
            ValueError: the learning rate was given, not scaled.
        """
        if self.scaled is None:
            raise ValueError(
                f"{self!r} was not scaled from another one, so there is nothing to draw: scaled_to(global_batch=…) makes one that was"
            )
        return self.scaled.plot(ax=ax)

    def __repr__(self) -> str:
        product = " × ".join(str(getattr(self, name)) for name in _KNOBS)
        return f"BatchPlan({product} = {self.global_batch}, lr={number(self.lr)})"
