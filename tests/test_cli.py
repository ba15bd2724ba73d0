"""The terminal's way in."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import workbench as wb
from tests.conftest import HandMade
from tests.made import World
from tests.planted_gap import planted
from tests.traced import on_cpu, write
from workbench.__main__ import COMMANDS, main
from workbench.core import progress
from workbench.core.brief import BRIEF_BYTES
from workbench.core.interrupts import Terminated
from workbench.core.vocabulary import PHASES
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.remedy import Remedy
from workbench.diagnosis.analysis.why_not_linear import WhyNotLinear
from workbench.runs.run import Run
from workbench.runs.spec import KNOBS, RunSpec

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
        (["diagnose", r"C:\Users\me\train.py"], "a path of this machine has / where yours has"),
        (["diagnose", f"{Path(__file__).parent}/test_cli.p"], f'did you mean "{Path(__file__)}"?'),
        (
            ["diagnose", "train.py", "--set", "lr=1"],
            "--set lr=1 with a script: for a script it takes threads and nproc_per_node. A script's own options come after --: workbench "
            "diagnose train.py -- --your-option value",
        ),
        (["diagnose", "missing.py", "--set", "threads=2"], "missing.py does not exist"),
        (["diagnose", "missing.py", "--nproc-per-node", "2"], "missing.py does not exist"),
        (
            ["diagnose", "text-gpt", "--set", "micro_batch"],
            "--set micro_batch: expected a knob and its value, such as --set micro_batch=16",
        ),
        (["diagnose", "text-gpt", "--set", "micro_bach=1"], "did you mean 'micro_batch'"),
        (["launch", "text-gpt", "--set", "args=1"], "args"),
        (["launch", "train.py", "--set", "watch=False"], "--set watch=False with a script: for a script it takes threads and profile."),
        (["launch", "train.py", "--set", "thread=3"], "did you mean 'threads'?"),
        (["launch", "train.py", "--set", "micro_batch=3"], "after --: workbench launch train.py -- --your-option value"),
        (["runs", "nowhere"], "nowhere is not a folder; runs are in the folder runs where they were launched"),
        (["estimate-time", "text-gpt", "--device", "cpu"], "CPUs have no datasheet whose shares are known. Measure one step"),
        (["batch-lengths", "text-gpt", "--device", "H10"], "unknown device 'H10'"),
        (
            ["estimate-time", "text-gpt", "--device", "H100", "--measured", "fast"],
            "--measured fast: expected seconds of a step, or the dir",
        ),
        (["plan", "text-gpt", "--cluster", "DGX-H1000"], "--cluster='DGX-H1000': allowed are 'DGX-A100', 'DGX-H100', "),
        (["diagnose", "text-gpt", "--set", "precision=int3"], "precision='int3': allowed are"),
        (["diagnose", "text-gpt", "--nproc-per-node", "0"], "nproc_per_node=0: a whole number"),
        (["why-not-linear", "text-gpt", "--nproc-per-node", "0"], "nproc_per_node=0: a whole number"),
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


@pytest.mark.parametrize("command", ["diagnose", "sanity", "why-not-linear", "estimate"])
def test_nothing_is_said_to_begin_for_a_task_that_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORKBENCH_PROGRESS", raising=False)
    assert main([command, "nope.py:build"]) == 2
    assert capsys.readouterr().err == (
        f"workbench: task='nope.py:build': there is no file {tmp_path}/nope.py; the folder has no .py file\n"
    )


def test_an_unknown_option_says_where_the_scripts_own_go(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "train.py", "--epochs", "1"])
    said = capsys.readouterr().err
    assert "what is meant for the script comes after --" in said
    assert said.startswith("workbench launch: error: "), "the reason, without the usage before it"
    assert said.endswith("\nAll options: workbench launch --help\n")


def test_a_knob_for_a_script_names_the_scripts_own_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text('parser.add_argument("-e", "--epochs")\nparser.add_argument(\n    "--workers", type=int)\n')
    for command in ("launch", "diagnose", "why-not-linear"):
        assert main([command, str(script), "--set", "num_workers=2"]) == 2
        assert f"come after --: workbench {command} {script} -- --workers 2\n" in capsys.readouterr().err
    for options, own in (
        (("num-epochs", "workers"), "--workers 2"),
        (("eval-workers", "workers", "max-workers-of-the-cache"), "--workers 2"),
        (("num-epochs", "num-wrokers"), "--num-wrokers 2"),
        (("num-epochs", "max-steps"), "--your-option value"),
    ):
        script.write_text("".join(f'parser.add_argument("--{each}")\n' for each in options))
        assert main(["launch", str(script), "--set", "num_workers=2"]) == 2
        assert capsys.readouterr().err.endswith(f"{script} -- {own}\n")


def test_a_scripts_own_options_reach_it_also_in_a_diagnosis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    got = []

    def launch(script: str, args: Sequence[str], **_: object) -> NoReturn:
        got.append((script, list(args)))
        raise ValueError("enough")

    monkeypatch.setattr("workbench.diagnosis.api.launch", launch)
    assert main(["diagnose", "train.py", "--", "--epochs", "1"]) == 2
    assert got == [("train.py", ["--epochs", "1"])]
    for option in ("--data", "--text"):
        assert f"workbench diagnose train.py -- {option} x" in refused(["diagnose", "train.py", option, "x"], capsys)
    assert main(["diagnose", "text-gpt", "--", "--epochs", "1"]) == 2
    assert "what comes after -- is for a script, and there is none here: --epochs 1" in capsys.readouterr().err


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
    assert main(["doctor", "--set", "num_workers=2"]) == 2
    assert "workbench doctor my_task.py:build --set num_workers=2" in capsys.readouterr().err


LOADERS = """
import torch
import workbench as wb
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

