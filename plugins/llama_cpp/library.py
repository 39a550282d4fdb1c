"""Call llama.cpp's C interface (llama.h), which the package xllamacpp carries in its extension.

xllamacpp's own class `Server` answers requests of text with llama.cpp's sampler. Here are the
functions below it: a forward pass over chosen sequences, their logits, and the state of a sequence.
Structures are those of the one version `REQUIREMENT`; `open_library` refuses another, and a
`LlamaContext` whose settings do not read back as they were given.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cartridge_forge.protocols.errors import DataError, RunError
from cartridge_forge.protocols.packages import extra_command

PACKAGE, VERSION = "xllamacpp", "2026.10.11549"
F32, WITHOUT = 0, 0  # GGML_TYPE_F32, LLAMA_FLASH_ATTN_TYPE_DISABLED
LOGGED = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)


class ModelParams(ctypes.Structure):
    """Hold `llama_model_params`, of which only the library's own default is used."""

    _fields_ = (("unread", c_int8 * 256),)


class ContextParams(ctypes.Structure):
    """Hold `llama_context_params`. The end is larger than the library's own structure, which is
    read and written from its beginning."""

    _fields_ = (
        ("n_ctx", c_uint32), ("n_batch", c_uint32), ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32), ("n_rs_seq", c_uint32), ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32), ("n_threads", c_int32), ("n_threads_batch", c_int32),
        ("context_type", c_int32), ("rope_scaling", c_int32), ("pooling", c_int32),
        ("attention", c_int32), ("flash_attention", c_int32), ("rope", c_float * 6),
        ("original_context", c_uint32), ("defragment", c_float), ("callbacks", c_void_p * 2),
        ("type_k", c_int32), ("type_v", c_int32), ("abort", c_void_p * 3),
        ("embeddings", ctypes.c_bool), ("offload_kqv", ctypes.c_bool), ("no_perf", ctypes.c_bool),
        ("op_offload", ctypes.c_bool), ("swa_full", ctypes.c_bool), ("kv_unified", ctypes.c_bool),
        ("unread", c_int8 * 256),
    )  # fmt: skip


class Batch(ctypes.Structure):
    """Hold `llama_batch`: of n tokens the ids, positions, sequences, and whether their logits are
    computed."""

    _fields_ = (
        ("n", c_int32), ("token", POINTER(c_int32)), ("embedding", c_void_p),
        ("position", POINTER(c_int32)), ("sequences", POINTER(c_int32)),
        ("sequence", POINTER(POINTER(c_int32))), ("read", POINTER(c_int8)),
    )  # fmt: skip


FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (c_void_p, c_void_p)),
    "llama_model_default_params": (ModelParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_meta_val_str": (c_int32, (c_void_p, c_char_p, c_char_p, c_size_t)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_context_default_params": (ContextParams, ()),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParams)),
    "llama_free": (None, (c_void_p,)),
    "llama_n_ctx_seq": (c_uint32, (c_void_p,)),
    "llama_n_batch": (c_uint32, (c_void_p,)),
    "llama_n_seq_max": (c_uint32, (c_void_p,)),
    "llama_n_threads": (c_int32, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_rm": (ctypes.c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_state_seq_get_size": (c_size_t, (c_void_p, c_int32)),
    "llama_state_seq_get_data": (c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
    "llama_state_seq_set_data": (c_size_t, (c_void_p, c_char_p, c_size_t, c_int32)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits": (POINTER(c_float), (c_void_p,)),
}


@cache
def open_library() -> Any:
    """Return llama.cpp's functions. Raises RunError where the package is not installed, and for
    another version of it."""
    remedy = f"run `{extra_command('llama-cpp')}`, or set generator.backend: torch"
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise RunError(f"this generator needs llama.cpp, which is not installed: {remedy}")
    if (have := version(PACKAGE)) != VERSION:
        raise RunError(
            f"{PACKAGE} {have} is installed, and this generator calls {VERSION}, whose structures "
            f"it knows: {remedy}"
        )
    files = sorted(Path(spec.origin).parent.glob("xllamacpp.*.so"))
    if not files:
        raise RunError(f"{PACKAGE} has no extension for this machine beside {spec.origin}")
    library = ctypes.CDLL(str(files[0]))
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(ctypes.cast(_silent, c_void_p), None)
    library.llama_backend_init()
    return library


_silent = LOGGED(lambda level, text, data: None)


@dataclass(frozen=True)
class BatchToken:
    """Describe a token of a forward pass: its sequence, its position there and its id. `read`: its
    logits are computed."""

    sequence: int
    position: int
    id: int
    read: bool


class LlamaWeights:
    """Hold the model of a GGUF file, which is mapped into memory. Raises DataError for a file that
    llama.cpp does not read."""

    def __init__(self, file: Path) -> None:
        self._library = open_library()
        self.file = file
        self.model = self._library.llama_model_load_from_file(
            str(file).encode(), self._library.llama_model_default_params()
        )
        if not self.model:
            raise DataError(f"llama.cpp reads no model in {file}; add it again: forge models add")
        self.vocabulary: int = self._library.llama_vocab_n_tokens(
            self._library.llama_model_get_vocab(self.model)
        )

    def metadata(self, key: str) -> str:
        """Return a field of the file as text, "" where it is not there."""
        text = ctypes.create_string_buffer(256)
        self._library.llama_model_meta_val_str(self.model, key.encode(), text, len(text))
        return text.value.decode()

    def close(self) -> None:
        """Free the model, of which no context is left."""
        self._library.llama_model_free(self.model)


class LlamaContext:
    """Hold keys and values of up to `sequences` sequences in one pool of `positions`, in float32
    and without flash attention, which rounds to half precision on CPUs. A position that several
    sequences share is held once. Raises RunError without memory."""

    def __init__(
        self, weights: LlamaWeights, threads: int, sequences: int, positions: int, batch_tokens: int
    ) -> None:
        self._library = open_library()
        self._vocabulary = weights.vocabulary
        params = self._library.llama_context_default_params()
        default = (params.n_ctx, params.n_batch, params.type_k, params.flash_attention)
        if default != (512, 2048, 1, -1) or params.kv_unified:
            raise RunError(f"the structures of {PACKAGE} {VERSION} are others on this machine")
        params.n_ctx, params.n_seq_max, params.kv_unified = positions, sequences, True
        params.n_batch = params.n_ubatch = batch_tokens
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = F32
        params.flash_attention = WITHOUT
        self._context = self._library.llama_init_from_model(weights.model, params)
        if not self._context:
            raise RunError(
                f"llama.cpp has no memory for {positions} positions of {weights.file}; lower "
                "generator.kv_gib"
            )
        self.positions: int = self._library.llama_n_ctx_seq(self._context)
        at = (
            self._library.llama_n_batch(self._context),
            self._library.llama_n_seq_max(self._context),
            self._library.llama_n_threads(self._context),
        )
        if at != (batch_tokens, sequences, threads) or self.positions < positions:
            raise RunError(f"{PACKAGE} {VERSION} read back other settings than were given: {at}")
        self._memory = self._library.llama_get_memory(self._context)
        self._batch_tokens = batch_tokens
        self._arrays = _BatchArrays(batch_tokens)

    def copy(self, source: int, sequence: int) -> None:
        """Have an empty sequence begin with the positions of another, which both then share."""
        self._library.llama_memory_seq_cp(self._memory, source, sequence, -1, -1)

    def cut(self, sequence: int, count: int) -> None:
        """Keep the first `count` positions of a sequence alone."""
        self._library.llama_memory_seq_rm(self._memory, sequence, count, -1)

    def load(self, sequence: int, state: bytes) -> bool:
        """Replace a sequence by a state; return whether llama.cpp took it."""
        self.cut(sequence, 0)
        read: int = self._library.llama_state_seq_set_data(
            self._context, state, len(state), sequence
        )
        return read == len(state)

    def state(self, sequence: int) -> bytes:
        """Return the state of a sequence as `load` takes it."""
        size = self._library.llama_state_seq_get_size(self._context, sequence)
        data = ctypes.create_string_buffer(size)
        got = self._library.llama_state_seq_get_data(self._context, data, size, sequence)
        return data.raw[:got]

    def forward(self, tokens: Sequence[BatchToken]) -> Tensor:
        """Run tokens through the model; return the logits [n, V] of those that are read, in order.
        Raises RunError where llama.cpp fails."""
        parts = [
            self._pass(tokens[start : start + self._batch_tokens])
            for start in range(0, len(tokens), self._batch_tokens)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pass(self, tokens: Sequence[BatchToken]) -> Tensor:
        batch, read = self._arrays.filled(tokens)
        code = self._library.llama_decode(self._context, batch)
        if code:
            raise RunError(f"llama.cpp's forward pass of {len(tokens)} tokens failed ({code})")
        if not read:
            return torch.empty(0, self._vocabulary)
        rows = self._library.llama_get_logits(self._context)
        address = ctypes.cast(rows, c_void_p).value
        assert address is not None
        memory = (c_float * (read * self._vocabulary)).from_address(address)
        return torch.frombuffer(memory, dtype=torch.float32).view(read, -1).clone()  # [n, V]

    def close(self) -> None:
        """Free the pool."""
        self._library.llama_free(self._context)


class _BatchArrays:
    """Hold the memory of batches of up to `most` tokens."""

    def __init__(self, most: int) -> None:
        self._ids, self._positions, self._counts, self._sequences = (
            (c_int32 * most)() for _ in range(4)
        )
        self._read = (c_int8 * most)()
        size = ctypes.sizeof(c_int32)
        base = ctypes.addressof(self._sequences)
        self._pointers = (POINTER(c_int32) * most)(*[
            ctypes.cast(base + i * size, POINTER(c_int32)) for i in range(most)
        ])  # fmt: skip
        self._counts[:] = [1] * most

    def filled(self, tokens: Sequence[BatchToken]) -> tuple[Batch, int]:
        """Return the batch of these tokens, and how many of them are read."""
        count = len(tokens)
        self._ids[:count] = [token.id for token in tokens]
        self._positions[:count] = [token.position for token in tokens]
        self._sequences[:count] = [token.sequence for token in tokens]
        self._read[:count] = [token.read for token in tokens]
        batch = Batch(
            count, self._ids, None, self._positions, self._counts, self._pointers, self._read
        )
        return batch, sum(token.read for token in tokens)
