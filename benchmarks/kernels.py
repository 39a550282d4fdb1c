"""Time the kernels of a layer on a CPU, in turns: attention, and products with frozen weights.

    python -m benchmarks.kernels [--repeats 9] [--threads 1]

"attention": queries of 9 heads over keys of 3, of size 64 (SmolLM2-135M's), in float32: what
torch's blocked softmax takes, the same sums by products of MKL ("mkl ROWS") and of oneDNN
("onednn ROWS"), each for so many queries of a head, or rows of a product, at a time, and CHUNKED of
`learning.attention`. A shape is "queries x keys", " backward" for gradients. "products":
x @ weight.T and, as "backward", grad @ weight, by MKL, by oneDNN, and by oneDNN from a packed
weight.

Seconds are of the thread's work, whoever else uses the cores (of all threads together, with more
than one, where waiting threads count too); a ratio is the median over turns of its seconds over the
first side's: above 1 it takes longer. Every result is compared with float64's; `off` is the largest
difference.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.record import benchmark, median_ratio
from cartridge_forge.learning import attention
from cartridge_forge.learning.attention import CHUNKED, FLASH
from cartridge_forge.learning.decoder import packed

HEADS, KV_HEADS, SIZE = 9, 3, 64
SCALE = SIZE**-0.5
# The document teacher's pass, a chunk of a document that is read, decoding, training.
SHAPES = ((757, 1793), (512, 1536), (12, 1793), (1, 1793), (216, 128))
BACKWARD = ((757, 1793), (216, 128))
WEIGHTS = {"qkv": (960, 576), "out": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
ROWS = (1, 12, 128, 224, 768)
AT_ONCE = {"mkl": (64, 256), "onednn": (256, 1024)}
CHUNK_BYTES = (4 * 2**20, 256 * 2**20)
COPIES = 20  # of a weight, so that it comes from memory as in a model
Part = tuple[Tensor, ...]


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T by oneDNN."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def by_mkl(q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
    """Return attention [H_q, Q, D] by batched products, `rows` queries of each head at a time."""
    parts = []
    for part in (q * SCALE).split(rows, 1):
        weights, total = _weights(torch.bmm(part.reshape(KV_HEADS, -1, SIZE), k.mT))
        parts.append(torch.bmm(weights, v).div_(total).view(HEADS, -1, SIZE))
    return torch.cat(parts, 1)


def by_onednn(q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
    """Return attention [H_q, Q, D] by products of one key head's queries, `rows` at a time."""
    heads = []
    for queries, keys, values in zip((q * SCALE).reshape(KV_HEADS, -1, SIZE), k, v, strict=True):
        columns, parts = values.T.contiguous(), []
        for part in queries.split(rows):
            weights, total = _weights(onednn(part, keys))
            parts.append(onednn(weights, columns).div_(total))
        heads.append(torch.cat(parts))
    return torch.stack(heads).view(q.shape)


