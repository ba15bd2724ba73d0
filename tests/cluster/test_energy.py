"""Energy: arithmetic by hand, counters that start again or stop, and what a run writes and says."""

import dataclasses
import json
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.cluster.analysis.collective_cost import CostError
from workbench.cluster.analysis.energy import NODE_WATTS, Energy, by_time, estimated, measured, watts_of
from workbench.cluster.analysis.plan.ranges import PlanError
from workbench.cluster.analysis.transformer import Transformer
from workbench.core import run_directory
from workbench.core.device import DEVICES
from workbench.core.energy_counters import EnergyLog, RaplCounter, energy_counters, record_energy, visible_gpus

amounts = st.floats(0, 1e12)


# --- arithmetic


def test_money_and_carbon_by_hand() -> None:
    used = Energy(joules=36e6, seconds=7200, gpus=8, measured=True, source="test", price=2.5, electricity=0.3, intensity=400, pue=1.2)
    assert used.kwh == pytest.approx(12)
    assert used.watts == pytest.approx(5000)
    assert used.gpu_hours == pytest.approx(16)
    assert used.money == pytest.approx(16 * 2.5 + 12 * 0.3)
    assert used.grams == pytest.approx(4800)
    assert Energy.from_json(json.loads(json.dumps(used.to_json()))) == used
    bare = dataclasses.replace(used, price=None, electricity=None, intensity=None)
    assert (bare.money, bare.grams) == (None, None)
    assert "money" not in str(bare)
    assert "12.0 kWh" in str(used)
    assert "43.6" in str(used)
    assert "measured" in used._repr_html_()
    assert used.to_frame()["kwh"][0] == used.kwh


@given(amounts, st.floats(1, 1e6), st.integers(1, 10_000), st.floats(0, 100), st.floats(0, 2000))
def test_twice_the_joules_are_twice_the_carbon(joules: float, seconds: float, gpus: int, price: float, intensity: float) -> None:
    one = Energy(joules=joules, seconds=seconds, gpus=gpus, measured=False, source="", price=price, intensity=intensity)
    two = dataclasses.replace(one, joules=2 * joules)
    assert one.grams is not None
    assert two.grams == pytest.approx(2 * one.grams)
    assert two.money == one.money == pytest.approx(gpus * seconds / 3600 * price)


def test_an_estimate_lies_between_the_busy_share_and_the_whole_node() -> None:
    found = estimated(3600, 16, "H100-SXM", utilization=0.5, node="DGX-H100", intensity=100)
    assert found.joules == 3600 * 16 * 700
    assert found.low == found.joules / 2
    assert found.high == pytest.approx(3600 * 2 * 10_200)
    assert not found.measured
    assert "estimated" in str(found)
    assert "between" in str(found)


def test_every_device_of_the_table_has_a_power_with_a_source() -> None:
    powers = [watts_of(device.name) for device in DEVICES]
    assert all(watts > 0 and source for watts, source in (*powers, *NODE_WATTS.values()))
    assert watts_of("mine", 12) == (12.0, "power as given")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Energy(joules=-1, seconds=1, gpus=1, measured=True, source=""), "joules of at least 0"),
        (lambda: Energy(joules=1, seconds=1, gpus=1, measured=True, source="", price=float("nan")), "money per device and hour"),
        (lambda: Energy(joules=1, seconds=1, gpus=1, measured=True, source="", pue=0.5), "1 or more"),
        (lambda: estimated(1, 1, "Mine"), "give watts="),
        (lambda: estimated(1, 1, "T4", utilization=2), "share from 0 to 1"),
        (lambda: watts_of("T4", -3), "above 0"),
        (lambda: by_time(seconds=1, ranks=1, device="cpu", utilization=1), "run.energy\\(watts=65\\)"),
        (lambda: measured({"joules": 3}, ranks=1), "not figures of energy"),
    ],
)
def test_what_is_refused(make: Any, words: str) -> None:
    with pytest.raises(CostError, match=words):
        make()


# --- counters


def zone(root: Path, name: str, label: str, value: float, most: float = 1e6) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for file, text in (("name", label), ("energy_uj", str(int(value))), ("max_energy_range_uj", str(int(most)))):
        (folder / file).write_text(text + "\n")
    return folder


