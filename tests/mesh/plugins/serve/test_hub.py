"""Cartridges of a hub on Tokasaurus' route: those that are configured, and no others."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, Repo, fake_hub
from rooms.serving.resident_setup import RecordingBackend
from serving_setup import READER, add_cartridge, an_api_key, raw, serving

from cartridge_forge.learning.checkpoint import sha256_of
from cartridge_forge.plugins.library.formats import forge
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.store import CartridgeStore, CartridgeVersion
from cartridge_forge.plugins.serve.engine.resident_cartridges import ResidentCartridges
from cartridge_forge.plugins.serve.spec import HubSpec, load_serve
from cartridge_forge.protocols.errors import SpecError

ROUTE = "/custom/cartridge/completions"


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with fake_hub() as one:
        yield one


@pytest.fixture(autouse=True)
def _plain(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    hub.repos.clear()
    hub.asked.clear()


def publish(hub: FakeHub, folder: Path, seed: int, repository: str = "me/ward") -> str:
    """Commit a cartridge to a repository; returns the commit."""
    library = CartridgeStore(folder / f"made{seed}", read_base(READER))
    add_cartridge(library, "made", seed)
    made = library.get(library.named("made")).path.parent
    repo = hub.repos.setdefault(repository, Repo(False))
    return repo.commit({file: (made / file).read_bytes() for file in (forge.FILE, forge.MANIFEST)})


def spec(hub: FakeHub, **more: Any) -> HubSpec:
    return HubSpec(repositories={"me/ward": "ward", "me/other": "other"}, endpoint=hub.url, **more)


def asked(repository: str = "me/ward", **more: Any) -> dict[str, Any]:
    source = {"id": repository, "source": "huggingface", **more}
    return {"model": "default", "prompt": "who?", "max_tokens": 4, "cartridges": [source]}


def outcome(served: Any, body: Any, **headers: str) -> tuple[int, Any]:
    status, _, content = raw(served, ROUTE, body, **headers)
    plain = json.loads(content)
    return status, plain["forge"]["cartridge"] if status == 200 else plain["error"]


def test_a_listed_repository_is_fetched_once_and_again_when_it_changed(
    hub: FakeHub, tmp_path: Path
) -> None:
    commit = publish(hub, tmp_path, 1)
    with serving(tmp_path, hub=spec(hub)) as one:
        status, used = outcome(one, asked())
        assert (status, used["name"], used["version"]) == (200, "ward", 1)
        source = one.house.library.get(one.house.library.named("ward")).manifest.source
        assert (source["hub"], source["revision"]) == ("me/ward", commit)
        hub.asked.clear()
        assert outcome(one, asked())[1]["version"] == 1
        assert hub.asked == [], "what the library has is not asked for"
        assert outcome(one, asked(force_redownload=True))[1]["version"] == 1
        assert not any("resolve" in path for path in hub.asked), "the commit is the same"
        publish(hub, tmp_path, 2)
        assert outcome(one, asked())[1]["version"] == 1
        assert outcome(one, asked(force_redownload=True))[1]["version"] == 2


def test_nothing_else_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    publish(hub, tmp_path, 1)
    publish(hub, tmp_path, 2, "you/secret")
    audit = tmp_path / "audit.jsonl"
    keys = (an_api_key("all", "all"), an_api_key("few", "few", cartridges=("other",)))
    with serving(tmp_path, hub=spec(hub), api_keys=keys, audit=str(audit)) as one:
        every, few = ({"authorization": f"Bearer {key}"} for key in ("all", "few"))
        status, error = outcome(one, asked("you/secret"), **every)
        assert (status, error["code"]) == (403, "repository_not_permitted")
        status, error = outcome(one, asked(), **few)
        assert (status, error["code"]) == (403, "cartridge_not_permitted")
        assert hub.asked == []
        status, error = outcome(one, asked("me/other"), **few)
        assert (status, error["code"]) == (503, "hub_unavailable")
        assert "me/other" in error["message"]
        assert outcome(one, asked(), **every)[0] == 200
    rows = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(r["key"], r["hub"]) for r in rows if r.get("action") == "pull"] == [
        ("few", "me/other"), ("all", "me/ward"),
    ]  # fmt: skip


def test_what_is_too_large_or_a_pickle_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    publish(hub, tmp_path, 1)
    hub.repos["me/other"] = Repo(False)
    hub.repos["me/other"].commit({"cartridge.pt": b"\x80"})
    with serving(tmp_path, hub=spec(hub, max_bytes=100)) as one:
        status, error = outcome(one, asked())
        assert (status, error["code"], error["param"]) == (400, "cartridge_refused", "cartridges")
        assert "100 are taken" in error["message"]
        status, error = outcome(one, asked("me/other"))
        assert (status, error["code"]) == (400, "cartridge_refused")
        assert "holds a pickle" in error["message"]
        assert not any("resolve" in path for path in hub.asked)


def test_without_a_hub_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path / "a") as one:
        status, error = outcome(one, asked())
        assert (status, error["code"]) == (400, "unsupported_source")
        assert "hub.repositories" in error["message"]
    away = HubSpec(repositories={"me/ward": "ward"}, endpoint="http://127.0.0.1:9")
    with serving(tmp_path / "b", hub=away) as one:
        status, error = outcome(one, asked())
        assert (status, error["code"]) == (503, "hub_unavailable")
        assert "127.0.0.1:9" in error["message"]


def test_the_keys_are_checked() -> None:
    for repositories in ("{ward: ward}", "{me/ward: auto}", "{me/ward: a b}", "{}"):
        with pytest.raises(SpecError, match=r"hub\.repositories"):
            load_serve("meshes/serve.yaml", sets=[f"hub.repositories={repositories}"])
    sets = ["hub.repositories={me/ward: ward}", "hub.endpoint=ftp://x"]
    with pytest.raises(SpecError, match=r"hub\.endpoint"):
        load_serve("meshes/serve.yaml", sets=sets)


def test_versions_reach_the_generators_in_their_order(
    entries: dict[str, CartridgeVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly_first(path: Path) -> str:
        time.sleep(0.2 if path == entries["a"].path else 0.0)
        return sha256_of(path)

    monkeypatch.setattr(
        "cartridge_forge.plugins.serve.engine.resident_cartridges.sha256_of", slowly_first
    )

    async def use() -> list[tuple[str, int]]:
        backend = RecordingBackend()
        shelf = ResidentCartridges(backend, 2)

        async def one(name: str) -> None:
            async with shelf.using(entries[name]):
                pass

        await asyncio.gather(one("a"), one("b"))
        return backend.told

    assert asyncio.run(use()) == [("load b", 1), ("load a", 2)]
