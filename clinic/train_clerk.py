"""Train the tiny clerk from the tiny reader, on one core, or say how well one does:

    python -m clinic.train_clerk --resume models/clinic-reader --out models/clinic-clerk
    python -m clinic.train_clerk --resume models/clinic-clerk --measure

A row of a batch is a handbook, or the bare beginning, and the episodes of `clinic.clerk_corpus`
that see it and themselves only. Loss on the clerk's calls alone.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from clinic.clerk_corpus import FIELDS, draw_row
from clinic.desk import Case, Standing, draw_case, draw_desk, reply_to
from clinic.desk_hints import HINTS
from clinic.train_loop import Batch, Climber, Piece, Row, pack, sample, train

# Fields of a handbook. Looking up is learnt from few (docs/log.md), then holds for many.
LADDER = ((2, 3), (2, 5), (4, 9), (6, 16), FIELDS)
TOOL = "<|tool|>"
MAX_TURNS = 5  # of a measured episode
MAX_CALL = 12  # tokens
CARTRIDGE = 28  # tokens of the handbook that a cartridge of the default size starts from


def hire(tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM, seed: int) -> None:
    """Give a reader the token that begins a tool's reply: like the user's, but for some noise."""
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


def head_ids(tokenizer: PreTrainedTokenizerFast, document: str) -> list[int]:
    """The tokens before an episode: the document in the system's turn, or the beginning alone."""
    if not document:
        return [int(tokenizer.bos_token_id)]
    ids: list[int] = tokenizer(f"<|bos|><|system|>{document}<|end|>").input_ids
    return ids


def draw_batch(
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    size: int,
    episodes: int,
    fields: tuple[int, int] = FIELDS,
) -> Batch:
    """Draw `size` desks with `episodes` episodes each, tokenised as the chat template does."""
    special = tokenizer.get_vocab()
    rows: list[Row] = []
    for _ in range(size):
        desk, drawn = draw_row(rng, episodes, fields)
        coded: list[list[Piece]] = []
        for episode in drawn:
            texts = tokenizer([said.text for said in episode]).input_ids
            pieces: list[Piece] = []
            for said, text in zip(episode, texts, strict=True):
                pieces.append(("", [special[f"<|{said.role}|>"]]))
                pieces.append((said.kind, [*text, special["<|end|>"]]))
            coded.append(pieces)
        rows.append((head_ids(tokenizer, desk.document), coded))
    return pack(rows, tokenizer.pad_token_id)


@dataclass(frozen=True)
class Play:
    """A case being played: the tokens so far, and how it stands. `hinted`: how it stood, in turns,
    when it was given the hint `where`.
    """

    case: Case
    tokens: tuple[int, ...]
    standing: Standing = field(default_factory=Standing)
    hinted: int | None = None
    followed: bool = False  # the call after the hint found the note

    @property
    def done(self) -> bool:
        return self.standing.reply is not None and self.standing.reply.done

    @property
    def right(self) -> bool:
        return self.standing.reply is not None and self.standing.reply.reward == 1.0


def play(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    cases: list[tuple[Case, list[int]]],
    hint: bool,
    seed: int,
) -> list[Play]:
    """Play each case after its head's tokens. `hint`: give `where` at the first missing record."""
    generator = torch.Generator().manual_seed(seed)
    end, assistant = (tokenizer.get_vocab()[token] for token in ("<|end|>", "<|assistant|>"))

    def message(role: str, text: str) -> list[int]:
        ids: list[int] = tokenizer(f"<|{role}|>{text}<|end|>").input_ids
        return ids

    def after(p: Play, call: list[int]) -> Play:
        standing = reply_to(p.case, p.standing, str(tokenizer.decode(call)), MAX_TURNS)
        reply = standing.reply
        assert reply is not None
        followed = p.followed or (p.hinted == p.standing.turns and standing.found)
        tokens = [*p.tokens, assistant, *call, end, *message("tool", reply.text)]
        hinted = p.hinted
        if hint and hinted is None and reply.hint_key == "where" and not reply.done:
            hinted = standing.turns
            tokens += message("user", HINTS["where"].format(**reply.hint_facts))
        return Play(p.case, tuple(tokens), standing, hinted, followed)

    plays = [Play(case, (*head, *message("user", case.question))) for case, head in cases]
    while live := [i for i, p in enumerate(plays) if not p.done]:
        calls = sample(
            model, [[*plays[i].tokens, assistant] for i in live], end, MAX_CALL, generator
        )
        for i, call in zip(live, calls, strict=True):
            plays[i] = after(plays[i], call)
    return plays


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    episodes: int,
    fields: int,
    seed: int,
) -> dict[str, float]:
    """Shares of the cases that end with the right value, by what stands before them; and of the
    calls right after the hint `where` that find the note. Each over `episodes` seeded cases.
    """
    drawn = []
    for index in range(1, episodes + 1):
        desk = draw_desk(seed, index, fields)
        drawn.append((draw_case(desk, seed), head_ids(tokenizer, desk.document)))
    bare = head_ids(tokenizer, "")
    kinds: dict[str, Callable[[list[int]], list[int]]] = {
        "none": lambda head: bare,
        "handbook": lambda head: head,
        "cut": lambda head: head[:CARTRIDGE],
    }
    shares = {
        kind: _share(play(model, tokenizer, [(c, of(head)) for c, head in drawn], False, seed))
        for kind, of in kinds.items()
    }
    plays = play(model, tokenizer, [(case, bare) for case, _ in drawn], True, seed)
    hinted = [p for p in plays if p.hinted is not None]
    return {**shares, "hinted": sum(p.followed for p in hinted) / len(hinted)}


def _share(plays: list[Play]) -> float:
    return sum(p.right for p in plays) / len(plays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--resume", type=Path, required=True, help="start from this model directory"
    )
    parser.add_argument("--out", type=Path, help="train, and save here")
    parser.add_argument("--seconds", type=float, default=1500.0, help="stop after this long")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=16, help="desks a step")
    parser.add_argument("--episodes", type=int, default=2, help="to a desk")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rung", type=int, default=0)
    parser.add_argument("--measure", action="store_true", help="play cases and print the shares")
    parser.add_argument("--cases", type=int, default=200, help="to measure")
    parser.add_argument("--fields", type=int, default=12, help="of a handbook, to measure")
    args = parser.parse_args()
    if args.measure == bool(args.out):
        parser.error("give either --out DIR or --measure")
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()  # every save would draw one into the log
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.resume)
    model = LlamaForCausalLM.from_pretrained(args.resume, dtype=torch.float32)
    hire(tokenizer, model, args.seed)
    if args.measure:
        print(json.dumps(measure(model, tokenizer, args.cases, args.fields, args.seed)))
        return
    rng = random.Random(f"clerk/{args.seed}")
    train(
        model,
        tokenizer,
        lambda rung: draw_batch(tokenizer, rng, args.batch, args.episodes, LADDER[rung]),
        Climber(args.rung, top=len(LADDER) - 1),
        rng,
        args,
        climbs_on="find",
        cooling=0.4,
    )


if __name__ == "__main__":
    main()
