"""Test rendered manifests: names, scheduling, devices; and the Dockerfile's pins."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError
from rendered_cluster import findings, of_kind, pods, values

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.forge_run.commands.k8s import render
from cartridge_forge.forge_run.preflight import unmet
from cartridge_forge.plugins.cluster.chart.chart import Needs, schema
from cartridge_forge.plugins.cluster.manifests.devices import (
    CONTEXT_BYTES,
    VLLM_BYTES,
    device_loads,
    with_share,
)
from cartridge_forge.plugins.cluster.manifests.objects import HOME, IMAGE, USER
from cartridge_forge.plugins.cluster.manifests.overlays import build, targets
from cartridge_forge.plugins.cluster.manifests.sizing import model_size, part_bytes, role_needs
from cartridge_forge.plugins.cluster.spec import DeploymentSpec
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.mesh import RunSpec

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


MESH = str(Path(__file__).parents[5] / "meshes/longhealth_3b_1gpu.yaml")


MESHES = Path(MESH).parent


@pytest.mark.parametrize(
    ("mesh", "roles"),
    [
        ("longhealth_3b_8gpu", ["generator"] * 4 + ["doc_teacher"] * 2 + ["trainer"] * 2),
        # A whole host is left to the trainer: the other two fill one.
        ("llama70b_2x8", ["generator"] * 4 + ["doc_teacher"] * 4 + ["trainer"] * 8),
    ],
)
def test_larger_meshes_have_one_process_a_gpu_and_fit(mesh: str, roles: list[str]) -> None:
    spec = load_spec(str(MESHES / f"{mesh}.yaml")).spec
    loads = device_loads(spec, model_size(spec.learn.model))
    assert [[role for role, _ in load.processes] for load in loads] == [[role] for role in roles]
    assert spec.mesh.gpus is not None
    assert max(load.held for load in loads) <= 0.8 * spec.mesh.gpus.gb * 1e9
    assert not [fault for fault in unmet(spec) if "gpus.gb" in fault.text]


def test_a_base_that_is_divided_is_held_in_parts() -> None:
    """By hand: 80 layers of 855,638,016 weights, and 8,192 x 128,256 of the head, in bfloat16."""
    spec = load_spec(str(MESHES / "llama70b_2x8.yaml")).spec
    size = model_size(spec.learn.model)
    whole = 2 * (80 * 855_638_016 + 8192 * 128_256)
    for role, parts in (("generator", 4), ("doc_teacher", 4), ("trainer", 8)):
        assert dict(role_needs(spec, role, size).items)["weights"] == whole // parts
    # A quarter of four documents of 12,000 tokens of 327,680 bytes.
    held = dict(role_needs(spec, "doc_teacher", size).items)["document KV"]
    assert held == 4 * 12_000 * 327_680 // 4
    # Whole on each: 4 cartridges of 2,047 trained tokens, 16 bytes a number.
    bank = dict(role_needs(spec, "trainer", size).items)["cartridges, gradient, Adam"]
    assert bank == 4 * 2047 * 163_840 * 16
    assert part_bytes(size, 5) == 2 * (80 * 855_638_016 // 5 + 8192 * 128_256)  # 128,256 / 5


def spec_of(*sets: str) -> RunSpec:
    return load_spec(MESH, sets=sets).spec


def test_all_roles_of_the_shipped_mesh_fit_one_gpu() -> None:
    spec = spec_of()
    size = model_size(spec.learn.model)
    (load,) = device_loads(spec, size)
    assert [role for role, _ in load.processes] == ["generator", "doc_teacher", "trainer"]
    needs = [role_needs(spec, role, size).held for role, _ in load.processes]
    assert load.held == sum(needs) + 3 * CONTEXT_BYTES + VLLM_BYTES
    assert load.held <= 120e9
    assert not [fault for fault in unmet(spec) if "gpus.gb" in fault.text]


def test_processes_are_spread_and_then_share() -> None:
    spec = spec_of("gpus.count=2", "roles.generator.replicas=2", "roles.trainer.procs=2")
    loads = device_loads(spec, model_size(spec.learn.model))
    roles = [[role for role, _ in load.processes] for load in loads]
    assert roles == [["generator", "doc_teacher", "trainer"], ["generator", "trainer"]]


def test_a_gpu_that_is_too_small_is_refused_with_what_stands_on_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (fault,) = [f for f in unmet(spec_of("gpus.gb=80")) if "gpus.gb" in f.text]
    assert "gpus.gb: 80" in fault.text
    assert "GPU 0 would hold, 119 GB (generator" in fault.text
    assert "train.recompute_layers" in fault.text
    assert forge(["plan", MESH, "--sizing", "--set", "gpus.gb=80"]) == 0
    assert "GPUs of 80 GB" in capsys.readouterr().out


def test_vllm_asks_for_the_share_that_the_plan_gives_it() -> None:
    """Not for the 92% that vLLM demands to be free where it is told nothing."""
    spec = spec_of()
    size = model_size(spec.learn.model)
    (load,) = device_loads(spec, size)
    share = with_share(spec, size).gpu_share
    assert share == pytest.approx(dict(load.processes)["generator"] / 141e9)
    assert with_share(spec_of("generator.gpu_share=0.5"), size).gpu_share == 0.5
    assert with_share(spec_of("gpus=null"), size).gpu_share is None
    assert with_share(spec_of("roles.generator.gpus=0"), size).gpu_share is None
    assert with_share(spec, None).gpu_share is None


TEXT = (REPOSITORY / "deploy" / "Dockerfile").read_text(encoding="utf-8")
MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_all_but_torch_of_the_cpu_target_is_installed_by_hash() -> None:
    installs = re.findall(r"pip install ((?:[^\\\n&]|\\\n)*)", TEXT)
    by_hash = [
        f"--require-hashes --no-deps -r image-{name}.txt" for name in ("tools", "cpu", "cuda")
    ]
    ours = "--no-deps --no-build-isolation -e ."
    torch = '--no-deps --index-url "$TORCH_INDEX" torch==2.13.0'
    assert sorted(one.strip(" \\\n") for one in installs) == sorted([*by_hash, torch, ours, ours])
    assert f"TORCH := {torch.split()[-1]}" in MAKEFILE
    assert torch.split()[-1] in PROJECT["dependencies"]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_target_takes_its_environment_from_its_own_stage(target: str) -> None:
    stage = TEXT.split(f"FROM run AS {target}\n")[1].split("\nFROM ")[0]
    assert set(re.findall(r"--from=(\S+)", stage)) == {f"build-{target}"}
    assert f"-t {IMAGE}-{target} ." in TEXT


def test_the_targets_share_their_stages_and_differ_in_what_is_installed() -> None:
    """So most of what is seen of the CPU image holds for CUDA's, which no test builds."""
    own = {}
    for target in ("cpu", "cuda"):
        own[target] = TEXT.split(f"FROM build AS build-{target}\n")[1].split("\n\n")[0]
        own[target] = own[target].replace(f"image-{target}.txt", "image.txt")
    only_cpu = r"ARG TORCH_INDEX=.*\nRUN pip install .*\\\n && rm .*\n"
    assert re.sub(only_cpu, "", own["cpu"]) == own["cuda"]


