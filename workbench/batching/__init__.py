"""Batching: how many samples per step, with what learning rate. The arithmetic is in `batch`; here it meets specs, runs and measurements.

* `noise_scale`: how large a batch must be before its gradient is more signal than noise, from a run or a step.
* `find_lr`: a learning rate, by a range test with several seeds and a short race.
* `steps_to_target`: the direct experiment: many trainings, each until the target, and the law of steps against batch.
* `batch_plan`: from memory, throughput and noise to a `ProposedPlan`, each number with its reason; `prove_plan` runs it against another.
* `Throughput`: samples per second against the micro-batch, given or measured.
"""

from workbench.batching.course import Gain as Gain
from workbench.batching.lr import find_lr as find_lr
from workbench.batching.noise import noise_scale as noise_scale
from workbench.batching.planning import batch_plan as batch_plan
from workbench.batching.proof import PlanProof as PlanProof
from workbench.batching.proposal import ProposedPlan as ProposedPlan
from workbench.batching.proving import prove_plan as prove_plan
from workbench.batching.reaching import steps_to_target as steps_to_target
from workbench.batching.throughput import Throughput as Throughput
