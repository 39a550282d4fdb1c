"""Sample a step's responses with the document's teacher: verified blocks, and mixtures.

    student proposes    y_0 .. y_15                 GeneratorActor, over its cartridge
    teacher verifies    y_0 .. y_4 stay, y_5 -> t   DocTeacherActor, over its cached document
    student proposes    y_6 ..                      from t on, whose log-probability it reads too

After the student's first mistake the teacher of plain on-policy training continues a false
sentence. In verified rollouts a mistake is replaced where it is made.

The responses of a step are verified in groups, one for each generator (or of `rollout.chunk`
prompts): a group waits for its slowest response, and while the teacher reads one group the
generators write another. Which responses form a group, and what each pass reads, depends on the
prompts and on tokens alone, never on timing.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from cartridge_forge.plugins.decoding.verified.client import VerifyingTeacherClient
from cartridge_forge.plugins.decoding.verified.records import VerifiedCounts, VerifyCall, VerifyRow
from cartridge_forge.plugins.decoding.verified.rules import best_block
from cartridge_forge.protocols.errors import PlaneError
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.sections import MixSpec, VerifiedRolloutSpec
from cartridge_forge.protocols.step import BARE, Completion, GenerateRequest, Sample
from cartridge_forge.services.mesh import Mesh
from cartridge_forge.services.pool.pool import gather
from cartridge_forge.training.records import (
    GenerateCall,
    Rollout,
    ScoreGroup,
    StudyPrompt,
    as_sample,
    context_ref,
    no_scoring,
    with_likeliest,
    with_prefix,
    without_likeliest,
)

Written = tuple[StudyPrompt, Completion, Sample]

KINDS = ("verified", "plain", "teacher")
FIRST_BLOCK = 8  # of `block: auto`, before the teacher has told what its pass costs
PRIOR_ACCEPTED, PRIOR_JUDGED = 4, 5  # tokens that the running share of a group begins with
REPEATS = 3  # times that a block is verified again after its logits were lost


@dataclass
class VerifiedResponse:
    """Hold one response while it is written. `reads` are the teacher's passes over it
    (`VerifyRow`); `reason` is its finish reason, "" before the end. With
    `unread` its last token is the teacher's, and the student has not read it yet."""

    prompt: StudyPrompt
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    taught: list[int] = field(default_factory=list)
    likely: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)
    served: tuple[str, ...] = ()
    reason: str = ""
    unread: bool = False

    @property
    def most(self) -> int:
        """Return the largest number of tokens of the response."""
        return self.prompt.request.sampling.max_tokens

    def proposal(self, number: int, block: int, logits: str) -> GenerateRequest:
        """Return the request for the next block, or for the student's log-probability of the last
        token, where the response has ended."""
        request = self.prompt.request
        room = 1 if self.reason else min(block, self.most - len(self.tokens))
        return replace(
            request, id=f"{request.id}/block/{number}",
            prompt_ids=(*request.prompt_ids, *self.tokens),
            sampling=replace(request.sampling, max_tokens=room), first_draw=len(self.tokens),
            prompt_logprobs=self.unread, logits="" if self.reason else logits,
        )  # fmt: skip

    def row(self, block: tuple[int, ...] | None) -> VerifyRow:
        request = self.prompt.request
        return VerifyRow(
            self.prompt.contexts, (*request.prompt_ids, *self.tokens), len(self.tokens), block,
            request.seed, tuple(self.reads), len(request.prompt_ids) + self.most,
        )  # fmt: skip

    def read(self, completion: Completion) -> None:
        """Take the student's log-probability of the teacher's token, and what it holds likeliest in
        its place, from a completion after it."""
        self.served = completion.served
        if self.unread:
            self.logprobs.append(completion.prompt_logprobs[-1])
            self.versions.append(completion.versions[0])
            self.likely += completion.prompt_top_logprobs[-1:]
            self.unread = False

    def extend(
        self, completion: Completion, accepted: int, token: int | None, end_ids: frozenset[int]
    ) -> VerifiedCounts:
        """Take the first `accepted` tokens of a block and the teacher's token after them, which is
        dropped where the response ends before it; return the counts."""
        block = completion.token_ids
        self.tokens += block[:accepted]
        self.logprobs += completion.logprobs[:accepted]
        self.versions += completion.versions[:accepted]
        self.likely += completion.top_logprobs[:accepted]
        judged = min(accepted + 1, len(block))
        taught = 0
        if accepted == len(block) and completion.finish_reason == "stop":
            self.reason = "stop"
        elif token is not None and len(self.tokens) < self.most:
            self.taught.append(len(self.tokens))
            self.tokens.append(token)
            self.unread, taught = True, 1
            self.reason = "stop" if token in end_ids else ""
        if not self.reason and len(self.tokens) == self.most:
            self.reason = "length"
        return VerifiedCounts(len(block), judged, accepted, taught)

    def completion(self) -> Completion:
        return Completion(
            self.prompt.request.id, tuple(self.tokens), tuple(self.logprobs), tuple(self.versions),
            self.reason, top_logprobs=tuple(self.likely), served=self.served,
            taught=tuple(self.taught),
        )  # fmt: skip


