"""Play RSA runs in lockstep, in exact tokens: one call of each port per population.

    turn       every AggregationInput -> prompts of population 0
    generate   M * N prompts of every run, together -> texts
    turn       candidates judged, prompts of population 1  ...  T times, and a last turn judges

The tokens of a run depend only on its stream, step and slot, never on other runs of the batch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.strategies.rsa.populations import (
    AggregationInput,
    JudgedCandidate,
    JudgedPopulation,
    RSAProblem,
    measure,
)
from cartridge_forge.protocols.errors import PublishError
from cartridge_forge.protocols.step import (
    Completion,
    GenerateRequest,
    PrefixRef,
    Sampling,
    stream_seed,
)
from cartridge_forge.training.records import GenerateCall

UNJUDGED = JudgedCandidate(None, None)

Turn = Callable[[Sequence[AggregationInput]], Awaitable[Sequence[JudgedPopulation]]]
Ids = Callable[[RSAProblem, str], tuple[int, ...]]  # the student's token ids of a prompt


@dataclass(frozen=True)
class RSAStart:
    """Describe a run to play. `stream` names its draws, `group` the runs it competes with."""

    name: str
    stream: str
    group: str
    problem: RSAProblem


@dataclass(frozen=True)
class CandidateRecord:
    """Hold a candidate, from prompt to score. `parents` are slots of the previous population."""

    prompt: str
    parents: tuple[int, ...]
    request: GenerateRequest
    completion: Completion
    text: str
    candidate: JudgedCandidate = UNJUDGED


@dataclass(frozen=True)
class PlayedRun:
    """Hold a whole run: T populations of M * N candidates. `chosen` has, for each population, the
    slot of the majority answer; None where no answer was given."""

    start: RSAStart
    populations: tuple[tuple[CandidateRecord, ...], ...]
    chosen: tuple[int | None, ...]

    @property
    def error(self) -> str:
        """Return the error of the first candidate that could not be judged; "" where all could."""
        return next(
            (g.candidate.error for p in self.populations for g in p if g.candidate.error), ""
        )

    @property
    def scores(self) -> list[list[float]]:
        """Return the score of every candidate, by population; 0 where it could not be judged."""
        return [[g.candidate.score or 0.0 for g in p] for p in self.populations]

    def metrics(self, step: int) -> dict[str, float]:
        """Return `plugins.strategies.rsa.populations.METRICS` of one population; -1 is the last."""
        return measure(self.scores[step], self.chosen[step])


async def play(
    starts: Sequence[RSAStart],
    generate: GenerateCall,
    turn: Turn,
    conversation: ChatRenderer,
    *,
    populations: int,
    sampling: Sampling,
    prefix: Callable[[RSAProblem], PrefixRef],
    ids: Ids,
) -> list[PlayedRun]:
    """Play every run to its end and return them in order.

    Raises PublishError for a refused request, and the errors of the ports.
    """
    runs = [PlayedRun(start, (), ()) for start in starts]
    drawn: list[tuple[CandidateRecord, ...]] = [()] * len(starts)
    for step in range(populations + 1):
        judged = await turn(
            [
                AggregationInput(
                    s.name, s.stream, s.problem, step, tuple(g.text for g in generations)
                )
                for s, generations in zip(starts, drawn, strict=True)
            ]
        )
        if step:
            runs = [_with(*triple) for triple in zip(runs, drawn, judged, strict=True)]
        if step == populations:
            break
        requests_of_runs = [
            _requests(start, step, verdict, sampling, prefix, ids)
            for start, verdict in zip(starts, judged, strict=True)
        ]
        completions = await generate([r for requests in requests_of_runs for r in requests])
        completed = iter(completions)
        drawn = [
            tuple(
                _generation(*of_slot, next(completed), conversation)
                for of_slot in zip(verdict.prompts, verdict.parents, requests, strict=True)
            )
            for verdict, requests in zip(judged, requests_of_runs, strict=True)
        ]
    return runs


def _with(
    run: PlayedRun, drawn: tuple[CandidateRecord, ...], verdict: JudgedPopulation
) -> PlayedRun:
    """Return the run with one more judged population."""
    pairs = zip(drawn, verdict.candidates, strict=True)
    population = tuple(replace(g, candidate=candidate) for g, candidate in pairs)
    return PlayedRun(run.start, (*run.populations, population), (*run.chosen, verdict.chosen))


def _requests(
    start: RSAStart,
    step: int,
    verdict: JudgedPopulation,
    sampling: Sampling,
    prefix: Callable[[RSAProblem], PrefixRef],
    ids: Ids,
) -> list[GenerateRequest]:
    ids_of: dict[str, tuple[int, ...]] = {}  # all prompts of step 0 are equal
    requests = []
    for slot, prompt in enumerate(verdict.prompts):
        if prompt not in ids_of:
            ids_of[prompt] = ids(start.problem, prompt)
        requests.append(
            GenerateRequest(
                f"{start.name}/{step}/{slot}",
                ids_of[prompt],
                prefix(start.problem),
                sampling,
                stream_seed(f"{start.stream}/{step}/{slot}"),
            )
        )
    return requests


def _generation(
    prompt: str,
    parents: tuple[int, ...],
    request: GenerateRequest,
    completion: Completion,
    conversation: ChatRenderer,
) -> CandidateRecord:
    if completion.error:
        raise PublishError(f"{completion.request_id}: {completion.error}")
    text = conversation.decode(completion.token_ids)
    return CandidateRecord(prompt, parents, request, completion, text)
