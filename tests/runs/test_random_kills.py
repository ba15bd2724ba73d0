"""A few random kills as in `benchmarks/random_kills.py`: nothing survives, the culprit is named, and the end is as undisturbed."""

import random
from typing import Any

import pytest

from benchmarks import random_kills


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "how"),
    [("ddp", {}), ("fsdp", {"moments": ["checkpoint"], "several_ranks": True})],
    ids=["any", "several ranks while they save"],
)
def test_trainings_that_are_killed_at_random_end_as_undisturbed_ones(
    mode: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks with a worker each: there, all roles are."""
    monkeypatch.setattr(random_kills, "MOST", 2)
    chains = random_kills.play(2, None, at_once=1, seed=6, kinds=[(2, 1, mode)], **how)
    assert sum(chain.count for chain in chains) >= 2
    assert not [problem for chain in chains for problem in chain.problems]


def test_several_ranks_are_hit_by_kill_and_term() -> None:
    who = {"rank 0": 1, "rank 1": 2, "rank 2": 3, "rank 3": 4, "worker of rank 0": 5, "guard": 6}
    drawn = [random_kills.draw(who, random.Random(seed), several_ranks=True) for seed in range(50)]
    assert all(len({role for role, _ in sent}) == len(sent) > 1 for sent in drawn)
    assert {role for sent in drawn for role, _ in sent} == {f"rank {rank}" for rank in range(4)}
    assert {len(sent) for sent in drawn} == {2, 3, 4}
    assert {name for sent in drawn for _, name in sent} == {"KILL", "TERM"}
    assert random_kills.kinds_of(["ddp", "tp"], 4) == [(4, 0, "ddp"), (4, 1, "ddp"), (4, 0, "tp"), (4, 1, "tp")]
    assert random_kills.kinds_of(["ddp", "tp"]) == [(1, 0, "ddp"), (1, 1, "ddp"), (2, 0, "ddp"), (2, 1, "ddp"), (2, 0, "tp"), (2, 1, "tp")]


def test_what_is_compared_is_compared_bit_for_bit() -> None:
    torch = pytest.importorskip("torch")
    state = {"module": {"w": torch.tensor([0.1, 0.2])}, "steps": [1, 2]}
    assert random_kills.equal(state, {"module": {"w": torch.tensor([0.1, 0.2])}, "steps": [1, 2]})
    assert not random_kills.equal(state, {"module": {"w": torch.tensor([0.1, 0.2000001])}, "steps": [1, 2]})
    assert not random_kills.equal(state, {"module": {"w": torch.tensor([0.1, 0.2])}, "steps": [1]})
    assert not random_kills.equal(state, {"module": {"w": torch.tensor([0.1, 0.2], dtype=torch.float64)}, "steps": [1, 2]})


@pytest.mark.parametrize(
    ("role", "signal", "said", "right"),
    [
        ("rank 1", "STOP+KILL", "rank 1: was killed (SIGKILL)", True),
        ("rank 1", "KILL", "rank 0: was killed (SIGKILL)", False),
        ("worker of rank 0", "SEGV", "rank 0: RuntimeError: DataLoader worker (pid 7) is killed by signal: Segmentation fault.", True),
        ("worker of rank 0", "INT", "rank 0: ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("keeper", "TERM", "stopped", True),
        ("guard", "KILL", "its guard was killed, so nobody saw how it ended", True),
        ("launching program", "INT", "stopped because the process that launched it ended", True),
    ],
)
def test_what_is_right_of_a_culprit(role: str, signal: str, said: str, right: bool) -> None:
    assert bool(random_kills.re.match(random_kills.expected(role, signal), said)) is right
