"""Workers that a queue admits together, and RDMA devices of the pods between which tensors go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rendered_cluster import findings, of_kind, pods, values

from cartridge_forge.forge_run.commands.k8s import render
from cartridge_forge.plugins.cluster.manifests.overlays import build, targets
from cartridge_forge.protocols.errors import SpecError

REPOSITORY = Path(__file__).parents[5]
SMALL = str(REPOSITORY / "meshes" / "longhealth.yaml")
SERVE = str(REPOSITORY / "meshes" / "serve.yaml")
TEACHERS = str(REPOSITORY / "meshes" / "three_channels.yaml")
KUEUE = "kueue.x-k8s.io"
QUEUE = f"{KUEUE}/queue-name"


def test_a_gang_is_one_pod_group_of_all_workers_that_nobody_may_scale(tmp_path: Path) -> None:
    given = values(tmp_path, queue="research", gang=True)
    tree = render(TEACHERS, ("replay.local=null",), given)
    for overlay, count in (("gpu", 8), ("teachers", 14)):  # 6 others, and 2 or 8 teacher_replay
        objects = build(tree, f"overlays/{overlay}")
        pools = of_kind(objects, "MonarchMesh")
        assert sum(pool["spec"]["replicas"] for pool in pools.values()) == count
        for name, pool in pools.items():
            metadata = pool["spec"]["podTemplate"]["metadata"]
            assert (metadata["labels"][QUEUE], metadata["labels"][f"{KUEUE}/pod-group-name"]) == (
                "research",
                "three-channels",
            )
            assert metadata["annotations"] == {
                f"{KUEUE}/pod-group-total-count": str(count),
                f"{KUEUE}/role-hash": name,
                f"{KUEUE}/pod-group-serving": "true",
            }
            assert QUEUE not in pool["metadata"]["labels"]  # Kueue would make a group of its own
        assert of_kind(objects, "Job")["controller"]["metadata"]["labels"][QUEUE] == "research"
        assert "forge-scale" not in of_kind(objects, "Role")
        assert findings(tree, f"overlays/{overlay}") == []


def test_rdma_devices_are_of_the_pods_between_which_tensors_go(tmp_path: Path) -> None:
    given = values(tmp_path, rdma={"resource": "rdma/ib", "count": 2})
    tree = render(TEACHERS, ("replay.local=null",), given)
    objects = build(tree, "overlays/gpu")
    asked = {
        name: pod["containers"][0]["resources"]["limits"].get("rdma/ib")
        for name, pod in pods(objects).items()
    }
    moved = ("controller", "docteacher", "generator", "sdpoteacher", "trainer")
    assert asked == {name: "2" for name in moved} | {"environment": None, "teacherreplay": None}
    controller, trainer = (pods(objects)[name] for name in ("controller", "trainer"))
    assert controller["nodeSelector"] == trainer["nodeSelector"]
    assert controller["tolerations"] == trainer["tolerations"]
    assert "rdma" not in str(build(tree, "overlays/cpu"))
    for target in targets(tree):
        assert findings(tree, target) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gang": True}, "gang must be given with queue"),
        ({"rdma": {"resource": "hca"}}, "rdma.resource"),
    ],
)
def test_a_cluster_that_cannot_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        render(SMALL, values=values(tmp_path, **given))


@pytest.mark.parametrize("given", [{"queue": "q", "gang": True}, {"rdma": {"resource": "rdma/ib"}}])
def test_a_server_is_no_gang_and_moves_no_tensors(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="a server has one kind of pod and no tensor plane"):
        render(SERVE, values=values(tmp_path, **given))
