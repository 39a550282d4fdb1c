"""Judge one population of an RSA run, and write the prompts of the next.

AggregationInput --judge--> candidates --vote--> chosen
                 --draw parents--> prompts of the next population       -> JudgedPopulation
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from protocols.errors import DataError
from protocols.rsa import AggregationInput, JudgedCandidate, JudgedPopulation, RSAProblem
from strategies.answers.extract import Form
from strategies.answers.votes import tally
from strategies.rsa.islands import RSAShape
from strategies.rsa.populations import ask, chosen_of

Judge = Callable[[RSAProblem, Sequence[str]], Awaitable[Sequence[JudgedCandidate]]]


async def aggregate(
    standing: AggregationInput, shape: RSAShape, task: Form, judge: Judge
) -> JudgedPopulation:
    """Return the last population judged, and the next one's prompts; none after the last of T.

    Equal inputs give equal results in any process. Raises DataError for a `standing` that does not
    fit.
    """
    step, texts, problem = standing.step, standing.texts, standing.problem
    if not 0 <= step <= shape.T or len(texts) != (shape.slots if step else 0):
        raise DataError(
            f"rsa: {standing.name} stands before population {step} with {len(texts)} texts; there "
            f"are {shape.T} populations of {shape.slots}, and none before the first"
        )
    candidates, chosen = tuple[JudgedCandidate, ...](), None
    if step:
        candidates = tuple(await judge(problem, texts))
        chosen = chosen_of(await tally([c.answer for c in candidates], task))
    if step == shape.T:
        return JudgedPopulation(candidates, chosen)
    prompts, parents = ask(problem.question, texts, shape, step, task, standing.stream)
    return JudgedPopulation(candidates, chosen, prompts, parents)
