"""What every notebook keeps to. (That it runs and shows what it says is nbval's part: `make notebooks`.)"""

import ast
import contextlib
import importlib
import io
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests import forked_kernel, notebooks, refresh, shown_code, student
from workbench.core.statistics import Interval

if TYPE_CHECKING:  # it takes seconds to import
    import nbformat

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NEVER = {
    "clear_output": "strict nbval cannot compare it",
    "interact(": "strict nbval cannot compare it; use a panel of wb.widgets",
    "with Output": "it is unreliable from threads; use a panel of wb.widgets",
    "time.sleep": "wait on state: run.wait()",
}


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> "nbformat.NotebookNode":
    nbformat = pytest.importorskip("nbformat", reason="needs Jupyter's packages (pip install '.[notebooks,dev]')")
    return nbformat.read(request.param, as_version=4)


def code(notebook: "nbformat.NotebookNode") -> "list[nbformat.NotebookNode]":
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def parsed(source: str) -> list[ast.stmt]:
    """The statements of a cell, without its magics."""
    return ast.parse("\n".join(line for line in source.splitlines() if not line.startswith("%"))).body


def test_there_is_one() -> None:
    assert NOTEBOOKS


def test_it_was_executed_from_top_to_bottom(notebook: "nbformat.NotebookNode") -> None:
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1)), "make refresh"


def test_what_is_executed_differs_in_numbers_alone(tmp_path: Path) -> None:
    """And in no cell whose output is compared."""
    nbformat = pytest.importorskip("nbformat", reason="needs Jupyter's packages (pip install '.[notebooks,dev]')")
    shortened = set()
    for path in NOTEBOOKS:
        cells, copies = (nbformat.read(each, as_version=4).cells for each in (path, notebooks.copied(path, tmp_path)))
        for cell, copy in zip(cells, copies, strict=True):
            if cell.source != copy.source:
                shortened.add(path.name[:3])
                assert re.sub(r"\d[\d_]*", "", cell.source) == re.sub(r"\d[\d_]*", "", copy.source)
                assert "nbval-ignore-output" in cell.metadata.get("tags", []) or not cell.outputs
    assert shortened == notebooks.QUICK.keys()
    (tmp_path / "02_other.ipynb").write_text("{}")
    with pytest.raises(AssertionError, match=r"02_other.ipynb has no budget_s="):
        notebooks.copied(tmp_path / "02_other.ipynb", tmp_path)


def test_each_has_its_place_among_those_that_are_executed() -> None:
    assert {*notebooks.SLOW, *notebooks.OTHERS, *notebooks.ALONE} == {path.name[:3] for path in NOTEBOOKS}
    assert set(notebooks.FORKED) <= {*notebooks.SLOW, *notebooks.ALONE}, "beside the others no process waits for orders"


