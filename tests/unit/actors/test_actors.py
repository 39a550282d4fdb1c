"""Test the generator, its stream, and a vLLM that is not installed."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cartridge_forge.actors import engine_generator
from cartridge_forge.actors.base import PLACE, ModelSource, RankPlace, bootstrap, share
from cartridge_forge.actors.engine_generator import EngineGeneratorActor, StreamBuffer
from cartridge_forge.actors.sdpo_teacher import SDPOTeacherActor
from cartridge_forge.learning.cartridge import CartridgeVersions
from cartridge_forge.protocols.errors import PlaneError, RunError
from cartridge_forge.protocols.ports import TokenChunk
from cartridge_forge.protocols.spec.sections import GeneratorSpec
from cartridge_forge.protocols.step import (
    CartridgeSnapshot,
    GenerateRequest,
    PrefixRef,
    PublishedCartridge,
    Sampling,
    TensorLayout,
    TensorRef,
)


class Plane:
    """Each key has "a", filled with the number of its gets so far; it may lack one key."""

    def __init__(self) -> None:
        self.lacks = ""
        self.gets: list[str] = []

    async def get(self, packet: TensorRef) -> dict[str, torch.Tensor]:
        if packet.key == self.lacks:
            raise PlaneError("the store is gone")
        self.gets.append(packet.key)
        return {"a": torch.full((1, 2, 1, 1, 1), float(len(self.gets)))}


def reader(plane: Plane) -> Any:
    actor: Any = SDPOTeacherActor.__new__(SDPOTeacherActor)
    actor._model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    actor._plane = plane
    actor._cartridges, actor._hinted = CartridgeVersions(2), CartridgeVersions(2)
    actor._reads_hints = actor._cartridges
    return actor


def load(actor: Any, version: int, own: str, hinted: str = "", since: int | None = None) -> None:
    def one(key: str) -> tuple[PublishedCartridge, ...]:
        at = version if since is None else since
        return (PublishedCartridge("a", at, TensorRef(key, TensorLayout(()))),) if key else ()

    endpoint: Any = SDPOTeacherActor.load
    asyncio.run(endpoint._method(actor, CartridgeSnapshot(version, one(own), one(hinted))))


def read(actor: Any, version: int) -> tuple[float, float]:
    """The cartridge, and what reads hints in its place."""
    held = (actor._cartridges, actor._reads_hints)
    own, hinted = (one.get("a", version).mean().item() for one in held)
    return own, hinted


def test_hints_are_read_by_their_own_cartridges_or_by_those_in_training() -> None:
    one, other = reader(Plane()), reader(Plane())
    load(one, 0, "own")
    assert read(one, 0) == (1.0, 1.0)
    load(other, 0, "own", "hinted")
    assert read(other, 0) == (1.0, 2.0)


def test_a_version_without_changes_gets_nothing() -> None:
    plane = Plane()
    actor = reader(plane)
    load(actor, 0, "own", "hinted")
    load(actor, 1, "own", "hinted", since=0)
    assert plane.gets == ["own", "hinted"]
    assert read(actor, 1) == read(actor, 0) == (1.0, 2.0)


def test_a_load_that_the_plane_s_loss_ended_is_repeated() -> None:
    """Half of it was there: were it held, its version could not be offered again."""
    plane = Plane()
    actor = reader(plane)
    plane.lacks = "hinted"
    with pytest.raises(PlaneError, match="the store is gone"):
        load(actor, 4, "own", "hinted")
    plane.lacks = ""
    load(actor, 4, "own again", "hinted")
    assert read(actor, 4) == (2.0, 3.0)


Sent = list[list[tuple[str, int, tuple[int, ...]]]]


class FakePort:
    def __init__(self) -> None:
        self.sent: Sent = []

    def send(self, chunks: list[TokenChunk]) -> None:
        self.sent.append([(c.request_id, c.first, c.token_ids) for c in chunks])


def chunk(at: int, request: str = "r") -> TokenChunk:
    return TokenChunk(request, at, (at,), (-1.0,))


async def passed() -> None:
    """Let the event loop run what it was told of."""
    for _ in range(3):
        await asyncio.sleep(0)


def sent_by(steps: Callable[[StreamBuffer, FakePort], Awaitable[None]]) -> Sent:
    port = FakePort()

    async def run() -> None:
        await steps(StreamBuffer(port), port)

    asyncio.run(run())
    return port.sent


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_generator, "TELL_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
def test_later_tokens_wait_for_the_next_response_that_begins() -> None:
    async def steps(buffer: StreamBuffer, port: FakePort) -> None:
        buffer.add([chunk(0)])
        await passed()
        assert port.sent == [[("r", 0, (0,))]]
        buffer.add([chunk(1)])
        buffer.add([chunk(2)])
        await passed()
        assert len(port.sent) == 1
        buffer.add([chunk(3), chunk(0, "other")])
        await passed()

    assert sent_by(steps)[1:] == [[("r", 1, (1, 2, 3)), ("other", 0, (0,))]]


def test_later_tokens_are_sent_with_the_first_step_after_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_generator, "TELL_SECONDS", 0.01)

    async def steps(buffer: StreamBuffer, port: FakePort) -> None:
        buffer.add([chunk(0)])
        await passed()
        buffer.add([chunk(1)])
        await asyncio.sleep(0.02)
        buffer.add([chunk(2)])
        await passed()

    sent = sent_by(steps)
    assert [token for message in sent for _, _, ids in message for token in ids] == [0, 1, 2]
    assert sent[-1][0][2][-1] == 2


@pytest.mark.usefixtures("patient")
def test_what_is_left_of_an_ended_request_is_not_sent() -> None:
    ended = GenerateRequest("r", (1,), PrefixRef("document/", 0), Sampling(), 0)

    async def steps(buffer: StreamBuffer, port: FakePort) -> None:
        buffer.add([chunk(0), chunk(0, "other")])
        await passed()
        buffer.add([chunk(1), chunk(1, "other")])
        buffer.end([ended])
        buffer.add([chunk(0, "third")])
        await passed()

    assert sent_by(steps)[1:] == [[("other", 1, (1,)), ("third", 0, (0,))]]


def test_the_actor_says_which_command_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cartridge_forge.actors.engine_generator.missing_vllm", lambda: True)
    monkeypatch.setattr("cartridge_forge.actors.engine_generator.environment", lambda base: {})
    base = ModelSource("m", "float32", 1, {}, 1, None)  # type: ignore[arg-type]  # no plane
    actor = EngineGeneratorActor(base, frozenset(), 2, GeneratorSpec(backend="vllm"))
    with pytest.raises(RunError, match="not installed: run `make install-vllm`"):
        actor._engine.started.result(60)  # what its `ready` awaits


@pytest.fixture(autouse=True)
def _environment_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


def test_a_process_sees_its_own_gpus_alone() -> None:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    bootstrap(3, range(4, 6))()
    assert (os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("3", "4,5")


def test_devices_are_counted_among_those_that_were_left() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "4,GPU-7f"
    bootstrap(1, range(1, 2))()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-7f"


def test_without_gpus_the_devices_stay_as_they_are() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "7"
    bootstrap(1)()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_ranks_share_the_devices_of_all_in_order() -> None:
    assert [share((4, 5, 6, 7), rank, 2) for rank in (0, 1)] == [(4, 5), (6, 7)]
    assert list(share(range(6), 2, 3)) == [4, 5]
    assert share((), 1, 2) == ()


def test_a_rank_finds_its_place_and_one_that_is_alone_needs_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert RankPlace.here() == RankPlace(0, 1, "")
    RankPlace.here().left()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    os.environ[PLACE] = "2/3/meet-7"
    place = RankPlace.here()
    assert place == RankPlace(2, 3, f"file://{tmp_path}/meet-7")
    (tmp_path / "meet-7").write_text("they met")
    place.left()
    assert not list(tmp_path.iterdir())
