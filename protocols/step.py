"""Define the records of a step that cross rooms: ids and numbers, with a worked example each.

    GenerateRequest -> Completion -> Sample -> TrainBatch -> TrainStepOutput, CartridgeSnapshot

Records hold token ids only: text is never re-tokenised on the way. Tensors never travel in these;
they go through the tensor plane (`protocols.ports.TensorPlane`), and the records carry the key.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict
from urllib.parse import quote

from cartridge_forge.protocols.errors import DataError, PlaneError
from cartridge_forge.protocols.response_rules import LogitRules, ResponseGrammar
from cartridge_forge.protocols.spec.mesh import HINTED_TEACHER

CARTRIDGE = "cartridge/"  # the names of prefixes that are trained cartridges begin with it
PUBLISHED = "cartridges/"  # the keys of published cartridges begin with it
OFFLINE_VERSION = -1  # the version of tokens that a document teacher wrote
NO_DOCUMENT = "none"  # the name of the context without a document
# The length of a file name (255 bytes) less a suffix: the smallest limit of the transports.
MAX_KEY_BYTES = 240
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
    first, *later = parts
    return PrefixRef(first.name, first.version, tuple(later))


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
class Draft:
    """Propose the tokens of a response over `prefix`, a cartridge, `block` at a time. The model
    over the request's own prefix verifies each block in one forward pass, so that the response is
    distributed as without a draft (`plugins.decoding.verified.decode`)."""

    prefix: PrefixRef
    block: int


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
    the confidence of `until` reads these. With `logits` the generator puts the logits that the
    tokens were drawn from into the tensor plane, under a key of that stem (`Completion.logits`).
    `document_ids` are the tokens of the document that `prefix` names, where the generator was not
    started with it. `draft` proposes the tokens. `rules` change the logits that
    tokens are drawn from. The first of `stop_ids` ends the response, as an end token does.
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
    logits: str = ""
    document_ids: tuple[int, ...] = ()
    draft: Draft | None = None
    rules: LogitRules | None = None
    stop_ids: tuple[int, ...] = ()


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
    from, "" for a document. `logits`, if requested, refers to the tensor "logits" [n, V] of the
    tokens of all requests of the call that asked for them, in order. `taught` are the indices of
    the tokens that the document teacher drew in a verified rollout: their log-probabilities and
    versions are those of the student that read them. `proposed` counts the tokens of a draft that
    were verified, `accepted` those that stayed, `verifications` the forward passes.
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
    logits: TensorRef | None = None
    taught: tuple[int, ...] = ()
    proposed: int = 0
    accepted: int = 0
    verifications: int = 0


@dataclass(frozen=True)
class Sample:
    """Hold a prompt with the response to be scored and trained on.

    `cartridge` names the cartridge that learns: "patient_01". `contexts` names the documents or
    chunks that the document teacher reads before the prompt, in order: ("patient_01",); () for a
    sample that it does not read. `prompt` is the prompt's id, the same each time that it is asked.
    `sampler_logprobs` and `versions` are the sampler's own record, one per response token; for a
    response that the document teacher wrote (offline), versions are -1. `composed` are the
    cartridges before the prompt, in order, where there were more than `cartridge`:
    ("patient_02", "patient_01"). `taught` are the indices of the tokens that the teacher drew in a
    verified rollout, as in `Completion`; `verified` says that it is of one. Those of the indices
    `masked` carry no loss. `likely` are the student's likeliest tokens at each response token, for
    which the document teacher tells its log-probabilities too, () where it need not.
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
    taught: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()
    verified: bool = False
    likely: tuple[tuple[int, ...], ...] = ()


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

    def since(self, earlier: CacheStats) -> CacheStats:
        """Return the counts added after `before`, an earlier state of the same counts."""
        return CacheStats(
            self.hits - earlier.hits,
            self.host_hits - earlier.host_hits,
            self.misses - earlier.misses,
            self.evictions - earlier.evictions,
        )


