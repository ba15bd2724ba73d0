"""Job: what Slurm says of a run in its queue, and how it is told to cancel one. Asked rarely: its controller serves everybody."""

import contextlib
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import run_directory

POLL, POLL_LATER, LATER = 1.0, 10.0, 60.0
"""Seconds between two questions at first, later, and from when on."""
PATIENCE = 30
"""Seconds that one of Slurm's programs may take to answer."""
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ASK_FOR_LESS = ": as it is asked for it can never run; see sinfo for what the partition has, and run.stop()"
_NEVER = dict.fromkeys(("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints"), _ASK_FOR_LESS)
"""What to say of a job that waits for what will not come, by Slurm's reason."""
RUNNING = ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What Slurm says of a job.

    >>> seen = Seen.parse("JobId=7 JobName=x JobState=PENDING Reason=Resources Restarts=1 NodeList=(null) TimeLimit=00:10:00")
    >>> seen.state, seen.reason, seen.restarts
    ('PENDING', 'Resources', 1)
    """

    state: str
    """In Slurm's words: PENDING, RUNNING, COMPLETED, CANCELLED, TIMEOUT, NODE_FAIL, …"""
    reason: str = "None"
    """Why it waits, or why it ended."""
    restarts: int = 0
    """How often it was put back into the queue after it had begun."""
    nodes: str = ""
    """Its machines, as Slurm writes them."""
    limit: str = ""
    """Its time limit, as Slurm writes it."""

    @classmethod
    def parse(cls, text: str) -> "Seen":
        """Of a line of `scontrol show job -o`."""
        found = dict(re.findall(r"(?:^|\s)(JobState|Reason|Restarts|NodeList|TimeLimit)=(\S*)", text))
        return cls(
            state=found.get("JobState", "UNKNOWN"),
            reason=found.get("Reason", "None"),
            restarts=int(found.get("Restarts", "0")),
            nodes=found.get("NodeList", "").replace("(null)", ""),
            limit=found.get("TimeLimit", ""),
        )

    @property
    def waits(self) -> bool:
        """Is it in the queue?"""
        return self.state in WAITING

    @property
    def active(self) -> bool:
        """Does it wait or run?"""
        return self.waits or self.state in RUNNING


def is_final(outcome: Mapping[str, Any] | None) -> bool:
    """Does nothing come after an outcome? A job that was stopped or has failed may be in the queue again."""
    return bool(outcome and (outcome["state"] == "finished" or outcome.get("settled")))


