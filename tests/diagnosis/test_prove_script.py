"""Proofs of changes of a script from outside: by launches in turns, what the error says where an edit is needed, a real one (slow)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.planted_gap import planted
from workbench.core.run_directory import ENV_ARGUMENTS
from workbench.diagnosis import prove_script as proving
from workbench.diagnosis.analysis.evidence import Gradients
from workbench.diagnosis.analysis.why_not_linear import WhyNotLinear
from workbench.diagnosis.rerun import Arm, Reruns
from workbench.diagnosis.why_not_linear import why_not_linear
from workbench.runs.launch.new_run import NewRun
from workbench.runs.run import Run
from workbench.runs.spec import ScriptSpec

SPEC = ScriptSpec(script="/somewhere/train.py", nproc_per_node=2, watch=True)
PLACES = {"loop": "train.py:30", "step": "train.py:41 main", "ddp": "train.py:12 main"}


def answer(spec: ScriptSpec = SPEC, **parts: Any) -> WhyNotLinear:
    return WhyNotLinear(evidence=replace(planted(**parts), script=True, places=PLACES), spec=spec)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"accumulation": 4}, r"outside train.py: Set accumulation=4. It is made at train.py:41 main \(the optimizer's step\)"),
        ({"gradient_compression": "fp16"}, "train.py:12 main .*register_comm_hook"),
        ({"micro_batch": 64, "threads": 1}, "train.py:30 .*batch_size.*From outside can be set: threads, nproc_per_node, num_workers"),
        ({"compile": True}, "cannot be set from outside train.py: Set compile=True. Then ask again"),
    ],
)
def test_what_needs_an_edit_is_said_with_its_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        answer().prove(change)


def test_remedies_that_can_be_set_from_outside_can_be_proved() -> None:
    crowded = {"waits": 0.01, "sharing": 0.01, "cores": 2.0}
    threads = answer(SPEC.replace(threads=2), threads=2, **crowded)
    assert {remedy.name: remedy.change for remedy in threads.remedies if remedy.provable} == {"threads=1": {"threads": 1}}
    workers = answer(SPEC.replace(args=("--epochs", "1")), num_workers=2, **crowded)
    assert workers.remedy(None).change["num_workers"] == 0
    fewer = answer(SPEC.replace(nproc_per_node=4), ranks=4, **crowded | {"waits": 0.05}).remedy(None)
    assert fewer.change == {"nproc_per_node": 2}
    assert fewer.ceiling
    assert workers.brief()["next"]["command"] == "workbench why-not-linear /somewhere/train.py --nproc-per-node 2 --prove -- --epochs 1"
    many = Gradients(size=40 * 2**20, buckets=40, latency=3e-4, per_byte=1e-10)
    both = answer(reduction=0.01, gradients=many)
    evidence = replace(both.evidence, blocks=tuple(replace(block, backward=_backward(block.arm)) for block in both.evidence.blocks))
    assert WhyNotLinear(evidence=evidence, spec=SPEC).remedy(None).change == {"bucket_cap_mb": 13.3}


def _backward(arm: str) -> tuple[float, ...]:
    return (0.02,) * 2 if arm == "all" else (0.01,) * 2


class Turns:
    """Takes the place of launches: what was asked for, and how long a step takes."""

    def __init__(self, seconds: dict[str, float], replaced: Sequence[str] = ("num_workers",), threads: int = 1) -> None:
        self.seconds, self.names, self.arms = seconds, list[str](), dict[str, Arm]()
        self.rows = {0: [{"replaced": list(replaced), "threads": threads}]}

    def measure(self, arm: Arm, name: str) -> tuple[float, Any]:
        self.names.append(name)
        self.arms[name] = arm
        if len(self.names) > 6:
            raise KeyboardInterrupt
        return self.seconds[name], SimpleNamespace(path=Path("runs"))


def play(monkeypatch: pytest.MonkeyPatch, turns: Turns) -> None:
    monkeypatch.setattr(Reruns, "measure", lambda _, arm, name: turns.measure(arm, name))
    monkeypatch.setattr(proving, "RunRows", lambda _: SimpleNamespace(other_rows=turns.rows))


def test_launches_with_and_without_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns({"as it is": 0.03, "num_workers=2": 0.02})
    play(monkeypatch, turns)
    result = answer()
    proof = result.prove("num_workers=2", budget_s=30)
    assert turns.names[:5] == ["as it is", "num_workers=2", "num_workers=2", "as it is", "as it is"]
    assert {name: arm.variables for name, arm in turns.arms.items()} == {
        "as it is": {ENV_ARGUMENTS: None},
        "num_workers=2": {ENV_ARGUMENTS: '{"num_workers": 2}'},
    }
    assert proof.measured.mid == pytest.approx(1.5)
    assert proof.measured.low < 1.48
    assert proof.measured.high > 1.52
    assert proof.baseline == pytest.approx(1 / 0.03)
    assert "3 pairs of launches" in str(proof.notes)
    assert "Ctrl-C" in str(proof.notes)
    assert result.proofs == [proof]


def test_of_other_ranks_what_all_of_them_do_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns({"as it is": 0.03, "nproc_per_node=1": 0.02})
    play(monkeypatch, turns)
    proof = answer(samples=None).prove({"nproc_per_node": 1})
    assert turns.arms["nproc_per_node=1"].spec.nproc_per_node == 1
    assert proof.measured.mid == pytest.approx(0.75), "half the steps, of which each takes two thirds"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bucket_cap_mb": 9}, "makes no DistributedDataParallel, which takes bucket_cap_mb"),
        ({"threads": 2}, "the script sets its 1 threads itself"),
    ],
)
def test_what_does_not_reach_the_script_is_no_proof(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str) -> None:
    play(monkeypatch, Turns(dict.fromkeys(("as it is", "bucket_cap_mb=9", "threads=2"), 0.03)))
    result = answer()
    with pytest.raises(ValueError, match=words):
        result.prove(change)
    assert result.proofs == []


def test_what_loaders_without_workers_do_not_take_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns({"as it is": 0.03, "prefetch_factor=4, persistent_workers=True": 0.03}, replaced=())
    turns.rows[0][0]["without_workers"] = ["persistent_workers", "prefetch_factor"]
    play(monkeypatch, turns)
    with pytest.raises(ValueError, match=r"loaders have no workers, .*prefetch_factor and persistent_workers.* try num_workers=1 as well"):
        answer().prove({"prefetch_factor": 4, "persistent_workers": True})


def test_launches_of_a_proof_are_recorded_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, experiment: dict[str, str]) -> Run:
        orders.append(experiment)
        raise ValueError("nothing starts here")

    orders = list[dict[str, str]]()
    monkeypatch.setattr(NewRun, "start", start)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ValueError, match="nothing starts"):
        answer(SPEC.replace(script=str(tmp_path / "train.py"))).prove({"num_workers": 1})
    assert orders == [{"kind": "prove", "name": "as it is"}]


def test_each_launch_of_a_proof_has_a_folder_of_its_own_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: object, spec: ScriptSpec, program: list[str], *__: object, **___: object) -> Run:
        outs.append(program[-1])
        assert Path(program[-1]).is_dir()
        assert spec.args == ("--ckpt", "{out}"), "what is recorded is equal for all launches"
        raise ValueError("nothing starts here")

    outs = list[str]()
    monkeypatch.setattr(NewRun, "start", start)
    (tmp_path / "train.py").write_text("")
    spec = SPEC.replace(script=str(tmp_path / "train.py"), args=("--ckpt", "{out}"))
    for _ in range(2):
        with pytest.raises(ValueError, match="nothing starts"):
            WhyNotLinear(evidence=answer().evidence, spec=spec, subject=tmp_path).prove({"num_workers": 1})
        with pytest.raises(ValueError, match="nothing starts"):
            why_not_linear(spec, runs_dir=tmp_path)
    assert len(set(outs)) == 4


SCRIPT = """
import time, torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 1600

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.ones(4)

distributed.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in DataLoader(Slow(), batch_size=8):
    time.sleep(0.015)
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_real_script_is_proved_unedited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    result = why_not_linear(tmp_path / "train.py", nproc_per_node=2, budget_s=300, runs_dir=tmp_path / "runs")
    lines = SCRIPT.splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "= DistributedDataParallel" in text)
    assert result.evidence.places["ddp"] == f"train.py:{line}"
    with pytest.raises(ValueError, match=r"It is made at train.py:\d+"):
        result.prove({"accumulation": 4})
    measure, launches = Reruns.measure, list[str]()

    def some(reruns: Reruns, arm: Arm, name: str) -> tuple[float, Run]:
        launches.append(name)
        if len(launches) > 4:  # two pairs, however long they take
            raise KeyboardInterrupt
        return measure(reruns, arm, name)

    monkeypatch.setattr(Reruns, "measure", some)
    proof = result.prove({"num_workers": 1}, budget_s=600)
    assert "2 pairs of launches" in str(proof.notes)
    assert proof.measured.mid > 1.3, "the samples are made while the step sleeps"
    assert (tmp_path / "train.py").read_text() == SCRIPT
