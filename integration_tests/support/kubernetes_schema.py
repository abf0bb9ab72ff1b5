"""Kubernetes's schema of the manifests in ``examples/kubernetes``, as far as they use it; `problems` checks it.

The facts are from the definitions of the two resources: ``PyTorchJob`` in ``kubeflow/training-operator``,
``manifests/base/crds/kubeflow.org_pytorchjobs.yaml``, and ``JobSet`` in ``kubernetes-sigs/jobset``,
``config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml``; pods and jobs in them are those of Kubernetes' core.
A field that stands in neither is refused, as the server does with ``kubectl apply --validate=strict``.
"""

from collections.abc import Iterator
from typing import Any

Schema = Any
"""A type, a set of words, a list of one schema, or a dict by field: "name!" must be there, "*" is any other name."""

_QUANTITY = (int, str)
_META = {"name": str, "namespace": str, "labels": {"*": str}, "annotations": {"*": str}}
_FIELD = {"fieldRef": {"fieldPath!": str, "apiVersion": str}}
_CONTAINER = {
    "name!": str,
    "image": str,
    "command": [str],
    "args": [str],
    "workingDir": str,
    "env": [{"name!": str, "value": str, "valueFrom": _FIELD}],
    "resources": {"limits": {"*": _QUANTITY}, "requests": {"*": _QUANTITY}},
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool, "subPath": str}],
    "ports": [{"containerPort!": int, "name": str}],
}
_VOLUME = {
    "name!": str,
    "persistentVolumeClaim": {"claimName!": str, "readOnly": bool},
    "emptyDir": {"medium": str, "sizeLimit": _QUANTITY},
    "configMap": {"name": str},
}
_POD = {
    "metadata": _META,
    "spec": {
        "containers!": [_CONTAINER],
        "volumes": [_VOLUME],
        "restartPolicy": {"Always", "OnFailure", "Never"},
        "terminationGracePeriodSeconds": int,
        "nodeSelector": {"*": str},
        "hostNetwork": bool,
        "subdomain": str,
    },
}
_JOB = {
    "metadata": _META,
    "spec": {
        "parallelism": int,
        "completions": int,
        "completionMode": {"Indexed", "NonIndexed"},
        "backoffLimit": int,
        "activeDeadlineSeconds": int,
        "ttlSecondsAfterFinished": int,
        "template!": _POD,
    },
}
_PYTORCH_JOB = {
    "nprocPerNode": str,
    "elasticPolicy": {
        "minReplicas": int,
        "maxReplicas": int,
        "maxRestarts": int,
        "nProcPerNode": int,
        "rdzvBackend": str,
        "rdzvConf": [{"key": str, "value": str}],
        "rdzvHost": str,
        "rdzvId": str,
        "rdzvPort": int,
        "standalone": bool,
    },
    "runPolicy": {
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "cleanPodPolicy": {"All", "Running", "None"},
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
    },
    "pytorchReplicaSpecs!": {
        "*": {
            "replicas": int,
            "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
            "template": _POD,
        }
    },
}
_JOB_SET = {
    "coordinator": {"replicatedJob!": str, "jobIndex": int, "podIndex": int},
    "failurePolicy": {
        "maxRestarts": int,
        "restartStrategy": {"Recreate", "BlockingRecreate"},
    },
    "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
    "replicatedJobs": [{"name!": str, "replicas": int, "groupName": str, "template!": _JOB}],
    "suspend": bool,
    "ttlSecondsAfterFinished": int,
}
KINDS = {
    ("kubeflow.org/v1", "PyTorchJob"): _PYTORCH_JOB,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): _JOB_SET,
}


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return the problems that the server would report, each with the path of its field."""
    kind = manifest.get("apiVersion"), manifest.get("kind")
    if kind not in KINDS:
        return [f"{kind} is none of {sorted(KINDS)}"]
    whole = {"apiVersion!": str, "kind!": str, "metadata!": _META, "spec!": KINDS[kind]}
    return list(_problems(manifest, whole, ""))


def _problems(value: Any, schema: Schema, path: str) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from _of_fields(value, schema, path)
    elif isinstance(schema, list):
        if not isinstance(value, list):
            yield f"{path}: expected a list"
            return
        for number, item in enumerate(value):
            yield from _problems(item, schema[0], f"{path}[{number}]")
    elif isinstance(schema, set):
        if value not in schema:
            yield f"{path}: {value!r} is none of {sorted(schema)}"
    elif not isinstance(value, schema) or (isinstance(value, bool) and schema is not bool):
        yield f"{path}: {value!r} is no {schema}"


def _of_fields(value: Any, schema: dict[str, Schema], path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path}: expected fields"
        return
    known = {name.rstrip("!"): part for name, part in schema.items()}
    for name in (name.rstrip("!") for name in schema if name.endswith("!")):
        if name not in value:
            yield f"{path}.{name}: is missing"
    for name, part in value.items():
        if name in known:
            yield from _problems(part, known[name], f"{path}.{name}")
        elif "*" in known:
            yield from _problems(part, known["*"], f"{path}.{name}")
        else:
            yield f"{path}.{name}: no such field"
