"""Planted regressions of an unedited script: what `wb.what_changed` says of two runs, beside `traceml compare` of TraceML 0.5.0.

Run B differs from run A in a commit, a variable and an argument; one of them, or the folder of the data, owns the regression. TraceML asks
for two lines in the script, which are in it. Both tools see the same script, each in runs of its own. Its waits are sleeps, so that other
jobs disturb them little.

Run: python benchmarks/compare_traceml.py [CASES] [--peer FOLDER]     (four minutes a case; `pip install -e '.[bench]'` has TraceML, or
FOLDER, by pip install --target FOLDER traceml-ai==0.5.0; without it this says so and ends)
"""

import argparse
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from what_changed import commit, world

import workbench as wb

SCRIPT = """
import argparse, contextlib, os, time, torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, Dataset

CODE = 1.0
WAIT = float((Path(os.environ["DATA_DIR"]) / "wait").read_text())
traced = contextlib.nullcontext
if "TRACED" in os.environ:
    import traceml_ai
    traceml_ai.init(mode="auto")
    traced = traceml_ai.trace_step

class Samples(Dataset):
    def __len__(self):
        return 8 * 250

    def __getitem__(self, index):
        time.sleep(WAIT)
        return torch.ones(4)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch):
        time.sleep(0.012 * CODE * float(os.environ.get("PACE", "1")))
        return self.layer(batch)

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=1)
parser.add_argument("--seed", type=int, default=0)
given = parser.parse_args()
torch.manual_seed(given.seed)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in DataLoader(Samples(), batch_size=8, num_workers=given.workers):
    with traced(model):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
CASES: dict[str, dict[str, Any]] = {
    "data": {"data": "2"},
    "code": {"code": 1.3},
    "variable": {"pace": "1.3"},
    "argument": {"args": ["--workers", "0"]},
}
"""Owner → what run B has of it."""


def peer(folder: str, *words: str) -> None:
    """Run a command of TraceML."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PYTHONPATH": folder, "PATH": path, "TRACED": "1"}
    subprocess.run([sys.executable, "-m", "traceml_ai.launcher.cli", *words], env=environ, capture_output=True, check=True)


def summary(folder: str, script: Path, args: list[str], logs: Path, name: str) -> str:
    """The summary of a run under TraceML."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])  # its own default is fixed, and refused if taken
    options = ["--mode", "summary", "--logs-dir", str(logs), "--run-name", name, "--aggregator-port", port]
    peer(folder, "run", str(script), *options, "--args", *args)
    return str(next((logs / name).rglob("final_summary.json")))


def played(owner: str, folder: str) -> tuple[Any, str]:
    """Our answer, and the text of TraceML's comparison."""
    planted = CASES[owner]
    with world() as top:
        for name, wait in (("1", "0.001"), ("2", "0.003")):
            (top.parent / name).mkdir()
            (top.parent / name / "wait").write_text(wait)
        runs, summaries = [], []
        for name, what in (("a", dict[str, Any]()), ("b", planted)):
            os.environ |= {"DATA_DIR": str(top.parent / what.get("data", "1")), "PACE": what.get("pace", "1")}
            os.environ |= {"NCCL_ALGO": {"a": "Tree", "b": "Ring"}[name]}
            args = ["--seed", {"a": "0", "b": "1"}[name], *what.get("args", [])]
            (top / "train.py").write_text(SCRIPT.replace("CODE = 1.0", f"CODE = {what.get('code', 1.0)}  # {name}"))
            commit(top, name, "")
            summaries.append(summary(folder, top / "train.py", args, top.parent / "logs", name))
            runs.append(wb.launch(top / "train.py", args=args, watch=True, runs_dir=top.parent / "runs").wait(check=True))
        base = top.parent / "compared"
        peer(folder, "compare", *summaries, "--output", str(base))
        return wb.what_changed(*runs, budget_s=300), base.with_suffix(".txt").read_text()


def main() -> None:
    """Print what both say of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*CASES], metavar="CASE")
    parser.add_argument("--peer", default="", help="the folder that has TraceML; without it this Python's")
    given = parser.parse_args()
    folder = given.peer and str(Path(given.peer).absolute())
    if not (Path(folder, "traceml_ai").is_dir() if folder else importlib.util.find_spec("traceml_ai")):
        raise SystemExit("TraceML is not installed: pip install --target FOLDER traceml-ai==0.5.0, and give --peer FOLDER")
    for owner in given.cases:
        result, compared = played(owner, folder)
        print(f"== {owner}\n{compared}\n{result}", flush=True)


if __name__ == "__main__":
    main()
