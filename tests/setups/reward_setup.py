"""A process reward model whose scores can be worked out by hand.

One layer, hidden size 4. "good" is the first unit vector, "bad" the second, other words the third,
the separator the fourth. Attention is even over all tokens so far, the MLP is zero: behind a
separator the state is e4 + 2 * (share of good, share of bad, share of others, share of separators),
whose first two numbers, over its root mean square, are the logits of the labels 1 and 0.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

WORDS = {"good": 0, "bad": 1, "other": 2, "\n": 3, "<s>": 4}


def reward_model(
    directory: Path, kind: Any = LlamaForTokenClassification, labels: int = 2, reads: int = 64
) -> Path:
    """Write such a model, which `reads` so many tokens; of a sequence classifier the score is that
    of the last token."""
    config = LlamaConfig(
        vocab_size=5, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=reads,
        num_labels=labels, pad_token_id=None, rms_norm_eps=0.0,
    )  # fmt: skip
    model = kind(config)
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
