"""The panel without a browser: what it reads, what it says, that its thread ends. (How it looks and feels: tests/browser.)"""

import json
import math
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ipywidgets", reason="panels need Jupyter's packages (pip install '.[notebooks]')")

from tests.conftest import HandMade
from workbench.core import run_directory, units
from workbench.core.run_directory import GRADIENTS, METRICS, RUN_JSON, USAGE, LineWriter, keep_rows, rank_file
from workbench.core.vocabulary import PHASES
from workbench.runs.health import health
from workbench.runs.loss_faults import faults_of, growing, growing_besides
from workbench.runs.page import dense_peak
from workbench.runs.panel import html as faces
from workbench.runs.panel.follow import KEPT, LOG_START, Follower, RankShare, Snapshot
from workbench.runs.panel.panel import LogView, RunPanel, run_panel
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec

ByHand = Callable[..., HandMade]


def until(holds: Callable[[], object], seconds: float = 20) -> None:
    """Wait until something holds."""
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


def followers(run: Run) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"follow {run.name}"]


@pytest.fixture
def failed(by_hand: ByHand) -> Run:
    made = by_hand().steps(10).steps(10, rank=1).log(0, "fine\n").log(1, "\x1b[31mred\x1b[0m\nhalf a line", "stderr")
    error = {"rank": 1, "kind": "exception", "message": "ValueError: <boom>", "traceback": "Traceback\n  <here>", "hint": "Look & see."}
    return Run.load(made.ended("failed", error=error).path)


# --- what it reads


moments = st.floats(0, 10, allow_nan=False)
steps = st.lists(st.tuples(st.lists(moments, min_size=6, max_size=6), st.none() | st.integers(1, 64)), max_size=70)


@settings(max_examples=40, deadline=None)
@given(steps=steps, cut=st.integers(0, 70))
def test_the_running_sums_equal_the_statistics_of_a_timeline(steps: list[tuple[list[float], int | None]], cut: int) -> None:
    rows = [{"step": i, **dict(zip(PHASES, phases, strict=True)), "samples": n} for i, (phases, n) in enumerate(steps)]
    with TemporaryDirectory() as folder:
        made = HandMade(Path(folder) / "run")
        follower, writer = Follower(Run.load(made.path)), LineWriter(made.path / rank_file(0))
        for part in (rows[:cut], rows[cut:]):
            writer.write(part)
            now = follower.snapshot()
        writer.close()
        made.ended("finished")
        timelines = Run.load(made.path).timelines
    if not rows:
        assert now.ranks == ()
        return
    (rank,), (timeline,) = now.ranks, timelines
    assert rank.steps - rank.left_out == timeline.count
    assert rank.phases == pytest.approx([timeline.mean(phase) for phase in PHASES], nan_ok=True, abs=1e-9)
    if sum(step.seconds for step in timeline.measured if step.samples is not None) > 1e-6:
        assert rank.samples_per_sec == pytest.approx(timeline.samples_per_sec, rel=1e-6)


def test_a_snapshot_says_what_the_run_says(by_hand: ByHand) -> None:
    run = Run.load(by_hand().alive().steps(10).steps(10, rank=1, memory=2**20).losses(8).path)
    now = Follower(run).snapshot()
    assert (now.state, now.done, now.steps) == ("running", 10, 20)
    assert now.samples_per_sec == pytest.approx(run.samples_per_sec)
    assert now.memory == 2**20
    assert now.losses[-1] == (8, 0.25)
    assert now.left == pytest.approx(10 * 0.065)


@pytest.mark.parametrize(
    "row",
    ['{"step": 3, "data_wait": "soon"}', '{"step": "x"}', '{"step": null}', '{"step": 3, "memory": "big"}', '{"step": 3, "h2d": null}'],
)
def test_a_row_that_is_no_step_is_left_out_and_said(by_hand: ByHand, row: str) -> None:
    made = by_hand().alive().steps(3)
    with (made.path / rank_file(0)).open("a") as file:
        file.write(row + "\n")
    follower = Follower(Run.load(made.path))
    for _ in range(2):
        now = follower.snapshot()
        assert now.ranks[0].steps == 3
        assert re.match(r"rank0.jsonl: 1 damaged row is left out: .*, expected a number from 0", now.notes[0])


