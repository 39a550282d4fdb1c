"""Decode requests through llama.cpp, over the weights of a GGUF file as they are.

    add   a request -> waiting
    step  prefixes of admitted requests are loaded, prompts read, one token of every row drawn

llama.cpp computes the forward pass; the draws, rules, grammars and ends are those of the embedded
engine (`learning.draws`), so equal logits give equal tokens for a seed. Keys and values are kept in
float32 in one pool of positions. A prefix is loaded into it once, and every request over it shares
its cells. One that no request uses stays until its room is wanted.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from cartridge_forge.learning.cartridge import CartridgeId, Fingerprints, shifted
from cartridge_forge.learning.draws import DecodeState, draw_next, new_row, score_prompt
from cartridge_forge.learning.model.control_tokens import token_count
from cartridge_forge.learning.teacher import context_ids
from cartridge_forge.plugins.decoding.grammar import Grammars
from cartridge_forge.plugins.decoding.stopping import Decode
from cartridge_forge.plugins.library.base_models.gguf_file import GGUF_FAMILIES, WINDOW
from cartridge_forge.plugins.library.base_models.kept import kept_gguf
from cartridge_forge.plugins.library.exports.llama_session import sequence_state
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.models.frequencies import frequencies_of
from cartridge_forge.plugins.llama_cpp.library import BatchToken, LlamaContext, LlamaWeights
from cartridge_forge.protocols.errors import DataError, PublishError, RunError
from cartridge_forge.protocols.ports import TokenChunk
from cartridge_forge.protocols.step import (
    CARTRIDGE,
    Completion,
    GenerateRequest,
    PrefixRef,
    count_work,
    require_ids,
)

MOST_ROWS = 64  # decoded at a time
MOST_PREFIXES = 64  # held in llama.cpp's pool at a time
FIRST_POSITIONS = 1024  # of the pool, which grows to `generator.kv_gib`
BATCH_TOKENS = 512  # of one forward pass
SCORED_TOKENS = 64  # of a prompt whose logits are read, in one forward pass
GIB = 2**30
TORCH = "set generator.backend: torch"


@dataclass
class LoadedPrefix:
    """Describe a prefix in llama.cpp's pool: its sequence, its tokens, the rows that use it now,
    and the fingerprints of its parts."""

    sequence: int
    tokens: int
    served: tuple[str, ...]
    users: int = 0


@dataclass
class LlamaRow:
    """Hold a request that is decoded or waits. `document` has the ids of a document's prefix, None
    for cartridges. Of a running one: its sequence in the pool, its prefix, and its last token with
    the position that it is read at next."""

    state: DecodeState
    document: tuple[int, ...] | None
    sequence: int = -1
    prefix: LoadedPrefix | None = None
    token: int = 0
    position: int = 0

    @property
    def budget(self) -> int:
        """Return the positions that the request may take behind its prefix."""
        request = self.state.request
        return len(request.prompt_ids) + request.sampling.max_tokens


class LlamaEngine:
    """Decode requests over cartridges [L, 2, H_kv, P, D] and documents with the model of the one
    GGUF file in the directory `path`. `documents` maps names to the ids of their prefixes;
    `max_kv_bytes` bounds what is kept of documents beside the pool of `kv_gib`.

    Raises RunError where llama.cpp is not installed, DataError where there is no such file, and for
    a model whose cartridges it cannot hold."""

    def __init__(
        self,
        path: str,
        dtype: str,
        threads: int,
        documents: Mapping[str, tuple[int, ...]],
        end_ids: frozenset[int],
        decode: Decode,
        grammars: Grammars | None = None,
        kv_gib: float = 1.0,
        max_kv_bytes: int = GIB,
    ) -> None:
        self.first_token_seconds: float | None = None
        self._path, self._dtype, self._threads = path, getattr(torch, dtype), threads
        self._documents, self._end_ids = documents, end_ids
        self._decode, self._grammars = decode, grammars
        file = kept_gguf(Path(path))
        self._weights = LlamaWeights(file)
        family = self._weights.metadata("general.architecture")
        if family not in GGUF_FAMILIES:
            raise DataError(
                f"{file} is of the architecture {family}, and the order of a key's numbers is "
                f"known of {', '.join(GGUF_FAMILIES)}; {TORCH}"
            )
        if self._weights.metadata(f"{family}.{WINDOW}") not in ("", "0"):
            raise DataError(
                f"layers of {file} see a window of the text, and llama.cpp keeps those apart from "
                f"layers that see all of it, as a cartridge needs it; {TORCH}"
            )
        self._interleaved = GGUF_FAMILIES[family].interleaved
        base = read_base(Path(path))
        self._shape = (base.layers, base.kv_heads, base.head_dim)
        self._tokens = token_count(path) or self._weights.vocabulary
        token_bytes = 2 * base.layers * base.kv_heads * base.head_dim * 4
        self._most_positions = int(kv_gib * GIB / token_bytes)
        self._held: dict[CartridgeId, Tensor] = {}
        self._fingerprints = Fingerprints()
        self._states: OrderedDict[PrefixRef, bytes] = OrderedDict()  # of documents
        self._max_kv_bytes = max_kv_bytes
        self._rows: dict[str, LlamaRow] = {}
        self._waiting: deque[str] = deque()
        self._running: list[LlamaRow] = []
        self._told: dict[str, int] = {}  # streamed requests: tokens sent so far
        self._first_request: float | None = None
        self._loads = self._loaded_tokens = 0
        self._growing = False  # new rows wait until none runs, and the pool is made larger
        self._context: LlamaContext | None = None
        self._open(min(FIRST_POSITIONS, self._most_positions))

    def _open(self, positions: int) -> None:
        """Make a pool of so many positions, with nothing in it."""
        if self._context is not None:
            self._context.close()
        self._context = None
        self._context = LlamaContext(
            self._weights, self._threads, MOST_ROWS + MOST_PREFIXES, positions, BATCH_TOKENS
        )
        self._prefixes: OrderedDict[PrefixRef, LoadedPrefix] = OrderedDict()
        self._free_rows = list(range(MOST_ROWS))
        self._free_prefixes = list(range(MOST_ROWS, MOST_ROWS + MOST_PREFIXES))

    @property
    def _pool(self) -> LlamaContext:
        assert self._context is not None
        return self._context

    def add(
        self, key: str, request: GenerateRequest, prefix: PrefixRef, stream: bool = False
    ) -> None:
        """Queue a request under `key`. `prefix` is its prefix, with the versions that the
        cartridges are held under. Raises DataError for an invalid request, and for one that this
        engine does not serve."""
        if request.draft is not None:
            raise DataError(
                f"request {request.id} has a draft, which the embedded engine alone verifies; "
                f"{TORCH}, or verify: after"
            )
        state = new_row(request, self._tokens, self._decode, prefix, self._grammars)
        cartridges = [part for part in prefix.parts if part.name.startswith(CARTRIDGE)]
        document = None
        if not cartridges and len(prefix.parts) == 1:
            name = prefix.name.partition("/")[2]
            document = request.document_ids or context_ids(self._documents, name)
            require_ids(document, self._weights.vocabulary, f"document {name}")
        elif len(cartridges) != len(prefix.parts):
            raise DataError(
                f"request {request.id} composes a document with other prefixes, and llama.cpp's "
                f"engine composes cartridges alone; {TORCH}"
            )
        if prefix.then:
            frequencies_of(self._path)  # raises for a model whose keys cannot be moved
        row = LlamaRow(state, document)
        wanted = self._prefix_tokens(row) + row.budget
        if wanted > self._most_positions:
            raise DataError(
                f"request {request.id} takes {wanted} positions with its prefix, prompt and new "
                f"tokens, and the engine holds {self._most_positions}; raise generator.kv_gib, or "
                "use a shorter prompt"
            )
        self._rows[key] = row
        self._waiting.append(key)
        if stream:
            self._told[key] = 0
        if self._first_request is None:
            self._first_request = time.perf_counter()

    def cancel(self, key: str) -> None:
        """End a request with the finish reason "cancelled"."""
        row = self._rows.get(key)
        if row is not None and not row.state.reason:
            row.state.reason = "cancelled"

    @torch.no_grad()
    def step(self) -> Iterator[tuple[str, TokenChunk | Completion]]:
        """Draw one token of every row; yield new tokens of streamed requests, and completions.
        Raises RunError where a forward pass fails."""
        self._leave()
        self._advance()
        self._admit()
        if self.first_token_seconds is None and self._first_request is not None:
            self.first_token_seconds = time.perf_counter() - self._first_request
        self._leave()
        for key in [*self._told]:
            state, sent = self._rows[key].state, self._told[key]
            if len(state.tokens) > sent:
                self._told[key] = len(state.tokens)
                yield key, state.chunk(sent)
        for key in [key for key, row in self._rows.items() if row.state.reason]:
            row = self._rows.pop(key)
            self._told.pop(key, None)
            yield key, row.state.completion()

    def hold(self, cartridges: Mapping[CartridgeId, Tensor]) -> None:
        """Keep cartridges [L, 2, H_kv, P, D]. Raises PublishError, and keeps none, for a shape that
        does not fit the model or the pool."""
        layers, heads, size = self._shape
        for (name, _), kv in cartridges.items():
            tokens = kv.shape[3] if kv.ndim == 5 else -1
            if tuple(kv.shape) != (layers, 2, heads, tokens, size):
                raise PublishError(
                    f"cartridge {name} of shape {tuple(kv.shape)} does not fit this model, which "
                    f"takes [{layers}, 2, {heads}, P, {size}]; was it trained for another base?"
                )
            if tokens >= self._most_positions:
                raise PublishError(
                    f"cartridge {name} of {tokens} tokens leaves no room for a prompt in the "
                    f"engine's {self._most_positions} positions; raise generator.kv_gib"
                )
        self._held |= {key: kv.to(self._dtype).clone() for key, kv in cartridges.items()}

    def let_go(self, cartridges: Sequence[CartridgeId]) -> None:
        """Release cartridges, and what no row reads of the prefixes that have them."""
        for key in cartridges:
            del self._held[key]
        evicted = set(cartridges)
        for ref in [*self._prefixes]:
            parts = {(p.name.removeprefix(CARTRIDGE), p.version) for p in ref.parts}
            if parts & evicted and not self._prefixes[ref].users:
                self._unload(ref)

    def loads(self) -> tuple[int, int]:
        return self._loads, self._loaded_tokens

    def close(self) -> None:
        if self._context is not None:
            self._context.close()
        self._weights.close()

    def _advance(self) -> None:
        """Draw the next token of every running row."""
        if not self._running:
            return
        logits = self._pool.forward(
            [BatchToken(row.sequence, row.position, row.token, True) for row in self._running]
        )
        count_work(len(self._running))
        self._draw(self._running, logits)

    def _draw(self, rows: Sequence[LlamaRow], logits: Tensor) -> None:
        chosen = draw_next([row.state for row in rows], logits, self._tokens, self._end_ids)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            row.token, row.position = token, row.position + 1

    def _leave(self) -> None:
        """Free what rows hold that have ended."""
        ended = [row for row in self._running if row.state.reason]
        if not ended:
            return
        self._running = [row for row in self._running if not row.state.reason]
        for row in ended:
            self._pool.cut(row.sequence, 0)
            self._free_rows.append(row.sequence)
            assert row.prefix is not None
            row.prefix.users -= 1

    def _admit(self) -> None:
        """Read the prompts of waiting requests as far as there is room, and draw their first
        tokens."""
        new: list[LlamaRow] = []
        while self._waiting and not (self._growing and self._running):
            row = self._rows.get(self._waiting[0])
            if row is None or row.state.reason:
                self._waiting.popleft()
                continue
            if not self._free_rows or not self._make_room(row):
                break
            prefix = self._loaded(row)
            if prefix is None and self._running:
                self._growing = True
                break
            if prefix is None:
                self._open(self._pool.positions)
                prefix = self._loaded(row)
            if prefix is None:
                raise RunError(f"llama.cpp does not take {row.state.prefix.name}")
            self._waiting.popleft()
            prefix.users += 1
            row.prefix, row.state.served = prefix, prefix.served
            row.sequence = self._free_rows.pop()
            self._pool.copy(prefix.sequence, row.sequence)
            self._running.append(row)
            new.append(row)
        if new:
            self._draw(new, self._read_prompts(new))

    def _read_prompts(self, rows: Sequence[LlamaRow]) -> Tensor:
        """Read the prompts of rows whose prefixes are loaded; return the logits [B, V] behind
        each."""
        last: dict[int, Tensor] = {}
        flat: list[BatchToken] = []
        for row in rows:
            assert row.prefix is not None
            ids = row.state.request.prompt_ids
            row.position = row.prefix.tokens + len(ids) - 1
            count_work(len(ids))
            tokens = [
                BatchToken(row.sequence, row.prefix.tokens + i, token, i == len(ids) - 1)
                for i, token in enumerate(ids)
            ]
            if row.state.request.prompt_logprobs:
                self._score(row.state, tokens)
                last[row.sequence] = self._pool.forward(tokens[-1:])[0]
            else:
                flat += tokens
        rows_logits = iter(self._pool.forward(flat)) if flat else iter(())
        return torch.stack([
            last[row.sequence] if row.sequence in last else next(rows_logits) for row in rows
        ])  # fmt: skip

    def _score(self, state: DecodeState, tokens: Sequence[BatchToken]) -> None:
        """Read a prompt up to its last token, and set its log-probabilities."""

        def logits_at(first: int, stop: int) -> Tensor:
            parts = []
            for start in range(first, stop, SCORED_TOKENS):
                chunk = tokens[start : min(start + SCORED_TOKENS, stop)]
                parts.append(self._pool.forward([replace(token, read=True) for token in chunk]))
            return torch.cat(parts)

        score_prompt(state, logits_at, self._weights.vocabulary, self._tokens)

    def _prefix_tokens(self, row: LlamaRow) -> int:
        parts = row.state.prefix.parts
        if row.document is not None:
            return len(row.document)
        return sum(self._held[p.name.removeprefix(CARTRIDGE), p.version].shape[3] for p in parts)

    def _make_room(self, row: LlamaRow) -> bool:
        """Return whether the pool has room for a row and its prefix, after prefixes that no row
        uses have left, or the pool has grown, where nothing runs."""
        ref = row.state.prefix
        prefix_tokens = self._prefix_tokens(row)
        budgets = row.budget + sum(one.budget for one in self._running)

        def wanted() -> int:
            loaded = sum(one.tokens for one in self._prefixes.values())
            return budgets + loaded + (0 if ref in self._prefixes else prefix_tokens)

        def full() -> bool:
            no_sequence = ref not in self._prefixes and not self._free_prefixes
            return wanted() > self._pool.positions or no_sequence

        while full():
            idle = next(
                (r for r, one in self._prefixes.items() if not one.users and r != ref), None
            )
            if idle is None:
                break
            self._unload(idle)
        # Once the pool was too small, it grows as soon as nothing runs.
        more = self._pool.positions < self._most_positions
        self._growing = more and (self._growing or full())
        if self._growing and not self._running:
            self._grow()
        return not full()

    def _grow(self) -> None:
        """Make a pool of at least twice the size that has room for all waiting requests, as far as
        there may be one."""
        rows = [self._rows[key] for key in self._waiting if key in self._rows]
        prefixes = {row.state.prefix: self._prefix_tokens(row) for row in rows}
        wanted = sum(row.budget for row in rows) + sum(prefixes.values())
        positions = 2 * self._pool.positions
        while positions < wanted:
            positions *= 2
        self._open(min(positions, self._most_positions))
        self._growing = False

    def _loaded(self, row: LlamaRow) -> LoadedPrefix | None:
        """Return a row's prefix in the pool, loaded now where it is not there; None where no free
        positions of its length lie side by side, as llama.cpp wants those of a state."""
        ref = row.state.prefix
        if ref in self._prefixes:
            self._prefixes.move_to_end(ref)
            return self._prefixes[ref]
        sequence = self._free_prefixes.pop()
        if row.document is not None:
            self._load_document(ref, row.document, sequence)
            prefix = LoadedPrefix(sequence, len(row.document), ("",))
        else:
            kv = self._composed(ref)
            if not self._load_cartridge(ref, kv, sequence):
                self._free_prefixes.append(sequence)
                return None
            served = self._fingerprints.served(ref, kv, self._single)
            prefix = LoadedPrefix(sequence, kv.shape[3], served)
        self._prefixes[ref] = prefix
        return prefix

    def _load_cartridge(self, ref: PrefixRef, kv: Tensor, sequence: int) -> bool:
        state = sequence_state(kv.float(), sequence, interleaved=self._interleaved)
        if not self._pool.load(sequence, state):
            return False
        if self._pool.state(sequence) != state:  # a fingerprint tells what is decoded over
            raise RunError(f"llama.cpp holds other numbers of {ref.name} version {ref.version}")
        self._loads, self._loaded_tokens = self._loads + 1, self._loaded_tokens + kv.shape[3]
        return True

    def _load_document(self, ref: PrefixRef, ids: Sequence[int], sequence: int) -> None:
        """Load the keys and values of a document, or read it now; the least recently used of those
        that are kept leave for it."""
        if not ids:
            return
        state = self._states.pop(ref, None)
        if state is None or not self._pool.load(sequence, state):
            self._pool.forward([BatchToken(sequence, i, t, False) for i, t in enumerate(ids)])
            count_work(len(ids))
            state = self._pool.state(sequence)
        self._states[ref] = state
        while sum(map(len, self._states.values())) > self._max_kv_bytes:
            self._states.popitem(last=False)

    def _unload(self, ref: PrefixRef) -> None:
        prefix = self._prefixes.pop(ref)
        self._pool.cut(prefix.sequence, 0)
        self._free_prefixes.append(prefix.sequence)

    def _composed(self, ref: PrefixRef) -> Tensor:
        """Return the keys and values [L, 2, H_kv, P, D] of a prefix, each part behind those before
        it."""
        first, *later = [self._single(part) for part in ref.parts]
        parts, start = [first], first.shape[3]
        for kv in later:
            parts.append(shifted(kv, start, frequencies_of(self._path)))
            start += kv.shape[3]
        return torch.cat(parts, dim=3) if later else first

    def _single(self, ref: PrefixRef) -> Tensor:
        return self._held[ref.name.removeprefix(CARTRIDGE), ref.version]
