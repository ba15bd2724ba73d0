"""Communicating: what ranks send each other, before there are any.

`collectives` counts those of your own module on any number of ranks, in this process, without hardware: a `cost.Traffic`.
`measure_collectives` times them between real ranks: `cost.Links`, of which a cluster is made. `ddp_twin` runs DDP's real reducer over a
network that is only reckoned: a `cost.TwinRun`.
"""

from workbench.communicating.counting import collectives
from workbench.communicating.emulating import ddp_twin
from workbench.communicating.timing import measure_collectives

__all__ = ["collectives", "ddp_twin", "measure_collectives"]
