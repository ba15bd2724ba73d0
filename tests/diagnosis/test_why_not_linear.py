"""`why_not_linear`: the answer on made measurements, of scripts by their timelines, what is refused, and real ranks (slow)."""

import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workbench as wb
from tests.planted_gap import planted
from workbench.core import units
from workbench.core.brief import BRIEF_BYTES
from workbench.core.statistics import Interval
from workbench.core.system_load import Load, LoadMeter
from workbench.diagnosis.analysis.evidence import Gradients
from workbench.diagnosis.analysis.gap import Gap
from workbench.diagnosis.analysis.gap_evidence import Tail
from workbench.diagnosis.analysis.why_not_linear import WhyNotLinear
from workbench.diagnosis.plot_gap import SHOWN
from workbench.diagnosis.why_not_linear import LaunchLoad, _wait, script_evidence, why_not_linear
from workbench.runs.run import _on_run_started, on_run_started
from workbench.runs.spec import ScriptSpec
from workbench.timeline.timeline import Step, Timeline

SPEC = wb.RunSpec(task="text-gpt", nproc_per_node=2, device="cpu")


def answer(spec: wb.RunSpec | None = SPEC, **planted_parts: Any) -> WhyNotLinear:
    return WhyNotLinear(evidence=planted(**planted_parts), spec=spec)


def test_the_answer_shows_itself_everywhere() -> None:
    result = answer(slow=0.006, reduction=0.004)
    assert result.cause == "slow rank"
    text = str(result)
    for words in ("slow rank", "2 × one", "what you get", "not explained", "Is it worth it?", "It is rank 1", "measured in 6 rounds"):
        assert words in text
    assert "<table>" in result._repr_html_()
    frame = result.to_frame()
    assert frame.seconds.sum() == pytest.approx(result.gap.seconds)
    assert frame.lost.sum() == pytest.approx(64 / result.gap.linear.mid - 64 / result.gap.step.mid)
    copy = WhyNotLinear.from_json(json.loads(json.dumps(result.to_json())))
    assert (copy.cause, str(copy)) == (result.cause, text)


def test_the_buckets_stand_under_the_reduction() -> None:
    result = answer(reduction=0.010, buckets=2, tail=Tail(first=0.007, backward=0.008, after=0.006, silent=0.001))
    last = 3e-4 + 2e6 * 1e-9
    assert result.buckets == pytest.approx({"first": 0.007, "exposed": 0.005, "last": last})
    assert result.brief()["buckets_s"] == pytest.approx(result.buckets, rel=0.01)
    names = [row[0] for row in result.table.rows]
    at = names.index("large gradients") + 1
    assert names[at : at + 3] == ["· first gradient", "· after the last gradient", "· last bucket"]
    assert [row[1] for row in result.table.rows[at : at + 3]] == ["7.00 ms", "5.00 ms", "2.30 ms"]
    assert "5.00 ms are left (the last bucket alone takes 2.30 ms)" in result.why
    assert result.at(4).buckets == answer(reduction=0.01).buckets == {}


def test_an_agent_gets_it_in_two_kilobytes() -> None:
    result = answer(
        slow=0.004, data=0.004, reduction=0.009, buckets=40, uneven=0.009, loaders=0.002, start=0.1, notes=("a note " * 30,) * 9
    )
    brief = result.brief()
    assert len(json.dumps(brief, ensure_ascii=False).encode()) <= BRIEF_BYTES
    assert brief["kind"] == "measured"
    assert brief["claim"]["cause"] == result.cause
    assert brief["next"]["command"].startswith("workbench why-not-linear text-gpt --prove")
    assert set(brief["parts_s"]) >= {"slow rank", "many reductions", "not explained"}


