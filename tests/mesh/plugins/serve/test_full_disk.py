"""A library whose disk is full: what needs room is refused as 507, all else is served."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from safetensors.torch import save
from serving_setup import MODEL, Served, add_cartridge, cartridge, raw, serving
from small_disk import FILLER, disk, fill

MIB = 2  # of the disk
TOKENS = 64  # of a cartridge: more than the room that is left


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
    data = save({"kv": cartridge(1)})  # as large as the one dropped
    assert raw(full, "/admin/cartridges/p3", data)[0] == 201

    fill(root)
    data = save({"kv": cartridge(3, TOKENS)})
    assert raw(full, "/admin/cartridges/p4", data)[0] == 507
    (root / FILLER).unlink()
    assert raw(full, "/admin/cartridges/p4", data)[0] == 201
    assert names(full) == ["p1", "p3", "p4"]