def test_a_counter_that_starts_again_goes_on(tmp_path: Path) -> None:
    folder = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    meter = RaplCounter(folder)
    values = [meter.joules()]
    for value in (100_000, 800_000, 50_000):
        (folder / "energy_uj").write_text(str(value))
        values.append(meter.joules())
    assert values == pytest.approx([0.9, 1.1, 1.8, 2.05])


def test_packages_and_memory_are_read_and_what_is_inside_of_them_is_not(tmp_path: Path) -> None:
    for name, label in (("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core"), ("intel-rapl:0:1", "dram"), ("intel-rapl-mmio:0", "x")):
        zone(tmp_path, name, label, 5)
    zone(tmp_path, "intel-rapl:2", "psys", 5)  # the whole platform: the packages once more
    (zone(tmp_path, "intel-rapl:1", "package-1", 5) / "energy_uj").write_text("secret")
    assert [one.name for one in energy_counters(root=tmp_path)] == ["RAPL 0 package-0", "RAPL 0:1 dram"]
    assert energy_counters(root=tmp_path / "none") == []


def test_the_memory_of_every_socket_counts_and_one_that_starts_again(tmp_path: Path) -> None:
    folders = {}
    for socket in (0, 1):
        folders[f"{socket}"] = zone(tmp_path, f"intel-rapl:{socket}", f"package-{socket}", 0, most=1e9)
        folders[f"{socket}:0"] = zone(tmp_path, f"intel-rapl:{socket}:0", "dram", 50e6, most=60e6)
    log = EnergyLog(energy_counters(root=tmp_path), every=1000)
    for name, value in (("0", 100e6), ("1", 110e6), ("0:0", 58e6), ("1:0", 20e6)):  # the last has come round: 10 J, and 20 more
        (folders[name] / "energy_uj").write_text(str(int(value)))
    seen = log.close()
    assert seen["joules"] == pytest.approx({"RAPL 0 package-0": 100, "RAPL 0:0 dram": 8, "RAPL 1 package-1": 110, "RAPL 1:0 dram": 30})
    assert measured({**seen, "gpus": 0}, ranks=2).joules == pytest.approx(248)


class Counter:
    def __init__(self, name: str, values: list[float]) -> None:
        self.name, self._values = name, values

    def joules(self) -> float:
        if not self._values:
            raise OSError("gone")
        return self._values.pop(0)


def test_a_counter_that_stops_answering_is_left_out() -> None:
    log = EnergyLog([Counter("good", [10.0, 12.0, 15.0]), Counter("bad", [1.0, 2.0]), Counter("never", [])], every=1000)
    log.look()
    seen = log.close()
    assert seen["joules"] == {"good": 5.0}
    assert seen["seconds"] >= 0


def test_gpus_by_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = types.ModuleType("pynvml")
    counters = {"0": 1000.0, "GPU-b": 5000.0}
    fake.NVMLError = type("NVMLError", (Exception,), {})  # type: ignore[attr-defined]
    fake.nvmlInit = lambda: None  # type: ignore[attr-defined]
    fake.nvmlDeviceGetHandleByIndex = fake.nvmlDeviceGetHandleByUUID = str  # type: ignore[attr-defined]
    fake.nvmlDeviceGetTotalEnergyConsumption = lambda handle: counters[handle]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-b,2")
    found = energy_counters(2, root=tmp_path / "none")
    assert [one.name for one in found] == ["NVML GPU 0", "NVML GPU GPU-b"]
    log = EnergyLog(found, every=1000)
    counters.update({"0": 3000.0, "GPU-b": 5500.0})
    assert log.close()["joules"] == {"NVML GPU 0": 2.0, "NVML GPU GPU-b": 0.5}

    def refuse(handle: str) -> float:
        raise fake.NVMLError("not supported")

    fake.nvmlDeviceGetTotalEnergyConsumption = refuse  # type: ignore[attr-defined]
    assert energy_counters(1, root=tmp_path / "none") == []


