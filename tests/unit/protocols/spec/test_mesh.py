"""The typed spec itself: frozen, documented, with bounded defaults."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from cartridge_forge.protocols.spec.keys import CONFIG_FILE, MESH_FILE
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.loading import load_spec
from cartridge_forge.protocols.spec.mesh import ROLES, MeshSpec, RunSpec
from cartridge_forge.protocols.spec.sections import EvaluateSpec, LossSpec, TeacherSpec


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from sections(part)


def test_every_field_is_described_and_every_section_frozen_and_closed() -> None:
    roots = (MESH_FILE.root, CONFIG_FILE.root)
    found = {RunSpec, *(section for root in roots for section in sections(root))}
    assert len(found) == 45
    for model in found:
        assert model.model_config["frozen"] is True
        assert model.model_config["extra"] == "forbid"
        assert model.__doc__
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


def test_defaults() -> None:
    mesh = MeshSpec(name="tiny", config="c.yaml")
    assert (mesh.hosts.kind, mesh.plane) == ("local", "torchstore")
    assert (mesh.call_timeout_s, mesh.spawn_timeout_s) == (120.0, 120.0)
    assert list(mesh.roles) == list(ROLES)
    roles = mesh.roles.values()
    assert [(r.replicas, r.procs, r.threads, r.gpus) for r in roles] == [(1, 1, 1, 0)] * 8
    assert (TeacherSpec().top_k, TeacherSpec().max_kv_bytes) == (20, 2_147_483_648)
    assert TeacherSpec().host_kv_bytes == 8_589_934_592
    assert (LossSpec().direction, LossSpec().form, LossSpec().beta) == ("forward", "tail", None)
    assert EvaluateSpec().arms == ("none", "document", "untrained", "offline", "on_policy")


def test_a_key_belongs_to_one_file_only() -> None:
    """`--set` routes by the first segment, so no name may be in both."""
    assert not MESH_FILE.root.model_fields.keys() & CONFIG_FILE.root.model_fields.keys()


@pytest.mark.parametrize(
    ("sets", "needed"),
    [
        ((), True),
        (("objective.alpha=0",), False),
        (("objective.alpha=0", "objective.dpo.reference=first_use"), True),
        (("objective.alpha=0", "objective.dpo={reference: first_use, variant: simpo}"), False),
    ],
)
def test_who_needs_the_sdpo_teacher(sets: tuple[str, ...], needed: bool) -> None:
    """Hints do, and references of published versions; those of the untrained are the trainer's."""
    mesh = str(Path(__file__).parents[4] / "meshes" / "three_channels.yaml")
    roles = [name for name, _ in load_spec(mesh, sets=sets).spec.roles]
    assert ("sdpo_teacher" in roles) == needed


def test_a_spec_cannot_be_changed() -> None:
    spec = MeshSpec(name="tiny", config="c.yaml")
    with pytest.raises(ValidationError, match="frozen"):
        spec.name = "other"
    with pytest.raises(ValidationError, match="frozen"):
        spec.roles["generator"].replicas = 2


def test_rules_hold_without_the_loader_too() -> None:
    with pytest.raises(ValidationError, match=r"belongs to loss\.direction jsd alone"):
        LossSpec(beta=0.5)
    with pytest.raises(ValidationError, match="lower-case letters"):
        MeshSpec(name="9lives", config="c.yaml")


def test_names_follow_the_run_directory_they_make() -> None:
    spec = MeshSpec(name="a_1", config="c.yaml")
    learn = LearnSpec.read(
        {
            "model": {"path": "m"},
            "data": {"patients": 1, "facts": 1, "notes": 1, "held_out": 1},
            "cartridge": {"tokens": 2},
            "rollout": {"prompts": 1, "max_tokens": 1},
            "train": {"steps": 1, "row_tokens": 2},
        }
    )
    assert RunSpec(mesh=spec, learn=learn).default_run_root.as_posix() == "runs/a_1"


@pytest.mark.parametrize(
    ("hosts", "plane", "carrier", "reason"),
    [
        ({"kind": "local"}, "auto", "shared_memory", "all processes are on this host"),
        ({"kind": "slurm", "insecure": True}, "auto", "torchstore", "hosts.kind is slurm"),
        ({"kind": "local"}, "torchstore", "torchstore", "asked for"),
    ],
)
def test_auto_picks_a_plane_and_says_why(
    hosts: dict[str, Any], plane: str, carrier: str, reason: str
) -> None:
    mesh = MeshSpec.model_validate({"name": "m", "config": "c", "hosts": hosts, "plane": plane})
    assert mesh.carrier == carrier
    assert mesh.carrier_reason.startswith(reason)


ONE = {"kind": "addresses", "addresses": ["tls://a:26600"], "tls": "certs"}
TWO = {**ONE, "addresses": ["tls://a:26600", "tls://b:26600"]}


@pytest.mark.parametrize(
    ("hosts", "publish", "relays", "reason"),
    [
        ({"kind": "local"}, "auto", False, "direct: all readers are on this host"),
        (ONE, "auto", False, "direct: there is one host"),
        (TWO, "auto", True, "relayed: each host gets them once"),
        (TWO, "direct", False, "direct: asked for"),
        (ONE, "relayed", True, "relayed: asked for"),
        ({"kind": "kubernetes", "insecure": True}, "auto", True, "relayed: each host"),
        ({"kind": "slurm", "insecure": True}, "auto", False, "direct: Slurm's nodes tell no"),
    ],
)
def test_how_cartridges_are_published_and_why(
    hosts: dict[str, Any], publish: str, relays: bool, reason: str
) -> None:
    mesh = MeshSpec.model_validate({"name": "m", "config": "c", "hosts": hosts, "publish": publish})
    assert mesh.relays is relays
    assert mesh.publish_reason.startswith(reason)


def test_relays_need_hosts_that_tell_an_address() -> None:
    with pytest.raises(ValidationError, match=r"must be auto or direct with hosts\.kind local"):
        MeshSpec.model_validate({"name": "m", "config": "c", "publish": "relayed"})
