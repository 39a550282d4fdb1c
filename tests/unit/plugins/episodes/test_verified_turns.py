"""Turns of episodes that the handbook's teacher verifies, with the tiny clerk in this process."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import pytest
from rooms.training.verified_room import Room

from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.chat.episodes import Episode, Task
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.clinic.desk import draw_desk
from cartridge_forge.plugins.documents.study.verified import opened
from cartridge_forge.plugins.environments.episode_files import from_row, to_row
from cartridge_forge.plugins.environments.rollout import (
    over_cartridge,
    over_document,
    run_episodes,
)
from cartridge_forge.plugins.environments.script import play_script
from cartridge_forge.plugins.environments.training_signals import (
    branch_samples,
    turn_samples,
)
from cartridge_forge.plugins.episodes.recipe import with_episodes
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.episodes.task_sources.opening import open_handbooks
from cartridge_forge.plugins.episodes.verified_turns import VerifiedTurns
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.step import PrefixRef, Sampling, stream_seed
from cartridge_forge.training.records import Rollout, rollout_from

CARTRIDGE, DOCUMENT = PrefixRef("cartridge/desk_01", 3), PrefixRef("document/desk_01", 0)


class Desk:
    """Four-turn tasks of a handbook, with a student that knows another desk's: its departments are
    often wrong."""

    def __init__(self, verify: dict[str, Any]) -> None:
        sets = (f"rollout.verify={verify}",)
        self.learn = EpisodesLearn.of(load_spec("meshes/handbook.yaml", sets=sets).spec.learn)
        tokenizer = load_tokenizer(self.learn.model.path)
        source = open_handbooks(self.learn, tokenizer)
        self.conversation = ChatRenderer(tokenizer, source.texts)
        self.tasks = [source.task(f"on_policy/1/{i}", i, "", held_out=True) for i in (1, 4)]
        model = load_model(self.learn.model.path, "float32")
        other = ChatRenderer(tokenizer, {"other": draw_desk(0, 2, 24).document})
        prefixes = {
            CARTRIDGE: document_kv(model, other.head("other")),
            DOCUMENT: document_kv(model, self.conversation.head("desk_01")),
        }
        self.room = Room(model, prefixes, DOCUMENT, self.conversation.end_ids)
        sampling = opened(self.learn, cast("Any", self.room), self.conversation.end_ids)
        assert sampling is not None
        self.turns = VerifiedTurns(sampling, cast("Any", self.room.generate))

    def play(self, generate: Any, prefix: Any, temperature: float) -> list[Episode]:
        def task_prefix(task: Task) -> PrefixRef:
            found: PrefixRef = prefix(task)
            return found

        return asyncio.run(
            run_episodes(
                self.tasks, generate, play_script, self.conversation, group_size=2,
                sampling=Sampling(temperature=temperature, max_tokens=12), prefix=task_prefix,
                seed_of=lambda name: stream_seed(name), max_context=160, max_turns=4,
            )
        )  # fmt: skip


def test_greedy_exact_turns_are_the_teachers_own() -> None:
    desk = Desk({"rule": "exact", "block": 4})
    verified = desk.play(desk.turns, over_cartridge(3), 0.0)
    own = desk.play(partial(desk.room.generate, whole=False), over_document, 0.0)
    plain = desk.play(partial(desk.room.generate, whole=False), over_cartridge(3), 0.0)

    def texts(episodes: list[Episode]) -> list[list[str]]:
        return [[turn.text for turn in e.turns] for e in episodes]

    assert texts(verified) == texts(own) != texts(plain)
    taught = sum(len(turn.taught) for e in verified for turn in e.turns)
    assert taught == desk.turns.counts.taught > 0


@pytest.mark.parametrize("rule", ["threshold", "exact"])
def test_the_teachers_tokens_are_named_in_samples_and_files(rule: str) -> None:
    desk = Desk({"rule": rule, "block": 3})
    episodes = desk.play(desk.turns, over_cartridge(3), 1.0)
    facts = desk.turns.counts.facts
    assert facts["taught"] == sum(len(t.taught) for e in episodes for t in e.turns) > 0
    rollout = Rollout(0, (), (), turn_samples(episodes), episodes, verified=facts)
    read = rollout_from(json.loads(json.dumps(asdict(rollout))))  # as a checkpoint does
    saved = with_episodes(read)
    assert (saved.samples, list(saved.episodes), saved.verified) == (
        rollout.samples, episodes, facts,
    )  # fmt: skip
    for e in episodes:
        assert from_row(to_row(e, "on_policy", 1)) == e
        assert all(set(turn.versions) == {3} for turn in e.turns)
    of_turns = {s.id: s for s in turn_samples(episodes)}
    for branch in branch_samples(episodes):
        sample = branch.sample
        turns = [
            (i, t) for i, t in enumerate(branch.episode.turns)
            if t.context_ids[: len(sample.prompt_ids)] == sample.prompt_ids
        ]  # fmt: skip
        taught_ids = [sample.response_ids[at] for at in sample.taught]
        assert taught_ids == [t.response_ids[at] for _, t in turns for at in t.taught]
        assert all(branch.trained[at] for at in sample.taught)
        assert sample.verified is bool(taught_ids)
        for i, turn in turns:
            assert of_turns[f"{branch.episode.task.id}/{i}"].taught == turn.taught
