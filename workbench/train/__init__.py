"""Trains a RunSpec on one rank, step by step; it knows neither the launcher nor any panel: they meet in the run directory.

`train()` (`loop`) builds a `Trainer` (`trainer`) from a `RunSpec`, a `Task` and this process's `Ranks`, takes its steps, times them, and
writes steps, metrics and `Checkpoints` (`checkpoints`) into the run directory.

A Trainer is made of: `loader` (batches of this rank), `precision` (autocast and loss scaling), `optimizers` (optimizer by name, ZeRO-1,
learning-rate schedule) with `large_batch_optimizers` (LARS, LAMB).

Several ranks: `ranks` (this process, process groups, `Layout`), `sharding` (DDP and FSDP2), `tensor_parallel` (split layers),
`sharded_tensors` (DTensor arithmetic for both), `stages` (a model cut for a pipeline) and `pipeline` (its schedules).

Less memory: `blocks` (a model's repeated layers), `activation_checkpointing` (recompute them in the backward), `offload` (to host memory),
`choose_micro_batch` (micro_batch="auto") and `split_on_oom` (when that does not fit after all).

Sample tasks: `tasks`, their `models`, and `sized` (a GPT in any width).
"""
