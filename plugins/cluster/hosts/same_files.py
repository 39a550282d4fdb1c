"""Check that a host has the files that a role reads and writes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from cartridge_forge.actors.heartbeat import digest
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.pool.process import ReplicaProcess

LOOK_SECONDS = 30.0  # a shared file system may be slow on first access


async def same_files(
    process: ReplicaProcess, *, role: str, read: Sequence[str], writable_paths: Sequence[str]
) -> None:
    """Check that a process on another host has the same files, and can write beside those in
    `written`. Raises RunError otherwise, instead of at the first checkpoint an hour later."""
    if process.local or not (read or writable_paths):
        return
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            reply = await process.heartbeat.look.call_one((*read, *writable_paths))
    except TimeoutError as error:
        raise RunError(
            f"{process.host} did not read {', '.join((*read, *writable_paths))} within "
            f"{LOOK_SECONDS:g} s; check the file systems that are mounted there"
        ) from error
    for path in (*read, *writable_paths):
        theirs, writable = reply[path]
        folder = Path(path).parent
        if theirs != digest(Path(path)):
            what = "is another file" if theirs else "is not there"
            remedy = (
                f"mount the same file system at {folder} on this host and on every one that may "
                f"run {role}"
                if path in writable_paths
                else f"have the same model at {folder} on every host, or give a hub id"
            )
            raise RunError(f"on {process.host}, {path} {what}, and {role} needs it; {remedy}")
        if path in writable_paths and not writable:
            raise RunError(
                f"on {process.host}, {role} may not write to {folder}; run the worker as a user "
                "who may"
            )
