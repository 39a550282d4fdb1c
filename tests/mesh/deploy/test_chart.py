"""The Helm chart, rendered by Helm itself, gives the objects of `forge k8s render --values`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm import helm, objects, require_helm
from manifest_checks.check import KUBERNETES, committed

from cartridge_forge.forge_run.commands.k8s import chart, chart_command, render
from cartridge_forge.plugins.cluster.manifests.overlays import build, targets
from cartridge_forge.protocols.errors import SpecError

MESHES = Path(__file__).parents[3] / "meshes"
LARGE = str(MESHES / "longhealth_3b.yaml")  # a model of the hub
SMALL = str(MESHES / "longhealth.yaml")  # the image has its model
TEACHERS = str(MESHES / "three_channels.yaml")
SERVE = str(MESHES / "serve.yaml")
DIGEST = f"sha256:{'0f' * 32}"
EVERYTHING: dict[str, Any] = {
    "namespace": "team-a",
    "image": {"repository": "reg.example.com:5000/team/forge", "tag": "1.2", "pull_secret": "reg"},
    "gpu": {
        "product": "NVIDIA-B200",
        "gb": 180,
        "node_labels": {"pool": "spot", "zone": "a"},
        "tolerations": [
            {"key": "spot", "operator": "Equal", "value": "yes", "effect": None},
            {"key": "nvidia.com/gpu"},
        ],
    },
    "storage": {"class_name": "nfs", "runs_gib": 900},
    "queue": "research",
    "keda": "http://prometheus.monitoring:9090",
    "certificates": "control-tls",
}
CLAIM = {"gpu": {"gb": 180}, "model": {"claim": "ours", "path": "llama/3b"}}
TOKEN = {"gpu": {"gb": 180, "product": None, "tolerations": []}, "model": {"token_secret": "hub"}}
TOGETHER = {
    "gpu": {"gb": 180}, "queue": "research", "gang": True,
    "rdma": {"resource": "rdma/hca_shared_devices_a", "count": 2},
}  # fmt: skip
CASES = [
    (LARGE, {"gpu": {"gb": 180}}),
    (LARGE, EVERYTHING),
    (LARGE, EVERYTHING | {"image": {"digest": DIGEST}, "model": CLAIM["model"]}),
    (LARGE, CLAIM),
    (LARGE, TOKEN),
    (SMALL, {}),
    (SMALL, EVERYTHING),
    (SMALL, CLAIM),
    (SMALL, TOGETHER),
    (LARGE, TOGETHER),
    (TEACHERS, TOGETHER),
    (TEACHERS, {"rdma": {"resource": "rdma/ib"}}),
    (SERVE, {}),
    (SERVE, EVERYTHING | {"certificates": None}),
    (SERVE, CLAIM),
]


@pytest.fixture(scope="module", autouse=True)
def there() -> None:
    require_helm()


def ordered(found: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(one, sort_keys=True) for one in found)


@pytest.mark.parametrize(
    ("mesh", "sets"),
    [
        (LARGE, ("data.path=/data",)),
        (SMALL, ()),
        (SMALL, ("records.store=s3://ours/runs",)),
        (TEACHERS, ("replay.local=null",)),
        (SERVE, ()),
    ],
)
def test_helm_gives_the_objects_of_render(mesh: str, sets: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "chart"
    assert chart_command(mesh=mesh, sets=sets, out=folder) == 0
    overlays = yaml.safe_load((folder / "values.schema.json").read_text())["properties"]["overlay"]
    own = yaml.safe_load((folder / "facts.yaml").read_text())["namespace"]
    ways, wanted = [], []
    for _, values in (case for case in CASES if case[0] == mesh):
        path = tmp_path / "values.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        tree = render(mesh, sets, path)
        for overlay in overlays["enum"]:
            rendered = build(tree, f"overlays/{overlay}")
            # Elsewhere than in the release's own namespace, which is there before.
            away = {**values, "namespace": values.get("namespace", own), "overlay": overlay}
            ways.append({"values": away, "namespace": "default"})
            wanted.append(rendered)
            ways.append({"values": {**values, "overlay": overlay, "namespace": None},
                         "namespace": values.get("namespace", own)})  # fmt: skip
            wanted.append([one for one in rendered if one["kind"] != "Namespace"])
    given, lint = helm(folder, *ways)
    for way, found, expected in zip(ways, given, wanted, strict=True):
        assert isinstance(found, dict), found
        assert ordered(objects(found)) == ordered(expected), way
    assert not lint["errors"]
    assert [m for m in lint["messages"] if m["severity"] > 1] == []


def refusal(folder: Path, **values: Any) -> str:
    ((found,), _) = helm(folder, {"values": values, "namespace": "x"})
    assert isinstance(found, str), "Helm took it"
    return found


def test_helm_refuses_what_the_plan_does_not_fit_with_the_figure(tmp_path: Path) -> None:
    for path, text in chart(LARGE, ("data.path=/data",)).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    (tmp_path / "small.yaml").write_text("gpu: {gb: 24}", encoding="utf-8")
    with pytest.raises(SpecError, match=r"its 24 GB: .*trainer (\d+\.\d) GB") as refused:
        render(LARGE, ("data.path=/data",), tmp_path / "small.yaml")
    needed = max(float(n) for n in re.findall(r"(\d+\.\d) GB", str(refused.value)))
    said = refusal(tmp_path, gpu={"gb": 24})
    (wanted,) = re.findall(r"at '/gpu/gb': minimum: got 24, want ([0-9.]+)", said)
    assert round(float(wanted), 1) == needed
    fits = {"gb": 180}
    less = refusal(tmp_path, gpu=fits, storage={"runs_gib": 20})
    assert "at '/storage/runs_gib'" in less
    assert "got 20, want 132" in less
    for values, words in (
        ({"imag": {}}, "additional properties 'imag' not allowed"),
        ({"image": {"tag": "latest"}}, "at '/image/tag'"),
        ({"image": {"digest": "sha256:12"}}, "at '/image/digest'"),
        ({"overlay": "tpu"}, "at '/overlay'"),
        ({"model": {"claim": "ours"}}, "at '/model'"),
        ({"model": {"claim": "ours", "path": "../x"}}, "at '/model/path'"),
        ({"gpu": {**fits, "tolerations": [{"key": "a", "operator": "Equal"}]}}, "tolerations/0"),
        ({"namespace": "Team A"}, "at '/namespace'"),
        ({"gang": True}, "missing property 'queue'"),
        ({"rdma": {"resource": "hca"}}, "at '/rdma"),
    ):
        assert words in refusal(tmp_path, **{"gpu": fits, **values}), values


def test_the_notes_name_the_secrets(tmp_path: Path) -> None:
    for path, text in chart(TEACHERS, ("replay.local=null",)).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    values = {"certificates": "control-tls", "overlay": "teachers"}
    ((found,), _) = helm(tmp_path, {"values": values, "namespace": "team-a"})
    (notes,) = (text for path, text in found.items() if path.endswith("NOTES.txt"))
    assert "forge-teachers: ANTHROPIC_API_KEY OPENAI_API_KEY" in notes
    assert "control-tls: ca.crt tls.crt tls.key, and in forge-control then the token" in notes
    assert "kubectl label namespace team-a" in notes


TREE = committed()


@pytest.fixture(scope="module")
def built() -> dict[str, list[dict[str, Any]]]:
    return {target: build(TREE, target) for target in targets(TREE)}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
@pytest.mark.parametrize("target", targets(TREE))
def test_kustomize_itself_builds_the_same(
    target: str, built: dict[str, list[dict[str, Any]]]
) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / target)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip

    def ordered(objects: list[dict[str, Any]]) -> list[str]:
        return sorted(json.dumps(o, sort_keys=True) for o in objects)

    assert ordered(list(yaml.safe_load_all(done.stdout))) == ordered(built[target])
