"""Verdicts on loops of a device that works behind the host's back, on an emulated GPU; the truth is the time from sync to sync."""

import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.diagnosis import emulated_loops
from tests.diagnosis.emulated_judge import Answer
from tests.diagnosis.emulated_loops import CASES, HEALTHY, PLANTED, Case, Samples, spin
from tests.emulated_device import EmulatedDevice
from tests.forked import Forks
from workbench.diagnosis.analysis.verdict import VERDICTS
from workbench.diagnosis.measure import inside

AT_ONCE = 3
BUDGET = 6.0
RARE = {"allocator retries now and then": 12.0}
"""Seconds of a diagnosis; of one whose trouble is rare."""
REAL_TIME = tuple(name for name, case in CASES.items() if case.workers)
"""Loops that wait for processes of their own go by real time: nothing may run beside them that computes."""
PROVED = "two ranks, one computes longer"
QUICK = ("item at each 10th step",)
ALIKE = ("item at each 50th step", "item at each 100th step")
"""Between that and the deep queue. `benchmarks/emulated_gallery.py` judges all."""


JUDGE = "from tests.diagnosis.emulated_judge import main\nmain()"


def judged(forks: Forks, name: str, folder: Path, budget_s: float, proofs: int = 0) -> Answer:
    """What `emulated_judge` finds in a process of its own, which has not imported the library."""
    folder.mkdir(exist_ok=True)
    out = folder / "answer.json"
    done = forks.run(folder, "-c", JUDGE, name, out, "--budget", str(budget_s), "--proofs", str(proofs))
    assert done.returncode == 0, done.stderr[-4000:]
    return Answer.read(out)


def test_the_gallery_is_well_formed() -> None:
    assert len(CASES) == len(HEALTHY) + len(PLANTED)
    assert all(case.healthy for case in HEALTHY)
    assert not any(case.healthy or case.cleaned() == case for case in PLANTED)
    assert all(set(case.answers) <= set(VERDICTS) for case in CASES.values())
    assert set(REAL_TIME) == {"hidden workers", "one worker too few"}, "each is judged by name below"


def test_a_worker_that_wakes_late_gives_its_samples_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the last. Who had nothing to do for a while begins when it is asked. Without workers the loop itself wakes late."""
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + 0.003

    monkeypatch.setattr(emulated_loops, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    for workers, took in ((1, 0.043), (0, 0.04 + 8 * 0.003)):
        samples = Samples(Case(name="", loading=0.04, samples=8, workers=workers))
        for _ in range(2):
            begun = now
            for index in range(8):
                samples[index]
            assert now - begun == pytest.approx(took)
            now += 1.0


@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "budget"), [*((name, BUDGET) for name in QUICK), pytest.param("hidden workers", 10.0, marks=pytest.mark.slow)]
)
def test_the_verdict_goes_by_the_clock_of_the_device(name: str, budget: float, tmp_path: Path, forks: Forks) -> None:
    answer = judged(forks, name, tmp_path, budget)
    assert answer.right, answer.text
    assert answer.timed


@pytest.mark.alone
@pytest.mark.slow
def test_real_time_and_two_ranks_that_prove_what_the_wall_clock_shows(tmp_path: Path, forks: Forks) -> None:
    """At once: they mostly sleep, and leave most of two cores idle. Of the ranks one computes longer, and sets the time of all."""
    with ThreadPoolExecutor(2) as pool:
        two_ranks = pool.submit(judged, forks, PROVED, tmp_path / "proved", 16.0, 1)
        answer = judged(forks, "one worker too few", tmp_path / "real", 10.0)
        proved = two_ranks.result()
    assert (answer.right, proved.right) == (True, True), (answer.text, proved.text)
    assert answer.timed, (answer.step, answer.true)
    (change,) = proved.changes
    assert change.wall > 1.3
    assert change.proved == pytest.approx(change.wall, rel=0.1)
    assert abs(change.error) < 0.25
    assert change.inside


@pytest.mark.slow
@pytest.mark.parametrize("half", range(2))
def test_the_gallery_on_an_emulated_gpu(half: int, tmp_path: Path, forks: Forks) -> None:
    """Several at once, and beside other tests: each mostly sleeps, and its clock stands still while it waits for a core."""
    names = [name for name in CASES if name not in (*REAL_TIME, PROVED, *QUICK, *ALIKE)][half::2]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = [*pool.map(lambda name: judged(forks, name, tmp_path / name.replace(" ", "-"), RARE.get(name, BUDGET)), names)]
    wrong = {answer.case: answer.text for answer in answers if not answer.right}
    assert not wrong.keys() & {case.name for case in HEALTHY}, wrong
    assert len(wrong) <= 1, wrong
    errors = {answer.case: answer.error for answer in answers if not answer.timed}
    assert len(errors) <= 1, errors
    assert statistics.median(abs(answer.error) for answer in answers) < 0.03


@pytest.mark.alone
def test_a_thread_that_sleeps_until_the_device_is_done_does_not_sleep_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA polls, unless it is told not to. Each step waits, so that nothing is left to wait for at the end, where that is measured."""
    device = EmulatedDevice().install(monkeypatch)

    def step() -> None:
        spin(0.01)
        device.compute(0.02)
        device.item()

    seen, why = inside.look(step, traced=5, plain=20, synchronize=torch.cuda.synchronize)
    assert why is None
    assert seen.waits == pytest.approx(0.02, rel=0.2)
    assert seen.blocked < 0.003