@pytest.mark.parametrize(
    ("parts", "name", "change"),
    [
        ({"reduction": 0.01, "buckets": 60}, "accumulation=4", {"accumulation": 4}),
        ({"reduction": 0.01, "buckets": 60}, "bucket_cap_mb=1.3", {"bucket_cap_mb": 1.3}),
        ({"start": 0.2, "steps_per_pass": 20.0, "num_workers": 2, "cores": 8.0}, "persistent_workers=True", {"persistent_workers": True}),
        ({"data": 0.006}, "num_workers=1", {"num_workers": 1, "persistent_workers": True}),
        ({"loaders": 0.006}, "num_workers=1", {"num_workers": 1, "persistent_workers": True}),
        ({"large": 0.024}, "micro_batch=64", {"micro_batch": 64}),
        ({"waits": 0.01, "threads": 2}, "threads=1", {"threads": 1}),
        ({"slow": 0.006}, "rank 1 as fast as the others", {}),
        ({"longer_samples": 0.006}, "samples shared out by length", {}),
    ],
)
def test_each_part_has_its_remedy(parts: dict[str, Any], name: str, change: dict[str, Any]) -> None:
    remedies = {remedy.name: remedy for remedy in answer(**parts).remedies}
    assert name in remedies
    remedy = remedies[name]
    assert remedy.change == change
    assert remedy.low <= remedy.speedup <= remedy.high
    SPEC.replace(**({"num_workers": 2} if "num_workers" not in change else {}), **change)  # raises where a spec does not take it
    script = {remedy.name: remedy for remedy in answer(None, **parts).remedies}
    assert not any(remedy.change for remedy in script.values()), "what is no spec cannot be turned from here"


def test_workers_that_would_miss_the_epoch_are_not_kept() -> None:
    parts: dict[str, Any] = {"start": 0.2, "steps_per_pass": 20.0, "num_workers": 2, "cores": 8.0}
    remedy = answer(**parts, misses_epochs=True).remedy("epoch in shared memory")
    assert remedy.change == {}
    assert remedy.speedup == answer(**parts).remedy("persistent_workers=True").speedup


def test_a_predicted_gain_is_what_its_formula_says() -> None:
    result = answer(reduction=0.010, buckets=1)
    accumulate = result.remedy("accumulation=4")
    step = result.gap.step.mid
    reduction = result.gap["large gradients"].mid + result.gap["many reductions"].mid
    assert accumulate.speedup == pytest.approx(4 * step / (4 * (step - reduction) + reduction), rel=0.03)
    half = result.remedy("gradients in 16 bits")
    assert half.speedup == pytest.approx(step / (step - result.gap["large gradients"].mid / 2), rel=1e-6)
    assert half.ceiling


def test_uneven_steps_even_out_over_more_micro_batches() -> None:
    result = answer(uneven=0.02, rounds=12)
    assert result.cause == "uneven steps"
    remedy = result.remedy(None)
    assert remedy.name == "accumulation=4"
    saved = result.gap["uneven steps"].mid
    assert 1.02 < remedy.speedup < result.gap.step.mid / (result.gap.step.mid - saved), "it halves the waits; it does not remove them"


def test_other_processes_that_take_most_of_the_gap_are_the_verdict() -> None:
    result = answer(waits=0.01, cores=16.0, foreign=9.0)
    assert result.cause == ""
    assert result.headline == "other processes on this machine"
    lost, whole = result.gap.cost("other processes", 64), 64 / result.gap.linear.mid - 64 / result.gap.step.mid
    assert lost > whole / 2
    assert f"Other processes on this machine take {units.rate(lost)} of the {units.rate(whole)} lost" in result.why
    assert "on a machine that does nothing else" in result.next
    for text in (result.summary, result._repr_html_()):
        assert "no single cause" not in text
        assert "No part of the gap stands out" not in text


def test_other_processes_that_take_more_than_the_cause_are_named_before_it() -> None:
    result = answer(waits=0.012, slow=0.008, cores=16.0, foreign=9.0)
    assert result.cause == "slow rank"
    assert result.gap["other processes"].mid > result.gap["slow rank"].mid
    assert result.headline == "other processes on this machine, and slow rank"
    for text in (result.why, result.brief()["claim"]["why"]):
        assert "of the step: other processes on this machine, no property of the training; " in text
    less = answer(waits=0.004, slow=0.012, cores=16.0, foreign=9.0)
    assert (less.headline, "other processes" in less.why) == ("slow rank", False)


