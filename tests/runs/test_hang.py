"""Who holds up a run: judged by what ranks have written, of planted hangs and of healthy runs that are merely slow."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core import run_directory
from workbench.runs import hang
from workbench.runs.failure import Failure
from workbench.runs.hang import Hang, judge
from workbench.runs.root_cause import first_failure

TORCH, C10D = "/env/site-packages/torch", "/env/site-packages/torch/distributed/distributed_c10d.py"
MAIN = ("/home/me/train.py", 70, "<module>", "main()", True)
BACKWARD = [
    (f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward", "return run_backward(", False),
    (f"{TORCH}/_tensor.py", 623, "backward", "torch.autograd.backward(", False),
    ("/home/me/train.py", 61, "train", "loss.backward()", True),
    MAIN,
]


def row(number: int | None, op: str = "all_reduce", **more: Any) -> dict[str, Any]:
    """A collective in a rank's report."""
    return {"group": "0", "number": number, "op": op, "sizes": [[20]], "dtype": "Float", "pending": False, "frames": []} | more


def report(rank: int, frames: Any, *, last: int = 412, done: bool = True, quiet: float = 9.0, **more: Any) -> dict[str, Any]:
    """What a rank writes: its main thread's frames (innermost first), and how many collectives it has called."""
    rows = [row(n) for n in range(max(1, last - 8), last)] + [row(last, pending=not done, frames=[tuple(frame[:3]) for frame in frames])]
    base = {"rank": rank, "pid": 1, "time": 1000.0, "quiet": quiet, "usual": 0.2, "steps": 100, "numbers": {"0": last}, "works": False}
    base |= {"repeats": False, "threads": [{"name": "MainThread", "main": True, "frames": list(frames)}], "collectives": rows}
    return base | {"groups": {}, "no_recorder": ""} | more


def waits(rank: int, **more: Any) -> dict[str, Any]:
    """A rank that waits in the reduction of its gradients."""
    return report(rank, BACKWARD, done=False, **more)


def at(text: str, *outer: Any, name: str = "train", line: int = 88, above: Any = ()) -> list[Any]:
    """A stack that ends in a line of the user."""
    return [*above, ("/home/me/train.py", line, name, text, True), *outer, MAIN]


def call(op: str, line: int = 95, name: str = "train") -> list[Any]:
    """A stack in a collective that the user's code calls."""
    wrapper = ("/env/site-packages/torch/distributed/c10d_logger.py", 83, "wrapper", "return func(*args)", False)
    return at(f"dist.{op}(x)", name=name, line=line, above=[(C10D, 3245, op, "work.wait()", False), wrapper])