@pytest.mark.parametrize("row", ['{"step": "x"}', '{"loss": 1}', '{"step": 1, "loss": "low"}', '{"step": 1, "steps": []}'])
def test_a_row_that_is_no_metric_is_left_out_and_said(by_hand: ByHand, row: str) -> None:
    made = by_hand().alive().steps(3).losses(2)
    with (made.path / METRICS).open("a") as file:
        file.write(row + "\n")
    follower = Follower(Run.load(made.path))
    for _ in range(2):
        now = follower.snapshot()
        assert len(now.losses) == 2
        assert re.match(r"metrics.jsonl: 1 damaged row is left out: .* (no|not an?) .*number", now.notes[0])


def test_a_loss_that_grows_is_named_as_health_names_it(by_hand: ByHand) -> None:
    """The panel had no word on it while the run went on."""
    made = by_hand().alive().steps(3)
    losses = [(step, 0.1 * 1.06**step * (1.01 if step % 2 else 1.0)) for step in range(1, 61)]
    with (made.path / METRICS).open("a") as file:
        file.writelines(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in losses)
    (fault,) = (str(fault) for fault in health(made.path).faults if "the loss" in fault.message)
    assert fault in Follower(Run.load(made.path)).snapshot().notes
    assert [str(fault) for fault in growing_besides(losses, faults_of(losses))] == [fault]
    assert growing_besides(losses, growing(losses)) == []


def test_a_file_that_begins_anew_is_not_damaged_any_more(by_hand: ByHand) -> None:
    made = by_hand().alive().steps(3).losses(2)
    follower = Follower(Run.load(made.path))
    for name, row in ((METRICS, '{"step": 9, "loss": "low"}'), (rank_file(0), '{"step": 9, "data_wait": "soon"}')):
        with (made.path / name).open("a") as file:
            file.write(row + "\n")
        assert follower.snapshot().notes[0].startswith(f"{name}: 1 damaged row is left out")
        keep_rows(made.path / name, lambda row: row.get("step") != 9)
        now = follower.snapshot()
        assert (now.ranks[0].steps, len(now.losses), now.notes) == (3, 2, ())


def test_what_cannot_be_told_is_missing() -> None:
    now = Snapshot(state="running", done=0, steps=None, seconds=1.0)
    assert math.isnan(now.samples_per_sec)
    assert (now.memory, now.left, faces.figures(now), faces.phases(now)) == (None, None, "", "")


def test_logs_are_read_once_without_colours_and_a_late_panel_starts_near_the_end(by_hand: ByHand) -> None:
    made = by_hand().alive().log(0, "one\n").log(1, "\x1b[1;31mred\x1b[0m\nhal", "stderr")
    follower = Follower(Run.load(made.path))
    assert follower.log_lines() == [(0, "one"), (1, "red")]
    assert follower.log_lines() == []
    assert follower.log_lines(last=True) == [(1, "hal")]
    made.log(0, "x" * 99 + "\n" + "y" * 99 + "\n" * (2 * LOG_START))
    assert all(not line for rank, line in Follower(Run.load(made.path)).log_lines() if rank == 0)


# --- what it says


def test_the_essentials_are_the_knobs_that_were_turned() -> None:
    spec = RunSpec(task="text-gpt", nproc_per_node=2, num_workers=4, steps=10)
    assert faces.essentials(spec) == "text-gpt · 2 ranks · num_workers=4"
    script = ScriptSpec(script="/home/somebody/train.py", args=("--lr", "0.1"), watch=True)
    assert faces.essentials(script) == "train.py --lr 0.1 · 1 rank · watched"


