"""The chaos suite knows every role that can die."""

from __future__ import annotations

from pathlib import Path

from chaos import ROLES

from protocols.spec.mesh import RolesSpec
from services.roles import ALONE

MESH = str(Path(__file__).parents[3] / "meshes/longhealth.yaml")


def test_every_role_is_in_the_table_of_the_chaos_suite() -> None:
    struck = {role.name for role in ROLES}
    assert struck == {*RolesSpec.model_fields, *ALONE, "controller"}
