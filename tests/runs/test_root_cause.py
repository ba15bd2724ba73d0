"""Which rank took another branch where ranks called different collectives: from records made by hand, and from a real launch."""

import json
from pathlib import Path

import pytest

import workbench as wb
from workbench.runs.failure import Failure
from workbench.runs.root_cause import different_collectives, first_failure

GLOO = "crashed (SIGABRT): op.preamble.length <= op.nbytes. 36 vs 4. Received data size doesn't match expected size."
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:8839: Connection reset by peer"
BACKWARD, REDUCE, OTHER = (37, "[34]"), (40, "[1]"), (50, "[7]")
"""Line and sizes of collectives."""
ROUNDS = [BACKWARD, REDUCE] * 20


def aborted(rank: int, line: int) -> Failure:
    """A rank that gloo ended: it left a stack, and no record."""
    stack = (
        f'Current thread 0x00007f (most recent call first):\n  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3 in '
        f'all_reduce\n  File "/home/me/train.py", line {line} in <module>'
    )
    return Failure(rank=rank, kind="crash", message=GLOO, traceback=stack, hint=None)


def reset(rank: int, line: int) -> Failure:
    traceback = (
        f'Traceback (most recent call last):\n  File "/home/me/train.py", line {line}, in <module>\n'
        f'  File "/x/site-packages/torch/_tensor.py", line 6, in backward\n{PEER}\n'
    )
    return Failure(rank=rank, kind="exception", message=PEER, traceback=traceback, hint=None)


def history(*calls: tuple[int, str]) -> list[tuple[str, str]]:
    return [(f"all_reduce ({sizes} Float)", f"train.py:{at}") for at, sizes in calls]


@pytest.mark.parametrize(
    ("at", "calls", "rank", "message"),
    [
        (
            40,
            [*ROUNDS, BACKWARD, BACKWARD],
            1,
            "probably skipped the collective at train.py:40, which came next in 12 earlier rounds; the ranks",
        ),
        (
            37,
            [*ROUNDS, BACKWARD, REDUCE],
            0,
            "probably skipped the collective at train.py:40, which came next in 12 earlier rounds; the ranks",
        ),
        (
            37,
            [*ROUNDS, OTHER],
            1,
            "probably called one that others did not, at train.py:50, in place of train.py:37, which came next in 12 earlier",
        ),
        (
            50,
            [*ROUNDS, BACKWARD],
            0,
            "probably called one that others did not, at train.py:50, in place of train.py:37, which came next in 12 earlier",
        ),
        (
            51,
            [*ROUNDS, OTHER],
            None,
            "the ranks were in different collectives: rank 0 crashed in all_reduce, train.py:51; rank 1 was in all_reduce ([7]",
        ),
        (
            50,
            [OTHER],
            None,
            "the ranks were in different collectives, or gave one tensors of different sizes: rank 0 crashed in all_reduce",
        ),
        (
            40,
            [BACKWARD],
            None,
            "the ranks were in different collectives: rank 0 crashed in all_reduce, train.py:40; rank 1 was in all_reduce ([34]",
        ),
    ],
)
def test_who_left_the_course(at: int, calls: list[tuple[int, str]], rank: int | None, message: str) -> None:
    found = different_collectives([aborted(0, at), reset(1, calls[-1][0])], {1: history(*calls)})
    assert found.rank == rank
    assert found.message.startswith(message)
    assert f"rank 0 crashed in all_reduce, train.py:{at}" in found.message
    assert f"train.py:{calls[-1][0]}" in found.message
    assert "Rank 0 failed first" in str(found.hint)


def test_buckets_of_a_gradient_are_no_skipped_collectives() -> None:
    """Three of a size in each backward: only the longer context tells what comes next. Two were sent on after the one that met no other."""
    rounds = [BACKWARD, BACKWARD, BACKWARD, REDUCE] * 5
    found = different_collectives([aborted(0, 40), reset(1, 37)], {1: history(*rounds, *[BACKWARD] * 4)})
    assert (found.rank, found.message.split(",")[0]) == (1, "probably skipped the collective at train.py:40")


def test_without_a_recorder_the_lines_are_those_of_the_tracebacks() -> None:
    found = different_collectives([aborted(0, 40), reset(1, 37)], {})
    assert (
        found.message
        == "the ranks were in different collectives: rank 0 crashed in all_reduce, train.py:40; rank 1 was in backward, train.py:37"
    )
    failures = [aborted(0, 40), reset(1, 37), reset(2, 40), reset(3, 40)]
    assert different_collectives(failures, {2: history(BACKWARD, REDUCE)}).rank == 1
    most = different_collectives(failures, {})
    assert most.rank == 1
    assert most.message.startswith(
        "probably called the collective at train.py:37 in place of the one at train.py:40, in which 3 ranks were; "
    )