class Job:
    """The job of a run."""

    def __init__(self, run_dir: Path, number: str) -> None:
        self.number, self._run_dir = number, run_dir
        self._began, self._asked = time.monotonic(), -math.inf
        self._seen: Seen | None = None

    @classmethod
    def of(cls, run_dir: Path) -> "Job | None":
        """Of a run directory; None = the run was given to no batch system, or has not come there."""
        path = run_dir / run_directory.JOB
        return cls(run_dir, str(run_directory.read_json(path)["job"])) if path.exists() else None

    @property
    def seen(self) -> Seen | None:
        """What Slurm said last; it is asked again every few seconds. Where it does not answer, its last word counts; None = it has none."""
        now = time.monotonic()
        if now - self._asked > (POLL if now - self._began < LATER else POLL_LATER):
            self._seen = self._ask() or self._seen
            self._asked = time.monotonic()
        return self._seen

    def _ask(self) -> Seen | None:
        code, text = call("scontrol", "show", "job", "-o", self.number)
        if code == 0:
            return Seen.parse(text)
        if code is not None and "Invalid job id" in text:  # ended some minutes ago, and forgotten; the accounts may still have it
            code, text = call("sacct", "-X", "-n", "-P", "-D", "-j", self.number, "-o", "State,Reason")
            last = text.strip().splitlines()[-1:] if code == 0 else []
            state, _, reason = last[0].partition("|") if last else ("UNKNOWN", "", "")
            return Seen(state=state.split()[0] if state else "UNKNOWN", reason=reason or "None")
        return None

    @property
    def words(self) -> str:
        """The job and what it waits for, for people."""
        seen = self.seen
        if seen is None:
            return f"Slurm job {self.number}, of which Slurm says nothing here"
        why = f" ({seen.reason})" if seen.waits and seen.reason != "None" else f" on {seen.nodes}" if seen.nodes else ""
        return f"Slurm job {self.number} {seen.state.lower()}{why}{_NEVER.get(seen.reason, '') if seen.waits else ''}"

    def cancel(self) -> None:
        """Ask Slurm to end it.

        Raises:
            ValueError: Slurm is not here, or refuses; in its own words.
        """
        (self._run_dir / run_directory.STOP).touch()  # what was asked for is no failure
        code, text = call("scancel", self.number)
        if code != 0:
            (self._run_dir / run_directory.STOP).unlink(missing_ok=True)
            raise ValueError(f"Slurm job {self.number} cannot be cancelled: {text.strip() or 'there is no scancel here'}")
        self._asked = -math.inf

    def standing(self, outcome: dict[str, Any] | None) -> tuple[str, dict[str, Any] | None]:
        """How the run stands: its state, and its outcome where it has ended.

        Args:
            outcome: what its guard has written, if it has.
        """
        if outcome and is_final(outcome):
            return outcome["state"], outcome
        seen = self.seen
        if seen is None:  # a copy of the directory on a laptop, or the controller is down: what the guards wrote is all there is
            if outcome:
                return outcome["state"], outcome
            return "running" if (self._run_dir / run_directory.NODES).exists() else "queued", None
        if seen.waits:
            return "queued", None
        stays = run_directory.read_json(self._run_dir / run_directory.RUN_JSON).get("batch", {}).get("requeue")
        if seen.active and not (outcome and outcome["state"] == "failed" and not stays):
            return "running", None
        settled = self._settled(seen, run_directory.read_json(self._run_dir / run_directory.RUN_JSON).get("outcome"))
        return settled["state"], settled

    def _settled(self, seen: Seen, outcome: dict[str, Any] | None) -> dict[str, Any]:
        """The outcome of a job that has ended, written into run.json: the guard's own, or what Slurm says where no guard could tell."""
        base = {"returncode": None, "seconds": None, **(outcome or {}), "settled": True}
        if outcome and outcome["state"] in ("finished", "failed", "timeout"):
            found = base
        elif (self._run_dir / run_directory.STOP).exists():
            found = base | {"state": "stopped"}
        else:
            message, hint = _why(self.number, seen)
            log = self._run_dir / run_directory.JOB_LOG
            said = "\n".join(run_directory.TextTail(log).read(last=True)[-20:]) or None
            error = {"rank": None, "kind": "launcher", "message": message, "traceback": said, "hint": hint}
            found = base | {"state": "timeout" if seen.state == "TIMEOUT" else "failed", "error": error}
        path = self._run_dir / run_directory.RUN_JSON
        with contextlib.suppress(OSError):  # not ours to write, or a full disk: it is found out again next time
            run_directory.write_json(path, run_directory.read_json(path) | {"outcome": found})
        return found


def _why(number: str, seen: Seen) -> tuple[str, str | None]:
    """What ended a job, and what to do."""
    job = f"Slurm job {number}"
    match seen.state:
        case "CANCELLED":
            return f"{job} was cancelled from outside (scancel), not by run.stop()", None
        case "TIMEOUT" | "DEADLINE":
            return (
                f"{job} reached its time limit ({seen.limit})",
                'Allow more: Slurm(time="2:00:00").',
            )
        case "NODE_FAIL" | "BOOT_FAIL":
            return f"{job}: one of its machines ({seen.nodes}) died", "Slurm(requeue=True) with checkpoint_every= goes on on others."
        case "PREEMPTED":
            return f"{job} had to make way for another one", "Slurm(requeue=True) with checkpoint_every= goes on later."
        case "OUT_OF_MEMORY":
            return f"{job} took more memory than it may", 'Ask for more: Slurm(options=["--mem=…"]).'
        case "UNKNOWN":
            return f"{job} is not known to Slurm any more, and its guard did not say how it ended", None
        case state:
            return f"{job} ended as {state} ({seen.reason}) before a guard could say why", "See job.sh and slurm.log in the run directory."


def call(program: str, *words: str, **more: Any) -> tuple[int | None, str]:
    """Exit status and output of one of Slurm's programs; None = it is not here, or does not answer."""
    found = shutil.which(program, path=os.environ.get("PATH"))
    if found is None:
        return None, ""
    try:
        done = subprocess.run(
            [found, *words], capture_output=True, text=True, timeout=PATIENCE, check=False, stdin=subprocess.DEVNULL, **more
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr
