"""Follows and cancels a run's job in Slurm's queue. Queries Slurm rarely, since all users share its controller."""

import contextlib
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import run_directory

POLL, POLL_LATER, LATER = 1.0, 10.0, 60.0
"""Seconds between two queries: at first, later, and after how long."""
_TICK = 0.05
PATIENCE = 30
"""Seconds that one of Slurm's programs may take to answer."""
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ASK_FOR_LESS = ": as it was requested it can never run; see sinfo for what the partition has, and run.stop()"
_NEVER = dict.fromkeys(("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints"), _ASK_FOR_LESS)
"""Slurm's reason → what to say of a job that waits for something that will never come."""
RUNNING = ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What Slurm says of a job.

    >>> status = JobStatus.parse("JobId=7 JobName=x JobState=PENDING Reason=Resources Restarts=1 NodeList=(null) TimeLimit=00:10:00")
    >>> status.state, status.reason, status.restarts
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
    def parse(cls, text: str) -> "JobStatus":
        """Of a line of `scontrol show job -o`."""
        fields = dict(re.findall(r"(?:^|\s)(JobState|Reason|Restarts|NodeList|TimeLimit)=(\S*)", text))
        return cls(
            state=fields.get("JobState", "UNKNOWN"),
            reason=fields.get("Reason", "None"),
            restarts=int(fields.get("Restarts", "0")),
            nodes=fields.get("NodeList", "").replace("(null)", ""),
            limit=fields.get("TimeLimit", ""),
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
    """Is an outcome final? A job that was stopped or has failed may be in the queue again."""
    return bool(outcome and (outcome["state"] == "finished" or outcome.get("settled")))


class Job:
    """The job of a run."""

    def __init__(self, run_dir: Path, number: str) -> None:
        self.number, self._run_dir = number, run_dir
        self._began, self._queried = time.monotonic(), -math.inf
        self._seen: JobStatus | None = None

    @classmethod
    def of(cls, run_dir: Path) -> "Job | None":
        """The job of a run directory; None = the run was not submitted to a batch system."""
        path = run_dir / run_directory.JOB
        if not path.exists():
            return None
        number = str(run_directory.read_json(path)["job"])
        if not re.fullmatch(r"\d+", number, re.ASCII):
            raise run_directory.DamagedRunError(f"{path} is damaged: job={number!r} is not a job number")
        return cls(run_dir, number)

    @property
    def seen(self) -> JobStatus | None:
        """What Slurm said last, queried anew every few seconds; where it does not answer, the answer before. None = there was none."""
        now = time.monotonic()
        if now - self._queried > (POLL if now - self._began < LATER else POLL_LATER):
            self._seen = self._ask() or self._seen
            self._queried = time.monotonic()
        return self._seen

    def _ask(self) -> JobStatus | None:
        code, text = call("scontrol", "show", "job", "-o", self.number)
        if code == 0:
            return JobStatus.parse(text)
        if code is not None and "Invalid job id" in text:  # ended some minutes ago, and forgotten; the accounts may still have it
            code, text = call("sacct", "-X", "-n", "-P", "-D", "-j", self.number, "-o", "State,Reason")
            last = text.strip().splitlines()[-1:] if code == 0 else []
            state, _, reason = last[0].partition("|") if last else ("UNKNOWN", "", "")
            return JobStatus(state=state.split()[0] if state else "UNKNOWN", reason=reason or "None")
        return None

    @property
    def words(self) -> str:
        """The job and what it waits for, for people."""
        seen = self.seen
        if seen is None:
            return f"Slurm job {self.number}, of which Slurm says nothing here"
        why = f" ({seen.reason})" if seen.waits and seen.reason != "None" else f" on {seen.nodes}" if seen.nodes else ""
        return f"Slurm job {self.number} {seen.state.lower()}{why}{_NEVER.get(seen.reason, '') if seen.waits else ''}"

    def end(self, active: Callable[[], bool], timeout: float) -> None:
        """Cancel it, and wait until it has ended.

        Raises:
            TimeoutError: it is still active after `timeout` seconds.
            ValueError: as `cancel` says.
        """
        limit = time.monotonic() + timeout
        if active():
            self.cancel()
        while active():
            if time.monotonic() > limit:
                raise TimeoutError(f"{self.words} has not ended {timeout:g} s after scancel")
            time.sleep(_TICK)

    def cancel(self) -> None:
        """Ask Slurm to end it.

        Raises:
            ValueError: Slurm is not here, or refuses, in its own words; or the job is not that of this directory.
        """
        code, text = call("scontrol", "show", "job", "-o", self.number)
        script = re.search(r"\sCommand=(/.*?)(\sWorkDir=|$)", text) if code == 0 else None
        if script and os.path.realpath(script[1]) != os.path.realpath(self._run_dir / run_directory.JOB_SCRIPT):
            raise ValueError(f"Slurm job {self.number} is not that of {self._run_dir}: it runs {script[1]}. Nothing was cancelled")
        (self._run_dir / run_directory.STOP).touch()  # so that the end counts as stopped, not as a failure
        code, text = call("scancel", self.number)
        if code != 0:
            (self._run_dir / run_directory.STOP).unlink(missing_ok=True)
            raise ValueError(f"Slurm job {self.number} cannot be cancelled: {text.strip() or 'there is no scancel here'}")
        self._queried = -math.inf

    def standing(self, outcome: dict[str, Any] | None) -> tuple[str, dict[str, Any] | None]:
        """The state of the run, and its outcome where it has ended: its guard's, if that has written one."""
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

    def _settled(self, seen: JobStatus, outcome: dict[str, Any] | None) -> dict[str, Any]:
        """The outcome of a job that has ended, written into run.json: the guard's own, or what Slurm says where no guard could tell."""
        base = {"returncode": None, "seconds": None, **(outcome or {}), "settled": True}
        if outcome and outcome["state"] in ("finished", "failed", "timeout"):
            settled = base
        elif (self._run_dir / run_directory.STOP).exists():
            settled = base | {"state": "stopped"}
        else:
            message, hint = _why(self.number, seen)
            log = self._run_dir / run_directory.JOB_LOG
            lines = "\n".join(run_directory.TextTail(log).read(last=True)[-20:]) or None
            error = {"rank": None, "kind": "launcher", "message": message, "traceback": lines, "hint": hint}
            settled = base | {"state": "timeout" if seen.state == "TIMEOUT" else "failed", "error": error}
        path = self._run_dir / run_directory.RUN_JSON
        with contextlib.suppress(OSError):  # not ours to write, or a full disk: it is found out again next time
            run_directory.write_json(path, run_directory.read_json(path) | {"outcome": settled})
        return settled


def _why(number: str, seen: JobStatus) -> tuple[str, str | None]:
    """What ended a job, and what to do."""
    job = f"Slurm job {number}"
    match seen.state:
        case "CANCELLED":
            return f"{job} was cancelled from outside (scancel), not by run.stop()", None
        case "TIMEOUT" | "DEADLINE":
            return (f"{job} reached its time limit ({seen.limit})", 'Allow more: Slurm(time="2:00:00").')
        case "NODE_FAIL" | "BOOT_FAIL":
            return (
                f"{job}: one of its machines ({seen.nodes}) died",
                "Slurm(requeue=True) with checkpoint_every= continues on others.",
            )
        case "PREEMPTED":
            return f"{job} had to make way for another one", "Slurm(requeue=True) with checkpoint_every= continues later."
        case "OUT_OF_MEMORY":
            return f"{job} took more memory than it may", 'Ask for more: Slurm(options=["--mem=…"]).'
        case "UNKNOWN":
            return f"{job} is not known to Slurm any more, and its guard did not say how it ended", None
        case state:
            return f"{job} ended as {state} ({seen.reason}) before a guard could say why", "See job.sh and slurm.log in the run directory."


def call(program: str, *words: str, **more: Any) -> tuple[int | None, str]:
    """Exit status and output of one of Slurm's programs; None = it is not installed, or does not answer."""
    path = shutil.which(program, path=os.environ.get("PATH"))
    if path is None:
        return None, ""
    try:
        done = subprocess.run(
            [path, *words], capture_output=True, text=True, timeout=PATIENCE, check=False, stdin=subprocess.DEVNULL, **more
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr
