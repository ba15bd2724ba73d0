"""Which rank took another branch where ranks called different collectives: from records made by hand, and from a real launch."""

from pathlib import Path

import pytest

import workbench as wb
from workbench.runs.failure import Failure
from workbench.runs.root_cause import different_collectives

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
        (40, [*ROUNDS, BACKWARD, BACKWARD], 1, "probably skipped the collective at train.py:40, due by the 12 rounds before; the ranks"),
        (37, [*ROUNDS, BACKWARD, REDUCE], 0, "probably skipped the collective at train.py:40, due by the 12 rounds before; the ranks"),
        (37, [*ROUNDS, OTHER], 1, "probably called one that others did not, at train.py:50, in place of train.py:37, due by the 12"),
        (50, [*ROUNDS, BACKWARD], 0, "probably called one that others did not, at train.py:50, in place of train.py:37, due by the 12"),
        (
            51,
            [*ROUNDS, OTHER],
            None,
            "the ranks are in different collectives: rank 0 waits in all_reduce, train.py:51; rank 1 waits in all_reduce ([7]",
        ),
        (
            50,
            [OTHER],
            None,
            "the ranks are in different collectives, or give one tensors of different sizes: rank 0 waits in all_reduce",
        ),
        (
            40,
            [BACKWARD],
            None,
            "the ranks are in different collectives: rank 0 waits in all_reduce, train.py:40; rank 1 waits in all_reduce ([34]",
        ),
    ],
)
def test_who_left_the_course(at: int, calls: list[tuple[int, str]], rank: int | None, message: str) -> None:
    found = different_collectives([aborted(0, at), reset(1, calls[-1][0])], {1: history(*calls)})
    assert found.rank == rank
    assert found.message.startswith(message)
    assert f"rank 0 waits in all_reduce, train.py:{at}" in found.message
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
        == "the ranks are in different collectives: rank 0 waits in all_reduce, train.py:40; rank 1 waits in backward, train.py:37"
    )
    most = different_collectives([aborted(0, 40), reset(1, 37), reset(2, 40), reset(3, 40)], {})
    assert most.rank == 1
    assert most.message.startswith(
        "probably called one that others did not, at train.py:37, in place of train.py:40, in which 3 ranks are; "
    )


def test_a_rank_that_left_nothing_may_be_the_one() -> None:
    gone = [Failure(rank=rank, kind="killed", message="was ended from outside by SIGTERM", traceback=None, hint=None) for rank in (1, 2)]
    found = different_collectives([aborted(0, 40), reset(3, 40), *gone], {3: history(*ROUNDS)})
    assert found.rank is None
    assert found.message.startswith("the ranks are in different collectives: rank 0 waits in all_reduce, train.py:40; rank 3 waits in")
    assert found.message.endswith("; probably rank 1 or 2, which ended without saying where, is in another")


def test_other_failures_stay_as_they_are() -> None:
    failure = Failure(rank=0, kind="exception", message="ValueError: boom", traceback=None, hint=None)
    assert different_collectives([failure, reset(1, 37)], {}) is failure
    assert different_collectives([aborted(0, 40)], {}).message == GLOO


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
    assert str(run.error).startswith("rank 1: probably skipped the collective at train.py:9, due by the ")
    assert "rank 0 waits in all_reduce, train.py:9; rank 1 waits in all_reduce ([34] Float), train.py:7" in str(run.error)
    assert "rank 1: probably skipped the collective at train.py:9" in str(wb.health(run))
