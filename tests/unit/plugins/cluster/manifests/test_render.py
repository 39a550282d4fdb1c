"""What a mesh file becomes, in values worked by hand; and who may what."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendered_cluster import pods

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.forge_run.commands.k8s import MONITORING, render
from cartridge_forge.plugins.cluster.hosts.worker import address
from cartridge_forge.plugins.cluster.manifests.mesh import CONTROL_PORT
from cartridge_forge.plugins.cluster.manifests.objects import SECRETS, Resources, dashed
from cartridge_forge.plugins.cluster.manifests.overlays import build
from cartridge_forge.plugins.cluster.manifests.sizing import ModelSize, pod_resources
from cartridge_forge.plugins.serve.metrics import ServingMetrics
from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.model import ShapeSpec

REPOSITORY = Path(__file__).parents[5]
THREE_CHANNELS = str(REPOSITORY / "meshes" / "three_channels.yaml")
EXTERNAL = ("replay.local=null",)
LLAMA_3B = ModelSize(
    ShapeSpec(
        layers=28, hidden=3072, heads=24, kv_heads=8, head_dim=128, intermediate=8192, vocab=128256
    ),
    2,
)


@pytest.fixture(scope="module")
def tree() -> dict[str, str]:
    return render(THREE_CHANNELS, EXTERNAL)


def pools(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "MonarchMesh"}


def container(pool: dict[str, Any]) -> Any:
    return pool["podTemplate"]["spec"]["containers"][0]


def test_every_role_is_a_pool_of_its_replicas(tree: dict[str, str]) -> None:
    found = pools(build(tree, "overlays/cpu"))
    assert {name: pool["replicas"] for name, pool in found.items()} == {
        "generator": 2, "docteacher": 1, "sdpoteacher": 1, "environment": 1,
        "teacherreplay": 2, "trainer": 1,
    }  # fmt: skip
    assert {pool["port"] for pool in found.values()} == {26600}
    assert {container(pool)["image"] for pool in found.values()} == {"cartridge-forge:0.1.0-cpu"}


def test_a_change_of_the_mesh_file_changes_the_manifests(tree: dict[str, str]) -> None:
    more = render(THREE_CHANNELS, (*EXTERNAL, "roles.generator={replicas: 5, threads: 3}"))
    pool = pools(build(more, "overlays/gpu"))["generator"]
    assert pool["replicas"] == 5
    assert container(pool)["resources"]["limits"]["cpu"] == "3"
    assert more["base/network.yaml"].splitlines()[1:] == tree["base/network.yaml"].splitlines()[1:]


def test_memory_of_a_3b_model_by_hand() -> None:
    # Cartridges: 20 x 2048 x 114,688 B = 4.70 GB, twice in /dev/shm: 9 GiB.
    # Generator: 1.25 x (6.43 + 4.70 and 8 x 0.235 that a step changes + 11.27 GB of documents +
    # 8 GiB of pages) + 2 GiB.
    # Document teacher: 20 documents' KV less the GPU's 11.27 GB, in the host: 16.25 GB, less than
    # 1.25 x (6.43 + 11.27 + 0.5 of scores + 0.8 of logits) + 2 GiB.
    # Trainer: 1.25 x 62.2 GB, whose items test_sizing.py beside this file works out.
    spec = load_spec(str(REPOSITORY / "meshes" / "longhealth_3b.yaml")).spec
    found = {name: pod_resources(spec, name, role, LLAMA_3B) for name, role in spec.roles}
    assert found == {
        "generator": Resources(cpu=4, memory=41 + 9, shm=9, gpus=1),
        "doc_teacher": Resources(cpu=4, memory=25 + 9, shm=9, gpus=1),
        "trainer": Resources(cpu=4, memory=75 + 9, shm=9, gpus=1),
    }


def test_gpus_are_for_roles_with_the_model_and_leave_with_the_cpu_overlay() -> None:
    tree = render(str(REPOSITORY / "meshes" / "longhealth_3b.yaml"))
    on_gpus = pools(build(tree, "overlays/gpu"))
    for name in ("generator", "docteacher", "trainer"):
        asked = container(on_gpus[name])["resources"]
        assert asked["requests"]["nvidia.com/gpu"] == asked["limits"]["nvidia.com/gpu"] == "1"
        assert on_gpus[name]["podTemplate"]["spec"]["nodeSelector"] == {
            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"
        }
    assert "overlays/teachers/kustomization.yaml" not in tree  # no role asks external teachers
    without = [container(pool)["resources"] for pool in pools(build(tree, "overlays/cpu")).values()]
    assert all("nvidia.com/gpu" not in r["limits"] | r["requests"] for r in without)


def test_keys_and_the_internet_are_for_the_replay_pool_alone(tree: dict[str, str]) -> None:
    objects = build(tree, "overlays/teachers")
    keys = {
        name: [
            e["name"] for e in container(pool)["env"] if "secretKeyRef" in e.get("valueFrom", {})
        ]
        for name, pool in pools(objects).items()
    }
    assert keys.pop("teacherreplay") == ["ANTHROPIC_API_KEY", "OPENAI_API_KEY"]
    assert set(map(tuple, keys.values())) == {()}
    assert pools(objects)["teacherreplay"]["replicas"] == 8
    (policy,) = (o for o in objects if o["metadata"]["name"] == "teachers")
    assert policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == (
        "teacher-replay"
    )
    local = render(THREE_CHANNELS)  # its teachers are a server of the run's own
    assert "forge-teachers" not in "".join(local.values())


def test_the_controller_gets_the_very_files_and_the_overrides(tree: dict[str, str]) -> None:
    objects = {o["kind"]: o for o in build(tree, "overlays/cpu")}
    job = objects["Job"]["spec"]["template"]["spec"]["containers"][0]
    found = dict(zip(job["command"][:-1], job["command"][1:], strict=True))
    assert found["forge-run"] == "/app/meshes/three_channels.yaml"
    assert "replay.local=null" in job["command"]
    assert f"control.listen=0.0.0.0:{CONTROL_PORT}" in job["command"]
    mounted = {m["subPath"]: m["mountPath"] for m in job["volumeMounts"] if "subPath" in m}
    assert mounted == {
        "mesh.yaml": "/app/meshes/three_channels.yaml",
        "config.yaml": "/app/configs/three_channels.yaml",
    }
    (files,) = (o for o in yaml.safe_load_all(tree["base/files.yaml"]) if o["kind"] == "ConfigMap")
    assert files["data"]["mesh.yaml"] == Path(THREE_CHANNELS).read_text(encoding="utf-8")


def test_the_spec_takes_the_controllers_overrides(tree: dict[str, str], tmp_path: Path) -> None:
    job = next(o for o in build(tree, "overlays/cpu") if o["kind"] == "Job")
    words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    sets = [word for flag, word in itertools.pairwise(words) if flag == "--set"]
    spec = load_spec(THREE_CHANNELS, sets=sets).spec
    assert (spec.mesh.hosts.kind, spec.mesh.telemetry.metrics) == ("kubernetes", "0.0.0.0:9464")
    assert spec.mesh.control.tls_ca == "/etc/forge/control/ca.crt"


def test_the_command_writes_what_is_rendered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tree: dict[str, str]
) -> None:
    words = ["k8s", "render", THREE_CHANNELS, "--set", *EXTERNAL, "--out", str(tmp_path)]
    assert forge(words) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {str(p.relative_to(tmp_path)): p.read_text(encoding="utf-8") for p in written} == tree


def test_a_worker_tells_the_pods_own_address(tree: dict[str, str]) -> None:
    found = container(pools(build(tree, "overlays/cpu"))["trainer"])
    assert found["command"] == [
        "tini", "--", "forge", "worker", "--address", "tcp://$(POD_IP):26600@tcp://0.0.0.0:26600",
        "--insecure",
    ]  # fmt: skip
    (ip,) = (e for e in found["env"] if e["name"] == "POD_IP")
    assert ip["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert {p["name"]: p["containerPort"] for p in found["ports"]} == {
        "mesh": 26600,
        "hello": 26601,
    }
    assert found["readinessProbe"]["httpGet"] == {"path": "/hello", "port": "hello"}


def test_with_a_certificate_pods_talk_tls() -> None:
    tree = render(THREE_CHANNELS, [*EXTERNAL, "hosts.tls=/etc/forge/mesh"])
    objects = build(tree, "overlays/cpu")
    (space,) = (o for o in objects if o["kind"] == "Namespace")
    assert "forge-mesh: ca.crt tls.crt tls.key" in space["metadata"]["annotations"][SECRETS]
    worker = container(pools(objects)["trainer"])
    assert worker["command"] == ["tini", "--", "forge", "worker", "--tls", "/etc/forge/mesh"]
    assert worker["readinessProbe"]["tcpSocket"] == {"port": "hello"}, "kubelet has no certificate"
    job = next(o for o in objects if o["kind"] == "Job")
    (run,) = job["spec"]["template"]["spec"]["containers"]
    for found in (worker, run):
        (mount,) = (m for m in found["volumeMounts"] if m["name"] == "certificate")
        assert (mount["mountPath"], mount["readOnly"]) == ("/etc/forge/mesh", True)
        assert "POD_NAMESPACE" in {e["name"] for e in found["env"]}
    words = run["command"]
    sets = [word for flag, word in itertools.pairwise(words) if flag == "--set"]
    hosts = load_spec(THREE_CHANNELS, sets=sets).spec.mesh.hosts
    assert (hosts.kind, hosts.tls, hosts.insecure) == ("kubernetes", "/etc/forge/mesh", False)


def test_who_writes_the_run_directory_shares_it(tree: dict[str, str]) -> None:
    for overlay, mode in (("cpu", "ReadWriteOnce"), ("gpu", "ReadWriteMany")):
        objects = build(tree, f"overlays/{overlay}")
        (runs,) = (o for o in objects if o["kind"] == "PersistentVolumeClaim")
        assert runs["spec"]["accessModes"] == [mode]
        sharing = {
            name
            for name, pool in pools(objects).items()
            if {"name": "runs", "mountPath": "/runs"} in container(pool)["volumeMounts"]
        }
        assert sharing == {"trainer", "teacherreplay"}


def test_every_pod_is_bounded_and_may_do_little(tree: dict[str, str]) -> None:
    """Of every pod: what kube-linter and the restricted pod security standard ask."""
    servers = render(str(REPOSITORY / "meshes" / "serve.yaml"))
    overlays = [build(tree, f"overlays/{name}") for name in ("cpu", "gpu", "teachers")]
    overlays += [build(servers, f"overlays/{name}") for name in ("serve", "serve-runs")]
    for objects in overlays:
        assert "Secret" not in {value["kind"] for value in objects}
        (denial,) = (o["spec"] for o in objects if o["metadata"]["name"] == "deny-all")
        assert denial == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
        for name, pod in pods(objects).items():
            context, (one,) = pod["securityContext"], pod["containers"]
            assert context["runAsNonRoot"] is True
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert pod["automountServiceAccountToken"] is (name == "controller")
            assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert one["command"][:2] == ["tini", "--"]
            assert one["image"].rpartition(":")[2] not in ("", "latest")
            requests, limits = one["resources"]["requests"], one["resources"]["limits"]
            assert {"cpu", "memory"} <= set(requests) & set(limits)
            assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu")
            assert ("readinessProbe" in one) is (name != "cartridges")
            folders = [v["emptyDir"] for v in pod["volumes"] if "emptyDir" in v]
            assert all("sizeLimit" in folder for folder in folders)
            assert "Memory" in {folder.get("medium") for folder in folders}


def test_rights_are_over_the_meshes_of_the_run_alone(tree: dict[str, str]) -> None:
    def rules(name: str) -> Any:
        return next(yaml.safe_load_all(tree[f"components/{name}/access.yaml"]))["rules"]

    (scale,) = rules("scaling")
    assert scale["verbs"] == ["get", "patch"]
    assert scale["resourceNames"] == [
        "generator", "docteacher", "sdpoteacher", "environment", "teacherreplay", "trainer",
    ]  # fmt: skip
    create, own = rules("provisioning")
    assert create["verbs"] == ["create"]
    assert own == {**scale, "verbs": ["get", "patch", "delete"]}


def test_a_model_of_unknown_shape_is_refused() -> None:
    mesh = str(REPOSITORY / "meshes" / "longhealth_3b.yaml")
    with pytest.raises(SpecError, match=r"has no config\.json here.*give model\.shape"):
        render(mesh, ("model.shape=null",))


def test_a_plane_of_one_host_is_refused() -> None:
    with pytest.raises(SpecError, match=r"plane must reach every host.*set plane: torchstore"):
        render(THREE_CHANNELS, ("plane=shared_memory",))


def test_monitoring_is_that_of_a_run_on_one_host(tree: dict[str, str]) -> None:
    objects = {
        o["kind"]: o for o in yaml.safe_load_all(tree["components/monitoring/monitoring.yaml"])
    }
    rules = yaml.safe_load((MONITORING / "rules.yml").read_bytes())
    assert objects["PrometheusRule"]["spec"] == rules
    board = json.loads(objects["ConfigMap"]["data"]["forge.json"])
    assert board == json.loads((MONITORING / "dashboard.json").read_bytes())
    (end,) = objects["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert end["relabelings"] == [
        {"targetLabel": "job", "replacement": "forge"}
    ]  # as rules.yml asks


def test_a_door_holds_its_generators() -> None:
    objects = build(render(str(REPOSITORY / "meshes" / "serve.yaml")), "overlays/serve")
    pod = next(o for o in objects if o["kind"] == "Deployment")["spec"]["template"]["spec"]
    (door,) = pod["containers"]
    # A core for it and for each of two generators. 4 processes of 1 GiB, 1.5 x 2 x (7 MB of weights
    # + 16 cartridges of 2048 tokens of 2 KiB) and /dev/shm.
    assert door["resources"]["limits"] == {"cpu": "3", "memory": "6Gi"}
    sets = [word for flag, word in itertools.pairwise(door["command"]) if flag == "--set"]
    spec = load_serve(str(REPOSITORY / "meshes" / "serve.yaml"), sets=sets).spec
    assert (spec.http.listen, spec.http.key_env) == ("0.0.0.0:8000", "FORGE_API_KEY")
    # Proxies forget it, it drains, its generators end.
    assert door["lifecycle"]["preStop"]["sleep"]["seconds"] == 5
    assert pod["terminationGracePeriodSeconds"] == 5 + spec.http.drain_s + 15


def test_finished_runs_come_into_the_library_of_the_doors() -> None:
    objects = build(render(str(REPOSITORY / "meshes" / "serve.yaml")), "overlays/serve-runs")
    (cron,) = (o["spec"] for o in objects if o["kind"] == "CronJob")
    assert cron["concurrencyPolicy"] == "Forbid", "a run is added once"
    pod = cron["jobTemplate"]["spec"]["template"]["spec"]
    (adding,) = pod["containers"]
    assert adding["image"] == "cartridge-forge:0.1.0-cpu"
    assert adding["command"][2:6] == ["forge", "cartridges", "sync", "/runs"]
    (mount,) = (m for m in adding["volumeMounts"] if m["mountPath"] == "/runs")
    assert mount["readOnly"]
    (service,) = (o["spec"]["selector"] for o in objects if o["kind"] == "Service")
    labels = cron["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
    assert not service.items() <= labels.items(), "nobody's requests go to it"


def test_doors_are_added_by_a_metric_that_they_have() -> None:
    (scaler,) = (
        o
        for o in build(render(str(REPOSITORY / "meshes" / "serve.yaml")), "overlays/serve")
        if o["kind"] == "HorizontalPodAutoscaler"
    )
    (metric,) = scaler["spec"]["metrics"]
    page = ServingMetrics(pending=lambda: 0, decoding=lambda: 0).page().decode()
    assert f"# TYPE {metric['pods']['metric']['name']} gauge" in page
    assert metric["pods"]["target"]["averageValue"] == "64"  # half of 2 generators of 64


@pytest.mark.parametrize(
    ("name", "label"),
    [("three_channels", "three-channels"), ("Org/Model.v2_", "org-model-v2"), ("a" * 80, "a" * 50)],
)
def test_names_are_dns_labels(name: str, label: str) -> None:
    assert dashed(name) == label


def test_where_a_worker_is_reached() -> None:
    assert address("generator-0.generator-svc", 26600) == (
        "tcp://generator-0.generator-svc:26600@tcp://0.0.0.0:26600"
    )