LIBRARY = {
    "threading": ("/usr/lib/python3.11/threading.py", 320, "wait", "waiter.acquire()", False),
    "queue": ("/usr/lib/python3.11/queue.py", 171, "get", "self.not_empty.wait()", False),
    "subprocess": ("/usr/lib/python3.11/subprocess.py", 1264, "wait", "return self._wait()", False),
    "loader": (f"{TORCH}/utils/data/dataloader.py", 1295, "_next_data", "self._get_data()", False),
    "exit": ("/usr/lib/python3.11/threading.py", 1590, "_shutdown", "lock.acquire()", False),
    "destroy": (C10D, 2000, "destroy_process_group", "pg.shutdown()", False),
    "init": (C10D, 1800, "init_process_group", "store.wait()", False),
    "share": ("/wt/workbench/train/ranks.py", 90, "share", "self.store.wait(keys, timeout)", False),
    "collect": ("/wt/workbench/train/ranks.py", 99, "collect", "time.sleep(POLL_S)", False),
    "run": ("/wt/workbench/train/validation.py", 78, "run", "parts = trainer.layout.readers.collect(", False),
}
PLANTED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "sleep": (report(1, at("time.sleep(100)"), last=411), {}, "rank 1 sleeps in train(), train.py:88", ""),
    "file lock": (
        report(1, at("time.sleep(1); fcntl.flock(file, fcntl.LOCK_EX)"), last=411),
        {},
        "rank 1 waits for the lock of a file in train(), train.py:88",
        "",
    ),
    "validate, idle": (
        report(1, at("time.sleep(100)", name="validate"), last=411, quiet=13.0),
        {"quiet": 13.0},
        "rank 1 sleeps in validate(), train.py:88",
        "",
    ),
    "lock": (report(1, at("with self.lock:"), last=411), {}, "waits for a lock or another thread in train(), train.py:88", ""),
    "condition": (report(1, at("done.wait()", above=[LIBRARY["threading"]]), last=411), {}, "waits for a lock or another thread", ""),
    "queue": (report(1, at("q.get()", above=[LIBRARY["threading"], LIBRARY["queue"]]), last=411), {}, "waits for a queue", ""),
    "process": (report(1, at("p.wait()", above=[LIBRARY["subprocess"]]), last=411), {}, "waits for a process that it started", ""),
    "loader": (
        report(1, at("for x in loader:", above=[LIBRARY["loader"]], line=40), last=411),
        {},
        "waits for its loader, train.py:40",
        "",
    ),
    "loop": (report(1, at("while not ok: n += 1"), last=411, works=True, repeats=True), {}, "repeats a loop in train() without", ""),
    "native": (report(1, at("library.call()"), last=411), {}, "is stuck in train(), train.py:88", ""),
    "left": (report(1, [LIBRARY["exit"]], last=411), {}, "rank 1 has left its script", ""),
    "destroy": (report(1, at("close()", above=[LIBRARY["destroy"]]), last=411), {}, "has ended its training", ""),
    "agree": (report(1, [LIBRARY["share"]], last=411), {}, "rank 1 waits in a message of all ranks (has it ended its loop?)", ""),
    "other op": (
        report(1, call("barrier"), done=False, collectives=[row(411), row(412, "barrier", pending=True)]),
        {},
        "waits in barrier number 412",
        "",
    ),
    "other shape": (
        report(1, call("all_reduce", 96), done=False, collectives=[row(411), row(412, sizes=[[7]], pending=True)]),
        {},
        "rank 1 waits in all_reduce number 412 ([7] Float)",
        "",
    ),
    "evaluates alone": (
        report(1, call("all_gather", 30, "validate"), done=False, collectives=[row(411), row(412, "all_gather", pending=True)]),
        {},
        "rank 1 waits in all_gather number 412",
        "in validate(), train.py:30",
    ),
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", PLANTED)
def test_names_the_rank_that_holds_up_the_others_its_line_and_what_they_wait_in(case: str, world_size: int) -> None:
    culprit, others, words, more = PLANTED[case]
    reports = {rank: waits(rank, **others) for rank in range(world_size)} | {1: culprit}

    said = judge(reports, world_size)

    assert said is not None
    assert said.rank == 1
    who = "rank 0 waits" if world_size == 2 else "ranks 0, 2, 3 wait"
    assert words in str(said)
    assert more in str(said)
    assert f"while {who} in all_reduce number 412 ([20] Float), called by backward, train.py:61" in str(said)
    assert "train.py" in said.stacks[0]
    assert "line 61, in train" in said.stacks[0]


def test_the_marks_of_a_watched_script_are_no_callers() -> None:
    forward = [
        (f"{TORCH}/nn/parallel/distributed.py", 1660, "forward", "self._pre_forward()", False),
        ("/env/site-packages/workbench/timeline/hooks.py", 48, "marked", "output = call(*args, **kwargs)", False),
        (f"{TORCH}/nn/modules/module.py", 1773, "_wrapped_call_impl", "return self._compiled_call_impl()", False),
        ("/home/me/train.py", 61, "train", "model(batch)", True),
        MAIN,
    ]
    said = judge({0: report(0, forward, done=False), 1: PLANTED["sleep"][0]}, 2)
    assert said is not None
    assert "called by forward, train.py:61" in str(said)


