"""Where an API server takes objects of each kind, and the operator's kind as it takes that."""

from __future__ import annotations

import copy
from typing import Any

from operator_loop import MESHES

Object = dict[str, Any]

PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/{space}/serviceaccounts",
    "ConfigMap": "/api/v1/namespaces/{space}/configmaps",
    "PersistentVolumeClaim": "/api/v1/namespaces/{space}/persistentvolumeclaims",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{space}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{space}/rolebindings",
    "Job": "/apis/batch/v1/namespaces/{space}/jobs",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{space}/networkpolicies",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/{space}/poddisruptionbudgets",
    "MonarchMesh": MESHES,
}
KINDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def structural(kind: Object) -> Object:
    """The definition as an API server takes it: what is not told of is kept, not refused."""
    found = copy.deepcopy(kind)
    for version in found["spec"]["versions"]:
        whole = version["schema"]["openAPIV3Schema"]
        _opened(whole)
        whole["properties"]["metadata"] = {"type": "object"}  # is the server's own
    return found


def _opened(schema: Object) -> None:
    closed = schema.pop("additionalProperties", None) is False
    if schema.get("type") == "array":
        schema.setdefault("items", {"type": "object"})
        _opened(schema["items"])
    if schema.get("type") == "object" and not closed:
        schema["x-kubernetes-preserve-unknown-fields"] = True
    for inner in schema.get("properties", {}).values():
        _opened(inner)
