"""Speeds of a machine: kept per machine and versions, privately; damaged files are measured again; limits follow them within bounds."""

import json
import math
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.core.machine_speeds import FITTED_ON, MAX_SPREAD, MOST_SCALED, SPEEDS, Machine, MachineSpeeds, Speed, slowness


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    return Machine(host="h", cpu="Fast 9000", cores=8, python="3.12.1", torch="2.9.0", gpus=("NVIDIA H100",))


def speeds(here: Machine, **medians: float) -> MachineSpeeds:
    return MachineSpeeds(machine=here).with_measured({name: Speed(median=median, spread=0.1, blocks=9) for name, median in medians.items()})


def test_a_speed_is_the_median_of_its_blocks_with_their_spread() -> None:
    speed = Speed.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (speed.median, speed.blocks) == (3.0, 5)
    assert speed.spread == pytest.approx((52.0 - 1.5) / 3)
    assert speed.noisy
    assert Speed.of([2.0]) == Speed(median=2.0)
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="expected a positive number"):
            Speed(median=wrong)


def test_what_is_kept_is_read_back_and_only_this_user_may_read_it(here: Machine) -> None:
    assert MachineSpeeds.load(here) == MachineSpeeds(machine=here)
    mine = speeds(here, dispatch=3e-6, copy=1e10)
    assert mine.save() == ""
    assert MachineSpeeds.load(here) == mine
    assert MachineSpeeds.from_json(json.loads(json.dumps(mine.to_json()))) == mine
    assert stat.S_IMODE(here.file.stat().st_mode) == 0o600
    assert not list(here.file.parent.glob("*.new"))


@pytest.mark.parametrize("change", [{"torch": "2.10.0"}, {"python": "3.13"}, {"cpu": "Slow"}, {"cores": 4}, {"gpus": ()}])
def test_another_machine_or_version_has_its_own_file(here: Machine, change: dict[str, object]) -> None:
    speeds(here, dispatch=3e-6).save()
    other = replace(here, **change)
    assert other.file != here.file
    assert MachineSpeeds.load(other).speeds == {}
    assert MachineSpeeds.load(here).get("dispatch") == 3e-6


@pytest.mark.parametrize(
    "text", ["", "{", "7", "[]", "null", '{"machine": 1}', '{"machine": {"host": "h"}, "speeds": {"dispatch": {"median": -1}}}', "\udcff"]
)
def test_a_damaged_file_is_measured_anew_with_a_note(here: Machine, text: str) -> None:
    here.file.parent.mkdir(parents=True)
    here.file.write_text(text, errors="surrogateescape")
    kept = MachineSpeeds.load(here)
    assert kept.speeds == {}
    assert "could not be read" in kept.notes[0]
    assert "measured again" in str(kept)
    assert speeds(here, dispatch=3e-6).save() == ""
    assert MachineSpeeds.load(here).notes == ()


def test_a_file_of_another_machine_is_not_believed(here: Machine) -> None:
    other = speeds(replace(here, cpu="Slow"), dispatch=9e-6)
    here.file.parent.mkdir(parents=True)
    for text in (json.dumps(other.to_json()), json.dumps({**speeds(here).to_json(), "speeds": {"warp": {"median": 1.0}}})):
        here.file.write_text(text)
        kept = MachineSpeeds.load(here)
        assert kept.speeds == {}
        assert "another machine or version" in kept.notes[0]


def test_a_place_that_cannot_be_written_is_said(here: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "file"))
    assert "cannot be written" in speeds(here, dispatch=3e-6).save()


def test_limits_follow_the_machine_within_bounds(here: Machine) -> None:
    assert slowness(None, "dispatch") == 1
    assert MachineSpeeds(machine=here).slowness("dispatch") == 1
    assert speeds(here, dispatch=3 * FITTED_ON["dispatch"]).slowness("dispatch") == pytest.approx(3)
    assert speeds(here, copy=FITTED_ON["copy"] / 2).slowness("copy") == pytest.approx(2)
    assert speeds(here, dispatch=1.0).slowness("dispatch") == MOST_SCALED
    assert speeds(here, dispatch=1e-12).slowness("dispatch") == 1 / MOST_SCALED
    assert set(FITTED_ON) <= set(SPEEDS)


def test_what_is_too_noisy_is_not_used_and_gives_way_to_a_quieter_figure(here: Machine) -> None:
    noisy = Speed(median=9e-6, spread=MAX_SPREAD + 0.1)
    first = MachineSpeeds(machine=here).with_measured({"dispatch": noisy})
    assert first.get("dispatch") is None
    assert first.slowness("dispatch") == 1
    assert first.missing(["dispatch", "call"]) == ["dispatch", "call"]
    assert "too noisy" in str(first)
    assert first.with_measured({"dispatch": replace(noisy, spread=9.0)}).speeds["dispatch"] == noisy
    assert first.with_measured({"dispatch": Speed(median=2e-6)}).get("dispatch") == 2e-6
    with pytest.raises(ValueError, match="no speed 'warp'"):
        first.get("warp")


def test_the_table_has_units_and_says_by_what_limits_are_scaled(here: Machine) -> None:
    text = str(speeds(here, dispatch=4e-6, copy=2.0 * 2**30, gloo=1e-4))
    for words in ("Fast 9000, 8 cores", "4.00 µs", "2.00 GiB/s", "± 5", "2×", "100 µs"):
        assert words in text


def test_this_machine_is_described_without_torch(tmp_path: Path) -> None:
    gpus = tmp_path / "driver" / "nvidia" / "gpus"
    for number, model in enumerate(("NVIDIA H100", "NVIDIA L4")):
        (gpus / str(number)).mkdir(parents=True)
        (gpus / str(number) / "information").write_text(f"Model: \t\t {model}\nIRQ: 7\n")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast 9000\n")
    machine = Machine.here(tmp_path)
    assert (machine.cpu, machine.gpus) == ("Fast 9000", ("NVIDIA H100", "NVIDIA L4"))
    assert Machine.here(tmp_path / "none").gpus == ()
