"""The committed manifests are what is rendered, and sound; each fault is found by its check."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from manifest_checks import check
from manifest_checks.check import committed, drift
from manifest_faults import COMMAND_FAULTS, FAULTS, Fault

from cartridge_forge.forge_run.cli import parsed_elsewhere
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
    kinds = Path(check.__file__).parents[3] / "deploy" / "checks" / "kinds"
    paths = sorted(kinds.glob("*.yaml"))
    assert len(paths) == 4
    for path in paths:
        assert path.read_text(encoding="utf-8").startswith("# "), path