def loader():
    return DataLoader(torch.zeros(9, 3), 2, sampler=DistributedSampler(range(9), 2, 0))

def neither():
    return torch.zeros(9, 3)

def task():
    return wb.Task(model=lambda: torch.nn.Linear(3, 1), dataset=lambda: torch.zeros(9, 3), loss=lambda model, x: model(x).mean())
"""


def test_doctor_of_a_loader(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("workbench.runs.launch.machine_report.probe_torch", lambda: {"gloo": {"here": "works"}})
    monkeypatch.delenv("WORKBENCH_PROGRESS", raising=False)
    file, page = tmp_path / "my_loaders.py", tmp_path / "doctor.html"
    file.write_text(LOADERS)
    assert main(["doctor", f"{file}:loader", "--html", str(page)]) == 1  # DistributedSampler gives a sample twice
    assert "the sampler repeats 1 of 9 samples" in page.read_text()
    assert main(["doctor", f"{file}:loader"]) == 1
    out = capsys.readouterr().out
    assert "NVIDIA GPUs" in out
    assert "call loader.sampler.set_epoch(epoch)" in out
    assert main(["doctor", f"{file}:task", "--set", "micro_batch=4", "nproc_per_node=2", "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["loader"]["target"] == "DataLoader of Tensor, batch_size=4, num_workers=0"
    assert found["checks"]
    assert f"workbench: looking at the loader of {file}:task" in said.err
    for words, why in (
        ([f"{file}:task", "--set", "micro_batch=auto"], "give a number, such as --set micro_batch=16"),
        ([f"{file}:neither"], "neither returned a Tensor; expected a wb.Task, or a torch.utils.data.DataLoader"),
        ([f"{file}:loader", "--set", "num_workers=2"], "returns a DataLoader, which has its own knobs (num_workers are given)"),
        ([f"{file}:task", "--set", "micro_batch=64"], "the dataset has 9: try micro_batch=9"),
        ([f"{file}:gone"], "has no function 'gone'"),
        ([str(file)], "but a file. Name the function in it"),
    ):
        assert main(["doctor", *words]) == 2
        assert why in capsys.readouterr().err


def test_a_diagnosis_as_json_is_its_brief(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = Diagnosis.of(World(cpu=0.03, bf16=0.6).evidence())
    monkeypatch.setattr("workbench.diagnosis.commands.diagnose", lambda target, args, budget_s: diagnosis)
    assert main(["diagnose", "text-gpt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == diagnosis.brief()

    def fails(*_: object, **__: object) -> NoReturn:
        raise ValueError("it is out of memory")

    diagnosis.spec = wb.RunSpec(task="text-gpt")
    monkeypatch.setattr(Diagnosis, "prove", fails)
    assert main(["diagnose", "text-gpt", "--json", "--prove"]) == 2
    assert json.loads(capsys.readouterr().out) == diagnosis.brief() | {"proof_failed": "it is out of memory"}


def test_what_is_proved_instead_of_the_first_remedy_is_said_before(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Diagnosis.of(World(cpu=0.03, bf16=0.6).evidence(), spec=wb.RunSpec(task="text-gpt"))
    values = {"what": "Do it.", "formula": "f", "high": 2.7}
    mine = Remedy(name="faster collate_fn", speedup=2.7, low=1.0, ceiling=True, **values)  # type: ignore[arg-type]
    fused = Remedy(name="optimizer=fused", change={"optimizer": "fused"}, speedup=1.05, low=1.0, scope="part", **values)  # type: ignore[arg-type]
    found.remedies = (mine, fused)
    monkeypatch.setattr("workbench.diagnosis.commands.diagnose", lambda *_, **__: found)
    monkeypatch.setattr(Diagnosis, "prove", lambda self, which, *, budget_s: f"proof of {which.name}")
    assert main(["diagnose", "text-gpt", "--prove"]) == 0
    said = capsys.readouterr().out
    assert "`workbench diagnose text-gpt --prove` runs" not in said, "it is what runs"
    assert "prove(2)" not in said
    assert said.endswith(f"\n\n{found.choice}\n\nproof of optimizer=fused\n")


def test_the_change_that_is_proved_can_be_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = Diagnosis.of(World(cpu=0.03, bf16=0.6).evidence(), spec=wb.RunSpec(task="text-gpt"))
    monkeypatch.setattr("workbench.diagnosis.commands.diagnose", lambda *_, **__: found)
    proved: list[Any] = []

    def prove(self: Diagnosis, which: Any, *, budget_s: float) -> str:
        proved.append(self.remedy(which).change)
        return f"proof of {self.remedy(which).name}"

    monkeypatch.setattr(Diagnosis, "prove", prove)
    assert main(["diagnose", "text-gpt", "--remedy", "precision=amp_bf16"]) == 0
    assert capsys.readouterr().out.endswith("\n\nproof of precision=amp_bf16\n")
    assert main(["diagnose", "text-gpt", "--remedy", "num_workers=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["claim"]["verdict"] == found.verdict
    assert proved == [{"precision": "amp_bf16"}, {"num_workers": 3}]
    assert main(["diagnose", "text-gpt", "--remedy", "num_worker=3"]) == 2
    assert "did you mean 'num_workers'" in capsys.readouterr().err
    assert len(proved) == 2


def test_a_folder_without_runs_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by_hand: Callable[..., HandMade]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == main(["runs", "--json"]) == 0
    assert capsys.readouterr().out == "no runs here yet; start one with: workbench launch train.py\n[]\n"
    run = by_hand().ended("finished").path
    assert main(["check", str(run), "--budgets", "nowhere.toml"]) == 2
    assert "nowhere.toml does not exist; expected a TOML file with lines such as step =" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("threads", "ranks", "said"), [(64, 1, "threads=64 on 2 cores"), (2, 2, "threads=2 in each of 2 ranks"), (1, 4, ""), (2, 1, "")]
)
def test_a_launch_says_that_its_threads_are_more_than_the_cores(
    by_hand: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], threads: int, ranks: int, said: str
) -> None:
    made = by_hand(spec=RunSpec(task="text-gpt", threads=threads, nproc_per_node=ranks).to_json(), cores=2).steps(20).ended("finished")
    monkeypatch.setattr("workbench.launch", lambda **options: Run.load(made.path))
    assert main(["launch", "text-gpt", "--set", f"threads={threads}"]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(notes) == bool(said)
    assert said in "".join(notes)


def test_sigterm_ends_a_launch_as_ctrl_c_does_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by_hand: Callable[..., HandMade]
) -> None:
    made = by_hand().steps(7).alive()
    monkeypatch.setattr("workbench.launch", lambda **options: Run.load(made.path))
    monkeypatch.setattr(Run, "stop", lambda self: made.ended("stopped"))
    monkeypatch.setattr("workbench.runs.run.time.sleep", lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert main(["launch", "text-gpt"]) == 143
    said = capsys.readouterr().err
    assert said.startswith("workbench: stopped by SIGTERM: Run('by-hand', nproc_per_node=2): stopped · 7 of 20 steps")
    assert said.endswith(f"\nwhat it measured: workbench report {made.path}\nto delete it: rm -r {made.path}\n")
    monkeypatch.setattr("workbench.runs.run.time.sleep", lambda seconds: os.kill(os.getpid(), signal.SIGINT))
    other = by_hand().steps(7).alive()
    monkeypatch.setattr(Run, "stop", lambda self: other.ended("stopped"))
    with pytest.raises(KeyboardInterrupt, match="stopped by Ctrl-C: Run"):
        Run.load(other.path).wait()
    assert signal.getsignal(signal.SIGTERM) == before


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(words)
    return capsys.readouterr().err


def test_no_command_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "report what this machine has" in capsys.readouterr().err


def test_a_misspelt_command_or_option_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["launch", "--nproc-per-node", "two", "train.py"], capsys)
    assert "--nproc-per-node: 'two' is not a whole number\nExample: workbench launch train.py" in said
    assert "no command 'diagnos': did you mean 'diagnose'? the commands are lab, doctor, launch" in refused(["diagnos", "train.py"], capsys)
    assert "unknown arguments: --buget 3 (did you mean '--budget'?)" in refused(["diagnose", "train.py", "--buget", "3"], capsys)
    assert "did you mean '--nproc-per-node'?" in refused(["launch", "train.py", "--nproc-per-nodes=2"], capsys)
    assert "knobs are turned with --set" in refused(["estimate", "text-gpt", "--hidden", "64"], capsys)
    two = refused(["diagnose", "runs/a", "runs/b"], capsys)
    assert "one target is allowed, two were given: runs/b is too much; workbench compare takes several runs" in two
    assert "unknown" not in two
    assert "one path is allowed, three were given: b c is too much" in refused(["trace", "a", "b", "c"], capsys)
    assert "what is meant for the script comes after --" in refused(["launch", "train.py", "data"], capsys)
    assert "runs has --help, --filter, --sort" in refused(["runs", "--verbose"], capsys)


def test_every_command_says_what_it_does_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name, (about, more, example) in COMMANDS.items():
        if name != "lab":
            with pytest.raises(SystemExit):
                main([name, "--help"])
            shown = " ".join(capsys.readouterr().out.split())
            assert about[1:] in shown
            assert more in shown
            assert shown.endswith(f"example: {example}")


def test_an_unknown_device_gets_short_advice_for_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "text-gpt", "--device", "RTX5090Ti"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'RTX-5090'? Known GPUs of that series are RTX-PRO-6000" in said
    assert "H100" not in said
    assert "Device(" not in said


def test_lab_opens_the_current_folder_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr("subprocess.call", lambda words: (called.append(words), 0)[1])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'training-workbench[notebooks]'" in refused(["lab"], capsys)
    assert not called
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["lab", "--no-browser"]) == 0
    assert called.pop() == [sys.executable, "-m", "jupyterlab", "--no-browser"]
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert main(["lab", "--no-browser"]) == 0
    assert called.pop() == [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    assert "you are root, so JupyterLab gets --allow-root" in capsys.readouterr().err
    assert main(["lab", "--allow-root"]) == 0
    assert called.pop() == [sys.executable, "-m", "jupyterlab", "--allow-root"]
    assert capsys.readouterr().err == ""
    assert main(["lab", "--help"]) == 0
    assert called.pop() == [sys.executable, "-m", "jupyterlab", "--help"]
    assert capsys.readouterr().out.splitlines() == [
        f"workbench lab opens JupyterLab in the current folder, {Path.cwd()}.",
        "Its options are JupyterLab's own, and are passed on. JupyterLab's help:",
    ]


def test_what_launch_hands_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by_hand: Callable[..., HandMade]
) -> None:
    given = list[dict[str, object]]()
    run = Run.load(by_hand().steps(20).losses(20).ended("finished").path)
    monkeypatch.setattr("workbench.launch", lambda **options: (given.append(options), run)[1])
    assert main(["launch", "train.py", "--set", "threads=2", "--profile", "--json", "--", "--epochs", "1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["state"], facts["steps_done"], facts["spec"]["task"]) == ("finished", 20, "clipart-resnet")
    assert facts["ranks"][0]["step"] == pytest.approx(sum(facts["ranks"][0][phase] for phase in PHASES))
    assert {"threads": 2, "profile": 5, "args": ["--epochs", "1"], "watch": True}.items() <= given[0].items()
    log = run.path / "logs/x/attempt_0/0/stdout.log"
    log.parent.mkdir(parents=True)
    log.write_text("epoch 1\n")
    main(["launch", "text-gpt", "--set", "nproc_per_node=2", "micro_batch=4"])
    assert f"what it printed: {log} (rank 0; the others beside it)\n" in capsys.readouterr().out
    spec = given[1]["target"]
    assert (spec.nproc_per_node, spec.micro_batch, spec.steps) == (2, 4, 60)
    assert given[1]["nproc_per_node"] is given[1]["nnodes"] is None, "else they count, and not --set"
    assert "watch" not in given[1]
    for target, alarm in (("train.py", "trace"), ("text-gpt", "always")):
        main(["launch", target, "--watch", alarm])
        assert given[-1]["watch"] == alarm


def test_launch_goes_on_with_a_run_or_begins_with_a_directory_of_dcp(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by_hand: Callable[..., HandMade], tmp_path: Path
) -> None:
    given = list[dict[str, Any]]()
    spec = RunSpec(task="text-gpt", nproc_per_node=2, micro_batch=4, checkpoint_every=5)
    run = Run.load(by_hand(spec=spec.to_json()).steps(20).losses(20).ended("finished").path)
    monkeypatch.setattr("workbench.launch", lambda **options: (given.append(options), run)[1])
    monkeypatch.delenv(progress.ENV)
    main(["launch", "--resume", str(run.path)])
    assert f"{run.path} goes on in {run.path}" in capsys.readouterr().err
    main(["launch", "--resume", str(run.path), "--nproc-per-node", "1", "--set", "micro_batch=8"])
    assert [each["resume"] for each in given] == [str(run.path)] * 2
    assert [each["target"] for each in given] == [None, spec.replace(nproc_per_node=1, micro_batch=8)]
    assert all(each["nproc_per_node"] is None for each in given), "a launch that goes on takes it in the spec alone"
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    main(["launch", "text-gpt", "--resume", str(tmp_path / "dcp"), "--set", "checkpoint_every=5"])
    assert given[-1]["resume"] == str(tmp_path / "dcp")
    assert given[-1]["target"] == RunSpec(task="text-gpt", steps=60, checkpoint_every=5)
    capsys.readouterr()
    for words, said in (
        (["text-gpt", "--resume", str(run.path)], "text-gpt with --resume: a run goes on with its own task; leave text-gpt out"),
        (["--resume", str(tmp_path / "dcp")], "is of torch.distributed.checkpoint, and does not say what to train: workbench launch TASK"),
        (
            ["text-gpt", "--resume", str(tmp_path)],
            "neither the directory of a run, with a run.json, nor one of torch.distributed.checkpoint",
        ),
        (["--resume", str(run.path), "--", "--epochs", "1"], "takes no arguments of its own: --epochs 1"),
    ):
        assert main(["launch", *words]) == 2
        assert said in capsys.readouterr().err
    assert "a script, a task or --resume is needed" in refused(["launch"], capsys)
    assert "what is meant for the script comes after --: workbench launch train.py -- --epochs=1" in refused(
        ["launch", "--epochs=1"], capsys
    )


def test_the_examples_about_runs_and_traces_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by_hand: Callable[..., HandMade]
) -> None:
    """Those that only read."""
    monkeypatch.chdir(tmp_path)
    before = by_hand(spec=RunSpec(task="text-gpt", micro_batch=16).to_json()).steps(20).losses(20).ended("finished").path
    after = by_hand(spec=RunSpec(task="text-gpt", micro_batch=32).to_json()).steps(20).losses(20).ended("finished").path
    for path, name in ((before, "before"), (after, "after"), (before, "before2"), (after, "after2"), (after, "2026-01-31T12-00-00-train")):
        (tmp_path / "runs" / name).symlink_to(path)
    (tmp_path / "budgets.toml").write_text('step = "+50 %"\n')
    write(tmp_path / "trace.json.gz", on_cpu())

    def shown(command: str, *more: str) -> str:
        assert main([*shlex.split(COMMANDS[command][2])[1:], *more]) == 0
        return capsys.readouterr().out

    assert "micro_batch=32" in shown("compare")
    assert [row["speedup"] for row in json.loads(shown("compare", "--json"))] == [1.0, 1.0]
    assert "the two differ in micro_batch=32 beside 16" in shown("check")
    assert json.loads(shown("check", "--json"))["differences"] == "micro_batch=32 beside 16"
    assert "Where the traced step goes" in shown("trace", "--operators")
    parts = json.loads(shown("trace", "--json"))
    assert parts["breakdown"]["steps"]
    assert "finished" in shown("report")
    assert json.loads(shown("report", "--json"))["state"] == "finished"
    assert shown("health") == "nothing wrong in 20 losses\n"
    brief = json.loads(shown("health", "--json"))
    assert (brief["ok"], brief["looked"], brief["losses"], brief["faults"]) == (True, True, 20, [])
    assert main(["replay", str(before), "--json"]) == 2  # no loss of it stands out
    assert "no loss stands out among its 20 steps" in capsys.readouterr().err
    assert "0 of" in shown("runs")
    assert main(["runs", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 7


def test_a_proof_of_a_resume_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["prove-resume", "fashion-mlp", "--kills", "1", "--set", "steps=8", "num_workers=0", "--json"]) == 0
    brief = json.loads(capsys.readouterr().out)
    assert (brief["ok"], brief["steps"], len(brief["kills"])) == (True, 8, 1)
    assert brief["answer"].startswith("Exact: killed 1 time in 8 steps on 1 rank")
    assert main(["prove-resume", "train.py"]) == 2
    assert "train.py" in capsys.readouterr().err


def test_the_examples_that_predict_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stderr, "isatty", lambda: True)
        assert main(shlex.split(COMMANDS["estimate"][2])[1:]) == 0
    said = capsys.readouterr()
    assert "fits" in said.out
    assert "some seconds" in said.err  # nobody waits in silence
    assert main([*shlex.split(COMMANDS["estimate"][2])[1:], "--json"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.encode()) <= 2 * 1024, "what a program or an agent has to read"
    told = json.loads(printed)
    assert told["fits"] is True
    assert 0 < told["memory"]["parameters"] < told["memory"]["allocated"] < told["memory"]["device_used"]
    assert main([*shlex.split(COMMANDS["estimate-time"][2])[1:], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["device"] == "H100-SXM"
    assert 0 < answer["seconds"]["low"] < answer["seconds"]["mid"] < answer["seconds"]["high"]
    assert main([*shlex.split(COMMANDS["batch-lengths"][2])[1:], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["first_over"], answer["steps"], answer["unit"], answer["proof"]) == (None, 50, "tokens", None)
    assert [plan["name"] for plan in answer["plans"]] == ["as it is", "bucketed", "packed"]
    assert main(["estimate", "text-gpt", "--device", "H100", "--ladder", "--max-batch"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("fits H100-SXM") == 2, "once for the step as it is, once for the largest batch"
    assert "\nIt fits H100-SXM as it is, with " in printed
    assert "\nmicro_batch=" in printed
    assert main(["estimate", "text-gpt", "--device", "cpu", "--max-batch"]) == 0
    assert "main memory" in capsys.readouterr().out
    assert main(["batch-lengths", "text-gpt", "--device", "cpu", "--capacity", "1000", "--steps", "2"]) == 1
    assert "step 1 will run out of memory" in capsys.readouterr().out
    assert main([*shlex.split(COMMANDS["plan"][2])[1:], "--json"]) == 0
    brief = json.loads(capsys.readouterr().out)
    assert (brief["plans"][0]["gpus"], brief["plans"][0]["fits"]) == (8, "yes")
    assert brief["next"]["command"].startswith("workbench launch clipart-resnet --set micro_batch=")
    assert len(json.dumps(brief, ensure_ascii=False).encode()) <= BRIEF_BYTES


def test_why_not_linear_prints_the_answer_and_proves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def answer(target: object, **options: object) -> WhyNotLinear:
        asked.append((target, options))
        assert callable(signal.getsignal(signal.SIGTERM))
        with pytest.raises(Terminated):  # else what it has launched would stay behind
            signal.raise_signal(signal.SIGTERM)
        return WhyNotLinear(evidence=planted(reduction=0.01), spec=target if isinstance(target, RunSpec) else None)

    monkeypatch.setattr("workbench.diagnosis.commands.why_not_linear", answer)
    assert main(["why-not-linear", "text-gpt", "--json", "--set", "micro_batch=8"]) == 0
    brief = json.loads(capsys.readouterr().out)
    assert brief["claim"]["cause"] == "large gradients"
    assert asked[0][0] == RunSpec(task="text-gpt", nproc_per_node=2, micro_batch=8)
    assert main(["why-not-linear", "train.py", "--nproc-per-node", "4"]) == 0
    assert asked[1] == ("train.py", {"args": [], "nproc_per_node": 4, "budget_s": 60.0})
    assert "what you get" in capsys.readouterr().out
    assert main(["why-not-linear", "train.py", "--prove"]) == 0
    assert "None of these can be tried from here" in capsys.readouterr().out
    assert main(["why-not-linear", "train.py", "--set", "lr=1"]) == 2
    assert "it is for tasks, such as my_task.py:build" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("give prove a larger budget_s"), 2), (KeyboardInterrupt("prove was stopped by Ctrl-C"), 130)]
)
def test_an_answer_is_printed_though_its_proof_fails(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: WhyNotLinear, *_: object, **__: object) -> NoReturn:
        printed.append(capsys.readouterr().out)
        raise error

    printed: list[str] = []
    answer = WhyNotLinear(evidence=planted(reduction=0.01), spec=RunSpec(task="text-gpt", nproc_per_node=2))
    monkeypatch.setattr("workbench.diagnosis.commands.why_not_linear", lambda *_, **__: answer)
    monkeypatch.setattr(WhyNotLinear, "prove", fails)
    assert main(["why-not-linear", "text-gpt", "--prove"]) == status
    assert "what you get" in printed[0], "before the proof begins"
    assert str(error) in capsys.readouterr().err
    assert main(["why-not-linear", "text-gpt", "--prove", "--json"]) == status
    shown = capsys.readouterr()
    assert str(error) in shown.err
    assert json.loads(shown.out) == answer.brief() | {"proof_failed": str(error)}
    error.args = ("long " * 1000,)
    main(["why-not-linear", "text-gpt", "--prove", "--json"])
    assert len(capsys.readouterr().out.encode()) <= 2001


def test_an_interrupt_ends_every_command_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt(*said)

    for said in (("prove was stopped by Ctrl-C after 2 pairs",), ()):
        monkeypatch.setattr("workbench.sanity", interrupt)
        assert main(["sanity", "text-gpt"]) == 130
        assert capsys.readouterr().err == f"workbench: {said[0] if said else 'interrupted'}\n"


def test_an_interrupt_while_the_command_line_is_loaded_shows_no_traceback() -> None:
    """A module that all commands import is interrupted as it is imported."""
    code = """
import sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "workbench.runs.commands":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from workbench.__main__ import main
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


def test_what_of_a_script_cannot_be_proved_says_what_to_do(by_hand: Callable[..., HandMade], capsys: pytest.CaptureFixture[str]) -> None:
    run = by_hand(spec={"kind": "script", "script": "/home/me/train.py"}).steps(60).ended("finished").path
    assert main(["diagnose", str(run), "--prove"]) == 0
    assert capsys.readouterr().out.endswith("in the same file; then: workbench diagnose /home/me/train.py:build --prove\n")


def test_the_help_names_the_default_of_its_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command, seconds in (("bisect", 1800), ("check", 60)):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"seconds that the trainings may take ({seconds})" in " ".join(capsys.readouterr().out.split())


def test_the_help_of_launch_lists_the_knobs_with_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    shown = capsys.readouterr().out
    assert "\n  threads (1): Threads of each rank for one operator on the CPU (OMP_NUM_THREADS).\n" in shown
    assert [name for name in list(KNOBS)[1:] if f"\n  {name} (" not in shown] == []


@pytest.mark.parametrize("command", ["launch", "diagnose", "why-not-linear"])
def test_the_help_says_where_options_of_a_script_go(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usage = capsys.readouterr().out.partition("\n\n")[0]
    assert usage.startswith(f"usage: workbench {command} [-h]")
    assert usage.endswith("[-- OPTIONS OF THE SCRIPT …]")


def test_flags_are_taken_with_underscores_as_torchrun_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "missing.py", "--nproc_per_node=2", "--on_hang", "report"]) != 0
    said = capsys.readouterr().err
    assert "does not exist" in said
    assert "unknown" not in said


