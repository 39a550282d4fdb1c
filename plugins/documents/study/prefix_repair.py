"""Replace the first token of a response that the teacher would hardly have written.

    student writes y  ->  the teacher, the same model over the document, reads y
    first t with T(y_t) < least  ->  y_t becomes the teacher's likeliest token there
    the student continues from it, over the cartridge that wrote the beginning

Without it, text after a student's mistake is trained on as it stands: the teacher continues a false
sentence. One token of a response is replaced at most; the rest is the student's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cartridge_forge.plugins.documents.study.prompts import reading
from cartridge_forge.protocols.step import Completion, GenerateRequest
from cartridge_forge.training.records import GenerateCall, StudyPrompt, context_ref


@dataclass(frozen=True)
class Repair:
    """Say that token `token` takes the place of token `place` of response `index`."""

    index: int
    place: int
    token: int


async def repaired(
    prompts: Sequence[StudyPrompt],
    completions: Sequence[Completion],
    least: float,
    end_ids: frozenset[int],
    generate: GenerateCall,
) -> list[Completion]:
    """Return the completions, each repaired at its first token with a teacher's probability below
    `least`."""
    requests_read = [
        reading(replace(p.request, prefix=context_ref(p.contexts)), c.token_ids)
        for p, c in zip(prompts, completions, strict=True)
    ]
    read = await generate(requests_read)
    repairs = [
        Repair(i, index, teacher.prompt_likeliest[index - len(completion.token_ids)])
        for i, (completion, teacher) in enumerate(zip(completions, read, strict=True))
        if (index := first_refused(teacher, len(completion.token_ids), least)) is not None
    ]
    if not repairs:
        return list(completions)
    rests = await generate(
        [_continuation(prompts[r.index].request, completions[r.index], r) for r in repairs]
    )
    joined = list(completions)
    for repair, continuation in zip(repairs, rests, strict=True):
        most = prompts[repair.index].request.sampling.max_tokens
        joined[repair.index] = _joined(joined[repair.index], repair, continuation, most, end_ids)
    return joined


def first_refused(teacher: Completion, tokens: int, least: float) -> int | None:
    """Return the index of the first of a response's `tokens` tokens, the last of the prompt that
    the teacher read, whose probability there is below `least`; None if all are likelier."""
    logprobs = teacher.prompt_logprobs[len(teacher.prompt_logprobs) - tokens :]
    bound = math.log(least)
    return next((t for t, logprob in enumerate(logprobs) if logprob < bound), None)


def _continuation(
    request: GenerateRequest, completion: Completion, repair: Repair
) -> GenerateRequest:
    """Return the request to go on after the repair; it reads the student's log-probability of the
    new token too."""
    token_ids = (*completion.token_ids[: repair.place], repair.token)
    room = max(1, request.sampling.max_tokens - len(token_ids))
    return replace(
        request, id=f"{request.id}/repaired", prompt_ids=(*request.prompt_ids, *token_ids),
        sampling=replace(request.sampling, max_tokens=room), first_draw=len(token_ids),
        prompt_logprobs=True,
    )  # fmt: skip


def _joined(
    completion: Completion,
    repair: Repair,
    continuation: Completion,
    most: int,
    end_ids: frozenset[int],
) -> Completion:
    """Return the beginning, the teacher's token and what the student wrote after it, of at most
    `most` tokens."""
    index = repair.place
    ended = repair.token in end_ids
    complete = ended or index + 1 == most  # nothing may follow the new token
    # The weights may have changed in between; the continuation read the new token.
    version = continuation.versions[0] if continuation.versions else completion.versions[index]
    token_ids = () if complete else continuation.token_ids
    logprobs = () if complete else continuation.logprobs
    versions = () if complete else continuation.versions
    return replace(
        completion,
        token_ids=(*completion.token_ids[:index], repair.token, *token_ids),
        logprobs=(*completion.logprobs[:index], continuation.prompt_logprobs[-1], *logprobs),
        versions=(*completion.versions[:index], version, *versions),
        finish_reason=("stop" if ended else "length") if complete else continuation.finish_reason,
        top_logprobs=(),
    )
