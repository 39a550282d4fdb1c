"""Create a new tiny model, initialised with the induction circuit that reading needs."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROPE_THETA = 500_000.0


def new_model(
    vocab: int, layers: int, width: int, heads: int, kv_heads: int, seed: int
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=width * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width // heads,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        initializer_range=0.02,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    start_from_induction(model, width // heads, heads // kv_heads)
    return model


@torch.no_grad()
def start_from_induction(model: LlamaForCausalLM, size: int, grouped: int) -> None:
    """Initialise looking-back heads and two matching heads, the circuit that reading needs.

    `size` is the head size, `grouped` the number of query heads that share a key/value head.

    Olsson et al. (2022): a layer-0 head copies each token's predecessor into its residual stream; a
    layer-1 head finds the position whose predecessor is the current token, and copies its token.
    From random weights the circuit had not emerged after 1,000 steps here; from these weights
    training uses it at once. A second matching head finds the position whose last token but one is
    the token before the current one, because after a full stop, or after "note 3:", one token back
    is ambiguous. Both copies add up. All weights stay trainable.
    """
    half = size // 2
    frequency = ROPE_THETA ** (-torch.arange(half) / half)
    fast = [i for i in range(half) if frequency[i] > 0.05]  # distinguish neighbours
    slow = [i for i in range(half) if frequency[i] < 0.008]  # barely rotate within a chart
    content = slow + [i + half for i in slow]
    embedding = model.model.embed_tokens.weight
    width = embedding.shape[1]
    # One dimension is equal for every token and acts as a bias. The output ignores it, since it
    # shifts all logits alike (the embedding is tied).
    embedding[:, 0] = 0.1
    constant = 0.1 / 0.0213  # its value after RMSNorm, for embeddings of deviation 0.02
    # Disjoint parts of the residual stream: matched, copied, and written by each looking-back head.
    # The embedding has no component in the last.
    basis = torch.nn.init.orthogonal_(torch.empty(width - 1, width - 1))
    basis = torch.nn.functional.pad(basis, (1, 0))  # none touches the constant dimension
    reads, copies, writes = basis[:size], basis[size : 2 * size], basis[-size * grouped :]
    embedding -= embedding @ writes.T @ writes

    first = model.model.layers[0].self_attn
    first.k_proj.weight[:size] *= 0.1
    first.k_proj.weight[fast, 0] = 8.0 / constant
    first.v_proj.weight[:size] = reads
    for head in range(grouped):  # head h looks h + 1 tokens back
        query = first.q_proj.weight[head * size : (head + 1) * size]
        query *= 0.1
        for i in fast:
            turn = -(head + 1) * frequency[i]
            query[i, 0] = 8.0 / constant * torch.cos(turn)
            query[i + half, 0] = 8.0 / constant * torch.sin(turn)
    first.o_proj.weight *= 0.2
    first.o_proj.weight[:, : size * grouped] = 0.05 * writes.T

    second = model.model.layers[1].self_attn
    second.o_proj.weight *= 0.2
    # (query's part, its strength, key's part): the token itself against the token before the key;
    # the token before against the last but one. The written parts are about two and a half times
    # larger than the rest of the embedding.
    back_one, back_two = writes[:size], writes[size : 2 * size]
    matches = ((reads, 8.0, back_one), (back_one, 6.0, back_two))
    for group, (query_rows, strength, key_rows) in enumerate(matches):
        key = second.k_proj.weight[group * size : (group + 1) * size]
        key[:] = 0
        key[content] = key_rows[content]
        second.v_proj.weight[group * size : (group + 1) * size] = copies
        for head in range(group * grouped, (group + 1) * grouped):
            query = second.q_proj.weight[head * size : (head + 1) * size]
            query[:] = 0
            query[content] = strength * query_rows[content]
        first_head = group * grouped * size
        second.o_proj.weight[:, first_head : first_head + size] = copies.T
