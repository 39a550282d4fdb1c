"""What the trainer learns from beside document distillation: one record for each channel.

    RLSample         an episode with its reward               (grpo)
    SDPOItem         a turn of an RLSample, read under a hint (sdpo)
    PreferencePair   a better and a worse completion          (replay_dpo)
    Lesson           all of one training step, with where its teachers' scores lie (ScoredPart), or
                     those that were kept with the text (StoredScores)

Token ids only: text is never re-tokenised on the way. Every record checks itself when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from protocols.errors import DataError
from protocols.types import Packet, Sample, Sampling


@dataclass(frozen=True)
class RLSample:
    """An episode: what the student was given and wrote, and what it was worth.

    Two turns with a tool's answer (ids 40, 41) between them, the second of five in its group:

        RLSample(
            sample=Sample("desk/3/1", "patient_01", prompt_ids=(4, 91, 2), response_ids=(
                7, 8, 40, 41, 9), sampler_logprobs=(-0.1, -0.7, 0.0, 0.0, -0.2),
                versions=(3, 3, -1, -1, 3)),
            trained=(True, True, False, False, True),
            sampling=Sampling(),
            group="desk/3",
            reward=1.0,
        )

    `trained[t]` says whether response token t is the student's own: a tool's answer is read, not
    trained on, and has log-probability 0 and version -1. Rewards are compared within `group`: the
    episodes of one task. An episode that could not be judged has reward None and says why in
    `error_kind` ("environment_died"): it is left out and counted, never trained on as a 0.
    """

    sample: Sample
    trained: tuple[bool, ...]
    sampling: Sampling
    group: str
    reward: float | None
    error_kind: str = ""

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
            t for t, (own, v) in enumerate(zip(self.trained, s.versions, strict=False))
            if own and v < 0
        ]  # fmt: skip
        if unsampled:
            raise DataError(
                f"RL sample {s.id} trains on tokens {unsampled} of its response, which no version "
                "sampled; mark them as not trained"
            )


@dataclass(frozen=True)
class SDPOItem:
    """One turn that went wrong, to be read again under a hint.

        SDPOItem("desk/3/1", start=0, stop=2, context_ids=(4, 91, 60, 61, 62, 2))

    The turn is `response_ids[start:stop]` of the RLSample with the id `sample`. `context_ids` is
    the teacher's whole context before the turn: the student's (its prompt and response up to
    `start`) with the hint (60, 61, 62) spliced in. The turn's own tokens are the same on both
    sides and carry the loss, matched by their index in the response, never by position.
    """

    sample: str
    start: int
    stop: int
    context_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop or not self.context_ids:
            raise DataError(
                f"the SDPO item of {self.sample} spans [{self.start}, {self.stop}) after a context "
                f"of {len(self.context_ids)} tokens; it needs a token at least of each"
            )

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class PreferencePair:
    """Two completions of one context, the first preferred, in the student's own tokens.

        PreferencePair("pair/17", "patient_01", (4, 91, 2), (7, 8), (9,), -1.7, -0.4, 3)

    `ref_chosen` and `ref_rejected` are natural-log probabilities summed over the completion's
    tokens under the cartridge of version `ref_version`: the reference that DPO compares with.
    """

    id: str
    document: str
    context_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    ref_chosen: float
    ref_rejected: float
    ref_version: int

    def __post_init__(self) -> None:
        if not (self.context_ids and self.chosen_ids and self.rejected_ids):
            raise DataError(
                f"preference pair {self.id} has an empty context or completion: "
                "there is nothing to compare"
            )


@dataclass(frozen=True)
class ScoredPart:
    """What a teacher scored in one pass: which of the samples, by index, and where that lies,
    sample by sample in this order (as `Scored` has it).

    `(ScoredPart((0, 2), Packet(...)), ScoredPart((1,), Packet(...)))` are all of three samples.
    """

    samples: tuple[int, ...]
    packet: Packet


@dataclass(frozen=True)
class StoredScores:
    """What was kept of whoever wrote a sample: at each response token the k likeliest `ids` and
    their natural-log probabilities under the whole vocabulary. `sample` is its index in
    `Lesson.doc`.

    `StoredScores(0, ids=((17, 4), (9, 2)), logprobs=((-0.1, -2.7), (-0.4, -1.6)))`
    """

    sample: int
    ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        shapes = [[len(at) for at in told] for told in (self.ids, self.logprobs)]
        if shapes[0] != shapes[1] or len(set(shapes[0])) != 1 or not shapes[0][0]:
            raise DataError(
                f"stored scores have {shapes[0]} ids and {shapes[1]} log-probabilities at their "
                "tokens; give as many of both, one at least, and as many at every token"
            )


@dataclass(frozen=True)
class Lesson:
    """What one step trains on. No scores where nothing was scored: no data, or no weight.

    `doc_scores` are the document teacher's over every response token of `doc` but of those samples
    that `doc_stored` speaks of; those tokens bear a loss that `doc_trained` marks (None: all).
    `sdpo_scores` are the hinted teacher's over every token of every item's turn. Their parts have
    each sample, or item, once.
    """

    doc: tuple[Sample, ...] = ()
    doc_trained: tuple[tuple[bool, ...], ...] | None = None
    doc_scores: tuple[ScoredPart, ...] = ()
    doc_stored: tuple[StoredScores, ...] = ()
    rl: tuple[RLSample, ...] = ()
    sdpo: tuple[SDPOItem, ...] = ()
    sdpo_scores: tuple[ScoredPart, ...] = ()
    pairs: tuple[PreferencePair, ...] = ()

    @property
    def packets(self) -> tuple[Packet, ...]:
        return tuple(part.packet for part in (*self.doc_scores, *self.sdpo_scores))


def hinted(items: Sequence[SDPOItem], samples: Sequence[RLSample]) -> list[Sample]:
    """Each item's turn as the teacher reads it: the hinted context, then the very same tokens.

    Raises DataError for an item whose sample is not there, or whose span is not wholly the
    student's own tokens.
    """
    known = {r.sample.id: r for r in samples}
    found = []
    for item in items:
        if item.sample not in known:
            raise DataError(
                f"an SDPO item points to sample {item.sample}, which is not in the batch; "
                "send an item together with its RL sample"
            )
        r = known[item.sample]
        if item.stop > len(r.trained) or not all(r.trained[item.start : item.stop]):
            raise DataError(
                f"the SDPO item of {item.sample} spans response tokens [{item.start}, "
                f"{item.stop}), which are not all the student's own; a turn ends where a tool "
                "answers"
            )
        turn = slice(item.start, item.stop)
        found.append(
            replace(
                r.sample,
                id=f"{item.sample}[{item.start}:{item.stop}]",
                prompt_ids=item.context_ids,
                response_ids=r.sample.response_ids[turn],
                sampler_logprobs=r.sample.sampler_logprobs[turn],
                versions=r.sample.versions[turn],
            )
        )
    return found


def completions(pairs: Sequence[PreferencePair]) -> list[Sample]:
    """Every pair as two samples to be scored: chosen, rejected, chosen, rejected, ..."""
    return [
        Sample(f"{p.id}/{which}", p.document, p.context_ids, ids, (), ())
        for p in pairs
        for which, ids in (("chosen", p.chosen_ids), ("rejected", p.rejected_ids))
    ]
