"""The spec of a server: the shipped file loads, mistakes are answered with place and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.files import library_folder

ROOT = Path(__file__).resolve().parents[4]
SHIPPED = str(ROOT / "meshes/serve.yaml")


def test_the_shipped_file_loads_with_local_paths() -> None:
    loaded = load_serve(SHIPPED, sets=["http.max_pending=8", "roles.generator.replicas=1"])
    spec = loaded.spec
    assert (spec.http.max_pending, spec.roles.generator.replicas) == (8, 1)
    assert spec.model.path == str(ROOT / "models/clinic-reader")
    assert spec.library == str(library_folder())
    assert str(loaded.place("http.max_pending")) == "--set http.max_pending=8"
    assert str(loaded.place("library")).endswith("serve.yaml:7")


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["http.listen=0.0.0.0:80"], "set http.key_env to an environment variable with a key"),
        (["http.max_pending=0"], r"max_pending must be >= 1: got 0 at --set .* \(http.max_pend"),
        (["name='a b'"], "name must be letters, digits"),
        (["train.lr=1"], "unknown key train at --set train.lr=1"),
        (["http.port=1"], "unknown key port at --set http.port .*known here: listen"),
        (["http.listen"], "--set takes key.path=value"),
    ],
)
def test_mistakes_name_place_and_remedy(sets: list[str], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        load_serve(SHIPPED, sets=sets)


def test_beyond_loopback_with_a_key_or_on_purpose() -> None:
    for more in ("http.key_env=FORGE_API_KEY", "http.open_to_all=true"):
        spec = load_serve(SHIPPED, sets=["http.listen=0.0.0.0:8000", more]).spec
        assert spec.http.listen == "0.0.0.0:8000"