def test_names_ranks_that_cannot_speak_for_themselves() -> None:
    others = {rank: waits(rank) for rank in (0, 2, 3)}
    dump = 'Current thread 0x1 (most recent call first):\n  File "/me/native.py", line 7 in fft\n  File "/me/t.py", line 9 in <module>'

    assert "rank 1 has ended: its process is gone, while ranks 0, 2, 3" in str(judge(others, 4, ended=[1]))
    stuck = judge(others, 4, silent={1: ("is in C code that holds Python's lock", dump)})
    assert stuck
    assert "rank 1 is in C code that holds Python's lock, native.py:7 in fft()" in str(stuck)
    assert stuck.stacks[1] == dump
    assert "rank 1 is stopped" in str(judge(others, 4, silent={1: ("is stopped (SIGSTOP)", "")}))
    assert judge(others, 4) is None  # nobody knows anything of rank 1
    worker = 'Thread 0x1 (most recent call first):\n  File "/home/me/data.py", line 14 in __getitem__'
    loader = others | {1: report(1, at("for x in loader:", above=[LIBRARY["loader"]]), last=411)}
    said = judge(loader, 4, workers={1: ("data.py:14 in __getitem__()", worker)})
    assert said
    assert "waits for its loader, whose worker is at data.py:14 in __getitem__()" in str(said)
    assert worker in said.stacks[1]


IN_C, EVALUATES = (
    'Current thread 0x1 (most recent call first):\n  File "/me/native.py", line 7 in fft\n' + outer
    for outer in ('  File "/me/train.py", line 9 in <module>', '  File "/me/train.py", line 30 in evaluate')
)


@pytest.mark.parametrize(
    ("busy", "steps", "dump", "seconds"),
    [
        ("", 100, IN_C, hang.FLOOR),
        (hang.USES_CPU, 100, IN_C, hang.FLOOR),
        (hang.WAITS_FOR_A_CORE, 100, IN_C, hang.WORKING),
        ("", 1, IN_C, hang.SILENT_START),
        (hang.USES_CPU, 1, IN_C, hang.WORKING),
        (hang.WAITS_FOR_A_CORE, 0, IN_C, hang.WORKING),
        ("", 100, EVALUATES, hang.PLANNED),
        (hang.USES_CPU, 100, EVALUATES, hang.WORKING),
        ("", 1, IN_C.replace("/me/train.py", "/lib/workbench/train/validation.py"), hang.WORKING),
    ],
)
def test_a_rank_that_cannot_answer_has_more_time_where_it_starts_or_gets_no_core(busy: str, steps: int, dump: str, seconds: float) -> None:
    silent = {1: ("is in C code that holds Python's lock", dump)}

    before, after = (judge({0: waits(0, quiet=seconds + d, steps=steps)}, 2, silent=silent, busy={1: busy}) for d in (-0.5, 0.5))

    assert before is None
    assert after is not None
    assert after.rank == 1
    assert ("does not get a core" in after.doing) == (busy == hang.WAITS_FOR_A_CORE)
    stopped = judge({0: waits(0, steps=steps)}, 2, silent={1: ("is stopped (SIGSTOP)", "")}, busy={1: busy})
    assert stopped is not None
    assert "rank 1 is stopped" in str(stopped)