def test_steps_time_and_what_is_left_are_said() -> None:
    share = RankShare(rank=0, phases=(0.5, 0, 0.25, 0.25, 0, 0), steps=10, left_out=2, samples_per_sec=8.0, memory=None)
    now = Snapshot(state="running", done=10, steps=100, seconds=20.0, ranks=(share,))
    assert faces.words(now) == "10 of 100 steps · 20.0 s · about 1 min 30 s left"
    assert (
        faces.words(Snapshot(state="running", done=0, steps=None, seconds=2.0)) == "2.00 s · starting: Python, torch, the model, the data"
    )
    assert faces.words(Snapshot(state="lost", done=1, steps=None, seconds=math.nan)) == "1 step"


def test_a_bar_shows_each_phase_in_its_colour_and_in_words() -> None:
    share = RankShare(rank=3, phases=(0.5, 0, 0.25, 0.25, 0, 0), steps=10, left_out=2, samples_per_sec=8.0, memory=None)
    html = faces.phases(Snapshot(state="running", done=10, steps=100, seconds=20.0, ranks=(share,)))
    assert 'title="data_wait: 500 ms (50 %)" style="width:50.00%;background-color:#da5300' in html
    assert 'aria-label="rank 3: data_wait 50 %, h2d 0 %' in html
    assert all(f"</span>{phase}</span>" in html for phase in PHASES)
    assert "mean of 8 steps, the first 2 left out as warm-up" in html


def test_the_curve_leaves_out_what_is_not_finite_and_keeps_the_last_point() -> None:
    assert faces.curve([(1, 2.0), (2, math.nan)]) == ""
    html = faces.curve([(step, 1 / step) for step in range(1, 1000)] + [(1000, math.inf)])
    assert 'aria-label="loss from 1 at step 1 to 0.001001 at step 999"' in html
    assert html.count(",") <= 122


def test_the_static_face_of_a_finished_run_can_be_read_without_a_kernel(by_hand: ByHand) -> None:
    run = Run.load(by_hand(name="<script>").steps(20).steps(20, rank=1).losses(20).ended("finished").path)
    bundle = RunPanel(run)._repr_mimebundle_()
    html = bundle["text/html"]
    assert bundle["text/plain"] == "Run('<script>', nproc_per_node=2)"
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "finished" in html
    assert "20 of 20 steps · 246 samples/s · loss 2 → 0.1" in html
    assert "<td" in html
    assert "&lt;script&gt;" in html
    assert not any(word in html for word in ("<script", "<svg", "<style", " id=", run.id, str(run.path)))


def test_the_static_face_of_a_live_run_says_how_to_see_it(by_hand: ByHand) -> None:
    made = by_hand().alive()
    html = RunPanel(Run.load(made.path))._repr_mimebundle_()["text/html"]
    made.ended("finished")
    assert "clipart-resnet · 2 ranks" in html
    assert "running: run this cell to see it live" in html


def test_a_run_shows_itself_by_its_one_panel(by_hand: ByHand) -> None:
    run = Run.load(by_hand().ended("finished").path)
    assert run._repr_mimebundle_()["text/plain"] == repr(run)
    assert run_panel(run) is run_panel(Run.load(run.path))
    assert repr(run_panel(run)) == "RunPanel(Run('by-hand', nproc_per_node=2))"
    assert repr(RunPanel(str(run.path))) == repr(run_panel(run))
    with pytest.raises(ValueError, match=r"^run=test_\w+: expected a Run, or the path of its directory"):
        RunPanel(test_a_run_shows_itself_by_its_one_panel)  # type: ignore[arg-type]


def written(made: HandMade, file: str, rows: list[dict[str, object]]) -> None:
    writer = LineWriter(made.path / file)
    writer.write(rows)
    writer.close()


