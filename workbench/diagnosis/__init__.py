"""Finds out what limits a training step, predicts what would make it faster, and proves the prediction by running it.

`measure/` runs experiments on a step: it takes one part away at a time (an ablation, stored as `VariantTimes`), traces a few steps, probes
the loader and looks for stalls. What it measures is `Evidence` (`analysis/evidence.py`); `analysis/observed.py` makes Evidence of a run.

`analysis/` is arithmetic on Evidence:

    costs.py        Costs: seconds of each part of the step, and what its removal would save
    verdict.py      Judgement: the part that limits the step; causes.py: why
    step_model.py   StepModel: the parts of the step under changed knobs; loader_model.py: the same of the loader over its workers
    remedies.py     Remedies with a predicted speedup (remedy.py), those of the loader in loader_remedies.py
    diagnosis.py    Diagnosis: all of it together
    proof.py        Proof: a remedy's predicted beside its measured speedup; Ladder: one proved remedy on top of another
    calibration.py  Calibration: how right earlier predictions on this machine were

Why N ranks give less than N times one: `why_not_linear.py` launches one, strangers and all (`measure/gap.py`), `analysis/gap.py` takes the
gap apart (from `gap_evidence.py`), `gap_forecast.py` predicts more ranks, `gap_remedies.py` what would narrow it; `plot_gap.py` draws it.

Whether a training is right at all: `correctness.py` has `sanity`, which checks it for the usual faults (`measure/sanity.py`), `diverge`,
which finds where two trainings that should agree differ first (`measure/divergence.py`), and `replay`, which repeats a bad step of a run
with changes (`measure/step_replay.py`) and blames data, learning rate or numerics.

What made a training slower, larger or worse: `regression.py` has `what_changed` between two runs and `bisect` over commits. `swaps.py`
lists the differences and how each is put into a training, `rerun.py` makes it, and `analysis/owner_search.py` and `analysis/bisection.py`
decide which to make next. `commands.py` has their commands, `plot_regression.py` their pictures.

`api.py` has `diagnose`, `prove` and `climb`; `plot.py` the pictures; `panel/` the ThroughputDoctor and (`linear.py`) WhyNotLinear.
"""
