"""A script is killed and launched again: whether it writes what an undisturbed one writes, and which entries differ if it does not."""

import dataclasses
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.core import run_directory
from workbench.runs.failure import RunError
from workbench.runs.launch import kill_script, prove_resume, prove_script_resume
from workbench.runs.launch.new_run import LaunchError
from workbench.train.saved_entries import entries_of

SCRIPT = """
import argparse, os, pathlib, time
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer, done, last = torch.optim.AdamW(model.parameters()), 0, args.out / "last.pt"
if last.exists():
    state = torch.load(last)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["step"]
    torch.set_rng_state(state["random"])
for step in range(done + 1, 25):
    model(torch.sin(torch.arange(64.0).reshape(8, 8) * step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    if step % 4 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "random": torch.get_rng_state()}
        torch.save(state, args.out / "part")
        os.replace(args.out / "part", last)
"""
PLAIN = """
import os, pathlib, random, subprocess, sys, time

out, mode = pathlib.Path(sys.argv[1]), sys.argv[2]
if mode != "unseeded":
    random.seed(0)
last, done, total = out / "last.txt", 0, 0.0
if last.exists() and mode != "begins again":
    words = last.read_text().split()
    if words[2:] or mode != "torn, begins again":
        done, total = int(words[0]), float(words[1])
    if mode != "forgets" and done:
        random.setstate(eval(" ".join(words[2:])))
for step in range(done + 1, 25):
    if sys.argv[3:] == [f"log {step - done}"]:
        log = (out / "log.csv").open("w")
    if sys.argv[3:4] == ["logs"]:
        how, path = sys.argv[4], out / sys.argv[5]
        log = log if how == "open" and step > done + 1 else path.open("a" if how == "append" else "w")
        print(f"\\repoch 1: {step}/24 loss=0.5, Saving checkpoint", file=log, flush=True)
        if how != "open":
            log.close()
    total += random.random()
    with open(os.environ.get("STEPS", os.devnull), "a") as steps:
        steps.write(".")
    time.sleep(0.06 if mode == "rare" and step > 12 else 0.02)  # a kill after step 12 comes before the end also on a slow machine
    if step % (12 if mode == "rare" else 4) == 0 and (mode != "late" or step == 24):
        elsewhere = mode in ("elsewhere", "copied", "late")  # no kill comes between a first write and the rename
        part = last if mode.startswith("torn") else pathlib.Path(f"{out}-part") if elsewhere else out / "part"
        state = f"({str(out)!r}, {random.getstate()})[1]"  # no first part of it is a state; it takes a millisecond
        with part.open("w") as file:
            print(step, total, end=" ", file=file)
            if mode in ("torn", "torn, begins again", "whole"):
                file.flush()
                time.sleep(0.1)
            file.write(state)
        if mode == "copied":
            subprocess.run(["cp", part, last], check=True)
        else:
            os.replace(part, last)
for number in range(40 * (sys.argv[3:] == ["slowly"])):
    time.sleep(0.01)
    (out / f"final{number}").touch()
if mode == "fails":
    raise SystemExit(3)
"""
"""The same arithmetic without torch."""
SAVER = """
import multiprocessing, os, pathlib, random, subprocess, sys, time

def save(last, text):
    pathlib.Path(f"{last}.part").write_text(text)
    os.replace(f"{last}.part", last)

if __name__ == "__main__":
    out, mode = pathlib.Path(sys.argv[1]), sys.argv[2]
    last, done, total = out / "last.txt", 0, 0.0
    if last.exists():
        done, total = int(last.read_text().split()[0]), float(last.read_text().split()[1])
    pool = multiprocessing.get_context(mode).Pool(1) if mode in ("spawn", "forkserver") else None
    for step in range(done + 1, 25):
        total += random.Random(step).random()
        with open(os.environ["STEPS"], "a") as steps:
            steps.write("." * (mode != "uncounted"))
        time.sleep(0.02)
        if step % 4 == 0:
            given = str(last), f"{step} {total} " + "x" * 1000
            if pool:
                pool.apply(save, given)
            else:
                subprocess.run([sys.executable, "-c", "import saver, sys; saver.save(*sys.argv[1:])", *given], check=True)
            if mode == "beside":
                (out / "beside.txt").write_text(str(step))
                time.sleep(0.3)  # nothing else is done in the folder while it is found and cut, on a busy machine, too
"""
"""Its checkpoints are written, and renamed at once, by another process."""
ROOT = Path(__file__).parents[2]
FOLDERS: Any = {"undisturbed": "a", "interrupted": "b"}


