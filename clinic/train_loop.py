"""What the training scripts of the tiny models share: batches of conversations, and the loop.

A row of a batch is what all its conversations see (a chart, a handbook, or the bare beginning) and
the conversations, which see it and themselves only: one row, block mask, positions restarting
after the head. Loss on the trained pieces alone.
"""

from __future__ import annotations

import json
import math
import random
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

CLIMB_AT = 0.85
WARMUP_STEPS = 50

# Tokens of one kind, to be predicted; of the kind "" given.
Piece = tuple[str, list[int]]
# What all the row's conversations see (a chart), and the conversations, each piece by piece.
Row = tuple[list[int], list[list[Piece]]]


@dataclass
class Batch:
    """Rows of chart + turns. `segment` 0 is the chart, 1.. the turns, -1 padding; all [B, T]."""

    ids: torch.Tensor
    segment: torch.Tensor
    position: torch.Tensor
    trained: torch.Tensor  # which predicted piece of its row the token is of, from 1; 0: given
    kinds: list[list[str]]  # of the predicted pieces of each row


def pack(rows: list[Row], pad: int) -> Batch:
    """One batch of rows; every conversation's positions go on from the end of its row's head."""
    sizes = [len(h) + sum(len(ids) for c in coded for _, ids in c) for h, coded in rows]
    shape = len(rows), max(sizes)
    ids, segment = torch.full(shape, pad), torch.full(shape, -1)
    position, trained = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    kinds: list[list[str]] = [[] for _ in rows]
    for b, (head, coded) in enumerate(rows):
        at = len(head)
        ids[b, :at] = torch.tensor(head)
        segment[b, :at] = 0
        position[b, :at] = torch.arange(at)
        for s, pieces in enumerate(coded, start=1):
            begin = at
            for kind, piece in pieces:
                stop = at + len(piece)
                ids[b, at:stop] = torch.tensor(piece)
                if kind:
                    kinds[b].append(kind)
                    trained[b, at:stop] = len(kinds[b])
                at = stop
            segment[b, begin:at] = s
            position[b, begin:at] = len(head) + torch.arange(at - begin)
    return Batch(ids, segment, position, trained, kinds)


def block_mask(segment: torch.Tensor) -> torch.Tensor:
    """[B, 1, T, T] bool: causal; a chart is seen by all its turns, a turn and padding by itself."""
    length = segment.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = segment[:, :, None] == segment[:, None, :]
    chart = (segment == 0)[:, None, :]
    return ((same | chart) & causal)[:, None]


def losses(model: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, dict[str, list[bool]]]:
    """Mean cross-entropy of the trained tokens, and per kind whether each turn came out exact."""
    hidden = model.model(
        input_ids=batch.ids,
        position_ids=batch.position,
        attention_mask=block_mask(batch.segment),
        use_cache=False,
    ).last_hidden_state
    turn = batch.trained[:, 1:]
    where = turn > 0
    logits = model.lm_head(hidden[:, :-1][where])
    target = batch.ids[:, 1:][where]
    loss = F.cross_entropy(logits, target)
    right = torch.zeros_like(where)
    right[where] = logits.detach().argmax(-1) == target
    exact: dict[str, list[bool]] = defaultdict(list)
    for b, kinds in enumerate(batch.kinds):
        for t, kind in enumerate(kinds, start=1):
            exact[kind].append(bool(right[b][turn[b] == t].all()))
    return loss, exact