def test_ranks_beyond_the_cores_here_are_said_to_be_predicted_for_machines_that_have_them() -> None:
    result = answer(reduction=0.005, cores=4.0)
    rows = [str(row[-1]) for row in result.worth([2, 4, 8]).rows]
    assert ["on machines with 2 cores for each rank" in row for row in rows] == [False, False, True]
    assert "as many cores for each as here" in str(result.at(8).caption)
    assert "as many cores for each as here" not in str(result.at(4).caption)
    alone = WhyNotLinear(evidence=planted(ranks=1, cores=2.0), ranks=8, link=Gradients(size=0, buckets=1, latency=3e-4, per_byte=1e-9))
    assert alone.gap["cores"].mid == 0
    assert "taken to be on others, with as many cores for each as here (1 core)" in str(alone.caption)
    assert "on machines" not in str(answer(reduction=0.005, cores=4.0, device="cuda").worth()), "there a rank has a GPU of its own"


def test_healthy_ranks_get_no_advice() -> None:
    result = answer(noise=0.002)
    assert result.cause == ""
    assert "close to linear" in str(result)
    assert result.remedies == ()
    assert str(result.prove()).startswith("There is nothing to prove: the cause is none, ")
    assert result.proofs == []


def test_is_it_worth_it() -> None:
    result = answer(reduction=0.005)
    table = result.worth([1, 2, 8], price_per_hour=3.6)
    assert [row[0] for row in table.rows] == [1, 2, 8]
    assert [str(row[-1]).split(";")[0].split(",")[0] for row in table.rows] == ["measured", "measured", "predicted"]
    rate = 32 / 0.022
    assert float(str(table.rows[0][4])) == pytest.approx(3.6 / 3600 / rate * 1e6, rel=0.02)
    assert table.rows[1][1] == units.rate(result.samples / result.gap.step.mid, "samples"), "one answer has one throughput"
    relative = result.worth()
    assert relative.rows[0][4] == "1.00×"
    with pytest.raises(ValueError, match="price_per_hour"):
        result.worth(price_per_hour=-1)
    forecast = result.forecast(8)
    assert forecast is not None
    assert forecast.low < forecast.mid
    assert answer(threads=2).forecast(8) is None, "no curve goes through a point with more threads than cores"


def test_ranks_that_take_away_from_the_others_are_said_to_and_so_is_what_two_predictions_that_differ_mean() -> None:
    result = answer(cores=64.0, unexplained=0.15)
    table = result.worth()
    one, two = (result._rate(size)[0] for size in (1, 2))
    assert two < 0.5 * one
    assert f"each added rank costs {units.percent(1 - two / one)} of what one gives" in str(table)
    assert "the two predictions differ" in str(table)
    assert "the two predictions differ" not in str(answer(cores=64.0).worth())


def test_one_process_is_asked_what_more_would_bring() -> None:
    link = Gradients(size=0, buckets=1, latency=3e-4, per_byte=1e-9)
    spec = SPEC.replace(nproc_per_node=1)
    result = WhyNotLinear(evidence=planted(ranks=1, cores=64.0), spec=spec, ranks=8, link=link)
    assert result.gap.predicted
    assert "8 ranks would give" in result.why
    assert "(predicted)" in result.summary
    assert result.at(64).efficiency < result.efficiency < 1
    assert [row[0] for row in result.worth().rows] == [1, 2, 4, 8]
    assert not any(remedy.provable for remedy in result.remedies), "eight ranks are not here"


def test_a_gap_at_another_word_is_refused_for_one_process_too() -> None:
    for ranks in (1, 2):
        with pytest.raises(ValueError, match="same='x': allowed are"):
            WhyNotLinear(evidence=planted(ranks=ranks), ranks=8).gap_at("x")


def test_more_ranks_than_measured_are_marked_as_predicted() -> None:
    result = answer(reduction=0.005).at(64)
    assert result.gap.predicted
    assert all(patch.get_hatch() for patch in result.plot().patches[1:])
    with pytest.raises(ValueError, match="ranks=1"):
        answer().at(1)


