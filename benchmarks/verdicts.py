"""Judges the planted bottlenecks of `tests/diagnosis/gallery` by the workbench, by TraceML 0.5.0 and by torch-tb-profiler.

    python benchmarks/verdicts.py [CASE…] [--held-out] [--runs 3] [--no-proofs] [--results DIR]
    python benchmarks/verdicts.py --time

Every verdict comes from a fresh process. The first table also shows what the removal of the cause saves, the
second the predicted gain of each remedy beside the proved one. With `--results` the answers stay in DIR, and those that are there are not
made again. About 15 minutes per run of all cases on two cores. Needs `pip install traceml-ai==0.5.0 torch-tb-profiler==0.4.3`; a
peer that is not there is left out.

`--time` judges each case once, by the workbench alone and without proofs, and prints which verdicts are right and the median time to a
verdict: about 10 minutes with nothing else running, 12 at most.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from workbench.core import units
from workbench.core.display.table import Table

GALLERY = Path(__file__).parents[1] / "tests" / "diagnosis" / "gallery"
sys.path.insert(0, str(GALLERY))
from cases import CASES, Case  # noqa: E402
from held_out import HELD_OUT  # noqa: E402

TOOLS = ("truth", "ours", "traceml", "plugin")
SPEEDS = "speeds-*.json"
"""Files of `MachineSpeeds`."""
LIMIT = 240
"""Seconds that a judge may take."""
TIMED_MINUTES = 12.0
"""After which `--time` begins no further case."""
MEANT = {
    "INPUT_BOUND": "input-bound",
    "H2D_BOUND": "transfer-bound",
    "COMPUTE_BOUND": "compute-bound",
    "RESIDUAL_HEAVY": "host-bound",
    "INPUT_STRAGGLER": "straggler",
    "COMPUTE_STRAGGLER": "straggler",
    "H2D_STRAGGLER": "straggler",
    "STRAGGLER": "straggler",
    "NO_CLEAR_PERFORMANCE_BOTTLENECK": "nothing",
}
"""TraceML's kinds in our words, in its favour: what it calls residual counts as host-bound."""


def judge(case: Case, tool: str, out: Path, peer: Path, budget: float, prove: bool) -> dict[str, Any]:
    """What a tool says of a case, from a fresh process."""
    words = [case.name, tool, str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6", "PYTHONPATH": str(GALLERY.parents[2])}
    program = str(GALLERY / "judge.py")
    command = [sys.executable, program, *words]
    with tempfile.TemporaryDirectory() as folder:
        env |= {"WORKBENCH_CACHE": folder}  # what was proved of other cases does not help this one
        for speeds in out.parent.glob(SPEEDS):  # which every machine measures once
            shutil.copy(speeds, folder)
        if tool == "ours":
            command += ["--budget", str(budget), *["--prove"] * prove]
        if tool == "traceml":
            env["PATH"] = f"{peer.parent}:{env['PATH']}"
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = str(probe.getsockname()[1])  # its own default is fixed, and refused if taken
            many = ["--nproc-per-node", str(case.ranks)] if case.ranks > 1 else []
            options = ["--mode", "summary", "--logs-dir", folder, "--aggregator-port", port, *many]
            command = [str(peer.with_name("traceml")), "run", program, *options, "--args", *words]
        began = time.monotonic()
        try:
            done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL)
            said = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {LIMIT} s"}
        for speeds in Path(folder).glob(SPEEDS):
            shutil.copy(speeds, out.parent)
        summaries = list(Path(folder).rglob("final_summary.json"))
        if tool == "traceml" and summaries:
            found = json.loads(summaries[0].read_text())["primary_diagnosis"]
        elif out.exists():
            found = json.loads(out.read_text())
        else:
            found = {"error": said[-2000:]}
    return found | {"took": time.monotonic() - began}


def word(tool: str, found: dict[str, Any]) -> str:
    """A tool's verdict, in our vocabulary."""
    if "error" in found:
        return "failed"
    if tool == "ours":
        return str(found["verdict"])
    if tool == "traceml":
        return MEANT.get(found.get("kind", ""), str(found.get("kind", "?")).lower().replace("_", " "))
    advice = " ".join(found["advice"])
    for sign, verdict in (("data loading", "input-bound"), ("communication", "communication-bound")):
        if sign in advice:
            return verdict
    return "nothing" if not advice else re.sub("<[^>]*>", "", advice)[:40]


