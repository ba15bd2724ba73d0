"""What a batch's size has to do with its learning rate: rules with their limits, in plain arithmetic; nothing here trains.

The nouns, and how one becomes the next:

* `Described` is an optimizer in plain values: its name, what it is akin to, and the options that the rules change.
* `scale_lr` takes a learning rate from one batch to another by a rule: a `ScaledLr`, with what became of betas, warm-up and weight decay,
  why this rule, and whether its assumptions hold there.
* A `BatchPlan` is micro_batch × accumulation × world_size with a learning rate, each number with its reason; `scaled_to` another batch or
  other ranks it is another one, and `changes()` are the knobs of a RunSpec.

Batching: how many samples per step, with what learning rate. The arithmetic is in `batch`; here it meets specs, runs and measurements.

* `noise_scale`: how large a batch must be before its gradient is more signal than noise, from a run or a step.
* `find_lr`: a learning rate, by a range test with several seeds and a short race.
* `steps_to_target`: the direct experiment: many trainings, each until the target, and the law of steps against batch.
* `batch_plan`: from memory, throughput and noise to a `ProposedPlan`, each number with its reason; `prove_plan` runs it against another.
* `Throughput`: samples per second against the micro-batch, given or measured.
"""
