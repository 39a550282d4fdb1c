"""Convert vLLM's outputs to completions, without importing vLLM.

An output is a `vllm.outputs.RequestOutput`; its log-probabilities are, for each position, a mapping
from token id to an object with `logprob` and `rank`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cartridge_forge.protocols.ports import refused
from cartridge_forge.protocols.step import Completion, GenerateRequest


def completed(request: GenerateRequest, output: Any) -> Completion:
    """Return the completion of a finished request, or a refusal where vLLM aborted it."""
    (completion,) = output.outputs
    if completion.finish_reason not in ("stop", "length"):
        names = [f"{part.name} version {part.version}" for part in request.prefix.parts]
        return refused(
            request,
            f"vLLM ended request {request.id} with {completion.finish_reason!r}: the worker does "
            f"not hold {' or '.join(names)}",
        )
    ids = tuple(completion.token_ids)
    token_logprobs = completion.logprobs or ()  # none where none were asked for
    logprobs = tuple(
        at[token].logprob for at, token in zip(token_logprobs, ids, strict=bool(token_logprobs))
    )
    versions = (request.prefix.version,) * len(ids)
    wanted = request.top_logprobs
    read, likeliest_read, top_read = of_prompt(request, output)
    return Completion(
        request.id, ids, logprobs, versions, completion.finish_reason, read,
        prompt_likeliest=likeliest_read, prompt_top_logprobs=top_read,
        top_logprobs=tuple(likeliest(at, wanted) for at in token_logprobs) if wanted else (),
    )  # fmt: skip


def of_prompt(
    request: GenerateRequest, output: Any
) -> tuple[tuple[float, ...], tuple[int, ...], tuple[tuple[tuple[int, float], ...], ...]]:
    """Return the prompt's log-probabilities, the likeliest token at each of their positions, and as
    many of the likeliest as the request asks for."""
    wanted = len(request.prompt_ids) - 1
    if not request.prompt_logprobs or not wanted:
        return (), (), ()
    # Counted from the end: the entries before depend on where computing began.
    assert output.prompt_logprobs is not None
    last = output.prompt_logprobs[-wanted:]
    pairs = zip(last, request.prompt_ids[1:], strict=True)
    top = request.top_logprobs
    return (
        tuple(at[token].logprob for at, token in pairs),
        tuple(likeliest(at, 1)[0][0] for at in last),
        tuple(likeliest(at, top) for at in last) if top else (),
    )


def likeliest(at: Mapping[int, Any], count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` likeliest tokens as (id, log-probability); vLLM adds the sampled one."""
    ranked = sorted(at.items(), key=lambda item: item[1].rank)
    return tuple((token, entry.logprob) for token, entry in ranked[:count])