@pytest.mark.parametrize("checking", [False, True])
def test_ranks_that_have_evaluated_wait_for_the_one_that_still_does(checking: bool) -> None:
    inner = [(f"{TORCH}/distributed/_store.py", 5, "check", "return self._check(keys)", False)] if checking else []
    collecting = [*inner, LIBRARY["collect"], LIBRARY["run"]]
    others = {rank: report(rank, collecting, quiet=70.0, works=checking) for rank in (1, 2)}
    scoring = [("/home/me/task.py", 30, "score", "time.sleep(70)", True), LIBRARY["run"]]

    assert judge(others | {0: report(0, scoring, works=True, quiet=70.0)}, 3) is None  # it computes, however long others wait
    within = {rank: rows | {"quiet": 9.0} for rank, rows in (others | {0: report(0, scoring)}).items()}
    assert judge(within, 3) is None
    late_ones = {rank: rows | {"quiet": 310.0} for rank, rows in others.items()}
    assert judge(others | {0: report(0, scoring, quiet=70.0)}, 3) is None  # it was planned, and may wait for a disk or another program
    idle = judge(late_ones | {0: report(0, scoring, quiet=310.0)}, 3)
    assert idle is not None
    assert (idle.rank, idle.line) == (0, "task.py:30")
    assert "rank 0 sleeps in score(), task.py:30, while ranks 1, 2 wait in the evaluation" in str(idle)
    late = judge({0: late_ones[1] | {"rank": 0}, 1: report(1, scoring, quiet=310.0), 2: late_ones[2]}, 3)
    assert late is not None
    assert late.rank == 1  # rank 0 collects what all have evaluated
    skipped = judge({0: others[1] | {"rank": 0}, 1: waits(1, last=413, quiet=70.0), 2: others[2]}, 3)
    assert skipped is not None
    assert skipped.rank == 1  # it goes on without evaluating
    assert judge({rank: others[1] | {"rank": rank} for rank in range(3)}, 3) is None


SLEEPS, LOCKED = at("time.sleep(60)"), at("with lock:")


@pytest.mark.parametrize(
    ("others", "seconds"),
    [
        ({1: report(1, SLEEPS, last=3, idle=9.0)}, hang.IDLE_START),
        ({1: report(1, LOCKED, last=3, idle=9.0), 2: report(2, LOCKED, last=3, idle=8.0)}, hang.IDLE_START),
        ({1: report(1, SLEEPS, last=3, idle=9.0, numbers={}, steps=0)}, hang.IDLE_START),
        ({1: report(1, SLEEPS, last=3)}, hang.STARTING),  # /proc does not tell
        ({1: report(1, SLEEPS, last=3, idle=3.0)}, hang.STARTING),  # it did something just now
        ({1: report(1, at("x", above=[(f"{TORCH}/cuda/__init__.py", 9, "synchronize", "", False)]), last=3, idle=99.0)}, hang.STARTING),
        ({1: report(1, LOCKED, last=3, idle=9.0), 2: report(2, SLEEPS, last=3)}, hang.STARTING),  # it may wait for rank 2
        ({1: report(1, LOCKED, last=3, idle=9.0), 2: report(2, SLEEPS, last=3, works=True)}, hang.STARTING),
    ],
)
def test_before_the_second_step_a_rank_is_named_soon_if_no_rank_does_anything(others: dict[int, Any], seconds: float) -> None:
    def judged(quiet: float) -> Hang | None:
        reports = {0: waits(0, last=4), **others, 3: waits(3, last=4)}
        starting = {rank: row | {"steps": row["steps"] and None, "quiet": quiet} for rank, row in reports.items()}
        return judge(dict(enumerate(starting.values())), len(starting))

    assert judged(seconds - 0.5) is None
    late = judged(seconds + 0.5)
    assert late is not None
    assert late.rank == 1


def test_a_subgroup_waits_for_its_member_that_is_elsewhere() -> None:
    groups = {"0": [0, 1, 2, 3], "5": [0, 1]}
    sub = [row(412), row(9, group="5", pending=True)]
    reports: dict[int, Any] = {
        0: report(0, call("all_reduce", 33), collectives=sub, numbers={"0": 412, "5": 9}, groups=groups),
        1: report(1, at("time.sleep(9)"), numbers={"0": 412, "5": 8}, groups=groups),
        2: waits(2, last=413, groups=groups),
        3: waits(3, last=413, groups=groups),
    }

    said = judge(reports, 4)

    assert said
    assert said.rank == 1
    assert "rank 0 waits in all_reduce number 9 of group 5" in str(said)
    reports[1] = waits(1, last=413, numbers={"0": 413, "5": 8}, groups=groups)  # it skipped the call, and waits for rank 0 itself
    said = judge(reports, 4)
    assert said
    assert said.rank in (0, 1)
    assert "of group 5" in str(said)


