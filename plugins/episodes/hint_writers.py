"""Write the hints of a step's failed turns, from the source that the key `hints` names.

A model that writes hints reads the conversation up to the error: the run's own generator, over the
document or the cartridge, or one of the external teachers, with the document as text. The generator
decodes greedily, so its hints depend on the run's seed alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from cartridge_forge.plugins.chat.episodes import Episode, TurnHint
from cartridge_forge.plugins.chat.messages import AgentMessage, ReplayState, TextAction
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.environments.hints import (
    FailedTurn,
    checked_hint,
    expected_of,
    failed_turns,
    feedback_hint,
    sibling_hint,
    template_hint,
)
from cartridge_forge.plugins.episodes.spec.objective import HintSpec
from cartridge_forge.plugins.replay.client import TeacherReplayClient
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling
from cartridge_forge.services.pool.pool import Pool
from cartridge_forge.training.records import GenerateCall


class HintWriter:
    """Write hints. `templates` is the environment's registry, `documents` the texts that external
    teachers read, `row_tokens` the most tokens of a hinted context with its turn."""

    def __init__(
        self,
        spec: HintSpec,
        templates: Mapping[str, str],
        conversation: ChatRenderer,
        documents: Mapping[str, str],
        pools: Mapping[str, Pool],
        row_tokens: int,
    ) -> None:
        self._spec, self._templates, self._row_tokens = spec, templates, row_tokens
        self._conversation, self._documents = conversation, documents
        self._teachers = TeacherReplayClient(pools)

    def at_once(self, episodes: Sequence[Episode]) -> list[TurnHint] | None:
        """Return the hints of ended episodes where each needs its own turn alone: by a template or
        the environment's feedback. None for the other sources."""
        if self._spec.hints == "template":
            return [template_hint(f, self._templates) for f in failed_turns(episodes)]
        if self._spec.hints == "feedback":
            return [feedback_hint(f) for f in failed_turns(episodes)]
        return None

    async def write(
        self, episodes: Sequence[Episode], version: int, generate: GenerateCall
    ) -> list[TurnHint]:
        """Return the hints of all a step's failed turns, sampled by `version`."""
        hints = self.at_once(episodes)
        if hints is not None:
            return hints
        failed = failed_turns(episodes)
        if self._spec.hints == "sibling":
            least = self._spec.sibling_reward
            return [sibling_hint(f, episodes, least) for f in failed]
        # An episode that broke off may not know its answer; the others of its task do.
        answers = {e.group: expected for e in episodes if (expected := expected_of(e)) is not None}
        if self._spec.hint_teacher is not None:
            pending = [self._by_teacher(self._spec.hint_teacher, f, answers) for f in failed]
            return list(await asyncio.gather(*pending))
        return await self._by_generator(failed, answers, version, generate)

    async def _by_generator(
        self,
        failed: Sequence[FailedTurn],
        answers: Mapping[str, str],
        version: int,
        generate: GenerateCall,
    ) -> list[TurnHint]:
        spec = self._spec
        sampling = Sampling(temperature=0.0, max_tokens=spec.hint_tokens)
        requests: dict[int, GenerateRequest] = {}
        for i, f in enumerate(failed):
            e = f.episode
            document = e.task.document
            ids, _ = self._conversation.context(document, e.opening, e.turns[: f.turn + 1])
            ids = self._conversation.with_hint(ids, spec.hint_prompt)
            if len(ids) + spec.hint_tokens <= self._row_tokens:
                prefix = PrefixRef(
                    f"{spec.hint_context}/{document}",
                    version if spec.hint_context == "cartridge" else 0,
                )
                name = f"hint/{e.task.id}/{f.turn}"
                requests[i] = GenerateRequest(name, ids, prefix, sampling, 0)
        texts: dict[int, str] = {}
        why = "no_hint"
        if requests:
            try:
                async with asyncio.timeout(spec.hint_timeout_s):
                    completions = await generate(list(requests.values()))
                texts = {
                    i: self._conversation.decode(c.token_ids)
                    for i, c in zip(requests, completions, strict=True)
                }
            except TimeoutError:
                why = "writer_timeout"
        return [
            checked_hint(
                f, texts.get(i, ""), answers.get(f.episode.group),
                why if i in requests else "too_long",
            )
            for i, f in enumerate(failed)
        ]  # fmt: skip

    async def _by_teacher(
        self, teacher: str, f: FailedTurn, answers: Mapping[str, str]
    ) -> TurnHint:
        e = f.episode
        turn = e.turns[f.turn]
        handbook = AgentMessage("system", self._documents[e.task.document])
        state = ReplayState(
            e.task.id, f.turn, (handbook, *f.messages), e.opening.tools, TextAction(turn.text),
            error_kind=turn.observation.error_kind,
        )  # fmt: skip
        try:
            text, why = await self._teachers.hint(
                teacher, state, self._spec.hint_prompt, self._spec.hint_timeout_s
            )
        except RunError:  # the pool lost the call repeatedly: the run continues without
            text, why = "", "unanswered"
        late = why in ("deadline", "timeout")
        return checked_hint(
            f, text, answers.get(e.group), "writer_timeout" if late else "writer_failed"
        )
