"""A cluster's values: what they change, what does not fit and is refused with its figure, and where
pods get the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from rendered_cluster import findings, of_kind, pods, values

from cartridge_forge.forge_run.cli import forge, parsed_elsewhere
from cartridge_forge.forge_run.commands.k8s import render
from cartridge_forge.plugins.cluster.checks.check import check_objects
from cartridge_forge.plugins.cluster.checks.findings import Manifest
from cartridge_forge.plugins.cluster.manifests.overlays import build, targets
from cartridge_forge.plugins.cluster.manifests.volumes import ModelVolume, model_volume
from cartridge_forge.plugins.cluster.spec import DeploymentSpec, ModelSourceSpec
from cartridge_forge.plugins.spec_files.loading import load_file
from cartridge_forge.protocols.errors import DataError, SpecError

REPOSITORY = Path(__file__).parents[5]
SMALL = str(REPOSITORY / "meshes" / "longhealth.yaml")
LARGE = str(REPOSITORY / "meshes" / "longhealth_3b.yaml")
TEACHERS = str(REPOSITORY / "meshes" / "three_channels.yaml")
SERVE = str(REPOSITORY / "meshes" / "serve.yaml")
QUEUE = "kueue.x-k8s.io/queue-name"
DIGEST = f"sha256:{'0f' * 32}"


def test_the_shipped_values_are_the_defaults() -> None:
    assert load_file(DeploymentSpec, REPOSITORY / "deploy" / "values.yaml") == DeploymentSpec()


def test_every_value_is_in_the_manifests_and_they_are_sound(tmp_path: Path) -> None:
    given = values(
        tmp_path,
        namespace="team-a",
        image={"repository": "reg.example.com:5000/team/forge", "tag": "1.2", "pull_secret": "reg"},
        gpu={"product": "NVIDIA-L4", "gb": 24, "node_labels": {"pool": "spot"},
             "tolerations": [{"key": "spot", "operator": "Equal", "value": "yes", "effect": None}]},
        storage={"class_name": "nfs", "runs_gib": 50},
        queue="research",
        certificates="control-tls",
    )  # fmt: skip
    tree = render(SMALL, values=given)
    objects = build(tree, "overlays/gpu")
    assert {o["metadata"].get("namespace", "team-a") for o in objects} == {"team-a"}
    (space,) = of_kind(objects, "Namespace").values()
    assert (space["metadata"]["name"], space["metadata"]["annotations"]) == (
        "team-a",
        {"cartridge-forge/secrets": "forge-control: token; control-tls: ca.crt tls.crt tls.key"},
    )
    for pod in pods(objects).values():
        assert pod["containers"][0]["image"] == "reg.example.com:5000/team/forge:1.2-cuda"
        assert pod["imagePullSecrets"] == [{"name": "reg"}]
    trainer = pods(objects)["trainer"]
    assert trainer["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L4", "pool": "spot"}
    assert trainer["tolerations"] == [{"key": "spot", "operator": "Equal", "value": "yes"}]
    claim = of_kind(objects, "PersistentVolumeClaim")["runs"]["spec"]
    assert claim["storageClassName"] == "nfs"
    assert claim["resources"]["requests"]["storage"] == "50Gi"
    queued = {
        o["kind"] for o in objects if o["metadata"].get("labels", {}).get(QUEUE) == "research"
    }
    assert queued == {"MonarchMesh", "Job"}
    volumes = {v["name"]: v for v in pods(objects)["controller"]["volumes"]}
    assert volumes["control"]["secret"]["secretName"] == "control-tls"
    assert tree["base/pools.yaml"].startswith(
        "# Rendered by: forge k8s render meshes/longhealth.yaml --values values.yaml\n"
    )
    for target in targets(tree):
        assert findings(tree, target) == []


def test_a_digest_is_one_image_for_all_overlays(tmp_path: Path) -> None:
    tree = render(SMALL, values=values(tmp_path, image={"digest": DIGEST}))
    for overlay in ("cpu", "gpu"):
        found = pods(build(tree, f"overlays/{overlay}"))
        assert {p["containers"][0]["image"] for p in found.values()} == {
            f"cartridge-forge@{DIGEST}"
        }
        assert findings(tree, f"overlays/{overlay}") == []


def test_kustomize_may_move_all_objects_to_another_namespace() -> None:
    tree = render(SMALL)
    text = yaml.safe_dump(build(tree, "overlays/cpu")).replace("forge-longhealth\n", "team-b\n")
    tree = {
        "overlays/top/kustomization.yaml": "resources: [all.yaml]",
        "overlays/top/all.yaml": yaml.safe_dump_all(yaml.safe_load(text)),
    }
    assert findings(tree, "overlays/top") == []
    pod = pods(build(tree, "overlays/top"))["controller"]["containers"][0]
    assert "hosts.kubernetes.namespace=$(POD_NAMESPACE)" in pod["command"]
    (own,) = (v for v in pod["env"] if v["name"] == "POD_NAMESPACE")
    assert own["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}


def test_a_model_of_the_hub_is_fetched_once_and_read_by_all() -> None:
    tree = render(LARGE)
    for target in targets(tree):
        assert findings(tree, target) == []
    objects = build(tree, "overlays/gpu")
    # 2.5 times 6.43 GB of weights, in GiB.
    claims = of_kind(objects, "PersistentVolumeClaim")
    assert claims["model"]["spec"]["resources"]["requests"]["storage"] == "15Gi"
    # 20 x 2048 tokens x 57,344 numbers x 12 B = 28.2 GB: 2 kept, the last of an arm, the one being
    # written, and the last state.
    assert claims["runs"]["spec"]["resources"]["requests"]["storage"] == "132Gi"
    found = pods(objects)
    words = found["model"]["containers"][0]["command"][2:]
    name = "llama-3.2-3b-instruct"
    assert words == [
        "forge", "models", "add", "meta-llama/Llama-3.2-3B-Instruct", "--name", name,
        "--if-missing",
    ]  # fmt: skip
    writers = {
        pod
        for pod, spec in found.items()
        for mount in spec["containers"][0]["volumeMounts"]
        if mount["name"] == "model" and not mount.get("readOnly")
    }
    assert writers == {"model"}
    readers = {"controller", "generator", "docteacher", "trainer"}
    assert {p for p, s in found.items() if any(v["name"] == "model" for v in s["volumes"])} == {
        *readers, "model",
    }  # fmt: skip
    command = found["controller"]["containers"][0]["command"]
    assert f"model.path=/models/models/{name}" in command
    (wait,) = found["controller"]["initContainers"]
    assert wait["command"][2:] == ["forge", "models", "show", name, "--wait", "7200"]
    assert wait["image"] == "cartridge-forge:0.1.0-cuda"
    policy = of_kind(objects, "NetworkPolicy")["model"]["spec"]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "model"
    assert [p["port"] for p in policy["egress"][0]["ports"]] == [443]


def test_a_model_in_a_claim_of_the_users_is_only_read(tmp_path: Path) -> None:
    given = values(tmp_path, model={"claim": "weights", "path": "llama/3b"})
    tree = render(LARGE, values=given)
    assert "base/model.yaml" not in tree
    found = pods(build(tree, "overlays/gpu"))
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "weights"}} in (
        found["trainer"]["volumes"]
    )
    assert "model.path=/models/llama/3b" in found["controller"]["containers"][0]["command"]
    served = render(SERVE, values=given)
    door = pods(build(served, "overlays/serve"))["door"]["containers"][0]
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in door["volumeMounts"]
    assert "model.path=/models/llama/3b" in door["command"]


def test_where_a_model_is_found() -> None:
    none = ModelSourceSpec()
    assert model_volume(str(REPOSITORY / "models" / "clinic-reader"), none) is None
    assert model_volume("Org/Some Model", none) == ModelVolume(
        "model", "/models/models/some-model", "Org/Some Model"
    )
    with pytest.raises(
        SpecError, match=r"/somewhere/m is on this machine alone.*give model\.claim"
    ):
        model_volume("/somewhere/m", none)
    with pytest.raises(SpecError, match=r"which a server's pods do not reach; copy it to a claim"):
        render(SERVE, ("model.path=Org/M", "model.shape={layers: 1, hidden: 8, heads: 1, "
                       "kv_heads: 1, head_dim: 8, intermediate: 8, vocab: 8}"))  # fmt: skip
    for beyond in ("hub.repositories={me/ward: ward}", "process_reward.model.path=prm"):
        with pytest.raises(SpecError, match=r"a server's pods reach no other host"):
            render(SERVE, (beyond,))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        # 62.2 GB of the trainer's items (test_sizing) and 0.63 GB of CUDA's.
        ({"gpu": {"gb": 40}}, r"than its 40 GB: trainer 62\.8 GB; give a larger class in --values"),
        (
            {"storage": {"runs_gib": 100}},
            r"storage\.runs_gib: must be >= 132, which the plan writes",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_figure(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=said):
        render(LARGE, values=values(tmp_path, **given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"image": {"tag": "latest"}}, "image.tag"),
        ({"image": {"digest": "sha256:1"}}, "must be sha256: and 64 hexadecimal digits"),
        ({"image": {"tags": "1"}}, "tags"),
        ({"namespace": "Team A"}, "namespace"),
        ({"model": {"claim": "w"}}, "must be given with model.claim"),
        ({"model": {"claim": "w", "path": "/x"}}, "must be a folder in the claim"),
        ({"gpu": {"gb": 0}}, "gpu.gb"),
        ({"gpu": {"tolerations": [{"key": "a", "value": "b"}]}}, "operator Equal"),
    ],
)
def test_a_wrong_value_is_told_with_its_line(
    given: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = values(tmp_path, **given)
    words = ["k8s", "render", SMALL, "--values", str(path), "--out", str(tmp_path / "out")]
    assert forge(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert f"{path}:" in error
    assert not (tmp_path / "out").exists()


def test_a_kept_model_is_not_fetched_again_and_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORGE_HOME", str(tmp_path))
    reader = str(REPOSITORY / "models" / "clinic-reader")
    assert forge(["models", "add", reader, "--name", "reader", "--if-missing"]) == 0
    assert "name it anywhere as model.path: reader" in capsys.readouterr().out
    # An id of the hub, which no test reaches: it is not asked.
    assert forge(["models", "add", "Org/Reader", "--name", "reader", "--if-missing"]) == 0
    folder = tmp_path / "models" / "reader"
    assert capsys.readouterr().out == f"reader is kept already: {folder}\n"
    assert forge(["models", "show", "reader", "--wait", "3600"]) == 0
    assert str(folder) in capsys.readouterr().out
    assert forge(["models", "show", "other"]) == DataError.exit_code


def test_keda_scales_servers_by_the_metric_that_the_autoscaler_would(tmp_path: Path) -> None:
    given = values(tmp_path, namespace="team-a", keda="http://prometheus.monitoring:9090")
    tree = render(SERVE, values=given)
    (scaled,) = of_kind(build(tree, "overlays/serve"), "ScaledObject").values()
    assert scaled["spec"]["scaleTargetRef"]["name"] == "door"
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (1, 4)
    assert scaled["spec"]["triggers"] == [
        {
            "type": "prometheus",
            "metadata": {
                "serverAddress": "http://prometheus.monitoring:9090",
                "query": 'sum(forge_serve_queue_depth{namespace="team-a"})',
                "threshold": "64",  # half of 2 generators of 64
            },
        }
    ]
    assert of_kind(build(tree, "overlays/serve"), "HorizontalPodAutoscaler") == {}
    for target in targets(tree):
        assert findings(tree, target) == []
    scaled["spec"]["scaleTargetRef"]["name"] = "doors"
    objects = [Manifest(o) for o in build(tree, "overlays/serve") if o["kind"] != "ScaledObject"]
    found = check_objects([*objects, Manifest(scaled)], parsed_elsewhere)[0]
    assert [fault.rule for fault in found] == ["references"]


def test_pods_of_a_role_are_wished_apart_and_those_of_the_mesh_together() -> None:
    found = pods(build(render(SMALL), "overlays/gpu"))
    instance = {"app.kubernetes.io/part-of": "cartridge-forge",
                "app.kubernetes.io/instance": "longhealth"}  # fmt: skip
    (spread,) = found["generator"]["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == (
        "kubernetes.io/hostname",
        "ScheduleAnyway",
    )
    own = {**instance, "app.kubernetes.io/component": "generator"}
    assert spread["labelSelector"]["matchLabels"] == own
    for name in ("generator", "docteacher", "trainer", "controller"):
        affinity = found[name]["affinity"]["podAffinity"]
        (wish,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        assert wish["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
        assert wish["podAffinityTerm"]["labelSelector"]["matchLabels"] == instance
    assert "topologySpreadConstraints" not in found["controller"]


BUCKET = "records.store=s3://ours/runs"


def test_with_a_bucket_no_pod_has_a_claim_of_runs() -> None:
    with pytest.raises(SpecError, match=r"teacher_replay\.replicas: 2 cannot run with records\.st"):
        render(TEACHERS, ("replay.local=null", BUCKET))
    tree = render(TEACHERS, ("replay.local=null", BUCKET, "roles.teacher_replay.replicas=1"))
    assert [t for t in targets(tree) if "teachers" in t] == [], "they share no ledger"
    for target in targets(tree):
        assert findings(tree, target) == []
        objects = build(tree, target)
        assert of_kind(objects, "PersistentVolumeClaim") == {}
        for name, pod in pods(objects).items():
            (container,) = pod["containers"]
            writes = name in ("controller", "trainer", "teacherreplay")
            runs = [v for v in pod["volumes"] if v["name"] == "runs"]
            assert runs == ([{"name": "runs", "emptyDir": {"sizeLimit": "20Gi"}}] if writes else [])
            secret = [{"secretRef": {"name": "forge-store"}}] if writes else None
            assert container.get("envFrom") == secret
        policies = of_kind(objects, "NetworkPolicy")
        for name in ("controller", "trainer", "teacher-replay"):
            (rule,) = policies[f"store-{name}"]["spec"]["egress"]
            assert rule["ports"] == [{"protocol": "TCP", "port": 443}]
        told = of_kind(objects, "Namespace")["forge-three-channels"]["metadata"]["annotations"]
        assert "forge-store: AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_REGION" in str(told)


def test_an_empty_folder_of_runs_is_a_fault_without_a_bucket() -> None:
    tree = render(SMALL, (BUCKET,))
    objects = build(tree, "overlays/cpu")
    job = of_kind(objects, "Job")["controller"]["spec"]["template"]["spec"]["containers"][0]
    at = job["command"].index(BUCKET)
    del job["command"][at - 1 : at + 1]
    found = check_objects([Manifest(o) for o in objects], parsed_elsewhere)[0]
    rules = {(f.rule, f.object) for f in found}
    assert ("files", "Job/controller") in rules
