"""Define the frozen records that cross rooms: ids and numbers, with a worked example each.

Tensors never travel in these; they go through the tensor plane (`protocols.ports.TensorPlane`) and
the records carry the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.grammar import ResponseGrammar

CARTRIDGE = "cartridge/"  # the names of prefixes that are trained cartridges begin with it
PUBLISHED = "cartridges/"  # the keys of published cartridges begin with it
OFFLINE_VERSION = -1  # the version of tokens that a document teacher wrote
NO_DOCUMENT = "none"  # the name of the context without a document
SEPARATOR = "\n"  # between the names of several prefixes; in no document's name


@dataclass(frozen=True, order=True)
class PrefixRef:
    """Name the KV prefix before a prompt.

    `PrefixRef("cartridge/patient_01", 7)` is version 7 of a trained cartridge,
    `PrefixRef("document/patient_01", 0)` the frozen KV of a context, a document or a chunk of it,
    `PrefixRef("document/a\\nb", 0)` that of two contexts read as one text,
    `PrefixRef("document/none", 0)` the bare beginning-of-sequence token, and
    `PrefixRef("document/", 0)` no token at all.

    `PrefixRef("cartridge/a", 7, (PrefixRef("cartridge/b", 7),))` is the ordered composition [a, b]:
    b's keys are moved behind a's, and a prompt begins behind both. Its tokens carry the version of
    the first; all cartridges of a run have one version.
    """

    name: str
    version: int
    then: tuple[PrefixRef, ...] = ()

    @property
    def parts(self) -> tuple[PrefixRef, ...]:
        """Return the composed prefixes, in order; a single prefix returns itself alone."""
        return (PrefixRef(self.name, self.version), *self.then)


BARE = PrefixRef(f"document/{NO_DOCUMENT}", 0)
"""No document before the tokens."""


def composed_ref(parts: Sequence[PrefixRef]) -> PrefixRef:
    """Return the composition of single prefixes, at least one, in this order."""
    first, *others = parts
    return PrefixRef(first.name, first.version, tuple(others))


@dataclass(frozen=True)
class Sampling:
    """Set how tokens are drawn. Temperature 0 is greedy; top_p 1 and top_k 0 truncate nothing.

    Training samples at temperature 1 untruncated, so that the recorded log-probabilities are the
    policy's own and importance ratios need no correction.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64


@dataclass(frozen=True)
class StopCondition:
    """Describe where a response ends before its end token; checked after every token.

    `StopCondition(strings=("\\n\\n",), patterns=(r"answer:.*\\n",), after=4)` ends with the token
    that completes one of the strings, or a match of one of the regular expressions, in the text so
    far, once there are `after` tokens. That token belongs to the response, so that text and ids
    agree. With `before` the response ends before the match instead: the first token that is part of
    it, and all behind, are dropped.

    `window` and `floor` stop a trace of low confidence (DeepConf, Fu et al. 2025): it ends with the
    first `window` tokens whose mean confidence, -mean of the top `top` log-probabilities, is below
    `floor`. Window 0 disables this.
    """

    strings: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    after: int = 1
    before: bool = False
    window: int = 0
    floor: float = 0.0
    top: int = 20


@dataclass(frozen=True)
class GenerateRequest:
    """Request one completion of a prompt. Token ids in: text is never re-tokenised on the way.

    `GenerateRequest("on_policy/3/0", (4, 91, 2, 5), PrefixRef("cartridge/p1", 3), Sampling(), 17)`

    Position ids of the prompt start where the prefix ends. The same `seed` gives the same tokens
    whatever else is in the batch. `prompt_logprobs` requests the prompt's log-probabilities too,
    `top_logprobs` that many of the likeliest tokens at every position. A response that continues
    over several requests draws as in one if each sets `first_draw`, the number of tokens sampled
    before. The response matches `grammar`, where there is one: no other token is drawn. Without
    `logprobs` the response's tokens come without their log-probabilities, unless `top_logprobs` or
    the confidence of `until` reads these.
    """

    id: str
    prompt_ids: tuple[int, ...]
    prefix: PrefixRef
    sampling: Sampling
    seed: int
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    until: StopCondition | None = None
    first_draw: int = 0
    grammar: ResponseGrammar | None = None
    logprobs: bool = True


