"""What vLLM tells of a request, as our completions. Pure: no vLLM.

An output is a `vllm.outputs.RequestOutput`; its log-probabilities are a mapping from token id to
what has `logprob` and `rank`, one for each place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocols.types import Completion, GenerateRequest, refused


def completed(request: GenerateRequest, output: Any) -> Completion:
    """What vLLM made of a request."""
    (made,) = output.outputs
    if made.finish_reason not in ("stop", "length"):
        asked = [f"{part.name} version {part.version}" for part in request.prefix.parts]
        return refused(
            request,
            f"vLLM ended request {request.id} with {made.finish_reason!r}: the worker does not "
            f"hold {' or '.join(asked)}",
        )
    ids = tuple(made.token_ids)
    assert made.logprobs is not None
    logprobs = tuple(at[token].logprob for at, token in zip(made.logprobs, ids, strict=True))
    versions = (request.prefix.version,) * len(ids)
    wanted = request.top_logprobs
    read, likeliest_read = of_prompt(request, output)
    return Completion(
        request.id, ids, logprobs, versions, made.finish_reason, read,
        prompt_likeliest=likeliest_read,
        top_logprobs=tuple(likeliest(at, wanted) for at in made.logprobs) if wanted else (),
    )  # fmt: skip


def of_prompt(request: GenerateRequest, output: Any) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The prompt's log-probabilities and the likeliest token at each of their places."""
    wanted = len(request.prompt_ids) - 1
    if not request.prompt_logprobs or not wanted:
        return (), ()
    # Counted from the end: what stands before depends on where computing began.
    assert output.prompt_logprobs is not None
    last = output.prompt_logprobs[-wanted:]
    told = zip(last, request.prompt_ids[1:], strict=True)
    return tuple(at[token].logprob for at, token in told), tuple(
        likeliest(at, 1)[0][0] for at in last
    )


def likeliest(at: Mapping[int, Any], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens at a place, as (id, log-probability); vLLM adds the chosen."""
    ranked = sorted(at.items(), key=lambda item: item[1].rank)
    return tuple((token, told.logprob) for token, told in ranked[:count])