def timeline(rank: int, forward: float, backward: float, *, samples: int = 32, count: int = 80) -> Timeline:
    steps = tuple(
        Step(index=i, phases=(0.002, 0.0, forward * (1 + 0.01 * (i % 3)), backward, 0.001, 0.0), samples=samples) for i in range(count)
    )
    return Timeline(rank=rank, steps=steps)


def test_a_script_is_explained_by_its_timelines() -> None:
    alone = [timeline(0, 0.010, 0.020)]
    strangers = [timeline(0, 0.012, 0.022), timeline(1, 0.012, 0.022)]
    slow = [timeline(0, 0.012, 0.033), timeline(1, 0.020, 0.025)]  # the first one waits in its backward
    evidence = script_evidence({"one": alone, "strangers": strangers, "all": slow})
    gap = WhyNotLinear(evidence=evidence).gap
    assert gap["memory"].mid + gap["cores"].mid == pytest.approx(0.004, rel=0.1)
    assert gap["slow rank"].mid == pytest.approx(0.008, rel=0.1)
    assert gap["waits and reduction"].mid == pytest.approx(0.003, rel=0.3)
    assert gap.cause == "slow rank"
    assert evidence.slowest == 1
    shared = script_evidence({"one": [timeline(0, 0.01, 0.02, samples=64)], "strangers": strangers, "all": slow})
    assert any("shares its batch out" in note for note in shared.notes)
    with pytest.raises(ValueError, match=r"8 are needed.*if it resumes from a checkpoint of an earlier launch, give its folder as \{out\}"):
        script_evidence({"one": [timeline(0, 0.01, 0.02, count=6)], "strangers": strangers, "all": slow})


def test_what_the_gradients_of_a_script_cannot_take_is_not_blamed_on_them() -> None:
    alone = [timeline(0, 0.010, 0.020)]
    strangers = [timeline(rank, 0.010, 0.020) for rank in range(2)]
    later = [timeline(rank, 0.012, 0.030) for rank in range(2)]  # 10 ms more in the backward, and 2 ms more that nothing accounts for
    evidence = script_evidence({"one": alone, "strangers": strangers, "all": later})
    result = WhyNotLinear(evidence=evidence)
    gap = result.gap
    assert gap.cause == "waits and reduction"
    assert gap["waits and reduction"].mid == pytest.approx(0.010, rel=0.02)
    assert gap["not explained"].mid == pytest.approx(0.002, rel=0.05)
    assert "large gradients" not in str(result.table)
    assert "Make the script a task" in result.next
    assert not any(remedy.name.startswith("accumulation") for remedy in result.remedies)
    assert all(part.seconds.high - part.seconds.low > 0.05 * gap.step.mid for part in gap.parts), "each arm is one launch"
    little, much = (
        WhyNotLinear(evidence=replace(evidence, gradients=Gradients(size=size, buckets=1, latency=3e-4, per_byte=1e-9)))
        for size in (1_230_000, 12_000_000)
    )
    assert little.gap["large gradients"].mid == pytest.approx(0.00123)
    assert (little.cause, much.cause) == ("waits and reduction", "large gradients")
    assert any(remedy.name == "accumulation=4" and "no_sync()" in remedy.what for remedy in much.remedies)
    busy = script_evidence({"one": alone, "strangers": strangers, "all": later}, loads=[LaunchLoad(foreign=[1.6])])
    assert WhyNotLinear(evidence=replace(busy, cores=2.0)).cause == ""
    assert "on a machine that does nothing else" in WhyNotLinear(evidence=replace(busy, cores=2.0)).next
    assert any("other processes took 1.6 of" in note for note in busy.notes)


