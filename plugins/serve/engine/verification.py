"""Verify answers by the document that a cartridge replaces.

after   the cartridge answers; one pass over the document's cached KV scores the answer
exact   the cartridge proposes, the document verifies: the answer is the document's
auto    the document's answer, by a draft where `verification_cost` says that it pays

entry -> DocumentTexts -> ServedDocument (token ids)
after: completion -> scoring request -> its completion -> CheckedChoice
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cartridge_forge.plugins.chat.wire.errors import bad_request
from cartridge_forge.plugins.chat.wire.openai_chat import (
    ChangedToken,
    CheckedChoice,
    DraftInfo,
    VerifyInfo,
)
from cartridge_forge.plugins.decoding.stopping import TokenText
from cartridge_forge.plugins.decoding.verified.cost import DraftGain, ServedLoad
from cartridge_forge.plugins.library.store import CartridgeVersion
from cartridge_forge.plugins.serve.backend import ServerConfig
from cartridge_forge.plugins.serve.engine.run_documents import document_of_source
from cartridge_forge.plugins.serve.request import ServingRequest, chat_date
from cartridge_forge.plugins.serve.tokenization import Tokenization
from cartridge_forge.plugins.strategies.samplers.sampler import SampleRequest, SampleResult
from cartridge_forge.plugins.strategies.samplers.token_sampler import TokenSampler
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import (
    Completion,
    Draft,
    GenerateRequest,
    PrefixRef,
    Sampling,
)

VERIFY_HEADER = "x-forge-verify"
EXACT_BLOCK = 4  # tokens proposed at a time where nothing is known of the machine
DOCUMENTS = 64  # whose token ids are kept
PRIOR, PRIOR_TOKENS = 0.7, 32.0  # the share accepted of a cartridge that has verified nothing yet
REMEMBERED_TOKENS = 2048.0  # later ones count as much as all before


def document_ref(token_ids: Sequence[int]) -> PrefixRef:
    """Return the prefix of a document by its tokens, for a request that carries them."""
    digest = hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()
    return PrefixRef(f"document/sha256-{digest[:32]}", 0)


@dataclass(frozen=True)
class ServedDocument:
    """Hold a document as the model reads it: its ids from position 0, and its prefix."""

    ids: tuple[int, ...]
    ref: PrefixRef


class DocumentTexts:
    """Find the documents of cartridges. Any thread may call it."""

    def __init__(self, texts: Tokenization) -> None:
        self._texts = texts
        self._kept: OrderedDict[tuple[str, int, int], ServedDocument] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, entry: CartridgeVersion) -> ServedDocument:
        """Return the document of a stored cartridge: its text in the store, else that of the run
        that made it. Raises DataError, with the remedy, where there is neither."""
        stored = entry.document.stat().st_mtime_ns if entry.document.is_file() else 0
        key = (*entry.key, stored)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._read(entry)
                while len(self._kept) > DOCUMENTS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]

    def _read(self, entry: CartridgeVersion) -> ServedDocument:
        text, name = stored_text(entry), entry.manifest.name
        ids = self._texts.renderer(chat_date([entry])).over({name: text}).head(name)
        return ServedDocument(ids, document_ref(ids))


def stored_text(entry: CartridgeVersion) -> str:
    """Return the text of a stored cartridge: that in the store, else that of the run that made it.
    Raises DataError, with the remedy, where there is neither."""
    label = "{}@{}".format(*entry.key)
    try:
        if entry.document.is_file():
            return entry.document.read_text(encoding="utf-8")
        return document_of_source(entry.manifest.source, label, entry.path.parents[2])
    except (DataError, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the document of {label} is not known here: {error}; give its text (forge cartridges "
            f"document {label} FILE), or leave verify and passages out"
        ) from error


class AcceptedShares:
    """Estimate the share of proposed tokens that each cartridge's document accepts."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], tuple[float, float]] = {}

    def get(self, key: tuple[str, int]) -> float:
        accepted, tokens = self._counts.get(key, (0.0, 0.0))
        return (accepted + PRIOR * PRIOR_TOKENS) / (tokens + PRIOR_TOKENS)

    def add(self, key: tuple[str, int], accepted: int, tokens: int) -> None:
        """Count verified tokens; those of long ago count less."""
        sums = self._counts.get(key, (0.0, 0.0))
        weight = min(1.0, REMEMBERED_TOKENS / sums[1]) if sums[1] else 1.0
        self._counts[key] = (sums[0] * weight + accepted, sums[1] * weight + tokens)


