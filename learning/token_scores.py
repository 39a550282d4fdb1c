"""Keep doc_kl of every token that a step trains, for whoever looks at the run."""

from __future__ import annotations

from collections.abc import Mapping

from learning.losses.channel import LossTerm, MicroBatch
from learning.losses.doc_kl import DocKL
from learning.model.distributed import ProcessGroup
from protocols.records.token_scores import encoded


class TokenScores:
    """Collect one step's scores, micro-batch by micro-batch. Of a sample that several updates train
    the first is kept, which is the score of the version that sampled it."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def add(self, terms: Mapping[str, LossTerm], micro: MicroBatch) -> None:
        """Add the terms of a micro-batch."""
        term = terms.get(DocKL.name)
        if term is None:
            return
        losses, begin = term.losses.detach().float().tolist(), 0
        for index, tokens in micro.tokens[DocKL.name].items:
            sample = micro.batch.doc[index]
            values: list[float | None] = [None] * len(sample.response_ids)
            for place, value in zip(tokens, losses[begin : begin + len(tokens)], strict=True):
                values[place] = value
            begin += len(tokens)
            if sample.id not in self._found:
                self._found[sample.id] = encoded(values)

    def of_all(self, ranks: ProcessGroup) -> dict[str, str]:
        """Return the scores of all ranks' samples by id, as token_scores.jsonl holds them."""
        return {
            id: text
            for told in ranks.gather({"scores": self._found})
            for id, text in told["scores"].items()
        }