class VerifiedSampling:
    """Sample a step's responses: each verified, by the student alone or by the teacher."""

    def __init__(self, spec: LearnSpec, mesh: Mesh, end_ids: frozenset[int]) -> None:
        self._verify, self._until = spec.rollout.verify, spec.rollout.until_refused
        single_kind = MixSpec(verified=1.0) if self._verify is not None else MixSpec(plain=1.0)
        self._mix = spec.train.mix or single_kind
        self._seed, self._chunk = spec.train.seed, spec.rollout.chunk
        self._mesh, self._end_ids = mesh, end_ids
        self._teacher = VerifyingTeacherClient(mesh.pools)

    def kinds(self, step: int, count: int) -> list[str]:
        """Return what writes each of a step's samples: the shares of `train.mix`, rounded by their
        largest remainders, in an order that the seed and the step decide."""
        wanted = [count * getattr(self._mix, kind) for kind in KINDS]
        counts = [int(share + 1e-9) for share in wanted]
        order = sorted(range(len(KINDS)), key=lambda k: counts[k] - wanted[k])
        for k in order[: count - sum(counts)]:
            counts[k] += 1
        kinds = [kind for kind, n in zip(KINDS, counts, strict=True) for _ in range(n)]
        random.Random(f"mix/{self._seed}/{step}").shuffle(kinds)
        return kinds

    async def rollout(
        self,
        step: int,
        prompts: Sequence[StudyPrompt],
        generate: GenerateCall,
        ended: ScoreGroup = no_scoring,
    ) -> Rollout:
        """Return the rollout of a step's prompts. `ended` gets each group of samples once it is
        complete."""
        kinds = self.kinds(step, len(prompts))
        groups = [[i for i, k in enumerate(kinds) if k == kind] for kind in KINDS]
        calls = zip((self._verified, self._plain, self._by_teacher), groups, strict=True)
        parts = await gather(
            call([prompts[i] for i in indices], generate, ended)
            for call, indices in calls
            if indices
        )
        rows_by_id: dict[str, tuple[StudyPrompt, Completion, Sample]] = {}
        counts = VerifiedCounts()
        for samples, part_counts in parts:
            rows_by_id |= {prompt.request.id: (prompt, c, s) for prompt, c, s in samples}
            counts += part_counts
        rows = [rows_by_id[p.request.id] for p in prompts]
        return Rollout(
            step, tuple(p for p, _, _ in rows), without_likeliest(c for _, c, _ in rows),
            [s for _, _, s in rows], verified=counts.facts,
        )  # fmt: skip

    @property
    def is_exact(self) -> bool:
        """Return whether verified text is distributed as the teacher's own."""
        return self._verify is not None and self._verify.rule == "exact"

    async def document_text(
        self, prompts: Sequence[StudyPrompt], generate: GenerateCall
    ) -> list[Completion]:
        """Return the answers that the documents' teacher writes, in its own distribution, to
        prompts whose prefixes propose."""

        async def group(members: Sequence[StudyPrompt]) -> list[Completion]:
            return (await self.responses(members, generate))[0]

        return await self._mesh.pools["generator"].split(prompts, group, self._chunk)

    async def _by_teacher(
        self, prompts: Sequence[StudyPrompt], generate: GenerateCall, ended: ScoreGroup
    ) -> tuple[list[Written], VerifiedCounts]:
        over_document = with_likeliest(
            [with_prefix(p, context_ref(p.contexts)) for p in prompts], 0
        )
        if self.is_exact:  # its cartridge drafts what the document writes
            completions = await self.document_text(with_likeliest(prompts, 0), generate)
        else:
            completions = await generate([p.request for p in over_document])
        rows = [
            (p, c, as_sample(p, c, offline=True))
            for p, c in zip(over_document, completions, strict=True)
        ]
        ended("doc_teacher", [s for _, _, s in rows])
        return rows, VerifiedCounts()

    async def _plain(
        self, prompts: Sequence[StudyPrompt], generate: GenerateCall, ended: ScoreGroup
    ) -> tuple[list[Written], VerifiedCounts]:
        completions = await generate([p.request for p in prompts])
        samples = [as_sample(p, c) for p, c in zip(prompts, completions, strict=True)]
        if self._until is not None:
            samples = await self._masked(prompts, samples, self._until)
        ended("doc_teacher", samples)
        return list(zip(prompts, completions, samples, strict=True)), VerifiedCounts()

    async def _masked(
        self, prompts: Sequence[StudyPrompt], samples: Sequence[Sample], below: float
    ) -> list[Sample]:
        """Return the samples without a loss behind the first token that the teacher refuses."""
        rows = tuple(
            VerifiedResponse(p).row(s.response_ids) for p, s in zip(prompts, samples, strict=True)
        )
        call = VerifyCall(
            f"{samples[0].id}/refused", "threshold", below, prompts[0].request.sampling, rows
        )
        reply = await self._teacher.verify(call)
        return [
            replace(s, masked=tuple(range(accepted + 1, len(s.response_ids))))
            for s, (accepted, _) in zip(samples, reply.verdicts, strict=True)
        ]

    async def _verified(
        self, prompts: Sequence[StudyPrompt], generate: GenerateCall, ended: ScoreGroup
    ) -> tuple[list[Written], VerifiedCounts]:
        total = VerifiedCounts()

        async def group(members: Sequence[StudyPrompt]) -> list[Written]:
            nonlocal total
            completions, counts = await self.responses(members, generate)
            total += counts
            samples = [
                replace(as_sample(p, c), verified=True)
                for p, c in zip(members, completions, strict=True)
            ]
            ended("doc_teacher", samples)
            return list(zip(members, completions, samples, strict=True))

        rows = await self._mesh.pools["generator"].split(prompts, group, self._chunk)
        return rows, total

    async def responses(
        self, prompts: Sequence[StudyPrompt], generate: GenerateCall
    ) -> tuple[list[Completion], VerifiedCounts]:
        """Return the verified responses to a group of prompts, and their counts. The spec must have
        rollout.verify."""
        assert self._verify is not None
        verify = self._verify
        responses = [VerifiedResponse(prompt) for prompt in prompts]
        counts, ratio, number, losses = VerifiedCounts(), 0.0, 0, 0
        while any(not r.reason or r.unread for r in responses):
            block = _block(verify, counts, ratio)
            life = self._mesh.plane_life
            try:
                proposals, verdicts, ratio = await self._propose(
                    responses, number, block, verify, generate, ratio
                )
            except PlaneError as error:  # the logits are lost, and the block is proposed again
                losses += 1
                try:
                    await self._mesh.replaced(life, error)
                except PlaneError:  # swept from a healthy plane, after a replica was lost
                    if losses == REPEATS:
                        raise
                continue
            for response, completion in proposals:
                live = not response.reason
                response.read(completion)
                if live:
                    response.reads.append(response.row(completion.token_ids).next_read)
                    accepted, token = next(verdicts)
                    counts += response.extend(completion, accepted, token, self._end_ids)
            number += 1
        return [r.completion() for r in responses], counts

    async def _propose(
        self,
        responses: Sequence[VerifiedResponse],
        number: int,
        block: int,
        verify: VerifiedRolloutSpec,
        generate: GenerateCall,
        ratio: float,
    ) -> tuple[list[tuple[VerifiedResponse, Completion]], Iterator[tuple[int, int | None]], float]:
        """Return what the student proposed, of each response that is not complete, the verdicts on
        the blocks among these, and the cost of a verification. Changes nothing: it can be called
        again."""
        first = responses[0].prompt.request
        stem = f"proposals/{first.id}" if verify.rule == "exact" else ""
        unfinished = [r for r in responses if not r.reason or r.unread]
        completions = await generate(
            [r.proposal(number, block, stem) for r in unfinished], whole=True
        )
        proposals = list(zip(unfinished, completions, strict=True))
        blocks = {id(r): c.token_ids for r, c in proposals if not r.reason}
        if not blocks:
            return proposals, iter(()), ratio
        packet = next((c.logits for c in completions if c.logits is not None), None)
        call = VerifyCall(
            first.id, verify.rule, verify.below, first.sampling,
            tuple(r.row(blocks.get(id(r))) for r in responses), packet,
        )  # fmt: skip
        reply = await self._teacher.verify(call)
        if packet is not None and self._mesh.plane is not None:
            with contextlib.suppress(PlaneError):  # it went with its plane
                await self._mesh.plane.delete(packet.key)
        return proposals, iter(reply.verdicts), reply.ratio


