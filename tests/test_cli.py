"""The terminal's way in."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.made import World
from workbench.__main__ import main
from workbench.diagnosis.analysis.diagnosis import Diagnosis

SCRIPT = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "with", sys.argv[1:])
"""


def test_a_script_with_ranks_and_arguments_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "workbench", "launch", "train.py", "--nproc-per-node", "2", "--", "--epochs", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    run_dir = next((tmp_path / "runs").iterdir())
    shown = subprocess.run([sys.executable, "-m", "workbench", "report", run_dir], capture_output=True, text=True, timeout=60)
    assert "nproc_per_node=2" in shown.stdout
    logs = "".join(path.read_text() for path in run_dir.glob("logs/*/*/*/stdout.log"))
    assert "rank 1 of 2 with ['--epochs', '1']" in logs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch", "nonsense"], "no such task"),
        (["launch", "missing.py"], "does not exist"),
        (["launch", "text-gpt", "--", "--epochs", "1"], "is a task, and takes no arguments of its own: --epochs 1"),
        (["launch", "train.py", "--steps", "5"], "--steps 5 with a script: its own arguments come after --"),
        (["launch", "text-gpt", "--steps", "0"], "steps=0"),
        (["report", "nowhere"], "is not a run directory"),
        (["diagnose", "nonsense"], "no such task"),
        (["diagnose", "missing.py"], "missing.py does not exist"),
        (["diagnose", "train.py", "--set", "lr=1"], "train.py is a script, which runs on one process here and has its own knobs (lr"),
        (
            ["diagnose", "text-gpt", "--set", "micro_batch"],
            "--set micro_batch: expected a knob and its value, such as --set micro_batch=16",
        ),
        (["diagnose", "text-gpt", "--set", "micro_bach=1"], "did you mean 'micro_batch'"),
        (["diagnose", "text-gpt", "--set", "precision=int3"], "precision='int3': allowed are"),
        (["diagnose", "text-gpt", "--nproc-per-node", "0"], "nproc_per_node=0: a whole number"),
        (["diagnose", "text-gpt", "--budget", "0"], "budget_s=0.0: seconds above 0"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_an_unknown_option_says_where_the_scripts_own_go(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "train.py", "--epochs", "1"])
    assert "what is meant for the script comes after --" in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("workbench.runs.launch.machine_report.probe_torch", lambda: {"gloo": {"here": "works"}})
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA GPUs" in out
    assert "problem, and how to fix it" in out
    assert main(["doctor", "--json"]) == 0
    assert {"name": "gloo smoke test", "here": "works", "trouble": "", "fix": ""} in json.loads(capsys.readouterr().out)["checks"]
    page = tmp_path / "doctor.html"
    assert main(["doctor", "--html", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert main(["doctor", "--html", str(tmp_path / "none" / "doctor.html")]) == 2


def test_a_diagnosis_as_json_is_its_brief(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = Diagnosis.of(World(cpu=0.03, bf16=0.6).evidence())
    monkeypatch.setattr("workbench.diagnose", lambda target, budget_s: diagnosis)
    assert main(["diagnose", "text-gpt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == diagnosis.brief()
