"""The WhyNotLinear panel without a browser: what its knobs predict, what its buttons run, what it says. (How it looks: tests/browser.)"""

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("ipywidgets", reason="panels need Jupyter's packages (pip install '.[notebooks]')")

from tests.planted_gap import planted
from workbench.core.statistics import Interval
from workbench.diagnosis import why_not_linear as measuring
from workbench.diagnosis.analysis.proof import Proof
from workbench.diagnosis.analysis.why_not_linear import WhyNotLinear as Answer
from workbench.diagnosis.panel import linear
from workbench.diagnosis.panel.linear import WhyNotLinear
from workbench.runs.spec import RunSpec, ScriptSpec

SPEC = RunSpec(task="text-gpt", nproc_per_node=2, device="cpu")


def answer(ranks: int = 2, spec: Any = SPEC, **more: Any) -> Answer:
    parts = {"slow": 0.004, "reduction": 0.006, "buckets": 12, "start": 0.05} | more
    return Answer(evidence=planted(ranks=ranks, **parts), spec=spec)


def until(holds: Callable[[], object]) -> None:
    """Wait until something holds."""
    limit = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.01)


def quiet(panel: WhyNotLinear) -> bool:
    return not panel._background.busy and not any(thread.name.startswith("doctor") for thread in threading.enumerate())


def ends(panel: WhyNotLinear) -> list[tuple[str, float, float]]:
    """Of each row: its name, and where its bar begins and ends, in percent."""
    found = []
    for child in panel.waterfall.children:
        html = child.children[1].value
        before, *bar = map(float, re.findall(r'"width:([\d.]+)%', html)[:2])
        found.append((html.split('aria-label="')[1].split(":")[0], before, before + sum(bar)))
    return found


def test_bars_follow_each_other_from_n_times_one_down_to_what_n_give() -> None:
    panel = WhyNotLinear(answer())
    rows = ends(panel)
    assert [rows[0][0], rows[-1][0]] == ["2 × one", "2 ranks"]
    level = rows[0][2]
    for _, begin, end in rows[1:-1]:
        assert min(abs(end - level), abs(begin - level)) < 0.7, "parts too small for a row are left out"
        level = begin if abs(end - level) < abs(begin - level) else end
    assert level == pytest.approx(rows[-1][2], abs=0.7)


def test_a_mended_part_is_gone_from_the_bars_and_the_throughput_is_predicted() -> None:
    panel = WhyNotLinear(answer())
    assert panel.result is not None
    gap = panel.result.gap
    rows = panel.waterfall.children
    panel.mend["slow rank"].value = True
    gain = gap.gain(["slow rank"])
    assert f"{gain.mid:.2f}× ({gain.low:.2f}× … {gain.high:.2f}×)" in panel.tiles.value
    assert "fixed (was" in panel._lines["slow rank"].children[1].value
    assert "fixed: predicted" in panel._last.value
    assert panel.waterfall.children == rows, "what has the focus keeps it"
    panel.mend["slow rank"].value = False
    assert "fixed" not in panel.tiles.value + panel._last.value


def test_more_ranks_and_another_link_are_predicted_and_start_nothing() -> None:
    panel = WhyNotLinear(answer())
    assert panel.answer is panel.result
    assert "2 ranks, measured" in panel.tiles.value
    assert [size for _, size in panel.ranks.options] == [2**power for power in range(1, 11)]
    panel.ranks.value = 64
    assert panel.answer is not None
    few = panel.answer.efficiency
    assert panel.answer.gap.predicted
    assert panel.measure.disabled
    assert "they are only predicted" in panel.measure.tooltip
    panel.bandwidth.value = 1e7
    assert panel.answer.efficiency < few
    assert panel.answer.cause == "large gradients"
    panel.bandwidth.value, panel.same.value = 0.0, "global_batch"
    assert panel.answer.gap.same == "global_batch"
    panel.price.value = 3.6
    assert "a million samples cost" in panel.tiles.value


def test_one_process_is_predicted_for_more_and_has_no_link_to_measure_by() -> None:
    panel = WhyNotLinear(Answer(evidence=planted(ranks=1, cores=64.0), spec=SPEC.replace(nproc_per_node=1), ranks=8))
    assert panel.ranks.value == 8
    assert panel.bandwidth.disabled
    panel.ranks.value = 4
    assert panel.answer is not None
    assert panel.answer.world_size == 4


def test_measure_launches_the_picked_ranks_and_holds_the_prediction_against_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, dict[str, Any]]] = []

    def measured(target: Any, **options: Any) -> Answer:
        asked.append((target, options))
        return answer(4, target if isinstance(target, RunSpec) else None)

    monkeypatch.setattr(measuring, "why_not_linear", measured)
    monkeypatch.setattr(linear, "usable_cores", lambda: 4.0)
    panel = WhyNotLinear(SPEC, budget_s=9)
    assert "press Measure" in panel._note.value
    assert [size for _, size in panel.ranks.options] == [2, 3, 4]
    panel._take(answer())
    panel.ranks.value = 4
    panel.measure.click()
    until(lambda: quiet(panel))
    assert asked == [(SPEC.replace(nproc_per_node=4), {"same": "micro_batch", "budget_s": 9, "runs_dir": None})]
    assert panel.spec == SPEC.replace(nproc_per_node=4)
    assert "4 ranks, measured" in panel.tiles.value
    assert re.search("predicted before.*too (high|low)", panel.tiles.value)
    spec = ScriptSpec(script="train.py", args=("--x",), nproc_per_node=2, threads=3)
    script = WhyNotLinear(spec)
    script.measure.click()
    until(lambda: quiet(script))
    assert asked[1] == (spec, {"same": "micro_batch", "budget_s": 60.0, "runs_dir": None})
    assert script.problem.value == ""


def test_prove_runs_a_remedy_and_shows_what_it_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    result = answer()

    def prove(self: Answer, remedy: Any, *, budget_s: float) -> Proof:
        self.proofs.append(Proof(remedy=remedy, measured=Interval(low=1.1, mid=1.234, high=1.3), baseline=100.0))
        return self.proofs[-1]

    monkeypatch.setattr(Answer, "prove", prove)
    panel = WhyNotLinear(result)
    assert set(panel.proves) == {remedy.name for remedy in result.remedies if remedy.provable}
    panel.proves["accumulation=4"].click()
    until(lambda: quiet(panel))
    assert any("1.23× (1.10× … 1.30×)" in row.children[0].value for row in panel.remedies.children)


def test_it_shows_itself_without_a_kernel_and_says_what_it_takes() -> None:
    panel = WhyNotLinear(answer())
    face = panel._repr_mimebundle_()
    assert face["text/plain"] == "WhyNotLinear('text-gpt · 2 ranks · device=cpu')"
    for words in ("large gradients", "2 × one", "What would help", "accumulation=4", "measured in 6 rounds"):
        assert words in face["text/html"]
    assert "press Measure" in WhyNotLinear(SPEC)._repr_mimebundle_()["text/html"]
    with pytest.raises(ValueError, match=r"WhyNotLinear\(str\): a spec or an answer"):
        WhyNotLinear("train.py")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="price_per_hour"):
        WhyNotLinear(SPEC, price_per_hour=-1)
    with pytest.raises(ValueError, match="cannot be set beside"):
        WhyNotLinear(SPEC.replace(parallel="fsdp"))
