"""A directory goes with its owner, and nothing else goes with it."""

from __future__ import annotations

import os
from pathlib import Path

from cartridge_forge.plugins.host.owned_directory import owned_directory


def test_only_directories_of_dead_owners_are_removed(tmp_path: Path) -> None:
    living, lock = owned_directory(str(tmp_path), "forge-sockets")
    dead, dead_lock = owned_directory(str(tmp_path), "forge-sockets")
    (dead / "socket").write_text("")
    os.close(dead_lock)
    others = [
        tmp_path / name
        for name in (
            "forge-sockets", "forge-sockets-notes", "forge-sockets-12-notes",
            "forge-sockets-x-abcdefgh", "forge-sockets-12-abcdefghi",
            "cartridge-forge-12-abcdefgh", "cartridge-forge-ht5ar37n",
        )
    ]  # fmt: skip
    for folder in others:
        folder.mkdir()
        (folder / "kept").write_text("")
    made, made_lock = owned_directory(str(tmp_path), "forge-sockets")
    assert not dead.exists()
    assert {*tmp_path.iterdir()} == {living, made, *others}
    assert all((folder / "kept").is_file() for folder in others)
    assert made.stat().st_mode & 0o777 == 0o700
    assert made.name.startswith(f"forge-sockets-{os.getpid()}-")
    for descriptor in (lock, made_lock):
        os.close(descriptor)
