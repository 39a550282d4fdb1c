"""Texts that become names in a cluster: values and chart agree on each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from cartridge_forge.plugins.cluster.chart.chart import Needs, schema
from cartridge_forge.plugins.cluster.spec import DeploymentSpec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.loading import load_spec

CHART = Draft202012Validator(schema(["cpu", "gpu"], "gpu", Needs(is_mesh=True)))
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


Made = Callable[[str], dict[str, Any]]
# The key of the values, and what is refused and taken there.
FIELDS: dict[str, tuple[Made, tuple[str, ...], tuple[str, ...]]] = {
    "image.pull_secret": (lambda x: {"image": {"pull_secret": x}}, OBJECTS, GOOD_OBJECTS),
    "model.token_secret": (lambda x: {"model": {"token_secret": x}}, OBJECTS, GOOD_OBJECTS),
    "model.claim": (lambda x: {"model": {"claim": x, "path": "m"}}, OBJECTS, GOOD_OBJECTS),
    "certificates": (lambda x: {"certificates": x}, OBJECTS, GOOD_OBJECTS),
    "storage.class_name": (lambda x: {"storage": {"class_name": x}}, OBJECTS, GOOD_OBJECTS),
    "gpu.product": (lambda x: {"gpu": {"product": x}}, VALUES, GOOD_VALUES),
    "gpu.node_labels, value": (
        lambda x: {"gpu": {"node_labels": {"pool": x}}}, VALUES, GOOD_VALUES,
    ),
    "gpu.node_labels, key": (lambda x: {"gpu": {"node_labels": {x: "a"}}}, KEYS, GOOD_KEYS),
    "gpu.tolerations, value": (
        lambda x: {"gpu": {"tolerations": [{"key": "k", "operator": "Equal", "value": x}]}},
        VALUES, GOOD_VALUES,
    ),
    "queue": (lambda x: {"queue": x}, VALUES, ("a", "team-a", "a" * 63)),
    "image.repository": (
        lambda x: {"image": {"repository": x}}, REPOSITORIES, GOOD_REPOSITORIES,
    ),
}  # fmt: skip
CASES = [
    pytest.param(field, text, good, id=f"{field}-{text[:24] or 'empty'}-{good}")
    for field, (_, bad, taken) in FIELDS.items()
    for texts, good in ((bad, False), (taken, True))
    for text in texts
]


@pytest.mark.parametrize(("field", "text", "good"), CASES)
def test_values_and_chart_agree(field: str, text: str, good: bool) -> None:
    given = FIELDS[field][0](text)
    try:
        DeploymentSpec.model_validate_json(json.dumps(given))
        by_spec = True
    except ValidationError:
        by_spec = False
    by_chart = CHART.is_valid({"overlay": "gpu", **given})
    assert (by_spec, by_chart) == (good, good)


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
