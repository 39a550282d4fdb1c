"""The key, the library from outside, a full disk of it, what Prometheus is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save
from serving_setup import (
    MODEL,
    Served,
    add_cartridge,
    an_api_key,
    cartridge,
    raw,
    refused,
    serving,
    wait_until,
)
from small_disk import FILLER, disk, fill

from cartridge_forge.plugins.serve.spec import RIGHTS

KEY = "sk-forge-0123456789"
WARD = "sk-ward-0123456789"
MIB = 2  # of the small disk
TOKENS = 64  # of a cartridge that needs more than the room that is left


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(
        tmp_path_factory.mktemp("locked"),
        api_keys=(an_api_key("all", KEY, rights=RIGHTS),),
        max_upload_bytes=40_000,
    ) as one:
        yield one


def test_without_the_key_nobody_is_served(
    locked: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    for given in ("", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x"):
        status, headers, content = raw(locked, "/v1/completions", body, authorization=given)
        error = json.loads(content)["error"]
        assert (status, error["code"]) == (401, "invalid_api_key")
        assert headers["www-authenticate"] == "Bearer"
        assert KEY not in content.decode()
    for path in ("/v1/models", "/metrics", "/admin/cartridges", "/openapi.json"):
        assert raw(locked, path, method="GET")[0] == 401
    for path in ("/health", "/ready", "/ping"):
        assert raw(locked, path, method="GET")[0] == 200
    with OpenAI(base_url=f"{locked.url}/v1", api_key=KEY) as client:
        assert client.completions.create(**body).choices  # type: ignore[call-overload]
    said = capfd.readouterr()
    assert KEY not in said.out + said.err


def test_cartridges_come_and_go_over_the_admin_routes(locked: Served) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    data = save({"kv": cartridge(4)})
    status, _, content = raw(locked, "/admin/cartridges/ward", data, **key)
    added = json.loads(content)
    assert (status, added["name"], added["version"], added["latest"]) == (201, "ward", 1, True)
    raw(locked, "/admin/cartridges/ward", data, **key)
    with OpenAI(base_url=f"{locked.url}/v1", api_key=KEY) as client:
        answer: Any = client.completions.create(model=f"{MODEL}+ward@1", prompt="x", max_tokens=1)
        assert answer.forge["cartridge"]["version"] == 1
    _, _, content = raw(locked, "/admin/cartridges", method="GET", **key)
    listed = json.loads(content)["cartridges"]
    assert [(c["version"], c["latest"], c["loaded"]) for c in listed] == [
        (1, False, True), (2, True, False),
    ]  # fmt: skip
    assert locked.backend.loaded == [(1, "ward")]
    assert raw(locked, "/admin/cartridges/ward/1", method="DELETE", **key)[0] == 200
    wait_until(lambda: locked.backend.loaded == [])
    assert raw(locked, "/admin/cartridges/ward/1", method="GET", **key)[0] == 404
    assert raw(locked, "/admin/cartridges/ward/latest", method="GET", **key)[0] == 200
    assert raw(locked, "/admin/cartridges/ward", method="DELETE", **key)[0] == 200
    assert raw(locked, "/admin/cartridges/ward", method="GET", **key)[0] == 404


def test_uploads_are_checked(locked: Served) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    for data, status, said in (
        (b"\x80\x04\x95 a pickle", 400, "no safetensors file"),
        (save({"kv": cartridge()[:2]}), 400, "has the shape"),
        (b"\0" * 50_000, 413, "larger than 40000 bytes"),
    ):
        got, _, message = refused(locked, "/admin/cartridges/ward", data, **key)
        assert got == status
        assert said in message
    assert refused(locked, "/admin/cartridges/.hidden", b"", **key)[0] == 400
    assert locked.house.library.names() == []


def test_without_a_key_the_library_is_changed_from_this_machine_alone(served: Served) -> None:
    path = "/admin/cartridges"
    assert raw(served, path, method="GET")[0] == 200
    assert raw(served, path, method="GET", host="localhost:8000")[0] == 200
    for headers, refusal in (
        ({"host": "evil.example"}, (421, "unknown_host")),
        ({"origin": "http://evil.example"}, (403, "unknown_origin")),
        ({"host": "10.1.2.3"}, (403, "admin_off")),
    ):
        status, _, content = raw(served, path, method="GET", **headers)
        assert (status, json.loads(content)["error"]["code"]) == refusal


def test_what_prometheus_is_told(served: Served, client: OpenAI) -> None:
    list(client.completions.create(model=MODEL, prompt="x", max_tokens=2, stream=True))
    refused(served, "/v1/completions", {})
    _, headers, content = raw(served, "/metrics", method="GET")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    text = content.decode()
    samples = {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    route = ("route", "/v1/completions")
    assert samples["forge_serve_requests_total", route, ("status", "200")] >= 1
    assert samples["forge_serve_requests_total", route, ("status", "400")] >= 1
    assert samples["forge_serve_tokens_total", ("kind", "completion")] > 0
    assert samples["forge_serve_first_token_seconds_count",] > 0
    assert samples["forge_serve_pending",] == 0
    assert samples["forge_serve_queue_depth",] == 0


def test_damage_in_the_library_is_told_and_the_rest_is_served(tmp_path: Path) -> None:
    admin = ("inference", "admin")
    keys = (
        an_api_key("all", KEY, rights=RIGHTS),
        an_api_key("ward", WARD, rights=admin, cartridges=("p1", "p9")),
    )
    with serving(tmp_path, api_keys=keys) as one:
        everything, ward = ({"authorization": f"Bearer {key}"} for key in (KEY, WARD))
        for name in ("p1", "p1", "other_ward"):
            status, _, _ = raw(
                one, f"/admin/cartridges/{name}", save({"kv": cartridge(3)}), method="POST",
                **everything,
            )  # fmt: skip
            assert status == 201
        directory = one.house.library.directory
        manifest = directory / "p1" / "2" / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:40])

        for path in ("/admin/cartridges", "/admin/cartridges/p1"):
            status, _, content = raw(one, path, method="GET", **everything)
            listed = json.loads(content)
            assert status == 200
            named = [(c["name"], c["version"]) for c in listed["cartridges"] if c["name"] == "p1"]
            assert named == [("p1", 1)]
            assert [(d["name"], d["version"]) for d in listed["damaged"]] == [("p1", 2)]
        # No answer names a cartridge that the key is not for.
        for method, path in (
            ("GET", ""),
            ("GET", "/p9"),
            ("GET", "/p9/1"),
            ("GET", "/p1/7"),
            ("DELETE", "/p9"),
            ("DELETE", "/p9/3"),
            ("PUT", "/p9/1/words"),
            ("GET", "/absent"),
            ("DELETE", "/absent"),
        ):
            _, _, content = raw(one, f"/admin/cartridges{path}", b"x", method=method, **ward)
            assert b"other_ward" not in content, (method, path)

        path = "/admin/cartridges/p1/2"
        assert raw(one, path, method="DELETE", **everything)[0] == 200
        status, _, content = raw(one, "/admin/cartridges", method="GET", **everything)
        assert (status, json.loads(content)["damaged"]) == (200, [])

        assert raw(one, "/ready", method="GET")[0] == 200
        directory.rename(directory.with_name("elsewhere"))
        status, _, content = raw(one, "/ready", method="GET")
        assert (status, json.loads(content)["library"]) == (503, False)
        for method, path in (("GET", ""), ("GET", "/p1"), ("POST", "/p1"), ("DELETE", "/p1")):
            status, _, content = raw(
                one, f"/admin/cartridges{path}", save({"kv": cartridge(3)}), method=method,
                **everything,
            )  # fmt: skip
            assert (status, json.loads(content)["error"]["code"]) == (503, "library_unusable")
        assert not directory.exists()


@pytest.fixture
def full() -> Iterator[Served]:
    """A server whose library, of two cartridges, lies on a disk that is full."""
    with disk(MIB) as root, serving(root) as one:
        for seed, name in enumerate(("p1", "p2")):
            add_cartridge(one.house.library, name, seed=seed)
        if not fill(root):
            pytest.skip("only root mounts the disk of 2 MiB that is filled")
        yield one


def names(one: Served) -> list[str]:
    status, _, content = raw(one, "/admin/cartridges", method="GET")
    listed = json.loads(content)
    assert (status, listed["damaged"]) == (200, [])
    return sorted(entry["name"] for entry in listed["cartridges"])


def test_a_full_disk_is_507_and_nothing_else_suffers(full: Served) -> None:
    data = save({"kv": cartridge(3, TOKENS)})
    for method, path, body in (
        ("POST", "/admin/cartridges/p3", data),
        ("POST", "/admin/cartridges/p1", data),
        ("PUT", "/admin/cartridges/p1/1/words", b"the ward of cardiology"),
    ):
        status, _, content = raw(full, path, body, method=method)
        error = json.loads(content)["error"]
        assert (status, error["code"]) == (507, "library_unusable"), (path, content)
        assert "No space left on device; make room where the server runs" in error["message"]

    assert names(full) == ["p1", "p2"]
    assert raw(full, "/ready", method="GET")[0] == 200
    body = {"model": f"{MODEL}+p1", "prompt": "x", "max_tokens": 1}
    assert raw(full, "/v1/completions", body)[0] == 200


def test_what_is_dropped_makes_room_on_a_full_disk(full: Served) -> None:
    root = full.house.library.directory.parent
    assert raw(full, "/admin/cartridges/p2", method="DELETE")[0] == 200
    assert names(full) == ["p1"]
    data = save({"kv": cartridge(1, 4)})  # with its files' names no larger than the one dropped
    assert raw(full, "/admin/cartridges/p3", data)[0] == 201

    fill(root)
    data = save({"kv": cartridge(3, TOKENS)})
    assert raw(full, "/admin/cartridges/p4", data)[0] == 507
    (root / FILLER).unlink()
    assert raw(full, "/admin/cartridges/p4", data)[0] == 201
    assert names(full) == ["p1", "p3", "p4"]
