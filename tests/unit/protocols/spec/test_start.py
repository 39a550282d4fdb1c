"""What `cartridge.init` may say, and where its paths begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.cartridge import CartridgeSpec, StartSpec
from cartridge_forge.protocols.spec.loading import load_spec
from cartridge_forge.protocols.spec.mesh import RunSpec

MESH = "meshes/longhealth.yaml"


def loaded(*sets: str) -> CartridgeSpec:
    return load_spec(MESH, sets=list(sets)).spec.learn.cartridge


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
    spec = load_spec(MESH, sets=["cartridge.init={from: {a: x.pt, b: b@3}, pad: random}"]).spec
    plain = spec.as_dict()
    assert plain["learn"]["cartridge"]["init"] == {
        "from": {"a": "x.pt", "b": "b@3"}, "library": None, "otherwise": None, "pad": "random",
        "cut": False,
    }  # fmt: skip
    assert RunSpec.model_validate(plain) == spec
    assert spec.learn.cartridge.fresh is None


def test_frozen_left_out_is_the_file_s_own_and_may_be_none_at_all() -> None:
    start = "cartridge.init.from=x.pt"
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
    start = load_spec(MESH, overlays=[str(overlay)]).spec.learn.cartridge.start
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