class Started:
    """A script as a process of this test, with what the proof asks of a run."""

    def __init__(self, script: str, *, args: Sequence[str], runs_dir: Path, **_: Any) -> None:
        self.id, self.began = uuid.uuid4().hex, time.monotonic()
        self.steps = runs_dir / f"steps-{self.id}"
        self.path = runs_dir / self.id
        self.path.mkdir()
        environment = {**os.environ, run_directory.ENV_RUN_ID: self.id, "RANK": "0", "STEPS": str(self.steps)}
        environment |= {run_directory.ENV_RUN_DIR: str(self.path), "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen([sys.executable, "-m", "workbench.programs.script", script, *args], env=environment)

    @property
    def state(self) -> str:
        code = self.process.poll()
        return "running" if code is None else "failed" if code else "finished"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def progress(self) -> tuple[int, None]:
        return self.steps.stat().st_size if self.steps.exists() else 0, None

    @property
    def error(self) -> Any:
        return SimpleNamespace(message=f"it exited with {self.process.poll()}") if self.state == "failed" else None

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self, *, check: bool = False) -> "Started":
        assert not self.process.wait() or not check
        return self


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "saver.py").write_text(SAVER)
    monkeypatch.chdir(tmp_path)
    return "train.py"


@pytest.fixture
def plain(script: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(prove_script_resume, "launch", Started)
    return "plain.py"


def prove(script: str, args: Sequence[str], result: str = "last.txt", kills: int = 1, **given: Any) -> wb.ScriptResumeProof:
    proof = wb.prove_resume(script, args=args, result=result, kills=kills, **given)
    assert isinstance(proof, wb.ScriptResumeProof)
    return proof


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_script_that_keeps_its_random_numbers_is_exact(script: str) -> None:
    proof = prove(script, ["--out", "{out}"], "last.pt")
    assert proof.exact, proof
    assert len(proof.kills) == 1
    assert proof.steps == 23 > proof.last_steps > 0  # a loop without a loader: its first step is not measured
    assert "bit for bit as in the undisturbed script" in str(proof)
    assert wb.ScriptResumeProof.from_json(json.loads(json.dumps(proof.to_json()))) == proof
    assert entries_of(Path(proof.interrupted) / "last.pt")["step"] == 24


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_script_that_fails_by_itself_is_not_blamed_on_its_checkpoints(script: str) -> None:
    with pytest.raises(RunError, match="3"):
        prove("plain.py", ["{out}", "fails"])


def test_a_script_that_was_seen_to_write_more_often_while_undisturbed_is_killed_nevertheless(
    plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is written and renamed at once is one write or two, by when a busy machine lets us look. Steps are not seen here."""
    watch = kill_script.watch

    def seen(run: Any, out: Path, *given: Any, **more: Any) -> Any:
        watched = watch(run, out, *given, **more)
        return watched if out.name == "interrupted" else dataclasses.replace(watched, writes=[0] * 100)

    monkeypatch.setattr(Started, "progress", (0, None))
    monkeypatch.setattr(prove_script_resume, "watch", seen)
    proof = prove(plain, ["{out}", "exact"])
    assert not proof.differing, proof
    assert not proof.exact
    assert len(proof.kills) == 1
    assert not prove(plain, ["{out}", "forgets"]).exact


def test_a_script_that_begins_again_is_not_resumed_though_its_result_is_equal(plain: str) -> None:
    proof = prove(plain, ["{out}", "begins again"])
    assert not proof.differing
    assert not proof.exact
    assert str(proof).startswith("Not resumed: after 1 kill it began again at step 1 and trained all steps (24 measured); the result is")
    assert f"after its launch, at least {proof.killed_at[0]} steps into it)" in str(proof)
    assert proof.killed_at[0] >= 4


def test_kills_come_while_steps_are_left_though_most_is_written_after_the_last(plain: str) -> None:
    """A Trainer writes its last checkpoint, an evaluation and the model after its last step: kills by writes came there."""
    proof = prove(plain, ["{out}", "exact", "slowly"], kills=2)
    assert proof.exact, proof
    assert len(proof.kills) == 2
    assert proof.killed_at[0] < 24
    assert proof.last_steps > 1


@pytest.mark.parametrize("log", [["open", "progress"], ["append", "train.log"], ["rewrite", "metrics.csv"]], ids=" ".join)
def test_lines_of_a_log_in_the_folder_are_no_checkpoints(plain: str, log: list[str]) -> None:
    """A kill before the first checkpoint, after step 12 of 24, says nothing; a log has a line per step, whatever stands in it."""
    for seed in range(2):
        proof = prove(plain, ["{out}", "rare", "logs", *log], seed=seed)
        assert proof.exact, proof
        assert proof.killed_at[0] >= 12
    if log[0] != "open":  # it may be a data base that the script goes on from
        with pytest.raises(LaunchError, match=rf"wrote nothing but logs \({log[1]}\) into"):
            prove(plain, ["{out}", "late", "logs", *log])


def test_what_the_name_of_a_file_says() -> None:
    logs = ["train.log", "version_0/metrics.csv", "events.out.tfevents.1700000000.host.1.0", "mlflow.db-journal", "run-x.wandb", "l.jsonl"]
    others = [
        "last.pt",
        "x/trainer_state.json",
        "log/step 5 loss 0.3/x.safetensors",
        "logits.npy",
        "epoch=1-step=20.ckpt",
        "events",
        "a.db",
    ]
    assert list(filter(kill_script.is_log, logs + others)) == logs


def test_what_only_logs_were_given_is_no_write() -> None:
    changes = [(0, {"old": 5}), (1, {"x": 10}), (2, {"x": 20, "last.pt": 15}), (3, {"train.log": 30}), (4, {"x": 40}), (5, {"last.pt": 35})]
    assert kill_script._writes(changes, {"x"}) == [2, 5]
    assert kill_script._writes(changes, set()) == [1, 2, 4]  # a file that is renamed keeps its time: no write
    assert kill_script._writes(changes[:1], set()) == []


def test_kills_after_the_last_step_prove_nothing(plain: str) -> None:
    proof = prove(plain, ["{out}", "late", "slowly"])
    assert proof.too_late, proof
    assert not proof.exact
    assert not proof.differing
    words = r"Not proved: at most a step or two were left .* \(killed .* at least 2\d steps into it; the undisturbed .* 24 steps"
    assert re.match(words, str(proof)), proof


def test_steps_of_kills_leave_something_to_train() -> None:
    """Three checkpoints of nine writes, as of a Trainer, and the model: with each number of kills, in each try."""
    writes = [20] * 9 + [40] * 9 + [60] * 15
    chosen = [kill_script.kill_steps(writes, 60, 2, random.Random(seed)) for seed in range(200)]
    assert all(20 < one <= two <= 48 for tries in chosen for one, two in tries)
    assert [max(two for _, two in each) for each in zip(*chosen, strict=True)] == [48, 34, 27]
    assert all(later <= earlier for tries in chosen for two in itertools.pairwise(tries) for earlier, later in zip(*two, strict=True))
    assert kill_script.kill_steps(writes, 1, 2, random.Random(0)) == [[]]  # one step was seen: it tells nothing
    for late, most in (([20, 90, 95, 100], 80), ([28, 28, 52, 58, 60], 48), ([30, 57, 58, 60], 48)):
        first = kill_script.kill_steps(late, late[-1], 1, random.Random(0))[0]
        assert late[0] < first[0] <= most
    for writes, once in (([60] * 9, 59), ([90, 100], 91), ([1, 1, 3], 2)):  # it cannot come earlier
        assert kill_script.kill_steps(writes, writes[-1], 1, random.Random(0)) == [[once]]


def test_a_kill_during_a_save_shows_that_a_script_takes_a_part_of_a_checkpoint_or_drops_it(plain: str) -> None:
    proof = prove(plain, ["{out}", "torn"], during_save=True)
    assert proof.writing == ("last.txt",)
    assert proof.failed == "it exited with 1"
    assert not proof.exact
    assert proof.verdict.startswith("Not resumed: launched again after 1 kill (killed ")
    assert "while it wrote last.txt), it failed: it exited with 1. It takes what was half written for a checkpoint" in proof.verdict
    assert "temporary name and rename it once all of it is written (os.replace), or go on from the last one that is whole" in proof.verdict
    proof = prove(plain, ["{out}", "torn, begins again"], during_save=True)
    assert proof.began_again
    assert "or it dropped it, as kill 1 came while last.txt was written. Write each checkpoint under a temporary name" in proof.verdict


@pytest.mark.parametrize(
    ("mode", "writing", "exact"), [("exact", "part", True), ("torn at once", "last.txt", False), ("copied", "last.txt", False)]
)
def test_saves_that_are_too_short_to_be_met_and_those_of_child_processes_are_cut(
    plain: str, mode: str, writing: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is renamed at once is cut before, since the rank is held there; no look sees them."""
    monkeypatch.setattr(kill_script._Ranks, "saving", lambda *_: {})
    proof = prove(plain, ["{out}", mode], kills=1 + exact, during_save=True)
    assert proof.writing == (writing,) * (1 + exact)
    assert proof.exact == exact, proof
    if exact:
        assert Path(proof.interrupted, "last.txt").read_text() == Path(proof.undisturbed, "last.txt").read_text().replace(
            proof.undisturbed, proof.interrupted
        )
    else:
        assert proof.failed
        assert "while it wrote last.txt), it failed" in proof.verdict


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_what_a_process_of_multiprocessing_saves_and_renames_at_once_is_cut(plain: str, method: str) -> None:
    proof = prove("saver.py", ["{out}", method], during_save=True)
    assert proof.writing == ("last.txt.part",)
    assert proof.exact, proof


@pytest.mark.parametrize("mode", [pytest.param("beside", marks=pytest.mark.alone), pytest.param("alone", marks=pytest.mark.slow)])
def test_what_cannot_be_cut_is_not_proved(plain: str, mode: str) -> None:
    """Another program renames at once what it has written. What the script writes beside it is cut, or nothing is."""
    proof = prove("saver.py", ["{out}", mode], during_save=True)
    assert "last.txt.part" not in proof.writing
    assert proof.uncut == ("last.txt.part",)
    assert not proof.exact
    assert not proof.differing
    assert proof.verdict.startswith("Not proved: ")
    assert "no kill came while last.txt.part was written: " in proof.verdict
    if mode == "beside":
        assert proof.writing == ("beside.txt",)


@pytest.mark.slow
def test_what_cannot_be_cut_is_said_of_a_script_whose_steps_are_not_measured(plain: str) -> None:
    with pytest.raises(LaunchError, match=r"ended before it could be killed, each time: no kill came while last\.txt\.part was written"):
        prove("saver.py", ["{out}", "uncounted"], during_save=True)


TRAINER = """
import os, sys
from pathlib import Path
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

def last_whole(out):
    whole = [path.parent for path in Path(out).glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)

out, choose = sys.argv[1], {"newest": get_last_checkpoint, "whole": last_whole}[sys.argv[2]]
torch.manual_seed(0)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 50000, (64, 8))]
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=128, n_positions=32))
os.makedirs(out, exist_ok=True)
args = TrainingArguments(output_dir=out, save_steps=6, max_steps=36, seed=0, per_device_train_batch_size=2, report_to=[], disable_tqdm=True)
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train(resume_from_checkpoint=choose(out))
trainer.save_model(f"{out}/final")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_trainer_of_hugging_face_does_not_survive_a_kill_during_its_save_unless_it_takes_the_last_whole_checkpoint(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    script = tmp_path / "hugging.py"
    script.write_text(TRAINER)
    given: dict[str, Any] = {"result": "final/model.safetensors", "kills": 1, "during_save": True, "runs_dir": tmp_path / "runs"}
    newest, whole = (prove(str(script), ["{out}", choose], **given) for choose in ("newest", "whole"))
    assert newest.writing[0].startswith("checkpoint-")
    assert "{out}/checkpoint-" in newest.failed, newest
    assert "for a checkpoint, since its save is not atomic" in newest.verdict
    assert whole.exact, whole
    assert whole.writing[0].startswith("checkpoint-")


@pytest.mark.parametrize("opened", [1, 6])
def test_a_log_of_a_short_training_is_no_save(plain: str, opened: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are seen in leaps, as those of a run, which are counted every 0.3 s."""
    started: Any = Started
    steps = started.progress.fget
    monkeypatch.setattr(Started, "progress", property(lambda run: (steps(run)[0] // 8 * 8, None)))
    proof = prove(plain, ["{out}", "whole", f"log {opened}"], kills=2, during_save=True)
    assert proof.exact, proof  # a save that is renamed survives
    assert proof.writing == ("part", "part")
    assert ", while it wrote part" in proof.verdict
    with pytest.raises(LaunchError, match="was not seen writing a file into"):
        prove(plain, ["{out}", "elsewhere", f"log {opened}"], during_save=True)


def test_a_rank_that_is_stopped_goes_on_where_its_kill_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    ranks, process = kill_script._Ranks("", tmp_path), subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(ranks, "saving", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ranks.kill(process.pid, 0, only_saving=True)
    assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"
    process.kill()
    process.wait()
    monkeypatch.setattr(os, "kill", lambda *_: None)  # it ends between the signal and the look
    assert ranks.kill(process.pid, 0, only_saving=False) is None


@pytest.mark.parametrize("why", [KeyboardInterrupt(), OSError("no folder")], ids=["Ctrl-C", "an error"])
@pytest.mark.parametrize("name", ["undisturbed", "interrupted"])
def test_what_ends_a_proof_ends_its_launch_and_says_what_there_is(
    plain: str, why: BaseException, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, follow = list[Started](), prove_script_resume.watch

    def launch(*args: Any, **given: Any) -> Started:
        launched.append(Started(*args, **given))
        return launched[-1]

    def watch(run: Any, out: Path, *args: Any, **given: Any) -> Any:
        if out.name == name:
            raise why
        return follow(run, out, *args, **given)

    monkeypatch.setattr(prove_script_resume, "launch", launch)
    monkeypatch.setattr(prove_script_resume, "watch", watch)
    with pytest.raises(type(why)) as raised:
        prove(plain, ["{out}", "exact"])
    assert [run.process.poll() for run in launched] == [0] * (len(launched) - 1) + [-9]
    if isinstance(why, KeyboardInterrupt):
        words = str(raised.value)
        assert words.startswith("prove_resume was stopped by Ctrl-C before it knew anything; all processes it started have ended\n")
        assert words.endswith(f"to delete it: rm -r {launched[-1].path}")


def test_a_log_is_no_save(tmp_path: Path) -> None:
    ranks = kill_script._Ranks("", tmp_path)
    ranks.pids = lambda: [os.getpid()]  # type: ignore[method-assign]
    with (tmp_path / "log").open("w"), (tmp_path / "appended").open("a"):
        assert [list(ranks.saving(step)) for step in range(5)] == [["log"]] * 3 + [[]] * 2
        with (tmp_path / "saved").open("w"):
            assert list(ranks.saving(5)) == ["saved"]
    assert not ranks.saving(5)


def test_what_a_checkpoint_lacks_shows(plain: str) -> None:
    proof = prove(plain, ["{out}", "forgets"])
    assert not proof.exact
    assert proof.repeatable
    assert [entry.name for entry in proof.differing] == ["last.txt"]
    assert "No optimizer step shows what its checkpoint lacks" in str(proof)
    assert not prove(plain, ["{out}", "unseeded"]).repeatable  # it differs without a kill, too


def test_the_name_of_the_folder_in_a_result_is_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's checkpoints have the paths of the best and of the last one, as values and as keys."""
    entries = []
    for name in ("undisturbed", "again"):
        out = tmp_path / name
        out.mkdir()
        torch.save(
            {"epoch": 1, "callbacks": {"best": f"{out}/a.ckpt", "all": {f"{out}/a.ckpt": 1.0}}, "weight": torch.ones(2)}, out / "x.pt"
        )
        entries.append(prove_script_resume._entries_of(out, "x.pt"))
    assert not prove_script_resume._differing(entries[0], tmp_path / "again", "x.pt")
    assert entries[0]["callbacks.best"] == "{out}/a.ckpt"
    assert "callbacks.all.{out}/a.ckpt" in entries[0]
    monkeypatch.chdir(tmp_path)  # the whole path has the relative one in it
    assert prove_script_resume._entries_of(Path("again"), "x.pt")["callbacks.best"] == "{out}/a.ckpt"


def test_a_result_of_another_moment_is_said_to_be_one() -> None:
    proof = wb.ScriptResumeProof(
        entries=9, repeatable=True, kills=(1.0,), asked=1, steps=60, last_steps=20, seconds=1.0, differing=(), **FOLDERS
    )
    entries = [("epoch", "1 and 3"), ("global_step", "40 and 60"), ("state_dict.weight", "by 0.1 at most, of 1")]
    differing = tuple(prove_script_resume.Entry(name=name, difference=text) for name, text in entries)
    moved = dataclasses.replace(proof, differing=differing)
    assert not moved.exact
    assert moved.verdict.startswith(
        "Not compared: the result of the undisturbed script and that after 1 kill are of different moments: epoch 1 and 3, "
        "global_step 40 and 60. Without a kill"
    )
    assert dataclasses.replace(moved, repeatable=False).verdict.startswith("Not repeatable: 3 of 9 entries")
    assert dataclasses.replace(moved, differing=differing[2:]).verdict.startswith("Not exact: 1 of 9 entries of the result differs after")


@pytest.mark.parametrize(
    ("mode", "result", "words"),
    [
        ("late", "last.txt", "wrote nothing into"),
        ("exact", "lst", "wrote no lst into .*undisturbed, which is kept and has last.txt: did you "),
        ("elsewhere", "last.txt", "^during_save=True, but .*plain.py was not seen writing a file into {out} in the first 80% of its steps"),
    ],
)
def test_what_cannot_be_compared_is_said(plain: str, mode: str, result: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kill_script._Ranks, "saving", lambda *_: {})
    with pytest.raises(LaunchError, match=words):
        prove(plain, ["{out}", mode], result, during_save=words.startswith("^"))


def test_a_misspelt_result_is_refused_before_the_script_runs(plain: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"result='lst\.txt': .*/plain\.py names no such file, but 'last\.txt': did you mean result='last"):
        prove(plain, ["{out}", "exact"], "lst.txt")
    for result in (5, ["last.txt"]):
        with pytest.raises(ValueError, match=r"a script needs args=, a list with \{out\}"):
            prove(plain, ["{out}", "exact"], result)  # type: ignore[arg-type]
    for outside in ("/tmp/last.txt", "../last.txt"):
        with pytest.raises(ValueError, match=r"a file inside of \{out\} is expected, such as"):
            prove(plain, ["{out}", "exact"], outside)
    with pytest.raises(ValueError, match=r"a script needs args=, a list with \{out\}"):
        prove(plain, "{out} exact")
    with pytest.raises(LaunchError, match=r"plan\.py does not exist: did you mean "):
        prove("plan.py", ["{out}", "exact"])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "args", "result"),
    [
        ("save(out / 'last.pt')", ["{out}"], "final.pt"),  # another module may write it
        ("save(out / 'last.pt')  # and lst.pt", ["{out}"], "lst.pt"),
        ("save(out / f'last{rank}.pt'); save('last.pt')", ["{out}"], "last1.pt"),
        ("save(out / 'last.pt'); save(out / args.name)", ["{out}", "--name=lest.pt"], "lest.pt"),
        ("save(out / 'step1.pt'); save('%s%d.pt' % ('step', n))", ["{out}"], "step10.pt"),
        ("save(out / 'last.pt'", ["{out}"], "lst.pt"),  # it does not even compile
    ],
)
def test_a_name_that_a_script_may_compose_is_not_refused(tmp_path: Path, text: str, args: list[str], result: str) -> None:
    (tmp_path / "train.py").write_text(text)
    prove_script_resume.check_named(tmp_path / "train.py", args, result)


PARTS = {"weights": "w", "samples": "s", "random": "r", "optimizer": "o", "modules": "m", "gradients": "g"}
STEPS = [{part: f"{letter}{step}" for part, letter in PARTS.items()} | {"schedule": f"l{step // 2}"} for step in range(6)]
"""What the steps of an undisturbed script depend on, each with its own digest; the learning rate changes every second step."""
RNG = "first the random numbers (RNG of torch)"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([STEPS[2] | {"random": "r0", "gradients": "x"}], f"{RNG}: different in step 3, the first after the resume (as at the start); "),
        (
            [STEPS[2] | {"random": "r0", "gradients": "x"}],
            "; different there too, perhaps as a consequence: the gradients. Equal there: the weights that the step updates, the ",
        ),
        (
            [STEPS[2] | {"samples": "s0", "random": "x", "gradients": "x"}],
            "first the samples (sampler, position in the data, a save between two micro-batches): different in step 3",
        ),
        ([STEPS[2] | {"samples": "x", "random": "r0", "gradients": "x"}], f"{RNG}: different in step 3, the first after the resume (as at"),
        (  # augmentation by a generator that is not restored, or another place in the data, where other numbers are drawn
            [STEPS[2] | {"samples": "x", "random": "y", "gradients": "x"}],
            f"{RNG}, or the samples (sampler, position in the data, a save between two micro-batches): different in step 3, the first "
            "after the resume; different there too, perhaps as a consequence: the gradients. Equal there: the weights",
        ),
        ([STEPS[2] | {"optimizer": "x", "schedule": "y"}], "first the optimizer's state: different in step 3, the first after the resume"),
        (
            [STEPS[2], STEPS[3], STEPS[4] | {"schedule": "l1"}],
            "): different in step 5, after 2 equal steps of the resumed script. Equal",
        ),
        (
            [STEPS[2] | {"gradients": "x"}],
            "first the gradients (an attribute or a count that no checkpoint has, another generator, the gradient scaler; with several "
            "ranks also what another draws or reads, or the order of a reduction): different in",
        ),
        ([STEPS[2] | {"weights": "x"}], "first the weights that the step updates: different in step 1"),
        (
            [STEPS[2] | {"modules": "x", "gradients": "x"}],
            "first other weights or buffers (of another optimizer or module, frozen ones, of BatchNorm): different in step 3, the",
        ),
        (
            STEPS[2:5],
            ". Its steps are right, but not their number: from the same weights on, the resumed script took 3 optimizer steps, and the "
            "undisturbed one 4. See at which step it continues, and where it",
        ),
        (
            [STEPS[2] | {"others": "not seeded", "samples": "x"}],
            "first the samples (sampler, position in the data, a save between two micro-batches): different in step 3",
        ),
        (STEPS[2:], ""),
        ([{"weights": "w0", "optimizer": "o0", "gradients": "zero"}, *STEPS[2:]], ""),  # of torch's get_state_dict, which steps with lr=0
        ([], ""),
    ],
)
def test_the_first_item_that_differs_after_a_kill_is_named(tmp_path: Path, rows: list[dict[str, str]], words: str) -> None:
    killed = [step | {"others": "seeded by nothing"} for step in STEPS[:3]]
    folders = [tmp_path / name for name in ("undisturbed", "killed", "killed again", "resumed")]
    for folder, lines in zip(folders, (STEPS, killed, STEPS[2:3], rows), strict=True):
        (folder / run_directory.FINGERPRINTS).mkdir(parents=True)
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / run_directory.FINGERPRINTS / "rank0-1.jsonl").write_text(text)
    first, equal = prove_script_resume._first_difference(folders[0], folders[1:])
    assert words in first
    assert bool(first) == bool(words)
    entries = (prove_script_resume.Entry(name="weight", difference="values differ"),)
    given: Any = {"entries": 3, "differing": entries, "repeatable": True, "kills": (1.0,), "asked": 1, "seconds": 1.0, **FOLDERS}
    trained = [row for row in rows if "samples" in row]
    assert equal == 1 + next((at for at, row in enumerate(trained) if row not in STEPS), len(trained))  # with that of the second launch
    verdict = wb.ScriptResumeProof(first=first, **given).verdict
    assert verdict.startswith(f"Not exact: 1 of 3 entries of the result differs after 1 kill{first or '. No optimizer step shows what'}")


def test_where_all_steps_after_a_kill_are_equal_none_of_what_they_use_is_blamed() -> None:
    entries = tuple(
        prove_script_resume.Entry(name=name, difference="3 and 0") for name in ("m.running_mean", "scaler.growth", "x.0", "y.0")
    )
    given: Any = {"repeatable": True, "kills": (1.0,), "asked": 1, "steps": 9, "last_steps": 4, "seconds": 1.0, "equal_steps": 4, **FOLDERS}
    proof = wb.ScriptResumeProof(entries=30, differing=entries, **given)
    assert proof.verdict.startswith(
        "Not exact: 4 of 30 entries of the result differ after 1 kill: scaler.growth (3 and 0), m.running_mean (3 and 0), x.0 (3 and 0) …. "
        "But the 4 steps after the resume that were compared are equal in the weights that the step updates, the samples, the "
        "random numbers, "
    )
    assert "so its checkpoint lacks what they did not use, or only the result has: a gradient scaler, averaged weights (EMA), a count" in (
        proof.verdict
    )
    unread = wb.ScriptResumeProof(entries=1, differing=entries[:1], as_bytes=True, **given)
    assert unread.verdict.startswith("Not compared: after 1 kill the bytes of the result differ, and it is no file of torch.save or")
    assert "the 4 steps after the resume that were compared are equal in the weights" in unread.verdict
    assert not unread.exact


FORGETS = """
import argparse, os, torch

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--lacks")
args = parser.parse_args()
torch.manual_seed(0)
data, order = torch.randn(64, 8), torch.Generator().manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
schedule, last, done = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40), f"{args.out}/last.pt", 0
if os.path.exists(last):
    state = torch.load(last)
    model.load_state_dict(state["model"])
    done = state["step"]
    if args.lacks != "optimizer":
        optimizer.load_state_dict(state["opt"])
    if args.lacks != "schedule":
        schedule.load_state_dict(state["sched"])
    if args.lacks != "random":
        torch.set_rng_state(state["rng"])
    if args.lacks != "samples":
        order.set_state(state["order"])
for step in range(done + 1, 31):
    optimizer.zero_grad()
    model(data[torch.randint(0, 64, (16,), generator=order)]).square().mean().backward()
    optimizer.step()
    schedule.step()
    if step % 4 == 0 or step == 30:
        state = {"model": model.state_dict(), "opt": optimizer.state_dict(), "sched": schedule.state_dict(), "step": step}
        torch.save(state | {"rng": torch.get_rng_state(), "order": order.get_state()}, last + "-part")
        os.replace(last + "-part", last)
    import time; time.sleep(0.03)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("lacks", ["samples", "random", "optimizer", "schedule"])
def test_what_a_script_does_not_load_is_named(script: str, lacks: str) -> None:
    Path("forgets.py").write_text(FORGETS)
    proof = prove("forgets.py", ["--out", "{out}", "--lacks", lacks], "last.pt")
    assert f", first {prove_script_resume.ITEMS[lacks]}: different in step " in proof.verdict


def test_a_proof_is_short_and_shows_first_what_tells_most() -> None:
    names = [f"model.{i}.weight" for i in range(20)] + ["opt.state.0.exp_avg", "random", "schedule.last_epoch"]
    entries = tuple(prove_script_resume.Entry(name=name, difference="values differ") for name in names)
    proof = wb.ScriptResumeProof(entries=30, differing=entries, repeatable=True, kills=(1.0,), asked=2, seconds=1.0, **FOLDERS)
    assert [row[0] for row in proof.table.rows[:4]] == ["random", "schedule.last_epoch", "opt.state.0.exp_avg", "model.0.weight"]
    assert "differ after 1 kill (the script ended before kill 2 of 2). No optimizer step shows" in proof.verdict
    exact = wb.ScriptResumeProof(entries=30, differing=(), repeatable=True, kills=(1.0, 2.0), asked=2, seconds=1.0, **FOLDERS)
    assert not exact.exact
    assert str(exact).startswith("Equal, but a resume is not proved: after 2 kills all 30 entries")
    assert "(killed 1.00 s after its launch; 2.00 s after its launch; no optimizer step of torch was measured in" in str(exact)
    assert str(dataclasses.replace(exact, steps=9, last_steps=4)).startswith("Exact: after 2 kills all 30 entries")
    assert "<table" not in exact._repr_html_()
    one = wb.ScriptResumeProof(entries=1, differing=entries[:1], repeatable=True, kills=(1.0,), asked=1, seconds=1.0, **FOLDERS)
    assert one.verdict.startswith("Not exact: the only entry of the result differs after 1 kill. No optimizer step")
    same = dataclasses.replace(one, differing=(), steps=9, last_steps=4)
    assert same.verdict.startswith("Exact: after 1 kill the only entry of the result is bit for bit")


def test_a_verdict_says_only_what_was_measured() -> None:
    few = wb.ScriptResumeProof(
        entries=3, differing=(), repeatable=True, kills=(1.0,), killed_at=(1,), steps=3, last_steps=1, asked=1, seconds=1.0, **FOLDERS
    )
    assert few.verdict.startswith(
        "Not proved: at most a step or two were left to train after the kills (killed 1.00 s after its launch, at least 1 step into it; "
        "the undisturbed script took 3 steps, and the last launch 1 step, as measured), so"
    )
    for last in (0, 1):
        one = dataclasses.replace(few, steps=1, last_steps=last)
        assert not one.exact
        assert one.verdict.startswith("Equal, but a resume is not proved: after 1 kill all 3 entries")
        assert "only one optimizer step of torch was measured in the undisturbed script)." in one.verdict
    never = dataclasses.replace(few, kills=(), killed_at=(), last_steps=3, asked=2)
    assert never.verdict.startswith("Not resumed: after another launch (the script ended before kill 1 of 2) it began again at step 1")
    assert never.verdict.endswith("The script does not load what it saves into {out}: see that it loads")
    late = dataclasses.replace(never, last_steps=0)
    assert late.verdict.startswith("Not proved: the script ended before it could be killed (the undisturbed script took 3 steps, and")
    not_killed = dataclasses.replace(never, last_steps=2)  # it went on from a checkpoint before its end, but not after a kill
    assert not not_killed.exact
    assert not_killed.verdict.startswith("Not proved: the script ended before it could be killed (the undisturbed script took 3 steps, and")


def test_arguments_of_a_script_may_be_numbers_and_paths(plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(prove_resume, "prove_script_resume", lambda script, **told: given.update(told))
    wb.prove_resume(plain, args=["{out}", 3, tmp_path], result="model3.txt")  # type: ignore[list-item]
    assert given["args"] == ["{out}", "3", str(tmp_path)]


@pytest.mark.parametrize("given", [{}, {"args": ["--out", "{out}"]}, {"args": "--out x", "result": "last.pt"}])
def test_a_script_needs_a_folder_and_a_result(script: str, given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"a script needs args=, a list with \{out\}"):
        wb.prove_resume(script, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"only \{out\} is missing in args=\['--out', 'here'\]: it stands for the folder"):
        wb.prove_resume(script, args=["--out", "here"], result="last.pt")
    with pytest.raises(ValueError, match="only a script takes it"):
        wb.prove_resume(wb.RunSpec(task="text-gpt"), result="last.pt")
    with pytest.raises(ValueError, match=r"during_save=…\) with a RunSpec: only a script takes it"):
        wb.prove_resume(wb.RunSpec(task="text-gpt"), during_save=True)
