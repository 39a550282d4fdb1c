"""Keep doc_kl of every token that a step trains, and what the teacher held likeliest there, for
whoever looks at the run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from cartridge_forge.learning.batch import MicroBatch
from cartridge_forge.learning.losses.channel import LossTerm
from cartridge_forge.learning.losses.doc_kl import DocKL
from cartridge_forge.learning.ranks import ProcessGroup
from cartridge_forge.learning.teacher import TeacherDistribution, top_k
from cartridge_forge.plugins.watch.score_text import TOP, Likely, encoded, encoded_top
from cartridge_forge.protocols.step import SampleScores

CHUNK_VALUES = 2**22  # of the teacher's logits that are sorted at a time


class TokenScores:
    """Collect one step's scores, micro-batch by micro-batch. Of a sample that several updates train
    the first is kept, which is the score of the version that sampled it."""

    def __init__(self) -> None:
        self._found: dict[str, SampleScores] = {}

    def add(self, terms: Mapping[str, LossTerm], micro: MicroBatch) -> None:
        """Add the terms of a micro-batch."""
        term = terms.get(DocKL.name)
        if term is None:
            return
        losses, begin = term.losses.detach().float().tolist(), 0
        doc_tokens = micro.tokens[DocKL.name]
        likely = _likeliest(micro.batch.scores["doc_teacher"].rows(doc_tokens.rows))
        for index, tokens in doc_tokens.items:
            sample = micro.batch.doc[index]
            values: list[float | None] = [None] * len(sample.response_ids)
            span = slice(begin, begin + len(tokens))
            for position, value in zip(tokens, losses[span], strict=True):
                values[position] = value
            begin += len(tokens)
            if sample.id not in self._found:
                self._found[sample.id] = SampleScores(
                    kl=encoded(values), top=encoded_top(likely[span])
                )

    def of_all(self, ranks: ProcessGroup) -> dict[str, SampleScores]:
        """Return the scores of all ranks' samples by id, as token_scores.jsonl holds them."""
        return {
            id: scores
            for reply in ranks.gather({"scores": self._found})
            for id, scores in reply["scores"].items()
        }


def _likeliest(teacher: TeacherDistribution) -> list[Likely]:
    """Return the teacher's TOP likeliest tokens at each token, or as many as it told."""
    likeliest: list[Likely] = []
    width = 1 if teacher.logits is None else teacher.logits.shape[-1]
    chunk = max(1, CHUNK_VALUES // width)
    for begin in range(0, teacher.tokens, chunk):
        indices, logprobs = _top(teacher.rows(slice(begin, begin + chunk)))
        for tokens, values in zip(indices.tolist(), logprobs.tolist(), strict=True):
            likeliest.append(list(zip(tokens, values, strict=True)))
    return likeliest


def _top(teacher: TeacherDistribution) -> tuple[Tensor, Tensor]:
    if teacher.logits is not None:
        return top_k(teacher.logits, TOP)
    assert teacher.indices is not None
    assert teacher.logprobs is not None
    logprobs, places = teacher.logprobs.float().topk(min(TOP, teacher.logprobs.shape[-1]))
    return teacher.indices.gather(-1, places), logprobs
