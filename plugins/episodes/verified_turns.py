"""Write the turns of episodes as verified rollouts are written: block by block, with the document's
teacher, which reads the conversation so far behind the document itself."""

from __future__ import annotations

from collections.abc import Sequence

from cartridge_forge.plugins.decoding.verified.records import VerifiedCounts
from cartridge_forge.plugins.documents.study.verified import VerifiedSampling
from cartridge_forge.protocols.step import Completion, GenerateRequest
from cartridge_forge.services.clients import Replied
from cartridge_forge.training.records import GenerateCall, StudyPrompt


class VerifiedTurns:
    """Generate the turns of a step. The requests of a call are verified as one group, over the
    document whose cartridge each reads; `counts` are those of all calls so far."""

    def __init__(self, sampling: VerifiedSampling, generate: GenerateCall) -> None:
        self._sampling, self._generate = sampling, generate
        self.counts = VerifiedCounts()

    async def __call__(
        self,
        requests: Sequence[GenerateRequest],
        replied: Replied = None,
        *,
        whole: bool = False,
    ) -> list[Completion]:
        documents = [request.prefix.name.partition("/")[2] for request in requests]
        prompts = [
            StudyPrompt(name, "turn", request, name, (name,), request.id)
            for name, request in zip(documents, requests, strict=True)
        ]
        completions, counts = await self._sampling.responses(prompts, self._generate)
        self.counts += counts
        return completions
