"""A vLLM generator in a process of its own, tiny random models for it, and what is right."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cartridge_forge.actors.base import ModelSource, bootstrap, missing_vllm
from cartridge_forge.actors.engine_generator import EngineGeneratorActor
from cartridge_forge.learning.cartridge import composed
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import load_model, text_of
from cartridge_forge.learning.teacher import context_ids, document_kv
from cartridge_forge.plugins.host.plane import SharedMemoryPlane
from cartridge_forge.protocols.spec.sections import GeneratorSpec
from cartridge_forge.protocols.step import (
    CartridgeSnapshot,
    Completion,
    GenerateRequest,
    PrefixRef,
    PublishedCartridge,
    Sampling,
    composed_ref,
)
from cartridge_forge.services.pool.pool import Replica as Member
from cartridge_forge.services.pool.pool import ask

TIMEOUT = 120.0
VOCAB = 101
END = 2
NO_END: frozenset[int] = frozenset()
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 32  # 32 is the least that vLLM's CPU attention takes
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 1024,
    # Far from uniform attention and distributions: what looks at the wrong place shows.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def require_vllm() -> None:
    """Skip where vLLM is not installed; fail where `make test` was to have installed it."""
    if missing_vllm():
        assert "FORGE_REQUIRE_VLLM" not in os.environ, "make test installs vLLM; it is not there"
        pytest.skip("vLLM is not installed: make install-vllm", allow_module_level=True)


@dataclass(frozen=True)
class Tiny:
    """A random model: `plain` by transformers, `ours` over prefix attention, and its documents."""

    path: str
    plain: PreTrainedModel
    ours: PreTrainedModel
    documents: dict[str, tuple[int, ...]]

    def cartridges(self, seed: int, names: int, tokens: int) -> Tensor:
        """Keys and values [names, L, 2, H_kv, tokens, D] that no prompt would give."""
        random_numbers = torch.Generator().manual_seed(seed)
        shape = (names, LAYERS, 2, KV_HEADS, tokens, HEAD_DIM)
        return 2 * torch.randn(shape, generator=random_numbers)

    def logprobs(self, kv: Tensor | None, ids: Sequence[int]) -> Tensor:
        """transformers' log-probabilities [T, V] after each of ids, over [L, 2, H_kv, P, D]."""
        cache = DynamicCache(config=self.plain.config)
        for layer, (keys, values) in enumerate(kv if kv is not None else ()):
            cache.update(keys[None], values[None], layer)
        with torch.no_grad():
            out = self.plain(torch.tensor([list(ids)]), past_key_values=cache)
        return out.logits[0].log_softmax(-1)

    def greedy(self, kv: Tensor | None, prompt: Sequence[int], count: int) -> list[int]:
        """transformers' greedy continuation, every token from a whole forward."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logprobs(kv, ids)[-1].argmax()))
        return ids[len(prompt) :]


def tiny_model(family: str, path: Path) -> Tiny:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if family == "llama":
            model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**SHAPE))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones as initialised: a skipped norm's weight would not show
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    plain = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    draws = random.Random(1)
    documents = {"d": tuple(draws.choices(range(3, VOCAB), k=70)), "none": (1,)}
    return Tiny(str(path), plain.requires_grad_(False).eval(), load_model(str(path)), documents)


@dataclass
class Replica:
    """The actor, the plane it reads from, and what was published to it."""

    model: Tiny
    plane: SharedMemoryPlane
    member: Member
    published: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    snapshots: dict[int, CartridgeSnapshot] = field(default_factory=dict)
    newest: int = -1

    def call(self, method: str, *args: Any) -> Any:
        return asyncio.run(ask(self.member, method, args, time.monotonic() + TIMEOUT))

    def start(self, method: str, *args: Any) -> Any:
        """A Monarch future, to be got later."""
        return getattr(self.member.actor, method).call_one(*args)

    def snapshot(
        self,
        version: int,
        names: Sequence[str],
        kv: Sequence[Tensor],
        unchanged: Sequence[PublishedCartridge] = (),
    ) -> CartridgeSnapshot:
        key = f"cartridges/{version}/{random.getrandbits(60)}"
        packet = asyncio.run(self.plane.put(key, dict(zip(names, kv, strict=True))))
        changed = [PublishedCartridge(name, version, packet) for name in names]
        return CartridgeSnapshot(version, (*changed, *unchanged))

    def publish(self, kv: Sequence[Tensor], names: Sequence[str] = ("a", "b")) -> int:
        """The next version, once the generator has it: these cartridges and no others."""
        return self._publish(self.snapshot(self.newest + 1, names, kv), kv)

    def change(self, **kv: Tensor) -> int:
        """The next version, in which these cartridges alone differ from the newest."""
        unchanged = [c for c in self.snapshots[self.newest].cartridges if c.name not in kv]
        tensors = list(kv.values())
        return self._publish(self.snapshot(self.newest + 1, list(kv), tensors, unchanged), tensors)

    def _publish(self, snapshot: CartridgeSnapshot, changed: Sequence[Tensor]) -> int:
        self.call("load", snapshot)
        before, self.newest = self.published.get(self.newest, {}), snapshot.version
        new = dict(zip(snapshot.names, changed, strict=False))
        self.published[self.newest] = {n: new.get(n, before.get(n)) for n in snapshot.names}
        self.snapshots[self.newest] = snapshot
        return self.newest

    def generate(self, *requests: GenerateRequest) -> tuple[Completion, ...]:
        done = self.call("generate", requests).completions
        assert [c.request_id for c in done] == [r.id for r in requests]
        return done

    def lookup(self, ref: PrefixRef) -> Tensor:
        return composed(self.model.ours, [self._single(part) for part in ref.parts])

    def _single(self, ref: PrefixRef) -> Tensor:
        kind, _, name = ref.name.partition("/")
        if kind == "document":
            return document_kv(self.model.ours, context_ids(self.model.documents, name))
        return self.published[ref.version][name]

    def embedded(self, *requests: GenerateRequest) -> list[Completion]:
        """What the torch backend makes of the same requests."""
        text = text_of(self.model.path)
        return generate(self.model.ours, requests, self.lookup, NO_END, text)

    def loads(self) -> tuple[int, int]:
        report = self.call("report")
        return report.loads, report.loaded_tokens


@contextmanager
def replica(
    model: Tiny,
    actor: type[Any] = EngineGeneratorActor,
    *,
    end_ids: frozenset[int] = NO_END,
    keep: int = 3,
    **spec: Any,
) -> Iterator[Replica]:
    """A running replica; its engine and its process are stopped at the end."""
    from monarch.actor import this_host

    plane = asyncio.run(SharedMemoryPlane.start())
    procs = this_host().spawn_procs(
        per_host={"procs": 1}, name="generator0", bootstrap=bootstrap(1)
    )
    try:
        base = ModelSource(model.path, "float32", 1, model.documents, 1 << 28, plane)
        chosen = GeneratorSpec(**{"backend": "vllm", "kv_gib": 0.05, **spec})
        member = Member("generator", 0)
        member.actor = procs.spawn("generator0", actor, base, end_ids, keep, chosen)
        started = Replica(model, plane, member)
        started.call("ready")
        yield started
    finally:
        procs.stop().get(timeout=20)
        asyncio.run(plane.stop())


def prompts(count: int, length: Callable[[int], int], seed: int = 0) -> list[tuple[int, ...]]:
    draws = random.Random(seed)
    return [tuple(draws.choices(range(3, VOCAB), k=length(i))) for i in range(count)]


def over(
    name: str, version: int, prompt: Sequence[int], count: int = 6, **sampling: Any
) -> GenerateRequest:
    """A request that is greedy unless said; its seed is its prompt's."""
    return over_all([(name, version)], prompt, count, **sampling)


def over_all(
    parts: Sequence[tuple[str, int]], prompt: Sequence[int], count: int = 6, **sampling: Any
) -> GenerateRequest:
    """The same over an ordered composition."""
    chosen = Sampling(**{"temperature": 0.0, "max_tokens": count, **sampling})
    ref = composed_ref([PrefixRef(name, version) for name, version in parts])
    said = "+".join(f"{name}@{version}" for name, version in parts)
    return GenerateRequest(f"{said}/{prompt[0]}", tuple(prompt), ref, chosen, sum(prompt))
