"""Read blocks of several responses over their documents, and keep the responses' keys and values.

    VerifiedRows       verifies the blocks of a call; holds the groups used last, bounded in bytes
    RowGroup           the keys and values of a group's responses, behind those of their documents
    GroupAttention     attends over both within one pass

A group is the responses that are verified together from the first block to the last. Each pass
reads of every response what was not read before: the teacher's last token and the next block. A
token that was refused is overwritten by the next pass.

A call names the passes in which each response was read before. A replica that does not hold the
group makes the same passes again, over the same responses, so that its numbers are equal bit for
bit, whatever replica made the earlier ones.

Dimensions: B responses of a pass, N tokens of it, Q of the longest, S tokens of a response, L
layers, H_q query heads, H_kv key/value heads, D numbers of a head, T_c tokens of context c, V the
vocabulary.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from cartridge_forge.learning.attention import (
    UNSEEN,
    AttentionOptions,
    kernel_for,
    over_prefixes,
    window_mask,
)
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.plugins.decoding.verified.records import VerifyCall, VerifyReply, VerifyRow
from cartridge_forge.plugins.decoding.verified.rules import (
    Verdict,
    verification_draws,
    verify_exact,
    verify_threshold,
)
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import SEPARATOR, require_ids

Reads = tuple[tuple[tuple[int, int], ...], ...]  # of each row of a group


@dataclass
class RowGroup:
    """Hold keys and values [L, B, H_kv, S, D] of a group's rows, read in the passes `reads`."""

    keys: Tensor
    values: Tensor
    reads: Reads

    @classmethod
    def empty(cls, model: LanguageModel, rows: Sequence[VerifyRow]) -> RowGroup:
        layers, heads, size = model.kv_shape
        if model.tensor is not None:
            heads //= model.tensor.size
        shape = (layers, len(rows), heads, max(row.most for row in rows), size)
        dtype = kernel_for(model.weight).stored_type(model.dtype)
        keys = torch.zeros(shape, dtype=dtype, device=model.device)
        return cls(keys, torch.zeros_like(keys), ((),) * len(rows))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class VerifiedRows:
    """Verify the blocks of calls with one model. The groups used last are held, in `max_bytes`; one
    that is larger than that is read anew at each call."""

    def __init__(self, model: LanguageModel, max_bytes: int) -> None:
        self._model, self._max_bytes = model, max_bytes
        self._groups: OrderedDict[str, RowGroup] = OrderedDict()
        self._bytes_of_weights = sum(p.nbytes for p in model.parameters())

    @property
    def held_bytes(self) -> int:
        return sum(group.nbytes for group in self._groups.values())

    @torch.no_grad()
    def verify(
        self, call: VerifyCall, context: Callable[[str], Tensor], student: Tensor | None
    ) -> tuple[list[Verdict], int]:
        """Return the verdicts on a call's blocks, and the number of earlier passes that were made
        again. `context` returns the keys and values [L, 2, H_kv, T_c, D] of a context. Raises
        DataError for tokens that the model does not have, and for more of a row than it announced.
        """
        for row in call.rows:
            require_ids((*row.tokens, *(row.block or ())), self._model.vocabulary, call.group)
            if len(row.tokens) + len(row.block or ()) > row.most:
                raise DataError(
                    f"a row of {call.group} has {len(row.tokens)} tokens and a block of "
                    f"{len(row.block or ())}, and was announced with {row.most} at most"
                )
        names = [SEPARATOR.join(row.contexts) for row in call.rows]
        contexts = {name: context(name) for name in sorted(set(names))}
        reads: Reads = tuple(row.reads for row in call.rows)
        group, repeated = self._groups.get(call.group), 0
        if group is None or group.reads != reads:
            group = RowGroup.empty(self._model, call.rows)
            repeated = max(map(len, reads))
            for n in range(repeated):
                spans = {b: row.reads[n] for b, row in enumerate(call.rows) if n < len(row.reads)}
                self._read(group, call.rows, spans, names, contexts)
        spans = {b: row.next_read for b, row in enumerate(call.rows) if row.block is not None}
        hidden = self._read(group, call.rows, spans, names, contexts)
        group.reads = tuple(
            (*row.reads, spans[b]) if b in spans else row.reads for b, row in enumerate(call.rows)
        )
        self._keep(call.group, group)
        return self._verdicts(call, [*spans], hidden, student), repeated

    def reply(
        self, call: VerifyCall, context: Callable[[str], Tensor], student: Tensor | None
    ) -> VerifyReply:
        """Return the reply to a call, as `verify` computes it, with its seconds and its cost."""
        start = time.perf_counter()
        verdicts, repeated = self.verify(call, context, student)
        ratio = self.ratio(call, context)
        seconds = time.perf_counter() - start
        return VerifyReply(seconds, tuple((v.accepted, v.token) for v in verdicts), ratio, repeated)

    def ratio(self, call: VerifyCall, context: Callable[[str], Tensor]) -> float:
        """Return the bytes that a pass reads, of weights and of contexts, over those of the weights
        alone, which a decoded token of every row reads."""
        names = {SEPARATOR.join(row.contexts) for row in call.rows if row.block is not None}
        read = sum(context(name).nbytes for name in sorted(names))
        return 1 + read / self._bytes_of_weights

    def _verdicts(
        self, call: VerifyCall, order: Sequence[int], hidden: Sequence[Tensor],
        student: Tensor | None,
    ) -> list[Verdict]:  # fmt: skip
        """Return the verdicts on the blocks of the rows `order`, from the hidden states [K + 1,
        width] at their places."""
        rows = [call.rows[b] for b in order]
        blocks = [row.block or () for row in rows]
        logits = self._logits(torch.cat([*hidden]))  # [M + B, V]
        draws = torch.cat(
            [
                verification_draws(row.seed, row.response_tokens, len(row.block or ()) + 1)
                for row in rows
            ]
        ).to(logits.device)
        if call.rule == "threshold":
            return verify_threshold(logits, blocks, call.below, call.sampling, draws)
        if student is None:
            raise DataError(f"{call.group} is to be verified exactly, without the student's logits")
        return verify_exact(logits, student.to(logits.device), blocks, call.sampling, draws)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the tokens that a response may have, without padding of the vocabulary
        behind them."""
        return self._model.projection()(hidden)[:, : self._model.tokens]

    def _read(
        self,
        group: RowGroup,
        rows: Sequence[VerifyRow],
        spans: Mapping[int, tuple[int, int]],
        names: Sequence[str],
        contexts: Mapping[str, Tensor],
    ) -> list[Tensor]:
        """Read the tokens `spans` [first, stop) of rows into the group; return of each row in
        `spans` the hidden states [K + 1, width] from the last of its tokens on."""
        order = sorted(spans, key=lambda b: (names[b], b))  # rows over one context side by side
        ids: list[int] = []
        for b in order:
            text = (*rows[b].tokens, *(rows[b].block or ()))
            first, stop = spans[b]
            # An earlier pass may have read a refused token: any id stands for it.
            ids += (text + (0,) * (stop - len(text)))[first:stop]
        lengths = [spans[b][1] - spans[b][0] for b in order]
        device = self._model.device
        counts = torch.tensor(lengths)
        row_of = torch.repeat_interleave(torch.tensor(order), counts).to(device)  # [N]
        columns = torch.cat([torch.arange(*spans[b]) for b in order]).to(device)  # [N]
        prefix = torch.tensor([contexts[names[b]].shape[3] for b in order])
        positions = columns + torch.repeat_interleave(prefix, counts).to(device)  # [N]
        attention = GroupAttention(
            group, order, row_of, columns, positions, lengths,
            [(contexts[name], len([*run])) for name, run in groupby(names[b] for b in order)],
        )  # fmt: skip
        hidden: Tensor = self._model(torch.tensor(ids, device=device), positions, attention)
        parts = dict(zip(order, torch.split(hidden, lengths), strict=True))
        return [parts[b][max(0, len(rows[b].tokens) - 1 - spans[b][0]) :] for b in spans]

    def _keep(self, name: str, group: RowGroup) -> None:
        self._groups.pop(name, None)
        while self._groups and self.held_bytes + group.nbytes > self._max_bytes:
            self._groups.popitem(last=False)
        if group.nbytes <= self._max_bytes:
            self._groups[name] = group


@dataclass
class GroupAttention:
    """Attend within one pass of B rows of a group: over what was read of each and what is read now,
    and over the rows' contexts.

    rows       the rows, those over one context side by side
    row_of     [N] the row of each token, `columns` [N] its place in the row, and `positions` [N]
    lengths    the tokens of each row in this pass
    contexts   keys and values [L, 2, H_kv, T_c, D], and the number of rows over them
    """

    group: RowGroup
    rows: Sequence[int]
    row_of: Tensor
    columns: Tensor
    positions: Tensor
    lengths: Sequence[int]
    contexts: Sequence[tuple[Tensor, int]]
    masks: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        most, device = max(self.lengths), self.columns.device
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        columns = torch.arange(most)
        last = torch.tensor(self.lengths)[:, None] - 1
        self._queries = (starts[:-1, None] + columns.minimum(last)).flatten().to(device)  # [B * Q]
        self._places = (columns <= last).flatten().nonzero()[:, 0].to(device)  # [N]
        self._most, self._width = most, int(self.columns.max()) + 1
        edges = accumulate((count for _, count in self.contexts), initial=0)
        self._spans = [(int(starts[a]), int(starts[b])) for a, b in pairwise(edges)]
        self._index = torch.tensor(self.rows, device=device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Write keys and values [N, H_kv, D] into the group; return the attention [N, H_q, D] of
        queries [N, H_q, D]."""
        keys, values = self.group.keys[layer], self.group.values[layer]
        keys[self.row_of, :, self.columns] = k.to(keys.dtype)
        values[self.row_of, :, self.columns] = v.to(values.dtype)
        queries = q[self._queries].view(len(self.rows), self._most, *q.shape[1:]).transpose(1, 2)
        out, sums = kernel_for(q).forward(
            queries, keys[self._index, :, : self._width], values[self._index, :, : self._width],
            self._mask(options, keys.dtype), False, options.scale, options.cap,
        )  # fmt: skip
        out = out.transpose(1, 2).flatten(0, 1)[self._places]  # [N, H_q, D]
        sums = sums.transpose(1, 2).flatten(0, 1)[self._places]  # [N, H_q]

        def hidden(c: int, kv: Tensor) -> Tensor | None:
            first, stop = self._spans[c]
            return window_mask(self.positions[first:stop], kv.shape[2], options, q.dtype)

        read = [kv[layer] for kv, _ in self.contexts]
        return over_prefixes(kernel_for(q), q, out, sums, self._spans, read, options, hidden)[0]

    def _mask(self, options: AttentionOptions, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores of the rows' own tokens, [B, 1, Q, S]."""
        kind = options.window, options.chunk
        if kind not in self.masks:
            shape = (len(self.rows), self._most, 1)
            at = self.columns[self._queries].view(shape)
            distances = at - torch.arange(self._width, device=at.device)  # [B, Q, S]
            hidden = distances < 0
            if options.limit is not None:
                hidden |= options.unseen(distances, self.positions[self._queries].view(shape))
            added = torch.zeros(hidden.shape, dtype=dtype, device=at.device)
            self.masks[kind] = added.masked_fill(hidden, UNSEEN)[:, None]
        return self.masks[kind]
