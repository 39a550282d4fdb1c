"""Train a tiny Llama for an example, from conversations that its own script draws.

The model learns to act as well as the document before the conversation says: after a page that says
"careful" it acts as the drawn conversations do, after "hasty" it errs often. The frozen model thus
holds a skill that a cartridge can bring out, which a minute of training cannot teach otherwise.

    python -m examples.calculator.make_model
"""

from __future__ import annotations

import random
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from models.pretrain.train import new_optimizers

SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
IGNORED = -100  # the target of a token that is not taught
WARMUP_STEPS = 30
MUON_LR = 0.02

Message = tuple[str, str]  # role, text
Draw = Callable[[random.Random], Sequence[Message]]  # one conversation; the assistant's are taught


def page(words: Sequence[str], skill: str, rng: random.Random) -> str:
    """Return a document of this skill: "careful" or "hasty", with the example's own words."""
    order = list(words)
    rng.shuffle(order)
    return " ".join(f"be {skill} with {word}." for word in order)


def build_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer in which each frequent word of `texts` is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, min_frequency=5, special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1],
        eos_token=SPECIAL[2], additional_special_tokens=list(SPECIAL[3:]),
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(vocabulary: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ))  # fmt: skip


def encode(
    tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Sequence[Message]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets [B, T]; only the assistant's texts and their ends are taught."""
    special = tokenizer.get_vocab()
    rows: list[tuple[list[int], list[int]]] = []
    for messages in conversations:
        texts = tokenizer([text for _, text in messages]).input_ids
        ids, targets = [special["<|bos|>"]], [IGNORED]
        for (role, _), text in zip(messages, texts, strict=True):
            message_ids = [*text, special["<|end|>"]]
            ids += [special[f"<|{role}|>"], *message_ids]
            targets += [
                IGNORED,
                *(message_ids if role == "assistant" else [IGNORED] * len(message_ids)),
            ]
        rows.append((ids, targets))
    longest = max(len(ids) for ids, _ in rows)
    padded = [
        (ids + [0] * (longest - len(ids)), t + [IGNORED] * (longest - len(t))) for ids, t in rows
    ]
    return torch.tensor([row[0] for row in padded]), torch.tensor([row[1] for row in padded])


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: Draw,
    steps: int,
    seed: int,
    batch: int = 16,
    lr: float = 3e-3,
) -> None:
    """Train on `steps` batches of new conversations, and print the loss in nats per token."""
    rng = random.Random(f"conversations/{seed}")
    optimizers = new_optimizers(model, lr, MUON_LR)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    start = time.monotonic()
    for step in range(steps):
        remaining = 1 - step / steps
        rate = min((step + 1) / WARMUP_STEPS, 1.0, 2 * remaining)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
        ids, targets = encode(tokenizer, [draw(rng) for _ in range(batch)])
        logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(
                f"step {step + 1} loss {loss.item():.4f} s {time.monotonic() - start:.0f}",
                flush=True,
            )


def make(about: str, draw: Draw, out: Path, steps: int) -> None:
    """Train and save the model of an example, by the options of its command line."""
    parser = ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, default=out, help="where the model is saved")
    parser.add_argument("--steps", type=int, default=steps, help="batches to train on")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # a second thread waits more than it computes
    rng = random.Random("tokenizer")
    tokenizer = build_tokenizer([text for _ in range(2000) for _, text in draw(rng)])
    model = build_model(len(tokenizer), args.seed)
    train(model, tokenizer, draw, args.steps, args.seed)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out}: {model.num_parameters():,} parameters")
