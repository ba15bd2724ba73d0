"""The benchmarks as `make bench` runs them: all are listed, their arguments exist, and a failure stops nothing. None is run here."""

import argparse
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as program
from benchmarks.__main__ import BENCHMARKS, HERE, Benchmark

OPTIONS = {"hta": "/hta/bin/python", "points": "points.csv", "peers": "/peers"}
FILES = {path.stem: path.read_text(encoding="utf-8") for path in HERE.glob("*.py")}
COMMANDS = [(name, command) for name, benchmark in BENCHMARKS.items() for command in benchmark.commands]


class Parsed(Exception):
    """Arguments were accepted."""


@pytest.fixture
def paths() -> Iterator[None]:
    """Some benchmarks put folders on sys.path."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def test_every_file_is_a_benchmark_or_a_part_of_one() -> None:
    parts = {part for benchmark in BENCHMARKS.values() for part in benchmark.parts}
    assert not parts & set(BENCHMARKS)
    assert {*BENCHMARKS, *parts, "__init__", "__main__"} == set(FILES)
    for name in BENCHMARKS:
        assert '\nif __name__ == "__main__":\n' in FILES[name], name


def test_a_part_is_used_by_its_benchmark_or_by_another_of_its_parts() -> None:
    for name, benchmark in BENCHMARKS.items():
        for part in benchmark.parts:
            users = {name, *benchmark.parts} - {part}
            assert any(re.search(rf"\b{part}\b", FILES[user]) for user in users), f"{name}: {part}"


@pytest.mark.usefixtures("paths")
def test_the_arguments_of_every_command_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = argparse.ArgumentParser.parse_args

    def parse_only(self: argparse.ArgumentParser) -> None:
        accept(self)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    for name, command in COMMANDS:
        words = program.arguments_of(command, OPTIONS)
        if "argparse" not in FILES[name]:
            assert all(not word.startswith("-") for word in words), name
            continue
        monkeypatch.setattr(sys, "argv", [name, *words])
        with pytest.raises(Parsed):
            importlib.import_module(f"benchmarks.{name}").main()


def test_what_needs_an_option_says_so_and_what_can_do_without_it_runs() -> None:
    assert program.arguments_of("--a 1 [--hta {hta}] {points}", OPTIONS) == ["--a", "1", "--hta", "/hta/bin/python", "points.csv"]
    assert program.arguments_of("[--hta {hta}]", {"hta": "/a folder/python"}) == ["--hta", "/a folder/python"]
    assert program.arguments_of("[--hta {hta}]", {"hta": ""}) == []
    with pytest.raises(program.MissingOption, match="needs --points"):
        program.arguments_of("{points}", {"points": ""})


def test_a_failure_stops_nothing_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.py").write_text("import sys\nprint('bad', *sys.argv[1:])\nsys.exit(3)\n")
    (tmp_path / "good.py").write_text("print('good')\n")
    listed = {"bad": Benchmark(commands=("--first", "")), "needy": Benchmark(commands=("{points}",)), "good": Benchmark()}
    monkeypatch.setattr(program, "HERE", tmp_path)
    monkeypatch.setattr(program, "BENCHMARKS", listed)
    assert program.main([]) == 1
    said = capfd.readouterr().out
    assert "bad --first\n" in said
    assert said.index("===== good.py\ngood\n") > said.index("===== bad.py: exit code 3")
    tail = "left out: needy: needs --points\nfailed: bad.py --first (exit code 3)\nfailed: bad.py (exit code 3)\n"
    assert said.endswith(f"\n3 benchmarks, 2 failed commands\n{tail}")
    assert program.main(["good", "needy"]) == 0


def test_benchmarks_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert re.findall(r"^\w+$", listed, re.MULTILINE) == list(BENCHMARKS)
    assert "    python benchmarks/verdicts.py --held-out\n" in listed
    with pytest.raises(SystemExit):
        program.main(["verdict"])
    assert "no benchmark verdict: there are timer_cost, " in capsys.readouterr().err


def test_results_name_every_benchmark() -> None:
    results = (HERE / "RESULTS.md").read_text(encoding="utf-8")
    assert [name for name in BENCHMARKS if f"{name}.py" not in results] == []


def test_why_a_process_of_the_timers_ended_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it closes its line before it writes."""
    from benchmarks import timer_cost

    ends = tmp_path / "ends"
    connect = "socket.create_connection(('127.0.0.1', int(os.environ['BENCH_PORT']))).close()"
    ends.write_text(f"#!{sys.executable}\nimport os, socket, sys, time\n{connect}\ntime.sleep(0.3)\nsys.exit('no such module')\n")
    ends.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(ends))
    with pytest.raises(SystemExit, match="the process for plain ended:\nno such module"):
        timer_cost.Worker("plain", tmp_path, 1)


