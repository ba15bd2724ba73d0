"""Manifests for Kubernetes, held against the schemas of its API; no cluster is asked.

Jobs, Services and all pods against those of the package kubernetes-validate, which come from the API's own definition, strictly: a field
that they do not name is refused. They have no JobSet and no PyTorchJob: of these the Jobs and pods inside are held against them, and the
rest against CRDS, re-keyed from the definitions that are installed into clusters.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("kubernetes_validate") is None:  # not imported here: it takes seconds, in each process that collects tests
    pytest.skip("needs its schemas (pip install kubernetes-validate)", allow_module_level=True)
import yaml

import workbench as wb
from workbench.core import run_directory
from workbench.programs import alone
from workbench.runs import failure
from workbench.runs.launch.kubernetes import KINDS, _yaml
from workbench.runs.spec import ScriptSpec, SpecError

SPEC = wb.RunSpec(task="text-gpt", nnodes=2, nproc_per_node=8, micro_batch=16, lr=0.01)
DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
TINY = f"{Path(__file__).parents[1] / 'scripts' / 'tiny_task.py'}:build"


def named(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in objects}


def pod_of(one: dict[str, Any]) -> dict[str, Any]:
    match one["kind"]:
        case "Job":
            template = one["spec"]["template"]
        case "JobSet":
            template = one["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        case _:
            template = one["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    return template


def fields(required: str = "", **properties: object) -> dict[str, Any]:
    """A schema of an object that has these fields and no other."""
    return {"type": "object", "properties": properties, "additionalProperties": False, "required": required.split()}


TEXT, NUMBER, ANYTHING = {"type": "string"}, {"type": "integer"}, {"type": "object"}
CRDS = {
    "JobSet": fields(  # github.com/kubernetes-sigs/jobset at 08dfbdf, config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml, v1alpha2
        network=fields(enableDNSHostnames={"type": "boolean"}, publishNotReadyAddresses={"type": "boolean"}, subdomain=TEXT),
        failurePolicy=fields(maxRestarts=NUMBER, restartStrategy={"enum": ["Recreate", "BlockingRecreate"]}, rules={"type": "array"}),
        replicatedJobs={
            "type": "array",
            "items": fields("name template", name=TEXT, replicas=NUMBER, groupName=TEXT, template=fields(metadata=ANYTHING, spec=ANYTHING)),
        },
        suspend={"type": "boolean"},
        ttlSecondsAfterFinished=NUMBER,
    ),
    "PyTorchJob": fields(  # github.com/kubeflow/training-operator at 374e88a, manifests/base/crds/kubeflow.org_pytorchjobs.yaml, v1
        "pytorchReplicaSpecs",
        elasticPolicy=fields(
            **dict.fromkeys(("minReplicas", "maxReplicas", "maxRestarts", "nProcPerNode", "rdzvPort"), NUMBER),
            **dict.fromkeys(("rdzvBackend", "rdzvHost", "rdzvId"), TEXT),
            standalone={"type": "boolean"},
        ),
        nprocPerNode=TEXT,
        pytorchReplicaSpecs={"type": "object", "additionalProperties": fields(replicas=NUMBER, restartPolicy=TEXT, template=ANYTHING)},
        runPolicy=ANYTHING,
    ),
}
VERSIONS = {"JobSet": "jobset.x-k8s.io/v1alpha2", "PyTorchJob": "kubeflow.org/v1"}
"""Kind → the version that this is."""


@pytest.fixture
def strictly(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, Any]], object]:
    """Hold an object against the schemas."""
    import kubernetes_validate

    read = kubernetes_validate.utils.schema_contents
    monkeypatch.setattr(
        kubernetes_validate.utils,
        "schema_contents",
        lambda *words: _schemas[words] if words in _schemas else _schemas.setdefault(words, read(*words)),
    )

    def check(one: Mapping[str, Any]) -> None:
        for each in parts_of(json.loads(json.dumps(one))):
            kubernetes_validate.validate(each, "1.37", strict=True)

    return check


_schemas: dict[tuple[str, ...], Any] = {}


def parts_of(one: dict[str, Any]) -> list[dict[str, Any]]:
    """What of an object the API itself knows, as objects of their own; the rest of a JobSet or a PyTorchJob is held against CRDS here."""
    if one["kind"] not in CRDS:
        return [one]
    kind, name = one["kind"], one["metadata"]["name"]
    whole = fields("metadata spec", apiVersion={"const": VERSIONS[kind]}, kind={"const": kind}, metadata=ANYTHING, spec=CRDS[kind])
    import jsonschema

    jsonschema.Draft202012Validator(whole).validate(one)
    jobs = [{"apiVersion": "batch/v1", "kind": "Job", **each["template"]} for each in one["spec"].get("replicatedJobs", [])]
    pods = one["spec"].get("pytorchReplicaSpecs", {}).values()
    outer = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": one["metadata"]}  # any kind: for its metadata
    return [
        outer,
        *jobs,
        *({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": pod["template"]} for pod in pods),
    ]


MANIFESTS: list[dict[str, Any]] = [
    {},
    {"claim": "runs", "memory": "64Gi", "cpu": "500m", "namespace": "ml", "nodes": 128},
    {"spec": ScriptSpec(script="train.py", args=("--n", "3", "$(HOME)"), nnodes=2), "gpus": 0, "shm": "0.5Gi"},
    {"spec": wb.RunSpec(task="fashion-mlp", device="cpu"), "memory": "1e9", "name": "alone"},
]


@pytest.mark.parametrize("options", MANIFESTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_object_keeps_to_the_schemas_of_the_api(kind: str, options: dict[str, Any], strictly: Callable[..., object]) -> None:
    manifest = wb.kubernetes(**{"spec": SPEC, "image": "registry/team/train:1", "kind": kind, **options})
    for one in yaml.safe_load_all(manifest.text):
        strictly(one)


def changed(one: Mapping[str, Any], path: str, value: object) -> dict[str, Any]:
    """An object with another value at a path; None takes it away."""
    copy: Any = json.loads(json.dumps(one))
    *way, last = [int(word) if word.isdigit() else word for word in path.split(".")]
    place = copy
    for word in way:
        place = place[word]
    place[last] = value
    if value is None:
        del place[last]
    return dict(copy)


POD = {
    "Job": "spec.template.spec",
    "JobSet": "spec.replicatedJobs.0.template.spec.template.spec",
    "PyTorchJob": "spec.pytorchReplicaSpecs.Worker.template.spec",
}


@pytest.mark.parametrize(
    ("which", "path", "value"),
    [
        *((kind, f"{pod}.{path}", value) for kind, pod in POD.items() for path, value in [
            ("containers.0.comand", ["torchrun"]), ("containers.0.env.0.value", 1), ("containers.0.command", "torchrun"),
            ("containers.0.name", None), ("volumes.0.emptyDir", "yes"), ("containers.0.ports.0.containerPort", "29400"),
        ]),
        *((kind, "metadata.lables", {}) for kind in POD),
        ("Job", "spec.completions", "two"), ("Job", "spec.completionMod", "Indexed"), ("Job", "spec.template", None),
        ("Service", "spec.publishNotReadyAddresses", "true"), ("Service", "spec.ports.0.port", "29400"),
        ("Service", "spec.cluster_ip", "None"),
        ("JobSet", "spec.replicatedJobs.0.template.spec.parallelism", "2"), ("JobSet", "spec.replicatedJobs.0.replicas", "1"),
        ("JobSet", "spec.network.enableDNS", True), ("JobSet", "spec.replicatedJobs.0.name", None),
        ("PyTorchJob", "spec.elasticPolicy.nProcPerNode", "8"), ("PyTorchJob", "spec.pytorchReplicaSpecs.Worker.replica", 2),
        ("PyTorchJob", "spec.rdzvId", "x"),
    ],
)  # fmt: skip
def test_a_planted_mistake_is_refused(which: str, path: str, value: object, strictly: Callable[..., object]) -> None:
    kind = "job" if which == "Service" else which.lower()
    good = named([dict(one) for one in wb.kubernetes(SPEC, image="i", kind=kind).objects])[which]
    strictly(good)
    import jsonschema

    with pytest.raises(jsonschema.ValidationError):
        strictly(changed(good, path, value))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_the_api_wants(kind: str) -> None:
    manifest = wb.kubernetes(SPEC, image="registry/team/train:1", kind=kind, claim="runs", memory="64Gi", cpu="8", namespace="ml")
    objects = list(yaml.safe_load_all(manifest.text))
    assert objects == json.loads(manifest.to_json())["items"] == list(manifest.objects)
    for one in objects:
        assert DNS_1123.fullmatch(one["metadata"]["name"])
        assert one["metadata"]["namespace"] == "ml"
    template = pod_of(objects[-1])
    container = template["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"memory": "64Gi", "cpu": "8", "nvidia.com/gpu": 8} == container["resources"]["requests"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in template["spec"]["volumes"]} == {"runs", "shm"}
    assert container["command"][-6:] == ["-m", "workbench.programs.alone", "text-gpt", "/runs", "micro_batch=16", "lr=0.01"]


def test_a_job_is_indexed_and_its_pods_find_the_first_one() -> None:
    objects = named(list(yaml.safe_load_all(wb.kubernetes(SPEC, image="i", nodes=4).text)))
    service, job = objects["Service"], objects["Job"]
    assert (job["apiVersion"], service["apiVersion"]) == ("batch/v1", "v1")
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    assert job["spec"]["backoffLimit"] == 0
    template = job["spec"]["template"]
    assert template["spec"]["restartPolicy"] == "Never"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True  # pods look for each other before they are ready
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    command = template["spec"]["containers"][0]["command"]
    assert {"--nnodes=4", "--nproc-per-node=8", "--rdzv-endpoint=text-gpt-0.text-gpt:29400"} <= set(command)
    assert service["spec"]["ports"][0]["port"] == 29400


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_each_pod_knows_its_number_so_that_no_rendezvous_unpickles(kind: str) -> None:
    container = pod_of(dict(wb.kubernetes(SPEC, image="i", kind=kind).objects[-1]))["spec"]["containers"][0]
    assert "--rdzv-backend=static" in container["command"]
    (rank,) = [entry for entry in container["env"] if entry["name"] == "PET_NODE_RANK"]
    assert rank["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}


def test_the_other_kinds() -> None:
    (jobset,) = wb.kubernetes(SPEC, image="i", kind="jobset").objects
    workers = jobset["spec"]["replicatedJobs"][0]
    assert (workers["replicas"], workers["template"]["spec"]["completions"]) == (1, 2)
    assert jobset["spec"]["network"]["subdomain"] == "text-gpt"
    assert "--rdzv-endpoint=text-gpt-workers-0-0.text-gpt:29400" in pod_of(dict(jobset))["spec"]["containers"][0]["command"]
    (pytorchjob,) = wb.kubernetes(SPEC, image="i", kind="pytorchjob").objects
    assert pytorchjob["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2
    assert pytorchjob["spec"]["elasticPolicy"]["nProcPerNode"] == 8
    container = pod_of(dict(pytorchjob))["spec"]["containers"][0]
    assert (container["name"], container["command"][0]) == ("pytorch", "torchrun")  # the operator looks for this name


def test_a_script_and_a_machine_without_gpus() -> None:
    manifest = wb.kubernetes(ScriptSpec(script="train.py", args=("--epochs", "1"), nnodes=2), image="i", gpus=0, name="a-run")
    container = manifest.objects[-1]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][-4:] == ["--", "train.py", "--epochs", "1"]
    assert "resources" not in container
    assert "nvidia" not in wb.kubernetes(SPEC.replace(device="cpu"), image="i").text
    assert wb.kubernetes("42.py", image="i").objects[0]["metadata"]["name"] == "run-42"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": ""}, "the name of a container image"),
        ({"name": "Big_Name"}, "DNS-1123"),
        ({"name": "x" * 60}, "at most 52"),
        ({"name": "x" * 52, "kind": "jobset"}, "at most 51"),
        ({"name": "x" * 50, "kind": "jobset", "nodes": 1000}, "at most 49"),
        ({"namespace": "a.b"}, "namespace='a.b'"),
        ({"namespace": "a" * 64}, "at most 63"),
        ({"claim": "a..b"}, "claim='a..b'"),
        ({"image": "-bad"}, "the name of a container image"),
        ({"image": "Upper/Case"}, "the name of a container image"),
        ({"image": "i:1\n"}, "the name of a container image"),
        ({"memory": "0"}, "a quantity above 0"),
        ({"cpu": "0.0"}, "a quantity above 0"),
        ({"kind": "pod"}, "allowed are 'job', 'jobset', 'pytorchjob'"),
        ({"gpus": 3}, "gpus=3 with nproc_per_node=8"),
        ({"gpus": -1}, "gpus=-1: a whole number"),
        ({"memory": "64 gigs"}, "a quantity above 0"),
        ({"nodes": 0}, "nnodes=0: a whole number"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        wb.kubernetes(SPEC, **{"image": "i", **options})


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"expert_parallel": 2}, "its model has no layers of experts"),
        ({"device": "cpu", "offload": "activations"}, "there is nothing to offload from"),
    ],
)
def test_what_a_launch_would_refuse_is_refused(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        wb.kubernetes(wb.RunSpec(**{"task": "text-gpt", "nproc_per_node": 2, **knobs}), image="i")


@pytest.mark.parametrize(
    "options",
    [
        {"namespace": "1team"},
        {"namespace": "a" * 63},
        {"claim": "my.claim"},
        {"memory": "1e3"},
        {"memory": "0.5Gi"},
        {"cpu": "500m"},
        {"image": "reg:5000/a@sha256:" + "0" * 64},
        {"image": "registry.example.com/Team/x".lower() + ":V1.2_b"},
        {"image": "localhost/a__b/c-d:1"},
        {"name": "x" * 51, "kind": "jobset"},
        {"name": "x" * 52},
    ],
)
def test_what_is_allowed(options: dict[str, Any]) -> None:
    assert wb.kubernetes(SPEC, **{"image": "i", **options}).objects


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_another_job_of_the_same_name_is_another_run(kind: str) -> None:
    container = pod_of(dict(wb.kubernetes(SPEC, image="i", kind=kind).objects[-1]))["spec"]["containers"][0]
    assert "--rdzv-id=text-gpt-$(WORKBENCH_JOB_UID)" in container["command"]
    (uid,) = [entry for entry in container["env"] if entry["name"] == "WORKBENCH_JOB_UID"]
    assert uid["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.labels['controller-uid']"}}


def test_another_pytorchjob_is_another_run() -> None:
    found = [wb.kubernetes(SPEC, image="i", kind="pytorchjob").objects[0]["spec"]["elasticPolicy"]["rdzvId"] for _ in range(2)]
    assert found[0] != found[1]
    assert all(re.fullmatch(r"text-gpt-[0-9a-f]{32}", one) for one in found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scripts_words_come_to_it_as_they_are(kind: str) -> None:
    spec = ScriptSpec(script="t.py", args=("--n", "3", "$(OMP_NUM_THREADS)", "a$$b", "go \U0001f680"), nnodes=2)
    manifest = wb.kubernetes(spec, image="i", kind=kind)
    command = pod_of(list(yaml.safe_load_all(manifest.text))[-1])["spec"]["containers"][0]["command"]
    assert command[-7:] == ["--", "t.py", "--n", "3", "$$(OMP_NUM_THREADS)", "a$$$$b", "go \U0001f680"]
    assert "\\ud83d" not in manifest.text  # half of a letter, which kubectl refuses


@pytest.mark.parametrize("kind", KINDS)
def test_each_run_of_a_script_has_a_folder_for_its_checkpoints(kind: str, tmp_path: Path, strictly: Callable[..., object]) -> None:
    """{out} in its arguments, as in a launch; it is made before the script begins. The commands are run, as a kubelet expands them."""
    spec = ScriptSpec(script="t.py", args=("--out", "{out}", "--as={out}/$(HOME)"), nnodes=2)
    (tmp_path / "torchrun").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "torchrun").chmod(0o755)
    folders = []
    for uid in ("1", "2"):
        one = list(yaml.safe_load_all(wb.kubernetes(spec, image="i", kind=kind).text))[-1]
        strictly(one)
        container = pod_of(one)["spec"]["containers"][0]
        known = {"$(WORKBENCH_JOB_UID)": uid, "$$": "$"} if "WORKBENCH_JOB_UID" in str(container["env"]) else {"$$": "$"}
        words = [re.sub(r"\$\$|\$\(\w+\)", lambda found, known=known: known[found[0]], word) for word in container["command"]]
        words = [word.replace("/runs/", f"{tmp_path}/runs/") for word in words]
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        got = subprocess.run(words, env={"PATH": path}, capture_output=True, text=True, check=True).stdout.splitlines()
        assert got[-5:-2] == ["--", "t.py", "--out"]
        assert got[-1] == f"--as={got[-2]}/$(HOME)"
        assert Path(got[-2]).is_dir()
        assert Path(got[-2]).is_relative_to(tmp_path / "runs")
        folders.append(got[-2])
    assert folders[0] != folders[1]


@pytest.mark.parametrize("text", ["\U0001f680", "\x7f", "\x1b[0m", "\x85", "\u2028", "\ufeff", "a\x00b", "\ufffe", "tab\t", "Über"])
def test_letters_that_yaml_does_not_take_as_they_are(text: str) -> None:
    assert yaml.safe_load("\n".join(_yaml({"a": text}))) == {"a": text}


def test_it_is_written_whole(tmp_path: Path) -> None:
    manifest = wb.kubernetes(SPEC, image="i")
    assert manifest.write(tmp_path / "a.yaml").read_text() == manifest.text == str(manifest)
    assert manifest.write(tmp_path / "a.json").read_text() == manifest.to_json()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.yaml"]


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
_LEAVES = st.none() | st.booleans() | st.integers() | _TEXTS | st.sampled_from(["yes", "null", "1e3", "a: b", "- x", "#", "0x1", "~"])


@given(
    st.dictionaries(
        _TEXTS.filter(bool),
        st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3), max_leaves=8),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_written_is_read_back(value: dict[str, Any]) -> None:
    assert yaml.safe_load("\n".join(_yaml(value))) == value


WORDS = ["micro_batch=4", "precision=amp_bf16"]


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., wb.Run]:
    """One rank of a pod, with something in the place of the training."""

    def run(rank: int, *words: str, training: Callable[[Path], object] = str, run_id: str = "r") -> wb.Run:
        monkeypatch.setattr(alone.program, "main", lambda given: "SIGTERM" if training(Path(given[0])) == "SIGTERM" else "")
        for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "TORCHELASTIC_RUN_ID": run_id}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(run_directory.ENV_RUN_DIR, "")
        alone.main([TINY, str(tmp_path), *(words or WORDS)])
        return wb.Run.load(next(tmp_path.iterdir()))

    return run


def test_a_pod_trains_what_nobody_launched(pod: Callable[..., wb.Run]) -> None:
    seen: list[str] = []
    run = pod(0, training=lambda path: seen.append(wb.Run.load(path).state))
    assert run.spec == wb.RunSpec(task=TINY, nnodes=2, nproc_per_node=2, micro_batch=4, precision="amp_bf16")
    assert seen == ["running"]
    assert (run.state, run.ok, run.error) == ("finished", True, None)


def test_a_signal_that_ends_a_training_leaves_a_run_that_goes_on(pod: Callable[..., wb.Run], tmp_path: Path) -> None:
    for rank in (0, 1):
        with pytest.raises(SystemExit, match="143"):
            pod(rank, *WORDS, "checkpoint_every=2", training=lambda path: "SIGTERM")
    assert wb.Run.load(next(tmp_path.iterdir())).state == "stopped"
    assert pod(0, *WORDS, "checkpoint_every=2").state == "finished"


def test_a_run_id_that_is_empty_is_none(pod: Callable[..., wb.Run]) -> None:
    run = pod(0, run_id="")
    assert run.id == "alone"
    shutil.rmtree(run.path)
    assert pod(0, run_id="team/7").id == "team-7"


def test_a_pod_that_fails(pod: Callable[..., wb.Run], tmp_path: Path) -> None:
    def broken(path: Path) -> None:
        error = ValueError("boom")
        failure.record(error, run_dir=path)
        raise error

    with pytest.raises(ValueError, match="boom"):
        pod(0, training=broken)
    run = wb.Run.load(next(tmp_path.iterdir()))
    assert run.state == "failed"
    assert (run.error.rank, run.error.message) == (0, "ValueError: boom")


def test_what_rank_0_has_written_stays(pod: Callable[..., wb.Run], tmp_path: Path) -> None:
    first = pod(3)
    assert first.state == "lost"  # rank 0 has not come yet, or is gone
    assert first.error.message == "rank 0 was killed, so nobody saw how it ended"
    written: list[str] = []

    def others(path: Path) -> None:
        before = (path / run_directory.RUN_JSON).read_text()
        alone._write_unless_there(path / run_directory.RUN_JSON, {"format": 1}, rank=1)
        written.append(before)
        assert (path / run_directory.RUN_JSON).read_text() == before

    assert pod(0, training=others).ok
    assert written
    assert sorted(path.name for path in next(tmp_path.iterdir()).iterdir()) == ["errors", "guard.lock", "run.json"]


def test_two_runs_do_not_share_a_directory(pod: Callable[..., wb.Run], tmp_path: Path) -> None:
    def stopped(path: Path) -> None:
        (path / run_directory.METRICS).touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pod(0, training=stopped)
    with pytest.raises(SpecError, match="a run that wrote no checkpoints to go on from: give torchrun another --rdzv-id"):
        pod(0)
    with pytest.raises(SpecError, match="a run with another spec"):
        pod(0, "lr=0.5")
    shutil.rmtree(next(tmp_path.iterdir()))
    with pytest.raises(KeyboardInterrupt):
        pod(0, "checkpoint_every=5", training=stopped)
    with pytest.raises(SpecError, match="still running"):
        pod(0, "checkpoint_every=5", training=lambda path: pod(0, "checkpoint_every=5"))
    assert pod(0, "checkpoint_every=5").ok  # it goes on
    for rank in (0, 1):
        with pytest.raises(SpecError, match="a run that has finished"):
            pod(rank, "checkpoint_every=5")


def test_a_pod_that_is_deleted(tmp_path: Path) -> None:
    code = (
        "import sys, time; from workbench.programs import alone\n"
        "alone.program.main = lambda words: [print('up', flush=True), time.sleep(600)]\n"
        f"alone.main([{TINY!r}, {str(tmp_path)!r}])"
    )
    bare = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=bare) as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        assert wb.Run.load(next(tmp_path.iterdir())).state == "running"
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    run = wb.Run.load(next(tmp_path.iterdir()))
    assert run.state == "failed"
    assert "ended by SIGTERM: its pod was deleted" in run.error.message
