"""The training program that torchrun starts: `python -m workbench.train RUN_DIR…` reads specs, trains them, and writes what happened.

`start` is how a launch starts it, and the experiments beside it, out of the garbage collector's way. `ranks` joins the processes,
`loader` makes the batches, `loop` turns them into optimizer steps with the `precision`, the optimizer (`optimizers`) and the learning
rate (`schedule`) that the spec asks for, `metrics` reports them, `saving` keeps checkpoints; `alone` trains a spec in a pod that nobody
launched; `sweep` trains several specs in one launch. Where ranks share a model or save memory: `layout` says which rank does what,
`parallel` deals the model out, `splitting` splits its layers (`dealt` has the arithmetic of both), `checkpointing` computes `blocks`
anew, `offload` lets things wait on the host. `tasks` and `models` are samples to train. It shares no code with the launcher: the two meet
in the run directory.
"""