def scoring_request(
    request: GenerateRequest, response_ids: Sequence[int], document: ServedDocument
) -> GenerateRequest:
    """Return the request that reads a response over its document in one pass."""
    return GenerateRequest(
        id=f"{request.id}/after", prompt_ids=(*request.prompt_ids, *response_ids),
        prefix=document.ref, sampling=Sampling(temperature=0.0, max_tokens=1), seed=0,
        prompt_logprobs=True, top_logprobs=1, logprobs=False, document_ids=document.ids,
    )  # fmt: skip


async def verified_answer(
    sampler: TokenSampler, ask: SampleRequest, document: ServedDocument, exact: bool, below: float
) -> tuple[SampleResult, VerifyInfo]:
    """Return a cartridge's answer with its document's word on it, or with `exact` the document's
    own answer, which the cartridge drafts. Raises as the sampler does."""
    call, tokens = sampler.request(ask), len(document.ids)
    if exact:
        call = replace(
            call, prefix=document.ref, document_ids=document.ids,
            draft=Draft(call.prefix, EXACT_BLOCK),
        )  # fmt: skip
    (completion,) = await sampler.generate([call])
    result = sampler.answer(call, completion)
    if exact:
        draft = DraftInfo(
            block=EXACT_BLOCK, proposed=completion.proposed, accepted=completion.accepted,
            verifications=completion.verifications,
        )  # fmt: skip
        return result, VerifyInfo(mode="exact", document_tokens=tokens, draft=draft)
    scored = completion
    if completion.token_ids:
        scoring = scoring_request(call, completion.token_ids, document)
        (scored,) = await sampler.generate([scoring])
        sampler.answer(scoring, scored)  # raises where it was refused
    decode = sampler.conversation.decode
    choice = checked(0, completion.token_ids, scored, below, decode, lambda id: decode((id,)))
    return result, VerifyInfo(mode="after", document_tokens=tokens, below=below, choices=[choice])


def checked(
    index: int,
    response_ids: Sequence[int],
    scored: Completion,
    below: float,
    decode: Callable[[Sequence[int]], str],
    token: Callable[[int], str],
) -> CheckedChoice:
    """Return the document's word on a response, from the completion of its `scoring_request`.
    `token` returns the text of one token."""
    count = len(response_ids)
    if not count:
        return CheckedChoice(
            index=index, tokens=0, accepted=None, agreed=None, first_refused=None, changed=[]
        )
    logprobs = scored.prompt_logprobs[-count:]
    best = [at[0] for at in scored.prompt_top_logprobs[-count:]]
    text, changed = TokenText(decode), list[ChangedToken]()
    refused_places: list[int] = []
    agreed = 0
    for number, (id, logprob, (other, other_logprob)) in enumerate(
        zip(response_ids, logprobs, best, strict=True)
    ):
        offset = len(text.text)
        text.add(id)
        refused = math.exp(logprob) < below
        agreed += id == other
        if refused:
            refused_places.append(number)
        if refused or id != other:
            changed.append(ChangedToken(
                index=number, offset=offset, token=token(id), probability=math.exp(logprob),
                document_token=token(other), document_probability=math.exp(other_logprob),
                refused=refused,
            ))  # fmt: skip
    return CheckedChoice(
        index=index, tokens=count, accepted=(count - len(refused_places)) / count,
        agreed=agreed / count,
        first_refused=refused_places[0] if refused_places else None, changed=changed,
    )  # fmt: skip


@dataclass(frozen=True)
class VerifyPlan:
    """Tell how a document verifies one request. With mode "document" it writes the answer alone."""

    mode: Literal["after", "exact", "document"]
    cartridge: tuple[str, int]
    document: ServedDocument
    draft: Draft | None = None