@dataclass(frozen=True)
class ScoreOutput(TimedReply):
    """Carry a teacher's reply: its distributions over every response token, in sample order.

    The packet holds "indices" [N, k] int32 and "logprobs" [N, k] float32 (the teacher's top k at
    each of the N response tokens, with the student's where it tells these too, most likely first),
    or "logits" [N, V] float32. `documents` are
    the document KV look-ups that scoring took. `served` maps the cartridges that were read to their
    fingerprints, as in `Completion`.
    """

    packet: TensorRef = field(default_factory=lambda: TensorRef("", TensorLayout(())))
    tokens: int = 0
    documents: CacheStats = field(default_factory=CacheStats)
    served: Mapping[str, str] = field(default_factory=dict)


class SampleScores(TypedDict):
    """Hold the scores of the response tokens of one sample, as text
    (`protocols.records.answers`)."""

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
    (`protocols.records.answers`), empty where it is not asked for or was
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


def require_ids(ids: Sequence[int], vocabulary: int, source: str) -> None:
    """Raise DataError for an id that a model of `vocabulary` embeddings does not have: they raise
    for an unknown one, on a GPU for good. `place` says what the ids are of: "the prompt of request
    r1"."""
    if not ids or (min(ids) >= 0 and max(ids) < vocabulary):
        return
    at, wrong = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocabulary)
    raise DataError(
        f"{source} has the token id {wrong} at {at}, and the model has ids from 0 to "
        f"{vocabulary - 1}; tokenise with the tokenizer that belongs to the model, and leave the "
        "text of tokens out that it has beyond the model's"
    )


@dataclass(frozen=True)
class PolicySample:
    """Hold an episode as GRPO trains it: prompt, response, and reward.

    Two turns with a tool's answer (ids 40, 41) between them, the second of five in its group:

        PolicySample(
            sample=Sample("desk/3/1", "patient_01", prompt_ids=(4, 91, 2), response_ids=(
                7, 8, 40, 41, 9), sampler_logprobs=(-0.1, -0.7, 0.0, 0.0, -0.2),
                versions=(3, 3, -1, -1, 3)),
            trained=(True, True, False, False, True),
            sampling=Sampling(),
            group="desk/3",
            reward=1.0,
        )

    `trained[t]` says whether the student sampled response token t. A tool's answer is read, not
    trained on, and has log-probability 0 and version -1. Rewards are compared within `group`: the
    episodes of one task. An episode that could not be judged has reward None and its cause in
    `error_kind` ("environment_died"): it is left out and counted, never trained on as a 0.
    `longest_turn` is the number of tokens of the whole episode's longest turn, `truncated` whether
    the limit `sampling.max_tokens` cut one of its turns.
    """

    sample: Sample
    trained: tuple[bool, ...]
    sampling: Sampling
    group: str
    reward: float | None
    error_kind: str = ""
    longest_turn: int = 0
    truncated: bool = False

    def __post_init__(self) -> None:
        s = self.sample
        if not len(s.response_ids) == len(self.trained) == len(s.sampler_logprobs):
            raise DataError(
                f"RL sample {s.id} has {len(s.response_ids)} response tokens, "
                f"{len(self.trained)} trained marks and {len(s.sampler_logprobs)} sampler "
                "log-probabilities; give one of each for every token, 0.0 where a tool wrote it"
            )
        if (self.reward is None) != bool(self.error_kind):
            raise DataError(
                f"RL sample {s.id} has reward {self.reward} and error_kind {self.error_kind!r}: "
                "an episode has a reward, or None and the kind of error that cost it"
            )
        if self.reward is not None and not math.isfinite(self.reward):
            raise DataError(
                f"RL sample {s.id} has reward {self.reward}; use None and an error_kind for an "
                "episode that could not be judged"
            )
        unsampled = [
            t for t, (is_trained, v) in enumerate(zip(self.trained, s.versions, strict=False))
            if is_trained and v < 0
        ]  # fmt: skip
        if unsampled:
            raise DataError(
                f"RL sample {s.id} trains on tokens {unsampled} of its response, which no version "
                "sampled; mark them as not trained"
            )


