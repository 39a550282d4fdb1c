"""The trainer's actor among ranks: what one of them cannot read is every rank's error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import MESH

from cartridge_forge.actors.base import ModelSource, NoPlane
from cartridge_forge.actors.trainer import TrainerActor
from cartridge_forge.learning.initialization import CartridgeInit, InitSource
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.ranks import ALONE, ProcessGroup
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.library.starts.untrained import sampled_chunks
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import PlaneError
from cartridge_forge.protocols.step import PrecomputedScores, TeacherScores, TensorLayout, TensorRef
from cartridge_forge.services.roles import role_arguments
from cartridge_forge.services.run_directory import RunDirectory


class Two(ProcessGroup):
    """Rank 0 of two, without the other: that one tells what `other` is."""

    other = ""

    def gather(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        return [facts, {"fault": self.other}]


class Plane:
    def __init__(self) -> None:
        self.read: list[str] = []

    async def get(self, packet: TensorRef) -> dict[str, torch.Tensor]:
        self.read.append(packet.key)
        if packet.key == "lost":
            raise PlaneError("no tensor lost")
        return {"logits": torch.ones(2, 3)}


def read(ranks: ProcessGroup, *keys: str | None) -> Any:
    """What each of two teachers said of one sample of two tokens; None: of none."""
    actor: Any = TrainerActor.__new__(TrainerActor)
    actor._ranks, actor._plane, actor._ahead = ranks, Plane(), {}
    parts = [(TeacherScores((0,), TensorRef(k, TensorLayout(()))),) if k else () for k in keys]
    return asyncio.run(actor._scores(*((p, (), [2] * len(p)) for p in parts)))


@pytest.mark.parametrize("ranks", [ALONE, Two(0, 2)])
def test_scores_are_read_where_there_are_any(ranks: ProcessGroup) -> None:
    doc, sdpo = read(ranks, "doc", None)
    assert (doc.logits.shape, sdpo) == ((2, 3), None)
    with pytest.raises(PlaneError, match="no tensor lost"):
        read(ranks, "doc", "lost")


def test_stored_scores_stand_at_their_samples_places() -> None:
    actor: Any = TrainerActor.__new__(TrainerActor)
    actor._ranks, actor._plane, actor._ahead = ALONE, Plane(), {}
    stored = (
        PrecomputedScores(1, ((5, 6), (7, 8)), ((-0.1, -3.0), (-0.2, -2.0))),
        PrecomputedScores(0, ((3, 4),), ((-0.5, -1.0),)),
    )
    (found,) = asyncio.run(actor._scores(((), stored, [1, 2])))
    assert found.indices.tolist() == [[3, 4], [5, 6], [7, 8]]
    assert found.logprobs.tolist() == [
        pytest.approx(row) for row in ([-0.5, -1.0], [-0.1, -3.0], [-0.2, -2.0])
    ]


def test_what_is_read_ahead_is_read_once_and_its_loss_is_the_steps_error() -> None:
    async def scenario() -> tuple[list[str], list[str]]:
        actor: Any = TrainerActor.__new__(TrainerActor)
        plane = Plane()
        actor._ranks, actor._plane, actor._ahead = ALONE, plane, {}
        refs = {key: TensorRef(key, TensorLayout(())) for key in ("doc", "sdpo", "lost")}
        for key in ("doc", "lost"):
            await TrainerActor.read_ahead._method(actor, refs[key])
        await asyncio.sleep(0)
        before = list(plane.read)
        parts = [((TeacherScores((0,), refs[key]),), (), [2]) for key in ("doc", "sdpo")]
        doc, sdpo = await actor._scores(*parts)
        assert doc.logits.shape == sdpo.logits.shape == (2, 3)
        with pytest.raises(PlaneError, match="no tensor lost"):
            await actor._scores(((TeacherScores((0,), refs["lost"]),), (), [2]))
        assert actor._ahead == {}
        return before, plane.read

    before, after = asyncio.run(scenario())
    assert before == ["doc", "lost"]
    assert after == ["doc", "lost", "sdpo"]


def test_what_another_rank_could_not_read_is_not_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Two, "other", "no tensor doc on rank 1")
    with pytest.raises(PlaneError, match="on rank 1"):
        read(Two(0, 2), "doc", None)


def test_the_cartridges_start_as_the_spec_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the mesh constructs the actor with, for documents of drawn tokens."""
    monkeypatch.setattr(
        "cartridge_forge.actors.model.flush_denormals", lambda: None
    )  # it is for a whole process
    sets = ["cartridge.init=sampled_chunks", "train.seed=3", "roles.trainer.threads=1"]
    spec = load_spec(MESH, sets=sets).spec
    documents = {"none": (1,), "p": (1, *range(20, 80)), "q": (1, *range(90, 140))}
    learned = {"q": ("q",), "p": ("p",)}
    base = ModelSource(
        spec.learn.model.path, "float32", 1, documents, 1 << 30, NoPlane(), cartridges=learned
    )
    directory = RunDirectory(tmp_path)
    arguments = role_arguments("trainer", spec, base, frozenset({2}), directory)
    actor: Any = TrainerActor.__new__(TrainerActor)
    TrainerActor.__init__(actor, *arguments)
    bank = actor._trainer.bank
    assert bank.names == ("p", "q")
    model = load_model(spec.learn.model.path)
    kv = document_kv(model, documents["q"])
    expected = sampled_chunks(
        model,
        InitSource("q", documents["q"], lambda: kv, list),
        CartridgeInit("sampled_chunks", 28, 1, 3),
    )
    torch.testing.assert_close(bank.kv(["q"])[0].detach(), expected)