def test_waits_of_a_script_for_a_core_are_those_of_other_processes_as_far_as_these_took_them() -> None:
    """Beside others that took 1.5 of 2 cores they were called memory, to be mended by memory of its own for each rank."""
    alone = [timeline(0, 0.010, 0.020)]
    slower = [timeline(rank, 0.015, 0.030) for rank in range(2)]  # by half, while each waits a third of the time
    launches = {"one": alone, "strangers": slower, "all": slower}

    def gap(**load: Any) -> Gap:
        evidence = script_evidence(launches, loads=[LaunchLoad(**load)])
        return WhyNotLinear(evidence=replace(evidence, cores=2.0)).gap

    step, waiting = 0.048, {"one": [0.0], "strangers": [1 / 3] * 2, "all": [1 / 3] * 2}
    others = gap(foreign=[1.5], waiting=waiting, wanted=0.75)
    assert others["other processes"].mid == pytest.approx(step / 3, rel=0.02)
    assert abs(others["memory"].mid) < 0.03 * step
    ranks = gap(foreign=[0.0], waiting=waiting, wanted=3.0)
    assert ranks["cores"].mid == pytest.approx(step / 3, rel=0.02)
    both = gap(foreign=[1.0], waiting=waiting, wanted=3.0)
    assert both["cores"].mid == pytest.approx(step / 3 * 1.3 / 2.3, rel=0.02)
    assert both["other processes"].mid == pytest.approx(step / 3 * 1 / 2.3, rel=0.02)
    doubtful = WhyNotLinear(
        evidence=replace(script_evidence(launches, loads=[LaunchLoad(foreign=[1.5], waiting=waiting, wanted=0.75)]), cores=2.0)
    )
    assert doubtful.gap["other processes"].low < 0 < doubtful.gap.seconds / 2 < doubtful.gap["other processes"].mid
    assert doubtful.headline == "no single cause", "their part is most of the gap, or nothing: they may not be blamed"
    assert "Ask again with a larger budget_s, on a machine that does nothing else" in doubtful.next
    unknown = gap(foreign=[1.5])
    assert unknown["other processes"].mid == pytest.approx(step / 3, rel=0.1), "nothing tells them from waits for memory"
    assert "memory" not in {part.cause for part in unknown.parts}
    for each in (others, ranks, both, unknown):
        assert each.linear.mid + sum(part.seconds.mid for part in each.parts) == pytest.approx(each.step.mid)


def test_the_load_of_a_launch_is_measured_while_its_ranks_take_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 begins at 3 s, and waits 0.25 of each second; rank 1 at 5 s, and 0.5."""
    now = [0.0]

    def sleep(_: float) -> None:
        now[0] += 1
        for rank, (begins, pid) in enumerate(((3, 70), (5, 71))):
            if now[0] >= begins:
                (tmp_path / f"rank{rank}.jsonl").write_text(json.dumps({"rank": rank, "world_size": 2, "pid": pid}) + "\n")

    module = "workbench.diagnosis.why_not_linear"
    monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(f"{module}.waited_for_core", lambda pid: 100 + now[0] * {70: 0.25, 71: 0.5}[pid])
    monkeypatch.setattr(LoadMeter, "lap", lambda _: Load(seconds=1, cpu=0, thread_cpu=0, waiting=0, foreign=0.5, ours=0.1 * now[0]))
    run: Any = Launched("running")
    run.path = tmp_path
    line: Any = SimpleNamespace(tick=lambda: None)
    load = LaunchLoad()
    _wait([(run, 0), (run, 1)], 9, line, load, "all")
    assert load.waiting == {"all": pytest.approx([0.25, 0.5])}
    assert load.foreign == [0.5] * 9
    assert load.wanted == pytest.approx(0.7 / (1 - 0.375))


def test_a_rank_that_is_gone_while_its_run_still_counts_as_running_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process was read once: the time that passed until it was last read was 0, and the answer ended in a ZeroDivisionError."""
    now = [0.0]
    (tmp_path / "rank0.jsonl").write_text(json.dumps({"rank": 0, "world_size": 1, "pid": 70}) + "\n")
    module = "workbench.diagnosis.why_not_linear"
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: now.__setitem__(0, now[0] + 1))
    monkeypatch.setattr(f"{module}.time", clock)
    monkeypatch.setattr(f"{module}.waited_for_core", lambda _: 100.0 if now[0] < 2 else None)
    monkeypatch.setattr(LoadMeter, "lap", lambda _: Load(seconds=1, cpu=0, thread_cpu=0, waiting=0, foreign=0.5, ours=0.1))
    run: Any = Launched("running")
    run.path = tmp_path
    line: Any = SimpleNamespace(tick=lambda: None)
    _wait([(run, 0)], 5, line, load := LaunchLoad(), "all")
    assert load.waiting == {}
    assert load.foreign == [0.5] * 5


