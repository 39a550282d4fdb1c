"""An engine over a tiny twin, and what it is asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from twins import Twin

from cartridge_forge.learning.decode import generate
from cartridge_forge.plugins.decoding.engine import TorchEngine
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import (
    Completion,
    GenerateRequest,
    PrefixRef,
    Sampling,
    StopCondition,
)

END = frozenset({5})


def decode(ids: Sequence[int]) -> str:
    """Return a letter for each token."""
    return "".join(chr(97 + i % 26) for i in ids)


def request(name: str, prefix: str, prompt: int, most: int, temperature: float = 1.0,
            **more: object) -> GenerateRequest:  # fmt: skip
    """Return a request with a prompt of so many tokens behind a document."""
    ids = tuple((7 * i + 3 * prompt) % 90 + 6 for i in range(prompt))
    sampling = Sampling(temperature, max_tokens=most)
    return GenerateRequest(name, ids, PrefixRef(f"document/{prefix}", 0), sampling, 17, **more)


def engine(twin: Twin, **more: int) -> TorchEngine:
    """Return an engine over the documents of a twin."""

    def document(name: str) -> torch.Tensor:
        if name not in twin.kv:
            raise DataError(f"no document {name!r}")
        return twin.kv[name]

    return TorchEngine(twin.model, document, END, decode, **more)


def alone(twin: Twin, r: GenerateRequest) -> Completion:
    """Return what one request gets where it is alone in its batch."""
    return generate(twin.model, [r], lambda ref: twin.kv[ref.name[-1]], END, decode)[0]


ASKED = [
    request("a", "a", 5, 12),
    request("b", "b", 2, 30, 0.0),
    request("c", "a", 9, 3),
    request("d", "a", 1, 25, 0.7),
    request("e", "c", 4, 8),
    request("f", "a", 3, 20, until=StopCondition(strings=("e",))),
    request("g", "b", 6, 9, top_logprobs=3),
]