def test_a_published_program_has_its_weights_once() -> None:
    from benchmarks.memory_programs import Figure, training

    figure = Figure(
        measured={},
        source="",
        program=training(
            lambda: torch.nn.Linear(4096, 4096, bias=False),
            lambda: (torch.randn(1, 4096),),
            lambda model, batch: (model(batch[0]).sum(),),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ),
    )
    weights = 4 * 4096**2
    assert 2 * weights <= figure.predicted()["allocated"] < 2.7 * weights  # with gradients and cuBLAS's workspace


@pytest.mark.usefixtures("paths")
def test_the_time_to_a_verdict_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = importlib.import_module("benchmarks.verdicts")
    cases = [verdicts.CASES[name] for name in ("healthy_mlp", "python_metric", "slow_storage")]
    answers = {
        ("healthy_mlp", "ours"): [{"verdict": "compute-bound", "cause": "compute", "seconds": 10.0, "took": 12.0, "proofs": []}],
        ("python_metric", "ours"): [{"verdict": "input-bound", "cause": "loader", "seconds": 13.0, "took": 16.0, "proofs": []}],
    }
    verdicts.show(cases, ["ours"], answers)
    printed = capsys.readouterr().out
    assert "✓ 1/1 compute-bound (compute), 10 s" in printed
    assert "✗ 0/1 input-bound (loader), 13 s" in printed
    assert "no time was left" in printed
    assert "1 of 2 (50 %)" in printed
    assert "median time to a verdict 11.5 s, longest 13.0 s (14.0 s and 16.0 s with the start of the process), in 2 diagnoses" in printed


@pytest.mark.usefixtures("paths")
def test_one_that_is_interrupted_leaves_no_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it waits for its threads at the end, and every later test that needs a group fails."""
    joined = list[bool]()

    def interrupted(*_: object, **__: object) -> None:
        joined.append(torch.distributed.is_initialized())
        raise KeyboardInterrupt

    named = {
        name: importlib.import_module(f"benchmarks.{name}") for name in ("deterministic", "planted_numerics", "checkpoints", "noise_scale")
    }
    calls: dict[str, tuple[str, Callable[[], object]]] = {
        "deterministic": ("ratios", lambda: named["deterministic"].main()),
        "planted_numerics": ("steps.trained", lambda: list(named["planted_numerics"].bad_steps())),
        "checkpoints": ("Trainer", lambda: named["checkpoints"].prices(tmp_path)),
        "noise_scale": ("_pairs", lambda: named["noise_scale"]._cost(0, ("fashion-mlp", 8, 2, 1), None, 1.0, str(tmp_path))),
    }
    monkeypatch.setattr(sys, "argv", ["deterministic"])
    for name, (where, call) in calls.items():
        monkeypatch.setattr(f"benchmarks.{name}.{where}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()
        assert not torch.distributed.is_initialized(), name
    assert joined == [True] * len(calls)


def test_a_checkpoint_is_saved_and_loaded_by_each_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module("benchmarks.checkpoints").compare(tmp_path, megabytes=1, rounds=2)
    said = [line.rpartition(": ")[0] for line in capsys.readouterr().out.splitlines()]
    assert {"save: the workbench beside dcp.save", "save: dcp.save beside torch.save", "load: the workbench beside dcp.load"} <= set(said)


def test_the_price_of_a_checkpoint_is_its_stall_and_slower_steps() -> None:
    rounds = [{"none": 1.0, "a thread": 1.5}, {"none": 1.1, "a thread": 1.4}, {"none": 1.0, "a thread": 1.8}]
    price, slower = importlib.import_module("benchmarks.checkpoints").price_of(rounds, [0.1, 0.1, 0.2], "a thread")
    assert (price, slower) == (pytest.approx(0.5), pytest.approx(0.4))
