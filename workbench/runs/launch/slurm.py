"""Submits a run to Slurm: writes a script for sbatch into the run directory, whose srun starts a guard and torchrun on each machine."""

import dataclasses
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import run_directory
from workbench.core.checks import is_whole
from workbench.runs import slurm_queue
from workbench.runs.entrypoints import NODE
from workbench.runs.launch import environment
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.launch.nodes import ENV_ENDPOINT
from workbench.runs.spec import RunSpec, Spec, SpecError, spec_from_json

_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")
_SET_HERE = ("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--output", "-o", "--job-name", "-J", "--requeue", "--no-requeue")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """The resources to request from Slurm: `wb.launch(spec, on=wb.Slurm(nodes=2))`.

    The run directory must be on a file system that all machines share.

    >>> spec = RunSpec(task="text-gpt", nnodes=2)
    >>> print(Slurm(nodes=2, partition="gpu", time="1:00:00").script(spec, "runs/x", "x", python="python"), end="")
    #!/bin/bash
    #SBATCH --job-name=x
    #SBATCH --nodes=2
    #SBATCH --ntasks-per-node=1
    #SBATCH --partition=gpu
    #SBATCH --time=1:00:00
    #SBATCH --cpus-per-task=1
    #SBATCH --output=runs/x/slurm.log
    #SBATCH --open-mode=append
    #SBATCH --no-requeue
    # One task per machine: a guard, which starts torchrun there, watches it, and leaves nothing behind.
    export WORKBENCH_RUN_RDZV="$(python -m workbench.runs.launch.nodes begin runs/x)" || exit 1
    srun --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1 --kill-on-bad-exit=0 python -m workbench.runs.launch.nodes step runs/x
    """

    nodes: int | None = None
    """Machines; None = the spec's nnodes."""
    partition: str | None = None
    """None = Slurm's default."""
    time: str | None = None
    """Time limit as Slurm writes it: "30" (minutes), "2:00:00", "1-12:00:00"; None = the partition's."""
    gpus: int | None = None
    """GPUs on each machine; None = as many as ranks for a spec with device="cuda", else none."""
    cpus: int | None = None
    """Cores on each machine; None = those that its ranks need, threads + num_workers each; 0 = Slurm's default, which usually is one."""
    account: str | None = None
    """Whose account pays; None = the default."""
    requeue: bool = False
    """Let Slurm put the job back into its queue when a machine dies or another job goes first; it goes on from its last checkpoint."""
    setup: tuple[str, ...] = ()
    """Lines of shell before anything else, such as `"module load cuda"`."""
    options: tuple[str, ...] = ()
    """More of sbatch's own options, such as `"--mem=64G"`."""

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "cpus"):
            value, least = getattr(self, name), 1 if name == "nodes" else 0
            if value is not None and not is_whole(value, least=least):
                raise SpecError(f"Slurm({name}={value!r}): a whole number of at least {least} is allowed, or None")
        for name in ("setup", "options"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(line, str) and "\n" not in line for line in value):
                raise SpecError(f"Slurm({name}={value!r}): expected a list of lines, such as {name}=[{str(value)[:40]!r}]")
            object.__setattr__(self, name, tuple(value))
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[\w.,@+-]+", str(value)):
                raise SpecError(f"Slurm({name}={value!r}): expected a name without spaces")
        if self.time is not None and not _TIME.fullmatch(str(self.time)):
            raise SpecError(f'Slurm(time={self.time!r}): Slurm reads "30" (minutes), "2:00:00" or "1-12:00:00"')
        object.__setattr__(self, "time", None if self.time is None else str(self.time))
        for option in self.options:
            name = option.split("=")[0].split()[0] if option.strip() else option
            if name in _SET_HERE or not option.startswith("-"):
                fix = "it is set by the launch itself" if option.startswith("-") else 'expected an option such as "--mem=64G"'
                raise SpecError(f"Slurm(options=[{option!r}]): {fix}")

    @property
    def kept(self) -> dict[str, Any]:
        """What the run directory records about it."""
        return {"requeue": self.requeue}

    def sized(self, spec: Spec, nnodes: int | None = None) -> Spec:
        """The spec on the requested number of machines.

        Raises:
            LaunchError: two different numbers of machines, or requeue without checkpoints.
        """
        if nnodes is not None and self.nodes not in (None, nnodes):
            raise LaunchError(f"nnodes={nnodes} with Slurm(nodes={self.nodes}): these are two numbers of machines; leave one out")
        if self.requeue and isinstance(spec, RunSpec) and spec.checkpoint_every is None:
            raise LaunchError(
                "Slurm(requeue=True) with a spec that writes no checkpoints: it would begin anew each time; add checkpoint_every=100, or "
                "requeue=False"
            )
        return spec if self.nodes is None else spec.replace(nnodes=self.nodes)

    def script(self, spec: Spec, run_dir: str | os.PathLike[str], name: str, *, python: str = sys.executable) -> str:
        """The job script for sbatch, as text.

        Args:
            spec: what runs.
            run_dir: run directory of the job.
            name: name of the job.
            python: interpreter that all machines have.
        """
        gpus = self.gpus
        if gpus is None and isinstance(spec, RunSpec) and spec.device == "cuda":
            gpus = spec.nproc_per_node
        cpus = self.cpus
        if cpus is None and not any(re.match(r"(-c|--cpus-per-|--exclusive)", option) for option in self.options):
            cpus = spec.nproc_per_node * (spec.threads + (spec.num_workers if isinstance(spec, RunSpec) else 0))
        options = {
            "job-name": re.sub(r"[^\w.-]+", "-", name),
            "nodes": spec.nnodes,
            "ntasks-per-node": 1,
            "partition": self.partition,
            "time": self.time,
            "gpus-per-node": gpus or None,
            "cpus-per-task": cpus or None,
            "account": self.account,
            "output": os.path.join(run_dir, run_directory.JOB_LOG),
            "open-mode": "append",
        }
        lines = ["#!/bin/bash", *(f"#SBATCH --{option}={value}" for option, value in options.items() if value is not None)]
        lines += [
            f"#SBATCH --{'requeue' if self.requeue else 'no-requeue'}",
            *(f"#SBATCH {option}" for option in self.options),
            *self.setup,
        ]
        lines.append("# One task per machine: a guard, which starts torchrun there, watches it, and leaves nothing behind.")
        here = shlex.quote(str(run_dir))
        program = f"{shlex.quote(python)} -m {NODE}"
        each = f" --cpus-per-task={cpus}" if cpus else ""
        lines.append(f'export {ENV_ENDPOINT}="$({program} begin {here})" || exit 1')
        lines.append(f"srun --ntasks={spec.nnodes} --ntasks-per-node=1{each} --kill-on-bad-exit=0 {program} step {here}")
        return "\n".join(lines) + "\n"

    def submit(self, run_dir: Path, run_id: str) -> None:
        """Write the script of a filled run directory and give it to sbatch.

        Raises:
            LaunchError: Slurm is not installed here, or refuses the job; in its own words.
        """
        info = run_directory.read_json(run_dir / run_directory.RUN_JSON)
        spec = spec_from_json(info["spec"])
        script = run_dir / run_directory.JOB_SCRIPT
        script.write_text(self.script(spec, run_dir, info["name"]), encoding="utf-8")
        environ, _, _ = environment.for_ranks(run_dir, run_id, spec.threads)
        code, text = slurm_queue.call("sbatch", "--parsable", f"--chdir={Path.cwd()}", str(script), env=environ)
        if code is None:
            raise LaunchError(
                f"Slurm cannot be reached: {text or 'there is no sbatch on PATH'}. Launch from a login node of the cluster; without Slurm, "
                "wb.launch(spec, nnodes=2) runs on machines that you start by hand"
            )
        if code:
            said = [re.sub(r"^sbatch: (error|fatal): ", "", line) for line in text.strip().splitlines()]
            raise LaunchError(f"Slurm refuses the job: {'; '.join(said) or 'it did not say why'}. {_advice(text)}")
        number = text.strip().split(";")[0]
        try:
            run_directory.write_json(run_dir / run_directory.JOB, {"job": number, "asked": dataclasses.asdict(self)})
        except BaseException:  # a run that cannot be followed is none: its directory goes, and so does its job
            slurm_queue.call("scancel", number)
            raise


def _advice(text: str) -> str:
    if "partition" in text.lower():
        code, partitions = slurm_queue.call("sinfo", "-h", "-o", "%R")
        if not code and partitions.split():
            return f"Its partitions are {', '.join(dict.fromkeys(partitions.split()))}."
    if "node configuration" in text.lower() or "cpu" in text.lower():
        return "Does any machine have that many cores and GPUs? sinfo -N -o '%N %c %G' lists them: Slurm(cpus=…, gpus=…)."
    if "time limit" in text.lower():
        return 'Ask for less: Slurm(time="1:00:00"); sinfo shows the limit of each partition.'
    if "account" in text.lower():
        return "sacctmgr show associations user=$USER lists yours: Slurm(account=…)."
    return "The requested resources are in the #SBATCH lines: see Slurm(…).script(spec, …)."
