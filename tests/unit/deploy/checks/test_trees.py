"""`forge k8s check` of a user's files: what is read, what is passed over, what is told."""

from __future__ import annotations

import io
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.checks.kustomize import build, split_image
from deploy.checks.quantities import quantity
from forge_run.cli import forge, parsed_elsewhere
from protocols.errors import SpecError

REPOSITORY = Path(__file__).parents[4]
ORDINARY = REPOSITORY / "tests" / "fakes" / "ordinary"
CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}


@pytest.fixture(autouse=True)
def _no_promtool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def checked(capsys: pytest.CaptureFixture[str], *paths: Any) -> tuple[int, list[str]]:
    code = forge(["k8s", "check", *map(str, paths)])
    return code, capsys.readouterr().out.splitlines()


def put(folder: Path, files: dict[str, Any]) -> Path:
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            value if isinstance(value, str) else yaml.safe_dump(value), encoding="utf-8"
        )
    return folder


def test_manifests_of_others_have_no_findings(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = checked(capsys, ORDINARY)
    assert code == 0, lines
    # 12 of applications, 13 of monitoring, of which a list is two objects.
    assert lines[-1] == "26 objects: sound"
    assert sorted(lines[:-1]) == [
        "note: HTTPRoute of gateway.networking.k8s.io/v1: no definition of it here, passed over",
        "note: Prometheus of monitoring.coreos.com/v1: no definition of it here, passed over",
        "note: PrometheusRule: expressions were not checked, for promtool is not on PATH",
        "note: ServiceMonitor of monitoring.coreos.com/v1: no definition of it here, passed over",
    ]


@pytest.mark.parametrize("mesh", ["three_channels", "longhealth", "rsagent", "documents", "serve"])
def test_what_is_rendered_has_no_findings(
    mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(REPOSITORY / "meshes" / f"{mesh}.yaml")
    assert forge(["k8s", "render", path, "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    code, lines = checked(capsys, tmp_path)
    assert code == 0, lines


def test_a_finding_names_file_object_path_fault_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "9GB"}}},
    }  # fmt: skip
    path = put(tmp_path, {"claim.yaml": claim}) / "claim.yaml"
    assert checked(capsys, path) == (1, [
        "note: what objects mean together is checked once each has its kind's form",
        f'{path}: PersistentVolumeClaim/runs: .spec.resources.requests.storage: "9GB" is not of '
        "the form that the API server takes; write a quantity such as 500m, 2, 512Mi or 20Gi "
        "[schema]",
        "1 objects: 1 finding",
    ])  # fmt: skip


def test_standard_input_is_read_as_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump_all([CONFIG, CONFIG])))
    code, lines = checked(capsys, "-")
    assert code == 1
    assert lines[0].startswith("standard input: ConfigMap/a: .metadata.name: is there twice")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: ConfigMap\nmetadata: {name: a}\n", "ConfigMap: .apiVersion: has no apiVersion"),
        (
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {}\n",
            "ConfigMap: .metadata: has no metadata",
        ),
        ("- a\n- b\n", "is no object"),
        ("a: [1\n", "is no YAML"),
        ("apiVersion: v1\nkind: {{ .Values.kind }}\n", "is a template"),
        (yaml.safe_dump(CONFIG) + "kind: Secret\n", "line 5 has key kind again"),
        (
            "apiVersion: apps/v1beta2\nkind: Deployment\nmetadata: {name: a}\n",
            "has no Deployment of",
        ),
    ],
)
def test_what_is_no_object_is_told(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = checked(capsys, put(tmp_path, {"a.yaml": text}))
    assert code == 1
    assert any(said in line for line in lines), lines


def test_a_chart_is_passed_over_with_the_way_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, {"c/Chart.yaml": "name: c", "c/templates/a.yaml": "{{ x }}", "b.yaml": CONFIG})
    code, lines = checked(capsys, tmp_path)
    assert code == 0
    assert lines[0].startswith(f"note: {tmp_path / 'c'}: a Helm chart, passed over")
    assert lines[0].endswith(f"helm template {tmp_path / 'c'} | forge k8s check -")


def test_paths_without_manifests_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forge(["k8s", "check", str(tmp_path)]) == 2
    assert "there are no manifests; give YAML files or a folder" in capsys.readouterr().err
    assert forge(["k8s", "check", str(tmp_path / "none")]) == 2
    assert f"there is nothing at {tmp_path / 'none'}" in capsys.readouterr().err


