"""Define the train batch: the data of all channels that the trainer learns from in one step.

    Sample             a prompt with the student's response, scored beside its document
    PolicySample       an episode with its reward
    HintedTurn         a turn of a PolicySample, read under a hint
    PreferencePair     a better and a worse completion
    TeacherScores      a reference to a teacher's scores of some of these
    PrecomputedScores  scores that were stored with a text

Records hold token ids only: text is never re-tokenised on the way. Every record validates itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.mesh import HINTED_TEACHER
from cartridge_forge.protocols.types import Sample, Sampling, TensorRef, TimedReply


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
            t for t, (own, v) in enumerate(zip(self.trained, s.versions, strict=False))
            if own and v < 0
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
        shapes = [[len(at) for at in told] for told in (self.ids, self.logprobs)]
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
    known = {r.sample.id: r for r in samples}
    found = []
    for item in items:
        if item.sample not in known:
            raise DataError(
                f"a hinted turn points to sample {item.sample}, which is not in the batch; "
                "send a turn together with its RL sample"
            )
        r = known[item.sample]
        if item.stop > len(r.trained) or not all(r.trained[item.start : item.stop]):
            raise DataError(
                f"the hinted turn of {item.sample} spans response tokens [{item.start}, "
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
    """Return every pair as two samples to be scored: chosen, rejected, chosen, rejected, ..."""
    return [
        Sample(f"{p.id}/{which}", p.cartridge, p.context_ids, ids, (), ())
        for p in pairs
        for which, ids in (("chosen", p.chosen_ids), ("rejected", p.rejected_ids))
    ]
