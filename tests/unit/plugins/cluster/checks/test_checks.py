"""Test the checks of manifests."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_checks import check
from manifest_checks.check import committed, drift
from manifest_faults import COMMAND_FAULTS, FAULTS, Fault

from cartridge_forge.forge_run.cli import forge, parsed_elsewhere
from cartridge_forge.plugins.cluster.checks import schemas
from cartridge_forge.plugins.cluster.checks.check import check_objects
from cartridge_forge.plugins.cluster.checks.findings import Manifest
from cartridge_forge.plugins.cluster.manifests.overlays import build, targets
from cartridge_forge.protocols.errors import SpecError

TREE = committed()
ALL_FAULTS = (*FAULTS, *COMMAND_FAULTS)


@pytest.fixture(scope="module")
def sound() -> dict[str, list[Any]]:
    return {target: build(TREE, target) for target in targets(TREE)}


def test_what_is_committed_is_sound_and_what_is_rendered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check.main() == 0
    assert capsys.readouterr().out == "28 files, 5 overlays: sound\n"
    names = ("cpu", "gpu", "serve", "serve-runs", "teachers")
    assert targets(TREE) == [f"overlays/{name}" for name in names]


@pytest.mark.parametrize("fault", ALL_FAULTS, ids=lambda fault: fault.name)
def test_each_fault_is_found_by_its_check_alone(fault: Fault, sound: dict[str, list[Any]]) -> None:
    objects = copy.deepcopy(sound[f"overlays/{fault.overlay}"])
    fault.break_(objects)
    manifests = [Manifest(value, "tree.yaml") for value in objects]
    faults = check_objects(manifests, parsed_elsewhere)[0]
    own = [f for f in faults if f.rule == fault.check and fault.said in str(f)]
    assert own, faults
    assert {f.rule for f in faults} <= {fault.check, *fault.also}, faults
    for each in own:
        assert each.file == "tree.yaml"
        assert each.object
        assert each.what
        assert each.remedy


@pytest.mark.parametrize(("port", "fault"), [(9999, False), (None, False), ("web", True)])
def test_a_number_need_not_be_declared_by_a_container(
    port: int | str | None, fault: bool, sound: dict[str, list[Any]]
) -> None:
    """Kubernetes forwards to it all the same; a name must be some container's."""
    objects = copy.deepcopy(sound["overlays/serve"])
    (service,) = [o for o in objects if o["kind"] == "Service" and o["metadata"]["name"] == "door"]
    service["spec"]["ports"] = [{"name": "http", "port": 8080}]
    if port is not None:
        service["spec"]["ports"][0]["targetPort"] = port
    faults = check_objects([Manifest(value, "tree.yaml") for value in objects], parsed_elsewhere)[0]
    assert [f.rule for f in faults] == ["references"] * fault


