"""Train one of the tiny models, or say how well it does:

    torchrun --nproc-per-node 2 -m models.pretrain.train reader \\
      --out models/clinic-reader
    python -m models.pretrain.train clerk --resume models/clinic-reader \\
      --out models/clinic-clerk
    torchrun --nproc-per-node 2 -m models.pretrain.train merge \\
      --resume models/clinic-panel --out models/clinic-merge
    python -m models.pretrain.train panel --resume models/clinic-panel --measure

The reader, a standard LlamaForCausalLM, starts from random weights; clerk and panel start from the
reader, the merger from the panel. A batch row has a head (a chart, a handbook, or the begin token)
and several conversations. A block mask lets each conversation attend to the head and itself only;
its positions restart after the head. One forward pass over a chart thus serves many questions. The
loss covers the taught messages only.

The curriculum starts easy and climbs a rung when the share of exact messages passes a mark
(teacher-forced; every batch is new). models/pretrain/README.md records other attempts.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from models.pretrain import clerk_tasks, merge_tasks, panel_tasks, reader_tasks
from models.pretrain.induction import new_model
from models.pretrain.measure import measure_clerk, measure_merge, measure_panel
from models.pretrain.reader_tasks import Row
from models.pretrain.tokenizer import build_tokenizer

CLIMB_AT = 0.85
WARMUP_STEPS = 50
TOOL = "<|tool|>"


@dataclass(frozen=True)
class TaskMix:
    """Hold a model's training tasks and the defaults of its hyper-parameters."""

    rows: Callable[[random.Random, int, Namespace], Iterator[Row]]  # of a rung
    rungs: int
    climbs_on: str  # the kind of message whose exact share decides a climb
    cooling: float  # the last share of the time, over which learning rates fall to zero
    seconds: float
    lr: float
    muon_lr: float
    batch: int
    counts: Mapping[str, tuple[int, str]]  # further options: default, help
    measure: Callable[[LlamaForCausalLM, PreTrainedTokenizerFast, Namespace], object] | None = None


MIXES = {
    "reader": TaskMix(
        reader_tasks.rows, len(reader_tasks.LADDER), "question", 0.3, 3600.0, 2e-3, 0.02, 32,
        {
            "--layers": (4, ""), "--width": (192, ""), "--heads": (6, ""), "--kv-heads": (2, ""),
            "--tokens": (8192, "bounds charts x length of a rank"),
        },
    ),
    "clerk": TaskMix(
        clerk_tasks.rows, len(clerk_tasks.LADDER), "find", 0.4, 1500.0, 1e-3, 0.01, 16,
        {
            "--episodes": (2, "to a desk"), "--cases": (200, "to measure"),
            "--fields": (12, "of a handbook, to measure"),
        },
        measure_clerk,
    ),
    "panel": TaskMix(
        panel_tasks.rows, len(panel_tasks.LADDER), "voted", 0.6, 1500.0, 1e-3, 0.01, 12,
        {
            "--first": (2, "plain questions to a chart"),
            "--reviewed": (4, "questions with candidates"),
            "--others": (1, "the reader's turns to a chart"), "--patients": (5, "to measure"),
        },
        measure_panel,
    ),
    "merge": TaskMix(
        merge_tasks.rows, len(merge_tasks.LADDER), "merged", 0.6, 3000.0, 1e-3, 0.01, 6,
        {
            "--alone": (40, "questions with candidates of a step without charts"),
            "--first": (3, "plain questions of several fields to a chart"),
            "--merged": (3, "questions with candidates to a chart"),
            "--others": (1, "the reader's turns to a chart"),
            "--parts": (4, "fields of a question, to measure"),
            "--patients": (8, "to measure"),
        },
        measure_merge,
    ),
}  # fmt: skip


@dataclass
class PretrainBatch:
    """Hold rows of a head and conversations, all tensors [B, T]. `segment` is 0 for the head, 1..
    for the conversations, -1 for padding."""

    ids: torch.Tensor
    segment: torch.Tensor
    position: torch.Tensor
    trained: torch.Tensor  # number of the token's taught message in its row, from 1; 0: not taught
    kinds: list[list[str]]  # of the taught messages of each row


