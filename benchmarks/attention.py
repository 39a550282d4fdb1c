"""Attention over a long prefix: its scores kept against formed in chunks of queries.

    python -m benchmarks.attention [--prefixes 4096 16384] [--samples 8 16]

"student": forward and backward of one sequence of 1,024 tokens over a trainable prefix, the tiny
shape of `benchmarks.step_gpu`; all scores kept, or in chunks of 32 MiB that are formed again in the
backward pass. "teacher": the scoring of `benchmarks.step`, which learns nothing, over a document of
4,096 tokens; scores up to 256 MiB at once, or in chunks of 8 MiB, which lie in a CPU's caches. Each
row is a process of its own. Seconds are of one thread's work, whoever else uses the cores: medians
of `--repeats` after a first one, of which `grew` is the process's peak of memory beyond what it
began with (read from /proc, so Linux only). A row is refused whose numbers are not those of its
other form.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actors.base import keep_freed_memory
from benchmarks.losses import grown_mb, in_a_process
from benchmarks.record import arguments, provenance, write
from benchmarks.reference.seed_step import KEEP_TOP
from benchmarks.step import CONFIG, MODEL, samples_of
from benchmarks.step_gpu import SETTINGS, random_model
from learning.model import attention
from learning.model.attention import CACHED_SCORE_BYTES, SCORE_BYTES, PrefixContext, hidden_states
from learning.model.document_kv import document_kv
from learning.model.loading import flush_denormals, load_model
from learning.scoring import score_kept

SHAPE = SETTINGS["tiny"].shape
TOKENS, DOCUMENT = 1024, 4096
CHUNK_BYTES = 32 * 2**20
Once = Callable[[], tuple[tuple[float, ...], Tensor]]  # processor seconds, and the result


def student(prefix: int, most: int, repeats: int) -> dict[str, Any]:
    """Return seconds forward and backward with at most `most` bytes of a layer's scores at once."""
    attention.SCORE_BYTES = most
    model = random_model(SHAPE, "float32", torch.device("cpu"))
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(SHAPE.vocab, (1, TOKENS), generator=draws)
    size = (1, SHAPE.layers, 2, SHAPE.kv_heads, prefix, SHAPE.head_dim)
    held = torch.randn(size, generator=draws)

    def once(tokens: int = TOKENS) -> tuple[tuple[float, ...], Tensor]:
        kv = held.clone().requires_grad_()
        positions = prefix + torch.arange(tokens)[None]
        mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
        begun = time.process_time()
        hidden = hidden_states(model, ids[:, :tokens], positions, mask, PrefixContext(kv=kv))
        middle = time.process_time()
        hidden.square().mean().backward()  # type: ignore[no-untyped-call]  # torch's
        ended = time.process_time()
        assert kv.grad is not None
        return (middle - begun, ended - middle), kv.grad

    once(2)  # initialises what is lazy
    return measured(once, repeats)


def teacher(samples: int, most: int, repeats: int) -> dict[str, Any]:
    """Return seconds of scoring a step's samples over a document with cached keys and values."""
    attention.CACHED_SCORE_BYTES = most
    model = load_model(str(MODEL))
    vocabulary = model.config.vocab_size
    document = random.Random(f"document/{DOCUMENT}").choices(range(5, vocabulary), k=DOCUMENT)
    prefixes = {"d": document_kv(model, tuple(document))}
    batch = samples_of(samples, vocabulary, 0)

    def once() -> tuple[tuple[float, ...], Tensor]:
        begun = time.process_time()
        found = score_kept(model, batch, prefixes, CONFIG.row_tokens, KEEP_TOP)
        return (time.process_time() - begun,), found["logprobs"]

    return measured(once, repeats)


def measured(once: Once, repeats: int) -> dict[str, Any]:
    """Return medians of the seconds of `once`, and the peak memory that it added."""
    found: list[Tensor] = []
    grew = grown_mb(lambda: found.append(once()[1]))
    rounds = [once()[0] for _ in range(repeats)]
    seconds = [round(statistics.median(of), 4) for of in zip(*rounds, strict=True)]
    return {"seconds": seconds, "grew_mb": round(grew, 1), "found": found[0]}


def pair(who: str, at: int, forms: Mapping[str, Callable[[], dict[str, Any]]]) -> list[Any]:
    """Return the rows of both forms, the usual one first; `ratios` divides the second by it."""
    rows: list[dict[str, Any]] = []
    found: list[Tensor] = []
    for form, work in forms.items():
        row = in_a_process(work)
        found.append(row.pop("found"))
        rows.append({"who": who, "at": at, "form": form, **row})
        print(line(rows[-1], rows[0]), flush=True)
    scale = found[0].abs().max().item()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4 * scale)
    return rows


def run(prefixes: Sequence[int], samples: Sequence[int], repeats: int) -> list[Any]:
    torch.set_num_threads(1)
    keep_freed_memory()  # this and the next line as in the actors' processes
    flush_denormals()
    rows = []
    for prefix in prefixes:
        of = partial(student, prefix, repeats=repeats)
        forms = {"kept": partial(of, 1 << 62), "32 MiB": partial(of, CHUNK_BYTES)}
        rows += pair("student, prefix", prefix, forms)
    for count in samples:
        of = partial(teacher, count, repeats=repeats)
        forms = {"256 MiB": partial(of, SCORE_BYTES), "8 MiB": partial(of, CACHED_SCORE_BYTES)}
        rows += pair("teacher, samples", count, forms)
    return rows


def compared(row: dict[str, Any], first: dict[str, Any]) -> tuple[float, float]:
    """Return seconds and memory, relative to those of the first form."""
    return sum(row["seconds"]) / sum(first["seconds"]), row["grew_mb"] / first["grew_mb"]


def line(row: dict[str, Any], first: dict[str, Any]) -> str:
    seconds = " + ".join(f"{part:.3f}" for part in row["seconds"])
    cells = f"{row['who']:<17}{row['at']:>6}  {row['form']:<8}{seconds:>15}{row['grew_mb']:>10.0f}"
    return cells + "".join(f"{ratio:>9.2f}" for ratio in compared(row, first))


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    found = {}
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        seconds, memory = compared(second, first)
        found[f"{second['who']} {second['at']}: seconds"] = seconds
        if second["who"].startswith("student"):
            found[f"{second['who']} {second['at']}: memory"] = memory
    return found


def main() -> None:
    parser = arguments(__doc__, "attention")
    parser.add_argument("--prefixes", type=int, nargs="+")
    parser.add_argument("--samples", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    prefixes = options.prefixes or ([4096] if options.quick else [4096, 16384])
    samples = options.samples or ([8] if options.quick else [8, 16])
    told = provenance(
        "attention", vars(options) | {"prefixes": prefixes, "samples": samples, "threads": 1}
    )
    print(f"{'':25}{'scores':<8}{'seconds':>15}{'grew, MiB':>10}{'over first':>18}")
    rows = run(prefixes, samples, options.repeats)
    write(options.out, told, ratios(rows), rows)


if __name__ == "__main__":
    main()