def launched(chance: random.Random, ranks: int, *, noise: float, reduction: float = 0.0) -> list[Timeline]:
    """A launch of a script: it is faster or slower than others by chance, and while it runs the load changes."""
    whole, load, rows = chance.lognormvariate(0, noise), 0.0, list[list[Step]]([] for _ in range(ranks))
    for index in range(60):
        load = load if index % 10 else 0.5 * load + chance.gauss(0, 1.5 * noise)
        forward = [whole * math.exp(load) * 0.012 * chance.lognormvariate(0, noise / 2) for _ in rows]
        for own, row in zip(forward, rows, strict=True):
            wait = max(forward) - own if reduction else 0.0
            backward = wait + whole * math.exp(load) * (0.024 + reduction)
            row.append(Step(index=index, phases=(0.002, 0.0, own, backward, 0.001, 0.0), samples=32))
    return [Timeline(rank=rank, steps=tuple(row)) for rank, row in enumerate(rows)]


@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_the_intervals_of_a_script_hold_what_launches_differ_by(noise: float) -> None:
    def gap(seed: int, noise: float) -> Gap:
        chance = random.Random(seed)
        one, strangers = launched(chance, 1, noise=noise), launched(chance, 2, noise=noise)
        both = launched(chance, 2, noise=noise, reduction=0.006)
        return WhyNotLinear(evidence=script_evidence({"one": one, "strangers": strangers, "all": both})).gap

    def intervals(gap: Gap) -> dict[str, Interval]:
        return {"linear": gap.linear, "step": gap.step} | {part.cause: part.seconds for part in gap.parts}

    true, count = intervals(gap(0, 1e-9)), 60
    held = Counter(name for seed in range(count) for name, found in intervals(gap(seed, noise)).items() if true[name].mid in found)
    assert all(held[name] >= 0.85 * count for name in true), held


class Launched:
    """A run as far as the wait for it is concerned."""

    def __init__(self, state: str, steps: int = 80) -> None:
        self.state = state
        self.ok, self.timelines, self.path = True, [timeline(0, 0.01, 0.02, count=steps)], Path("runs")

    def stop(self) -> None:
        self.state = "stopped" if self.state == "running" else self.state


def test_ctrl_c_while_strangers_start_leaves_none_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []

    def launch(*_: object, **options: Any) -> None:
        """The first process ends; of three strangers, Ctrl-C comes as the third begins."""
        if len(runs) == 3:
            raise KeyboardInterrupt
        runs.append(Launched("running" if runs else "finished"))
        for announce in _on_run_started.get():
            announce(runs[-1])

    outside: list[Any] = []
    monkeypatch.setattr("workbench.diagnosis.why_not_linear.launch", launch)
    (tmp_path / "train.py").touch()
    with on_run_started(outside.append), pytest.raises(KeyboardInterrupt, match="why_not_linear was stopped by Ctrl-C"):
        why_not_linear(tmp_path / "train.py", nproc_per_node=3)
    assert [run.state for run in runs] == ["finished", "stopped", "stopped"]
    assert outside == runs, "who waits outside, such as a panel with a Stop button, hears of them, too"


def test_the_launches_of_a_script_take_turns_again_while_no_part_is_beyond_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' backward is 6.5 % of the step longer: within what single launches may differ by, and beyond what two may."""
    asked: list[int] = []
    counts = [80] * 8

    def launch(*_: object, nproc_per_node: int, **options: Any) -> None:
        run: Any = Launched("finished")
        longer = 0.0023 * (nproc_per_node == 2)
        run.timelines = [timeline(rank, 0.01, 0.02 + longer, count=counts[len(asked)]) for rank in range(nproc_per_node)]
        run.path = tmp_path
        asked.append(nproc_per_node)
        for announce in _on_run_started.get():
            announce(run)

    monkeypatch.setattr("workbench.diagnosis.why_not_linear.launch", launch)
    (tmp_path / "train.py").touch()
    result = why_not_linear(tmp_path / "train.py")
    assert asked == [1, 1, 1, 2] * 2
    assert (result.evidence.launches, result.evidence.count) == (2, 8)
    assert result.cause == "waits and reduction"
    once = replace(result.evidence, launches=1, blocks=result.evidence.blocks[:12])
    assert WhyNotLinear(evidence=once).in_doubt
    asked.clear()
    counts[6] = 3
    kept = why_not_linear(tmp_path / "train.py")
    assert len(asked) == 8
    assert kept.evidence == replace(once, seconds=kept.evidence.seconds, notes=kept.evidence.notes)
    assert "what was launched once more is left out: the script took 3 steps (strangers)" in kept.evidence.notes[-1]


