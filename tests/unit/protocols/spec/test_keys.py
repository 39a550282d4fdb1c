"""Keys of the spec: others' names for them, the likeliest for a mistyped one, and their types."""

from __future__ import annotations

import pytest

from cartridge_forge.protocols.spec.keys import (
    CONFIG_FILE,
    MESH_FILE,
    OTHER_NAMES,
    near_keys,
    path_rule,
    spec_files,
    spec_keys,
)


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