def right(case: Case, tool: str, found: dict[str, Any]) -> bool:
    """Is the verdict right? To say nothing is right where nothing is wrong."""
    verdict = word(tool, found)
    if tool == "ours":
        return case.right(verdict) and (len(case.answers) == 1 or case.right(verdict, found["cause"]))
    return case.right(verdict) or (case.healthy and verdict == "nothing")


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names; none = all")
    parser.add_argument("--held-out", action="store_true", help="the cases that no rule was tuned on")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--budget", type=float, default=30, help="seconds for each diagnosis")
    parser.add_argument("--no-proofs", action="store_true")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--results", type=Path, help="folder for the answers")
    parser.add_argument("--time", action="store_true", help=f"ours alone, one run, no proofs, and at most {TIMED_MINUTES:g} minutes")
    parser.add_argument("--peer-python", type=Path, default=Path(sys.executable), help="a Python whose neighbour is `traceml`")
    given = parser.parse_args()
    chosen = HELD_OUT if given.held_out else CASES
    cases = [{**CASES, **HELD_OUT}[name] for name in given.cases] or list(chosen.values())
    import torch

    if given.time:
        given.runs, given.no_proofs, given.tools = 1, True, ["ours"]
    until = time.monotonic() + (60 * TIMED_MINUTES if given.time else float("inf"))
    tools = [tool for tool in TOOLS if tool in given.tools]
    if "traceml" in tools and not given.peer_python.with_name("traceml").exists():
        tools.remove("traceml")
    if "plugin" in tools and importlib.util.find_spec("torch_tb_profiler") is None:
        tools.remove("plugin")
    with tempfile.TemporaryDirectory() as temporary:
        results = (given.results or Path(temporary)).resolve()
        results.mkdir(parents=True, exist_ok=True)
        answers: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for number in range(given.runs):
            for case in cases:
                if case.gpu and not torch.cuda.is_available():
                    continue
                for tool in tools:
                    if tool == "truth" and number:
                        continue
                    kept = results / f"{case.name}.{tool}.{number}.json"
                    if not kept.exists() and time.monotonic() > until - given.budget:
                        continue
                    if not kept.exists():
                        prove = not given.no_proofs and number == 0
                        found = judge(case, tool, kept.with_suffix(".part"), given.peer_python, given.budget, prove)
                        kept.with_suffix(".part").unlink(missing_ok=True)
                        kept.write_text(json.dumps(found))
                        if tool != "truth":
                            mark = "" if right(case, tool, found) else "   <<<"
                            took = f"{found['took']:5.1f} s"
                            print(f"{case.name:28} {tool:8} {took}  {word(tool, found)}{mark}", file=sys.stderr, flush=True)
                    answers.setdefault((case.name, tool), []).append(json.loads(kept.read_text()))
    show(cases, tools, answers)


def show(cases: list[Case], tools: list[str], answers: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """The tables."""
    note = f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    judges = [tool for tool in tools if tool != "truth"]
    rows, scores = [], dict.fromkeys(judges, (0, 0))
    for case in cases:
        if not any((case.name, tool) in answers for tool in tools):
            rows.append([case.name, "needs a GPU" if case.gpu else "no time was left", *["" for _ in judges]])
            continue
        true = answers.get((case.name, "truth"), [{}])[0]
        cells: list[object] = []
        for tool in judges:
            found = answers[case.name, tool]
            good = sum(right(case, tool, one) for one in found)
            scores[tool] = (scores[tool][0] + good, scores[tool][1] + len(found))
            said = [word(tool, one) + (f" ({one['cause']})" if tool == "ours" and "cause" in one else "") for one in found]
            most = statistics.mode(said)
            cells.append(f"{'✓' if good == len(found) else '✗'} {good}/{len(found)} {most}")
            if tool == "ours":
                cells[-1] = f"{cells[-1]}, {statistics.fmean(one.get('seconds', LIMIT) for one in found):.0f} s"
        saved = units.percent(true["saved"]) if "saved" in true else "–"
        rows.append([case.name, f"{'|'.join(case.answers)}, {saved}", *cells])
    timed = [one for (_, tool), found in answers.items() if tool == "ours" for one in found if "seconds" in one]
    if timed:
        took, seconds = ([one[key] for one in timed] for key in ("took", "seconds"))
        times = f"median time to a verdict {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
        if not any(one["proofs"] for one in timed):
            times += f" ({statistics.median(took):.1f} s and {max(took):.1f} s with the start of the process)"
        note = f"{times}, in {len(timed)} diagnoses; {note}"
    total = ["right", ""] + [f"{good} of {count} ({units.percent(good / max(1, count))})" for good, count in scores.values()]
    names = {"ours": "workbench", "traceml": "TraceML 0.5.0", "plugin": "torch-tb-profiler 0.4.3"}
    columns = ("case", "planted, and what its removal saves", *(names[tool] for tool in judges))
    print(Table(columns=columns, rows=[*rows, total], title="Verdicts", note=note))
    proofs = [(case.name, proof) for case in cases for one in answers.get((case.name, "ours"), []) for proof in one.get("proofs", [])]
    if proofs:
        errors = [proof["remedy"]["speedup"] / proof["measured"][1] - 1 for _, proof in proofs]
        lines = [
            [name, p["remedy"]["name"], units.times(p["remedy"]["speedup"]), units.times(p["measured"][1]), f"{100 * error:+.0f} %"]
            for (name, p), error in zip(proofs, errors, strict=True)
        ]
        size = sorted(map(abs, errors))
        said = f"median error {units.percent(statistics.median(size))}, worst {units.percent(size[-1])}; {note}"
        print()
        print(Table(columns=("case", "remedy", "predicted", "proved", "error"), rows=lines, title="Predicted and proved", note=said))


if __name__ == "__main__":
    main()
