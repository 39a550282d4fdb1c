"""The committed manifests are what is rendered, and sound; each fault is found by its check."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from manifest_checks import check
from manifest_checks.check import committed, drift
from manifest_faults import FAULTS, Fault
from prometheus import binary
from user_faults import MEANINGS, SHAPES, USER_FAULTS, WITH_PROMTOOL

from deploy.checks.check import check_objects
from deploy.checks.findings import Manifest, ManifestFault
from deploy.checks.kustomize import build, built, targets
from deploy.checks.schemas import definitions
from forge_run.cli import parsed_elsewhere
from protocols.errors import SpecError

TREE = committed()
KINDS = definitions()


@pytest.fixture(scope="module")
def sound() -> dict[str, list[Manifest]]:
    return {target: built(TREE, target) for target in targets(TREE)}


def broken(sound: dict[str, list[Manifest]], fault: Fault) -> list[ManifestFault]:
    """What is found once the fault is in."""
    objects = copy.deepcopy([m.value for m in sound[f"overlays/{fault.overlay}"]])
    fault.break_(objects)
    manifests = [Manifest(value, "tree.yaml") for value in objects]
    return check_objects(manifests, KINDS, parsed_elsewhere)[0]


def test_what_is_committed_is_sound_and_what_is_rendered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check.main() == 0
    assert capsys.readouterr().out == "28 files, 5 overlays: sound\n"
    names = ("cpu", "gpu", "serve", "serve-runs", "teachers")
    assert targets(TREE) == [f"overlays/{name}" for name in names]


@pytest.mark.parametrize("fault", [*FAULTS, *USER_FAULTS], ids=lambda fault: fault.name)
def test_each_fault_is_found_by_its_check_alone(
    fault: Fault, sound: dict[str, list[Manifest]]
) -> None:
    found = broken(sound, fault)
    own = [f for f in found if f.rule == fault.check and fault.said in str(f)]
    assert own, found
    assert {f.rule for f in found} <= {fault.check, *fault.also}, found
    for each in own:
        assert each.file == "tree.yaml"
        assert each.object
        assert each.what
        assert each.remedy


@pytest.mark.prometheus
@pytest.mark.parametrize("fault", WITH_PROMTOOL, ids=lambda fault: fault.name)
def test_expressions_are_put_to_promtool(
    fault: Fault, sound: dict[str, list[Manifest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(binary("promtool")).parent))
    assert [f.rule for f in broken(sound, fault)] == [fault.check]
    kept = check_objects(sound["overlays/gpu"], KINDS, parsed_elsewhere)
    assert kept == ([], []), "with promtool there is nothing to note"


def test_without_promtool_a_note_says_so(
    sound: dict[str, list[Manifest]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found, notes = check_objects(sound["overlays/gpu"], KINDS, parsed_elsewhere)
    assert found == []
    assert notes == ["PrometheusRule: expressions were not checked, for promtool is not on PATH"]


def test_the_corpus_has_names_of_its_own_and_every_check() -> None:
    faults = [*FAULTS, *USER_FAULTS, *WITH_PROMTOOL]
    assert len({fault.name for fault in faults}) == len(faults)
    assert {f.check for f in faults} == {
        "schema", "custom", "shape", "references", "labels", "hardening", "image", "secrets",
        "command", "spec", "env", "ports", "probes", "grace", "files", "memory", "pools", "rights",
        "network", "volumes", "rules",
    }  # fmt: skip
    assert (len(SHAPES), len(MEANINGS)) == (31, 45)


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
        f"overlays/with-provisioning: {path}: Role/forge-provision: .rules[1].verbs: grants watch "
        "on monarchmeshes; grant what the run uses (deploy/k8s/README.md) [hardening]"
    ]


def test_definitions_say_where_they_come_from() -> None:
    kinds = Path(check.__file__).parents[2] / "deploy" / "checks" / "kinds"
    found = sorted(kinds.glob("*.yaml"))
    assert len(found) == 4
    for path in found:
        assert path.read_text(encoding="utf-8").startswith("# "), path
