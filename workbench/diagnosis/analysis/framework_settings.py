"""Which settings of a framework's training loop change a part of the step, for scripts whose loop is not their own."""

from collections.abc import Mapping

from workbench.core.system_load import usable_cores
from workbench.diagnosis.analysis.evidence import Evidence

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


def set_by(e: Evidence, part: str) -> str:
    """The settings of the script's framework for a part, as a sentence after another; "" = the loop is the user's own."""
    name, settings = SETTINGS_OF.get(e.places.get("framework", ""), ("", {}))
    setting = settings.get((part == "stalls" and e.stalls.kind) or part, "")
    allowed = max(1, int(usable_cores() / e.world_size) - e.threads)
    now = int(given) if (given := e.places.get("workers", "")).isdecimal() else 0
    if part == "data_wait" and allowed <= now:
        setting = setting and f"num_workers is {now} already, and the cores allow no more: make each batch cheaper, or prepare the data"
    how = f" How to give wb.diagnose its step and loader: docs, {TRAINER_PAGE}." if part == "data_wait" else ""
    return f" With {name}: {setting.format(workers=min(allowed, max(MOST_WORKERS, 2 * now)))}.{how}" if setting else ""
