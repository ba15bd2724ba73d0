"""Figures of evaluations end a training, also one that is resumed, and say which checkpoint is the best."""

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests import toy_tasks
from tests.train.test_checkpoints import HandMadeRun, names, spec_of, train
from workbench.core import run_directory
from workbench.train.checkpoints import Checkpoints
from workbench.train.early_stop import BestFigure, EarlyStop
from workbench.train.ranks import Ranks


@pytest.mark.parametrize(
    ("stop_when", "last"),
    [("score(patience=2)", 8), ("score(patience=2, best=max)", 14), ("score(patience=1, by=10)", 4), ("score(patience=20)", 20)],
)
def test_it_ends_after_as_many_evaluations_as_it_has_patience(alone: Ranks, tmp_path: Path, stop_when: str, last: int) -> None:
    values = iter([5.0, 4.0, 6.0, 7.0, 8.0, 7.5, 7.9, 1.0, 1.0, 1.0])

    def score(model: nn.Module) -> dict[str, float]:
        return {"score": next(values)}

    train(spec_of(stop_when=stop_when, evaluate="every(steps=2)"), toy_tasks.numbers(evaluate=score), alone, tmp_path)
    rows: list[dict[str, Any]] = run_directory.LineTail(tmp_path / run_directory.METRICS).read()
    assert rows[-1]["step"] == last
    assert [row["step"] for row in rows if "lr" in row] == [*range(1, last + 1)]
    notes = [note for note in HandMadeRun(tmp_path).run.notes if "stop_when" in note]
    assert len(notes) == (last < 20)
    assert not notes or f"stop_when ended the training after step {last}: score was " in notes[0]
    before = len(rows)
    values = iter([9.0] * 20)
    train(
        spec_of(stop_when=stop_when, evaluate="every(steps=2)"), toy_tasks.numbers(evaluate=score), alone, tmp_path
    )  # from its checkpoint
    rows = run_directory.LineTail(tmp_path / run_directory.METRICS).read()
    assert rows[-1]["step"] == (last if stop_when != "score(patience=2, best=max)" else 18)  # 9 was better than 8, at step 14
    assert len(rows) >= before


def test_an_evaluation_without_the_figure_is_not_the_best(alone: Ranks, tmp_path: Path) -> None:
    rows = [{"other": 1.0}, *({"score": value} for value in (1.0, 2.0, 3.0, 4.0))]
    path = tmp_path / run_directory.EVALUATIONS
    path.write_text("".join(f'{{"step": {step}, "figures": {json.dumps(row)}}}\n' for step, row in enumerate(rows, 1)))
    assert not EarlyStop("score(patience=2, best=max)", alone, tmp_path).after(5)


