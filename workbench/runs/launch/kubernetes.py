"""Writes a Kubernetes manifest that runs a spec on several machines: an indexed Job with a headless Service, a JobSet or a PyTorchJob."""

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core.checks import choice, whole_number
from workbench.core.run_directory import OUT
from workbench.core.synonyms import accept_synonyms
from workbench.runs import combinations
from workbench.runs.entrypoints import ALONE
from workbench.runs.launch.launch import label
from workbench.runs.spec import RunSpec, ScriptSpec, SpecError

KINDS = ("job", "jobset", "pytorchjob")
PORT = 29400
_LONGEST = 63
"""Letters of a DNS label, as which a pod's host name has to pass."""
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_IMAGE = re.compile(
    rf"(?:{_HOST}(?:\.{_HOST})+(?::\d+)?/|{_HOST}:\d+/|localhost/)?{_PART}(?:/{_PART})*"
    r"(?::[A-Za-z0-9_][\w.-]{0,127})?(?:@[A-Za-z][A-Za-z0-9]*(?:[+._-][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?",
    re.ASCII,
)
"""As the distribution project's reference grammar has it."""
_QUANTITY = re.compile(r"(?=[\d.]*[1-9])(\d+\.?\d*|\.\d+)([eE][+-]?\d+|m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?", re.ASCII)
ENV_UID = "WORKBENCH_JOB_UID"
"""Inside a pod: what no other Job has, not even the next one of the same name."""
_INDEX = "batch.kubernetes.io/job-completion-index"
"""The annotation of a pod with its number in an indexed Job."""
_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*( [\w./=-]+)*")
_WORDS_OF_YAML = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """Objects of Kubernetes' API, as one file for `kubectl apply -f`."""

    objects: tuple[Mapping[str, Any], ...]
    """Plain JSON values, in the order in which they are created."""

    @property
    def text(self) -> str:
        """YAML, a document for each object."""
        return "---\n".join("\n".join(_yaml(item)) + "\n" for item in self.objects)

    def to_json(self) -> str:
        """One JSON object that kubectl takes as well: a List."""
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(self.objects)}, indent=1) + "\n"

    def write(self, path: str | Path) -> Path:
        """Write it: as JSON if the name ends with .json, else as YAML. Returns the path."""
        where = Path(path)
        part = where.with_name(where.name + ".part")
        part.write_text(self.to_json() if where.suffix == ".json" else self.text, encoding="utf-8")
        return part.replace(where)

    def __str__(self) -> str:
        return self.text


@accept_synonyms
def kubernetes(
    spec: RunSpec | ScriptSpec | str,
    *,
    image: str,
    nodes: int | None = None,
    gpus: int | None = None,
    kind: str = "job",
    name: str | None = None,
    namespace: str | None = None,
    claim: str | None = None,
    memory: str | None = None,
    cpu: str | None = None,
    shm: str = "2Gi",
) -> Manifest:
    """Write a manifest that runs a spec under torchrun on several machines of a cluster. It only makes text, and contacts no cluster.

    Each pod is a machine with `nproc_per_node` ranks. Pod 0 hosts the rendezvous, at the name of a headless Service.

    Args:
        spec: what to train; a path is a script inside the image. "{out}" in a script's arguments stands for a folder in `/runs` that is new
            in each run.
        image: an image with this workbench (for a script, with torch) and the task's files in its working directory.
        nodes: number of pods; None = the spec's nnodes.
        gpus: NVIDIA GPUs of each pod, one per rank; None = as many as ranks, none for a spec with device="cpu".
        kind: "job" (the cluster needs no extension), "jobset" (jobset.x-k8s.io) or "pytorchjob" (Kubeflow's training operator).
        name: name of the objects (DNS-1123); None = the name of the task or script.
        namespace: None = kubectl's current one.
        claim: PersistentVolumeClaim for `/runs` (ReadWriteMany), where the run directory is; None = it is lost with the pods.
        memory: memory of each pod, such as "64Gi".
        cpu: cores of each pod, such as "8".
        shm: size of /dev/shm, which loader workers use; Kubernetes' default of 64 MiB is too small for them.

    Raises:
        SpecError: a value that is not allowed.
    """
    if isinstance(spec, str):
        spec = ScriptSpec(script=spec)
    if nodes is not None:
        spec = spec.replace(nnodes=nodes)
    on_gpus = isinstance(spec, ScriptSpec) or spec.device != "cpu"
    count = gpus if gpus is not None else spec.nproc_per_node if on_gpus else 0
    whole_number("gpus", count, least=0, also=", or None", error=SpecError)
    if count and count != spec.nproc_per_node:
        raise SpecError(f"gpus={count} with nproc_per_node={spec.nproc_per_node}: each rank takes one GPU; make them the same number")
    if isinstance(spec, RunSpec):
        combinations.check_task(spec)
        if not count and (why := combinations.on_cpu(spec)):
            raise SpecError(why)
    choice("kind", kind, KINDS, error=SpecError)
    if not _IMAGE.fullmatch(image):
        raise SpecError(f'image={image!r}: expected the name of a container image, such as "registry/team/train:1"')
    for what, value in (("memory", memory), ("cpu", cpu), ("shm", shm)):
        if value is not None and not _QUANTITY.fullmatch(str(value)):
            raise SpecError(f'{what}={value!r}: expected a quantity above 0, as Kubernetes writes it: "{"8" if what == "cpu" else "64Gi"}"')
    called = _named(spec, kind, name)
    if namespace is not None and not _LABEL.fullmatch(namespace):
        raise SpecError(f"namespace={namespace!r}: small letters, digits and -, at most 63 (a label of DNS-1123)")
    if claim is not None and not _SUBDOMAIN.fullmatch(claim):
        raise SpecError(f"claim={claim!r}: small letters, digits, - and ., at most 253 (a subdomain of DNS-1123)")
    run = f"{called}-{uuid.uuid4().hex}" if kind == "pytorchjob" else f"{called}-$({ENV_UID})"
    command = _command(spec, kind, called, run)
    pod = _pod(spec, image, command, count, claim, {"memory": memory, "cpu": cpu}, shm)
    meta = {"name": called, "labels": {"app.kubernetes.io/name": called}} | ({"namespace": namespace} if namespace else {})
    return Manifest(_OBJECTS[kind](meta, spec.nnodes, pod, spec.nproc_per_node, run))


