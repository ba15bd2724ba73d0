"""A script is killed and launched again: whether it writes what an undisturbed one writes, and which entries differ if it does not."""

import json
from pathlib import Path

import pytest

import workbench as wb
from workbench.runs.failure import RunError
from workbench.runs.launch.new_run import LaunchError
from workbench.train.saved_entries import entries_of

SCRIPT = """
import argparse, os, pathlib, time
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
parser.add_argument("--mode", default="exact")
args = parser.parse_args()
if args.mode != "unseeded":
    torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer, done, last = torch.optim.AdamW(model.parameters()), 0, args.out / "last.pt"
if last.exists():
    state = torch.load(last)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["step"]
    if args.mode == "exact":
        torch.set_rng_state(state["random"])
for step in range(done + 1, 25):
    model(torch.sin(torch.arange(64.0).reshape(8, 8) * step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    if step % 4 == 0 and (args.mode != "late" or step == 24):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "random": torch.get_rng_state()}
        torch.save(state, args.out / "part")
        os.replace(args.out / "part", last)
if args.mode == "fails":
    raise SystemExit(3)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return "train.py"


def prove(script: str, mode: str = "exact", kills: int = 1, result: str = "last.pt") -> wb.ScriptResumeProof:
    proof = wb.prove_resume(script, args=["--out", "{out}", "--mode", mode], result=result, kills=kills)
    assert isinstance(proof, wb.ScriptResumeProof)
    return proof


@pytest.mark.slow
def test_a_script_that_keeps_its_random_numbers_is_exact(script: str) -> None:
    proof = prove(script, kills=2)
    assert proof.exact, proof
    assert len(proof.kills) >= 1
    assert "bit for bit those of the undisturbed script" in str(proof)
    assert wb.ScriptResumeProof.from_json(json.loads(json.dumps(proof.to_json()))) == proof
    assert entries_of(Path(proof.interrupted) / "last.pt")["step"] == 24


@pytest.mark.slow
def test_what_a_checkpoint_lacks_shows(script: str) -> None:
    proof = prove(script, "forgets")
    assert not proof.exact
    assert proof.repeatable
    assert any(entry.name == "model.0.weight" for entry in proof.differing)
    assert "its checkpoint lacks something" in str(proof)


@pytest.mark.slow
def test_a_script_that_differs_without_a_kill_says_nothing_of_its_checkpoints(script: str) -> None:
    assert not prove(script, "unseeded").repeatable


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "result", "error", "words"),
    [
        ("late", "last.pt", LaunchError, "wrote nothing into"),
        ("fails", "last.pt", RunError, "3"),
        ("exact", "best.pt", LaunchError, "no best.pt"),
    ],
)
def test_what_cannot_be_compared_is_said(script: str, mode: str, result: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        prove(script, mode, result=result)


@pytest.mark.parametrize("given", [{}, {"args": ["--out", "{out}"]}, {"args": ["--out", "x"], "result": "last.pt"}])
def test_a_script_needs_a_folder_and_a_result(script: str, given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"a script needs args= with \{out\}"):
        wb.prove_resume(script, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only a script takes it"):
        wb.prove_resume(wb.RunSpec(task="text-gpt"), result="last.pt")
