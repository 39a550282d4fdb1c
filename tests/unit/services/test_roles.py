"""The chaos suite knows every role that can die; where a trainer's last state is."""

from __future__ import annotations

from pathlib import Path

from chaos import ROLES

from cartridge_forge.protocols.spec.loading import load_spec
from cartridge_forge.protocols.spec.mesh import ROLES as SIZED
from cartridge_forge.services.role_processes import last_state_here
from cartridge_forge.services.roles import ALONE

MESH = str(Path(__file__).parents[3] / "meshes/longhealth.yaml")


def test_every_role_is_in_the_table_of_the_chaos_suite() -> None:
    struck = {role.name for role in ROLES}
    assert struck == {*SIZED, *ALONE, "controller"}


def test_a_trainer_elsewhere_keeps_its_last_state_in_the_store() -> None:
    hosts = "hosts={kind: addresses, addresses: [tcp://10.0.0.2:26600]}"
    store = "records.store=s3://bucket/runs"
    for sets, here in (([], True), ([hosts], True), ([store], True), ([hosts, store], False)):
        assert last_state_here(load_spec(MESH, sets=sets).spec) == here
