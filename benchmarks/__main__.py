"""Runs the benchmarks: `python -m benchmarks [NAME…] [--list] [--hta PYTHON] [--points FILE] [--peers FOLDER]`, or `make bench`.

Each benchmark runs in a process of its own, with the arguments that `BENCHMARKS` lists. Where one fails the next one follows, and the
summary at the end names those that failed. All of them take hours; nothing else should run on the machine meanwhile. What needs a GPU is
not part of it: `make gpu-check`.

Exit code: 0 all that ran succeeded, 1 a benchmark failed, 2 wrong arguments.
"""

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
OPTION = re.compile(r"\{(\w+)\}")
"""Where an option of this program stands in the arguments of a benchmark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A file in this folder that is a program."""

    commands: tuple[str, ...] = ("",)
    """It runs once with each of these arguments. `[…]` is left out where the option that stands in it is not given."""
    parts: tuple[str, ...] = ()
    """Files in this folder that it imports or starts, and that do nothing by themselves."""
    peers: str = ""
    """What has to be installed for all of its columns, beyond `pip install -e '.[tensorboard,bench]'`."""


MEMORY = ("memory_cases", "memory_judges", "memory_programs", "memory_published", "memory_scale", "published_formulas")
BENCHMARKS = {
    "timer_cost": Benchmark(),
    "large_runs": Benchmark(),
    "launch_overhead": Benchmark(),
    "culprits": Benchmark(),
    "what_changed": Benchmark(),
    "compare_traceml": Benchmark(),
    "hangs": Benchmark(),
    "pipeline_time": Benchmark(),
    "planted_numerics": Benchmark(),
    "planted_sanity": Benchmark(),
    "random_kills": Benchmark(),
    "checkpoints": Benchmark(),
    "loss_equality": Benchmark(),
    "deterministic": Benchmark(),
    "estimates": Benchmark(),
    "estimate_time": Benchmark(),
    "near_duplicates": Benchmark(commands=("", "--texts"), peers="imagededup 0.3.3 without its CNN, cleanlab 2.9.0, datatrove 0.10.1"),
    "memory": Benchmark(commands=("[--install {peers}]",), parts=MEMORY),
    "verdicts": Benchmark(commands=("", "--held-out")),
    "proofs": Benchmark(commands=("", "--held-out")),
    "emulated_gallery": Benchmark(),
    "reductions": Benchmark(),
    "traces": Benchmark(commands=("[--hta {hta}]", "--sizes 1000 --rounds 1 --only workbench")),
    "collectives": Benchmark(parts=("collectives_ranks", "volumes")),
    "two_hosts": Benchmark(parts=("published_times", "two_hosts_rank", "volumes")),
    "reality": Benchmark(parts=("published_scaling", "published_times", "volumes")),
    "reality_layouts": Benchmark(parts=("published_layouts", "published_scaling")),
    "scaling_law": Benchmark(commands=("{points}",)),
    "lr_finder": Benchmark(commands=("--peers --text",), peers="fastai 2.8.12, pytorch-lightning 2.6.6, torch-lr-finder 0.2.2"),
    "adam_rule": Benchmark(),
    "large_batch": Benchmark(),
    "steps_to_target": Benchmark(),
    "noise_scale": Benchmark(),
    "why_not_linear": Benchmark(parts=("planted_ranks",)),
    "change_points": Benchmark(),
    "formats": Benchmark(commands=("",), peers="webdataset, litdata, grain with array-record, datasets"),
}


class MissingOption(ValueError):
    """A benchmark cannot run without an option that was not given."""


def arguments_of(command: str, options: dict[str, str]) -> list[str]:
    """The words of a command, with options filled in.

    Raises:
        MissingOption: one is needed and was not given.
    """
    command = re.sub(r"\[([^]]*)\]", lambda match: match[1] if all(options.get(name) for name in OPTION.findall(match[1])) else "", command)
    for name in OPTION.findall(command):
        if not options.get(name):
            raise MissingOption(f"needs --{name}")
    return [OPTION.sub(lambda match: options[match[1]], word) for word in shlex.split(command)]


def title(name: str) -> str:
    """The first line of a benchmark's docstring."""
    return (ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or "").partition("\n")[0]


def describe() -> str:
    """What `--list` prints: each benchmark, its commands, and which peers it needs."""
    lines = []
    for name, benchmark in BENCHMARKS.items():
        lines += [name, f"    {title(name)}"]
        for command in benchmark.commands:
            lines.append(f"    python benchmarks/{name}.py {OPTION.sub(lambda match: match[1].upper(), command)}".rstrip())
        lines += [f"    also compares with: {benchmark.peers}"] * bool(benchmark.peers)
    return "\n".join(lines)


def run(name: str, options: dict[str, str]) -> tuple[list[str], list[str]]:
    """Run a benchmark with each of its arguments.

    Returns:
        What failed, and what was left out with the reason.
    """
    failed, left_out = [], []
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    for command in BENCHMARKS[name].commands:
        try:
            words = arguments_of(command, options)
        except MissingOption as why:
            left_out.append(f"{name}: {why}")
            continue
        shown = shlex.join([f"{name}.py", *words])
        print(f"\n===== {shown}", flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="torchrun-") as logs:  # else each torchrun leaves a folder
            done = subprocess.run(
                [sys.executable, str(HERE / f"{name}.py"), *words],
                env={"PET_LOG_DIR": logs, **os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
            )
        print(f"===== {shown}: exit code {done.returncode}, {time.monotonic() - began:.0f} s", flush=True)
        if done.returncode:
            failed.append(f"{shown} (exit code {done.returncode})")
    return failed, left_out


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What was asked for; ends the program with a message for a benchmark that does not exist."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run, in this order; none = all")
    parser.add_argument("--list", action="store_true", help="list the benchmarks and their arguments, and end")
    parser.add_argument("--hta", default="", metavar="PYTHON", help="a Python that has HolisticTraceAnalysis 0.5.0, for traces")
    parser.add_argument("--points", default="", metavar="FILE", help="the CSV file that scaling_law needs; its docstring says where it is")
    parser.add_argument("--peers", default="", metavar="FOLDER", help="an environment with the peers of memory; it is made where missing")
    given = parser.parse_args(words)
    if unknown := [name for name in given.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}: there are {', '.join(BENCHMARKS)}")
    return given


def main(words: list[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    given = arguments(words)
    if given.list:
        print(describe())
        return 0
    options = {name: getattr(given, name) for name in ("hta", "points", "peers")}
    failed: list[str] = []
    left_out: list[str] = []
    names = given.names or list(BENCHMARKS)
    for name in names:
        further, without = run(name, options)
        failed += further
        left_out += without
    print(f"\n{len(names)} benchmarks, {len(failed)} failed commands")
    for line in left_out:
        print(f"left out: {line}")
    for line in failed:
        print(f"failed: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
