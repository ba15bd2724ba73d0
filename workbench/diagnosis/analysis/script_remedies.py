"""Derives the remedies of a watched script: what can be set from outside, and which settings its framework has for a part of the step."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from workbench.core import units
from workbench.core.system_load import usable_cores
from workbench.diagnosis.analysis.evidence import Evidence
from workbench.diagnosis.analysis.loader_remedies import DEEP_PREFETCH, for_loader
from workbench.diagnosis.analysis.remedy import Case, Remedy, ceiling

CAN_FUSE = ("Adagrad", "Adam", "AdamW", "SGD")
"""Optimizers of torch that have a fused implementation, on CPUs, too."""
MOST_THREADS = 4
"""Threads per operator that are offered at most: small operators gain little from more. Chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedScript:
    """The subject of a diagnosis that has launched a script: what launching it again needs."""

    folder: Path
    """Where it was launched."""
    start_s: float
    """Seconds that the launch took until its first step was taken."""
    runs_dir: str | os.PathLike[str] | None = None
    """Where run directories of proofs go; None = they are deleted."""


def from_outside(case: Case) -> Iterator[tuple[str, Remedy]]:
    """Part of the step → a change of it that a launch can make; nothing of what was only observed."""
    if case.outside:
        of_loader = [("data_wait", remedy) for remedy in (*for_loader(case), _prefetch(case))]
        some = (*of_loader, ("optimizer", _fused(case)), ("compute", _threads(case)))
        yield from ((part, remedy) for part, remedy in some if remedy is not None)


def _prefetch(case: Case) -> Remedy | None:
    loading = case.evidence.loading
    if loading is None or not loading.num_workers or (loading.prefetch_factor or 2) >= DEEP_PREFETCH:
        return None
    return ceiling(
        case,
        f"prefetch_factor={DEEP_PREFETCH}",
        f"Let each worker keep {DEEP_PREFETCH} batches ready instead of {loading.prefetch_factor or 2}, so that a slow one is made up for.",
        case.costs.data.mid / case.costs.step,
        "batches are fast enough on average, and only come unevenly",
        "shared memory for the batches that lie ready",
        {"prefetch_factor": DEEP_PREFETCH},
    )


def _fused(case: Case) -> Remedy | None:
    if case.evidence.optimizer not in CAN_FUSE:  # of torch, and no implementation was chosen
        return None
    return ceiling(
        case,
        "optimizer=fused",
        f"Use the optimizer's fused implementation: {case.evidence.optimizer}(…, fused=True).",
        case.costs.share(case.costs.saves(case.costs.optimizer)),
        "the optimizer's step is gone",
        "last digits of the weights differ",
        {"optimizer": "fused"},
    )


def _threads(case: Case) -> Remedy | None:
    """More threads per operator than the one with which launches start, where cores are free for them."""
    e, c = case.evidence, case.costs
    more = min(MOST_THREADS, int(e.noise.cores / e.world_size)) if e.noise else 1
    if e.device != "cpu" or e.threads != 1 or more < 2 or (e.noise and e.noise.is_crowded(e.world_size * more)):
        return None
    computes = max(0.0, c.compute + c.optimizer.mid)
    return ceiling(
        case,
        f"threads={more}",
        f"Use {units.several(more, 'thread')} per operator{' on each rank' * (e.world_size > 1)}: torch.set_num_threads({more}), or "
        f"OMP_NUM_THREADS={more}. The workbench starts scripts with 1; torchrun does so, too, and python gives them one per core.",
        computes / c.step * (1 - 1 / more),
        f"{more} threads share all of forward, backward and the optimizer's step evenly",
        "",
        {"threads": more},
    )


SETTINGS_OF: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "transformers": (
        "Hugging Face's Trainer",
        {
            "data_wait": "TrainingArguments(dataloader_num_workers={workers}) to begin with",
            "transfer": "TrainingArguments(dataloader_pin_memory=True)",
            "optimizer": 'TrainingArguments(optim="adamw_torch_fused", gradient_accumulation_steps=…)',
            "host": "TrainingArguments(logging_steps=…, torch_compile=True)",
            "stalls": "TrainingArguments(eval_steps=…, save_steps=…, logging_steps=…)",
            "evaluation": "TrainingArguments(eval_steps=…, per_device_eval_batch_size=…)",
            "checkpoint": "TrainingArguments(save_steps=…)",
        },
    ),
    "lightning": (
        "Lightning's Trainer",
        {
            "data_wait": "your DataLoader(num_workers={workers}, persistent_workers=True) to begin with",
            "transfer": "your DataLoader(pin_memory=True)",
            "optimizer": "Trainer(accumulate_grad_batches=…), or fused=True in configure_optimizers",
            "host": "Trainer(log_every_n_steps=…)",
            "stalls": "Trainer(val_check_interval=…), ModelCheckpoint(every_n_train_steps=…)",
            "evaluation": "Trainer(val_check_interval=…, limit_val_batches=…)",
            "checkpoint": "ModelCheckpoint(every_n_train_steps=…)",
        },
    ),
}
"""Framework that has the training loop → its name, and part of the step or kind of stall → the settings that change it; `{workers}`: a
number to begin with."""
TRAINER_PAGE, MOST_WORKERS = "how-to/frameworks", 8
"""The page of the docs on how to get a step and a loader out of a Trainer; most workers to begin with, where there are fewer. Chosen."""


def set_by(e: Evidence, part: str, workers: int | None = None) -> str:
    """The settings of the script's framework for a part, as a sentence after another; "" = the loop is the user's own.

    So many `workers` are named; None = as many as the cores allow, to begin with.
    """
    name, settings = SETTINGS_OF.get(e.places.get("framework", ""), ("", {}))
    setting = settings.get((part == "stalls" and e.stalls.kind) or part, "")
    if setting and workers is not None:
        return f" With {name}: {setting.removesuffix(' to begin with').format(workers=workers)}."
    allowed = max(1, int(usable_cores() / e.world_size) - e.threads)
    now = int(given) if (given := e.places.get("workers", "")).isdecimal() else 0
    if part == "data_wait" and allowed <= now:
        setting = setting and f"num_workers is {now} already, and the cores allow no more: make each batch cheaper, or prepare the data"
    how = f" How to give wb.diagnose its step and loader: docs, {TRAINER_PAGE}." if part == "data_wait" else ""
    return f" With {name}: {setting.format(workers=min(allowed, max(MOST_WORKERS, 2 * now)))}.{how}" if setting else ""