@pytest.mark.parametrize(("port", "code"), [(9999, 0), ("http", 0), ("web", 1)])
def test_a_file_beside_a_kustomization_selects_its_pods(
    port: int | str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With our label or without: it is in a namespace where our pods are."""
    tree = REPOSITORY / "deploy/k8s"
    files = (tree / "overlays/serve").glob("*.yaml")
    objects = [o for file in files for o in yaml.safe_load_all(file.read_text())]
    (service,) = [o for o in objects if o and o["kind"] == "Service"]
    service["metadata"] = {"name": "mine", "namespace": service["metadata"]["namespace"]}
    service["spec"]["ports"] = [{"name": "http", "port": 80, "targetPort": port}]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(service))
    assert forge(["k8s", "check", str(tree), str(tmp_path / "mine.yaml")]) == code
    printed = capsys.readouterr().out
    assert ("mine.yaml: Service/mine" in printed) == bool(code)
    assert "matches no pod" not in printed


def test_the_corpus_has_names_of_its_own_and_every_check() -> None:
    assert len({fault.name for fault in ALL_FAULTS}) == len(ALL_FAULTS) == 69
    assert {f.check for f in ALL_FAULTS} == {
        "schema", "references", "command", "spec", "env", "ports", "probes", "grace", "files",
        "memory", "pools",
    }  # fmt: skip


def test_drift_names_the_file() -> None:
    tree = dict(TREE)
    text = tree.pop("base/pools.yaml")
    assert drift(tree, TREE) == ["base/pools.yaml: is not committed"]
    assert drift(TREE, tree) == ["base/pools.yaml: is not rendered"]
    changed = {**TREE, "base/pools.yaml": text.replace("replicas: 2", "replicas: 3", 1)}
    assert drift(changed, TREE) == ["base/pools.yaml: differs from its render"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("name: controller", "name: control", "a patch meets no object"),
        ("containers/0/image", "containers/1/image", "there is no 1"),
        ("../../base", "../../bass", "bass: has no kustomization.yaml"),
        ("resources:", "resourcess:", "resourcess is not read here"),
        ("- op: replace", "op: replace", "is no YAML"),
        ("- op: replace", "- op: test", "test is not read here"),
    ],
)
def test_a_broken_overlay_is_told(old: str, new: str, said: str) -> None:
    path = "overlays/cpu/kustomization.yaml"
    tree = {**TREE, path: TREE[path].replace(old, new)}
    with pytest.raises(SpecError, match=said):
        build(tree, "overlays/cpu")


def test_the_check_names_target_check_and_object() -> None:
    path = "overlays/teachers/kustomization.yaml"
    lines = list(check.found({**TREE, path: TREE[path].replace("teacherreplay", "replay")}))
    assert lines[0] == f"drift: {path}: differs from its render"
    assert lines[1].startswith(f"overlays/teachers: build: {path}: a patch meets no object")
    path = "components/provisioning/access.yaml"
    renamed = TREE[path].replace("name: forge-provision", "name: x", 1)
    lines = list(check.found({**TREE, path: renamed}))
    assert lines[1:] == [
        "overlays/with-provisioning: RoleBinding/forge-provision: .roleRef: names Role "
        "forge-provision, which does not exist; correct the name, or add the object [references]"
    ]


def test_definitions_say_where_they_come_from() -> None:
    kinds = Path(schemas.__file__).parent / "kinds"
    paths = sorted(kinds.glob("*.yaml"))
    assert len(paths) == 4
    for path in paths:
        assert path.read_text(encoding="utf-8").startswith("# "), path


REPOSITORY = Path(__file__).parents[5]
ORDINARY = REPOSITORY / "tests" / "fakes" / "ordinary"
CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}


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
        "note: HTTPRoute of gateway.networking.k8s.io/v1: no schema of it here, not validated",
        "note: Prometheus of monitoring.coreos.com/v1: no schema of it here, not validated",
        "note: ServiceMonitor of monitoring.coreos.com/v1: no schema of it here, not validated",
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
        "spec": {"accessModes": "ReadWriteOnce"},
    }  # fmt: skip
    path = put(tmp_path, {"claim.yaml": claim}) / "claim.yaml"
    assert checked(capsys, path) == (1, [
        "note: references and commands are checked once every schema is met",
        f"{path}: PersistentVolumeClaim/runs: .spec.accessModes: 'ReadWriteOnce' is not of type "
        "'array', 'null'; correct it [schema]",
        "1 objects: 1 finding",
    ])  # fmt: skip


def test_standard_input_is_read_as_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump({**CONFIG, "datum": {}})))
    code, lines = checked(capsys, "-")
    assert code == 1
    assert lines[1].startswith("standard input: ConfigMap/a: Additional properties")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: ConfigMap\nmetadata: {name: a}\n", "ConfigMap: .apiVersion: has no apiVersion"),
        (
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {}\n",
            "ConfigMap: .metadata.name: has no metadata.name",
        ),
        ("- a\n- b\n", "is no object"),
        ("a: [1\n", "is no YAML"),
        ("apiVersion: v1\nkind: {{ .Values.kind }}\n", "is a template"),
        (
            "apiVersion: apps/v1beta2\nkind: Deployment\nmetadata: {name: a}\n",
            ".apiVersion: has no apps/v1beta2; write apps/v1",
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
    assert lines[0].startswith(f"note: {tmp_path / 'c'}: a Helm chart, not read")
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
    assert any(".spec: 'size' is a required property; correct it [schema]" in s for s in lines)


@pytest.mark.parametrize(
    ("name", "kustomization", "said"),
    [
        ("kustomization.yaml", {"resources": ["c.yaml"], "namespace": "team"},
         "namespace is not read here; check what it builds: kubectl kustomize"),
        ("kustomization.yaml", {"resources": ["c.yaml"], "patches": [{"path": "p.yaml"}]},
         "a patch is no list of operations with a target; check what it builds: kubectl kust"),
        ("Kustomization", {"resources": ["c.yaml"]}, "Kustomization: not read; kubectl kustomize"),
    ],
)  # fmt: skip
def test_a_kustomization_of_another_form_names_the_way_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kustomization: Any, said: str
) -> None:
    put(tmp_path, {name: kustomization, "c.yaml": CONFIG})
    _, lines = checked(capsys, tmp_path)
    assert said in lines[0]
    assert f"{tmp_path} | forge k8s check -" in lines[0]


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


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "a: &a {b: *a}\n", "a: &a [x]\nb: [*a]\n"])
def test_aliases_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    put(tmp_path, {"endless.yaml": text})
    for path in (tmp_path, tmp_path / "endless.yaml"):
        code, lines = checked(capsys, path)
        assert code == 1
        assert lines[0].endswith("uses the alias *a; write the value out [schema]")
