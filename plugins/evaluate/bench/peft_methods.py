"""Train adapters of Hugging Face's PEFT on the text's own words, by the distributions of the model
with the text.

prefix_tuning    a KV prefix from random numbers
peft_cartridge   PEFT's CARTRIDGE, from the text's first tokens
lora             low-rank changes of all linear layers, about as many numbers as the prefix has

All take the prompts of ``offline``, and as loss the teacher's cross-entropy: its KL but for
a constant.

Dimensions: B prompts of a step, N response tokens of all, W the longest, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.plugins.evaluate.bench.reading import (
    OWN_TOKENS,
    BenchText,
    Reader,
    prefix_reader,
)
from cartridge_forge.plugins.evaluate.bench.trained import TrainingSettings, training_rows
from cartridge_forge.plugins.library.formats.peft import kv_of_rows
from cartridge_forge.protocols.step import Sample

PREFIX_LR, CARTRIDGE_LR, LORA_LR = 0.03, 0.02, 1e-3


def responses(network: Any, samples: Sequence[Sample], head: Sequence[int]) -> Tensor:
    """Return the log-probabilities [N, V] at the samples' response tokens after `head` by a model
    of transformers or PEFT, in one padded pass."""
    rows = [(*head, *s.prompt_ids, *s.response_ids) for s in samples]
    width = max(map(len, rows))
    ids = torch.tensor([(*row, *(0,) * (width - len(row))) for row in rows])  # [B, W]
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    logits = network(input_ids=ids, attention_mask=mask).logits  # [B, W, V]
    read = [
        logits[i, len(row) - len(s.response_ids) - 1 : len(row) - 1]
        for i, (row, s) in enumerate(zip(rows, samples, strict=True))
    ]
    return torch.cat(read).float().log_softmax(-1)


def train_adapter(
    model: LanguageModel, tokenizer: Any, text: BenchText, network: Any, lr: float,
    settings: TrainingSettings, *, head: Sequence[int] | None = None,
) -> Iterator[int]:  # fmt: skip
    """Train what of `network` asks for a gradient; yield the steps made after each
    `settings.every`-th, and after the last. With `head`, the network reads prompts without the
    text after these ids, and behind its prefix without."""
    weights = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, settings.warmup))
    )
    with_text = training_rows(tokenizer, text, settings)
    bare = training_rows(tokenizer, text, settings, bare=True)
    for step, (rows, read) in enumerate(zip(with_text, bare, strict=True), start=1):
        taught = prefix_reader(model, text.kv).read(rows).exp()
        logprobs = responses(network, rows if head is None else read, head or ())
        loss = -(taught * logprobs).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % settings.every == 0 or step == settings.steps:
            yield step


def transformers_model(path: str) -> Any:
    """Return the model at `path` as transformers has it, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def train_prefix(
    model: LanguageModel, tokenizer: Any, path: str, text: BenchText, tokens: int,
    settings: TrainingSettings, *, from_text: bool,
) -> Iterator[tuple[int, Tensor]]:  # fmt: skip
    """Yield the steps made and the prefix [L, 2, H_kv, P, D] as training goes on."""
    import peft

    torch.manual_seed(settings.seed)
    if from_text:
        config = peft.CartridgeConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=tokens, num_frozen_tokens=1
        )
    else:
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=tokens)
    network = peft.get_peft_model(transformers_model(path), config)
    encoder = network.prompt_encoder["default"]
    if from_text:
        first = text.kv[:, :, :, :tokens]  # [L, 2, H_kv, P, D]
        encoder.load_prompt_embeddings(first.permute(3, 0, 1, 2, 4).reshape(tokens, -1).float())
    lr = CARTRIDGE_LR if from_text else PREFIX_LR
    layers, heads, _ = model.kv_shape
    for step in train_adapter(model, tokenizer, text, network, lr, settings):
        rows = encoder.embedding.weight.detach().clone()  # [P, L * 2 * H_kv * D]
        yield step, kv_of_rows(rows, layers, heads)


def train_lora(
    model: LanguageModel, tokenizer: Any, path: str, text: BenchText, tokens: int,
    settings: TrainingSettings,
) -> Iterator[tuple[int, Reader, int]]:  # fmt: skip
    """Yield the steps made, the reader without any prefix, and the numbers of the adapter."""
    import peft

    torch.manual_seed(settings.seed)
    base = transformers_model(path)
    by_rank = sum(
        sum(module.weight.shape)
        for name, module in base.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head")
    )
    wanted = text.kv[:, :, :, 0].numel() * tokens
    rank = max(1, round(wanted / by_rank))
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear"
    )
    network = peft.get_peft_model(base, config)
    head = text.renderer.head(None)
    bare = {q.with_text.id: q.bare.prompt_ids for q in text.questions}

    @torch.no_grad()
    def read(samples: Sequence[Sample]) -> Tensor:
        return responses(network, [replace(s, prompt_ids=bare[s.id]) for s in samples], head)

    @torch.no_grad()
    def write(samples: Sequence[Sample], end_ids: frozenset[int]) -> list[tuple[int, ...]]:
        answers = []
        for sample in samples:
            ids = torch.tensor([(*head, *bare[sample.id])])
            output = network.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                max_new_tokens=OWN_TOKENS, eos_token_id=sorted(end_ids), pad_token_id=0,
            )  # fmt: skip
            answers.append(tuple(output[0, ids.shape[1] :].tolist()))
        return answers

    for step in train_adapter(model, tokenizer, text, network, LORA_LR, settings, head=head):
        yield step, Reader(read, write), rank * by_rank