def _weights(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    return weights, weights.sum(-1, keepdim=True)


def chunked(call: Callable[..., Part], bound: int, *inputs: Any) -> Part:
    """Return what CHUNKED computes with at most `bound` bytes of scores at a time."""
    default, attention.CACHED_BYTES = attention.CACHED_BYTES, bound
    try:
        return call(*inputs)
    finally:
        attention.CACHED_BYTES = default


def gradients_by_mkl(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, rows: int
) -> Part:
    """Return the gradients by q, k and v by batched products, `rows` queries of each head at a
    time."""
    by_key, by_value = torch.zeros_like(k), torch.zeros_like(v)
    mean, by_query = (grad * out).sum(-1, keepdim=True), []
    for start in range(0, q.shape[1], rows):
        queries, grads, means, logs = (
            x[:, start : start + rows].reshape(KV_HEADS, -1, x.shape[-1])
            for x in (q, grad, mean, sums[..., None])
        )
        weights = torch.bmm(queries * SCALE, k.mT).sub_(logs).exp_()
        scores = torch.bmm(grads, v.mT).sub_(means).mul_(weights).mul_(SCALE)
        by_value.baddbmm_(weights.mT, grads)
        by_key.baddbmm_(scores.mT, queries)
        by_query.append(torch.bmm(scores, k).view(HEADS, -1, SIZE))
    return torch.cat(by_query, 1), by_key, by_value


def in_turns(
    sides: Mapping[str, Callable[[], Sequence[Tensor]]], exact: Sequence[Tensor], repeats: int
) -> dict[str, dict[str, float]]:
    """Return each side's median seconds, their ratio to the first side's, and how far its result
    is off."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.process_time
    off, seconds = {}, {name: [] for name in sides}
    for name, work in sides.items():
        off[name] = max(
            float((a.double() - b).abs().max()) for a, b in zip(work(), exact, strict=True)
        )
    for _ in range(repeats):
        for name, work in sides.items():
            start = clock()
            work()
            seconds[name].append(clock() - start)
    first = seconds[next(iter(sides))]
    return {
        name: {
            "seconds": float(f"{statistics.median(laps):.4g}"),
            "ratio": round(median_ratio(laps, first), 2), "off": float(f"{off[name]:.1e}"),
        }
        for name, laps in seconds.items()
    }  # fmt: skip


def attention_rows(queries: int, keys: int, gradients: bool, repeats: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    q, grad = (  # tokens lie apart, as in the decoder
        torch.randn(queries, HEADS, SIZE, generator=draw).transpose(0, 1) for _ in range(2)
    )
    k, v = (torch.randn(KV_HEADS, keys, SIZE, generator=draw) for _ in range(2))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        outputs = (wide[0].reshape(KV_HEADS, -1, SIZE) * SCALE @ wide[1].mT).softmax(-1) @ wide[2]
        exact: Sequence[Tensor] = [outputs.view(q.shape)]
        if gradients:
            exact = torch.autograd.grad(exact[0], wide, grad.double())
    inputs: list[Any] = [q[None], k[None], v[None]]
    tail = (None, False, SCALE)
    out, sums = FLASH.forward(*inputs, *tail)
    sides: dict[str, Callable[[], Sequence[Tensor]]] = {}
    if gradients:
        inputs = [grad[None], *inputs, out, sums]

        def first(call: Any, *more: Any) -> Callable[[], Sequence[Tensor]]:
            return lambda: [x[0] for x in call(*more, *inputs, *tail)]

        sides["flash"] = first(FLASH.backward)
        for rows in AT_ONCE["mkl"]:
            sides[f"mkl {rows}"] = lambda rows=rows: gradients_by_mkl(
                grad, q, k, v, out[0], sums[0], rows
            )
        for size in CHUNK_BYTES:
            sides[f"chunked {size >> 20} MiB"] = first(chunked, CHUNKED.backward, size)
        return in_turns(sides, [x.detach() for x in exact], repeats)
    sides["flash"] = lambda: [FLASH.forward(*inputs, *tail)[0][0]]
    for rows in AT_ONCE["mkl"]:
        sides[f"mkl {rows}"] = lambda rows=rows: [by_mkl(q, k, v, rows)]
    for rows in AT_ONCE["onednn"]:
        sides[f"onednn {rows}"] = lambda rows=rows: [by_onednn(q, k, v, rows)]
    for size in CHUNK_BYTES:
        sides[f"chunked {size >> 20} MiB"] = lambda size=size: [
            chunked(CHUNKED.forward, size, *inputs, *tail)[0][0]
        ]
    return in_turns(sides, [exact[0].detach()], repeats)


def product_rows(out: int, into: int, rows: int, repeats: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(out, into, generator=draw) for _ in range(COPIES)]
    copies = [copy for weight in weights if (copy := packed(weight)) is not None]
    x, grad = (torch.randn(rows, n, generator=draw) for n in (into, out))
    sections = {
        "forward": in_turns(
            {
                "mkl": lambda: [F.linear(x, weight) for weight in weights],
                "onednn": lambda: [onednn(x, weight) for weight in weights],
                **({"packed": lambda: [onednn(x, weight) for weight in copies]} if copies else {}),
            },
            [x.double() @ weight.double().T for weight in weights], repeats,
        )
    }  # fmt: skip
    if rows > 12:
        sections["backward"] = in_turns(
            {
                "mkl": lambda: [grad @ weight for weight in weights],
                "onednn": lambda: [onednn(grad, weight.T) for weight in weights],
            },
            [grad.double() @ weight.double() for weight in weights], repeats,
        )  # fmt: skip
    return sections


@torch.no_grad()
def measure(options: argparse.Namespace) -> tuple[Mapping[str, float], Any]:
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {"instructions": torch.backends.cpu.get_cpu_capability()}
    for queries, keys in SHAPES[options.quick * 2 :]:
        results[f"{queries} x {keys}"] = attention_rows(queries, keys, False, options.repeats)
    for queries, keys in BACKWARD[options.quick :]:
        results[f"{queries} x {keys} backward"] = attention_rows(
            queries, keys, True, options.repeats
        )
    for name, (out, into) in WEIGHTS.items():
        for rows in ROWS[: 3 if options.quick else None]:
            sections = product_rows(out, into, rows, options.repeats)
            results |= {f"{name}, {rows} rows, {key}": row for key, row in sections.items()}
    ratios = {
        f"{row}, {side}": one["ratio"]
        for row, sides in results.items() if isinstance(sides, dict)
        for side, one in list(sides.items())[1:]
    }  # fmt: skip
    for name, ratio in ratios.items():
        print(f"{ratio:6.2f}  {name}")
    return ratios, results


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {"--repeats": (9, "turns"), "--threads": (1, "of torch")},
        quick={"repeats": 3},
    )
