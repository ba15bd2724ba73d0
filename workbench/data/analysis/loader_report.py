"""LoaderReport: what in a data loader will break, give wrong data, or be very slow, with a fix for each finding."""

from collections.abc import Mapping
from dataclasses import dataclass

from workbench.core.codec import JsonDataclass
from workbench.core.display.table import Shown, Table

CHECKS: Mapping[str, str] = {
    "runs": "a batch can be loaded",
    "pickling": "the dataset can be sent to workers",
    "main class": "workers can import the classes they are sent",
    "open handles": "no open file is shared with workers",
    "stream parts": "workers of a stream give parts of their own",
    "padding": "no rank gets a sample twice",
    "equal ranks": "all ranks get equally many batches",
    "set_epoch": "each epoch has another order",
    "in_order": "the order of batches is repeatable",
    "shared memory": "the batches of all workers fit into /dev/shm",
    "descriptors": "the tensors of all batches fit into the limit of open files",
    "copy-on-write": "the memory of workers does not grow",
    "cores": "workers and threads have cores",
    "pin_memory": "pinning has an effect",
}
"""Check → what holds where it is passed, those that stop a training first."""
MARKS: Mapping[str, str] = {"breaks": "✗", "wrong": "✗", "slow": "!", "fine": "✓", "not judged": "–"}
"""Severity → its sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFinding(JsonDataclass):
    """What a check has shown."""

    check: str
    """A key of `CHECKS`."""
    severity: str
    """A key of `MARKS`: "breaks" = it ends with an error, here or elsewhere; "wrong" = other data than meant."""
    figure: str
    """What was found."""
    fix: str = ""
    """What to do; "" = nothing."""
    proved: bool = False
    """Was it tried, and not only concluded from how the loader is built?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReport(JsonDataclass, Shown):
    """What a DataLoader will do wrong in a long training, with fixes."""

    target: str
    """The loader in words."""
    findings: tuple[LoaderFinding, ...]
    """In the order of `CHECKS`."""
    seconds: float
    """That the checks took."""

    @property
    def faults(self) -> tuple[LoaderFinding, ...]:
        """What needs a fix, the worst first."""
        rank = list(MARKS)
        return tuple(sorted((each for each in self.findings if each.fix), key=lambda each: rank.index(each.severity)))

    @property
    def ok(self) -> bool:
        """Whether nothing breaks, and no data are wrong."""
        return not any(each.severity in ("breaks", "wrong") for each in self.findings)

    def __getitem__(self, check: str) -> LoaderFinding:
        for each in self.findings:
            if each.check == check:
                return each
        raise KeyError(f"{check!r}: allowed are {', '.join(each.check for each in self.findings)}")

    @property
    def verdict(self) -> str:
        """The answer in a sentence or two."""
        judged = sum(each.severity != "not judged" for each in self.findings)
        if not self.faults:
            return f"{self.target}: nothing found in {judged} checks."
        first = self.faults[0]
        more = f" {len(self.faults) - 1} more below." if len(self.faults) > 1 else ""
        return f"{self.target}: {first.check} ({first.severity}): {first.figure}. To do: {first.fix}.{more}"

    @property
    def table(self) -> Table:
        """A row per check, and the verdict."""
        rows = [
            (MARKS[each.severity], each.check, each.severity + " (tried)" * each.proved, each.figure, each.fix) for each in self.findings
        ]
        return Table(columns=("", "check", "result", "found", "to do"), rows=rows, title="Loader", note=self.verdict)

    def __repr__(self) -> str:
        return f"LoaderReport({self.target!r}, ok={self.ok}, faults={[each.check for each in self.faults]})"