async def offline_text(
    sampling: VerifiedSampling | None, prompts: Sequence[StudyPrompt], generate: GenerateCall
) -> list[Completion]:
    """Return the documents' answers to prompts over them: by the generators, or with the rule
    `exact` by its machinery. The model without a document then proposes. It is no worse a writer
    for that, and unlike a cartridge it is there, with the same numbers, when a run is resumed."""
    if sampling is None or not sampling.is_exact:
        return await generate([p.request for p in prompts])
    return await sampling.document_text([with_prefix(p, BARE) for p in prompts], generate)


def trained_marks(samples: Sequence[Sample]) -> tuple[tuple[bool, ...], ...] | None:
    """Return for each sample which of its tokens carry a loss; None where all do."""
    if not any(s.masked for s in samples):
        return None
    return tuple(tuple(t not in s.masked for t in range(len(s.response_ids))) for s in samples)


def _block(verify: VerifiedRolloutSpec, counts: VerifiedCounts, ratio: float) -> int:
    """Return how many tokens the student proposes next."""
    if verify.block != "auto":
        return verify.block
    if not ratio:
        return FIRST_BLOCK
    share = (counts.accepted + PRIOR_ACCEPTED) / (counts.judged + PRIOR_JUDGED)
    return best_block(share, ratio, verify.rule == "exact")


def opened(spec: LearnSpec, mesh: Mesh, end_ids: frozenset[int]) -> VerifiedSampling | None:
    """Return the sampling of a spec with verified rollouts, a mixture or masks; None for the
    student alone."""
    rollout = spec.rollout
    if rollout.verify is None and rollout.until_refused is None and spec.train.mix is None:
        return None
    return VerifiedSampling(spec, mesh, end_ids)