def encode(tokenizer: PreTrainedTokenizerFast, rows: Iterable[Row]) -> PretrainBatch:
    """Return one batch of rows, tokenized as the chat template does. The positions of every
    conversation continue from the end of its row's head."""
    special = tokenizer.get_vocab()
    coded: list[list[tuple[int, int, int, int]]] = []  # id, segment, position, trained
    kinds: list[list[str]] = []
    for head, conversations in rows:
        head_ids, row_kinds = tokenizer(head).input_ids, list[str]()
        tokens = [(token, 0, at, 0) for at, token in enumerate(head_ids)]
        for segment, conversation in enumerate(conversations, start=1):
            position = count(len(head_ids))
            texts = tokenizer([message.text for message in conversation]).input_ids
            for said, text in zip(conversation, texts, strict=True):
                row_kinds += [said.kind] if said.kind else []
                taught = len(row_kinds) if said.kind else 0
                tokens.append((special[f"<|{said.role}|>"], segment, next(position), 0))
                ids = (*text, special["<|end|>"])
                tokens += [(token, segment, next(position), taught) for token in ids]
        coded.append(tokens)
        kinds.append(row_kinds)
    longest, padding = max(map(len, coded)), (tokenizer.pad_token_id, -1, 0, 0)
    padded = torch.tensor([tokens + [padding] * (longest - len(tokens)) for tokens in coded])
    columns = [padded[..., column].contiguous() for column in range(4)]
    return PretrainBatch(columns[0], columns[1], columns[2], columns[3], kinds)


def block_mask(segment: torch.Tensor) -> torch.Tensor:
    """Return a causal [B, 1, T, T] bool mask: a token attends to its row's head and own segment."""
    length = segment.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same_segment = segment[:, :, None] == segment[:, None, :]
    head = (segment == 0)[:, None, :]
    return ((same_segment | head) & causal)[:, None]


def losses(
    model: LlamaForCausalLM, batch: PretrainBatch
) -> tuple[torch.Tensor, dict[str, list[bool]]]:
    """Return the mean cross-entropy of taught tokens, nats, and by kind whether each message is
    exact."""
    hidden = model.model(
        input_ids=batch.ids,
        position_ids=batch.position,
        attention_mask=block_mask(batch.segment),
        use_cache=False,
    ).last_hidden_state
    taught = batch.trained[:, 1:]
    where = taught > 0
    logits = model.lm_head(hidden[:, :-1][where])
    target = batch.ids[:, 1:][where]
    right = torch.zeros_like(where)
    right[where] = logits.detach().argmax(-1) == target
    exact: dict[str, list[bool]] = defaultdict(list)
    for b, kinds in enumerate(batch.kinds):
        for t, kind in enumerate(kinds, start=1):
            exact[kind].append(bool(right[b][taught[b] == t].all()))
    return F.cross_entropy(logits, target), exact


def new_optimizers(
    model: LlamaForCausalLM, lr: float, muon_lr: float
) -> list[torch.optim.Optimizer]:
    """Return AdamW for embeddings and norms; if `muon_lr` > 0, Muon (Jordan, 2024) for the rest."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    chosen = {id(p) for p in matrices} if muon_lr > 0 else set()
    parameters = [p for p in model.parameters() if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    ]
    if chosen:
        optimizers.append(torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.01))
    return optimizers


@dataclass
class Curriculum:
    """Choose the curriculum's rung from a moving share of exact messages."""

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
    remaining: float,
    cooling: float,
) -> None:
    """Set learning rates: warm-up by steps, then constant, then linear to zero over the last share
    `cooling` of the time. `remaining` is the share of the time."""
    rate = min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, remaining / cooling)
    for optimizer, peak in zip(optimizers, peaks, strict=True):
        optimizer.param_groups[0]["lr"] = peak * rate