def test_a_run_that_was_killed_where_it_was_to_stop_takes_no_further_step(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(stop_when="score(patience=1)", evaluate="every(steps=6)")
    values = iter([1.0, 2.0, 0.5])
    task = toy_tasks.numbers(evaluate=lambda model: {"score": next(values)})
    with monkeypatch.context() as killed:
        killed.setattr("workbench.train.early_stop.EarlyStop.after", lambda stop, step: False)  # killed after the checkpoint of step 12
        write = Checkpoints.write

        def last(checkpoints: Checkpoints, step: int, *arguments: Any, **options: Any) -> None:
            write(checkpoints, step, *arguments, **{**options, "wait": True})
            if step == 12:
                raise KeyboardInterrupt

        killed.setattr(Checkpoints, "write", last)
        with pytest.raises(KeyboardInterrupt):
            train(spec, task, alone, tmp_path)
    train(spec, task, alone, tmp_path)
    rows = run_directory.LineTail(tmp_path / run_directory.METRICS).read()
    assert rows[-1]["step"] == 12
    assert next(values) == 0.5


@pytest.mark.parametrize(
    ("knob", "figure", "why"),
    [("stop_when", "loss", "no evaluation ends the training"), ("best", "accuracy", "no checkpoint is the best")],
)
def test_a_figure_that_there_is_not_ends_no_training_and_is_noted_once(
    alone: Ranks, tmp_path: Path, knob: str, figure: str, why: str
) -> None:
    spec = spec_of(steps=9, checkpoint_every=3, evaluate="checkpoint", **{knob: figure})
    train(spec, toy_tasks.numbers(evaluate=lambda model: {"score": 1.0, "other": 2.0}), alone, tmp_path)
    rows: list[dict[str, Any]] = run_directory.LineTail(tmp_path / run_directory.rank_file(0)).read()
    notes = [row["note"] for row in rows if "note" in row]
    assert notes == [f"warning: {knob}: the evaluation has no figure {figure!r}; it has score, other, so {why}"]
    rows = run_directory.LineTail(tmp_path / run_directory.METRICS).read()
    assert rows[-1]["step"] == 9
    assert names(tmp_path) == ["step00000006.pt", "step00000009.pt"]


def test_all_ranks_get_the_answer_of_the_first(alone: Ranks, tmp_path: Path) -> None:
    (tmp_path / run_directory.EVALUATIONS).write_text("".join(f'{{"step": {step}, "figures": {{"score": 1.0}}}}\n' for step in (1, 2)))
    answers: list[tuple[bool, bool]] = []

    def after(rank: int) -> None:
        ranks = dataclasses.replace(alone, rank=rank, world_size=2)
        answers.append((EarlyStop("loss", ranks, tmp_path).after(1), EarlyStop("score(patience=1)", ranks, tmp_path).after(2)))

    threads = [threading.Thread(target=after, args=(rank,), daemon=True) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == [(False, True)] * 2


@pytest.mark.parametrize(
    ("best", "keep", "kept", "value"),
    [
        (None, 2, (3, 15, 18), (2.0, 3)),
        (None, 4, (3, 9, 12, 15, 18), (2.0, 3)),
        ("score(max)", 1, (9, 18), (-8.0, 9)),
        ("accuracy", 2, (12, 15, 18), (-0.9, 12)),
        ("accuracy(min)", 1, (6, 18), (0.1, 6)),
    ],
)
def test_the_last_checkpoints_and_the_best_are_kept(
    alone: Ranks, tmp_path: Path, best: str | None, keep: int, kept: tuple[int, ...], value: tuple[float, int]
) -> None:
    figures = iter(
        {"loss": loss, "score": score, "accuracy": accuracy}
        for loss, score, accuracy in ((2, 1, 0.5), (3, 7, 0.1), (4, 8, 0.2), (5, 6, 0.9), (6, 5, 0.3), (7, 4, 0.4))
    )
    spec = spec_of(steps=18, checkpoint_every=3, evaluate="checkpoint", best=best, keep_checkpoints=keep)
    train(spec, toy_tasks.numbers(evaluate=lambda model: next(figures)), alone, tmp_path)
    assert names(tmp_path) == [f"step{step:08d}.pt" for step in kept]
    checkpoints = Checkpoints(tmp_path, alone, 3)
    last = checkpoints.latest()
    assert last
    assert last[1]["best"] == value
    found = checkpoints.best(last)
    assert found
    assert found[1]["step"] == value[1]


def test_a_run_that_goes_on_keeps_the_best_unless_another_figure_decides(alone: Ranks, tmp_path: Path) -> None:
    figures = iter([{"score": 9.0, "accuracy": 0.1}] + [{"score": 1.0, "accuracy": 0.5}] * 20)
    task = toy_tasks.numbers(evaluate=lambda model: next(figures))
    spec = spec_of(steps=12, checkpoint_every=3, evaluate="checkpoint", best="score(max)", keep_checkpoints=1)
    train(spec, task, alone, tmp_path)
    train(spec.replace(steps=18), task, alone, tmp_path)
    assert names(tmp_path) == ["step00000003.pt", "step00000018.pt"]
    train(spec.replace(steps=24, best="accuracy"), task, alone, tmp_path)
    assert names(tmp_path) == ["step00000021.pt", "step00000024.pt"]


@pytest.mark.parametrize(
    ("given", "value", "kept"),
    [
        (({"bits_per_byte": 3.0}, {"bits_per_byte": 2.0}, {"bits_per_byte": 4.0}), 2.0, 6),
        (({"accuracy": 0.5, "other": 1.0}, {"accuracy": 0.2, "other": 0.0}, {"accuracy": 0.4, "other": 2.0}), -0.5, 3),
        (({"accuracy": 0.5, "loss": 2.0}, {"accuracy": 0.2, "loss": 1.0}, {"accuracy": 0.4, "loss": 3.0}), 1.0, 6),
    ],
)
def test_without_a_name_the_best_has_the_best_figure_that_is_known(
    alone: Ranks, tmp_path: Path, given: tuple[dict[str, float], ...], value: float, kept: int
) -> None:
    figures = iter(given)
    spec = spec_of(steps=9, checkpoint_every=3, evaluate="checkpoint", keep_checkpoints=1)
    train(spec, toy_tasks.numbers(evaluate=lambda model: next(figures)), alone, tmp_path)
    last = Checkpoints(tmp_path, alone, 3).latest()
    assert last
    assert last[1]["best"] == (value, kept)


def test_the_direction_of_a_known_figure_is_known(alone: Ranks, tmp_path: Path) -> None:
    rows = "".join(f'{{"step": {step}, "figures": {{"accuracy": {value}}}}}\n' for step, value in enumerate((0.1, 0.2, 0.3), 1))
    (tmp_path / run_directory.EVALUATIONS).write_text(rows)
    assert not EarlyStop("accuracy(patience=1)", alone, tmp_path).after(3)
    assert EarlyStop("accuracy(patience=1, best=min)", alone, tmp_path).after(3)


def test_figures_of_one_kind_are_compared() -> None:
    best = BestFigure(None)
    assert best.of({"validation_loss": 0.4, "accuracy": 0.9}) == 0.4
    assert best.of({"accuracy": 0.9}) is None