def _named(spec: RunSpec | ScriptSpec, kind: str, name: str | None) -> str:
    """A name for the objects, short enough for what a pod's host name appends to it."""
    last = spec.nnodes - 1
    most = _LONGEST - len({"job": f"-{last}", "jobset": f"-workers-0-{last}", "pytorchjob": f"-worker-{last}"}[kind])
    most = min(most, 52)  # what the controllers of Jobs and of pods add by themselves
    chosen = name or re.sub(r"[^a-z0-9]+", "-", label(spec).lower()).strip("-")[:most].strip("-")
    chosen = chosen if name or chosen[:1].isalpha() else f"run-{chosen}"[:most].strip("-")
    if not _NAME.fullmatch(chosen) or len(chosen) > most:
        raise SpecError(
            f"name={name!r}: small letters, digits and -, beginning with a letter, at most {most} (DNS-1123, with room for a pod's)"
        )
    return chosen


def _program(spec: RunSpec | ScriptSpec) -> list[str]:
    """What torchrun starts in each rank."""
    if isinstance(spec, ScriptSpec):
        return ["--", spec.script, *spec.args]  # else a script's own --n or --log counts as an abbreviation of torchrun's options
    turned = {name: value for name, value in spec.to_json().items() if name not in ("kind", "task")}
    usual = RunSpec(task=spec.task).to_json()
    knobs = [f"{name}={value}" for name, value in turned.items() if value != usual[name] and name not in ("nnodes", "nproc_per_node")]
    return ["-m", ALONE, spec.task, "/runs", *knobs]


def _command(spec: RunSpec | ScriptSpec, kind: str, name: str, run: str) -> list[str]:
    """torchrun in a pod. In "job" and "jobset" pod 0 has a name of its own, and each knows its number (PET_NODE_RANK), so the rendezvous is
    static, which unpickles nothing; the operator of "pytorchjob" sets PET_… for torchrun, of its own c10d rendezvous.

    Kubernetes reads `$(NAME)` in a word as a variable, and `$$` as `$`. `run` names the run; where the program has {out}, a shell makes
    the folder first.
    """
    escaped, out = [word.replace("$", "$$") for word in _program(spec)], f"/runs/{run}/out"
    program = [word.replace(OUT, out) for word in escaped] if isinstance(spec, ScriptSpec) else escaped
    begin = ["torchrun"] if program == escaped else ["sh", "-c", 'mkdir -p "$0" && exec "$@"', out, "torchrun"]
    if kind == "pytorchjob":
        return [*begin, *program]
    host = f"{name}-0.{name}" if kind == "job" else f"{name}-workers-0-0.{name}"
    return [
        *begin,
        f"--nnodes={spec.nnodes}",
        f"--nproc-per-node={spec.nproc_per_node}",
        "--rdzv-backend=static",
        f"--rdzv-endpoint={host}:{PORT}",
        f"--rdzv-id={run}",
        "--max-restarts=0",
        *program,
    ]


