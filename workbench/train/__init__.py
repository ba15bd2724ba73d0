"""Trains a RunSpec on one rank, step by step; it knows neither the launcher nor any panel: they meet in the run directory.

`train()` (`loop`) builds a `Trainer` (`trainer`) from a `RunSpec`, a `Task` and this process's `Ranks`, takes its steps, times them, and
writes steps, metrics and `Checkpoints` into the run directory. Of several ranks: `ranks`, `sharding` (DDP and FSDP2), `tensor_parallel`,
`stages` and `pipeline`. Less memory: `activation_checkpointing`, `offload`, `choose_micro_batch` (micro_batch="auto") and `split_on_oom`.
"""
