"""Compute the log-probabilities that channels compare the policy with, without gradient: of
episodes, and of the two responses of preference pairs.

    old        under the cartridges before a rollout's first update: the version that sampled it
    ref        under the untrained cartridges, or an earlier version's
    document   under the model with the document, by its teacher

Those of episodes are of all response tokens of the batch's episodes, in order. The trainer computes
the first two: every rank reads its share of the episodes, or those of its own cartridges, and gets
all numbers, which do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cartridge_forge.learning.batch import check_rows, token_logprobs
from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.ranks import ALONE, ProcessGroup
from cartridge_forge.learning.teacher import TeacherDistribution, response_logprobs
from cartridge_forge.protocols.errors import DataError, StaleTokenError
from cartridge_forge.protocols.step import (
    PolicySample,
    PreferencePair,
    Sample,
    TrainBatch,
    completions,
)


class PolicyScores:
    """Compute the scores of a trainer's batches over the cartridges of `bank`. A sequence has at
    most `row_tokens` tokens; one forward reads at most `micro_tokens`, or one longer sample; None:
    all samples."""

    def __init__(
        self,
        model: LanguageModel,
        bank: CartridgeBank,
        ranks: ProcessGroup,
        row_tokens: int,
        micro_tokens: int | None,
    ) -> None:
        self._model, self._bank, self._ranks = model, bank, ranks
        self._row_tokens, self._micro_tokens = row_tokens, micro_tokens

    def check(self, batch: TrainBatch, version: int) -> None:
        """Raise DataError or StaleTokenError for episodes that cannot train the policy of `version`
        (`check_policy`)."""
        for r in batch.rl:
            if any(r.trained):
                check_policy(batch, r, version)

    def logprobs(self, batch: TrainBatch, trainable: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probabilities [N] of the episodes' response tokens over their cartridges
        with these trainable tokens."""
        samples = [r.sample for r in batch.rl]
        names = sorted({s.cartridge for s in samples} & trainable.keys())
        return shared_logprobs(
            self._model,
            samples,
            {name: self._bank.full(name, trainable[name].detach()) for name in names},
            row_tokens=self._row_tokens,
            micro_tokens=self._micro_tokens,
            ranks=self._ranks,
        )

    @torch.no_grad()
    def references(
        self, pairs: Sequence[PreferencePair], trainable: Mapping[str, Tensor], version: int
    ) -> list[list[Any]]:
        """Return [index, log-probability of the chosen, of the rejected] of each pair whose
        cartridge this rank holds, over the cartridges of `version` with these trainable tokens."""
        names = sorted({pair.cartridge for pair in pairs} & trainable.keys())
        prefixes = {
            name: self._bank.full(name, trainable[name]).to(self._model.dtype) for name in names
        }
        mine = [i for i, pair in enumerate(pairs) if pair.cartridge in prefixes]
        scored = with_references(
            self._model, [pairs[i] for i in mine], prefixes, self._row_tokens, version, 0
        )
        return [[i, p.ref_chosen, p.ref_rejected] for i, p in zip(mine, scored, strict=True)]


