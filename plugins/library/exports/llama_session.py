"""Write a cartridge as a session file of llama.cpp, which `llama_state_seq_load_file` and the
server's `/slots/0?action=restore` read.

    u32 magic, version; u32 n; i32 token [n]
    u32 streams (1); u32 cells (P); of each cell: i32 position, u32 sequences (1), i32 sequence (0)
    u32 transposed; u32 layers; u32 rotation of keys, of values (0: none)
    of each layer: i32 type; u64 bytes of a row; keys [P, H_kv * D]
    of each layer: i32 type; u64 bytes of a row; values [P, H_kv * D]
        or transposed: i32 type; u32 bytes of a number; u32 rows; values [H_kv * D, P]

All numbers are little-endian. Values lie transposed where the context has no flash attention. A
context reads a file of its own layout and its own types of keys and values alone. The tokens stand
for the prefix: a prompt that begins with them is read behind it.

Source: files that llama.cpp b11549 (xllamacpp 2026.10.11549) wrote; earlier versions have other
numbers as `VERSION`, and refuse this one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

MAGIC, VERSION = 0x67677371, 4  # "ggsq", LLAMA_STATE_SEQ_VERSION
IN_MEMORY = 0xAF143CD8  # begins what `llama_state_seq_set_data` reads, before the sequence
# ggml's numbers of types, and what its command line calls them.
GGML_TYPES = {torch.float32: (0, "f32"), torch.float16: (1, "f16"), torch.bfloat16: (30, "bf16")}


def neighbouring(keys: Tensor) -> Tensor:
    """Return keys [..., D] in the order in which llama.cpp rotates models of the Llama family:
    number i of a head's first half beside number i of its second."""
    halves = keys.unflatten(-1, (2, -1))
    return halves.transpose(-1, -2).flatten(-2)


def write_session(
    file: Path, kv: Tensor, tokens: Sequence[int], *, interleaved: bool, transposed: bool
) -> None:
    """Write keys and values [L, 2, H_kv, P, D] behind the ids `tokens` [P]. `interleaved`: the
    model's family is rotated in neighbouring pairs. `transposed`: for a context without flash
    attention."""
    with file.open("wb") as opened:
        opened.write(struct.pack(f"<3I{len(tokens)}i", MAGIC, VERSION, len(tokens), *tokens))
        opened.writelines(_parts(kv, interleaved, transposed, 0))


def sequence_state(kv: Tensor, sequence: int, *, interleaved: bool) -> bytes:
    """Return keys and values [L, 2, H_kv, P, D] as `llama_state_seq_set_data` reads them, and
    `llama_state_seq_get_data` writes them, of a sequence of a context without flash attention;
    `interleaved` as in `write_session`."""
    head = struct.pack("<2I", IN_MEMORY, sequence)
    return b"".join([head, *_parts(kv, interleaved, True, sequence)])


def _parts(kv: Tensor, interleaved: bool, transposed: bool, sequence: int) -> Iterator[bytes]:
    layers, _, heads, count, head_dim = kv.shape
    kind, width = GGML_TYPES[kv.dtype][0], heads * head_dim
    yield struct.pack("<2I", 1, count)
    for position in range(count):
        yield struct.pack("<iIi", position, 1, sequence)
    yield struct.pack("<4I", int(transposed), layers, 0, 0)
    row = struct.pack("<iQ", kind, width * kv.element_size())
    column = struct.pack("<iII", kind, kv.element_size(), width)
    for keys in kv[:, 0]:
        yield row
        yield _bytes((neighbouring(keys) if interleaved else keys).transpose(0, 1))
    for values in kv[:, 1]:
        yield column if transposed else row
        yield _bytes(values.transpose(1, 2) if transposed else values.transpose(0, 1))


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()
