"""Other names of arguments: taken where they are free, and a misspelt one is recognised."""

import inspect

import pytest

import workbench as wb
from workbench.core.synonyms import SYNONYMS, accept_synonyms

VERBS = (
    wb.diagnose, wb.climb, wb.find_lr, wb.noise_scale, wb.batch_plan, wb.steps_to_target, wb.scaling_curve, wb.scaling_law, wb.sweep,
    wb.list_runs, wb.measure_collectives, wb.ddp_twin, wb.collectives, wb.estimate_memory, wb.measure_memory, wb.Diagnosis.prove,
)  # fmt: skip


@accept_synonyms
def curve(spec: object, *, repeat: int = 3, budget_s: float | None = None, seconds: float = 0.0) -> tuple[object, ...]:
    """Measure."""
    return spec, repeat, budget_s, seconds


@accept_synonyms
def launch(*, nproc_per_node: int = 1, **knobs: object) -> tuple[object, ...]:
    return nproc_per_node, knobs


def test_another_name_is_taken_where_it_is_free() -> None:
    assert curve("spec", repeats=2, timeout=5.0) == ("spec", 2, 5.0, 0.0)  # type: ignore[call-arg]
    assert curve("spec", seconds=7.0) == ("spec", 3, None, 7.0)  # an argument of its own
    assert launch(gpus=2, micro_batch=8) == (2, {"micro_batch": 8})
    assert curve.__doc__ == "Measure."
    assert list(inspect.signature(curve).parameters) == ["spec", "repeat", "budget_s", "seconds"]


def test_what_is_no_argument() -> None:
    with pytest.raises(TypeError, match=r"curve\(repeat=…, repeats=…\): both names are of one argument; give repeat"):
        curve("spec", repeat=2, repeats=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"curve\(str, list\): only spec is given by place; all else by name: repeat=…, budget_s=…"):
        curve("spec", [1])  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"curve\(repaet=…\): did you mean 'repeat'\? It takes spec, repeat, budget_s, seconds"):
        curve("spec", repaet=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: str(verb.__name__))
def test_the_verbs_have_one_word_for_each_thing(verb: object) -> None:
    """The first name of each row, and none of the others."""
    names = set(inspect.signature(verb).parameters)  # type: ignore[arg-type]
    others = {word for name, words in SYNONYMS.items() for word in words if name in names}
    assert not names & others
    assert hasattr(verb, "__wrapped__")