def test_ranks_that_train_apart_are_refused_and_those_with_the_same_samples_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script without DDP got an answer on its scaling, with costs per sample."""

    def launch(*_: object, nproc_per_node: int, **options: Any) -> None:
        run: Any = Launched("finished")
        run.timelines = [timeline(rank, 0.01, 0.03) for rank in range(nproc_per_node)]
        run.path = tmp_path
        for announce in _on_run_started.get():
            announce(run)

    def reads(group: bool) -> None:
        for rank in range(2):
            rows = [{"rank": rank, "world_size": 2}, {"reads": {"first": "a", "group": group, "split": None, "data": "d"}}]
            (tmp_path / f"rank{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr("workbench.diagnosis.why_not_linear.launch", launch)
    (tmp_path / "train.py").touch()
    reads(group=False)
    with pytest.raises(
        ValueError, match="there is no scaling to explain: the 2 ranks are in no process group, so each trains a model of its"
    ):
        why_not_linear(tmp_path / "train.py")
    reads(group=True)
    assert "all 2 ranks train on the same samples" in why_not_linear(tmp_path / "train.py").evidence.notes[0]


def test_a_script_s_spec_keeps_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def launch(*_: object, **options: Any) -> None:
        asked.append(options)
        run: Any = Launched("finished")
        run.timelines *= options["nproc_per_node"]
        run.path = tmp_path
        for announce in _on_run_started.get():
            announce(run)

    (tmp_path / "rank0.jsonl").write_text('{"rank": 0, "world_size": 2}\n{"gradients": 30000000}\n')
    monkeypatch.setattr("workbench.diagnosis.why_not_linear.launch", launch)
    (tmp_path / "train.py").touch()
    spec = ScriptSpec(script=str(tmp_path / "train.py"), args=("--x",), nproc_per_node=2, threads=3)
    answer = why_not_linear(spec)
    assert [(options["nproc_per_node"], options["threads"], options["args"]) for options in asked] == [
        (ranks, 3, ("--x",)) for ranks in (1, 1, 1, 2)
    ]
    assert (answer.spec, answer.evidence.threads) == (spec.replace(watch=True), 3)
    assert answer.evidence.gradients is not None
    assert (answer.evidence.gradients.size, answer.evidence.gradients.buckets) == (30_000_000, 3), "1 MiB, 25 MiB and the rest"
    assert not answer.gap.predicted
    more = why_not_linear(spec, ranks=8)
    assert (more.world_size, more.evidence.world_size, more.gap.predicted) == (8, 2, True)
    assert "8 ranks would give" in more.why
    assert why_not_linear(spec, ranks=2).gap.predicted is False
    assert why_not_linear(tmp_path / "train.py", args=["--y"], nproc_per_node=2).spec.args == ("--y",)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        (ScriptSpec(script="train.py", nnodes=2), {}, r"nnodes=2: several machines are for wb.launch.* try spec.replace\(nnodes=1\)"),
        (SPEC.replace(parallel="fsdp"), {}, "no rank can compute without the others' weights"),
        (SPEC.replace(micro_batch="auto"), {}, "another number for one rank"),
        (SPEC, {"same": "batch"}, "micro_batch"),
        (SPEC, {"ranks": 1}, "ranks"),
        (SPEC.replace(nproc_per_node=4), {"ranks": 2}, "more ranks than are measured"),
        (SPEC, {"args": ["--x"]}, "only a script takes them"),
        (SPEC, {"budget_s": 0}, "budget_s"),
        (3, {}, "expected a RunSpec"),
        (__file__, {"nproc_per_node": 4, "ranks": 2}, "ranks=2 with a script of 4: leave it out, or give more ranks than are measured"),
        ("train.py", {"nproc_per_node": 1, "ranks": 8}, "a script .* needs 2 or more. .* predicted from one process of a spec only"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_starts(
    target: Any, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        why_not_linear(target, runs_dir=tmp_path, **options)
    assert not any(tmp_path.iterdir())


SLOW_RANK = """
import os, time, torch, workbench as wb

