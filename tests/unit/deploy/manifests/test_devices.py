"""What stands on each GPU of a host, by hand, and vLLM's share of its device."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.manifests.devices import CONTEXT_BYTES, VLLM_BYTES, device_loads, with_share
from deploy.manifests.sizing import model_size, role_needs
from forge_run.cli import forge
from forge_run.preflight import unmet
from protocols.spec.loading import load_spec
from protocols.spec.mesh import RunSpec

MESH = str(Path(__file__).parents[4] / "meshes/longhealth_3b_1gpu.yaml")


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