def new_optimizers(
    model: LlamaForCausalLM, lr: float, muon_lr: float
) -> list[torch.optim.Optimizer]:
    """AdamW for embeddings and norms; Muon (Jordan, 2024) for the matrices when `muon_lr` > 0."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    chosen = {id(p) for p in matrices} if muon_lr > 0 else set()
    rest = [p for p in model.parameters() if id(p) not in chosen]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    ]
    if chosen:
        found.append(torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.01))
    return found


@dataclass
class Climber:
    """Which rung the curriculum stands on, from a moving share of exact open questions."""

    rung: int
    top: int
    share: float = 0.0

    def update(self, right: float) -> None:
        self.share += 0.05 * (right - self.share)
        if self.share > CLIMB_AT and self.rung < self.top:
            self.rung, self.share = self.rung + 1, 0.6


def set_rates(
    optimizers: list[torch.optim.Optimizer],
    peaks: Sequence[float],
    step: int,
    left: float,
    cooling: float,
) -> None:
    """Warm-up by steps, then constant, then linear to zero over the last share `cooling` of the
    time; `left` is the share of the time that is left.
    """
    rate = min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, left / cooling)
    for optimizer, peak in zip(optimizers, peaks, strict=True):
        optimizer.param_groups[0]["lr"] = peak * rate


def draw_rung(rng: random.Random, highest: int) -> int:
    """One step in five comes from an easier rung, so that climbing forgets nothing."""
    return highest if rng.random() < 0.8 else rng.randint(0, highest)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: Callable[[int], Batch],
    climber: Climber,
    rng: random.Random,
    args: Namespace,
    *,
    climbs_on: str,
    cooling: float,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Train for `args.seconds`, saving to `args.out`, with a line of figures every 50 steps.

    `draw` gives a batch of a rung; the curriculum climbs when the pieces of the kind `climbs_on`
    come out exact. `rng` decides what all ranks decide alike: the rung of a step.
    """
    optimizers = new_optimizers(model, args.lr, args.muon_lr)
    peaks = [o.param_groups[0]["lr"] for o in optimizers]
    args.out.mkdir(parents=True, exist_ok=True)
    begun, step, loss_sum = time.monotonic(), 0, 0.0
    totals: dict[str, list[bool]] = defaultdict(list)
    while (spent := agree(time.monotonic() - begun, ranks)) < args.seconds:
        set_rates(optimizers, peaks, step, 1 - spent / args.seconds, cooling)
        rung = draw_rung(rng, climber.rung)
        batch = draw(rung)
        loss, exact = losses(model, batch)
        if not math.isfinite(loss.item()):
            raise SystemExit(f"loss became {loss.item()} at step {step + 1}: lower --lr")
        loss.backward()
        share_gradients(model, ranks)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        loss_sum += loss.item()
        if rung == climber.rung:
            right = sum(exact[climbs_on]) / max(1, len(exact[climbs_on]))
            climber.update(agree(right, ranks))
            for kind, pieces in exact.items():
                totals[kind] += pieces
        if step % 50 == 0 and rank == 0:
            shares = {k: round(sum(v) / len(v), 3) for k, v in sorted(totals.items()) if v}
            line = {
                "step": step, "s": round(spent), "rung": climber.rung,
                "rows": len(batch.kinds) * ranks, "loss": round(loss_sum / 50, 4),
                "norm": round(float(norm), 2), "exact": shares,
            }  # fmt: skip
            print(json.dumps(line), flush=True)
            totals.clear()
            loss_sum = 0.0
            save(model, tokenizer, args.out)
    if rank == 0:
        save(model, tokenizer, args.out)


@torch.no_grad()
def sample(
    model: LlamaForCausalLM,
    prompts: list[list[int]],
    end: int,
    most: int,
    generator: torch.Generator | None,
) -> list[list[int]]:
    """What follows each prompt, at most `most` tokens, without its end token: drawn at temperature
    1, or greedy without a generator.
    """
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    position = (seen.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    said: list[torch.Tensor] = []
    for _ in range(most):
        out = model(
            input_ids=ids,
            attention_mask=seen,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = out.logits[:, -1]
        if generator is None:
            ids = logits.argmax(-1, keepdim=True)
        else:
            ids = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        said.append(ids)
        seen = torch.cat([seen, torch.ones_like(ids)], 1)
        position = position[:, -1:] + 1
        if all((row == end).any() for row in torch.cat(said, 1)):
            break
    rows = torch.cat(said, 1).tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]


def agree(value: float, ranks: int) -> float:
    """The mean over ranks, so that all of them climb and stop together."""
    if ranks == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(shared)
    return float(shared) / ranks


def share_gradients(model: LlamaForCausalLM, ranks: int) -> None:
    """Average the gradients over ranks, as one flat tensor."""
    if ranks == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(part.view_as(g) / ranks)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