def test_what_is_secret_or_made_here_stays_out_of_the_build() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {".git", ".venv*", "certs", "runs", "library", "sbom*.json"} <= set(ignored)


def test_bases_are_pinned_to_a_patch_version() -> None:
    bases = re.findall(r"^FROM (\S+) AS", TEXT, re.MULTILINE)
    outside = {base for base in bases if base not in ("build", "run")}
    assert len(outside) == 1
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", outside.pop())


def test_it_runs_without_root_and_hands_sigterm_on() -> None:
    assert f"USER {USER}:{USER}" in TEXT
    assert f"--uid {USER} " in TEXT
    assert f"WORKDIR {HOME}" in TEXT
    assert 'ENTRYPOINT ["tini", "--"]' in TEXT
    assert "HEALTHCHECK" in TEXT
    assert TEXT.index("USER ") > TEXT.index("apt-get install")


def test_the_image_is_of_this_version() -> None:
    assert f"cartridge-forge:{PROJECT['version']}" == IMAGE


def test_pages_and_files_name_the_image_by_one_tag() -> None:
    """`cartridge-forge:VERSION-TARGET`, as `make image` builds it; a base without the target."""
    files = [
        REPOSITORY / "README.md",
        *(REPOSITORY / "docs").rglob("*.md"),
        *(REPOSITORY / "deploy").rglob("*"),
    ]
    named = {
        tag
        for file in files if file.is_file() and not file.is_relative_to(REPOSITORY / "docs/adr")
        for tag in re.findall(r"cartridge-forge:(\d[\w.-]*)", file.read_text(encoding="utf-8"))
    }  # fmt: skip
    version = PROJECT["version"]
    assert named == {version, f"{version}-cpu", f"{version}-cuda"}
