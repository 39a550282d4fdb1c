"""Draw tokens as the embedded backend does, for an engine that decodes greedily; without vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cartridge_forge.learning.draws import draw, leave_likely, penalise
from cartridge_forge.plugins.decoding.grammar import GrammarMatcher
from cartridge_forge.protocols.response_rules import LogitRules
from cartridge_forge.protocols.step import Sampling


class GrammarFollower:
    """Follow a response in a list of tokens that the engine keeps filling. A grammar that can be
    followed no further leaves `end_ids` alone; the engine's own matcher says why."""

    def __init__(self, matcher: GrammarMatcher, end_ids: Sequence[int]) -> None:
        self._matcher, self._end_ids, self._read = matcher, list(end_ids), 0

    def leave_allowed(self, logits: Tensor, tokens: Sequence[int]) -> None:
        """Change logits [V] in place: -inf for what may not follow `tokens`."""
        for token in tokens[self._read :]:
            self._matcher.add(token)
        self._read = len(tokens)
        allowed = self._matcher.allowed(logits)
        if self._matcher.error:
            allowed[self._end_ids] = True
        logits.masked_fill_(~allowed, float("-inf"))


@dataclass(frozen=True)
class SeededRow:
    """Hold a row of a batch whose next token is drawn, or at temperature 0 the likeliest.

    `uniforms` are the request's draws (`learning.draws.uniforms`). `tokens` is a
    list that the engine keeps filling, so its length is the index of the next draw. `grammar`
    leaves what may come next; `rules` change the logits, of which some count `prompt_ids`.
    """

    sampling: Sampling
    uniforms: Tensor
    tokens: Sequence[int]
    grammar: GrammarFollower | None = None
    rules: LogitRules | None = None
    prompt_ids: Sequence[int] = ()


def leave_drawn(logits: Tensor, rows: Mapping[int, SeededRow]) -> Tensor:
    """Return logits [B, V], changed in place, in which each drawn row allows only its drawn token,
    and a greedy one only what its grammar does, with the logits of its rules.

    Draw t of a request depends on its seed and t alone: not on the rest of the batch, nor on
    chunked prefill, nor on preemptions.
    """
    groups: dict[Sampling, list[int]] = {}
    for index, row in rows.items():
        if row.rules is not None:
            penalise(logits[index], row.rules, row.prompt_ids, row.tokens)
        if row.grammar is not None:
            row.grammar.leave_allowed(logits[index], row.tokens)
        if row.rules is not None:
            leave_likely(logits[index], row.rules, row.sampling.temperature)
        if row.sampling.temperature > 0:
            groups.setdefault(row.sampling, []).append(index)
    for sampling, indices in groups.items():
        next_draws = [rows[i].uniforms[len(rows[i].tokens)] for i in indices]
        chosen = draw(logits[indices], torch.stack(next_draws).to(logits.device), sampling)
        logits[indices] = float("-inf")
        logits[indices, chosen] = 0.0
    return logits
