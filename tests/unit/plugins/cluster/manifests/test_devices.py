"""What stands on each GPU of a host, by hand, and vLLM's share of its device."""

from __future__ import annotations

from pathlib import Path

import pytest

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.forge_run.preflight import unmet
from cartridge_forge.plugins.cluster.manifests.devices import (
    CONTEXT_BYTES,
    VLLM_BYTES,
    device_loads,
    with_share,
)
from cartridge_forge.plugins.cluster.manifests.sizing import model_size, part_bytes, role_needs
from cartridge_forge.protocols.spec.loading import load_spec
from cartridge_forge.protocols.spec.mesh import RunSpec

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
