"""Sample in exact tokens from the mesh's generators, over any prefix.

    SampleRequest -> chat template -> prompt ids + begun ids -> GenerateRequest (seed, first draw)
    Completion    -> SampleResult

Sampled tokens are never tokenized again: a continued response is passed on as its ids.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.strategies.samplers.sampler import (
    ABILITIES,
    Ability,
    PartialResponse,
    SampleRequest,
    SampleResult,
)
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef

Generating = Callable[[Sequence[GenerateRequest]], Awaitable[Sequence[Completion]]]


class TokenSampler:
    """Sample over `prefix`: a cartridge or the KV of `document`; None means no document."""

    abilities: frozenset[Ability] = ABILITIES

    def __init__(
        self,
        generate: Generating,
        conversation: ChatRenderer,
        document: str | None,
        prefix: PrefixRef,
    ) -> None:
        self.generate, self.conversation = generate, conversation
        self._document, self._prefix = document, prefix

    async def __call__(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Return the results in order. Raises DataError for a request that cannot be served,
        PublishError for a prefix that no generator holds."""
        partial_ids = [self._begun(ask.begun) for ask in requests]
        prompts = [self._request(ask, ids) for ask, ids in zip(requests, partial_ids, strict=True)]
        completions = await self.generate(prompts)
        return [
            self.answer(r, c, ids)
            for r, ids, c in zip(prompts, partial_ids, completions, strict=True)
        ]

    def request(self, ask: SampleRequest) -> GenerateRequest:
        """Return the tokens of a request. Raises DataError for one that cannot be served."""
        return self._request(ask, self._begun(ask.begun))

    def _request(self, ask: SampleRequest, ids: tuple[int, ...]) -> GenerateRequest:
        return GenerateRequest(
            id=ask.id,
            prompt_ids=(*self.conversation.opening(self._document, ask.messages), *ids),
            prefix=self._prefix,
            sampling=ask.sampling,
            seed=ask.seed,
            top_logprobs=ask.top_logprobs,
            until=ask.until,
            first_draw=len(ids),
        )

    def _begun(self, partial: PartialResponse) -> tuple[int, ...]:
        """Return the ids, and those of any text after them."""
        text = self.conversation.decode(partial.token_ids) if partial.token_ids else ""
        if not partial.text.startswith(text):
            raise DataError(
                f"a response is gone on with from {partial.text[:40]!r}, and its ids say "
                f"{text[:40]!r}: give the text of the ids, and what may follow it"
            )
        return (*partial.token_ids, *self.conversation.ids_of(partial.text[len(text) :]))

    def answer(
        self, request: GenerateRequest, completion: Completion, partial_ids: tuple[int, ...] = ()
    ) -> SampleResult:
        """Return the result of a completion, whose request ends in `partial_ids` of its response.
        Raises PublishError for a prefix that no generator holds."""
        if completion.error:
            raise PublishError(f"{completion.request_id}: {completion.error}")
        decode = self.conversation.decode
        prefix_text = decode(partial_ids)
        return SampleResult(
            text=decode((*partial_ids, *completion.token_ids))[len(prefix_text) :],
            tokens=len(completion.token_ids) + completion.dropped,
            prompt_tokens=len(request.prompt_ids),
            finish_reason=completion.finish_reason,
            ended_by=completion.ended_by,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            top_logprobs=tuple(
                tuple((decode((token,)), logprob) for token, logprob in at)
                for at in completion.top_logprobs
            ),
            top_token_ids=tuple(tuple(t for t, _ in at) for at in completion.top_logprobs),
        )
