"""`forge explain`: an entry of a key, of a section, and of the several keys of one last name."""

import pytest

from cartridge_forge.forge_run.commands.explain import command
from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.protocols.errors import SpecError


def entry(section: TableSection) -> dict[str, str]:
    return {row[0]: row[1] for row in section.rows}


def test_a_key_has_type_bounds_default_meaning_and_file() -> None:
    (section,) = command(key="train.lr")
    assert section.title == "train.lr"
    assert entry(section) == {
        "type": "a number, > 0",
        "default": "0.02",
        "meaning": "Adam's learning rate after warm-up",
        "in": "a learning config, configs/*.yaml",
    }


@pytest.mark.parametrize(
    ("key", "type_", "default"),
    [
        ("cartridge.tokens", "a whole number, >= 2", "none: it must be given"),
        ("generator.block_tokens", "a whole number, >= 32, in multiples of 32", "32"),
        ("data.held_out", "a number, > 0, <= 1", "1.0"),
        ("teacher.top_k", "a whole number or full", "20"),
        ("loss.direction", None, None),
        ("plane", "one of torchstore, shared_memory, auto", "'torchstore'"),
        ("rollout.chunk", "a whole number or null, >= 1", "null"),
        ("train.recompute_layers", "true or false", "false"),
        ("roles.trainer.threads", "a whole number, >= 1", "1"),
        ("http.listen", "text", None),
        ("http.audit", "a path or null, not empty", "null"),
        ("model.path", "text, not empty", None),  # or a name, or a hub id
    ],
)
def test_types_and_defaults_in_words(key: str, type_: str | None, default: str | None) -> None:
    known = entry(command(key=key)[0])
    assert type_ in (None, known["type"])
    assert default in (None, known["default"])


def test_a_section_has_a_row_for_each_of_its_keys() -> None:
    about, below = command(key="train.warm_start")
    assert entry(about)["type"] == "a section or null"
    assert [row[0] for row in below.rows] == [
        "train.warm_start.steps", "train.warm_start.plateau", "train.warm_start.gain",
        "train.warm_start.lr", "train.warm_start.loss",
    ]  # fmt: skip
    assert below.rows[0][1:3] == ("a whole number, >= 1", "none: it must be given")


def test_a_role_is_explained_by_its_name() -> None:
    about, below = command(key="roles")[:2]  # of a mesh; then of a server
    assert entry(about)["type"] == "a mapping of keys"
    assert below.rows[-1] == (
        "roles.trainer", "a section", "those of its keys", "optimises the cartridges",
    )  # fmt: skip
    about, below = command(key="roles.trainer")[:2]
    assert about.title == "roles.trainer"
    assert below.rows[2][:3] == ("roles.trainer.threads", "a whole number, >= 1", "1")
    titles = [section.title for section in command(key="trainer.autoscale.min")]
    assert titles == ["roles.trainer.autoscale.min"]
    with pytest.raises(SpecError, match=r"did you mean roles\.trainer\.threads"):
        command(key="roles.trainer.thread")


def test_a_last_name_alone_finds_all_keys_of_that_name() -> None:
    assert [section.title for section in command(key="staleness")] == ["train.staleness"]
    titles = [section.title for section in command(key="temperature")]
    assert {"rollout.temperature", "loss.temperature", "evaluate.temperature"} <= set(titles)
    files = [entry(section)["in"] for section in command(key="model.path")]
    assert sorted(files) == [
        "a deployment, deploy/values.yaml",
        "a learning config, configs/*.yaml",
        "a server, meshes/serve.yaml",
    ]
