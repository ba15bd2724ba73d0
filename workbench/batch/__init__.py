"""Batch size and learning rate: what a batch is worth, which learning rate it needs, and which batch reaches a target soonest.

`scale_lr` takes a learning rate from one batch to another by a rule (`ScaledLr`), `find_lr` finds one by sweeps and a race (`LrFound`).
`noise_scale` measures about the batch from which larger ones stop paying (`NoiseScale`), `steps_to_target` that batch itself, by many
trainings (`StepsToTarget`, `CriticalBatch`, `TimeToTarget`). `batch_plan` proposes a `BatchPlan`, micro_batch × accumulation × world_size
with a learning rate, and a `PlanProof` compares it with the plan before. `batch_lengths` follows the lengths of samples through an order.
"""
