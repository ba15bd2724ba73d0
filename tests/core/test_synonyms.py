"""Other names of arguments: taken where they are free, and a misspelt one is recognised."""

import inspect
import pickle
from typing import Any

import pytest

import workbench as wb
from workbench.core.synonyms import MAKERS, SYNONYMS, accept_synonyms, explain_calls

NAMES = [(space, name) for space in (wb, wb.data) for name in dir(space) if name != "widgets"]  # which needs Jupyter, and is a module
PUBLIC = [getattr(*each) for each in NAMES if inspect.isfunction(getattr(*each))]
CLASSES = [(f"wb.{'data.' * (space is wb.data)}", getattr(space, name)) for space, name in NAMES if inspect.isclass(getattr(space, name))]
VERBS = (*(verb for verb in PUBLIC if verb not in (wb.trace, wb.why_not_linear)), wb.Diagnosis.prove)  # whose ranks are others
ANY: Any = object()


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


def test_other_options_are_not_all_knobs() -> None:
    with pytest.raises(TypeError, match=r"'workers'\? It also takes other options: help\(wb\.data\.convert\)$"):
        wb.data.convert("a", "b", worker=1)


@pytest.mark.parametrize("verb", PUBLIC, ids=lambda verb: str(verb.__name__))
def test_a_public_function_is_that_of_its_file_and_can_be_pickled(verb: Any) -> None:
    """Such as `partial(wb.data.open_source, path)` in a dataset, whose workers are started anew."""
    assert pickle.loads(pickle.dumps(verb)) is verb


def test_what_is_no_argument() -> None:
    with pytest.raises(TypeError, match=r"curve\(repeat=…, repeats=…\): both names are of one argument; give repeat"):
        curve("spec", repeat=2, repeats=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"curve\(str, list\): only spec is given by place; all else by name: repeat=…, budget_s=…"):
        curve("spec", [1])  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"curve\(str, spec=…\): spec is given by place and by name; give it once"):
        curve("spec", spec=1)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"curve\(repaet=…\): did you mean 'repeat'\? It takes spec, repeat, budget_s, seconds"):
        curve("spec", repaet=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: str(verb.__name__))
def test_the_verbs_have_one_word_for_each_thing(verb: object) -> None:
    """The first name of each row, and none of the others."""
    names = set(inspect.signature(verb).parameters)  # type: ignore[arg-type]
    others = {word for name, words in SYNONYMS.items() for word in words if name in names}
    assert not names & others
    assert hasattr(verb, "__wrapped__")


@pytest.mark.parametrize("verb", PUBLIC, ids=lambda verb: str(verb.__name__))
def test_a_call_that_does_not_fit_is_told_what_would(verb: Any) -> None:
    """With an argument missing, with one too many and with a misspelt one; by Python's own messages nobody learns what is allowed."""
    parameters = inspect.signature(verb).parameters.values()
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty and parameter.kind < parameter.VAR_KEYWORD]
    needed = [name for name in needed if name != "runs"]
    for name in needed:
        with pytest.raises(TypeError, match=rf"missing: {name} \(.+\)\. For example: wb\.(data\.)?{verb.__name__}\(.+\)$"):
            verb(**{other: ANY for other in needed if other != name})
    if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        with pytest.raises(TypeError, match=r"(is|are) given by place"):
            verb(*[ANY] * 30)
    named = max((parameter.name for parameter in parameters if parameter.name not in (*needed, "runs")), key=len, default="")
    if named and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        with pytest.raises(TypeError, match=f"did you mean {named!r}"):
            verb(**dict.fromkeys(needed, ANY), **{f"{named}x": ANY})


def test_arguments_count_as_much_as_the_knobs_that_a_function_takes() -> None:
    with pytest.raises(TypeError, match=r"estimate_memory\(los=…\): did you mean 'loss'\? It also takes the knobs of RunSpec"):
        wb.estimate_memory("text-gpt", los=1)
    with pytest.raises(ValueError, match=r"has no knob 'los': did you mean 'loss'\? \(all: workbench launch --help\)$"):
        wb.memory_ladder("text-gpt", "H100", los=1)
    with pytest.raises(ValueError, match=r"has no knob 'batch_size': here it is called micro_batch"):
        wb.estimate_memory("text-gpt", batch_size=1)
    with pytest.raises(
        TypeError, match=r"would_fit\(list, str\): only run \(.*wb\.memory_ladder\(build, device, batch=batch\).*\) is given by place"
    ):
        wb.would_fit([], "H100")  # type: ignore[call-arg]


CALLS = [(f"{space}{cls.__name__}", cls) for space, cls in CLASSES] + [
    (f"{space}{cls.__name__}.{name}", getattr(cls, name))
    for space, cls in CLASSES
    for name in dir(cls)
    if not name.startswith("_") and isinstance(inspect.getattr_static(cls, name), classmethod)
]


@pytest.mark.parametrize(("name", "made"), CALLS, ids=[name for name, _ in CALLS])
def test_a_class_that_is_called_wrongly_says_what_would_fit(name: str, made: Any) -> None:
    """Its constructor and its class methods: `Trace.load()`, `StepTimer(model=…)`; RunSpec and Task have errors of their own."""
    short, parameters = name.removeprefix("wb.").removeprefix("data."), inspect.signature(made).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        with pytest.raises((TypeError, ValueError), match=r"takes |did you mean|has no (argument|knob)") as caught:
            made(**dict.fromkeys(needed, ANY), zzyzx=1)
        assert "__init__" not in str(caught.value)
    if needed:
        with pytest.raises((TypeError, ValueError), match=r"missing: .+\. For example: wb\.\w.*\)$|(is|are) missing$") as caught:
            made()
        assert str(caught.value).startswith(short)
        assert "positional" not in str(caught.value)


def test_an_example_of_a_class_is_a_call_of_something_that_there_is() -> None:
    for maker, made in MAKERS.items():
        found: Any = wb
        for part in maker.partition("(")[0].split("."):
            found = getattr(found, part)
        assert callable(found), maker
        assert set(made.split()) <= {name.removeprefix("wb.").removeprefix("data.") for name, _ in CALLS}


def test_a_type_error_inside_of_a_class_stays_what_it_is() -> None:
    class Sum:
        def __init__(self, parts: list[int]) -> None:
            self.total = sum(parts)

    explain_calls(Sum)
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        Sum(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Sum\(list, list\): only parts is given by place"):
        Sum([1], [2])  # type: ignore[call-arg]
    assert Sum([1, 2]).total == 3
    assert pickle.loads(pickle.dumps(wb.Device.named("H100"))) == wb.Device.named("H100")
    assert list(inspect.signature(wb.Trace.load).parameters) == ["path", "cache", "steps", "communication"]


def test_the_panels_say_it_as_well() -> None:
    pytest.importorskip("ipywidgets", reason="wb.widgets needs Jupyter's packages (pip install '.[notebooks]')")
    with pytest.raises(TypeError, match=r"^WhyNotLinear\(\): missing: target .*For example: wb\.widgets\.WhyNotLinear\(target\)$"):
        wb.widgets.WhyNotLinear()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^MemoryExplorer\(divice=…\): did you mean 'device'\?"):
        wb.widgets.MemoryExplorer("text-gpt", divice="H100")  # type: ignore[call-arg]
