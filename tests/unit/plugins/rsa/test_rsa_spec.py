"""What may be trained by recursive self-aggregation, and what is refused and why."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from cartridge_forge.plugins.episodes.spec.problems import ProblemsSpec
from cartridge_forge.plugins.rsa.spec import RsaSpec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.loading import load_spec
from cartridge_forge.protocols.spec.mesh import RunSpec

MESH = str(Path(__file__).parents[4] / "meshes" / "rsagent.yaml")
PRIMER = 'data={"source": "primer", "patients": 1, "held_out": 1.0}'
GYM = 'rsa.problems={"kind": "reasoning_gym", "name": "chain_sum"}'


def loaded(*sets: str) -> RunSpec:
    return load_spec(MESH, sets=sets).spec


def test_the_shipped_mesh_has_its_roles_and_reads_back_equal() -> None:
    spec = loaded()
    assert [name for name, _ in spec.roles] == ["generator", "rsa_aggregator", "trainer"]
    assert RunSpec.model_validate(spec.as_dict()) == spec
    rsa = spec.learn.rsa
    assert rsa is not None
    assert rsa.candidates == rsa.T * rsa.M * rsa.N
    gym = loaded(PRIMER, GYM, "rsa.task=rg", "objective.w_doc=0.5")
    assert [name for name, _ in gym.roles] == [
        "generator", "doc_teacher", "rsa_aggregator", "trainer"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (("rsa.M=3",), r"M must be a power of two.*: got 3 at --set rsa\.M=3.*; use 2 or 4"),
        (("rsa.K=9",), r"K must be <= N \(\d+\).*: got 9 .*; lower K or raise N"),
        (("rsa.M=4", "rsa.T=4"), r"T must be divisible by log2\(M\) \+ 1 = 3.*got 4.*use 3 or 6"),
        (("rsa.N=0",), "N must be >= 1: got 0"),
        (("rsa.rollouts_per_example=1",), "rollouts_per_example must be >= 2"),
        (("objective.w_rl=0",), "w_rl must be > 0 with rsa"),
        (("objective.alpha=1",), "w_rl must be > 0 with rsa, and objective.alpha and beta 0"),
        (("rollout.temperature=0.7",), "temperature must be 1, 1 and 0 .* with episodes or rsa"),
        (
            ("train.staleness=1", "objective.grpo.mismatch=null"),
            "staleness must be 0 with episodes or rsa whose ratios have no correction .*: got 1.*"
            "objective.grpo.old to sampler",
        ),
        (("evaluate.arms=[offline, on_policy]",), "arms must not hold offline"),
        (("evaluate.sampled=true",), "sampled must be false with rsa"),
        (("train.row_tokens=70",), "row_tokens must be > 72: a sequence holds an aggregation's 2"),
        ((PRIMER,), "source must be primer with rsa.problems that are about no document, and only"),
        ((GYM,), "source must be primer with rsa.problems that are about no document"),
        ((GYM, PRIMER, "data.patients=2"), "patients must be 1 with data.source primer"),
        ((GYM, PRIMER, "data.facts=3"), "facts must be left out with data.source primer"),
        ((GYM, PRIMER, "rsa.problems.turns=2"), "turns belongs to the kind verifiers"),
        ((GYM, PRIMER, "rsa.problems.most=20"), r"most must be > evaluate.questions \(48\)"),
        (
            ("train.offline_texts=3",),
            "offline_texts must be null but for patients without self_study",
        ),
        (("rsa=null",), "w_rl must be 0 without episodes.*; add the section episodes, or rsa"),
    ],
)
def test_a_broken_rule_names_its_place_and_a_remedy(sets: tuple[str, ...], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        loaded("evaluate.questions=48", "rollout.max_tokens=24", "rsa.K=2", *sets)


def test_a_task_or_taskset_has_a_name_and_the_clinic_none() -> None:
    with pytest.raises(ValidationError, match="must be given with kind verifiers"):
        ProblemsSpec(kind="verifiers")
    with pytest.raises(ValidationError, match="belongs to the kinds reasoning_gym and verifiers"):
        ProblemsSpec(name="chain_sum")
    assert RsaSpec().problems.kind == "clinic"
