"""One case in a process of its own: what taking the planted cost away saves, or what a tool says of it.

    python judge.py CASE truth|ours|traceml|plugin OUT.json [--budget S] [--prove [N]]

The truth comes from the loop itself and its twin without the planted cost, in blocks that take turns. Cases with several ranks start
themselves under torchrun. `traceml` has to be started by `traceml run`, see `benchmarks/verdicts.py`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from cases import CASES, Case


def find(name: str) -> Case:
    """The case of that name. Other files are only imported for their own cases: they load torch, and the emulated GPU.

    Raises:
        KeyError: there is none.
    """
    if name in CASES:
        return CASES[name]
    from held_out import HELD_OUT

    if name in HELD_OUT:
        return HELD_OUT[name]
    from emulated import EMULATED, HELD_OUT_EMULATED
    from held_out_proofs import HELD_OUT_PROOFS

    return (EMULATED | HELD_OUT_EMULATED | HELD_OUT_PROOFS)[name]


ROUNDS, BLOCK, STEPS = 6, 0.4, 240
"""Of the truth: pairs of blocks, and the least seconds of one. Steps that a peer watches."""


def build(case: Case, planted: bool = True) -> Any:
    """The loop of a case, in this process."""
    from parts import from_spec

    from workbench.runs.task import _import

    builder = getattr(_import("task", case.name, str(case.source)), case.name)
    if case.spec is None:
        return builder(planted)
    spec = case.run_spec()
    if planted or case.removed is None:
        return from_spec(spec, builder() if planted else builder(planted=False), ranks())
    return from_spec(spec.replace(**case.removed), builder(), ranks(), reduce=bool(case.removed))


def ranks() -> Any:
    """This process among the others, as the loader wants to know it."""
    import torch

    from workbench.train.ranks import Ranks

    return Ranks(
        rank=int(os.environ.get("RANK", "0")), world_size=int(os.environ.get("WORLD_SIZE", "1")), device=torch.device("cpu"), store=None
    )


class Runner:
    """Blocks of steps of one loop."""

    def __init__(self, case: Case, planted: bool) -> None:
        self.case, self.loop = case, build(case, planted)
        self.batches: Iterator[Any] = self.loop.batches()

    def steps(self, count: int) -> float:
        """Seconds that so many steps take, on the slowest rank."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(self.loop.threads)
        together = dist.is_initialized()
        if together:
            dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            self.loop.step(next(self.batches))
        if together:
            dist.barrier()
        return time.perf_counter() - began


def truth(case: Case) -> dict[str, Any]:
    """What the step takes, and what it saves to take the planted cost away."""
    import torch.distributed as dist

    full, clean = Runner(case, True), Runner(case, not case.plants)
    counts = []
    for runner in (full, clean):
        runner.steps(case.settle)
        seconds = runner.steps(2 * case.period) / (2 * case.period)
        if dist.is_initialized():  # the same on all ranks
            told = [seconds]
            dist.broadcast_object_list(told)
            seconds = told[0]
        counts.append(-(-max(5, BLOCK / seconds) // case.period) * case.period)
    pairs = []
    for number in range(ROUNDS):
        took = {}
        for runner, count in ((full, counts[0]), (clean, counts[1]))[:: 1 if number % 2 else -1]:
            runner.steps(case.settle)
            took[runner] = runner.steps(int(count)) / count / runner.loop.samples
        pairs.append((took[full], took[clean]))
    saved = [1 - without / whole for whole, without in pairs]
    return {
        "step": statistics.median(whole for whole, _ in pairs) * full.loop.samples,
        "saved": statistics.median(saved),
        "spread": max(saved) - min(saved),
    }


def ours(case: Case, budget: float, prove: int, proof_budget: float) -> dict[str, Any]:
    """What wb.diagnose says, and for how many seconds it had to look; the first `prove` remedies that can be proved, proved."""
    import workbench as wb

    began = time.perf_counter()
    if case.spec is None:
        loop = build(case)
        named = {"model": loop.model, "optimizer": loop.optimizer} if loop.named else {}
        began = time.perf_counter()
        diagnosis = wb.diagnose(loop.step, loop.loader, budget_s=budget, **named)
    else:
        diagnosis = wb.diagnose(case.run_spec(), budget_s=budget)
    result = {
        "verdict": diagnosis.verdict,
        "cause": diagnosis.cause,
        "seconds": time.perf_counter() - began,
        "text": str(diagnosis),
        "diagnosis": diagnosis.to_json(),
        "proofs": [],
    }
    provable = [remedy for remedy in diagnosis.remedies if remedy.change and not remedy.ceiling]
    for remedy in provable[:prove]:
        began = time.perf_counter()
        proof = diagnosis.prove(remedy, budget_s=proof_budget)
        result["proofs"].append(proof.to_json() | {"text": str(proof), "took": time.perf_counter() - began})
    return result


def watch(loop: Any, steps: int, mark: Callable[[], AbstractContextManager[Any]]) -> None:
    """An ordinary loop with a peer's mark around each step."""
    batches = loop.batches()
    for _ in range(steps):
        batch = next(batches)
        with mark():
            loop.step(batch)


def traceml(case: Case) -> dict[str, Any]:
    """TraceML judges when the process has ended."""
    import traceml_ai

    traceml_ai.init(mode="auto")
    loop = build(case)
    watch(loop, STEPS, lambda: traceml_ai.trace_step(loop.model))
    return {}


def plugin(case: Case, out: Path) -> dict[str, Any]:
    """What the TensorBoard plugin for torch.profiler recommends, on a trace as its documentation takes it."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    loop, traces = build(case), []

    def keep(profiler: Any) -> None:
        traces.append(str(out.with_suffix(f".{os.environ.get('RANK', '0')}.trace.json")))
        profiler.export_chrome_trace(traces[-1])

    cycle = schedule(wait=5, warmup=2, active=max(10, case.period), repeat=1)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, schedule=cycle, on_trace_ready=keep) as profiler:
        watch(loop, 8 + max(10, case.period), lambda: _stepping(profiler))
    from torch_tb_profiler.profiler.data import RunProfileData

    advice = RunProfileData.parse("rank", "span", traces[0], str(out.parent)).recommendations
    Path(traces[0]).unlink()
    return {"advice": list(advice)}


class _stepping(AbstractContextManager[None]):
    """Tells a profiler where a step ends."""

    def __init__(self, profiler: Any) -> None:
        self.profiler = profiler

    def __exit__(self, *_: object) -> None:
        self.profiler.step()


def main() -> None:
    """Judge, and write what was found as JSON (rank 0)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("tool", choices=("truth", "ours", "traceml", "plugin"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=30)
    parser.add_argument("--proof-budget", type=float, metavar="S", help="seconds of each proof; without it those of the diagnosis")
    parser.add_argument("--prove", type=int, nargs="?", const=1, default=0, metavar="N", help="prove the first N remedies that can be")
    given = parser.parse_args()
    case = find(given.case)
    alone = given.tool == "ours" and case.spec is not None  # launches by itself
    if case.ranks > 1 and not alone and "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
        sys.exit(subprocess.run([*command, *sys.argv], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode)
    if not alone:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if case.ranks > 1:
            dist.init_process_group("gloo")
    match given.tool:
        case "truth":
            found = truth(case)
        case "ours":
            found = ours(case, given.budget, given.prove, given.proof_budget or given.budget)
        case "traceml":
            found = traceml(case)
        case _:
            found = plugin(case, given.out)
    if os.environ.get("RANK", "0") == "0":
        given.out.write_text(json.dumps(found))
    if case.ranks > 1 and not alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
