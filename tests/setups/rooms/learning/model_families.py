"""Tiny random models of many families, and transformers' own forward pass as their reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling

SHAPE = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOKENS, PREFIX = 24, 12
TWO_KINDS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
CAPS = {"query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0}
SCALES = {"logits_scaling": 8.0, "attention_multiplier": 0.1, "residual_multiplier": 0.3}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 20, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "head_dim": 8,
}  # fmt: skip
CHUNKS = {
    "num_hidden_layers": 4, "num_local_experts": 2, "num_experts_per_tok": 1, "floor_scale": 5,
    "intermediate_size_mlp": 96, "attention_chunk_size": 8,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": 512,
}  # fmt: skip
LINEAR_STATE = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
# Each has what makes its family unlike Llama: a scale, a cap, a window, another rotation.
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("granite", {**SCALES, "embedding_multiplier": 7.0}),
    "gemma2": ("gemma2", {**CAPS, "sliding_window": 8, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", {**CAPS, **TWO_KINDS}),
    "gemma4": ("gemma4_text", {**TWO_KINDS, "global_head_dim": 32,
                               "vocab_size_per_layer_input": 97}),
    "gpt_oss": ("gpt_oss", {**EXPERTS, "sliding_window": 8}),
    "cohere2": ("cohere2", {**TWO_KINDS, "logit_scale": 0.2}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "llama4": ("llama4_text", CHUNKS),
    "olmo3": ("olmo3", TWO_KINDS),
    "stablelm": ("stablelm", {"qk_layernorm": True}),
    "gpt_neox": ("gpt_neox", {}),
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3_next": ("qwen3_next", {
        **LINEAR_STATE, **EXPERTS, "shared_expert_intermediate_size": 32,
    }, r"layers call no attention that can read a cartridge: \[0\]"),
    "diffllama": ("diffllama", {}, r"layers attend more than once: \[0, 1\]"),
    "rope dynamic": ("llama", {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    }, r"\(dynamic\) .* changes for the whole text beyond 16 positions"),
    "falcon_h1": ("falcon_h1", {
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16,
    }, "mix tokens outside of attention"),
    "bloom": ("bloom", {
        "n_head": 4, "n_layer": 2,
    }, r"call no attention that can read a cartridge: \[0, 1\]"),
    "doge": ("doge", {}, "change the attention mask, or take none"),
    "gpt_neo": ("gpt_neo", {
        "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
    }, "attend by code of their own"),
}  # fmt: skip


def make_family(path: Path, family: str, more: dict[str, Any]) -> None:
    """Write a model of random weights, whose norms and biases are no ones and zeros."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SHAPE, **more}))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.15)
            else:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(path)


