"""Decode requests that arrive at any time, on the embedded backend (continuous batching).

    add  -> waiting -> (a step) a new decode batch, merged into the running one
    step -> every row draws one token -> new tokens, and completions of ended rows

Requests with a draft are a batch of their own, of which a step verifies one block a row
(`plugins.decoding.verified.decode`).

`plugins.decoding.engine_thread` calls `step`. At most `max_rows` requests are decoded at a
time; others wait in order of arrival."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cartridge_forge.learning.cartridge import CartridgeId, Fingerprints, composed
from cartridge_forge.learning.decode import DecodeBatch
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.draws import DecodeState, new_row
from cartridge_forge.plugins.decoding.grammar import Grammars
from cartridge_forge.plugins.decoding.stopping import Decode
from cartridge_forge.plugins.decoding.verified.decode import VerifiedBatch, VerifiedRow, check_draft
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.ports import TokenChunk
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef, require_ids

Document = Callable[[str], Tensor]


def no_more_documents(name: str, ids: tuple[int, ...]) -> None:
    """Refuse a document that comes with a request. Raises DataError."""
    raise DataError(f"this engine reads the documents it was started with alone, and not {name}")


class PassError(Exception):
    """Report that a forward pass failed, by its cause. `keys` are those of the requests that it was
    over: one of them may have made it fail."""

    def __init__(self, keys: Collection[str]) -> None:
        super().__init__(f"a pass over {len(keys)} requests failed")
        self.keys = keys


class TorchEngine:
    """Decode requests over published cartridges and documents. `document` returns a document's own
    KV [L, 2, H_kv, T, D], `add_document` gives it a further one to read; `decode` returns the text
    of token ids, `grammars` compiles those of requests that have one."""

    def __init__(
        self,
        model: LanguageModel,
        document: Document,
        end_ids: frozenset[int],
        decode: Decode,
        grammars: Grammars | None = None,
        max_rows: int = 64,
        add_document: Callable[[str, tuple[int, ...]], None] = no_more_documents,
    ) -> None:
        self.first_token_seconds: float | None = None
        self._model, self._document, self._end_ids = model, document, end_ids
        self._add_document = add_document
        self._decode, self._grammars, self._max_rows = decode, grammars, max_rows
        self._held: dict[CartridgeId, Tensor] = {}
        self._fingerprints = Fingerprints()
        self._waiting: deque[str] = deque()
        self._rows: dict[str, DecodeState] = {}
        self._verified = VerifiedBatch(model, end_ids)
        self._told: dict[str, int] = {}  # streamed requests: tokens sent so far
        self._batch: DecodeBatch | None = None
        self._first_request: float | None = None

    def add(
        self, key: str, request: GenerateRequest, prefix: PrefixRef, stream: bool = False
    ) -> None:
        """Queue a request under `key`. `prefix` is its prefix, with the versions that the
        cartridges are held under, and so is that of the request's draft. Raises DataError for an
        unknown document or an invalid request."""
        row = new_row(request, self._model.vocabulary, self._decode, prefix, self._grammars)
        check_draft(request)
        for part in prefix.parts:
            kind, _, name = part.name.partition("/")
            if kind != "document":
                continue
            if request.document_ids:
                require_ids(request.document_ids, self._model.vocabulary, f"document {name}")
                self._add_document(name, request.document_ids)
            else:
                self._document(name)  # raises for an unknown document
        if prefix.then:
            self._model.frequencies()  # raises for a model whose keys cannot be moved
        self._rows[key] = row
        self._waiting.append(key)
        if stream:
            self._told[key] = 0
        if self._first_request is None:
            self._first_request = time.perf_counter()

    def cancel(self, key: str) -> None:
        """End a request with the finish reason "cancelled"."""
        row = self._rows.get(key)
        if row is not None and not row.reason:
            row.reason = "cancelled"

    @torch.no_grad()
    def step(self) -> Iterator[tuple[str, TokenChunk | Completion]]:
        """Draw one token of every row; yield new tokens of streamed requests, and completions.
        Raises PassError where a forward pass fails."""
        if self._batch is not None and self._batch.live:
            with self._pass_over(self._batch.rows):
                self._batch.step()
        if self._verified.live:
            with self._pass_over([row.state for row in self._verified.rows]):
                self._verified.step()
        self._admit()
        if self.first_token_seconds is None and self._first_request is not None:
            self.first_token_seconds = time.perf_counter() - self._first_request
        if self._batch is not None and not self._batch.live:
            self._batch = None
        yield from self._news()
        if not self._verified.live:
            self._verified = VerifiedBatch(self._model, self._end_ids)

    def hold(self, cartridges: Mapping[CartridgeId, Tensor]) -> None:
        """Load cartridges [L, 2, H_kv, P, D]. Raises PublishError, and loads none, for a shape that
        does not fit the model, or where there is no memory for them."""
        layers, heads, size = self._model.kv_shape
        for (name, _), kv in cartridges.items():
            expected = (layers, 2, heads, kv.shape[3] if kv.ndim == 5 else -1, size)
            if tuple(kv.shape) != expected:
                raise PublishError(
                    f"cartridge {name} of shape {tuple(kv.shape)} does not fit this model, which "
                    f"takes [{layers}, 2, {heads}, P, {size}]; was it trained for another base?"
                )
        device, dtype = self._model.device, self._model.dtype
        try:
            self._held |= {key: kv.to(device, dtype) for key, kv in cartridges.items()}
        except (MemoryError, RuntimeError) as error:  # torch's word for no memory
            names = ", ".join(name for name, _ in cartridges)
            raise PublishError(f"cartridge {names} could not be loaded: {error}") from error

    def let_go(self, cartridges: Sequence[CartridgeId]) -> None:
        """Release cartridges."""
        for key in cartridges:
            del self._held[key]

    def loads(self) -> tuple[int, int]:
        return 0, 0  # a decode batch reads the prefix in place: nothing is copied

    def close(self) -> None:
        self._batch = None
        self._verified = VerifiedBatch(self._model, self._end_ids)

    def _admit(self) -> None:
        """Start waiting requests as far as there is room."""
        running = [] if self._batch is None else self._batch.rows
        drafted = [row.state for row in self._verified.rows]
        room = self._max_rows - sum(not row.reason for row in (*running, *drafted))
        new: list[DecodeState] = []
        while self._waiting and len(new) < room:
            row = self._rows.get(self._waiting.popleft())
            if row is not None and not row.reason:
                new.append(row)
        if verified := [row for row in new if row.request.draft is not None]:
            with self._pass_over(verified):
                self._verified.add([self._with_draft(row) for row in verified])
        new = [row for row in new if row.request.draft is None]
        if not new:
            return
        with self._pass_over(new):
            prefixes = {ref: self._prefix(ref) for ref in {row.prefix: None for row in new}}
            for row in new:
                kv = prefixes[row.prefix]
                row.served = self._fingerprints.served(row.prefix, kv, self._single)
            batch = DecodeBatch(self._model, new, prefixes, self._end_ids)
            if self._batch is None or not self._batch.live:
                self._batch = batch
            else:
                self._batch.merge(batch)

    def _with_draft(self, row: DecodeState) -> VerifiedRow:
        draft = row.request.draft
        assert draft is not None
        row.served = ("",) * len(row.prefix.parts)
        return VerifiedRow(row, draft.block, self._prefix(row.prefix), self._prefix(draft.prefix))

    @contextmanager
    def _pass_over(self, rows: Sequence[DecodeState]) -> Iterator[None]:
        """Raise errors of a pass over these rows as PassError."""
        try:
            yield
        except Exception as error:
            row_ids = {id(row) for row in rows}
            keys = frozenset(key for key, row in self._rows.items() if id(row) in row_ids)
            raise PassError(keys) from error

    def _prefix(self, ref: PrefixRef) -> Tensor:
        return composed(self._model, [self._single(part) for part in ref.parts])

    def _single(self, ref: PrefixRef) -> Tensor:
        kind, _, name = ref.name.partition("/")
        if kind == "document":
            return self._document(name)
        return self._held[name, ref.version]

    def _news(self) -> Iterator[tuple[str, TokenChunk | Completion]]:
        for key in [*self._told]:
            row, sent = self._rows[key], self._told[key]
            if len(row.tokens) > sent:
                self._told[key] = len(row.tokens)
                yield key, row.chunk(sent)
        drafted = {id(row.state): row for row in self._verified.rows}
        for key in [key for key, row in self._rows.items() if row.reason]:
            row = self._rows.pop(key)
            self._told.pop(key, None)
            yield key, drafted.get(id(row), row).completion()
