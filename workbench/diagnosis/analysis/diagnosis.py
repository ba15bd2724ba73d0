"""Diagnosis: what limits a step, what would help and by how much, and what was proved of it."""

import dataclasses
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from workbench.core import late, units
from workbench.core.brief import fitted, number, short, three
from workbench.core.codec import NOT_STORED, JsonDataclass
from workbench.core.display import table as display
from workbench.core.statistics import ONE_PAIR
from workbench.core.synonyms import accept_synonyms
from workbench.core.system_load import usable_cores
from workbench.core.vocabulary import PART_WORDS, PARTS
from workbench.data.analysis.format_costs import FormatComparison
from workbench.diagnosis.analysis.advice import TO_COMPARE, Advice, busy_notes, busy_words, loader_misfit, script_command, void_notes
from workbench.diagnosis.analysis.costs import MAX_BLOCK_SPREAD, is_crowded, noise_warnings
from workbench.diagnosis.analysis.evidence import Evidence
from workbench.diagnosis.analysis.loader_model import TERMS, LoaderCurve
from workbench.diagnosis.analysis.model_errors import surely_gains, with_errors
from workbench.diagnosis.analysis.proof import Proof, remedy_table
from workbench.diagnosis.analysis.remedies import remedies_for
from workbench.diagnosis.analysis.remedy import Choice, Remedy, find_remedy, gain_of, of_knobs, sort_key, surest_first
from workbench.diagnosis.analysis.script_remedies import SETTINGS_OF, LaunchedScript
from workbench.diagnosis.analysis.step_model import Parts, StepModel
from workbench.diagnosis.analysis.verdict import MAX_DISAGREEMENT, Judgement, judge
from workbench.runs.spec import RunSpec, ScriptSpec, Spec

BRIEF_COMMAND, IN_PYTHON = 500, "diagnosis.prove()"
"""Most bytes of a command in a brief, and what stands in its place where it is longer."""
LITTLE = 1.1
"""A predicted gain below which a remedy of another part than the verdict's is said to be none of the verdict's concern. Chosen; a matter of
words."""
MIN_FOREIGN_SHARE = 0.02
"""Share of the cores taken by other processes below which the caption does not mention them. Chosen; a matter of words."""


