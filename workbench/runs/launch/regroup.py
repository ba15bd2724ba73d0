"""Regroups a run on several machines after a failure: the machines that are left agree on its next attempt through the run directory.

A machine whose ranks have all ended says that it is ready. Once every other machine is ready or lost, the lowest of the ready ones writes
the plan of the next attempt, under a name that only one machine can create. Those in the plan start when its first machine has prepared
the run directory; all others are no longer part of the run. No two attempts train at a time: ranks take no step unless all machines of
their attempt take part, and a machine that is ready for an attempt starts no earlier one.

The first machine of a plan begins to prepare under another such name. Whoever gives it up as lost takes that name, so one that wakes up
later touches nothing; one that has begun looks again before each file that it moves.

A machine is lost when it says that it has left, or when its heartbeat has not changed for LOST seconds by the looks of the one that waits:
no two clocks are compared.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.core.run_directory import NODES

READY = "ready.json"
"""In the folder of a machine: for which attempt it is ready, and where the others could meet it."""
LOST = 8.0
"""Seconds in which the heartbeat of a machine does not change, after a failure: this, or a quarter of `rendezvous.silence`, whichever is
more, as network file systems show others a file late."""
ONE_LOOK = 1.0
"""Seconds that count between two looks at most: who was paused itself has not seen that the others were silent meanwhile."""
PAUSE = 0.2
"""Seconds between two looks."""
LIMIT = 180.0
"""Seconds since a machine ended its ranks until it gives up. A guard ends them within 60 s, and notices the failure of another machine
within 15 s."""
LIMIT_WITH_PLAN = 10 * LIMIT
"""The same once there was a plan: its first machine copies and moves files, perhaps slowly."""


class LeftBehindError(Exception):
    """The run goes on without this machine."""


class NoAgreementError(Exception):
    """The machines did not agree in time."""


class Heartbeat:
    """For how long the heartbeat of a machine has not changed, by the looks of this process."""

    def __init__(self, path: Path) -> None:
        self._path, self._text, self._last = path, "", 0.0
        self.silent = 0.0
        """Seconds."""

    def look(self, now: float) -> None:
        """Read it; a file that is missing does not change. A look that took long says nothing: then the count begins anew."""
        text, begun = self._text, time.monotonic()
        with contextlib.suppress(OSError):
            text = self._path.read_text()
        slow = time.monotonic() - begun > ONE_LOOK
        self.silent = 0.0 if slow or text != self._text else self.silent + min(ONE_LOOK, now - self._last)
        self._text, self._last = text, now


class Agreement:
    """The part of one machine in an agreement on the next attempt."""

    def __init__(
        self, run_dir: Path, node: Mapping[str, Any], endpoint: str, propose: Callable[[Sequence[int]], dict[str, Any]], now: float
    ) -> None:
        """Say that this machine is ready.

        Args:
            run_dir: run directory, which all machines see.
            node: this machine's `rank`, the `members` of the `attempt` that has ended, and the `silence` that is allowed, in seconds.
            endpoint: host:port where the others could meet it.
            propose: gives the plan for the machines that are ready, the others being lost: which are `members`, and why the run `ends`
                ("" = it goes on).
            now: seconds, on any clock of this machine, when it has ended its ranks: from then on its limit counts.
        """
        self._run_dir, self._me, self._members, self.attempt = run_dir, node["rank"], node["members"], node["attempt"]
        self._endpoint, self._propose = endpoint, propose
        self._begun, self._limit = now, LIMIT
        self._lost, self._prepares = max(LOST, node["silence"] / 4), 0
        self._hearts = {rank: Heartbeat(self._folder(rank) / run_directory.BEAT) for rank in self._members if rank != self._me}
        self._be_ready(self._members)

    def _folder(self, rank: int) -> Path:
        return self._run_dir / NODES / str(rank)

    def _be_ready(self, members: Sequence[int]) -> None:
        self._members, self.attempt = members, self.attempt + 1
        self._unfinished = Heartbeat(plan_file(self._run_dir, self.attempt))
        run_directory.write_json(self._folder(self._me) / READY, {"attempt": self.attempt, "endpoint": self._endpoint})

    def step(self, now: float) -> dict[str, Any] | None:
        """Look once, and do what is to be done; returns the plan of the next attempt when this machine may follow it, None until then.

        Raises:
            LeftBehindError: this machine is in no plan.
            NoAgreementError: it takes too long.
        """
        for heart in self._hearts.values():
            heart.look(now)
        plan, later = (read(plan_file(self._run_dir, number)) for number in (self.attempt, self.attempt + 1))  # a listing may be old
        if later or (plan and self._me not in plan["members"]):
            raise LeftBehindError
        if plan:
            self._limit = LIMIT_WITH_PLAN
            begun, first = self._follow(plan), min(plan["members"])
            if begun is None and first != self._me:
                self._check_time(now, f"machine {first} has not prepared attempt {plan['attempt']}")
            return begun
        if plan_file(self._run_dir, self.attempt).exists():  # a machine was cut off while it wrote the plan, on a file system without links
            self._unfinished.look(now)
            if self._unfinished.silent >= self._lost:
                self._give_up_attempt(self._members)
        else:
            standing = {rank: self._standing(rank) for rank in self._members}
            ready = [rank for rank, how in standing.items() if how == "ready"]
            if "busy" not in standing.values() and self._me == min(ready):
                self._claim(self._propose(ready))
        self._check_time(now, f"the machines did not agree on attempt {self.attempt}")
        return None

    def _check_time(self, now: float, what: str) -> None:
        if now - self._begun > self._limit:
            raise NoAgreementError(f"{what} within {self._limit:g} s after machine {self._me} had ended its ranks")

    def _follow(self, plan: dict[str, Any]) -> dict[str, Any] | None:
        """The plan, once this machine may start by it or, as its first one, prepare the run directory."""
        first = min(plan["members"])
        if plan["ends"] or read(self._run_dir / run_directory.RUN_JSON).get("attempt") == self.attempt:
            return plan
        if first == self._me and self._prepares != self.attempt and self._take_preparation():
            self._prepares = self.attempt
        lost = self._hearts[first].silent >= self._lost if first != self._me else self._prepares != self.attempt
        if lost or any(read(self._folder(rank) / READY).get("attempt", 0) > self.attempt for rank in plan["members"]):
            self._give_up_attempt(plan["members"])
        return plan if first == self._me and plan["attempt"] == self.attempt else None

    def _give_up_attempt(self, members: Sequence[int]) -> None:
        """Be ready for the next attempt, and let nobody begin to prepare this one."""
        self._take_preparation()
        self._be_ready(members)

    def _take_preparation(self) -> bool:
        """Create the file that only one machine can create: whoever begins to prepare the attempt, or gives it up before that."""
        with contextlib.suppress(FileExistsError), open(plan_file(self._run_dir, self.attempt).with_suffix(".prepared-by"), "x"):
            return True
        return False

    def _standing(self, rank: int) -> str:
        """Is a machine "ready", "lost", or does it still end its ranks ("busy")? Who launched the run and has left has ended it."""
        if rank == self._me:
            return "ready"
        outcome = read(self._folder(rank) / run_directory.NODE_JSON).get("outcome") or {}
        state = outcome.get("state")
        if self._hearts[rank].silent >= self._lost or state == "finished" or (state == "abandoned" and rank):
            return "lost"
        return "ready" if read(self._folder(rank) / READY).get("attempt") == self.attempt else "busy"

    def endpoint_of(self, rank: int) -> str:
        """Where a machine that is ready can be met."""
        return str(read(self._folder(rank) / READY)["endpoint"])

    def _claim(self, plan: dict[str, Any]) -> None:
        """Write the plan of the attempt, whole, unless another machine has written one."""
        path = plan_file(self._run_dir, self.attempt)
        part = run_directory.part_of(path)
        run_directory.write_json(part, {"attempt": self.attempt, **plan})
        try:
            os.link(part, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links: who reads it meanwhile finds it unfinished, and looks again
            with contextlib.suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
                file.write(part.read_text(encoding="utf-8"))
        finally:
            part.unlink(missing_ok=True)


def plan_file(run_dir: Path, attempt: int) -> Path:
    """The file with the plan of an attempt; the guards know its name."""
    return run_dir / NODES / f"attempt{attempt}.json"


def read(path: Path) -> dict[str, Any]:
    """What a machine has written; empty = nothing yet."""
    with contextlib.suppress(run_directory.DamagedRunError, OSError):
        return run_directory.read_json(path)
    return {}