def test_visible_gpus() -> None:
    assert visible_gpus(2, {}) == [0, 1]
    assert visible_gpus(1, {"CUDA_VISIBLE_DEVICES": "3,1"}) == [3]
    assert visible_gpus(2, {"CUDA_VISIBLE_DEVICES": " GPU-a , 2"}) == ["GPU-a", 2]
    assert visible_gpus(2, {"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "-1"}) == []


def test_steps_are_metered_by_the_first_rank_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.core.energy_counters.energy_counters", lambda gpus: [Counter("RAPL package-0", [1.0, 4.0, 4.0])])
    with record_energy(tmp_path, rank=1, gpus=0):
        pass
    assert not (tmp_path / run_directory.ENERGY).exists()
    with record_energy(tmp_path, rank=0, gpus=0):
        pass
    seen = run_directory.read_json(tmp_path / run_directory.ENERGY)
    assert seen["joules"] == {"RAPL package-0": 3.0}
    found = measured(seen, ranks=2, machines=2, intensity=100)
    assert found.measured
    assert found.joules == 6.0
    assert "taken 2 times" in found.source
    assert "GPUs did not tell" in measured({**seen, "gpus": 8}, ranks=8).source
    assert "lives" not in found.source
    with record_energy(tmp_path / "gone", rank=0, gpus=0):
        pass  # nowhere to write to: said, and no failure


def test_a_run_that_goes_on_adds_to_what_its_earlier_lives_have_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives = iter([[Counter("RAPL a", [1.0, 4.0, 4.0])], [Counter("RAPL a", [10.0, 12.0]), Counter("RAPL b", [0.0, 7.0])]])
    monkeypatch.setattr("workbench.core.energy_counters.energy_counters", lambda gpus: next(lives))
    for _ in range(2):
        with record_energy(tmp_path, rank=0, gpus=0):
            pass
    seen = run_directory.read_json(tmp_path / run_directory.ENERGY)
    assert (seen["joules"], seen["lives"]) == ({"RAPL a": 5.0, "RAPL b": 7.0}, 2)
    found = measured(seen, ranks=1)
    assert found.joules == 12.0
    assert "over the 2 lives of the run, what was computed twice included" in found.source


def test_a_life_that_is_killed_has_told_what_it_drew(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    heard = threading.Event()

    def tell(seen: dict[str, Any]) -> None:
        told.append(seen)
        heard.set()

    log = EnergyLog([Counter("good", [10.0, *[12.0] * 10_000])], every=0.001, tell=tell)
    assert heard.wait(60)  # before its end
    assert told[0]["joules"] == {"good": 2.0}
    log.close()


def test_a_damaged_file_of_an_earlier_life_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.core.energy_counters.energy_counters", lambda gpus: [Counter("RAPL a", [1.0, 4.0])])
    values = ("null", '"much"', "[]", "NaN", "1e999", "1" + 400 * "0")
    each = [f'{{"seconds": 1, "joules": {{"RAPL a": {value}}}, "gpus": 0}}' for value in values]
    for text in ("{", '{"joules": 3}', '{"seconds": null, "joules": {}}', '{"seconds": 1, "joules": {}, "lives": 1e999}', *each):
        (tmp_path / run_directory.ENERGY).write_text(text)
        with record_energy(tmp_path, rank=0, gpus=0):
            pass  # the end of a training that is done: it must not fail
        seen = run_directory.read_json(tmp_path / run_directory.ENERGY)
        assert (seen["joules"], seen["lives"]) == ({"RAPL a": 3.0}, 1)


# --- runs and plans


def run_of(path: Path, device: str) -> wb.Run:
    path.mkdir()
    spec = wb.RunSpec(task="text-gpt", nproc_per_node=2).to_json()
    info = {"format": 1, "id": "x", "name": "x", "created": 0.0, "spec": spec, "host": "h", "launch_dir": "."}
    run_directory.write_json(path / run_directory.RUN_JSON, {**info, "outcome": {"state": "finished", "seconds": 9.0}})
    phases = {"data_wait": 0.25, "h2d": 0.0, "forward": 0.25, "backward": 0.25, "optimizer": 0.25, "other": 0.0}
    head = {"rank": 0, "world_size": 2, "clock": "host", "pid": 1, "device": device}
    steps = [{"step": i, **phases, "samples": 4} for i in range(10)]
    (path / run_directory.rank_file(0)).write_text("".join(json.dumps(row) + "\n" for row in (head, *steps)))
    return wb.Run.load(path)


def test_a_run_that_was_counted_and_one_that_was_not(tmp_path: Path) -> None:
    run = run_of(tmp_path / "gpu", "NVIDIA H100 80GB HBM3")
    guessed = run.energy(price=2.0)
    assert not guessed.measured
    assert guessed.watts == pytest.approx(2 * 700)
    assert guessed.seconds == pytest.approx(sum(step.seconds for step in run.timelines[0].steps))
    run_directory.write_json(
        run.path / run_directory.ENERGY, {"seconds": 10.0, "joules": {"NVML GPU 0": 3000.0, "NVML GPU 1": 4000.0}, "gpus": 2}
    )
    told = wb.energy(run, price=2.0, intensity=500)
    assert told.measured
    assert told.joules == 7000
    assert told.money == pytest.approx(2 * 10 / 3600 * 2.0)
    assert told.grams == pytest.approx(7000 / 3.6e6 * 500)
    own = wb.energy(run, watts=100)
    assert not own.measured
    assert own.watts == pytest.approx(200)
    with pytest.raises(PlanError, match="steps are of a plan"):
        wb.energy(run, steps=3)
    with pytest.raises(CostError, match="CPUs whose counters"):
        run_of(tmp_path / "cpu", "cpu").energy()


def test_a_plan_is_asked_in_the_same_way() -> None:
    plans = wb.plan(Transformer(layers=8, hidden=512, vocabulary=1000, sequence=512), "DGX-A100", gpus=8, global_batch=64, steps=100)
    asked = wb.energy(plans, steps=200, price=3.0, intensity=50)
    known = plans.best.energy
    assert known is not None
    assert asked.joules == pytest.approx(2 * known.joules)
    assert asked.money == pytest.approx(8 * asked.seconds / 3600 * 3.0)
    assert wb.energy(plans.best, watts=10).watts == pytest.approx(80)
    with pytest.raises(PlanError, match="expected a Run, a Plan or Plans"):
        wb.energy(3)  # type: ignore[arg-type]


def test_a_plan_keeps_its_prices_and_its_node_whatever_is_asked() -> None:
    model = Transformer(layers=8, hidden=512, vocabulary=1000, sequence=512)
    inputs: dict[str, float] = {"price": 2.0, "electricity": 5.0, "intensity": 300, "pue": 1.2}
    plan = wb.plan(model, "DGX-A100", gpus=8, global_batch=64, steps=100, **inputs).best  # type: ignore[arg-type]
    known, asked = plan.energy, wb.energy(plan, watts=500)
    assert known is not None
    assert wb.energy(plan) == known
    for name, value in inputs.items():
        assert getattr(asked, name) == value
    assert asked.money == pytest.approx(8 * asked.seconds / 3600 * 2.0 + asked.kwh * 5.0)
    assert asked.watts == pytest.approx(4000)
    assert asked.high == known.high == pytest.approx(100 * plan.seconds.high * 6500)  # what the whole node draws, all through
    assert wb.energy(plan, price=None, electricity=None).money is None
    given = wb.plan(model, "DGX-A100", gpus=8, global_batch=64, watts=300).best
    assert wb.energy(given, steps=10).watts == pytest.approx(2400)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"steps": -1}, "steps=-1: a whole number of at least 1 is allowed, or None for the 1,000"),
        ({"steps": "x"}, "steps='x': a whole number"),
        ({"steps": True}, "steps=True: a whole number"),
        ({"prise": 1}, r"prise=1: allowed are price, electricity, intensity, pue, watts; did you mean price\?"),
        ({"pue": "a"}, "pue='a': expected a number, such as pue=1.2"),
        ({"pue": None}, "pue=None: expected a number"),
        ({"watts": "500"}, "watts='500': expected a number"),
        ({"watts": -5}, "above 0"),
    ],
)
def test_what_is_refused_of_a_plan(inputs: dict[str, Any], words: str) -> None:
    model = Transformer(layers=8, hidden=512, vocabulary=1000, sequence=512)
    with pytest.raises(ValueError, match=words):
        wb.energy(wb.plan(model, "DGX-A100", gpus=8, global_batch=64), **inputs)


def test_what_is_refused_of_a_run(tmp_path: Path) -> None:
    run = run_of(tmp_path / "gpu", "NVIDIA H100 80GB HBM3")
    with pytest.raises(PlanError, match="did you mean price"):
        wb.energy(run, prise=1)
    with pytest.raises(PlanError, match="pue='a'"):
        wb.energy(run, pue="a")
