"""Cost: what training across many GPUs sends and computes, in closed forms, each with its source.

`collectives` and `hierarchy`: seconds on a `Link`, by latency and bandwidth; a measured `Sweep` gives both. `overlap`: what of its buckets
DDP does not hide behind the backward. `volumes`: bytes per rank of DDP, ZeRO and FSDP. `pipeline`: bubbles. `transformer`: parameters,
FLOPs and tensor-parallel messages of a GPT; `iteration`: its seconds under 3-D parallelism; `sharded`: those of a step under ZeRO-3. A
`Cluster` has the GPUs and links that all of it happens on. `Sent` and `Traffic`: the collectives of a program's own step, as they were
counted; `Links`: measured ones; `TwinRun`: DDP's real reducer beside the closed form.
"""
