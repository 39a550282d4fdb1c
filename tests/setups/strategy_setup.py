"""Every strategy, in the ways that sample differently, over a sampler that babbles; and a process
reward model."""

import asyncio
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from scripted_sampler import Babbler

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.strategies.catalog import STRATEGIES, parse, run
from cartridge_forge.plugins.strategies.problem import StrategyResult

ASKED = (AgentMessage("user", "what is it?"),)
SMALL: dict[str, dict[str, Any]] = {
    "self_consistency": {"samples": 5},
    "part_vote": {"samples": 5},
    "deepconf": {"traces": 6, "window": 4, "keep_fraction": 0.5},
    "phi_decoding": {"beams": 2, "rollouts": 3},
}
# Every strategy as it stands, and in the ways that sample differently.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, SMALL.get(name, {})) for name in STRATEGIES),
    ("deepconf", {"mode": "online", "traces": 9, "warmup": 3, "window": 4, "keep_fraction": 0.5}),
    (
        "deepconf",
        {"mode": "online", "traces": 9, "warmup": 3, "window": 4, "consensus": True, "batch": 2},
    ),
    ("best_of_n", {"detector": {"answer_patterns": ["answer:"]}}),
    ("beam_search", {"beams": 3, "scorer": "entropy", "aggregate": "min", "max_steps": 3}),
    ("adaptive_scaling", {"momentum": "bias_corrected", "scorer": "gap"}),
    ("phi_decoding", {"beams": 2, "rollouts": 2, "detector": {"answer_patterns": ["answer:"]}}),
    ("best_of_n", {"detector": {"kind": "thinking", "markers": ["so", "ja"]}}),
]


def solve(variant: int, seed: int, budget: int | None = None) -> tuple[StrategyResult, Babbler]:
    name, options = VARIANTS[variant]
    sampler = Babbler()
    solving = run(
        parse(name, options),
        sampler,
        ASKED,
        form="general",
        seed=seed,
        budget=budget,
        max_tokens=30,
    )
    return asyncio.run(solving), sampler


def digest() -> str:
    """Of all variants' results, but for the time they took."""
    found: list[Any] = []
    for variant in range(len(VARIANTS)):
        result, sampler = solve(variant, 3)
        found.append([result.text, result.answer, result.finish_reason, result.token_ids])
        found.append(
            [
                result.spent.tokens,
                dict(result.details),
                [[a.seed for a in c] for c in sampler.calls],
            ]
        )
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


WORDS = {"good": 0, "bad": 1, "other": 2, "\n": 3, "<s>": 4}


def reward_model(directory: Path, kind: Any = None, labels: int = 2, reads: int = 64) -> Path:
    """Write a process reward model whose scores can be worked out by hand, and which `reads` so
    many tokens; of a sequence classifier the score is that of the last token.

    One layer, hidden size 4. "good" is the first unit vector, "bad" the second, other words the
    third, the separator the fourth. Attention is even over all tokens so far, the MLP is zero:
    behind a separator the state is e4 + 2 * (shares of good, bad, others and separators), whose
    first two numbers, over its root mean square, are the logits of the labels 1 and 0.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForTokenClassification, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=5, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=reads,
        num_labels=labels, pad_token_id=None, rms_norm_eps=0.0,
    )  # fmt: skip
    model = (kind or LlamaForTokenClassification)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        layer, one = model.model.layers[0], torch.eye(4)
        model.model.embed_tokens.weight[:4] = one
        model.model.embed_tokens.weight[4] = one[2]
        layer.self_attn.v_proj.weight[:] = one
        layer.self_attn.o_proj.weight[:] = one
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
            norm.weight.fill_(1.0)
        model.score.weight[:] = one[[1, 0]] if labels == 2 else one[[0]]
    model.save_pretrained(directory)
    plain = Tokenizer(models.WordLevel(WORDS, unk_token="other"))
    plain.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="other", bos_token="<s>"
    ).save_pretrained(directory)
    return directory


def by_hand(good: int, bad: int, others: int, ends: int) -> tuple[float, float]:
    """The logits of good and bad behind the last of `ends` separators."""
    count = good + bad + others + ends
    state = [2 * n / count for n in (good, bad, others, ends)]
    state[3] += 1
    size = math.sqrt(sum(x * x for x in state) / 4)
    return state[0] / size, state[1] / size


def probability(good: int, bad: int, others: int, ends: int) -> float:
    up, down = by_hand(good, bad, others, ends)
    return 1 / (1 + math.exp(down - up))
