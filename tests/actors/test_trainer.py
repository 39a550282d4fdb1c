"""The trainer's actor among ranks: what one of them cannot read is every rank's error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from actors.trainer import TrainerActor
from learning.ranks import ALONE, Ranks
from protocols.errors import PlaneError
from protocols.types import Packet, TensorLayout


class Two(Ranks):
    """Rank 0 of two, without the other: that one tells what `other` is."""

    other = ""

    def gather(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        return [facts, {"fault": self.other}]


class Plane:
    async def get(self, packet: Packet) -> dict[str, torch.Tensor]:
        if packet.key == "lost":
            raise PlaneError("no tensor lost")
        return {"logits": torch.ones(2, 3)}


def read(ranks: Ranks, *keys: str | None) -> Any:
    actor: Any = TrainerActor.__new__(TrainerActor)
    actor._ranks, actor._plane = ranks, Plane()
    return asyncio.run(actor._scores(*(k and Packet(k, TensorLayout(())) for k in keys)))


@pytest.mark.parametrize("ranks", [ALONE, Two(0, 2)])
def test_scores_are_read_where_there_are_any(ranks: Ranks) -> None:
    doc, sdpo = read(ranks, "doc", None)
    assert (doc.logits.shape, sdpo) == ((2, 3), None)
    with pytest.raises(PlaneError, match="no tensor lost"):
        read(ranks, "doc", "lost")


def test_what_another_rank_could_not_read_is_not_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Two, "other", "no tensor doc on rank 1")
    with pytest.raises(PlaneError, match="on rank 1"):
        read(Two(0, 2), "doc", None)