def shared_logprobs(
    model: LanguageModel,
    samples: Sequence[Sample],
    prefixes: Mapping[str, Tensor],
    *,
    row_tokens: int,
    micro_tokens: int | None = None,
    ranks: ProcessGroup = ALONE,
) -> Tensor:
    """Return the log-probability [N] (float32) of every response token over the cartridges
    `prefixes` [L, 2, H_kv, P, D], which of ranks that stand apart are each rank's own. One forward
    reads at most `micro_tokens` tokens, or one longer sample; None: all samples. Raises DataError
    for a sample longer than a row."""
    check_rows(samples, row_tokens)
    prefixes = {name: kv.to(model.dtype) for name, kv in prefixes.items()}
    begins = [0]
    for s in samples:
        begins.append(begins[-1] + len(s.response_ids))
    values = torch.zeros(begins[-1], dtype=torch.float32, device=model.device)
    mine = [i for i, s in enumerate(samples) if s.cartridge in prefixes]
    parts = [[mine[n] for n in part] for part in _parts([samples[i] for i in mine], micro_tokens)]
    if not ranks.apart:
        rounds = -(-len(parts) // ranks.data_world) * ranks.data_world
        parts += [[]] * (rounds - len(parts))
        parts = parts[ranks.data_rank :: ranks.data_world]
    for part in parts:
        if not part and not model.sharded:
            continue  # a sharded base is gathered by all ranks in every pass
        logprobs = response_logprobs(model, [samples[i] for i in part], prefixes, row_tokens)
        at = [t for i in part for t in range(begins[i], begins[i + 1])]
        if part:
            values[at] = logprobs
    if ranks.rank % ranks.tensor:  # ranks of one copy have the same numbers: one adds them
        values.zero_()
    ranks.add(values)
    return values


def document_logprobs(batch: TrainBatch, teacher: TeacherDistribution) -> Tensor:
    """Return the document teacher's log-probability [N] of every response token of the episodes,
    from its distribution at every response token of `batch.doc`. Raises DataError where these are
    not the same samples, or the teacher did not keep what was sampled."""
    if [s.id for s in batch.doc] != [r.sample.id for r in batch.rl]:
        raise DataError(
            "the document teacher read other samples than the episodes that objective.grpo.kl or "
            "distill compares it with; give the batch's doc and rl the same ones, in order"
        )
    if teacher.sampled is not None:
        return teacher.sampled
    if teacher.logits is None:
        raise DataError(
            "the document teacher's scores lack the sampled tokens' own log-probabilities, which "
            "objective.grpo.kl or distill needs; score them with keep_sampled"
        )
    targets = [t for s in batch.doc for t in s.response_ids]
    return token_logprobs(teacher.logits.float(), torch.tensor(targets, dtype=torch.long))


def _parts(samples: Sequence[Sample], micro_tokens: int | None) -> list[range]:
    """Return runs of samples that one forward reads."""
    if micro_tokens is None:
        return [range(len(samples))] if samples else []
    parts: list[range] = []
    room = 0
    for i, s in enumerate(samples):
        length = len(s.prompt_ids) + len(s.response_ids)
        if not parts or length > room:
            parts.append(range(i, i))
            room = micro_tokens
        parts[-1] = range(parts[-1].start, i + 1)
        room -= length
    return parts


def check_policy(
    batch: TrainBatch, r: PolicySample, version: int, *, recorded: bool = False
) -> None:
    """Raise DataError for an episode drawn with altered sampling. Raise StaleTokenError for one of
    another version without "old" scores, unless the sampler's `recorded` ones correct for it."""
    s, drawn = r.sample, r.sampling
    if (drawn.temperature, drawn.top_p, drawn.top_k) != (1.0, 1.0, 0):
        raise DataError(
            f"RL sample {s.id} was drawn at temperature {drawn.temperature}, top_p {drawn.top_p}, "
            f"top_k {drawn.top_k}, which biases the policy's ratio; sample at 1, 1 and 0"
        )
    versions = {v for v, trained in zip(s.versions, r.trained, strict=True) if trained}
    if not recorded and batch.scores.get("old") is None and versions != {version}:
        raise StaleTokenError(
            f"RL sample {s.id} was sampled by versions {sorted(versions)}, and version {version} "
            "is being trained: give scores of old, the log-probabilities under the versions that "
            "sampled it (learning.teacher.response_logprobs); nothing was trained on it"
        )


def summed_by_pair(logprobs: Tensor, pairs: Sequence[PreferencePair]) -> tuple[Tensor, Tensor]:
    """Return (chosen, rejected) [M] from token log-probabilities in the order of `completions`."""
    lengths = [n for p in pairs for n in (len(p.chosen_ids), len(p.rejected_ids))]
    if not lengths:
        return logprobs, logprobs
    sums = torch.stack([part.sum() for part in logprobs.split_with_sizes(lengths)])
    return sums[0::2], sums[1::2]


def is_stale(pair: PreferencePair, version: int, max_age: int | None) -> bool:
    """Return whether a pair's reference must be recomputed before training at `version`: it is
    older than the bound, or of a version that does not exist yet."""
    age = version - pair.ref_version
    return age < 0 or (max_age is not None and age > max_age)


def with_references(
    model: LanguageModel,
    pairs: Sequence[PreferencePair],
    prefixes: Mapping[str, Tensor],
    row_tokens: int,
    version: int,
    max_age: int | None,
) -> list[PreferencePair]:
    """Return the pairs in their order. A stale reference is computed anew under `version`, whose
    cartridges are `prefixes`."""
    stale = [p for p in pairs if is_stale(p, version, max_age)]
    if not stale:
        return list(pairs)
    logprobs = response_logprobs(model, completions(stale), prefixes, row_tokens)
    chosen, rejected = summed_by_pair(logprobs, stale)
    fresh = iter(
        [
            replace(p, ref_chosen=c, ref_rejected=r, ref_version=version)
            for p, c, r in zip(stale, chosen.tolist(), rejected.tolist(), strict=True)
        ]
    )
    return [next(fresh) if is_stale(p, version, max_age) else p for p in pairs]
