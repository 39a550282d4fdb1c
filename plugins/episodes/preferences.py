"""Run the replay channel beside training: states go to the teachers, pairs return later.

step s       states worth a vote -> teacher_replay.vote (not awaited)
step s + lag pairs with a verdict join, oldest first, for `uses` steps; later verdicts join later
             steps, and are dropped after s + max_age
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from cartridge_forge.plugins.chat import messages as teacher_replay
from cartridge_forge.plugins.chat.messages import PanelVerdict, ReplayState
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.environments.action_parsing import ActionFormat
from cartridge_forge.plugins.environments.training_signals import training_pair
from cartridge_forge.plugins.objectives.policy_scores import is_stale
from cartridge_forge.plugins.replay.client import TeacherReplayClient
from cartridge_forge.plugins.replay.prompts import state_hash
from cartridge_forge.plugins.replay.spec import DpoSpec, ReplaySpec
from cartridge_forge.plugins.replay.vote_records import from_row, to_row
from cartridge_forge.plugins.replay.voting import pair_of, worth_asking
from cartridge_forge.protocols.errors import DataError, RunError
from cartridge_forge.protocols.step import PreferencePair
from cartridge_forge.services.clients import HintedTeacherClient, TrainerClient
from cartridge_forge.services.pool.pool import Pool

UNKNOWN = -1  # the version of a reference that is not computed yet


@dataclass(frozen=True)
class AskedState:
    """Hold a state of step `step`, with the student's exact tokens."""

    step: int
    document: str
    state: ReplayState
    context_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


@dataclass(frozen=True)
class HeldPair:
    """Hold a pair of step `begun`, and the number of steps that trained on it."""

    begun: int
    pair: PreferencePair
    used: int = 0


_HELD = TypeAdapter(HeldPair)


class PreferenceQueue:
    """Send states to the teachers, and keep the pairs until they are trained. `counts` holds the
    outcomes of states since the last `counted`."""

    def __init__(
        self, pools: Mapping[str, Pool], spec: ReplaySpec, dpo: DpoSpec,
        conversation: ChatRenderer, dialect: ActionFormat,
    ) -> None:  # fmt: skip
        self._hinted_teacher, self._trainer = HintedTeacherClient(pools), TrainerClient(pools)
        self._teacher_replay = TeacherReplayClient(pools)
        self._gate, self._dpo = spec.gate, dpo
        self._conversation, self._dialect = conversation, dialect
        self._asked: list[tuple[AskedState, asyncio.Future[PanelVerdict]]] = []
        self._told: list[dict[str, Any]] = []
        self._held: list[HeldPair] = []
        self.counts: Counter[str] = Counter()

    def ask(self, questions: Sequence[AskedState]) -> None:
        """Start votes on the states that are most worth one, each state once; return at once."""
        worth = [q for q in questions if worth_asking(q.state, self._gate)]
        worth.sort(key=lambda q: 1.0 if q.state.confidence is None else q.state.confidence)
        pending = {state_hash(q.state) for q, _ in self._asked}
        count = 0
        for question in worth:
            key = state_hash(question.state)
            if key not in pending and count < self._dpo.states:
                count += 1
                pending.add(key)
                self._begin(question)

    async def due(self, step: int, version: int) -> list[PreferencePair]:
        """Return the pairs that join `step`, which trains `version`. Waits for no vote, only for
        reference log-probabilities, of pairs that join for the first time or whose reference has
        become too old."""
        self._gather(step)
        waiting = [h for h in self._held if step - h.begun <= self._dpo.max_age]
        self.counts["given_up"] += sum(not h.used for h in self._held if h not in waiting)
        joining = [h for h in waiting if step - h.begun >= self._dpo.lag][: self._dpo.pairs]
        remaining = [h for h in waiting if h not in joining]
        joining = await self._referred(joining, version)
        self.counts["trained"] += sum(not h.used for h in joining)
        used = [replace(h, used=h.used + 1) for h in joining]
        # Pairs that were trained before go first.
        self._held = [*(h for h in used if h.used < self._dpo.uses), *remaining]
        return [h.pair for h in joining]

    async def _referred(self, joining: list[HeldPair], version: int) -> list[HeldPair]:
        """Return the pairs with references, which stay with them until their last use: computed
        again after a resume, a batch of other pairs would round them differently."""
        spec = self._dpo
        lacking = [
            h.pair
            for h in joining
            if not h.used or is_stale(h.pair, version, spec.max_reference_age)
        ]
        if not lacking or not spec.has_reference:
            return joining
        if spec.follows_policy:
            referred = await self._hinted_teacher.references(lacking, version)
        else:
            referred = await self._trainer.references(lacking)
        by_id = {pair.id: pair for pair in referred}
        return [replace(h, pair=by_id.get(h.pair.id, h.pair)) for h in joining]

    def counted(self) -> Counter[str]:
        """Return `counts` since the last call."""
        counted, self.counts = +self.counts, Counter()
        return counted

    def told(self) -> list[dict[str, Any]]:
        """Return new rows for the record: states, verdicts with every vote, and pairs."""
        rows, self._told = self._told, []
        return rows

    def saved(self) -> dict[str, Any]:
        """Return unfinished work as JSON: waiting pairs, and states under vote (they are asked
        again after a resume, and paid answers come from the ledger)."""
        return {
            "asked": [{**asdict(q), "state": to_row(q.state)} for q, _ in self._asked],
            "held": [asdict(h) for h in self._held],
            "counts": dict(self.counts),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Resume the unfinished work of `saved`."""
        self.counts = Counter(saved["counts"])
        self._held = [_HELD.validate_python(h) for h in saved["held"]]
        for question in saved["asked"]:
            self._begin(_from_json(question))

    async def close(self) -> None:
        """Cancel all votes."""
        tasks, self._asked = [task for _, task in self._asked], []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, question: AskedState) -> None:
        vote = self._teacher_replay.vote(question.state)
        self._asked.append((question, asyncio.ensure_future(vote)))

    def _gather(self, step: int) -> None:
        """Collect the verdicts that have arrived, in the order of their requests."""
        pending, self._asked = self._asked, []
        for question, task in pending:
            if not task.done():
                if step - question.step > self._dpo.max_age:
                    task.cancel()
                    self.counts["too_late"] += 1
                else:
                    self._asked.append((question, task))
                continue
            try:
                verdict = task.result()
            except RunError:  # the pool lost the call repeatedly: the run continues without
                self.counts["unanswered"] += 1
                continue
            self.counts[verdict.reason] += 1
            preferred = pair_of(verdict)
            self._told += [to_row(question.state), to_row(verdict)]
            if preferred is not None:
                self._told.append(to_row(preferred))
            pair = None if preferred is None else self._pair(question, preferred)
            if pair is not None:
                self._held.append(HeldPair(question.step, pair))

    def _pair(
        self, question: AskedState, preferred: teacher_replay.PreferenceActions
    ) -> PreferencePair | None:
        pair = training_pair(
            preferred, question.context_ids, question.response_ids, self._conversation,
            self._dialect, question.document, 0.0, 0.0, UNKNOWN,
        )  # fmt: skip
        self.counts["unsayable"] += pair is None
        return pair


def _from_json(saved: Mapping[str, Any]) -> AskedState:
    state = from_row(saved["state"])
    if not isinstance(state, ReplayState):
        raise DataError(f"a state of the teacher replay was expected: got {type(state).__name__}")
    return AskedState(
        saved["step"], saved["document"], state, tuple(saved["context_ids"]),
        tuple(saved["response_ids"]),
    )  # fmt: skip