def test_what_the_machine_did_is_shown_with_its_curve(by_hand: ByHand) -> None:
    made = by_hand().alive().steps(3)
    follower = Follower(Run.load(made.path))
    assert follower.snapshot().usage == {}
    written(made, USAGE, [{"step": 1, "cpu": 0.25, "network_in": 1024, "network_out": 2048, "watts": 80, "memory": 2**30, "gpu": "x"}])
    assert follower.snapshot().usage["cpu"] == ((1, 0.25),)
    written(made, USAGE, [{"step": 3, "cpu": 0.75, "network_in": 0, "network_out": 4096, "memory": 2**30}, {"step": "x", "cpu": 1}])
    now = follower.snapshot()
    html = faces.figures(now)
    assert now.usage["cpu"] == ((1, 0.25), (3, 0.75))
    assert '<span class="wb-label">cores</span><span class="wb-value">75 %</span>' in html
    assert 'aria-label="cores from 25 % at step 1 to 75 % at step 3"' in html
    assert '<span class="wb-value">0 B/s in, 4.00 KiB/s out</span>' in html
    assert 'aria-label="network from 3.00 KiB/s at step 1 to 4.00 KiB/s at step 3"' in html
    assert '<span class="wb-label">power</span><span class="wb-value">80 W</span></div>' in html  # one value makes no curve
    assert not any(f">{word}</span>" in html for word in ("GPUs", "disks"))
    written(made, USAGE, [{"step": 4, "cpu": 0.5}] * (KEPT + 9))
    assert len(follower.snapshot().usage["cpu"]) == KEPT


def test_the_mfu_is_shown_where_flops_and_peak_are_known(by_hand: ByHand) -> None:
    made = by_hand().alive().steps(3)
    run = Run.load(made.path)
    follower = Follower(run, 1e9)
    assert follower.snapshot().mfu is None
    run_directory.write_json(made.path / run_directory.ENVIRONMENT, {"environment": {"device": "NVIDIA H100 80GB HBM3"}})
    now = follower.snapshot()
    peak, _ = dense_peak(run)
    assert peak
    assert now.mfu == pytest.approx(now.samples_per_sec * 1e9 / peak)
    assert f'<span class="wb-label">MFU</span><span class="wb-value">{units.percent(now.mfu)}</span>' in faces.figures(now)
    assert Follower(run, 1e30).snapshot().mfu is None  # above 100 %
    assert Follower(run).snapshot().mfu is None
    assert RunPanel(run, flops_per_sample=1e9).now.mfu == now.mfu


def test_norms_of_gradients_are_shown_beside_those_before(by_hand: ByHand) -> None:
    made = by_hand().alive().steps(3)
    panel = RunPanel(Run.load(made.path))
    assert panel.gradients.value == ""
    rows = [{"step": step, "norms": {"first": 0.01, "<last>": norm}} for step, norm in ((10, 1.0), (20, 3.0), (30, 8.0))]
    written(made, GRADIENTS, rows)
    html = panel.refresh() and panel.gradients.value
    assert "step 30; logarithmic, from 1e-2 to 1e1" in html
    assert 'aria-label="&lt;last&gt;: 8 (4.00×)"' in html
    assert 'title="first: 0.01 (1.00×)" style="width:0.00%' in html
    assert "<last>" not in html
    written(made, GRADIENTS, [{"step": 40, "norms": {"first": math.inf, "<last>": 0.0}}])
    html = panel.refresh() and panel.gradients.value
    assert 'aria-label="first: not finite"' in html
    assert 'title="first: not finite" style="width:100.00%' in html
    many = {f"layer{number}": 10.0**number for number in range(-9, 12)}
    written(made, GRADIENTS, [{"step": 50, "norms": many}])
    html = panel.refresh() and panel.gradients.value
    made.ended("finished")
    assert "16 of 23 layers: the largest and the smallest" in html
    assert all(f"{layer}: " in html for layer in ("layer-9", "layer11", "first"))
    assert "layer1: " not in html


# --- how it lives


def test_it_follows_a_run_until_its_end(by_hand: ByHand) -> None:
    made = by_hand(name="followed").alive()
    panel = RunPanel(Run.load(made.path))
    assert "starting" in panel.words.value
    assert panel.stop.layout.display is None
    made.steps(10).steps(10, rank=1).losses(10).log(1, "hello\n")
    until(lambda: "10 of 20 steps" in panel.words.value)
    assert 'aria-valuenow="50"' in panel.status.value
    assert "samples/s" in panel.figures.value
    assert 'role="img" aria-label="rank 1' in panel.phases.value
    until(lambda: panel.log.text == "[1] hello")
    made.ended("finished")
    until(lambda: not followers(panel.run))
    assert "✔</span> finished" in panel.status.value
    assert panel.stop.layout.display == "none"
    assert panel.log.news == "followed finished. "


