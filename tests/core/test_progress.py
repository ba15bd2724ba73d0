"""The line that follows a run in a terminal."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.core import progress
from workbench.core.progress import ProgressLine, Waiting, predicts
from workbench.runs.run import Run

CLEAR = "\r\x1b[2K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))  # pytest replaces that of the real one
    return stream


def test_it_is_written_over_itself_and_not_too_often(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], iter(["one", "two"])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    line = ProgressLine(lambda: next(said))
    line.show()
    line.show()
    now[0] += progress.PAUSE
    line.show()
    line.close("the end")
    assert terminal.getvalue() == f"{CLEAR}one{CLEAR}two{CLEAR}the end\n"


def test_nothing_is_left_by_a_line_that_was_never_shown(terminal: Terminal) -> None:
    ProgressLine(lambda: "one").close("the end")
    assert terminal.getvalue() == ""


def test_nothing_is_asked_or_written_where_the_output_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
        line = ProgressLine(lambda: pytest.fail("nobody reads it"))
        line.show()
        line.close("the end")
        assert stream is None or stream.getvalue() == ""


def test_a_long_call_says_at_once_in_a_log_what_it_will_do_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (progress.ENV, "RANK"):
        monkeypatch.delenv(variable, raising=False)
    stream = io.StringIO()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream, modules={}))
    with progress.Waiting("diagnose", 60, begin="steps as they are"), progress.Waiting("inside", None) as line:
        line.tick()
    assert stream.getvalue() == "diagnose: steps as they are … 0 s of at most 60 s\n"


def test_what_begins_is_said_at_once_in_a_log_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(progress.ENV, raising=False)
    progress.begins("watching a run of train.py")
    monkeypatch.setenv(progress.ENV, "off")
    progress.begins("nothing")
    assert capsys.readouterr().err == "workbench: watching a run of train.py\n"


def test_in_a_log_there_is_a_line_each_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], iter(["one", "two", "three", "four"])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for variable in (progress.ENV, "RANK"):
        monkeypatch.delenv(variable, raising=False)

    def lines(modules: dict[str, Any] | None = None) -> str:
        stream = io.StringIO()
        monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream, modules=modules or {}))
        line = ProgressLine(lambda: next(said))
        for _ in range(70):
            line.show()
            now[0] += 1
        line.close("the end")
        return stream.getvalue()

    assert lines() == "one\ntwo\n"
    assert lines({"IPython": SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))}) == ""  # a notebook
    for variable, value in ((progress.ENV, "off"), ("RANK", "0")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert lines() == ""
    monkeypatch.setenv(progress.ENV, "some other word")
    assert lines() == "three\nfour\n"


def test_what_an_interrupted_run_leaves(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    assert progress.left_by(run) == f"what it measured: workbench report '{run}'\nto delete it: rm -r '{run}'"
    (run / "checkpoints").mkdir()
    for part in ("step00000010.rank1.pt", "step00000010.pt.tmp"):  # the file that names the parts was not written yet
        (run / "checkpoints" / part).touch()
    assert "wb.launch" not in progress.left_by(run)
    (run / "checkpoints" / "step00000010.pt").touch()
    assert f'to go on with it: wb.launch(resume="{run}")' in progress.left_by(run)
    why = KeyboardInterrupt()
    why.add_note("to delete it: rm -r x")
    with pytest.raises(KeyboardInterrupt, match=r"^diagnose was stopped by Ctrl-C before it knew anything.*\nto delete it: rm -r x$"):
        _interrupted(why)


@progress.say_what_was_interrupted("diagnose")
def _interrupted(why: KeyboardInterrupt) -> None:
    raise why


def test_words_of_a_run_without_an_end_or_a_report() -> None:
    assert progress.progress_text("script", 7, None, 3.0, []) == "script 7 steps · 3.00 s"
    assert progress.progress_text("script", 0, None, 3.0, []) == "script starting, no step yet · 3.00 s"
    assert progress.progress_text("gpt", 0, 20, 3.0, [], 60) == f"gpt {'░' * 20} 0/20 starting, no step yet · 3.00 s of at most 60 s"
    row = {"step": 1, "loss": 2.5, "samples": 80, "seconds": 0.0}
    assert progress.progress_text("gpt", 1, 20, 3.0, [row]).endswith("1/20 · loss 2.500 · 3.00 s")
    rows = [{"step": step, "seconds": 9.0 * min(step, 20) + 2.0 * max(step - 20, 0)} for step in range(1, 31)]  # since the first step
    rows.insert(-2, {"step": 28, "accuracy": 0.5})  # an evaluation has its own
    assert progress.progress_text("gpt", 30, 60, 90.0, rows).endswith("30/60 · 1 min 30 s, about 60 s to go")  # by the last ten steps
    assert progress.progress_text("gpt", 30, 60, 90.0, rows[-1:]).endswith("· 1 min 30 s"), "one moment tells no pace"


def test_a_wait_shows_it(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, by_hand: Callable[..., Any]) -> None:
    made = by_hand(name="mine").alive().steps(8).losses(8)
    run, pause = Run.load(made.path), time.sleep
    looks = iter([lambda: None, lambda: made.ended("finished")])
    monkeypatch.setattr(time, "sleep", lambda seconds: (pause(seconds), next(looks, lambda: None)()))
    run.wait(timeout=20)
    assert f"{CLEAR}mine ████████░░░░░░░░░░░░ 8/20" in terminal.getvalue()
    assert terminal.getvalue().endswith(f"{CLEAR}{run}\n")


def test_in_a_notebook_the_line_stands_below_its_cell_and_leaves_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[tuple[dict[str, str], bool]]()

    def publish(data: dict[str, str], *, transient: dict[str, str], update: bool) -> None:
        sent.append((data, update))

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.delenv("CI", raising=False)
    shell = SimpleNamespace(kernel=object(), display_pub=SimpleNamespace(publish=publish))
    modules = {"IPython": SimpleNamespace(get_ipython=lambda: shell)}
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stdout=io.StringIO(), stderr=io.StringIO(), modules=modules))
    with Waiting("diagnose", 60) as line:
        now[0] += 8
        line.say("no optimizer step", "no loader: 61 % less so far")
    assert [update for _, update in sent] == [False, True, True]
    assert sent[0][0] == {"text/plain": "diagnose: starting … 0 s of at most 60 s"}
    known = "no loader: 61 % less so far"
    assert sent[1][0] == {"text/plain": f"diagnose: {known}; now: no optimizer step … 8 s of at most 60 s"}
    assert sent[2][0] == {}  # nothing stays but an empty output, where nobody knows what else the cell shows
    assert line.words(61).endswith("… 61 s, its 60 s are over: it ends as soon as it can")
    sent.clear()
    monkeypatch.setenv("CI", "true")  # nbval compares outputs, and takes no updates of them
    with Waiting("diagnose", 60) as line:
        now[0] += 8
        line.say("no optimizer step")
    assert sent == []


def test_a_line_takes_all_outputs_of_its_cell_away_where_they_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    session, sent = SimpleNamespace(message_count=40), list[str]()

    def send(what: str) -> None:
        session.message_count += 1
        sent.append(what)

    monkeypatch.delenv("CI", raising=False)
    publisher = SimpleNamespace(publish=lambda data, update, **_: send("update" if update else "new"), clear_output=lambda: send("clear"))
    shell = SimpleNamespace(kernel=SimpleNamespace(session=session), display_pub=publisher)
    modules = {"IPython": SimpleNamespace(get_ipython=lambda: shell)}
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stdout=io.StringIO(), stderr=io.StringIO(), modules=modules))
    for others, expected in (((), ["new", "new", "clear"]), (("print",), ["print", "new", "new", "update", "update"])):
        progress._CellOutput.cell_begins()
        sent.clear()
        for other in others:
            send(other)
        with Waiting("diagnose", 60), Waiting("estimate", 60):
            pass
        assert sent == expected, "an inner line has taken the outer one away, too"
    progress._CellOutput.cell_begins()


@pytest.mark.slow
def test_a_notebook_that_was_executed_has_no_output_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a real kernel. What the cell shows itself stays; beside it, an empty output is left, since Jupyter removes all or nothing."""
    nbclient = pytest.importorskip("nbclient", reason="needs Jupyter's packages (pip install '.[notebooks]')")
    formats = pytest.importorskip("nbformat").v4
    monkeypatch.delenv("CI", raising=False)
    imports = "import workbench\nfrom workbench.core.progress import Waiting"
    line, inner = "with Waiting('diagnose', 60) as line:\n    line.say('no loader')", "with Waiting('estimate', 5):\n        pass"
    cells = [imports, line, f"{line}\n    {inner}\n    line._line._next = 0\n    line.tick()\n'result'", f"print('mine')\n{line}"]
    notebook = formats.new_notebook(cells=[formats.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120).execute()
    shown = [[output.get("text") or output["data"] for output in cell.outputs] for cell in notebook.cells]
    assert shown == [[], [], [{"text/plain": "'result'"}], ["mine\n", {}]]


@pytest.mark.parametrize("module", [None, SimpleNamespace(), SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))])
def test_what_is_no_ipython_shows_nothing(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """A script may have put None or a stub there, to keep a package from taking it for a notebook."""
    stream = io.StringIO()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream, modules={"IPython": module}))
    with Waiting("diagnose", None) as line:
        line.say("no loader")
    assert stream.getvalue() == ""


def test_in_a_log_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream, modules={}))
    with Waiting("diagnose", None) as line:
        line.say("no loader")
    assert stream.getvalue() == ""


def test_a_prediction_says_after_some_seconds_that_it_goes_on_unless_another_call_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stream = [100.0], io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream, modules={}))

    @predicts("dry runs")
    def estimate(seconds: int) -> int:
        for _ in range(seconds):
            now[0] += 1
            progress.tick("dry run 2 of 6")
        return seconds

    assert estimate(2) == 2
    assert stream.getvalue() == "", "nobody needs to be told"
    assert estimate(4) == 4
    lines = [line.strip() for line in stream.getvalue().replace("\r\x1b[2K", "\n").splitlines() if line]
    assert lines == ["estimate: dry run 2 of 6 … 3 s", "estimate: dry run 2 of 6 … 4 s", "estimate: 4 s"]
    with Waiting("batch_plan", 60) as line:
        line.say("sizes")
        estimate(4)
    assert "estimate" not in stream.getvalue().partition("batch_plan")[2]
    assert "batch_plan: dry run 2 of 6 … 4 s of at most 60 s" in stream.getvalue()
    progress.tick()  # nothing is under way