def draw_rung(rng: random.Random, highest: int) -> int:
    """Draw a step's rung: one step in five may be easier, so that the model forgets nothing."""
    return highest if rng.random() < 0.8 else rng.randint(0, highest)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    mix: TaskMix,
    rng: random.Random,
    own: random.Random,
    args: Namespace,
) -> None:
    """Train for `args.seconds`, saving to `args.out` and printing metrics every 50 steps.

    `rng`, equal on all ranks, draws the rung of a step; `own` draws this rank's rows.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    optimizers = new_optimizers(model, args.lr, args.muon_lr)
    peaks = [o.param_groups[0]["lr"] for o in optimizers]
    climber = Curriculum(args.rung, top=mix.rungs - 1)
    args.out.mkdir(parents=True, exist_ok=True)
    start, step, loss_sum = time.monotonic(), 0, 0.0
    totals: dict[str, list[bool]] = defaultdict(list)
    while (spent := agree(time.monotonic() - start)) < args.seconds:
        set_rates(optimizers, peaks, step, 1 - spent / args.seconds, mix.cooling)
        rung = draw_rung(rng, climber.rung)
        batch = encode(tokenizer, mix.rows(own, rung, args))
        loss, exact = losses(model, batch)
        if not math.isfinite(loss.item()):
            raise SystemExit(f"loss became {loss.item()} at step {step + 1}: lower --lr")
        loss.backward()
        share_gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        loss_sum += loss.item()
        if rung == climber.rung:
            right = sum(exact[mix.climbs_on]) / max(1, len(exact[mix.climbs_on]))
            climber.update(agree(right))
            for kind, scores in exact.items():
                totals[kind] += scores
        if step % 50 == 0 and rank == 0:
            shares = {k: round(sum(v) / len(v), 3) for k, v in sorted(totals.items()) if v}
            line = {
                "step": step, "s": round(spent), "rung": climber.rung,
                "rows": len(batch.kinds) * ranks(), "loss": round(loss_sum / 50, 4),
                "norm": round(float(norm), 2), "exact": shares,
            }  # fmt: skip
            print(json.dumps(line), flush=True)
            totals.clear()
            loss_sum = 0.0
            save(model, tokenizer, args.out)
    if rank == 0:
        save(model, tokenizer, args.out)


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def agree(value: float) -> float:
    """Return the mean over ranks, so that all of them climb and stop together."""
    if ranks() == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(shared)
    return float(shared) / ranks()


def share_gradients(model: LlamaForCausalLM) -> None:
    """Average the gradients over ranks, as one flat tensor."""
    if ranks() == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    for g, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(part.view_as(g) / ranks())


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def hire(tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM, seed: int) -> None:
    """Add the token that begins a tool's reply, with the user token's embedding and some noise."""
    if TOOL in tokenizer.get_vocab():
        return
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [TOOL]}, replace_extra_special_tokens=False
    )
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    user, tool = (tokenizer.get_vocab()[token] for token in ("<|user|>", TOOL))
    rows = model.model.embed_tokens.weight.data
    noise = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(seed))
    rows[tool] = rows[user] + 0.1 * rows[user].std() * noise


def parse() -> Namespace:
    """Return the command-line options; `mix` is the name of the task mix."""
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    mixes = parser.add_subparsers(dest="mix", required=True)
    for name, mix in MIXES.items():
        mix_parser = mixes.add_parser(name)
        scratch = mix.measure is None
        mix_parser.add_argument("--out", type=Path, required=scratch, help="train, and save here")
        mix_parser.add_argument(
            "--resume", type=Path, required=not scratch, help="start from this model directory"
        )
        mix_parser.add_argument(
            "--seconds", type=float, default=mix.seconds, help="stop after this long"
        )
        mix_parser.add_argument("--lr", type=float, default=mix.lr)
        mix_parser.add_argument("--muon-lr", type=float, default=mix.muon_lr)
        mix_parser.add_argument(
            "--batch", type=int, default=mix.batch, help="rows a step of a rank"
        )
        mix_parser.add_argument("--threads", type=int, default=1)
        mix_parser.add_argument("--seed", type=int, default=0)
        mix_parser.add_argument("--rung", type=int, default=0)
        for option, (default, help) in mix.counts.items():
            mix_parser.add_argument(option, type=int, default=default, help=help)
        mix_parser.set_defaults(measure=False)
        if not scratch:
            mix_parser.add_argument(
                "--measure", action="store_true", help="print the shares done right"
            )
    args = parser.parse_args()
    if args.measure == bool(args.out):
        parser.error("give either --out DIR or --measure")
    return args


def main() -> None:
    args = parse()
    mix = MIXES[args.mix]
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()  # every save would print one into the log
    if args.resume:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.resume)
        model = LlamaForCausalLM.from_pretrained(args.resume, dtype=torch.float32)
    else:
        tokenizer = build_tokenizer()
        model = new_model(
            len(tokenizer), args.layers, args.width, args.heads, args.kv_heads, args.seed
        )
    if args.mix == "clerk":
        hire(tokenizer, model, args.seed)
    if args.measure and mix.measure is not None:
        print(json.dumps(mix.measure(model, tokenizer, args)))
        return
    shared = rank_rng = random.Random(f"{args.mix}/{args.seed}")
    if args.mix in ("reader", "merge"):  # train on several ranks, each with its own charts
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("gloo")
        stream = f"{args.mix}/{args.seed}/{args.rung}"
        shared = random.Random(stream)
        rank_rng = random.Random(f"{stream}/{os.environ.get('RANK', '0')}")
    train(model, tokenizer, mix, shared, rank_rng, args)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