@dataclass(frozen=True)
class HintedTurn:
    """Mark one turn that failed, to be read again under a hint.

        HintedTurn("desk/3/1", start=0, stop=2, context_ids=(4, 91, 60, 61, 62, 2))

    The turn is `response_ids[start:stop]` of the PolicySample with the id `sample`. `context_ids`
    is the teacher's whole context before the turn: the student's (its prompt and response up to
    `start`) with the hint (60, 61, 62) spliced in. The turn's own tokens are equal on both sides
    and carry the loss, matched by their index in the response, never by position.
    """

    sample: str
    start: int
    stop: int
    context_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop or not self.context_ids:
            raise DataError(
                f"the hinted turn of {self.sample} spans [{self.start}, {self.stop}) after a "
                f"context of {len(self.context_ids)} tokens; it needs a token at least of each"
            )

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class PreferencePair:
    """Hold two completions of one context, the first preferred, in the student's own tokens.

        PreferencePair("pair/17", "patient_01", (4, 91, 2), (7, 8), (9,), -1.7, -0.4, 3)

    `ref_chosen` and `ref_rejected` are natural-log probabilities summed over the completion's
    tokens under the cartridge of version `ref_version`: the reference that DPO compares with.
    `chosen_share` and `rejected_share` are the shares of the teachers' valid votes for each side.
    """

    id: str
    cartridge: str
    context_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    ref_chosen: float
    ref_rejected: float
    ref_version: int
    chosen_share: float = 1.0
    rejected_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.rejected_share <= 1 - self.chosen_share + 1e-9 <= 1 + 1e-9:
            raise DataError(
                f"preference pair {self.id} has {self.chosen_share:g} of the votes for the chosen "
                f"and {self.rejected_share:g} for the rejected completion: shares are >= 0, and "
                "together at most 1"
            )
        if not (self.context_ids and self.chosen_ids and self.rejected_ids):
            raise DataError(
                f"preference pair {self.id} has an empty context or completion: "
                "there is nothing to compare"
            )


@dataclass(frozen=True)
class ReferenceOutput(TimedReply):
    """Carry pairs with their reference log-probabilities, in the order in which they were sent."""

    pairs: tuple[PreferencePair, ...] = ()


@dataclass(frozen=True)
class TeacherScores:
    """Refer to a teacher's scores of one forward pass: `samples` are indices into the batch,
    `packet` refers to the tensors (see `ScoreOutput`), which hold those samples in that order.

    `(TeacherScores((0, 2), TensorRef(...)), TeacherScores((1,), TensorRef(...)))` cover three
    samples.
    """

    samples: tuple[int, ...]
    packet: TensorRef


@dataclass(frozen=True)
class PrecomputedScores:
    """Hold stored scores of a sample's writer: at each response token the k likeliest `ids` and
    their natural-log probabilities under the whole vocabulary. `sample` indexes `TrainBatch.doc`.

    `PrecomputedScores(0, ids=((17, 4), (9, 2)), logprobs=((-0.1, -2.7), (-0.4, -1.6)))`
    """

    sample: int
    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        shapes = [[len(at) for at in rows] for rows in (self.ids, self.logprobs)]
        if shapes[0] != shapes[1] or len(set(shapes[0])) != 1 or not shapes[0][0]:
            raise DataError(
                f"stored scores have {shapes[0]} ids and {shapes[1]} log-probabilities at their "
                "tokens; give as many of both, one at least, and as many at every token"
            )


@dataclass(frozen=True)
class TrainBatch:
    """Hold what one step trains on: the data of every channel; any may be empty.

    doc, doc_trained  samples, and for each the response tokens that carry a loss (None: all)
    doc_stored        stored scores of some of `doc`, which no teacher reads again
    rl, turns         episodes with ids of their own, and turns of them to be read under a hint
    pairs             preferences
    extra             data of further channels, by channel
    scores            scores of all this, by scorer. A teacher's arrive as TeacherScores with each
                      sample of `read_by` once; the trainer turns them into the teacher's
                      distribution at every token that carries a loss. Others are log-probabilities
                      that a channel needs; see its class.
    """

    doc: Sequence[Sample] = ()
    doc_trained: Sequence[tuple[bool, ...]] | None = None
    doc_stored: Sequence[PrecomputedScores] = ()
    rl: Sequence[PolicySample] = ()
    turns: Sequence[HintedTurn] = ()
    pairs: Sequence[PreferencePair] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, Any] = field(default_factory=dict)

    @property
    def doc_marks(self) -> Sequence[tuple[bool, ...]]:
        """Return for each sample of `doc` which response tokens carry a loss."""
        if self.doc_trained is not None:
            return self.doc_trained
        return [(True,) * len(s.response_ids) for s in self.doc]

    @property
    def read_by(self) -> dict[str, Sequence[Sample]]:
        """Return the samples that each teacher reads, by its role. Raises DataError as `hinted`
        does."""
        return {"doc_teacher": self.doc, HINTED_TEACHER: hinted(self.turns, self.rl)}

    @property
    def packets(self) -> list[TensorRef]:
        """Return references to the teachers' scores on the tensor plane."""
        return [part.packet for parts in self.scores.values() for part in parts]


