"""Compare the sampler's log-probabilities with the trainer's own of the same tokens, each step.

    gap = trainer's - sampler's, nats, of a token that the version being trained sampled

Labels and fingerprints say which numbers lay before the decoder. The gap shows which it used: two
decoders over the same cartridge differ by rounding, and one step of training moves the
log-probabilities by far more. A step whose gap is outside its bounds is refused before the update.

The trainer's values come from the forward that trains, so no further one is run. Tokens of an
older version (`train.staleness`) are not compared: the trainer's forward is not over their
cartridge. Their fingerprints are compared all the same (`learning.cartridge.published`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from protocols.errors import StaleTokenError
from protocols.spec.sections import SamplerGapSpec
from protocols.types import Sample

# Largest mean and largest value of |gap|, nats. Measured over clean runs, with margin: docs/log.md.
DEFAULTS = {
    ("float32", "torch"): (5e-5, 5e-3),
    ("float32", "vllm"): (5e-5, 5e-3),
    ("bfloat16", "torch"): (0.06, 1.0),
    ("bfloat16", "vllm"): (0.06, 1.0),  # a 3B model on an H200: 0.036 and 0.20
}


@dataclass(frozen=True)
class GapBounds:
    """Hold the bounds of one step: `mean` and `max` of |gap| over its tokens, nats."""

    mean: float
    max: float


def gap_bounds(spec: SamplerGapSpec | None, dtype: str, backend: str) -> GapBounds | None:
    """Return the bounds of `train.sampler_gap`, or None where it is switched off."""
    if spec is None:
        return None
    mean, most = DEFAULTS[dtype, backend]
    return GapBounds(
        mean if spec.mean is None else spec.mean, most if spec.max is None else spec.max
    )


@dataclass(frozen=True)
class SampledTokens:
    """Hold the sampler's record of N response tokens, laid out as the student reads them.

    logprobs   [N] float32 of the sampler; 0 where not compared
    compared   [N] whether the version being trained sampled the token
    samples    the samples in order, and `counts` how many of the N tokens each has
    """

    logprobs: Tensor
    compared: Tensor
    samples: Sequence[str]
    counts: Sequence[int]

    def locate(self, index: int) -> str:
        """Return the id of the sample that token `index` belongs to."""
        for sample, count in zip(self.samples, self.counts, strict=True):
            if index < count:
                return sample
            index -= count
        raise IndexError(index)


def sampled_tokens(
    texts: Sequence[tuple[Sample, bool]], needed: Tensor, version: int
) -> SampledTokens:
    """Return the record of the tokens marked by `needed` [all response tokens of the texts]. A text
    is a sample, and whether a sampler's record of it is expected at all."""
    logprobs: list[float] = []
    compared: list[bool] = []
    for s, sampled in texts:
        tokens = len(s.response_ids)
        told = sampled and len(s.sampler_logprobs) == len(s.versions) == tokens
        logprobs += s.sampler_logprobs if told else [0.0] * tokens
        compared += [v == version for v in s.versions] if told else [False] * tokens
    ends = list(accumulate(len(s.response_ids) for s, _ in texts))
    return SampledTokens(
        torch.tensor(logprobs, dtype=torch.float32)[needed],
        torch.tensor(compared, dtype=torch.bool)[needed],
        [s.id for s, _ in texts],
        [int(needed[a:b].sum()) for a, b in pairwise([0, *ends])],
    )


@dataclass
class SamplerGap:
    """Sum the gaps of a step's micro-batches. A log-probability that is no number counts as an
    infinite gap."""

    tokens: int = 0
    absolute: float = 0.0
    signed: float = 0.0
    most: float = 0.0
    worst: dict[str, Any] = field(default_factory=dict)

    def add(self, record: SampledTokens, trainer: Tensor) -> None:
        """Add a micro-batch: its record, and the trainer's log-probabilities [N]."""
        at = record.compared.nonzero().flatten()
        if not len(at):
            return
        own = trainer.detach().cpu()[at].double()
        gaps = own - record.logprobs[at].double()
        sizes = gaps.abs().nan_to_num(nan=math.inf, posinf=math.inf)
        self.tokens += len(at)
        self.absolute += sizes.sum().item()
        self.signed += gaps.sum().item()
        largest = int(sizes.argmax())
        if sizes[largest] >= self.most:
            place = int(at[largest])
            self.most = sizes[largest].item()
            self.worst = {
                "sample": record.locate(place),
                "sampler": record.logprobs[place].item(),
                "trainer": own[largest].item(),
            }

    def sums(self) -> dict[str, Any]:
        """Return this rank's sums, JSON-able."""
        return dict(vars(self))

    @classmethod
    def of_ranks(cls, sums: Sequence[Mapping[str, Any]]) -> SamplerGap:
        """Return the sums of all ranks, added in their order."""
        most = max(sums, key=lambda one: one["most"])
        return cls(
            sum(one["tokens"] for one in sums),
            sum(one["absolute"] for one in sums),
            sum(one["signed"] for one in sums),
            most["most"],
            dict(most["worst"]),
        )

    def refuse(self, bounds: GapBounds | None, version: int) -> None:
        """Raise StaleTokenError, with the worst sample's id in `samples`, for gaps outside the
        bounds."""
        if bounds is None or not self.tokens:
            return
        mean = self.absolute / self.tokens
        if mean <= bounds.mean and self.most <= bounds.max:
            return
        error = StaleTokenError(
            f"the sampler's log-probabilities of {self.tokens} tokens are {mean:.3g} nats from the "
            f"trainer's under version {version} on average, and {self.most:.3g} at most (bounds "
            f"{bounds.mean:g} and {bounds.max:g}, train.sampler_gap), most in sample "
            f"{self.worst['sample']} ({self.worst['sampler']:.4f} against "
            f"{self.worst['trainer']:.4f}): they were sampled over other numbers than version "
            f"{version}'s; nothing was trained on them; repair or replace the generator that "
            "sampled them, then resume the run; if the gap is this backend's rounding, raise the "
            "bounds"
        )
        error.samples = (self.worst["sample"],)
        raise error

    def facts(self) -> dict[str, float]:
        """Return {"mean": of |gap|, "signed": mean of gap, "max": of |gap|, "tokens": compared};
        empty where none was compared."""
        if not self.tokens:
            return {}
        return {
            "mean": self.absolute / self.tokens,
            "signed": self.signed / self.tokens,
            "max": self.most,
            "tokens": self.tokens,
        }
