"""The committed manifests are what is rendered, and sound; each fault has its one check."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from manifest_checks import check
from manifest_checks.check import KUBERNETES, committed, definitions, drift, faults
from manifest_checks.kustomize import build, targets
from manifest_faults import FAULTS, Fault

from protocols.errors import SpecError

TREE = committed()

KINDS = definitions()


@pytest.fixture(scope="module")
def built() -> dict[str, list[dict[str, Any]]]:
    return {target: build(TREE, target) for target in targets(TREE)}


def test_what_is_committed_is_sound_and_what_is_rendered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check.main() == 0
    assert capsys.readouterr().out == "28 files, 5 overlays: sound\n"
    names = ("cpu", "gpu", "serve", "serve-runs", "teachers")
    assert targets(TREE) == [f"overlays/{name}" for name in names]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_is_found_by_its_check_alone(
    fault: Fault, built: dict[str, list[dict[str, Any]]]
) -> None:
    objects = copy.deepcopy(built[f"overlays/{fault.overlay}"])
    fault.break_(objects)
    found = faults(objects, KINDS)
    assert list(found) == [fault.check], found


def test_the_corpus_has_names_of_its_own_and_every_check() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {f.check for f in FAULTS} == {"schema", "custom", "references", "labels", "hardening"}


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
        ("resources:", "resourcess:", "resourcess is not known here"),
    ],
)
def test_a_broken_overlay_is_told(old: str, new: str, said: str) -> None:
    path = "overlays/cpu/kustomization.yaml"
    tree = {**TREE, path: TREE[path].replace(old, new)}
    with pytest.raises(SpecError, match=said):
        build(tree, "overlays/cpu")


def test_the_check_tells_target_check_and_object() -> None:
    path = "overlays/teachers/kustomization.yaml"
    lines = list(check.found({**TREE, path: TREE[path].replace("teacherreplay", "replay")}))
    assert lines[0] == f"drift: {path}: differs from its render"
    assert lines[1].startswith(f"overlays/teachers: build: {path}: a patch meets no object")
    path = "components/provisioning/access.yaml"
    lines = list(check.found({**TREE, path: TREE[path].replace("patch", "watch")}))
    assert lines[1:] == [
        "overlays/with-provisioning: hardening: Role/forge-provision: grants watch on monarchmeshes"
    ]


def test_definitions_say_where_they_come_from() -> None:
    for path in sorted(Path(KUBERNETES, "crds").glob("*.yaml")):
        assert path.read_text(encoding="utf-8").startswith("# "), path
