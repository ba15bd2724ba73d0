"""Calibration: how right the proved predictions on this machine were, and how wide that makes the next interval."""

import contextlib
import dataclasses
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import run_directory, units
from workbench.core.cache import cache_folder, host_name
from workbench.core.display import table as display
from workbench.diagnosis.analysis.proof import Proof
from workbench.diagnosis.analysis.remedy import Remedy

MAX_RATIO = 5.0
"""A proof that is off by more than this factor says nothing about the next one: the load on the machine changed between the two. Chosen:
the worst proof of 110 was off by 2.3. With half, that one would be left out; with twice, a burst of other work widens the ranges that
follow."""
MIN_PROOFS = 3
"""Proofs of one kind of remedy below which they say nothing about the next."""
LATEST_PROOFS = 30
"""Only so many of the latest proofs of a kind count: the library, torch and the machine change."""
COVERAGE = 0.9
"""Share of the earlier proofs that the widened interval would have held. Chosen. Half of it would make ranges that proofs leave as often as
not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(display.Shown):
    """What was predicted and what was measured, proof by proof, on this machine."""

    rows: tuple[Mapping[str, Any], ...] = ()
    """One per proof, oldest first: remedy, predicted, low, high, measured, ceiling, task, time."""

    @classmethod
    def load(cls, path: Path | None = None) -> "Calibration":
        """All proofs on file; lines that cannot be read are left out, as is a file that is not there."""
        rows = []
        try:
            text = (path or calibration_file()).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return cls()
        for line in text.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                str(row["remedy"]), math.log(row["measured"] / row["predicted"])
                rows.append(row)
        return cls(rows=tuple(rows))

    def errors(self, name: str) -> list[float]:
        """log(measured / predicted) of the latest proofs of a kind of remedy; ceilings are left out, since they are no forecasts.

        Args:
            name: of a remedy; what comes after "=" does not matter.
        """
        rows = [row for row in self.rows if _kind(row["remedy"]) == _kind(name) and not row.get("ceiling")]
        return [math.log(row["measured"] / row["predicted"]) for row in rows[-LATEST_PROOFS:]]

    def adjust(self, remedy: Remedy) -> Remedy:
        """The remedy with an interval wide enough to have held COVERAGE of the earlier proofs of its kind; it is never made narrower."""
        errors = sorted(error for error in self.errors(remedy.name) if abs(error) <= math.log(MAX_RATIO) + 1e-9)
        if remedy.ceiling or len(errors) < MIN_PROOFS:
            return remedy
        edge = math.floor((1 - COVERAGE) / 2 * len(errors))
        low, high = remedy.speedup * math.exp(errors[edge]), min(remedy.most, remedy.speedup * math.exp(errors[-1 - edge]))
        if low >= remedy.low and high <= remedy.high:
            return remedy
        note = f"; interval widened by what {len(errors)} earlier proofs on this machine showed"
        return dataclasses.replace(remedy, low=min(low, remedy.low), high=max(high, remedy.high), formula=remedy.formula + note)

    @property
    def table(self) -> display.Table:
        """One row per kind of remedy: how far off its predictions were."""
        kinds = sorted({_kind(row["remedy"]) for row in self.rows})
        rows = []
        for kind in kinds:
            off = [abs(math.expm1(-error)) for error in self.errors(kind)]
            if off:
                rows.append([kind, len(off), units.percent(statistics.median(off)), units.percent(max(off))])
        return display.Table(
            columns=("remedy", "proofs", "median error", "worst error"),
            rows=rows,
            title=f"Predicted against proved on {platform.node()}",
            note="error: predicted over measured, less 1; ceilings are left out",
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row per proof."""
        return display.frame(self.rows)


def calibration_file() -> Path:
    """Where this machine's proofs are kept: in $WORKBENCH_CACHE, else in the user's cache; a home may be shared by several machines."""
    return cache_folder() / f"calibration-{host_name()}.jsonl"


def keep(proof: Proof, *, task: str = "", path: Path | None = None) -> str | None:
    """Add a proof to this machine's file.

    Returns:
        Why it could not be written; None = it was.
    """
    remedy = proof.remedy
    row = {
        "remedy": remedy.name,
        "predicted": remedy.speedup,
        "low": remedy.low,
        "high": remedy.high,
        "measured": proof.measured.mid,
        "measured_low": proof.measured.low,
        "measured_high": proof.measured.high,
        "ceiling": remedy.ceiling,
        "task": task,
        "time": time.time(),
    }
    where = path or calibration_file()
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        mine = where.is_symlink() and where.lstat().st_uid == os.geteuid()  # in a shared folder a link may be somebody else's
        with contextlib.closing(run_directory.LineWriter(where.resolve() if mine else where)) as writer:
            writer.write([row])
    except OSError as error:
        return f"this proof is not kept for later predictions: {where} cannot be written ({error.strerror or error})"
    return None


def _kind(name: str) -> str:
    return name.partition("=")[0].strip()
