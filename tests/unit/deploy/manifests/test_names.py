"""Texts that become names in a cluster: values, chart and check agree on each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from deploy.chart.chart import Needs, schema
from deploy.checks.findings import Manifest
from deploy.checks.schemas import built_in
from protocols.errors import SpecError
from protocols.spec.hosts import DeploymentSpec
from protocols.spec.loading import load_spec

CHART = Draft202012Validator(schema(["cpu", "gpu"], "gpu", Needs(is_mesh=True)))
POD: dict[str, Any] = {
    "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "n"},
    "spec": {"containers": [{"name": "a", "image": "busybox:1"}]},
}  # fmt: skip
LONG = "a" * 254
OBJECTS = (
    "My_Secret", "HF_TOKEN", "Fast SSD", "-a", "a-", "a..b", ".a", "a_b", "ä", "a/b", "A", LONG,
)  # fmt: skip
GOOD_OBJECTS = ("a", "my-secret", "reg.example.com", "0", "a1.b2-c3", "a" * 253)
VALUES = ("NVIDIA A100 80GB", "a b", "-a", "a_", "a/b", "a,b", "ä", "a" * 64, "a\tb")
GOOD_VALUES = ("NVIDIA-H100-80GB-HBM3", "", "a", "A_b.c-d", "1", "a" * 63)
KEYS = ("a b", "", "a/b/c", "/a", "a/", "UP.example/a", "-a", "a" * 64)
GOOD_KEYS = ("pool", "nvidia.com/gpu", "node.kubernetes.io/instance-type", "A_b")
REPOSITORIES = (
    "registry.example.com/team/forge:1.2", "Team/forge", "team/Forge", "a//b", "/a", "a/",
    "https://registry.example.com/a", "a@sha256:" + "0" * 64, "a b", "a:b/c", "a..b", "",
)  # fmt: skip
GOOD_REPOSITORIES = (
    "cartridge-forge", "registry.example.com/team/forge", "reg.example.com:5000/team/forge",
    "localhost/forge", "localhost:5000/forge", "MyHost:5000/a", "10.0.0.7:30500/a/b",
    "[::1]:5000/a", "team/my_forge", "team/my__forge", "team/my--forge", "ghcr.io/a.b/c-d",
)  # fmt: skip


def _image_pull_secret(name: str) -> dict[str, Any]:
    return {**POD, "spec": {**POD["spec"], "imagePullSecrets": [{"name": name}]}}


def _token_secret(name: str) -> dict[str, Any]:
    source = {"secretKeyRef": {"name": name, "key": "HF_TOKEN"}}
    container = {**POD["spec"]["containers"][0], "env": [{"name": "HF_TOKEN", "valueFrom": source}]}
    return {**POD, "spec": {"containers": [container]}}


def _volume(**source: Any) -> dict[str, Any]:
    return {**POD, "spec": {**POD["spec"], "volumes": [{"name": "v", **source}]}}


def _claim(storage_class: str) -> dict[str, Any]:
    spec = {
        "accessModes": ["ReadWriteOnce"], "storageClassName": storage_class,
        "resources": {"requests": {"storage": "1Gi"}},
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": POD["metadata"],
            "spec": spec}  # fmt: skip


def _node(key: str, value: str) -> dict[str, Any]:
    return {**POD, "spec": {**POD["spec"], "nodeSelector": {key: value}}}


def _tolerated(key: str, value: str) -> dict[str, Any]:
    taint = {"key": key, "operator": "Equal", "value": value}
    return {**POD, "spec": {**POD["spec"], "tolerations": [taint]}}


def _queued(name: str) -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": name}
    return {**POD, "metadata": {**POD["metadata"], "labels": labels}}


def _image(repository: str) -> dict[str, Any]:
    return {**POD, "spec": {"containers": [{"name": "a", "image": f"{repository}:1.2"}]}}


Made = Callable[[str], dict[str, Any]]
# The key of the values, what is refused and taken there, and an object that holds it.
FIELDS: dict[str, tuple[Made, tuple[str, ...], tuple[str, ...], Made]] = {
    "image.pull_secret": (
        lambda x: {"image": {"pull_secret": x}}, OBJECTS, GOOD_OBJECTS, _image_pull_secret,
    ),
    "model.token_secret": (
        lambda x: {"model": {"token_secret": x}}, OBJECTS, GOOD_OBJECTS, _token_secret,
    ),
    "model.claim": (
        lambda x: {"model": {"claim": x, "path": "m"}}, OBJECTS, GOOD_OBJECTS,
        lambda x: _volume(persistentVolumeClaim={"claimName": x}),
    ),
    "certificates": (
        lambda x: {"certificates": x}, OBJECTS, GOOD_OBJECTS,
        lambda x: _volume(secret={"secretName": x}),
    ),
    "storage.class_name": (
        lambda x: {"storage": {"class_name": x}}, OBJECTS, GOOD_OBJECTS, _claim,
    ),
    "gpu.product": (
        lambda x: {"gpu": {"product": x}}, VALUES, GOOD_VALUES,
        lambda x: _node("nvidia.com/gpu.product", x),
    ),
    "gpu.node_labels, value": (
        lambda x: {"gpu": {"node_labels": {"pool": x}}}, VALUES, GOOD_VALUES,
        lambda x: _node("pool", x),
    ),
    "gpu.node_labels, key": (
        lambda x: {"gpu": {"node_labels": {x: "a"}}}, KEYS, GOOD_KEYS, lambda x: _node(x, "a"),
    ),
    "gpu.tolerations, value": (
        lambda x: {"gpu": {"tolerations": [{"key": "k", "operator": "Equal", "value": x}]}},
        VALUES, GOOD_VALUES, lambda x: _tolerated("k", x),
    ),
    "queue": (lambda x: {"queue": x}, VALUES, ("a", "team-a", "a" * 63), _queued),
    "image.repository": (
        lambda x: {"image": {"repository": x}}, REPOSITORIES, GOOD_REPOSITORIES, _image,
    ),
}  # fmt: skip
CASES = [
    pytest.param(field, text, good, id=f"{field}-{text[:24] or 'empty'}-{good}")
    for field, (_, bad, taken, _) in FIELDS.items()
    for texts, good in ((bad, False), (taken, True))
    for text in texts
]


@pytest.mark.parametrize(("field", "text", "good"), CASES)
def test_values_chart_and_check_agree(field: str, text: str, good: bool) -> None:
    values, _, _, holder = FIELDS[field]
    given = values(text)
    try:
        DeploymentSpec.model_validate_json(json.dumps(given))
        by_spec = True
    except ValidationError:
        by_spec = False
    by_chart = CHART.is_valid({"overlay": "gpu", **given})
    by_check = not list(built_in([Manifest(holder(text), "a.yaml")]))
    empty_name = text == "" and field == "image.repository"  # ":1.2" is what is left of it
    assert (by_spec, by_chart) == (good, good)
    assert by_check == good or empty_name


def test_a_long_name_of_a_mesh_is_refused() -> None:
    """Its namespace, forge-NAME, would have more than 63 characters."""
    mesh = "meshes/longhealth.yaml"
    assert load_spec(mesh, sets=[f"name={'a' * 57}"]).spec.mesh.name == "a" * 57
    with pytest.raises(SpecError, match="at most 57 characters"):
        load_spec(mesh, sets=[f"name={'a' * 58}"])


@pytest.mark.parametrize(
    ("address", "good"),
    [("http://prometheus.monitoring:9090", True), ("https://10.0.0.7/prometheus", True),
     ("http://[::1]:9090", True), ("http://", False), ("http:// a", False),
     ("http://a b", False), ("http://a/b c", False), ("http:///a", False), ("ftp://a", False),
     ("prometheus:9090", False)],
)  # fmt: skip
def test_the_address_of_keda_has_a_host_and_no_spaces(address: str, good: bool) -> None:
    try:
        DeploymentSpec.model_validate_json(json.dumps({"keda": address}))
        taken = True
    except ValidationError:
        taken = False
    assert taken is good