def test_some_launch_forks(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs Jupyter's packages (pip install '.[notebooks,dev]')")
    kernels = {path.name[:3]: nbformat.read(notebooks.copied(path, tmp_path), as_version=4).metadata.kernelspec.name for path in NOTEBOOKS}
    assert {name for name, kernel in kernels.items() if kernel == forked_kernel.NAME} == set(notebooks.FORKED)
    assert set(kernels.values()) == {"python3", forked_kernel.NAME}
    forked_kernel.install(tmp_path / "jupyter")
    (spec,) = (tmp_path / "jupyter").rglob("kernel.json")
    assert Path(json.loads(spec.read_text())["argv"][1]).samefile(forked_kernel.__file__)


def test_it_stores_no_error_that_it_does_not_announce(notebook: "nbformat.NotebookNode") -> None:
    for cell in code(notebook):
        if any(output.output_type == "error" for output in cell.outputs):
            assert "raises-exception" in cell.metadata.get("tags", [])


def test_its_outputs_are_of_the_code_as_it_is(notebook: "nbformat.NotebookNode") -> None:
    changed = shown_code.older(notebook)
    assert changed is not None, "nobody knows what code made these outputs: make refresh"
    assert not changed, (
        f"the stored outputs are older than {', '.join(changed)}: make refresh, or where nothing that is shown changes, "
        "python -m tests.refresh --stamp notebooks/…"
    )


def test_the_age_of_outputs_is_told_by_the_code_that_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [
        'import workbench as wb\nfrom scripts.hits import loop\nspec = wb.RunSpec(task="scripts/remote_clipart.py:build")',
        "d = wb.diagnose(spec)",
        "_ = d.plot()",
    ]
    notebook: dict[str, Any] = {"metadata": {}, "cells": [{"cell_type": "code", "source": [cell]} for cell in cells]}
    assert shown_code.older(notebook) is None
    notebook["metadata"][shown_code.KEY] = stored = shown_code.code_of(notebook)
    assert shown_code.older(notebook) == []
    shown = "diagnosis/api.py", "diagnosis/plot.py", "diagnosis/analysis/diagnosis.py", "diagnosis/analysis/verdict.py"
    assert {f"workbench/{name}" for name in shown} | {"notebooks/scripts/hits.py", "notebooks/scripts/remote_clipart.py"} <= set(stored)
    unseen = "/measure/", "/memory/", "runs/spec.py"
    assert not [name for name in stored if any(part in name for part in unseen)], "what is not shown does not count"
    notebook["cells"][1]["source"] = ["d = wb.diagnose(spec, budget_s=9)  # not the same"]
    assert shown_code.older(notebook) == [shown_code.CELLS]
    notebook["cells"][1]["source"] = ["d = wb.diagnose( spec )  # the same"]
    assert shown_code.older(notebook) == []
    changed = shown_code.ROOT / "workbench/diagnosis/analysis/verdict.py"
    before, read = changed.read_text(), Path.read_text
    for after, old in ((before + "\n# more\n", []), (before + "\nMORE = 1\n", ["workbench/diagnosis/analysis/verdict.py"])):
        monkeypatch.setattr(Path, "read_text", lambda path, after=after: after if path == changed else read(path))
        assert shown_code.older(notebook) == old
    source = "def f(x: int = 1) -> int:\n    'Adds.'\n    y: int = x + 1  # more\n    return y\n"
    assert shown_code.digest(source) == shown_code.digest("def f(x=1):\n\n    y=x  +  1\n    return y")
    assert shown_code.digest(source) != shown_code.digest(source.replace("+", "-"))


def test_what_would_answer_a_guess_is_stored_folded() -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs Jupyter's packages (pip install '.[notebooks,dev]')")
    sources = ["a = 1\na", "guess = None  # 2 or 3?", "%time\nmeasured = 2\nmeasured", "check.near(guess, measured)", "measured"]
    sources += ["guess64 = guess_energy = None", "measured", "check.near(guess64, 1)\nmeasured", "check.near(guess_energy, 1)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    for cell in notebook.cells:
        cell.outputs = [] if "= None" in cell.source else [nbformat.v4.new_output("stream", text="2")]
    notebook.cells[0].metadata["jupyter"] = {"outputs_hidden": True}  # of an earlier version
    refresh.fold_answers(notebook)
    folded = [i for i, cell in enumerate(notebook.cells) if cell.metadata.get("jupyter") == {"outputs_hidden": True}]
    assert folded == [2, 6, 7]  # one guess may be compared, and another still be open
    nbformat.validate(notebook)


SHOWN = {
    "a", "b", "br", "caption", "circle", "code", "dd", "details", "div", "dl", "dt", "em", "g", "h1", "h2", "h3", "h4", "hr",
    "i", "label", "li", "line", "ol", "p", "path", "pre", "polygon", "polyline", "rect", "small", "span", "strong", "sub",
    "summary", "sup", "svg", "table", "tbody", "td", "text", "tfoot", "th", "thead", "title", "tr", "u", "ul",
}  # fmt: skip
"""Tags that display and do nothing else."""
STYLE = re.compile(r"url\(|expression\(|@import|javascript:|position:\s*fixed", re.IGNORECASE)


class Acting(HTMLParser):
    """Collects what in a text would load or execute something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.what: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in SHOWN:
            self.what.append(f"<{tag}>")
        for name, value in attrs:
            link = name in ("href", "src", "srcdoc", "xlink:href", "action", "formaction", "data", "background", "poster")
            if name.startswith("on") or (link and not (tag == "a" and str(value).startswith(("#", "https://")))):
                self.what.append(f"<{tag} {name}>")
            if name == "style" and STYLE.search(value or ""):
                self.what.append(f"<{tag} style={value}>")


@pytest.mark.parametrize(
    "text",
    [
        "<script>x</script>", "<img src=x>", "<b onclick=x>", "<a href='javascript:x'>", "<p style='background:url(//x)'>",
        "<iframe srcdoc=x>", "<svg><image href=//x /></svg>", "<style>x</style>", "<SCRIPT/x>", "<object data=x>", "<svg onload=x>",
    ],
)  # fmt: skip
def test_what_would_act_is_noticed(text: str) -> None:
    assert Acting(text).what
    assert not Acting("<table><td style='text-align:left'>1 &lt;script&gt;</td></table><a href='#x'>x</a>").what


def test_what_it_stores_executes_nothing(notebook: "nbformat.NotebookNode") -> None:
    """Whoever opens a notebook, or a page made of it, has its outputs in the browser before anything was run."""
    assert "widgets" not in notebook.metadata, "a state of widgets brings its own scripts"
    for cell in notebook.cells:
        assert not cell.get("attachments")
        if cell.cell_type == "markdown":
            assert not Acting(cell.source).what
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            assert set(data) <= {"text/plain", "text/html", "image/png"}
            assert not Acting(str(data.get("text/html", ""))).what
            for word in (output.get("text", ""), data.get("text/plain", ""), *output.get("traceback", ())):
                assert not re.search(r"\x1b(?!\[[0-9;]*m)", word), "a terminal obeys more than colours"


def test_cells_are_short(notebook: "nbformat.NotebookNode") -> None:
    lengths = [len(cell.source.splitlines()) for cell in code(notebook)]
    assert max(lengths) <= 14
    assert sum(length <= 12 for length in lengths) >= 0.9 * len(lengths)


def test_cells_can_be_compared(notebook: "nbformat.NotebookNode") -> None:
    for cell in code(notebook):
        for word, reason in NEVER.items():
            assert word not in cell.source, f"{word}: {reason}"
        assert not cell.source.rstrip().endswith(";"), "nbval runs without history, so a trailing ; hides nothing: assign to _"


def test_a_measurement_is_followed_by_a_check_of_what_the_text_claims(notebook: "nbformat.NotebookNode") -> None:
    waiting = False
    for cell in notebook.cells:
        if cell.cell_type == "code":
            waiting |= "nbval-ignore-output" in cell.metadata.get("tags", [])
            waiting &= "assert " not in cell.source
        elif cell.source.startswith("## "):
            assert not waiting or "Predict" in cell.source or "Prove" in cell.source, (
                f"nothing is checked before {cell.source.splitlines()[0]}"
            )
    assert not waiting


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a cell, those inside of `with check.claims():` in its place."""
    for node in body:
        yield from statements(node.body) if isinstance(node, ast.With) else [node]


def test_a_check_that_a_busy_machine_breaks_is_no_bare_assertion(notebook: "nbformat.NotebookNode") -> None:
    for cell in code(notebook):
        bare = [part for part in parsed(cell.source) if isinstance(part, ast.Assert) and "check.again" in ast.unparse(part)]
        assert not bare, f"it belongs into `with check.claims():`, {cell.source}"
        judged = [part for part in parsed(cell.source) if isinstance(part, ast.With) for part in part.body if isinstance(part, ast.Expr)]
        assert not any(ast.unparse(part).startswith("check.") for part in judged), (
            f"where a claim fails, nobody judges a guess: {cell.source}"
        )


def test_what_a_busy_machine_breaks_is_a_note_and_in_ci_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    from scripts import check

    def claim(message: str) -> None:
        with check.claims():
            raise AssertionError(message)

    monkeypatch.delenv("CI", raising=False)
    claim(check.again("input-bound", "compute-bound"))
    said = capsys.readouterr().out
    assert said.startswith("This time it is not as the text says, and you can go on: expected: input-bound. Measured: compute-bound.")
    claim(check.again("a good model", 0.7, timed=False))
    said = capsys.readouterr().out
    assert "expected: a good model. Measured: 0.7. Another processor" in said
    assert "busy" not in said
    with pytest.raises(AssertionError, match="wrong everywhere"):
        claim("wrong everywhere")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(AssertionError, match="Measured: compute-bound"):
        claim(check.again("input-bound", "compute-bound"))


@pytest.mark.parametrize(("start", "diagnosis"), [("00_", "diagnosis"), ("02_", "d"), ("03_", "b"), ("11_", "answer")])
def test_a_notebook_goes_on_where_nothing_can_be_proved(
    start: str, diagnosis: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delenv("CI", raising=False)
    from scripts import check

    nbformat = pytest.importorskip("nbformat", reason="needs Jupyter's packages (pip install '.[notebooks,dev]')")
    cells = [
        cell.source
        for cell in code(nbformat.read(next(FOLDER.glob(f"{start}*.ipynb")), as_version=4))
        if re.search(r"\.prove\(|\.remedy\(|(?<!\.)\bproof\b", cell.source)
    ]
    assert len(cells) >= 3
    none = SimpleNamespace(remedies=(), summary="inconclusive", judgement=SimpleNamespace(shares={"optimizer": SimpleNamespace(mid=0.5)}))
    none.evidence = SimpleNamespace(step=1.0)
    names = {"check": check, "reveal": None, diagnosis: none, "share": 0.5, "curve": SimpleNamespace(compute=0.5)}
    for cell in cells:
        exec(cell, names)
    said = capsys.readouterr().out
    assert said.count("expected: a remedy to prove. Measured: inconclusive.") >= 1
    assert len(said.splitlines()) >= 2


BOUNDS = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?) ?(%|×)")


def test_a_bound_that_a_checked_claim_states_is_the_one_that_is_checked(notebook: "nbformat.NotebookNode") -> None:
    """`assert error < 0.25` and "within 25 %": where a cell checks a claim and prints it, its numbers are those of the check."""
    for cell in code(notebook):
        body = list(statements(parsed(cell.source)))
        texts = [node for part in body if isinstance(part, ast.Expr) for node in ast.walk(part) if isinstance(node, ast.Constant)]
        checked = [node.value for part in body if isinstance(part, ast.Assert) for node in ast.walk(part) if isinstance(node, ast.Constant)]
        numbers = [value for value in checked if isinstance(value, int | float)]
        for text in (node.value for node in texts if checked and isinstance(node.value, str)):
            for number, unit in BOUNDS.findall(text):
                value = float(number)
                allowed = {value} | ({value / 100, 1 + value / 100, 1 - value / 100} if unit == "%" else set())
                assert any(abs(found - right) < 1e-9 for found in numbers for right in allowed), (number + unit, cell.source)


def test_it_says_what_it_asks_how_long_it_takes_and_what_comes_next(notebook: "nbformat.NotebookNode") -> None:
    first = notebook.cells[0].source
    assert re.match(r"# .*\?", first), "a question is the title"
    assert re.search(r"^\*\*You will learn\*\* .{20,}", first, re.MULTILINE)
    assert re.search(r"^\*\*Difficulty\*\* [●○]{3} · \*\*Learning\*\* \d+ min · \*\*Running\*\* \d+ (s|min)\b", first, re.MULTILINE)
    assert "our own" in "".join(cell.source for cell in notebook.cells[-4:]), "it ends with the reader's own loop"


def test_it_carries_nothing_of_a_machine(notebook: "nbformat.NotebookNode") -> None:
    import nbformat

    text = nbformat.writes(notebook)
    assert not re.search(r"/(home|root|Users|work|tmp)/", text)
    assert "widgets" not in notebook.metadata
    assert "version" not in notebook.metadata.language_info
    assert len(text) < 1_000_000


def test_its_cells_parse(notebook: "nbformat.NotebookNode") -> None:
    for cell in code(notebook):
        parsed(cell.source)


def test_its_pictures_are_sharp_and_no_object_is_printed_beside_them(notebook: "nbformat.NotebookNode") -> None:
    assert '%config InlineBackend.figure_format = "retina"' in code(notebook)[0].source
    for cell in code(notebook):
        for output in cell.outputs:
            assert "<Axes" not in str(output.get("data", {}).get("text/plain", "")), f"write _ = in the last line of: {cell.source}"


SOLUTION = re.compile(r"<details>\s*<summary>Solution</summary>\s*```python\n(?P<code>.*?)```.*?</details>", re.DOTALL)
Exercise = tuple["nbformat.NotebookNode", str]


def exercises(notebook: "nbformat.NotebookNode") -> Iterator[Exercise]:
    """The code cell of each exercise that asks for code, and its folded solution."""
    for cell, after in pairwise(notebook.cells):
        if cell.cell_type == "code" and after.cell_type == "markdown" and (solution := SOLUTION.search(after.source)):
            assert "<summary>Hint</summary>" in after.source, f"no hint: {cell.source}"
            yield cell, solution["code"]


def functions_of(source: str) -> list[str]:
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


def checks_of(source: str) -> list[ast.Call]:
    """The calls `check.name(…)` of a cell."""
    values = [node.value for node in ast.parse(source).body if isinstance(node, ast.Expr)]
    return [value for value in values if isinstance(value, ast.Call) and ast.unparse(value.func).startswith("check.")]


def imported_in(notebook: "nbformat.NotebookNode") -> dict[str, Any]:
    """What the imports of a notebook bind. An exercise has these names, and those of its own cell."""
    names: dict[str, Any] = {}
    for cell in code(notebook):
        for node in parsed(cell.source):
            if isinstance(node, ast.Import | ast.ImportFrom):
                with contextlib.suppress(ModuleNotFoundError):  # an extra that is not installed
                    exec(ast.unparse(node), names)
    return names


def printed(statements: str, names: dict[str, Any]) -> list[str]:
    with contextlib.redirect_stdout(out := io.StringIO()):
        exec(statements, names)
    return out.getvalue().splitlines()


def test_each_solution_is_right_a_wrong_answer_is_not_and_an_untouched_exercise_waits(
    notebook: "nbformat.NotebookNode", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    names, count = imported_in(notebook), 0
    for cell, solution in exercises(notebook):
        calls = checks_of(cell.source)
        assert calls, f"nothing checks {cell.source}"
        checked = "\n".join(map(ast.unparse, calls))
        tried = dict(names)
        assert all(line.startswith("Your turn") for line in printed(cell.source, tried)), cell.source
        solved = [line for line in printed(f"{solution}\n{checked}", dict(tried)) if not line.startswith("Right: ")]
        assert not solved, f"the solution is not right: {solved}\n{solution}"
        for call in calls:
            checker = eval(ast.unparse(call.func), names)
            for wrong in getattr(checker, "wrong", (lambda *_, **__: 1e9,)):
                said = printed(ast.unparse(call), tried | dict.fromkeys(functions_of(cell.source), wrong))
                assert said, cell.source
                assert all(line.startswith("Not yet: ") for line in said), (said, cell.source)
        count += 1
    short = len(code(notebook)) < 12  # the start page
    assert count >= (1 if short else 2), f"{count} exercises ask for code"


def test_an_answer_that_is_not_among_the_choices_is_refused_with_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    check = importlib.import_module("scripts.check")
    totals = {"precision": 3, "accumulation": 2}
    for guess, said in [("accumulate", "'accumulate' is not among the choices: 'precision', 'accumulation'."), ("precision", "Not yet: ")]:
        check.saves_most(guess, totals)
        assert capsys.readouterr().out.startswith(said)
    check.saves_most("accumulation", totals)
    assert capsys.readouterr().out.startswith("Right: ")


def test_a_function_that_returns_nothing_in_a_later_case_is_no_untouched_exercise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as one whose last branch lacks its return: it was told to begin."""
    monkeypatch.syspath_prepend(FOLDER)
    check = importlib.import_module("scripts.check")
    check.warmup(lambda dataset, batch, steps: 782 if batch == 8192 else None)
    assert capsys.readouterr().out.startswith("Not yet: with dataset=8000, batch=256, steps=125 yours gives None, and right is 12.")


@pytest.mark.parametrize(
    ("seconds", "said"), [([1.01, 1.0] * 3, "nothing"), ([0.9, 1.0] * 3, "10 %"), ([0.9, 1.0, 1.01, 1.0] * 3, "nothing")]
)
def test_a_loader_that_costs_less_than_the_noise_saves_nothing(seconds: list[float], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    timed = importlib.import_module("scripts.async_device")
    ends = iter([1.0] * len(timed.LOOPS) + seconds)
    monkeypatch.setattr(timed, "stopwatch", lambda *_, **__: (0.5, 0.5, next(ends)))
    assert timed.four_stopwatches()[2].rows[-1][1] == said


def test_the_edition_for_students_has_no_outputs_and_runs_from_its_own_folder(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs Jupyter's packages (pip install '.[notebooks,dev]')")
    student.write(tmp_path)
    assert [path.name for path in sorted(tmp_path.glob("*.ipynb"))] == [path.name for path in NOTEBOOKS]
    for path in NOTEBOOKS:
        ours, theirs = (nbformat.read(folder / path.name, as_version=4) for folder in (FOLDER, tmp_path))
        nbformat.validate(theirs)
        assert [cell.source for cell in theirs.cells] == [cell.source for cell in ours.cells]
        assert all(cell.execution_count is None and cell.outputs == [] for cell in code(theirs))
    for folder in ("scripts", "pictures"):
        assert {path.name for path in (tmp_path / folder).iterdir()} == {
            path.name for path in (FOLDER / folder).iterdir() if not path.name.startswith("_") or path.suffix == ".py"
        }
    student.write(tmp_path, solutions=False)
    for path in tmp_path.glob("*.ipynb"):
        text = path.read_text()
        assert "<summary>Solution" not in text
        assert text.count("<details>") == text.count("</details>")


def test_the_map_has_every_notebook_and_a_comparison_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.syspath_prepend(FOLDER)
    from scripts import course_map, reveal  # what the notebooks import

    drawn = [text.get_text() for text in course_map.draw().texts]
    for path in NOTEBOOKS[1:]:
        assert [text for text in drawn if text.startswith(f"{path.name[:2]}\n") and " min" in text], f"{path.name} is not on the map"
    ax = reveal.reveal(Interval(low=2.9, mid=3.0, high=3.2), 2.5, {"rule of thumb": 4})
    assert [bar.get_width() for bar in ax.patches] == [3.0, 2.5, 4]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["measured", "predicted here", "rule of thumb"]
    ax = reveal.reveal(3.0, 2.5, {"rule of thumb": 4}, beside={"measured: the other": 2})
    filled = [bar.get_facecolor()[3] > 0 and not bar.get_hatch() for bar in ax.patches]
    assert filled == [True, False, True, False], "what is measured is filled, what is said is hollow"
    lines = reveal.curve({1: 2.0}, {1: 1.5}, {"said": {1: 7}}, "x (s)", "y", beside={"measured: the other": {1: 2}}).get_lines()
    looks = {line.get_label(): (line.get_marker(), line.get_linestyle()) for line in lines}
    assert looks["measured: the other"] == ("s", "-")
    pyplot.close("all")
