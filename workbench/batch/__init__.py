"""Batch size and learning rate: what a batch is worth, which learning rate it needs, and which batch reaches a target soonest.

The types, and how each follows from others:

* An `OptimizerDescription` is an optimizer's name and options (`analysis/optimizer_description.py`).
* `scale_lr` takes a learning rate from one batch to another by a rule: a `ScaledLr`, with the rule's validity
  (`analysis/lr_scaling_rules.py`).
* `find_lr` finds a learning rate: sweeps and their suggestions (`analysis/lr_range.py`), then a race
  (`analysis/lr_race.py`): an `LrFound`.
* `noise_scale` measures a `NoiseScale`, about the batch from which larger ones stop paying (`analysis/noise_scale.py`,
  `analysis/noise_scale_estimator.py`); `find_lr` and `noise_scale` are in `api.py`.
* `steps_to_target` measures that batch directly by many trainings: a `StepsToTarget`, its law `CriticalBatch`, and `TimeToTarget`.
* A `BatchPlan` is micro_batch × accumulation × world_size with a learning rate (`analysis/plan.py`). `batch_plan` proposes one from memory,
  `Throughput` and noise; a `PlanProof` compares it with the plan before (`batch_plan.py`, `facts.py`, `analysis/proof.py`).
* `batch_lengths` follows the order of a training through the lengths of its samples: `BatchLengths` (`lengths.py`, `analysis/lengths.py`);
  `measure/length_proof.py` proves what other batches of them gain.
* A `Schedule` is the learning rate at each step (`analysis/schedule.py`).

`measure/` runs the range test, gradient norms, per-sample gradients and schedulers; `plot.py` and `plot_steps.py` draw; `panel/` has the
batch planner.
"""