def _pod(
    spec: RunSpec | ScriptSpec, image: str, command: list[str], gpus: int, claim: str | None, resources: Mapping[str, str | None], shm: str
) -> dict[str, Any]:
    limits: dict[str, Any] = {name: value for name, value in resources.items() if value is not None}
    if gpus:
        limits["nvidia.com/gpu"] = gpus
    env: list[dict[str, Any]] = [{"name": "OMP_NUM_THREADS", "value": str(spec.threads)}, {"name": "PYTHONUNBUFFERED", "value": "1"}]
    if any(ENV_UID in word for word in command):  # a second Job of the same name is another run, with a directory of its own
        env.append({"name": ENV_UID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['controller-uid']"}}})
        env.append({"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}})
    runs = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    container = {
        "name": "pytorch",
        "image": image,
        "command": command,
        "env": env,
        "ports": [{"name": "rendezvous", "containerPort": PORT}],
        **({"resources": {"limits": limits, "requests": dict(limits)}} if limits else {}),
        "volumeMounts": [{"name": "runs", "mountPath": "/runs"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    return {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "runs", **runs}, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}}],
    }


def _indexed(nodes: int, pod: Mapping[str, Any], name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """The spec of an indexed Job: pod k is NAME-k.NAME to the others. A pod that fails ends all of them: a run does not go on in part."""
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "template": {"metadata": {"labels": dict(labels)}, "spec": {"subdomain": name, **pod}},
    }


def _job(meta: dict[str, Any], nodes: int, pod: dict[str, Any], ranks: int, run: str) -> tuple[dict[str, Any], ...]:
    labels = meta["labels"]
    ports = [{"name": "rendezvous", "port": PORT}]
    headless = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": dict(labels), "ports": ports}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": headless}
    return service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": _indexed(nodes, pod, meta["name"], labels)}


def _jobset(meta: dict[str, Any], nodes: int, pod: dict[str, Any], ranks: int, run: str) -> tuple[dict[str, Any], ...]:
    job = _indexed(nodes, pod, meta["name"], meta["labels"])
    del job["template"]["spec"]["subdomain"]  # JobSet makes the Service and sets it
    workers = {"name": "workers", "replicas": 1, "template": {"spec": job}}
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": meta["name"]},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [workers],
    }
    return ({"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": meta, "spec": spec},)


def _pytorchjob(meta: dict[str, Any], nodes: int, pod: dict[str, Any], ranks: int, run: str) -> tuple[dict[str, Any], ...]:
    alone = {name: value for name, value in pod.items() if name != "restartPolicy"}
    rendezvous = {"rdzvBackend": "c10d", "rdzvId": run}
    elastic = {**rendezvous, "minReplicas": nodes, "maxReplicas": nodes, "maxRestarts": 0, "nProcPerNode": ranks}
    replicas = {
        "Worker": {"replicas": nodes, "restartPolicy": "Never", "template": {"metadata": {"labels": meta["labels"]}, "spec": alone}}
    }
    spec = {"elasticPolicy": elastic, "pytorchReplicaSpecs": replicas}
    return ({"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": meta, "spec": spec},)


_OBJECTS = {"job": _job, "jobset": _jobset, "pytorchjob": _pytorchjob}


def _yaml(value: Any, indent: int = 0) -> list[str]:
    """Lines of YAML for plain JSON values: block style, and every text that could be read as something else in quotes."""
    pad = "  " * indent
    lines: list[str] = []
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, Mapping | list | tuple) and item:
                lines += [f"{pad}{_scalar(key)}:", *_yaml(item, indent + (not isinstance(item, list | tuple)))]
            else:
                lines.append(f"{pad}{_scalar(key)}: {_scalar(item)}")
        return lines
    for item in value:
        if isinstance(item, Mapping | list | tuple) and item:
            first, *rest = _yaml(item, indent + 1)
            lines += [f"{pad}- {first.lstrip()}", *rest]
        else:
            lines.append(f"{pad}- {_scalar(item)}")
    return lines


def _scalar(value: Any) -> str:
    """A text without quotes only where no reader of YAML can take it for a number, a boolean or a beginning of structure."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS_OF_YAML:
        return value
    refused = r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]"  # by YAML, though not by JSON
    return re.sub(refused, lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))
