"""Subject: what a plan has to know of a task: its optimizer with the learning rate, and how many samples it has."""

from dataclasses import dataclass

from workbench.batch.described import Described
from workbench.batch.plan import BatchPlan
from workbench.spec import IMPLEMENTATIONS, RunSpec, SpecError
from workbench.task import Task, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A task, as far as a plan cares."""

    optimizer: str
    """With its options, the learning rate left out."""
    lr: float
    """Peak learning rate."""
    dataset_size: int | None
    """Samples of an epoch; None = a stream, which does not say."""

    @classmethod
    def of(cls, spec: RunSpec) -> "Subject":
        """Build the task's dataset and, where only that tells, its model and optimizer; and look at them.

        Raises:
            TaskError: the task is not there, or its functions do not return what they should.
            SpecError: an optimizer for which no rule is known, or micro_batch is "auto".
        """
        from workbench.train.choosing import most_samples

        task = resolve(spec.task)
        found = _optimizer(spec, task)
        size, stream = most_samples(task.dataset(), RunSpec(task=spec.task))
        return cls(
            optimizer=found.text, lr=float(spec.lr if spec.lr is not None else found.default_lr), dataset_size=None if stream else size
        )

    def plan(self, spec: RunSpec) -> BatchPlan:
        """The plan that a spec has."""
        _ = spec.global_batch  # refuses "auto"
        return BatchPlan.of(spec, lr=self.lr, optimizer=self.optimizer)


def _optimizer(spec: RunSpec, task: Task) -> Described:
    chosen = spec.optimizer if spec.optimizer not in (None, *IMPLEMENTATIONS) else task.optimizer
    if isinstance(chosen, str):
        return Described.of(chosen)
    from workbench.train.optimizers import build_optimizer, described
    from workbench.train.trainer import build_model

    seen = described(build_optimizer(build_model(task), task.optimizer, lr=spec.lr))  # a function, which may look at the parameters
    try:
        return Described.of(seen)
    except ValueError as error:
        raise SpecError(
            f'task={spec.task!r}: {error}; or plan with the optimizer that it resembles: spec.replace(optimizer="adamw", lr=…)'
        ) from error