def test_a_rank_that_left_nothing_may_be_the_one() -> None:
    gone = [Failure(rank=rank, kind="killed", message="was ended from outside by SIGTERM", traceback=None, hint=None) for rank in (1, 2)]
    found = different_collectives([aborted(0, 40), reset(3, 40), *gone], {3: history(*ROUNDS)})
    assert found.rank is None
    assert found.message.startswith("the ranks were in different collectives: rank 0 crashed in all_reduce, train.py:40; rank 3 was in")
    assert found.message.endswith("; probably rank 1 or 2, which ended without saying where, was in another")


def test_other_failures_stay_as_they_are() -> None:
    failure = Failure(rank=0, kind="exception", message="ValueError: boom", traceback=None, hint=None)
    assert different_collectives([failure, reset(1, 37)], {}) is failure
    assert different_collectives([aborted(0, 40)], {}).message == GLOO


PARTS = [("all_reduce ([8] Float)", ""), ("all_reduce ([64] Float)", ""), ("all_reduce ([16] Float)", "")]
"""A round of a script without DDP: its collectives have no lines."""


def plain(rank: int, line: int) -> Failure:
    text = str(reset(rank, line).traceback).replace("in backward", "in all_reduce")
    return Failure(rank=rank, kind="exception", message=PEER, traceback=text, hint=None)


@pytest.mark.parametrize("recorded", [(), (0,), (0, 2)])
def test_histories_without_lines_do_not_hide_who_is_alone(recorded: tuple[int, ...]) -> None:
    """The stacks say which line each rank is in; the sizes, that ranks 0 and 2 are in the collective that was due."""
    rows = {rank: [*PARTS * 4, *PARTS[:2]] for rank in recorded}
    found = different_collectives([aborted(1, 8), plain(0, 7), plain(2, 7)], rows)
    assert found.rank == 1
    why = "which came next in 2 earlier rounds" if recorded else "in which 2 ranks were"
    assert found.message.startswith(
        f"probably called the collective at train.py:8 in place of the one at train.py:7, {why}; the ranks were"
    )
    assert "rank 1 crashed in all_reduce, train.py:8" in found.message


def test_without_lines_the_sizes_say_what_a_rank_skipped() -> None:
    skipped = different_collectives([aborted(0, 7), plain(1, 8)], {1: [*PARTS * 4, PARTS[0], PARTS[2]]})
    assert skipped.rank == 1
    assert skipped.message == (
        "probably skipped all_reduce ([64] Float), which came next in 2 earlier rounds; the ranks were in different collectives: "
        "rank 0 crashed in all_reduce, train.py:7; rank 1 was in all_reduce ([16] Float), train.py:8"
    )
    added = different_collectives([aborted(0, 7), plain(1, 9)], {1: [*PARTS * 4, PARTS[0], ("all_reduce ([7] Float)", "")]})
    assert added.message.startswith(
        "probably called all_reduce ([7] Float), at train.py:9, in place of all_reduce ([64] Float), which came"
    )
    once = different_collectives([aborted(0, 7), plain(1, 8)], {1: [*PARTS, PARTS[0], PARTS[2]]})
    assert once.rank is None  # the sizes may vary
    both = different_collectives([aborted(0, 7), plain(1, 7), plain(2, 9)], {rank: [*PARTS * 4, PARTS[0], PARTS[2]] for rank in (1, 2)})
    assert both.rank is None


def test_one_earlier_round_is_not_called_rounds() -> None:
    found = different_collectives([aborted(0, 40), reset(1, 37)], {1: history(BACKWARD, REDUCE, BACKWARD, BACKWARD)})
    assert found.message.startswith("probably skipped the collective at train.py:40, which came next in an earlier round; the ranks were")


@pytest.mark.parametrize("damaged", [5, [None], "text", {"a": 1}, [{"op": "a"}], [{"pending": False, "frames": [["a"]]}]])
def test_damaged_collectives_of_a_record_are_ignored(damaged: object, tmp_path: Path) -> None:
    record = {"rank": 1, "time_ns": 5, "kind": "exception", "message": PEER, "traceback": reset(1, 37).traceback, "consequence": True}
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank1.json").write_text(json.dumps(record | {"memory": None, "collectives": damaged}))
    found = first_failure(tmp_path, {"state": "failed"})
    assert found is not None
    assert (found.rank, found.message) == (1, PEER)


SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(16, 2))
for step in range(40):
    model(torch.randn(4, 16)).sum().backward()
    if step != 20 or dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))  # line 9
"""


def test_a_skipped_all_reduce_is_blamed_on_the_rank_that_skipped_it(tmp_path: Path) -> None:
    """gloo ends rank 0, which did nothing wrong: it gets more than it waits for."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = wb.launch(str(script), nproc_per_node=2, runs_dir=tmp_path / "runs").wait(timeout=100)
    assert str(run.error).startswith("rank 1: probably skipped the collective at train.py:9, which came next in ")
    assert ": rank 0 crashed in all_reduce, train.py:9; rank 1 was in all_reduce ([34] Float), train.py:7" in str(run.error)
    assert "rank 1: probably skipped the collective at train.py:9" in str(wb.health(run))
