"""Train a cartridge of one text in this process, as `forge make` does over actors.

offline     the text's own words after prompts about it; the model with the text scores them
on_policy   what the student itself writes after the same prompts, scored likewise
mixture     half of a step's prompts each way

All begin with the same cartridge and take the same prompts in the same order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.teacher import TeacherDistribution, score_kept
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.documents.text_turns import text_turn
from cartridge_forge.plugins.evaluate.bench.reading import BenchText, tokens_of
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.sections import ObjectiveSpec, TrainSpec
from cartridge_forge.protocols.step import (
    OFFLINE_VERSION,
    GenerateRequest,
    PrefixRef,
    Sample,
    Sampling,
    TrainBatch,
    stream_seed,
)

Policy = Literal["offline", "on_policy", "mixture"]
DRAWS = 20  # of a prompt, until the text has words for its kind
ROW_TOKENS = 512  # of a prompt with its answer, at most
Wording = Callable[[str, str], str]  # (a turn's words, what they ask) -> the words with passages


@dataclass(frozen=True)
class TrainingSettings:
    """Say how a cartridge is trained: `steps` of so many `prompts` of these `kinds`, at `lr` times
    the root mean square of the untrained one; answers have at most `answer_tokens`."""

    steps: int = 40
    prompts: int = 10
    kinds: tuple[str, ...] = ("recite", "continue", "cloze")
    lr: float = 0.02
    warmup: int = 5
    answer_tokens: int = 64
    temperature: float = 0.7
    top_k: int = 20
    every: int = 5
    seed: int = 0


def training_rows(
    tokenizer: Any, text: BenchText, settings: TrainingSettings, *, bare: bool = False,
    wording: Wording | None = None,
) -> Iterator[list[Sample]]:  # fmt: skip
    """Yield each step's prompts with the text's own words as their answers; `bare` ones are read
    without the text. With `wording`, every other prompt has passages before its words. Raises
    DataError for a text that has no words for them."""
    renderer = ChatRenderer(tokenizer, {text.name: text.text})
    about = None if bare else text.name
    for step in range(settings.steps):
        rows: list[Sample] = []
        for i in range(settings.prompts):
            name = f"bench/{settings.seed}/{text.name}/{step}/{i}"
            rng = random.Random(name)
            kind = settings.kinds[(step * settings.prompts + i) % len(settings.kinds)]
            drawn = (text_turn(kind, text.text, rng) for _ in range(DRAWS))
            turn = next((turn for turn in drawn if turn is not None), None)
            if turn is None:
                raise DataError(f"{text.name} has no words for a prompt of the kind {kind}")
            even = (step * settings.prompts + i) // len(settings.kinds) % 2 == 0  # of each kind
            words = wording(turn.turn, turn.turn) if wording and even else turn.turn
            prompt = renderer.opening(about, (AgentMessage("user", words),))
            answer = renderer.saying(turn.answer)[: settings.answer_tokens]
            versions = (OFFLINE_VERSION,) * len(answer)
            zeros = (0.0,) * len(answer)
            rows.append(Sample(name, text.name, prompt, answer, zeros, versions))
        yield rows


def train(
    model: LanguageModel, tokenizer: Any, text: BenchText, start: Tensor, policy: Policy,
    settings: TrainingSettings, wording: Wording | None = None,
) -> Iterator[tuple[int, Tensor]]:  # fmt: skip
    """Yield the steps made and the cartridge [L, 2, H_kv, P, D] after every `settings.every`-th
    step of training from `start`, and after the last. `wording` is that of `training_rows`."""
    bank = CartridgeBank([text.name], [start.float()], frozen=1)
    spec = TrainSpec(
        steps=settings.steps, lr=settings.lr, lr_scale="rms", row_tokens=ROW_TOKENS,
        warmup_steps=min(settings.warmup, settings.steps), seed=settings.seed,
    )  # fmt: skip
    trainer = CartridgeTrainer(model, bank, spec, objective=ObjectiveSpec(micro_tokens=256))
    trainer.begin("on_policy", settings.steps)
    end_ids = ChatRenderer(tokenizer, {}).end_ids
    prompts = training_rows(tokenizer, text, settings, wording=wording)
    for step, rows in enumerate(prompts, start=1):
        by_student = {"offline": 0, "mixture": len(rows) // 2, "on_policy": len(rows)}[policy]
        samples = [
            *student_answers(model, bank, rows[:by_student], trainer.version, end_ids, settings),
            *rows[by_student:],
        ]
        scored = score_kept(
            model, samples, {text.name: text.kv}, tokens_of(samples), settings.top_k
        )
        scores = {"doc_teacher": TeacherDistribution(**scored)}
        trainer.step(TrainBatch(doc=tuple(samples), scores=scores), trainer.version)
        if step % settings.every == 0 or step == settings.steps:
            yield step, bank.kv()[0].detach().clone()


def student_answers(
    model: LanguageModel, bank: CartridgeBank, rows: Sequence[Sample], version: int,
    end_ids: frozenset[int], settings: TrainingSettings,
) -> list[Sample]:  # fmt: skip
    """Return the prompts of rows with the student's own answers over the present cartridge."""
    if not rows:
        return []
    sampling = Sampling(settings.temperature, max_tokens=settings.answer_tokens)
    requests = [
        GenerateRequest(
            r.id, r.prompt_ids, PrefixRef(r.cartridge, version), sampling, stream_seed(r.id)
        )
        for r in rows
    ]
    cartridge = bank.kv()[0].detach().to(model.dtype)
    answers = generate(model, requests, lambda _: cartridge, end_ids)
    return [
        replace(r, response_ids=a.token_ids, sampler_logprobs=a.logprobs, versions=a.versions)
        for r, a in zip(rows, answers, strict=True)
    ]
