"""The chaos suite knows every role that can die; the trainer gets what the config says."""

from __future__ import annotations

from pathlib import Path

from chaos import ROLES

from protocols.spec import RolesSpec
from protocols.spec_loading import load_spec
from services.roles import ALONE, trainer_config

MESH = str(Path(__file__).parents[2] / "meshes/longhealth.yaml")


def test_every_role_is_in_the_table_of_the_chaos_suite() -> None:
    struck = {role.name for role in ROLES}
    assert struck == {*RolesSpec.model_fields, *ALONE, "controller"}


def test_what_bounds_the_trainer_s_memory_reaches_it() -> None:
    spec = load_spec(MESH, sets=["train.logit_chunk_mb=3"]).spec
    config = trainer_config(spec.learn)
    assert (config.logit_bytes, config.recompute_layers) == (3 * 2**20, False)
    spec = load_spec(MESH, sets=["train.recompute_layers=true"]).spec
    config = trainer_config(spec.learn)
    assert (config.logit_bytes, config.recompute_layers) == (256 * 2**20, True)
