"""The journal of trials: `trials.jsonl`, where ranks take trials and leave what came of them; whoever likes reads it meanwhile."""

import contextlib
import dataclasses
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench import rundir
from workbench.batch.reaching import TRIALS
from workbench.batch.reaching_plan import Agenda, Job, Order
from workbench.batch.reaching_trial import Trial
from workbench.spec import RunSpec

LOCK = "trials.lock"


class Journal:
    """One rank's view of it. Rows: one "plan", and per trial a "claim" before and a "trial" after."""

    def __init__(self, run_dir: Path) -> None:
        """
        Args:
            run_dir: of the launch, on a disk that all ranks see.
        """
        self._lock = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._tail = rundir.LineTail(run_dir / TRIALS)
        self._writer = rundir.LineWriter(run_dir / TRIALS)
        self._done: list[Trial] = []
        self._claimed: set[Job] = set()
        self._planned = False

    def begin(self, order: Order, rates: Sequence[Mapping[str, Any]], spec: RunSpec, names: Mapping[str, str]) -> None:
        """Write down what is planned, unless another rank has.

        Args:
            order: what is wanted.
            rates: what the rules give each batch.
            spec: what all trials have in common.
            names: of the optimizers, for people.
        """
        with self._alone():
            if not self._planned:
                row = {"order": order.to_json(), "rates": list(rates), "spec": spec.to_json(), "names": dict(names)}
                self._writer.write([{"kind": "plan", **row, "created": time.time()}])

    def take(self, agenda: Agenda) -> tuple[Job | None, bool]:
        """A trial to do, claimed; None = none now. And: is all done?"""
        with self._alone():
            wanted = agenda.wanted(self._done)
            job = next((one for one in wanted if one not in self._claimed), None)
            if job is not None:
                self._writer.write([{"kind": "claim", **dataclasses.asdict(job)}])
            return job, not wanted

    def add(self, trial: Trial, agenda: Agenda) -> None:
        """Write down what came of a trial, and how many there will be."""
        with self._alone():
            total = agenda.total([*self._done, trial])
            self._writer.write([{"kind": "trial", **dataclasses.asdict(trial), "total": total, "at": time.time()}])

    def read(self) -> list[Trial]:
        """The trials that are done."""
        for row in self._tail.read():
            kind = row.pop("kind")
            if kind == "trial":
                self._done.append(Trial.from_json(row))
            elif kind == "claim":
                self._claimed.add(Job(**row))
            else:
                self._planned = True
        return self._done

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other rank reads or writes."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self.read()
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
