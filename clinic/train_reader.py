"""Train the tiny base model from scratch, on two cores:

    torchrun --nproc-per-node 2 -m clinic.train_reader --out models/clinic-reader

A standard LlamaForCausalLM learns to read: a batch is a set of new charts, each followed by turns
that see the chart and themselves only (one row, block mask, positions restarting after the
chart), so that one chart is read once for many questions and every turn looks like the first.
Loss on the responses alone. The curriculum starts with two facts a chart and climbs when the
share of turns answered exactly (teacher-forced, on charts never seen before: every batch is new)
passes a mark. What was tried on the way is in docs/log.md.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from clinic.corpus import Difficulty, draw_conversation, guess_turn
from clinic.tokenizer import build_tokenizer
from clinic.train_loop import Batch, Climber, Piece, Row, pack, train

LADDER = (
    Difficulty((2, 4), 0.0, alike=0.9),
    Difficulty((3, 6), 0.3, alike=0.7),
    Difficulty((4, 10), 0.6),
    Difficulty((6, 16), 0.8),
    Difficulty((8, 26), 1.0),
)
ROPE_THETA = 500_000.0
# Recitation first: it is dense and makes retrieval emerge; option lists are long and teach little
# until there is something to retrieve.
FIRST_TURNS = ["recite", "recite", "recite", "question", "question"]
# Later what is left to learn: to find a note by its number and to tell findings from remarks.
LATER_TURNS = [
    "recite", "structure", "structure", "summarise", "summarise", "question", "options",
]  # fmt: skip
# Charts that are not there: asked about them, the model is to name one of the options offered, not
# a value of its own making.
GUESS_RATE = 0.25


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

    `size` is the head size, `grouped` how many query heads share a key/value head.

    Olsson et al. (2022): a layer-0 head copies each token's predecessor into its residual stream,
    a layer-1 head looks for the place whose predecessor is the current token and copies what
    stands there. Left to chance it had not emerged after 1,000 steps here; started roughly right,
    training takes it up at once. A second matching head looks for the place whose last token but
    one is the token before this one: after a full stop, or after "note 3:", one token back tells
    nothing. Both copies add up. All weights stay trainable.
    """
    half = size // 2
    frequency = ROPE_THETA ** (-torch.arange(half) / half)
    fast = [i for i in range(half) if frequency[i] > 0.05]  # tell neighbours apart
    slow = [i for i in range(half) if frequency[i] < 0.008]  # barely turn within a chart
    content = slow + [i + half for i in slow]
    embedding = model.model.embed_tokens.weight
    width = embedding.shape[1]
    # One dimension is the same for every token: what a bias would be. The output ignores it,
    # since it shifts all logits alike (the embedding is tied).
    embedding[:, 0] = 0.1
    constant = 0.1 / 0.0213  # its value after RMSNorm, for embeddings of deviation 0.02
    # Disjoint parts of the residual stream: what is matched, what is copied, and where each
    # looking-back head writes; the embedding itself stays out of the last.
    basis = torch.nn.init.orthogonal_(torch.empty(width - 1, width - 1))
    basis = torch.nn.functional.pad(basis, (1, 0))  # none of them touches the constant dimension
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
    # (what a query reads, how strongly, what a key reads): the token itself against the token
    # before the key; the token before against the last but one. What was written is about two and
    # a half times larger than what is left of the embedding.
    back_one, back_two = writes[:size], writes[size : 2 * size]
    matches = ((reads, 8.0, back_one), (back_one, 6.0, back_two))
    for group, (asked, strength, held) in enumerate(matches):
        key = second.k_proj.weight[group * size : (group + 1) * size]
        key[:] = 0
        key[content] = held[content]
        second.v_proj.weight[group * size : (group + 1) * size] = copies
        for head in range(group * grouped, (group + 1) * grouped):
            query = second.q_proj.weight[head * size : (head + 1) * size]
            query[:] = 0
            query[content] = strength * asked[content]
        first_head = group * grouped * size
        second.o_proj.weight[:, first_head : first_head + size] = copies.T


def draw_batch(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, rung: int, size: int
) -> Batch:
    """Draw `size` new charts with their turns, tokenised through the chat template's own tokens."""
    user, assistant, end = (
        tokenizer.get_vocab()[token] for token in ("<|user|>", "<|assistant|>", "<|end|>")
    )
    kinds = FIRST_TURNS if rung == 0 else LATER_TURNS
    rows: list[Row] = []
    head: list[int]
    for _ in range(size):
        if rung > 0 and rng.random() < GUESS_RATE:
            head, turns = [tokenizer.bos_token_id], [guess_turn(rng) for _ in kinds]
        else:
            patient, turns = draw_conversation(rng, LADDER[rung], kinds)
            head = tokenizer(f"<|bos|><|system|>{patient.document}<|end|>").input_ids
        texts = tokenizer([t for turn in turns for t in (turn.prompt, turn.response)]).input_ids
        coded: list[list[Piece]] = []
        for turn, prompt, response in zip(turns, texts[::2], texts[1::2], strict=True):
            asked = [user, *prompt, end, assistant]
            coded.append([("", asked), (turn.kind, [*response, end])])
        rows.append((head, coded))
    return pack(rows, tokenizer.pad_token_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this long")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--batch", type=int, default=32, help="charts a step of a rank")
    parser.add_argument("--tokens", type=int, default=8192, help="bounds charts x length of a rank")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="start from this model directory")
    parser.add_argument("--rung", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()  # every save would draw one into the log
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    if args.resume:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.resume)
        model = LlamaForCausalLM.from_pretrained(args.resume, dtype=torch.float32)
    else:
        tokenizer = build_tokenizer()
        model = new_model(
            len(tokenizer), args.layers, args.width, args.heads, args.kv_heads, args.seed
        )
    own = random.Random(f"reader/{args.seed}/{args.rung}/{rank}")

    def draw(rung: int) -> Batch:
        size = max(4, min(args.batch, args.tokens // (130 + 14 * LADDER[rung].facts[1])))
        return draw_batch(tokenizer, own, rung, size)

    train(
        model,
        tokenizer,
        draw,
        Climber(args.rung, top=len(LADDER) - 1),
        random.Random(f"reader/{args.seed}/{args.rung}"),
        args,
        climbs_on="question",
        cooling=0.3,
        rank=rank,
        ranks=ranks,
    )
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