class AnswerVerifier:
    """Plan the verification of requests, and tell of it in their replies."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._documents = DocumentTexts(config.texts)
        self._shares = AcceptedShares()

    def plan(self, request: ServingRequest, cartridge: PrefixRef, pending: int) -> VerifyPlan:
        """Return how a request is verified, where so many sequences are pending. Raises DataError
        where the document is not known, ApiError where it leaves no room. It may read and tokenise
        the document: call it in a thread."""
        (entry,) = request.entries
        document, limits = self._documents.get(entry), self._config.limits
        read = len(document.ids) + max(p.counted for p in request.prompts)
        wanted = request.sampling.max_tokens
        if read + wanted > limits.context:
            raise bad_request(
                f"the document and the prompt take {read} of the model's {limits.context} "
                f"positions, and max_tokens asks for {wanted}; lower max_tokens, or leave verify "
                "out",
                "forge.verify",
                "context_length_exceeded",
            )
        if request.verify == "after":
            return VerifyPlan("after", entry.key, document)
        gain = self._gain(request, document, max(1, pending))
        if request.verify == "auto" and (gain is None or not gain.pays or not self._config.drafts):
            return VerifyPlan("document", entry.key, document)
        draft = Draft(cartridge, EXACT_BLOCK if gain is None else gain.block)
        return VerifyPlan("exact", entry.key, document, draft)

    def _gain(
        self, request: ServingRequest, document: ServedDocument, rows: int
    ) -> DraftGain | None:
        """Return what a draft gains beside the other pending sequences: each counts as over a
        document of its own, the responses of this request over one."""
        if self._config.draft_gain is None:
            return None
        (entry,) = request.entries
        load = ServedLoad(
            rows=rows, documents=max(1, rows - request.responses + 1), document=len(document.ids),
            cartridge=request.cartridge_tokens,
            row_tokens=max(p.counted for p in request.prompts) + request.sampling.max_tokens // 2,
        )  # fmt: skip
        return self._config.draft_gain(load, self._shares.get(entry.key))

    def info(
        self, plan: VerifyPlan, completions: Sequence[Completion], scored: Sequence[Completion]
    ) -> VerifyInfo:
        """Return what a reply tells of its verification; `scored` are the completions of the
        scoring requests of all responses with a token."""
        tokens = len(plan.document.ids)
        if plan.mode == "document":
            return VerifyInfo(mode="document", document_tokens=tokens)
        if plan.draft is not None:
            counts = DraftInfo(
                block=plan.draft.block, proposed=sum(c.proposed for c in completions),
                accepted=sum(c.accepted for c in completions),
                verifications=sum(c.verifications for c in completions),
            )  # fmt: skip
            # What is behind a refused token was not judged.
            judged = sum(len(c.token_ids) for c in completions)
            self._shares.add(plan.cartridge, min(counts.accepted, judged), judged)
            return VerifyInfo(mode="exact", document_tokens=tokens, draft=counts)
        texts, below, scores = self._config.texts, self._config.verify.below, iter(scored)
        choices = [
            checked(
                index, completion.token_ids, next(scores) if completion.token_ids else completion,
                below, texts.decode, lambda id: texts.token(id)[0],
            )
            for index, completion in enumerate(completions)
        ]  # fmt: skip
        for choice in choices:
            agreed = round((choice.agreed or 0.0) * choice.tokens)
            self._shares.add(plan.cartridge, agreed, choice.tokens)
        return VerifyInfo(mode="after", document_tokens=tokens, below=below, choices=choices)


def header_of(plan: VerifyPlan, info: VerifyInfo | None) -> str:
    """Return the value of VERIFY_HEADER: `after; below=0.05; tokens=64; accepted=0.953;
    agreed=0.906` over all choices of a whole reply, the mode alone before it is known."""
    if info is None:
        return plan.mode
    if info.draft is not None:
        draft = info.draft
        return f"exact; proposed={draft.proposed}; accepted={draft.accepted}"
    choices = info.choices or ()
    tokens = sum(choice.tokens for choice in choices)
    if info.mode == "document" or not tokens:
        return info.mode
    accepted = sum((choice.accepted or 0.0) * choice.tokens for choice in choices) / tokens
    agreed = sum((choice.agreed or 0.0) * choice.tokens for choice in choices) / tokens
    return (
        f"after; below={info.below:g}; tokens={tokens}; accepted={accepted:.3f}; "
        f"agreed={agreed:.3f}"
    )