class Work(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, batch):
        time.sleep(0.02 + 0.012 * (os.environ.get("RANK") == "1"))
        return self.layer(batch)

def dataset():
    return torch.utils.data.TensorDataset(torch.randn(4096, 8))

def task():
    return wb.Task(model=Work, dataset=dataset, loss=lambda model, batch: model(batch[0]).square().mean(), optimizer="sgd(lr=0.01)")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_real_ranks_one_of_which_is_slow(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(SLOW_RANK)
    spec = wb.RunSpec(task=f"{tmp_path / 'work.py'}:task", nproc_per_node=2, device="cpu", micro_batch=8)
    result = why_not_linear(spec, budget_s=25, runs_dir=tmp_path)
    assert result.cause == "slow rank"
    assert result.gap["slow rank"].mid == pytest.approx(0.012, rel=0.25)
    assert "It is rank 1" in result.why
    assert result.evidence.tail is not None
    assert result.evidence.gradients is not None
    assert {block.arm for block in result.evidence.blocks} >= {"one", "strangers", "all", "strangers, same batches"}
    proof = result.prove({"micro_batch": 16}, budget_s=15)
    assert proof.measured.mid > 1.3, "twice the samples in the same sleep"
    assert result.proofs == [proof]
    assert math.isfinite(result.residual)


def test_too_few_rare_long_steps_to_tell() -> None:
    """Close to linear, 156 % of it, was said of ranks that open a shard of 0.4 s now and then: by wb.launch it was 67 %."""
    few = WhyNotLinear(evidence=planted(rounds=3, pauses=0.5), spec=None)
    assert few.gap["rare long steps"].width > 0.2 * few.gap.step.mid
    assert few.headline == "not clear"
    assert few.in_doubt
    assert "too few of them were seen" in few.why
    assert "Find out what happens now and then on rank 1" in few.next
    busy = WhyNotLinear(evidence=planted(rounds=3, pauses=0.5, foreign=1.5), spec=None)
    assert busy.next == "Ask again with a larger budget_s, to see more of the rare long steps."
    assert "linear" not in few.headline


def test_a_script_that_averages_gradients_itself_is_not_sent_to_a_method_of_ddp() -> None:
    result = answer(None, reduction=0.010, buckets=1)
    alone = WhyNotLinear(evidence=replace(result.evidence, script=True, gradients=None))
    remedy = next(remedy for remedy in alone.remedies if remedy.name == "accumulation=4")
    assert remedy.what == "Reduce gradients once per 4 micro-batches: accumulation with no reduction in between."
    assert "with no_sync() in between" in result.remedy("accumulation=4").what


def test_lines_lead_from_bar_to_bar_though_small_parts_have_no_row() -> None:
    result = answer(slow=0.006, loaders=0.00004, reduction=0.004)
    full = result.samples / result.gap.linear.mid
    assert any(0 < abs(result.gap.cost(part.cause, result.samples)) < SHOWN * full for part in result.gap.parts)
    ax = result.plot()
    bars = sorted((patch.get_y() + patch.get_height() / 2, patch.get_x(), patch.get_width()) for patch in ax.patches)
    into = {round(float(line.get_ydata()[-1]), 2): float(line.get_xdata()[-1]) for line in ax.lines}  # where the line along a bar ends
    for row, x, width in bars[1:-1]:
        assert min(abs(into[round(row + 0.31, 2)] - edge) for edge in (x, x + width)) < 1e-6 * full