def hinted(items: Sequence[HintedTurn], samples: Sequence[PolicySample]) -> list[Sample]:
    """Return each turn as the teacher reads it: the hinted context, then the same response tokens.

    Raises DataError for a turn whose sample is missing, or whose span is not wholly the student's
    own tokens.
    """
    by_id = {r.sample.id: r for r in samples}
    hint_items = []
    for item in items:
        if item.sample not in by_id:
            raise DataError(
                f"a hinted turn points to sample {item.sample}, which is not in the batch; "
                "send a turn together with its RL sample"
            )
        r = by_id[item.sample]
        if item.stop > len(r.trained) or not all(r.trained[item.start : item.stop]):
            raise DataError(
                f"the hinted turn of {item.sample} spans response tokens [{item.start}, "
                f"{item.stop}), which are not all the student's own; a turn ends where a tool "
                "answers"
            )
        turn = slice(item.start, item.stop)
        hint_items.append(
            replace(
                r.sample,
                id=f"{item.sample}[{item.start}:{item.stop}]",
                prompt_ids=item.context_ids,
                response_ids=r.sample.response_ids[turn],
                sampler_logprobs=r.sample.sampler_logprobs[turn],
                versions=r.sample.versions[turn],
            )
        )
    return hint_items


def completions(pairs: Sequence[PreferencePair]) -> list[Sample]:
    """Return every pair as two samples to be scored: chosen, rejected, chosen, rejected, ..."""
    return [
        Sample(f"{p.id}/{which}", p.cartridge, p.context_ids, ids, (), ())
        for p in pairs
        for which, ids in (("chosen", p.chosen_ids), ("rejected", p.rejected_ids))
    ]


def stream_seed(name: str) -> int:
    """Return a 63-bit seed from a name, equal in every process (unlike `hash`)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


_done = 0


def count_work(tokens: int) -> None:
    """Add the tokens that passed a layer, or were sampled."""
    global _done
    _done += tokens


def work_done() -> int:
    """Return the work of this process so far."""
    return _done


@dataclass(frozen=True)
class Preparation:
    """Hold how many of its cartridges a process has prepared, with the share of the one in
    progress, and how many it prepares in all: 1.25 of 4. 0 of 0 before it begins."""

    cartridges: float = 0.0
    total: int = 0

    @property
    def share(self) -> float:
        return self.cartridges / self.total if self.total else 1.0


NOT_BEGUN = Preparation()
_preparation = NOT_BEGUN


def set_preparation(cartridges: float, total: int) -> None:
    """Tell that this process has prepared so many cartridges of `total`."""
    global _preparation
    _preparation = Preparation(cartridges, total)


def advance_preparation(share: float) -> None:
    """Tell that another share of the cartridge in progress is prepared, where one is."""
    if _preparation.share < 1:
        set_preparation(_preparation.cartridges + share, _preparation.total)
    count_work(1)


def preparation() -> Preparation:
    """Return how far this process has prepared its cartridges."""
    return _preparation


def unique_key(stem: str) -> str:
    """Return a key that no other put has, even when a call is repeated after its replica died. Keys
    affect no result, so their suffix need not come from a seeded generator."""
    return f"{stem}/{uuid.uuid4().hex[:12]}"


def check_key(key: str) -> str:
    """Return the key. Raises PlaneError when some plane cannot hold it."""
    if not key or not key.isprintable() or ".." in key.split("/"):
        raise PlaneError(f"a key must be printable, not empty and without '..': got {key!r}")
    if (size := len(quote(key, safe=""))) > MAX_KEY_BYTES:
        raise PlaneError(
            f"a key must take at most {MAX_KEY_BYTES} bytes percent-encoded: got {size} for {key!r}"
        )
    return key