@pytest.mark.parametrize("members", [[2, 3], [1, 2, 3]])
def test_the_rank_that_skips_a_call_of_its_subgroup_is_named(members: list[int]) -> None:
    """It waits in the next call of all ranks; those of its group wait for it, and the others for these."""
    groups = {"0": [0, 1, 2, 3], "5": members}

    def of(rank: int) -> dict[str, Any]:
        rows = []
        for step in range(12):
            rows.append(row(2 * step + 1, sizes=[[7]]))
            if rank in members and not (step == 11 and rank == 3):
                rows.append(row(step + 1, group="5", sizes=[[5]]))
            rows.append(row(2 * step + 2, sizes=[[3]]))
        if rank in members and rank != 3:
            rows.pop()  # it waits in its group
        rows[-1]["pending"] = True
        numbers = {"0": max(entry["number"] for entry in rows if entry["group"] == "0"), "5": 11 + (rank != 3)}
        return report(rank, call("all_reduce"), collectives=rows, numbers=numbers, groups=groups)

    said = judge({rank: of(rank) for rank in range(4)}, 4)

    assert said
    assert said.rank == 3
    assert "in all_reduce number 24 ([3] Float)" in str(said)


def test_ranks_that_wait_for_each_other_are_told_apart_by_what_followed_before() -> None:
    usual = [row(n, ("all_reduce", "broadcast")[n % 2]) for n in range(400, 412)]
    reports = {
        0: report(0, call("barrier"), done=False, collectives=[*usual, row(412, "barrier", pending=True)]),
        1: report(1, call("all_reduce"), done=False, collectives=[*usual, row(412, "all_reduce", pending=True)]),
    }

    said = judge(reports, 2)

    assert said
    assert said.rank == 0


@pytest.mark.parametrize("other", [{"sizes": [[1]]}, {"dtype": "Long"}])
def test_a_broadcast_on_one_rank_alone_is_not_that_of_the_others(other: dict[str, Any]) -> None:
    """All ranks give a broadcast a tensor of the same size and type: DDP's of its buffers is not that of a best metric."""
    usual = [row(n, ("all_reduce", "broadcast")[n % 2]) for n in range(400, 413)]
    alone = [*usual, row(413, "broadcast", pending=True, **other)]
    reports = {
        0: report(0, call("broadcast"), last=413, done=False, collectives=alone),
        1: report(1, call("broadcast"), last=413, done=False, collectives=[*usual, row(413, "broadcast", pending=True)]),
    }

    said = judge(reports, 2)

    assert said
    assert said.rank == 0
    assert "which rank 1 has not called" in str(said)


def message(rank: int, op: str, peer: int, *, tag: int = 0, idle: float = 0.0, **more: Any) -> dict[str, Any]:
    """A rank that waits for one other: gloo's recorder has no row of it."""
    said = {"op": op, "peer": peer, "tag": tag}
    return report(rank, [(C10D, 2753, op, "work.wait()", False), *call(op)[1:]], last=26, message=said, idle=idle, **more)


AWAITED = at("request.wait()", line=82)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (("send", 1, 0), ("send", 0, 0), "rank 0 waits in send to rank 1, train.py:95; rank 1 waits in send to rank 0, train.py:95"),
        (("recv", 1, 0), ("recv", 0, 0), "rank 0 waits in recv from rank 1, train.py:95; rank 1 waits in recv from rank 0, train.py:95"),
        (("send", 1, 1), ("recv", 0, 2), "rank 0 waits in send to rank 1 (tag 1), train.py:95; rank 1 waits in recv from rank 0 (tag 2)"),
    ],
)
def test_ranks_that_wait_for_each_others_messages_are_named_soon_if_nothing_at_all_happens(first: Any, second: Any, words: str) -> None:
    def both(quiet: float, idle: float, **more: Any) -> dict[int, Any]:
        return {
            rank: message(rank, op, peer, tag=tag, quiet=quiet, idle=idle, **more) for rank, (op, peer, tag) in enumerate((first, second))
        }

    said = judge(both(12, 9), 2)

    assert said is not None
    assert said.rank is None
    assert f"no rank goes on: they wait for each other's messages, while {words}" in str(said)
    assert judge(both(12, 5), 2) is None  # bytes may be on their way
    assert judge(both(hang.IN_TRANSIT - 1, 0), 2) is None
    assert judge(both(hang.IN_TRANSIT + 1, 0), 2) is not None
    assert judge(both(hang.WORKING - 1, 0, works=True), 2) is None
    assert judge(both(hang.WORKING + 1, 0, works=True), 2) is not None
    sometimes = both(40, 20)
    sometimes[1] |= {"time": 1000.0 + 14}  # rank 0 wrote its report before rank 1 was idle for long
    assert judge(sometimes, 2) is None


