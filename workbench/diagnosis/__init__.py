"""Finds out what limits a training step, predicts what would make it faster, and proves the prediction by running it.

`measure/` runs experiments on a step: it takes one part away at a time (an ablation), traces a few steps, probes the loader and looks for
stalls. What it measures is `Evidence`; `analysis/` is arithmetic on it: a `Diagnosis` has the `Costs` of the parts, the `Judgement` which
of them limits the step, causes, and `Remedies` with a speedup that the `StepModel` predicts; a `Proof` has the measured one beside it.
`api.py` has `diagnose`, `prove` and `climb`.

Why N ranks give less than N times one is in `why_not_linear.py` and the files named after the gap; whether a training is right at all in
`correctness.py` (`sanity`, `diverge`, `replay`); what made one slower, larger or worse in `regression.py` (`what_changed`, `bisect`), with
`swaps.py`, `rerun.py` and the searches of `analysis/`.
"""
