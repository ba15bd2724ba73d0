"""Tests mirror the packages: a test file has the name of a file of its package, or covers a behaviour that is listed here."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.architecture.rules import NAME, PACKAGES

ROOT = Path(__file__).parents[2]

BEHAVIOURS = {
    "batch/test_find_lr.py": "find_lr on real steps, through api.py and measure/",
    "cluster/test_published_scaling.py": "predictors of scaling against published results (benchmarks/reality.py)",
    "cluster/test_trainers.py": "plans of a named trainer, and what a measured step says of its versions",
    "core/test_control_groups.py": "control groups, the part of system_load.py that may be tested beside other work",
    "core/test_visual_language.py": "how all pictures draw what is measured and what is predicted, in core/display/ and every plot.py",
    "data/test_strange_samples.py": "samples and manifests that other programs made, in every format and writer",
    "diagnosis/test_constants.py": "numbers that decide a verdict or a prediction say where they come from",
    "diagnosis/test_emulated_device.py": "verdicts on a device that works behind the host's back",
    "diagnosis/test_time_to_verdict.py": "how long experiments take to a verdict, by a fake clock",
    "diagnosis/test_gallery.py": "the gallery of planted bottlenecks",
    "harness/test_emulated_device.py": "the emulated GPU of tests behaves as a GPU",
    "memory/test_gradient_sums.py": "gradients that are summed in place, when they are recorded and when they are not",
    "memory/test_plot_ladder.py": "the picture of a memory ladder, in plot.py",
    "memory/test_predicted_and_measured.py": "an estimate beside a measurement of the same spec",
    "memory/test_published_formulas.py": "published formulas (benchmarks/published_formulas.py)",
    "memory/test_transformers_models.py": "estimates of models of transformers",
    "runs/test_every_knob.py": "each knob of RunSpec in a run that is really launched",
    "runs/test_foreign_directories.py": "run directories that somebody else has made",
    "runs/test_hostile_environment.py": "environment variables that somebody has set to harm",
    "runs/test_nothing_outlives_a_run.py": "no process is left, however a run ends",
    "runs/test_random_kills.py": "trainings that are killed at random and resumed (benchmarks/random_kills.py)",
    "runs/test_signals.py": "which failure is named under signals",
    "runs/test_two_users.py": "two users on one machine",
    "traces/test_real_trace.py": "every answer of a real trace",
    "train/test_loss_equality.py": "parallel modes against one process (benchmarks/loss_equality.py)",
    "train/test_resume_changes.py": "what a resume refuses and tells, in checkpoints.py, provenance.py and what they use",
    "train/test_auto_micro_batch.py": 'micro_batch="auto": choose_micro_batch.py and split_on_oom.py',
}
"""Test file → the behaviour across files that it covers."""


def without_counterpart(tests: Iterable[str], library: Iterable[str], behaviours: Mapping[str, str]) -> list[str]:
    """The test files that neither mirror a file or folder of their package nor have a listed behaviour, and listed files that do not exist.

    Args:
        tests: paths in `tests/`.
        library: paths in `workbench/`.
        behaviours: paths in `tests/` with what they cover.
    """
    names = {(path.split("/")[0], Path(part).stem) for path in library for part in path.split("/")[1:]}
    tests = set(tests)
    mirrored = {path for path in tests if (path.split("/")[0], Path(path).stem.removeprefix("test_")) in names}
    return sorted((tests - mirrored) ^ set(behaviours))


def test_every_test_file_mirrors_a_file_or_covers_a_listed_behaviour() -> None:
    tests = [path.relative_to(ROOT / "tests").as_posix() for package in PACKAGES for path in (ROOT / "tests" / package).glob("test_*.py")]
    library = [path.relative_to(ROOT / NAME).as_posix() for path in (ROOT / NAME).rglob("*.py")]
    assert len(tests) > 100
    assert without_counterpart(tests, library, BEHAVIOURS) == []


def test_a_breach_is_seen() -> None:
    library = ["memory/analysis/breakdown.py", "memory/plot.py", "traces/plot/step.py", "runs/run.py"]
    mirrors = ["memory/test_breakdown.py", "memory/test_plot.py", "traces/test_plot.py"]
    assert without_counterpart([*mirrors, "memory/test_run.py"], library, {}) == ["memory/test_run.py"]
    assert without_counterpart([*mirrors, "runs/test_signals.py"], library, {"runs/test_signals.py": "signals"}) == []
    listed = {"runs/test_gone.py": "a file that is not there", "memory/test_plot.py": "what its name says already"}
    assert without_counterpart(mirrors, library, listed) == ["memory/test_plot.py", "runs/test_gone.py"]
