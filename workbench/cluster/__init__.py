"""Many GPUs: what a training step sends and how long it takes on a cluster: measured, simulated, or predicted by closed forms.

Hardware: a `Cluster` (`analysis/cluster`) has GPUs and `Link`s; `measure_collectives` (`api`, `measure/links`) measures your own `Links`.

Closed forms (`analysis`): `collective_cost` (seconds of an all-reduce and others), `transformer` (parameters and FLOPs of a GPT),
`iteration` (its step under 3-D parallelism, pipeline bubbles, DDP's overlap).

A program's own step: `collectives()` (`count_collectives`, `estimate/collectives`) counts each `CollectiveCall` of your module in a dry
run; together they are a `Traffic` (`analysis/traffic`), whose seconds on a cluster and findings follow.

Plans: `plan()` (`plan`, `analysis/plan`) lists the layouts of a model on a cluster that fit and are fast, as `Plans`.

Energy: `energy()` (`plan`, `analysis/energy`) of a run or a plan: joules, money, carbon.

Simulation: `ddp_twin()` (`api`, `estimate/ddp_twin`) runs DDP's real reducer over a simulated network and returns a `TwinRun`.
"""
