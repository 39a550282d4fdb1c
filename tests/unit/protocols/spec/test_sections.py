"""Test sections of a spec: mesh, model, start, shifts and each key's text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from cartridge_forge.forge_run.preflight import (
    plane_notes,
    plane_reason,
    publish_reason,
    slow_products,
    unmet,
)
from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.plugins.spec_files.keys import (
    CONFIG_FILE,
    MESH_FILE,
    OTHER_NAMES,
    near_keys,
    path_rule,
    spec_files,
    spec_keys,
)
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec import model as of
from cartridge_forge.protocols.spec.cartridge import CartridgeSpec, StartSpec
from cartridge_forge.protocols.spec.learn import LearnSpec
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
    assert len(found) == 48
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
    with pytest.raises(ValidationError, match=r"must be given with loss\.direction jsd"):
        LossSpec(direction="jsd")
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
    assert plane_reason(mesh).startswith(reason)


def test_one_host_without_torchstore_uses_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchstore", None)
    spec = load_spec("longhealth").spec
    assert (spec.mesh.plane, spec.mesh.carrier) == ("torchstore", "shared_memory")
    assert plane_notes(spec) == [
        "plane: shared_memory instead of torchstore: torchstore is not installed (pip install "
        "--no-deps torchstore==0.1.2), and all processes are on this host"
    ]
    slurm = {"kind": "slurm", "insecure": True}
    mesh = MeshSpec.model_validate({"name": "m", "config": "c", "hosts": slurm})
    assert mesh.carrier == "torchstore"  # which says what it needs when it starts
    monkeypatch.undo()
    assert spec.mesh.carrier == "torchstore"
    assert plane_notes(spec) == []


def test_what_a_run_needs_and_is_not_installed_is_said_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = load_spec("three_channels", sets=["replay.local={}"]).spec
    problems = (
        "data.source=primer", "data.patients=1", "data.facts=null", "data.notes=null",
        "rsa.problems.kind=reasoning_gym", "rsa.problems.name=chain_sum",
    )  # fmt: skip
    gym = load_spec("rsagent", sets=problems).spec
    assert [fault.text for spec in (desk, gym) for fault in unmet(spec)] == []
    for package in ("openenv", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, package, None)
    (fault,) = unmet(desk)
    assert fault.text == (
        "episodes.environment.kind: desk needs openenv, which is not installed: set at the "
        "resolved spec; run `pip install --no-deps openenv==0.10.0`"
    )
    (fault,) = unmet(gym)
    assert fault.text.endswith("run `pip install --no-deps reasoning-gym==0.1.25`")


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
    assert publish_reason(mesh).startswith(reason)


def test_relays_need_hosts_that_tell_an_address() -> None:
    with pytest.raises(ValidationError, match=r"must be auto or direct with hosts\.kind local"):
        MeshSpec.model_validate({"name": "m", "config": "c", "publish": "relayed"})


def test_every_other_name_leads_to_a_key() -> None:
    known = {key.key for file in spec_files() for key in spec_keys(file)}
    assert set(OTHER_NAMES.values()) <= known
    assert not {name for name in OTHER_NAMES if name in {k.rpartition(".")[2] for k in known}}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("lr", ["train.lr"]),
        ("train.lr", ["train.lr"]),
        ("learning_rate", ["train.lr"]),  # another trainer's name
        ("clipp", ["train.clip"]),  # spelt alike
        ("gradient_norm", ["train.clip"]),  # by the words of "most gradient norm"
        ("no_such_thing", []),
    ],
)
def test_a_name_leads_to_the_likeliest_keys(name: str, found: list[str]) -> None:
    near = near_keys(name, [*spec_keys(MESH_FILE), *spec_keys(CONFIG_FILE)])
    assert near[: max(1, len(found))] == found


def test_every_key_has_a_meaning_and_a_type_in_words() -> None:
    for file in spec_files():
        for key in spec_keys(file):
            assert key.field.description, key.key
            assert "a value" not in key.type, key.key


# Every key that is a path, by the file that it stands in.
PATHS = [
    ("ClusterMesh", "config"), ("ClusterMesh", "hosts.tls"), ("ClusterMesh", "control.tls_ca"),
    ("ClusterMesh", "control.tls_cert"), ("ClusterMesh", "control.tls_key"),
    ("ClusterMesh", "telemetry.tls"),
    ("RsaLearn", "model.path"), ("RsaLearn", "cartridge.init.from"),
    ("RsaLearn", "cartridge.init.library"), ("RsaLearn", "data.path"),
    ("RsaLearn", "data.questions"), ("RsaLearn", "data.rows.documents"),
    ("RsaLearn", "data.rows.held_out"), ("RsaLearn", "data.rows.folder"),
    ("RsaLearn", "self_study.rows"), ("RsaLearn", "episodes.environment.folder"),
    ("RsaLearn", "episodes.environment.document"), ("RsaLearn", "episodes.environments.folder"),
    ("RsaLearn", "episodes.environments.document"), ("RsaLearn", "reward.folder"),
    ("RsaLearn", "rsa.problems.folder"),
    ("ServeSpec", "model.path"), ("ServeSpec", "library"), ("ServeSpec", "http.audit"),
    ("ServeSpec", "process_reward.model.path"), ("ServeSpec", "process_reward.judge.ledger"),
    ("SweepSpec", "frontier.process_reward.model.path"),
    ("SweepSpec", "frontier.process_reward.judge.ledger"),
]  # fmt: skip


def test_a_path_says_so_in_its_type() -> None:
    paths = [
        (file.root.__name__, key.key)
        for file in spec_files()
        for key in spec_keys(file)
        if path_rule(key.field) is not None
    ]
    assert paths == PATHS


FLAGS = {
    "fast": "flags\t\t: fpu avx512f amx_bf16 amx_tile\n",
    "zen4": "flags\t\t: fpu avx512f avx512_bf16\n",
    "slow": "flags\t\t: fpu avx512f\n",
}


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{FLAGS[kind]}")
    monkeypatch.setattr(of, "CPUINFO", tmp_path / "cpuinfo")


def dtype(*sets: str) -> str:
    return load_spec("longhealth", sets=["model.dtype=auto", *sets]).spec.learn.model.dtype


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(
    ("kind", "expected"), [("fast", "bfloat16"), ("zen4", "bfloat16"), ("slow", "float32")]
)
def test_auto_is_what_this_processor_multiplies(kind: str, expected: str) -> None:
    assert dtype() == expected
    assert load_serve("serve", sets=["model.dtype=auto"]).spec.model.dtype == expected
    assert load_spec("longhealth").spec.learn.model.dtype == "float32"  # as the file says


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("kind", ["fast"])
def test_auto_of_other_hosts_is_float32_and_on_gpus_bfloat16() -> None:
    elsewhere = ("hosts.kind=addresses", "hosts.addresses=[tls://10.0.0.1:26600]")
    assert dtype(*elsewhere) == "float32"
    assert dtype(*elsewhere, "roles.trainer.gpus=1") == "bfloat16"


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(("kind", "warnings"), [("fast", 0), ("slow", 1)])
def test_bfloat16_without_instructions_is_warned_of(kind: str, warnings: int) -> None:
    told = slow_products(load_spec("longhealth", sets=["model.dtype=bfloat16"]).spec)
    assert len(told) == warnings
    assert all("about 5 times slower than float32; set model.dtype=auto" in line for line in told)
    assert slow_products(load_spec("longhealth").spec) == []


def test_no_file_about_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(of, "CPUINFO", tmp_path / "missing")
    assert not of.multiplies_bfloat16()


MESH = Path(__file__).resolve().parents[4] / "meshes" / "three_channels.yaml"


def test_a_case_takes_three_turns_and_a_field_of_its_own() -> None:
    sets = ("episodes.cases=4", "episodes.max_turns=12")
    episodes = load_spec(str(MESH), sets=sets).spec.learn.episodes
    assert episodes is not None
    assert episodes.cases == 4


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("episodes.cases=2",), r"max_turns must be >= 3 x episodes\.cases"),
        (("episodes.cases=25", "episodes.max_turns=75"), r"cases must be <= data\.facts \(24\)"),
        (("episodes.cases=0",), "greater than or equal to 1|>= 1"),
    ],
)
def test_a_broken_rule_is_named(sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_spec(str(MESH), sets=sets)


START_MESH = "meshes/longhealth.yaml"


def loaded(*sets: str) -> CartridgeSpec:
    return load_spec(START_MESH, sets=list(sets)).spec.learn.cartridge


def test_a_word_is_an_initialization_as_it_always_was() -> None:
    cartridge = loaded("cartridge.init=random_text")
    assert (cartridge.init, cartridge.fresh, cartridge.start) == (
        "random_text",
        "random_text",
        None,
    )
    dumped = cartridge.model_dump(mode="json", include={"tokens", "init", "frozen"})
    assert dumped == {"tokens": 28, "init": "random_text", "frozen": 1}
    assert CartridgeSpec(tokens=4).frozen == 1


def test_a_start_is_written_with_its_yaml_keys_and_reads_back() -> None:
    spec = load_spec(
        START_MESH, sets=["cartridge.init={from: {a: x.pt, b: b@3}, pad: random}"]
    ).spec
    plain = spec.as_dict()
    assert plain["learn"]["cartridge"]["init"] == {
        "from": {"a": "x.pt", "b": "b@3"}, "library": None, "otherwise": None, "pad": "random",
        "cut": False,
    }  # fmt: skip
    assert RunSpec.model_validate(plain) == spec
    assert spec.learn.cartridge.fresh is None


def test_frozen_left_out_is_the_file_s_own_and_may_be_none_at_all() -> None:
    start = "cartridge.init={from: x.pt}"
    assert (loaded(start, "cartridge.frozen=").frozen, loaded(start).frozen) == (None, 1)
    assert loaded(start, "cartridge.frozen=0").frozen_tokens == 0
    assert loaded(start, "cartridge.frozen=").frozen_tokens == 1


def test_paths_begin_where_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "here.pt").touch()
    overlay = tmp_path / "start.yaml"
    overlay.write_text(
        "cartridge:\n  init:\n    library: lib\n"
        "    from: {a: here.pt, b: ./gone.pt, c: patient_01@3, d: run:runs/one/offline, e: up/x}\n"
    )
    start = load_spec(START_MESH, overlays=[str(overlay)]).spec.learn.cartridge.start
    assert start is not None
    assert start.library == str(tmp_path / "lib")
    assert start.source == {
        "a": str(tmp_path / "here.pt"),
        "b": str(tmp_path / "gone.pt"),
        "c": "patient_01@3",
        "d": f"run:{tmp_path}/runs/one/offline",
        "e": str(tmp_path / "up/x"),
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "cartridge.init=first_token",
            r"init must be one of first_tokens, .*you mean first_to",
        ),
        ("cartridge.init={form: x}", r"unknown key form .*\(cartridge\.init\.form\).*mean from\?"),
        ("cartridge.init={from: 3}", r"from must be a path, .*got 3 .*\(cartridge\.init\.from\)"),
        ("cartridge.init={from: {a: 3}}", r"from must be a path, .*write from: PATH"),
        ("cartridge.init={from: {}}", r"from must be a path"),
        ("cartridge.init={from: x, pad: zeros}", r"pad must be one of attention_matching, random"),
        ("cartridge.frozen=0", r"frozen must be >= 1: got 0"),
        ("cartridge.frozen=28", r"frozen must be < cartridge.tokens \(28\)"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_written(override: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        loaded(override)


def test_a_start_without_a_source_is_that_of_continue() -> None:
    assert loaded("cartridge.init={pad: random}").start == StartSpec(pad="random")


def test_a_link_is_followed_for_the_run_will_move_it(tmp_path: Path) -> None:
    (tmp_path / "r1").mkdir()
    (tmp_path / "latest").symlink_to("r1")
    start = loaded(f"cartridge.init={{from: run:{tmp_path}/latest/offline}}").start
    assert start is not None
    assert start.source == f"run:{tmp_path}/r1/offline"
