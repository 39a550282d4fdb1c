"""A tensor plane of each kind, over one storage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from monarch.actor import ProcMesh, this_host

from cartridge_forge.protocols.errors import PlaneError
from cartridge_forge.services.planes.open import OwnedPlane, open_plane

KINDS = ("torchstore", "shared_memory")


@pytest.fixture(scope="module")
def storage() -> Iterator[ProcMesh]:
    """Yield the process that a store runs in."""
    mesh = this_host().spawn_procs(per_host={"gpus": 1}, name="storage")
    yield mesh
    mesh.stop().get(timeout=30)


@pytest.fixture(scope="module", params=KINDS)
def plane(request: pytest.FixtureRequest, storage: ProcMesh) -> Iterator[OwnedPlane]:
    """Yield a plane of each kind, open for a whole file."""
    opened = asyncio.run(open_plane(request.param, storage))
    yield opened
    with contextlib.suppress(PlaneError):  # where a test has killed the storage
        asyncio.run(opened.stop())