def test_a_report_says_where_it_is_and_what_is_no_run_directory(
    by_hand: Callable[..., HandMade], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = by_hand().steps(20).ended("finished")
    page = tmp_path / "run.html"
    assert main(["report", str(made.path), "--html", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    assert str(wb.report(made.path)) == str(wb.report(wb.Run.load(made.path)))
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["report", str(script)]) != 0
    assert "is not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("remedies", "said"), [((SimpleNamespace(provable=False),), "None of these can be tried from here"), ((), "nothing to prove")]
)
def test_a_proof_that_cannot_be_made_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], remedies: tuple[Any, ...], said: str
) -> None:
    monkeypatch.setattr(
        "workbench.diagnosis.commands.diagnose",
        lambda *_, **__: SimpleNamespace(remedies=remedies, verdict="", spec=None, for_terminal=lambda **_: ""),
    )
    assert main(["diagnose", "fashion-mlp", "--prove"]) == 0
    assert said in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("estimate text-gpt --device H1000", "unknown device 'H1000': did you mean 'H100'?"),
        ("estimate nope.py:build --device H100", "there is no file"),
        ("estimate-time text-gpt --device H1000", "unknown device 'H1000'"),
        ("estimate-time text-gpt --device cpu", "CPUs have no datasheet"),
        ("estimate-time text-gpt --device cuda", "is any GPU"),
        ("estimate-time text-gpt --device V100S --set precision=amp_bf16", "the datasheet of V100S has"),
        ("estimate-time text-gpt --device H100 --set compile=model", "how much compiling fuses"),
        ("estimate-time text-gpt --device H100 --set nproc_per_node=2", "2 ranks exchange messages"),
        ("estimate-time text-gpt --device H100 --cluster DGX-H1000", "unknown cluster"),
        ("plan nope.py:build --cluster DGX-H100", "there is no file"),
        ("plan text-gpt --cluster DGX-H1000", "DGX-H1000"),
        ("diagnose nope.py", "does not exist"),
        ("why-not-linear nope.py", "does not exist"),
        ("doctor nope.py:build", "there is no file"),
    ],
)
def test_what_is_refused_is_refused_before_it_is_said_to_begin(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stderr, "isatty", lambda: True)
        assert main(shlex.split(words)) == 2
    text = capsys.readouterr().err
    assert said in text
    assert text.startswith("workbench: "), text
    assert "…" not in text.partition("Known are")[0]


def test_a_script_that_fails_while_it_is_diagnosed_is_told_in_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forked_ranks: None
) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", "train.py", "--budget", "60"]) == 1
    text = capsys.readouterr().err
    assert "at train.py:6 in forward, called from train.py:10" in text
    assert "Traceback" not in text
    assert "hooks.py" not in text


FAILING = """import torch


class Net(torch.nn.Module):
    def forward(self, x):
        raise ValueError("boom")


for batch in torch.utils.data.DataLoader([torch.ones(1)] * 4):
    Net()(batch)
"""


def test_a_reader_that_ends_early_is_no_error(by_hand: Any) -> None:
    """`workbench runs | head -1`, by the command as it is installed, which calls main()."""
    run = by_hand().steps(20).ended("finished")
    command = "import sys; from workbench.__main__ import main; sys.exit(main(sys.argv[1:]))"
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-c", command, "report", str(run.path)], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")
