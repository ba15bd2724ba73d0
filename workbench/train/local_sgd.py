"""Post-local SGD: after some steps, ranks average their parameters now and then in place of their gradients in each step.

torch's own hook of DDP reduces the gradients (`post_localSGD_hook`). Its `PeriodicModelAverager` is not used: it makes a copy of the whole
model at once, and leaves out parameters whose gradients were cleared. Source: Lin et al. 2020, arXiv:1808.07217.
"""

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from workbench.runs.training_knobs import parse_local_sgd
from workbench.train.ranks import Layout
from workbench.train.sharding import average


class LocalSgd:
    """The averages of a training."""

    def __init__(self, model: DistributedDataParallel, knob: str, layout: Layout) -> None:
        """Register the hook that reduces gradients among few ranks from the start on."""
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

        options = parse_local_sgd(knob)
        self._model, self._group, self._start, self._period = model, layout.data, options["start"], options["period"]
        self._steps = 0
        every: Any = layout.data or dist.group.WORLD
        among = options["local_ranks"] > 1
        make: Any = PostLocalSGDState
        self._state = make(every, layout.neighbours or every, self._start, post_local_gradient_allreduce=among)
        model.register_comm_hook(self._state, post_localSGD_hook)

    def go_on(self, steps: int) -> None:
        """Have so many steps behind it, as after a resume."""
        self._steps = self._state.iter = steps

    def after_step(self, *, last: bool) -> None:
        """Average the parameters if it is time, and after the last step, so that all ranks have one model. A collective."""
        self._steps += 1
        local = self._steps - self._start
        if local > 0 and (last or not local % self._period):
            average([weight.data for weight in self._model.parameters() if weight.requires_grad], self._group)