def test_definitions_in_the_tree_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = {"type": "object", "properties": {"spec": {"type": "object", "required": ["size"]}}}
    version = {"name": "v1", "served": True, "storage": True}
    kind = {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "boxes.example.com"},
        "spec": {
            "group": "example.com", "scope": "Namespaced",
            "names": {"kind": "Box", "plural": "boxes", "singular": "box"},
            "versions": [{**version, "schema": {"openAPIV3Schema": schema}}],
        },
    }  # fmt: skip
    box = {"apiVersion": "example.com/v1", "kind": "Box", "metadata": {"name": "b"}, "spec": {}}
    put(tmp_path, {"kind.yaml": kind, "box.yaml": box})
    code, lines = checked(capsys, tmp_path)
    assert code == 1
    assert any("Box/b: .spec: 'size' is a required property; add it [custom]" in s for s in lines)


def test_a_kustomization_has_namespace_images_labels_and_patches_by_key() -> None:
    deployment = {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"},
        "spec": {"template": {"spec": {"containers": [
            {"name": "a", "image": "reg:5000/a:1"}, {"name": "b", "image": "b"}]}}},
    }  # fmt: skip
    patch = {
        "kind": "Deployment", "metadata": {"name": "d"},
        "spec": {"template": {"spec": {"containers": [{"name": "b", "tty": True}]}}},
    }  # fmt: skip
    account = {"kind": "ServiceAccount", "name": "s", "namespace": "old"}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
        "metadata": {"name": "r", "namespace": "old"}, "subjects": [account],
    }  # fmt: skip
    files = {
        "base/kustomization.yaml": {"resources": ["d.yaml", "r.yaml"]},
        "base/d.yaml": deployment,
        "base/r.yaml": binding,
        "top/p.yaml": patch,
        "top/kustomization.yaml": {
            "resources": ["../base"], "namespace": "team", "patches": [{"path": "p.yaml"}],
            "images": [{"name": "reg:5000/a", "newTag": "2"},
                       {"name": "b", "newName": "c", "digest": "sha256:9"}],
            "labels": [{"pairs": {"team": "x"}}],
        },
    }  # fmt: skip
    tree = {name: yaml.safe_dump(value) for name, value in files.items()}
    found, bound = build(tree, "top")
    assert found["metadata"] == {"name": "d", "namespace": "team", "labels": {"team": "x"}}
    assert found["spec"]["template"]["spec"]["containers"] == [
        {"name": "a", "image": "reg:5000/a:2"}, {"name": "b", "image": "c@sha256:9", "tty": True},
    ]  # fmt: skip
    assert bound["subjects"] == [{**account, "namespace": "team"}]


@pytest.mark.parametrize(
    ("text", "number"),
    [("500m", "0.5"), ("2", "2"), ("1.5Gi", "1610612736"), ("20k", "20000"), ("1e3", "1000"),
     ("2E", "2000000000000000000"), (3, "3"), (".5", "0.5"), ("1n", "1E-9")],
)  # fmt: skip
def test_quantities_by_hand(text: Any, number: str) -> None:
    assert quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "5 Gi", "20GiB", "1.5.0", "Gi", True, "0x10", "1,5"])
def test_what_is_no_quantity(text: Any) -> None:
    assert quantity(text) is None


@pytest.mark.parametrize(
    ("image", "parts"),
    [("a", ("a", "")), ("a:1", ("a", ":1")), ("reg:5000/a", ("reg:5000/a", "")),
     ("reg:5000/a:1", ("reg:5000/a", ":1")), ("a@sha256:0f", ("a", "@sha256:0f"))],
)  # fmt: skip
def test_an_image_has_a_name_and_a_version(image: str, parts: tuple[str, str]) -> None:
    assert split_image(image) == parts


def test_a_command_for_another_machine_looks_for_no_path_here() -> None:
    words = ["forge", "cartridges", "sync", "/no/such/runs", "--serve", "/app/meshes/serve.yaml"]
    options = parsed_elsewhere(words)
    assert (options["handler"], str(options["runs"])) == ("cartridges:sync", "/no/such/runs")
    assert parsed_elsewhere(["forge-run", "m.yaml"])["handler"] == "run:run"
    for wrong in (
        ["forge"],
        ["forge", "wrok"],
        ["forge", "--help"],
        ["forge", "worker", "--grace"],
    ):
        with pytest.raises(SpecError):
            parsed_elsewhere(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [*a]\n",
        "a: &a {b: *a}\n",
        "a0: &a0 [x, x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)),
    ],
)
def test_aliases_without_end_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    put(tmp_path, {"endless.yaml": text})
    for path in (tmp_path, tmp_path / "endless.yaml"):
        assert forge(["k8s", "check", str(path)]) == 2
        assert "its aliases stand for more than 100,000 values" in capsys.readouterr().err


def test_an_alias_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = yaml.safe_dump(CONFIG) + "data: {a: &text words, b: *text}\n"
    put(tmp_path, {"config.yaml": text})
    assert "aliases" not in "".join(checked(capsys, tmp_path)[1])