def test_ranks_that_wait_for_their_own_requests_for_messages_wait_for_each_other() -> None:
    groups = {"0": [0, 1, 2]}
    both = {rank: report(rank, AWAITED, last=26, quiet=12.0, idle=9.0, groups=groups) for rank in range(2)}

    said = judge(both, 2)

    assert said is not None
    assert "they wait for each other's messages, while ranks 0, 1 wait in wait() of a request, train.py:82" in str(said)
    slow = report(0, at("model(x)"), last=26, quiet=90.0, works=True, groups=groups)
    reports = {0: slow, 1: both[1] | {"quiet": 90.0}, 2: waits(2, last=27, quiet=90.0, groups=groups)}
    assert judge(reports, 3) is None  # a slow stage of a pipeline, the next one, and a rank that reduces already
    alone = judge({0: report(0, at("os.wait()"), quiet=31.0, groups=groups)}, 1)
    assert alone is not None
    assert alone.rank == 0  # a child process


def test_without_a_recorder_the_stacks_say_who_waits() -> None:
    bare = {"collectives": [], "numbers": {}, "no_recorder": "torch 2.6 has none", "steps": 5}
    said = judge({0: report(0, call("all_reduce"), **bare), 1: report(1, at("time.sleep(9)"), **bare)}, 2)
    assert said
    assert "rank 1 sleeps in train(), train.py:88, while rank 0 waits in all_reduce, train.py:95" in str(said)
    for quiet, idle in ((61.0, 0.0), (20.0, 9.0)):  # a collective without a number is no message
        both = {rank: report(rank, call("all_reduce"), quiet=quiet, idle=idle, **bare) for rank in range(2)}
        assert judge(both, 2) is None
    first = judge({0: report(0, at("init()", above=[LIBRARY["init"]]), quiet=31.0, **bare | {"steps": None}),
                   1: report(1, at("time.sleep(9)"), quiet=31.0, **bare | {"steps": None})}, 2)  # fmt: skip
    assert first
    assert first.rank == 1
    assert "rank 0 waits in init_process_group" in str(first)


IMPORTING = [
    (f"{TORCH}/distributed/tensor/__init__.py", 4, "<module>", "import torch.distributed.tensor._ops", False),
    ("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed", "", False),
]
HEALTHY: dict[str, dict[int, dict[str, Any]]] = {
    "both load torch, on a busy machine": {
        r: report(r, at("import torch", above=IMPORTING), last=0, quiet=90, steps=None) for r in range(2)
    },
    "rank 1 computes for a minute": {0: waits(0, quiet=60), 1: report(1, at("model(x)"), last=411, works=True, quiet=60)},
    "rank 1 evaluates for four minutes": {
        0: waits(0, quiet=240),
        1: report(1, at("f(x)", name="evaluate"), works=True, last=411, quiet=240),
    },
    "rank 0 writes a checkpoint": {1: waits(1, quiet=9), 0: report(0, at("torch.save(m)", name="save_checkpoint"), last=411, quiet=9)},
    "the first step is slow": {0: waits(0, quiet=20, steps=0), 1: report(1, at("time.sleep(60)"), last=411, quiet=20, steps=0)},
    "a script starts": {0: waits(0, last=3, quiet=20, steps=None), 1: report(1, at("sleep(9)"), last=2, quiet=20, steps=None)},
    "the loader is as slow as ever": {
        0: waits(0, quiet=20, usual=8.0),
        1: report(1, at("for x in loader", above=[LIBRARY["loader"]]), last=411, quiet=20, usual=8.0),
    },
    "workers decode": {0: waits(0, quiet=60), 1: report(1, at("for", above=[LIBRARY["loader"]]), last=411, works=True, quiet=60)},
    "all wait for their loaders": {r: report(r, at("for", above=[LIBRARY["loader"]]), quiet=25) for r in range(2)},
    "a stage waits for a slow one": {
        0: message(0, "recv", 1, quiet=200, idle=190),
        1: report(1, at("f()"), last=26, quiet=200, works=True),
    },
    "both are in a store": {r: report(r, at("f()", above=[LIBRARY["share"]]), quiet=200) for r in range(2)},
    "a large collective": {r: waits(r, quiet=50) for r in range(2)},
    "one rank goes on": {0: waits(0), 1: report(1, at("step()"), last=411, quiet=0.5)},
    "just now": {0: waits(0, quiet=6), 1: report(1, at("time.sleep(60)"), last=411, quiet=6)},
}


