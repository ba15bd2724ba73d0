"""Manifests for Kubernetes, held against the structure that its API wants; no cluster is asked."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench import rundir
from workbench.launcher.manifests import KINDS, _yaml
from workbench.spec import ScriptSpec, SpecError
from workbench.train import alone

SPEC = wb.RunSpec(task="text-gpt", nnodes=2, nproc_per_node=8, micro_batch=16, lr=0.01)
DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
TINY = f"{Path(__file__).parent / 'scripts' / 'tiny_task.py'}:build"


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


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_the_api_wants(kind: str) -> None:
    manifest = wb.kubernetes(SPEC, image="registry/team/train:1", kind=kind, claim="runs", memory="64Gi", cpu="8", namespace="ml")
    objects = list(yaml.safe_load_all(manifest.text))
    assert objects == json.loads(manifest.to_json())["items"] == list(manifest.objects)
    for one in objects:
        assert {"apiVersion", "kind", "metadata", "spec"} == set(one)
        assert DNS_1123.fullmatch(one["metadata"]["name"])
        assert one["metadata"]["namespace"] == "ml"
    template = pod_of(objects[-1])
    container = template["spec"]["containers"][0]
    assert set(container) >= {"name", "image", "command", "env", "resources", "volumeMounts"}
    assert all(isinstance(entry["value"], str) for entry in container["env"])
    assert all(isinstance(word, str) for word in container["command"])
    assert container["resources"]["limits"] == {"memory": "64Gi", "cpu": "8", "nvidia.com/gpu": 8} == container["resources"]["requests"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in template["spec"]["volumes"]} == {"runs", "shm"}
    assert container["command"][-6:] == ["-m", "workbench.train.alone", "text-gpt", "/runs", "micro_batch=16", "lr=0.01"]


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
    assert container["command"][-3:] == ["train.py", "--epochs", "1"]
    assert "resources" not in container
    assert "nvidia" not in wb.kubernetes(SPEC.replace(device="cpu"), image="i").text
    assert wb.kubernetes("42.py", image="i").objects[0]["metadata"]["name"] == "run-42"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": ""}, "the name of a container image"),
        ({"name": "Big_Name"}, "DNS-1123"),
        ({"name": "x" * 60}, "at most 52"),
        ({"namespace": "a.b"}, "namespace='a.b'"),
        ({"kind": "pod"}, "allowed are 'job', 'jobset', 'pytorchjob'"),
        ({"gpus": 3}, "gpus=3 with nproc_per_node=8"),
        ({"gpus": -1}, "gpus=-1: a whole number"),
        ({"memory": "64 gigs"}, "a quantity of Kubernetes"),
        ({"nodes": 0}, "nnodes=0: a whole number"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        wb.kubernetes(SPEC, **{"image": "i", **options})


def test_it_is_written_whole(tmp_path: Path) -> None:
    manifest = wb.kubernetes(SPEC, image="i")
    assert manifest.write(tmp_path / "a.yaml").read_text() == manifest.text == str(manifest)
    assert manifest.write(tmp_path / "a.json").read_text() == manifest.to_json()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.yaml"]


_TEXTS = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]))  # what is beyond, PyYAML does not join again
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


def test_a_pod_trains_what_nobody_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(alone.program, "main", lambda words: seen.append(words))
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "3", "TORCHELASTIC_RUN_ID": "r"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(rundir.ENV_RUN_DIR, "")
    alone.main([TINY, str(tmp_path), "micro_batch=4", "precision=amp_bf16"])
    run = wb.Run.load(seen[0][0])
    assert run.spec == wb.RunSpec(task=TINY, nnodes=2, nproc_per_node=2, micro_batch=4, precision="amp_bf16")
