"""The program behind `workbench doctor`: what needs torch, as JSON; what fails is said and costs nothing else."""

import json
from pathlib import Path

import pytest

from workbench.core.machine_speeds import MachineSpeeds, Speed
from workbench.harness import measure_speeds
from workbench.harness.measure_speeds import GLOO, HOST
from workbench.programs import machine


def test_the_facts_are_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    made = {group: lambda group=group: {name: Speed(median=1e-6) for name in group} for group in (HOST, GLOO)}
    monkeypatch.setattr(machine, "HERE", made)
    monkeypatch.setattr("sys.argv", ["machine", "fresh"])
    machine.main()
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["gpus"] == []
    assert facts["gloo"] == {"here": "works"}
    assert set(MachineSpeeds.from_json(facts["speeds"]).speeds) == set(HOST + GLOO)
    assert all(rate > 0 for rate in facts["disk"].values())
    assert MachineSpeeds.load().get("dispatch") == 1e-6


def test_ranks_that_do_not_reach_each_other_are_said() -> None:
    alone = MachineSpeeds(machine=MachineSpeeds.load().machine, notes=("gloo, gloo_rate could not be measured: RuntimeError: no route",))
    assert machine.gloo_answer(alone) == {"trouble": "gloo, gloo_rate could not be measured: RuntimeError: no route"}
    assert machine.write_rate(Path("/nowhere")) is None
    assert set(measure_speeds.MEASURES) == set(machine.HERE)