@dataclass(frozen=True)
class Completion:
    """Hold the response to one request: per token its id, log-probability and cartridge version.

    `finish_reason` is "stop" (the end token is the last of `token_ids`), "length", "until" (then
    `ended_by` is the string or pattern that matched, or "confidence"), "grammar" (which became too
    costly to follow, as `ended_by` says), "cancelled", or "error": then there are no tokens and
    `error` says why this request, and no other, was refused. `logprobs[t]` is the natural log of
    the probability under the distribution the token was drawn from at temperature 1, before
    truncation and before a grammar. `prompt_logprobs[t]`, if requested, is that of
    `prompt_ids[t + 1]`: the first prompt token follows a cartridge, which predicts nothing;
    `prompt_likeliest[t]` is the likeliest token there. `top_logprobs[t]` are (token id,
    log-probability) pairs, likeliest first, `prompt_top_logprobs[t]` those at the place of
    `prompt_logprobs[t]`. `dropped` counts sampled tokens that are left out
    because the response ended before them. `served` are the fingerprints
    (`learning.cartridge`) of the cartridges in memory that the prefix's parts were read
    from, "" for a document.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str
    prompt_logprobs: tuple[float, ...] = ()
    error: str = ""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    ended_by: str = ""
    dropped: int = 0
    prompt_likeliest: tuple[int, ...] = ()
    served: tuple[str, ...] = ()
    prompt_top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class TokenChunk:
    """Carry tokens of a response in progress, from index `first` on, as in `Completion`.

    With `StopCondition(before=True)` the response may end before tokens that were already sent.
    """

    request_id: str
    first: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()

    def followed_by(self, later: TokenChunk) -> TokenChunk:
        """Return this chunk and the one behind it as one."""
        return TokenChunk(
            self.request_id,
            self.first,
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            self.top_logprobs + later.top_logprobs,
        )


@dataclass(frozen=True)
class TokenPort:
    """Name a Monarch port that gets lists of `TokenChunk`. What a replica has for the requests of
    one `key` goes there together."""

    key: str
    port: Any


def refused(request: GenerateRequest, why: str) -> Completion:
    """Return the completion of a request that could not be served: no tokens, and the reason."""
    return Completion(request.id, (), (), (), "error", error=why)


@dataclass(frozen=True)
class Sample:
    """Hold a prompt with the response to be scored and trained on.

    `cartridge` names the cartridge that learns: "patient_01". `contexts` names the documents or
    chunks that the document teacher reads before the prompt, in order: ("patient_01",); () for a
    sample that it does not read. `prompt` is the prompt's id, the same each time that it is asked.
    `sampler_logprobs` and `versions` are the sampler's own record, one per response token; for a
    response that the document teacher wrote (offline), versions are -1. `composed` are the
    cartridges before the prompt, in order, where there were more than `cartridge`:
    ("patient_02", "patient_01").
    """

    id: str
    cartridge: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    composed: tuple[str, ...] = ()
    contexts: tuple[str, ...] = ()
    prompt: str = ""


@dataclass(frozen=True)
class TensorLayout:
    """List names, shapes and dtypes of the tensors inside one packed buffer, in order.

    `TensorLayout((("indices", (120, 20), "int32"), ("logprobs", (120, 20), "float32")))`
    """

    entries: tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass(frozen=True)
class TensorRef:
    """Refer to a packed buffer in the tensor plane, with the layout to read it."""

    key: str
    layout: TensorLayout


@dataclass(frozen=True)
class PublishedCartridge:
    """Refer to the numbers that cartridge `name` has since the version `since`.

    They are the tensor `name` [L, 2, H_kv, P, D] of `packet`, with post-RoPE keys at positions
    0..P-1. `fingerprint` is the trainer's own of them (`learning.cartridge`).
    """

    name: str
    since: int
    packet: TensorRef
    fingerprint: str = ""


@dataclass(frozen=True)
class CartridgeSnapshot:
    """Refer to one published version of every cartridge of a run.

    A cartridge that a step left unchanged keeps the `since` and the packet of the version before.
    `hinted` holds the cartridges that read hints in their place, () where these do.
    """

    version: int
    cartridges: tuple[PublishedCartridge, ...]
    hinted: tuple[PublishedCartridge, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(cartridge.name for cartridge in self.cartridges)

    @property
    def packets(self) -> dict[str, TensorRef]:
        """Return the references to all its packets, by key."""
        return {c.packet.key: c.packet for c in (*self.cartridges, *self.hinted)}


@dataclass(frozen=True)
class TimedReply:
    """Carry the seconds that an actor worked for a call: its model, environment or rewards."""

    compute_seconds: float


@dataclass(frozen=True)
class GenerateOutput(TimedReply):
    """Carry a generator's reply: completions in the order of the requests."""

    completions: tuple[Completion, ...] = ()


@dataclass(frozen=True)
class EngineReport:
    """Report an engine's times in seconds, and how often it loaded cartridges.

    `start_seconds` is the time to start it, `first_token_seconds` from the first request to its
    first token (None before), `stop_seconds` of the shutdown (None while it runs). A *load* writes
    `loaded_tokens` of one cartridge version into the paged memory of one request; requests that
    share the filled blocks need none.
    """

    start_seconds: float
    first_token_seconds: float | None
    loads: int
    loaded_tokens: int
    stop_seconds: float | None = None


