"""The manifests of ``examples/kubernetes``: Kubernetes takes them, and what they start is this program."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubernetes_schema import problems

_FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
MANIFESTS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(_FOLDER.glob("*.yaml"))}


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = manifest["spec"]
    if manifest["kind"] == "PyTorchJob":
        return spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in pod["containers"][0]["env"]}


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_takes_the_manifest(name):
    assert problems(MANIFESTS[name]) == []


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_pod_starts_a_run_that_goes_on_by_itself_and_has_time_to_save(name):
    from mca_train.tasks import TASKS

    pod = pod_of(MANIFESTS[name])
    (container,) = pod["containers"]
    launcher, flag, module, kind, *words = container["command"]
    assert (launcher, flag, module) == ("torchrun", "-m", "mca_train")
    assert kind in TASKS
    assert words[1:] == ["--resume_from_checkpoint", "auto"]
    assert pod["terminationGracePeriodSeconds"] > int(variables(pod)["PET_SHUTDOWN_TIMEOUT"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert container["workingDir"] in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert words[0] == "run.yaml"


def test_torchrun_takes_the_variables():
    from torch.distributed.run import get_args_parser

    known = {action.dest for action in get_args_parser()._actions}
    for manifest in MANIFESTS.values():
        for name in variables(pod_of(manifest)):
            assert name.removeprefix("PET_").lower() in known, name


def test_the_pytorchjob_is_as_large_as_it_says():
    spec = MANIFESTS["pytorchjob"]["spec"]
    worker, elastic = spec["pytorchReplicaSpecs"]["Worker"], spec["elasticPolicy"]
    assert elastic["minReplicas"] == elastic["maxReplicas"] == worker["replicas"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert spec["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])


def test_the_pods_of_the_jobset_find_the_first_one():
    manifest = MANIFESTS["jobset"]
    name, (job,) = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"]
    nodes, given = job["template"]["spec"], variables(pod_of(manifest))
    assert given["PET_MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}"
    assert (nodes["parallelism"], nodes["completions"]) == (int(given["PET_NNODES"]),) * 2
    (container,) = pod_of(manifest)["containers"]
    assert given["PET_NPROC_PER_NODE"] == str(container["resources"]["limits"]["nvidia.com/gpu"])


def test_the_schema_refuses_what_the_server_refuses():
    good = MANIFESTS["pytorchjob"]
    wrong = copy.deepcopy(good)
    wrong["spec"]["elasticPolicy"]["maxRestart"] = 3
    wrong["spec"]["nprocPerNode"] = 8
    wrong["spec"]["runPolicy"]["cleanPodPolicy"] = "Some"
    del wrong["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["name"]
    assert [problem.split(":")[0] for problem in problems(wrong)] == [
        ".spec.nprocPerNode",
        ".spec.elasticPolicy.maxRestart",
        ".spec.runPolicy.cleanPodPolicy",
        ".spec.pytorchReplicaSpecs.Worker.template.spec.containers[0].name",
    ]
    assert problems({**good, "kind": "PytorchJob"})