@dataclass(frozen=True)
class FamilyPair:
    """The same weights in a folder, here, and in transformers, in eager attention and without a
    cache; the text `ids`, whose first PREFIX tokens are read as the document `kv`."""

    path: Path
    ours: LanguageModel
    plain: PreTrainedModel
    ids: Tensor
    kv: Tensor

    def expected(self, ids: Tensor) -> Tensor:
        """Return transformers' log-probabilities [T, V] of a whole text."""
        with torch.no_grad():
            logits: Tensor = self.plain(ids[None], use_cache=False).logits[0]
        return logits.log_softmax(-1)

    def found(self, ids: Tensor, lengths: list[int], begin: int, prefix: Tensor | None) -> Tensor:
        """Return ours of packed texts of these lengths, which all begin at one position."""
        layers, heads, size = self.ours.kv_shape
        prefix = torch.zeros(layers, 2, heads, 0, size) if prefix is None else prefix
        positions = torch.cat([torch.arange(begin, begin + n) for n in lengths])
        attention = FlatAttention(lengths, [len(lengths)], positions, [prefix])
        logits: Tensor = self.ours.lm_head(self.ours(ids, positions, attention))
        return logits.log_softmax(-1)

    def differences(self) -> dict[str, float]:
        """Return the largest difference of a log-probability, in nats, in each way to read."""
        want, ids = self.expected(self.ids), self.ids
        with torch.no_grad():
            found = {
                "one pass": (self.found(ids, [TOKENS], 0, None), want),
                "prefix": (
                    self.found(ids[PREFIX:], [TOKENS - PREFIX], PREFIX, self.kv), want[PREFIX:],
                ),
                "packed": (
                    self.found(torch.cat([ids.flip(0), ids]), [TOKENS, TOKENS], 0, None)[TOKENS:],
                    want,
                ),
            }  # fmt: skip
        return {way: float((a - b).abs().max()) for way, (a, b) in found.items()}

    def drawn(self) -> tuple[float, float]:
        """Return the largest differences of what the sampler tells of greedy tokens behind the
        prefix, and of the likeliest token's, in nats."""
        asked = [
            GenerateRequest(
                str(more), tuple(self.ids[PREFIX : 16 + more].tolist()), PrefixRef("a", 0),
                Sampling(temperature=0.0, max_tokens=8), more,
            )
            for more in (0, 3)
        ]  # fmt: skip
        told, best = 0.0, 0.0
        all_done = generate(self.ours, asked, lambda _: self.kv, frozenset())
        for more, done in zip((0, 3), all_done, strict=True):
            text = torch.tensor([*self.ids[: 16 + more].tolist(), *done.token_ids])
            want = self.expected(text)[15 + more : -1]
            of_tokens = want.gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]
            told = max(told, float((of_tokens - torch.tensor(done.logprobs)).abs().max()))
            best = max(best, float((want.amax(-1) - of_tokens).max()))
        return told, best

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients into the prefix of a weighted sum of log-probabilities behind it:
        ours, and that of transformers over its own cache. Where that holds no keys and values as
        attention takes them (latents, or none of layers that share others' ones), return the slopes
        along a random direction: by our backward pass, and by two forward passes."""
        weights = torch.sin(torch.arange((TOKENS - PREFIX) * 97.0)).view(-1, 97)

        def value(kv: Tensor) -> Tensor:
            found = self.found(self.ids[PREFIX:], [TOKENS - PREFIX], PREFIX, kv)
            return (found.double() * weights).sum()

        leaf = self.kv.clone().requires_grad_()
        value(leaf).backward()
        assert leaf.grad is not None
        there = self.kv.clone().requires_grad_()
        if (cache := self._cache_of(there)) is None:
            way = torch.randn(self.kv.shape, generator=torch.Generator().manual_seed(5))
            with torch.no_grad():
                apart = value(self.kv + 3e-3 * way) - value(self.kv - 3e-3 * way)
            return (leaf.grad * way).sum(), (apart / 6e-3).float()
        positions = torch.arange(PREFIX, TOKENS)[None]
        out = self.plain(self.ids[None, PREFIX:], position_ids=positions, past_key_values=cache)
        (out.logits[0].log_softmax(-1) * weights).sum().backward()
        assert there.grad is not None
        return leaf.grad, there.grad

    def _cache_of(self, kv: Tensor) -> DynamicCache | None:
        """Return a cache of transformers that holds the document's `kv`, None where its own cache
        of the document has other contents."""
        own, made = DynamicCache(), DynamicCache()
        with torch.no_grad():
            self.plain(self.ids[None, :PREFIX], past_key_values=own, use_cache=True)
        for layer, read in enumerate(kv):
            if layer >= len(own.layers):
                return None
            of_layer: Any = own.layers[layer]
            cut = []
            for x, there in zip(read, (of_layer.keys, of_layer.values), strict=True):
                _, heads, _, size = there.shape
                part, rest = x[None, :heads, :, :size], (x[heads:], x[..., size:])
                if part.shape != there.shape or any(one.any() for one in rest):
                    return None
                if not torch.allclose(part, there, atol=1e-4):
                    return None
                cut.append(part)
            made.update(*cut, layer)
        return made

    def keys(self, begin: int) -> Tensor:
        """Return keys and values [L, 2, H_kv, 6, D] of six tokens read from this position on."""
        layers, heads, size = self.ours.kv_shape
        positions, read = torch.arange(begin, begin + 6), []
        none = torch.zeros(layers, 2, heads, 0, size)
        attention = FlatAttention(
            [6], [1], positions, [none],
            observer=lambda layer, q, k, v, out: read.append(torch.stack([k, v]).transpose(1, 2)),
        )  # fmt: skip
        with torch.no_grad():
            self.ours(self.ids[:6], positions, attention)
        return torch.stack(read)


def family_pair(path: Path, family: str, more: dict[str, Any]) -> FamilyPair:
    """Make a model in a folder, and load it twice."""
    make_family(path, family, more)
    plain = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    ours = load_model(str(path))
    ids = torch.randint(3, 97, (TOKENS,), generator=torch.Generator().manual_seed(1))
    return FamilyPair(path, ours, plain.eval(), ids, document_kv(ours, ids[:PREFIX].tolist()))