@pytest.mark.parametrize("case", HEALTHY)
def test_a_run_that_is_merely_slow_is_not_said_to_hang(case: str) -> None:
    assert judge(HEALTHY[case], 2) is None


def test_a_collective_that_does_not_end_is_nobodys_fault_and_idle_ranks_that_wait_for_nobody_are_named_late() -> None:
    stuck = judge({rank: waits(rank, quiet=61) for rank in range(2)}, 2)
    assert stuck
    assert stuck.rank is None
    assert "all have called the same collective" in str(stuck)
    alone = judge({0: report(0, at("lock.acquire()"), quiet=31)}, 1)
    assert alone
    assert alone.rank == 0
    assert "waits for a lock" in str(alone)
    assert "while" not in str(alone)


@given(rank=st.integers(0, 7), world_size=st.integers(2, 8), usual=st.floats(0, 20), quiet=st.floats(0, 120), works=st.booleans())
@settings(max_examples=60, deadline=None)
def test_whoever_is_behind_is_named_once_the_silence_is_out_of_the_ordinary(
    rank: int, world_size: int, usual: float, quiet: float, works: bool
) -> None:
    rank %= world_size
    reports = {other: waits(other, quiet=quiet, usual=usual) for other in range(world_size)}
    reports[rank] = report(rank, at("time.sleep(9)"), last=411, quiet=quiet, usual=usual, works=works)

    said = judge(reports, world_size)

    assert (said is not None) == (quiet >= max(hang.WORKING if works else hang.FLOOR, hang.USUAL * usual))
    assert said is None or (said.rank == rank and said.waiting[0].ranks == tuple(sorted(reports.keys() - {rank})))


def test_is_written_read_and_explains_a_run_that_failed_because_of_it(tmp_path: Any) -> None:
    said = judge({0: waits(0), 1: PLANTED["sleep"][0]}, 2)
    assert said is not None
    (tmp_path / run_directory.HANG).mkdir()
    run_directory.write_json(tmp_path / run_directory.RUN_JSON, {"timeout": 60})
    said.write(tmp_path)
    read = Hang.load(tmp_path)
    assert read == said

    failure = first_failure(tmp_path, {"state": "timeout"})
    assert failure
    assert failure.rank == 1
    assert failure.kind == "hang"
    assert failure.traceback == said.stacks[1]
    assert not said.explains(Failure(rank=0, kind="exception", message="ValueError", traceback=None, hint=None))
    assert hang.hang_note(said, False) == ""
    assert "no progress for 9 s (usually 0.2 s at most)" in hang.hang_note(said, True)
    for damaged in ("{", "{}", '{"stacks": {"x": 1}, "waiting": []}', '{"stacks": {}, "waiting": [{"ranks": 3}]}'):
        (tmp_path / run_directory.HANG / run_directory.HANG_JSON).write_text(damaged)
        assert Hang.load(tmp_path) is None