@dataclass(kw_only=True, eq=False)
class Diagnosis(JsonDataclass):
    """Verdict, reason and remedies of one training step. Get one from `diagnose`."""

    evidence: Evidence
    """What clocks and experiments measured."""
    judgement: Judgement
    """What follows from it."""
    remedies: tuple[Remedy, ...] = ()
    """What would help, in the order in which to try it: what removes the cause, the best first, and before it what surely gains more
    whatever the cause. Their gains do not multiply."""
    spec: Spec | None = None
    """What was diagnosed, if it was a spec or a run."""
    subject: Any = field(default=None, metadata=NOT_STORED)
    """What `prove` needs to go on: the step and the loader of this process, or how a spec or a script was launched."""
    proofs: list[Proof] = field(default_factory=list)
    """What `prove` showed so far."""

    @classmethod
    def of(
        cls, evidence: Evidence, *, spec: Spec | None = None, subject: Any = None, adjust: Callable[[Remedy], Remedy] | None = None
    ) -> "Diagnosis":
        """Judge evidence and derive remedies.

        Args:
            evidence: what was measured of one training step.
            spec: what was diagnosed, if it was a spec or a run.
            subject: what `prove` needs.
            adjust: a function applied to each remedy, such as one that widens intervals by earlier proofs on this machine.
        """
        judgement = judge(evidence)
        remedies = remedies_for(evidence, judgement, spec=spec, outside=isinstance(subject, LaunchedScript))
        if adjust:
            remedies = tuple(sorted(map(adjust, remedies), key=sort_key))
        if noise_warnings(evidence):
            crowded = is_crowded(evidence)
            remedies = tuple(sorted(remedies, key=lambda remedy: (remedy.scope != "cause", not surely_gains(remedy, crowded))))
        return cls(evidence=evidence, judgement=judgement, remedies=surest_first(remedies), spec=spec, subject=subject)

    def with_formats(self, formats: FormatComparison) -> "Diagnosis":
        """The same diagnosis, in which the gains of faster storage, shards and prepared data follow from measured formats.

        Args:
            formats: the result of `wb.data.compare_formats` for the loader's data.
        """
        return Diagnosis.of(dataclasses.replace(self.evidence, formats=formats), spec=self.spec, subject=self.subject)

    @property
    def verdict(self) -> str:
        """One word of VERDICTS."""
        return self.judgement.verdict

    @property
    def cause(self) -> str:
        """The cause behind the verdict."""
        return self.judgement.cause

    @property
    def why(self) -> str:
        """The reason, with its numbers, and for a watched script the lines of code that it is about."""
        return f"{self.judgement.why}{self._places}"

    @property
    def _places(self) -> str:
        """Which lines of a watched script the verdict is about."""
        places, words = {what: re.sub(r"(:\d+) (.+)$", r"\1 (\2)", line) for what, line in self.evidence.places.items()}, []
        framework = SETTINGS_OF.get(places.get("framework", "")) if "step" in places else None
        if framework:
            words.append(f"The training loop is that of {framework[0]}, which {places['step']} starts")
        elif "loop" in places:
            words.append(f"The loop over the loader is at {places['loop']}")
        if self.verdict == "input-bound" and "dataset" in places:
            words.append(f"its samples come from {places['dataset']}")
        if not framework and (self.verdict != "input-bound" or not words) and "step" in places:
            words.append(f"{'its' if words else 'The'} optimizer step is at {places['step']}")
        return f" {', '.join(words)}." if words else ""

    @property
    def next(self) -> str:
        """What to try first, and its predicted gain; if numbers are NaN or infinite, to find out why."""
        return self._advice.text

    @property
    def _advice(self) -> Advice:
        return Advice(evidence=self.evidence, judgement=self.judgement, remedies=self.remedies, model=self.model, spec=self.spec)

    @property
    def _chosen(self) -> Remedy | None:
        """What `prove()` runs; where the verdict is inconclusive, only what surely gains."""
        if (sure := self._advice.sure_gain or self._advice.sure_whatever) and sure.provable:
            return sure
        return None if self.verdict == "inconclusive" else next((remedy for remedy in self.remedies if remedy.provable), None)

    @property
    def choice(self) -> str:
        """Why `prove()` runs another remedy than the first in the list, the one in `next`; "" = it runs that one, or none."""
        chosen = self._chosen
        if chosen in (None, self.remedies[0] if self.remedies else None):
            return ""
        if self.remedies[0].provable:
            return f"What {self.remedies[0].name} gains is within the noise. Tried instead: {chosen.name}."
        mine = f"{self.remedies[0].name} is a change that you have to make yourself. {TO_COMPARE}"
        if chosen.scope != "cause" and (gain_of(chosen) < LITTLE or chosen.low <= 1):
            cause = f"No remedy for the verdict ({self.verdict}, {self.cause}) can be tried here: {mine}"
            return f"{cause} Tried instead: {chosen.name}, which does not address the verdict."
        return f"{mine} Of those that can be tried here, the best is {chosen.name}."

    @cached_property
    def model(self) -> StepModel:
        """Predicts the step under changed knobs."""
        return StepModel.of(self.evidence)

    @property
    def parts(self) -> Parts:
        """The parts of the step as it is."""
        return self.model.parts()

    @property
    def loader_curve(self) -> LoaderCurve | None:
        """Predicted times of loader and step against the number of workers, with measured points; None if the loader was not probed.

        It recommends a number of workers only if the remedies offer it, and otherwise the present number. It recommends none if the verdict
        is inconclusive, the gain is within a busy machine's noise, or the unchanged step was measured far from its prediction.
        """
        feeding, loading = self.model.feeding, self.evidence.loading
        if feeding is None or loading is None:
            return None
        now = loading.num_workers
        curve = feeding.curve(persistent_workers=loading.persistent_workers)
        doubt = loader_misfit(self.model) or ("the verdict is inconclusive" if self.verdict == "inconclusive" else "")
        offered = next((remedy for remedy in self.remedies if remedy.name == f"num_workers={curve.recommended}"), None)
        if offered and busy_words(self.evidence) and not doubt and not surely_gains(offered, is_crowded(self.evidence)):
            doubt = f"the machine was busy, and what {offered.name} gains is within the noise"
        if doubt or not offered:
            curve = dataclasses.replace(curve, recommended=now, doubt=doubt)
        alone = {} if math.isnan(loading.alone) else {now: loading.alone}
        return curve.with_measured(loader=alone, step={now: self.model.costs.clean})

    @property
    def _no_workers(self) -> str:
        """Why there is no remedy of more workers for a step that waits for its DataLoader; "" = there is, or the reason is in a note."""
        feeding, loading, noise = self.model.feeding, self.evidence.loading, self.evidence.noise
        if self.verdict != "input-bound" or feeding is None or loading is None or loading.kind != "DataLoader":
            return ""
        if loading.stream in ("repeated", "unknown") or any(remedy.name.startswith("num_workers=") for remedy in self.remedies):
            return ""
        busy = f"; other processes take {noise.foreign:.1f} of {noise.cores:.0f} cores" if noise and is_crowded(self.evidence) else ""
        term = feeding.binds(loading.num_workers + 1)
        made = loading.cpu if loading.cpu is not None else loading.worker_cpu
        small = term == "compute" and made is not None
        why = f"all that they can take over is the {units.seconds(made)} of CPU that a batch costs" if small else TERMS[term]
        return f"; more workers: not expected to help ({why}{busy}), see loader_curve"

    def remedy(self, which: Choice = None) -> Remedy:
        """One of the remedies: the first that can be proved (None), by its number in the table (from 1), by its name, or itself.

        Knobs with values, such as {"deterministic": True} or "num_workers=2", are accepted too, even if they only have a price.

        Raises:
            ValueError: there is no remedy, or none with that name or number.
        """

        def nothing(names: str) -> str:
            has = f"its remedies cannot be changed from here ({names})" if self.remedies else "it has no remedy"
            return f"the verdict is {self.verdict} ({self.cause}), and {has}. {self.next}"

        if which is None and self._chosen:
            return self._chosen
        if which is None and isinstance(self.subject, LaunchedScript) and self.verdict != "inconclusive" and self.remedies:
            return self.remedies[0]  # the error says where to make it
        if which is None and self.verdict == "inconclusive" and any(remedy.provable for remedy in self.remedies):
            raise ValueError(f"the verdict is inconclusive ({self.cause}), so prove() has nothing to run: name what to try. {self.next}")

        def of_these(change: Mapping[str, Any]) -> Remedy:
            asked = of_knobs(self.model, change)
            return with_errors(asked, self.model) if asked.low else asked  # without a prediction there is no range

        return find_remedy(self.remedies, which, of_knobs=of_these, nothing=nothing, whose="this diagnosis has")

    @accept_synonyms
    def prove(self, which: Choice = None, *, budget_s: float = 60.0) -> Proof:
        """Run a remedy, interleaved with the unchanged step; the proof is kept in `proofs`.

        For a script that `diagnose` launched, launches with and without the remedy take turns. Without editing it, these can be changed:
        threads, nproc_per_node, the loaders' num_workers, prefetch_factor, persistent_workers and pin_memory, optimizer="fused" or
        "foreach", and DDP's bucket_cap_mb. For any other change, the error says where to make it.

        Args:
            which: a remedy, its number in the table or its name; or knobs with values, {"deterministic": True} or "num_workers=2"; None =
                the best that can be proved.
            budget_s: seconds that it may take. At Ctrl-C, the proof uses what was timed so far, with a wider interval. With fewer than two
                pairs of blocks nothing is known, and the KeyboardInterrupt says so.

        Returns:
            The proof; without `which`, and if there is nothing to prove, one that says why, whose `gained` is False.

        Raises:
            ValueError: no such remedy, it cannot be applied from here, or the diagnosed step is no longer in this process.
        """
        try:
            remedy = self.remedy(which)
            if not remedy.provable:
                late.load("prove")(self, remedy, budget_s=budget_s)  # refuses it, and says where to make the change
        except ValueError as nothing:
            if which is None:
                return Proof.nothing(str(nothing))
            raise
        proof: Proof = late.load("prove")(self, remedy, budget_s=budget_s)
        if which is None and self.choice:
            proof = dataclasses.replace(proof, choice=self.choice)
        self.proofs.append(proof)
        return proof

    # --- how it shows itself

    @property
    def doubt(self) -> str:
        """What makes the verdict doubtful: weights or losses are NaN or infinite; the step trains nothing; the machine was busy, so close
        decisions and gains may be wrong. "" = nothing, or the verdict says so itself.
        """
        doubts = [f"{note}." for note in void_notes(self.evidence)]
        busy = " ".join(busy_words(self.evidence))
        if busy and self.verdict != "inconclusive":
            busy = busy if busy.startswith("The machine was busy") else f"The machine was busy: {busy[0].lower()}{busy[1:]}"
            doubts.append(f"{busy} Close decisions and predicted gains may be wrong; diagnose again when it is quiet.")
        return " ".join(doubts)

    @property
    def summary(self) -> str:
        """Verdict, predicted gain and doubt, if any, why, next. A doubt that makes the verdict void comes first."""
        return "\n".join(f"{name}: {text}" if name else f"{self.verdict} ({self.cause})" for name, text in self._summary)

    @property
    def _summary(self) -> list[tuple[str, str]]:
        """The lines of the summary, each with its name; the verdict has none."""
        best = self._advice.recommended
        todo = dataclasses.replace(self._advice, names_gain=best is None).text
        lines = [("", "")]
        if best:
            lines.append(("Predicted gain", f"{best.gain} with {best.name}"))
        if self.doubt:
            lines.insert(0 if void_notes(self.evidence) else len(lines), ("Doubt", self.doubt))
        return [*lines, ("Why", self.why), ("Next", todo)]

    @property
    def caption(self) -> str:
        """What the numbers are, and what to know of them."""
        e = self.evidence
        if e.observed:
            text = f"observed in {e.steps} steps; nothing was tried: diagnose(step, loader) or diagnose(spec) makes experiments"
        else:
            text = f"measured by {len(e.arms)} experiments in {units.seconds(e.seconds)}, {e.steps} calls of step()"
        if e.noise and e.noise.foreign > MIN_FOREIGN_SHARE * e.noise.cores and not is_crowded(e):  # from there on, it is among the notes
            text += f"; other processes took {e.noise.foreign:.1f} of {e.noise.cores:.1f} cores"
        gpu = e.noise.gpu if e.noise and e.noise.spread <= MAX_BLOCK_SPREAD else ()  # from there on, it is among the notes
        void = void_notes(e)
        notes = [note for note in self._notes if note not in void]
        single = [name for name, arm in e.arms.items() if len(arm.pairs) == 1]
        once = (
            f"one pair of blocks for {', '.join(single)}: their ranges assume that equal blocks differ by {units.percent(ONE_PAIR)} at most"
        )
        return display.notes([text, *[once] * ("cached" in single), *self._called, *self._threads, *self._agreement, *gpu, *notes])

    @property
    def _called(self) -> list[str]:
        """Why what is saved without the host is not what its row adds; none = the two agree, or the table has no such row."""
        saved, adds = self.judgement.shares.get("host"), self.parts.share("host")
        if saved is None or saved.low <= adds <= saved.high or not self.judgement.cause.startswith(("python", "launches")):
            return []
        return [
            f"between operators the host takes {units.percent(adds)} of the step; what else would be saved without it is Python inside "
            "forward and backward and the calling of short operators, which count as compute under adds and share"
        ]

    @property
    def _notes(self) -> list[str]:
        """What is doubtful, but for what `doubt` or `why` says of other processes."""
        e = self.evidence
        if self.verdict != "inconclusive":
            told = {*busy_words(e), *(note for note in busy_notes(e) if e.observed)}
        else:
            told = {*noise_warnings(e)[:1]} if self.cause == "noise" else set()
        return [note for note in (*self._advice.note, *e.notes, *self.judgement.notes) if note not in told]

    @property
    def _agreement(self) -> list[str]:
        """That the sources which see the same part agree on each; none = they do not, or no part is seen by two."""
        compared = [source for source in self.judgement.sources if source.agree is not None]
        names = {"clocks": "clocks", "arms": "experiments", "trace": "trace"}
        *first, last = [word for name, word in names.items() if any(getattr(s, name) is not None for s in compared)] or [""]
        agree = compared and all(source.agree for source in compared)
        return [f"{', '.join(first)} and {last} agree within {units.percent(MAX_DISAGREEMENT)} of the step"] if agree else []

    @property
    def _threads(self) -> list[str]:
        """On a CPU: threads per operator, which differ between a launch and a process of one's own; none = not known."""
        e = self.evidence
        if e.device != "cpu" or (e.observed and self.spec is None and e.noise is None):
            return []
        started = "started with " * isinstance(self.spec, ScriptSpec)  # it may set another number itself
        text, cores = f"{started}{units.several(e.threads, 'thread')} per operator", e.noise.cores if e.noise else usable_cores()
        if self.spec and e.threads == 1 and cores >= 2:
            every, threads = f"all {cores:.0f} cores" if e.noise else "all cores", min(4, int(cores))
            how = (
                f"`{script_command('diagnose', self.spec, threads=threads)}`" if isinstance(self.spec, ScriptSpec) else f"threads={threads}"
            )
            text += f", which the workbench sets (a process that you start yourself uses {every}): {how} changes it"
        return [text]

    @property
    def table(self) -> display.Table:
        """One row per part of the step: what it adds, and what its removal would save (less if another part hides behind it)."""
        parts, rows = self.parts, []
        for part in PARTS:
            saved = self.judgement.shares.get(part)
            if parts.seconds(part) or saved:
                gone = units.MISSING if saved is None else f"{units.percent(saved.low)} … {units.percent(saved.high)}"
                rows.append([part, units.seconds(parts.seconds(part)), units.percent(parts.share(part)), gone, PART_WORDS[part]])
        return display.Table(
            columns=("part", "adds", "share", "without it, saved", ""),
            rows=[*rows, ["step", units.seconds(parts.step), "100 %", units.MISSING, ""]],
            title="What the step is made of",
            note=self.caption,
        )

    @property
    def remedy_table(self) -> display.Table:
        """One row per remedy, with its proof, in the order in which to try them."""
        first = ""
        if chosen := self._chosen:
            i = self.remedies.index(chosen) + 1
            first = f"; prove({i}) runs {'the first' if i == 1 else chosen.name}"
        note = f"predicted throughput over that of now, each alone: gains do not multiply{first}{self._no_workers}"
        return remedy_table(self.remedies, self.proofs, note)

    @property
    def _tables(self) -> list[display.Table]:
        tables = [*([self.remedy_table] if self.remedies else []), self.table]
        if differing := tuple(source for source in self.judgement.sources if source.agree is False):
            sources = dataclasses.replace(self.judgement, sources=differing).table
            tables.append(dataclasses.replace(sources, title="Where the sources differ"))
        return tables

    def to_frame(self) -> Any:
        """A DataFrame with one row per remedy: predicted speedup with its interval, and the measured one if it was proved."""
        return display.frame(
            [
                {
                    **remedy.to_json(),
                    "provable": remedy.provable,
                    "measured": next((p.measured.mid for p in reversed(self.proofs) if p.remedy.name == remedy.name), math.nan),
                }
                for remedy in self.remedies
            ],
            columns=("name", "scope", "speedup", "low", "high", "measured", "ceiling", "provable", "change", "what", "formula", "costs"),
        )

    def brief(self) -> dict[str, Any]:
        """The diagnosis for a program or an agent, as plain JSON values that take at most BRIEF_BYTES as text.

        Returns:
            `doubt`: what makes the verdict doubtful, if anything. `claim`: verdict, cause and why. `step_s`: seconds per step, and
            `shares`: the fraction of it that each part adds. `experiments`: name → [low, mid, high], the fraction of the step that was
            saved. `predicted` and `proved`: remedies with their speedups as [low, mid, high], the best first. `unknown`: notes on what is
            doubtful. `next`: what to do, and a `command` or call. None stands for a number that is infinite or unknown. If the text would
            be too long, the ends of lists are left out, and `left_out` counts them.
        """
        e = self.evidence
        proved = [{"change": proof.remedy.name, "measured": three(proof.measured), "helps": proof.gained} for proof in self.proofs]
        value = {
            "claim": {"verdict": self.verdict, "cause": self.cause, "why": short(self.why)},
            "step_s": number(self.parts.step),
            "shares": {part: number(self.parts.share(part)) for part in PARTS if self.parts.seconds(part)},
            **({"doubt": short(self.doubt)} if self.doubt else {}),
            "predicted": [
                {"change": remedy.name, "speedup": three(remedy.interval), "at_most": remedy.ceiling, "provable": remedy.provable}
                for remedy in self.remedies
            ],
            "proved": proved,
            "experiments": {name: three(arm.surely_saved) for name, arm in e.arms.items()},
            "unknown": [short(note) for note in self._notes],
            "next": {"do": short(self.next), "command": None if proved else self._command()},
        }
        return fitted(value, "predicted", "proved", "experiments", "unknown")

    def _command(self, remedy: str | None = None) -> str | None:
        """What to run next, for a shell: it proves the best remedy, or the one that is named, or tells more where nothing was tried yet.

        Returns:
            The call where a command would be too long, or there is none; None where nothing is to be proved.
        """
        provable = remedy is not None or self._chosen is not None
        command, words = "", list[str]()
        proves = ["--prove"] if remedy is None else ["--remedy", remedy]
        if isinstance(self.spec, ScriptSpec):
            verb, options = ("diagnose", proves) if provable else ("launch", ["--profile"])
            command = script_command(verb, self.spec, *options, threads=self.spec.threads)
        elif isinstance(self.spec, RunSpec) and (provable or self.evidence.observed):
            words = ["diagnose", self.spec.task, *(proves if provable else [])]
            turned = [f"{name}={value}" for name, (_, value) in RunSpec(task=self.spec.task).changes(self.spec).items()]
            words += ["--set", *turned] if turned else []
        else:
            return IN_PYTHON if provable else None
        command = command or shlex.join(["workbench", *words])
        return command if len(command.encode()) <= BRIEF_COMMAND else IN_PYTHON if provable else None

    plot = display.plot_method("diagnosis")

    def __repr__(self) -> str:
        return f"Diagnosis({self.verdict!r}, cause={self.cause!r}, {len(self.remedies)} remedies)"

    def __str__(self) -> str:
        return "\n\n".join([self.summary, *map(str, self._tables)])

    def for_terminal(self, *, proving: bool = False) -> str:
        """As text with commands that prove a remedy in place of calls in Python; while one is proved, nothing says how to prove it."""
        chosen, command = self._chosen, self._command()

        def tries(call: re.Match[str]) -> str:
            name = call[1] or (chosen.name if chosen else "")
            if proving and chosen and name == chosen.name:
                return ""
            shell = self._command(name)
            return call[0] if shell in (None, IN_PYTHON) else f" `{shell}` tries it{call[2]}."

        text = re.sub(r" prove\((?:'([^']+)')?\) tries it( now|)\.", tries, str(self))
        if proving:
            return re.sub(r"; prove\(\d+\) runs [^;\n]*", "", text)
        return text if command in (None, IN_PYTHON) else re.sub(r"\bprove\(\d+\)(?= runs )", lambda _: f"`{command}`", text)

    def _repr_html_(self) -> str:
        head = f"<strong>{display.escape(self.verdict)}</strong> ({display.escape(self.cause)})"
        lines = (f"<p>{f'<strong>{name}:</strong> {display.escape(text)}' if name else head}</p>" for name, text in self._summary)
        return "".join([*lines, *(table._repr_html_() for table in self._tables)])
