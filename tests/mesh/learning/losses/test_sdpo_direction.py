"""sdpo's direction: a step on the shipped clerk's wrong calls makes the right call likelier."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from channel_setup import prefixes, progress_of
from episode_setup import replayed

from cartridge_forge.learning.cartridge import CartridgeBank, first_tokens
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.step import StepOptions, train_step
from cartridge_forge.learning.teacher import (
    TeacherDistribution,
    document_kv,
    response_logprobs,
    score_over,
)
from cartridge_forge.plugins.chat.episodes import EnvironmentRequest, Observation, Task
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.clinic.desk import HINTS, draw_case, draw_desk
from cartridge_forge.plugins.environments.hints import failed_turns, template_hint
from cartridge_forge.plugins.environments.rollout import over_cartridge, run_episodes
from cartridge_forge.plugins.environments.training_signals import (
    hinted_turns,
    rl_samples,
    turn_samples,
)
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, SdpoSpec
from cartridge_forge.protocols.step import (
    Completion,
    GenerateRequest,
    Sample,
    Sampling,
    TrainBatch,
    TrainStepOutput,
    hinted,
)

CLERK = Path(__file__).resolve().parents[4] / "models" / "clinic-clerk"
FIELDS, CASES, CARTRIDGE, MAX_TURNS, ROW_TOKENS = 24, 4, 28, 5, 256
STEP = 0.5  # norm of the update; the trained part of the cartridge has a norm of about 450


@dataclass(frozen=True)
class DeskScene:
    """Finds in the wrong department that the clerk sampled over its untrained cartridge."""

    model: Any
    kv: torch.Tensor  # the whole handbook's
    name: str
    batch: TrainBatch
    right: list[Sample]  # at the same contexts, the call that finds the note

    def bank(self) -> CartridgeBank:
        return first_tokens({self.name: self.kv}, CARTRIDGE, 1)

    def log_right(self, bank: CartridgeBank) -> float:
        """The mean log-probability of a right call."""
        logprobs = response_logprobs(self.model, self.right, prefixes(bank), ROW_TOKENS)
        return logprobs.sum().item() / len(self.right)

    def step(self, sdpo: SdpoSpec) -> tuple[float, TrainStepOutput]:
        """Train one plain step of norm STEP; return what it added to `log_right`."""
        bank = self.bank()
        before = self.log_right(bank)
        progress = progress_of(bank, lr=1.0)
        plain = torch.optim.SGD([bank.trainable[self.name]], lr=1.0)
        progress[self.name]._adam = plain.step  # type: ignore[method-assign]
        done = train_step(
            self.model,
            bank,
            progress,
            self.batch,
            # doc_kl is compared and hardly trained
            active_channels(EpisodesObjective(w_doc=1e-12, alpha=1e6, sdpo=sdpo)),
            0,
            StepOptions(clip=STEP, row_tokens=ROW_TOKENS, staleness=0, compare_gradients=True),
        )
        return self.log_right(bank) - before, done


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    return load_model(str(CLERK)), load_tokenizer(str(CLERK))


@pytest.fixture(scope="module", params=[1, 2, 3])
def scene(request: pytest.FixtureRequest, parts: tuple[Any, Any]) -> DeskScene:
    return scene_of(*parts, request.param)


def scene_of(model: Any, tokenizer: Any, index: int) -> DeskScene:
    desk = draw_desk(0, index, FIELDS)
    talk = ChatRenderer(tokenizer, {desk.id: desk.document})
    kv = document_kv(model, talk.head(desk.id))
    bank = first_tokens({desk.id: kv}, CARTRIDGE, 1)
    cases = {f"desk/{seed}": draw_case(desk, seed) for seed in range(CASES)}

    async def say(requests: Sequence[GenerateRequest]) -> list[Completion]:
        end = frozenset({tokenizer.eos_token_id})
        return generate(model, requests, lambda _: prefixes(bank)[desk.id], end)

    async def move(requests: Sequence[EnvironmentRequest]) -> list[Observation]:
        return [seen(r.task.id.rpartition("/")[0], r.actions) for r in requests]

    def seen(name: str, actions: Sequence[str]) -> Observation:
        if not actions:
            return Observation((AgentMessage("user", cases[name].question),))
        reply = replayed(cases[name], actions, MAX_TURNS)[-1].reply
        assert reply is not None
        return Observation(
            (AgentMessage("tool", reply.text),), (), reply.done, reply.reward, reply.error_kind,
            reply.hint_key, reply.hint_facts,
        )  # fmt: skip

    async def play() -> Any:
        return await run_episodes(
            [Task(name, desk.id, {}) for name in cases], say, move, talk,
            group_size=2, sampling=Sampling(max_tokens=16), prefix=over_cartridge(0),
            seed_of=lambda name: random.Random(name).getrandbits(32),
            max_context=128, max_turns=MAX_TURNS,
        )  # fmt: skip

    episodes = asyncio.run(play())
    failed = failed_turns(episodes)
    hints = [template_hint(f, HINTS) for f in failed]
    turns, used = hinted_turns(episodes, hints, talk, ROW_TOKENS)
    assert not any(hint.why for hint in used)
    wrong_finds = [
        (f"{f.episode.task.id}/{f.turn}", f.episode, turn)
        for f, turn in zip(failed, turns, strict=True)
        if f.seen.hint_key == "where"
    ]
    names = {name for name, *_ in wrong_finds}
    doc = [s for s in turn_samples(episodes) if s.id in names]
    right = []
    for s, (_, e, _) in zip(doc, wrong_finds, strict=True):
        case = cases[e.group]
        ids = talk.saying(f"find {case.field} in {case.department}.")
        right.append(
            Sample(s.id, s.cartridge, s.prompt_ids, ids, (0.0,) * len(ids), (0,) * len(ids))
        )
    rl, kept = rl_samples(episodes), [turn for *_, turn in wrong_finds]
    whole = {desk.id: kv}
    batch = TrainBatch(
        doc=doc,
        rl=rl,
        turns=kept,
        scores={
            "doc_teacher": TeacherDistribution(logits=score_over(model, doc, whole, ROW_TOKENS)),
            "sdpo_teacher": TeacherDistribution(
                logits=score_over(model, hinted(kept, rl), prefixes(bank), ROW_TOKENS)
            ),
        },
    )
    return DeskScene(model, kv, desk.id, batch, right)


def test_a_step_makes_the_right_call_likelier(scene: DeskScene) -> None:
    added, done = scene.step(SdpoSpec())
    assert added > 0.005
    assert done.cosines["doc_kl/sdpo"] > 0.5
    assert "gradient_removed" not in done.terms["sdpo"]


def test_a_bounded_step_keeps_the_direction(scene: DeskScene) -> None:
    added, done = scene.step(SdpoSpec(token_bound=0.2))
    assert added > 0.005
    assert done.cosines["doc_kl/sdpo"] > 0.0
    assert 0.0 < done.terms["sdpo"]["gradient_removed"] < 1.0