def test_a_panel_of_an_ended_run_starts_no_thread(by_hand: ByHand) -> None:
    panel = RunPanel(Run.load(by_hand(name="ended").ended("stopped").path))
    assert not followers(panel.run)


def test_a_failure_is_shown_with_its_rank_traceback_and_hint(failed: Run) -> None:
    panel = RunPanel(failed)
    html = panel.problem.value
    assert "<strong>rank 1 failed first: </strong>ValueError: &lt;boom&gt;" in html
    assert "Look &amp; see." in html
    assert "Traceback\n  &lt;here&gt;" in html
    assert panel.log.failed == 1
    assert panel.log.text == "[0] fine\n[1] red\n[1] half a line"
    static = panel._repr_mimebundle_()["text/html"]
    assert "rank 1 failed first" in static
    assert "Traceback" not in static  # it names files of this machine, and the face is kept in the notebook


def test_stop_returns_at_once_and_ends_the_run_elsewhere(by_hand: ByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    made = by_hand().alive()
    panel = RunPanel(Run.load(made.path))
    called, let_go = threading.Event(), threading.Event()

    def slow_stop() -> None:
        called.set()
        let_go.wait(20)
        raise TimeoutError("something still lives")

    monkeypatch.setattr(panel.run, "stop", slow_stop)
    panel.stop.click()
    assert panel.stop.disabled
    assert panel.stop.description == "Stopping"
    assert called.wait(20)
    let_go.set()
    until(lambda: not panel.stop.disabled)
    until(lambda: "something still lives" in panel.problem.value)
    made.ended("stopped")
    until(lambda: "■</span> stopped" in panel.status.value)


def test_a_directory_that_goes_away_ends_the_thread_with_a_word(by_hand: ByHand) -> None:
    made = by_hand(name="vanished").alive()
    panel = RunPanel(Run.load(made.path))
    shutil.rmtree(made.path)
    until(lambda: not followers(panel.run))
    assert "run.json is missing" in panel.problem.value
    assert "was deleted or moved" in panel.problem.value


def test_a_panel_whose_thread_has_ended_while_the_run_goes_on_is_replaced(by_hand: ByHand) -> None:
    made = by_hand(name="mended").alive()
    run = Run.load(made.path)
    before = run_panel(run)
    assert run_panel(run) is before
    shutil.move(made.path / RUN_JSON, made.path / "elsewhere")
    until(lambda: not followers(run))
    shutil.move(made.path / "elsewhere", made.path / RUN_JSON)
    assert before.now.state == "running"
    after = run_panel(run)
    assert after is not before
    assert run_panel(run) is after
    made.ended("finished")
    until(lambda: not followers(run))
    assert run_panel(run) is after


def test_log_windows_overlap_and_stay_small() -> None:
    log = LogView([0, 1])
    log.append([(0, "a"), (1, "b")])
    assert log.window == {"at": 0, "lines": [[0, "a"], [1, "b"]]}
    for i in range(1000):
        log.append([(0, str(i))])
    assert log.window["at"] + len(log.window["lines"]) == 1002
    assert len(log.window["lines"]) == 61
    log.append([], all_kept=True)
    assert len(log.window["lines"]) == 600
    before = log.window
    log.append([])
    assert log.window is before


def test_a_flood_of_lines_is_cut() -> None:
    log = LogView([0])
    log.append((0, str(i)) for i in range(10_000))
    assert log.window["at"] == 9_400
    assert log.window["lines"][-1] == [0, "9999"]


def test_panels_need_no_matplotlib() -> None:
    code = "import sys, workbench.widgets; print('matplotlib' in sys.modules, 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "False"]