@dataclass(frozen=True)
class CacheStats:
    """Count look-ups of document KV by a teacher: found on the device, copied from host memory, or
    computed from the document. `evictions` made room on the device.

    `CacheStats(hits=14, host_hits=2, misses=0, evictions=2)`
    """

    hits: int = 0
    host_hits: int = 0
    misses: int = 0
    evictions: int = 0

    def __add__(self, other: CacheStats) -> CacheStats:
        return CacheStats(
            self.hits + other.hits,
            self.host_hits + other.host_hits,
            self.misses + other.misses,
            self.evictions + other.evictions,
        )

    def since(self, before: CacheStats) -> CacheStats:
        """Return the counts added after `before`, an earlier state of the same counts."""
        return CacheStats(
            self.hits - before.hits,
            self.host_hits - before.host_hits,
            self.misses - before.misses,
            self.evictions - before.evictions,
        )


@dataclass(frozen=True)
class ScoreOutput(TimedReply):
    """Carry a teacher's reply: its distributions over every response token, in sample order.

    The packet holds "indices" [N, k] int32 and "logprobs" [N, k] float32 (the teacher's top k at
    each of the N response tokens, most likely first), or "logits" [N, V] float32. `documents` are
    the document KV look-ups that scoring took. `served` maps the cartridges that were read to their
    fingerprints, as in `Completion`.
    """

    packet: TensorRef = field(default_factory=lambda: TensorRef("", TensorLayout(())))
    tokens: int = 0
    documents: CacheStats = field(default_factory=CacheStats)
    served: Mapping[str, str] = field(default_factory=dict)


class SampleScores(TypedDict):
    """Hold the scores of the response tokens of one sample, as text
    (`protocols.records.token_scores`)."""

    kl: str
    top: str


@dataclass(frozen=True)
class TrainStepOutput(TimedReply):
    """Carry the result of one optimiser step. `version` is the version that the step produced.

    `kl` is the mean doc_kl per trained token, `grad_norm` that before clipping. `tokens` carried a
    loss; `stale_tokens` of the sampled ones were of an older version than the one trained. `terms`
    holds for each channel with a weight its value, count (denominator), weight, its facts (means
    over tokens or pairs, and shares) and, where gradients were compared, its own grad_norm: of the
    value, not of the weighted value.

        {"grpo": {"value": -0.02, "count": 512, "weight": 1.0, "ratio": 1.0, "excluded": 2}}

    `cosines` is between channels' gradients: {"doc_kl/grpo": 0.31}. `sampler_gap` compares the
    sampler with the trainer (`learning.step`): {"mean": 1e-6, "signed": 2e-8, "max": 9e-6,
    "tokens": 512}; empty where no token of the trained version was. `cartridges` holds the updates
    of the cartridges that had a loss: {"patient_01": {"lr": 0.02, "grad_norm": 0.3, "step": 12,
    "tokens": 212}}, with `step` the number of the cartridge's own step. `lr` is the largest of
    theirs, and `grad_norm` that of all of them together. `token_scores` is doc_kl at every token of
    a sample and the teacher's likeliest tokens there, by its id
    (`protocols.records.token_scores`), empty where it is not asked for or was
    lost with a trainer. `published` is in the plane already, where that was asked for.
    """

    version: int = 0
    kl: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    tokens: int = 0
    stale_tokens: int = 0
    terms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cosines: Mapping[str, float] = field(default_factory=dict)
    sampler_gap: Mapping[str, float] = field(default_factory=dict)
    cartridges: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    token_scores: Mapping[str, SampleScores] = field(default_factory=dict)
    published: CartridgeSnapshot | None = None


class TraceSpan(NamedTuple):
    """Record one time span of a run, for the trace and latencies. Seconds since the epoch. One is
    made for each request; a tuple is the fastest to make.

    `TraceSpan("generator[1]", "generate", 1785060942.10, 1785060942.24, {"request": "generator/17",
    "step": 12, "version": 11, "waited": 0.003, "attempt": 1, "outcome": "ok"})` is a request as its
    replica served it; `waited` is how long it had no replica. `lane` is the row of the trace: the
    replica's name or, for a phase of the run, "controller" with the phase as `name` ("score") and
    the facts "arm", "step" and "version".
    """

    lane: str
    name: str
    begin: float
    end: float
    facts: Mapping[str, str | int | float]


def require_ids(ids: Sequence[int], vocabulary: int, place: str) -> None:
    """Raise DataError for an id that a model of `vocabulary` embeddings does not have: they raise
    for an unknown one, on a GPU for good. `place` says what the ids are of: "the prompt of request
    r1"."""
    if not ids or (min(ids) >= 0 and max(ids) < vocabulary):
        return
    at, wrong = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocabulary)
    raise DataError(
        f"{place} has the token id {wrong} at {at}, and the model has ids from 0 to "
        f"{vocabulary - 1}; tokenise with the tokenizer that belongs to the model, and leave the "
        "text of tokens out that it has beyond the model's"
    )
