"""Measure by sampling what the tiny models do: a clerk's cases, a panel's five-option questions,
and a merger's questions of several fields."""

from __future__ import annotations

import random
from argparse import Namespace
from dataclasses import dataclass, field
from itertools import product

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cartridge_forge.plugins.clinic.desk import (
    HINTS,
    CaseState,
    DeskCase,
    draw_case,
    draw_desk,
    reply_to,
)
from cartridge_forge.plugins.clinic.findings import (
    FindingsQuestion,
    all_right,
    draw_findings,
    parts_f1,
    said_parts,
    says_parts,
)
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import (
    PatientQuestion,
    aggregation_prompt,
    claims,
    option_prompt,
    parse_answer,
    parse_patients,
)
from models.pretrain.merge_tasks import draw_value
from models.pretrain.panel_tasks import field_of
from models.pretrain.reader_tasks import head

MAX_TURNS = 5  # of an episode
MAX_CALL, MAX_ANSWER, MAX_LIST = 12, 20, 32  # tokens
CARTRIDGE = 28  # handbook tokens that initialise a cartridge of the default size
FACTS, NOTES = 24, 4  # of a chart
PANELS = (1, 2, 4)  # candidates to a question
AT_ONCE = 64  # prompts


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, prompts: list[list[int]], end: int, most: int, greedy: bool = False
) -> list[list[int]]:
    """Return up to `most` new tokens for each prompt, without its end token: greedy, or drawn at
    temperature 1 from torch's own generator."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[end] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    rows = model.generate(  # type: ignore[misc]  # its stub names a protocol for self
        ids, attention_mask=mask, max_new_tokens=most, do_sample=not greedy, top_k=0,
        eos_token_id=end, pad_token_id=end,
    )[:, longest:].tolist()  # fmt: skip
    return [row[: row.index(end)] if end in row else row for row in rows]


# -- the clerk --------------------------------------------------------------------------------


@dataclass
class CaseRollout:
    """Hold a case in progress: its tokens and state. `hinted` is the number of turns before the
    hint `where`, None without it."""

    case: DeskCase
    tokens: list[int]
    standing: CaseState = field(default_factory=CaseState)
    hinted: int | None = None
    followed: bool = False  # the call after the hint found the note


def play(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    cases: list[tuple[DeskCase, list[int]]],
    hint: bool,
    seed: int,
) -> list[CaseRollout]:
    """Play each case after its head's tokens; `hint`: give `where` at the first missing record."""
    torch.manual_seed(seed)
    end, assistant = (tokenizer.get_vocab()[token] for token in ("<|end|>", "<|assistant|>"))

    def message(role: str, text: str) -> list[int]:
        ids: list[int] = tokenizer(f"<|{role}|>{text}<|end|>").input_ids
        return ids

    plays = [CaseRollout(case, [*head, *message("user", case.question)]) for case, head in cases]
    live = plays
    while live:
        prompts = [[*p.tokens, assistant] for p in live]
        calls = sample(model, prompts, end, MAX_CALL)
        active = []
        for p, call in zip(live, calls, strict=True):
            turns = p.standing.turns
            p.standing = reply_to(p.case, p.standing, str(tokenizer.decode(call)), MAX_TURNS)
            reply = p.standing.reply
            assert reply is not None
            p.followed |= p.hinted == turns and p.standing.found
            if reply.done:
                continue
            active.append(p)
            p.tokens += [assistant, *call, end, *message("tool", reply.text)]
            if hint and p.hinted is None and reply.hint_key == "where":
                p.hinted = p.standing.turns
                p.tokens += message("user", HINTS["where"].format(**reply.hint_facts))
        live = active
    return plays


def measure_clerk(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: Namespace
) -> dict[str, float]:
    """Return the share of `args.cases` seeded cases that end with the right value, for each kind of
    context: none, handbook, cut. "hinted" is the share of calls right after the hint `where` that
    find the note. Handbooks have `args.fields` fields."""
    desks = [draw_desk(args.seed, index, args.fields) for index in range(1, args.cases + 1)]
    cases = [draw_case(desk, args.seed) for desk in desks]
    heads: list[list[int]] = [tokenizer(head(desk.document)).input_ids for desk in desks]
    bare: list[list[int]] = [tokenizer(head("")).input_ids] * len(cases)
    cut = [ids[:CARTRIDGE] for ids in heads]
    shares = {}
    for kind, prefixes in (("none", bare), ("handbook", heads), ("cut", cut)):
        plays = play(model, tokenizer, list(zip(cases, prefixes, strict=True)), False, args.seed)
        right = sum(p.standing.reply is not None and p.standing.reply.reward == 1 for p in plays)
        shares[kind] = right / len(plays)
    plays = play(model, tokenizer, list(zip(cases, bare, strict=True)), True, args.seed)
    hinted = [p for p in plays if p.hinted is not None]
    return {**shares, "hinted": sum(p.followed for p in hinted) / len(hinted)}


# -- the panel --------------------------------------------------------------------------------


PanelQuestion = tuple[PatientQuestion, str, tuple[str, ...]]  # document before it, candidates


def draw_asked(
    seed: int, patients: int, chart: bool, count: int = 0, right: int = 0
) -> list[PanelQuestion]:
    """Return one question for each fact of seeded charts, after the chart or after nothing. Each
    has `count` candidates in random order: `right` right ones, the others wrong and distinct."""
    rng = random.Random(f"panel/measure/{seed}/{count}/{right}")
    questions = []
    for patient in parse_patients(generate_clinic(seed, patients, FACTS, NOTES), "measured"):
        for question in patient.questions:
            wrong = [o for o in question.options if o != question.correct]
            options = [question.correct] * right + rng.sample(wrong, count - right)
            rng.shuffle(options)
            candidates = tuple(claims(field_of(question), option) for option in options)
            questions.append((question, patient.document if chart else "", candidates))
    return questions


def share_right(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[PanelQuestion],
    seed: int | None,
) -> float:
    """Return the share of questions answered right, in [0, 1], drawn at temperature 1, or greedily
    without a seed."""
    prompts = []
    for question, document, candidates in questions:
        text = option_prompt(question.text, question.options)
        prompts.append((document, aggregation_prompt(text, candidates) if candidates else text))
    right = 0
    replies = _replies(model, tokenizer, prompts, MAX_ANSWER, seed)
    for (question, _, _), answer in zip(questions, replies, strict=True):
        letter = parse_answer(answer, question)
        right += letter is not None and question.is_correct(letter)
    return right / len(questions)


def _replies(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    asked: list[tuple[str, str]],
    most: int,
    seed: int | None,
) -> list[str]:
    """Return a reply of up to `most` tokens to each prompt after its document ("": none)."""
    torch.manual_seed(seed or 0)
    prompts = []
    for document, text in asked:
        ids = tokenizer([head(document), f"<|user|>{text}<|end|><|assistant|>"]).input_ids
        prompts.append([*ids[0], *ids[1]])
    end, replies = tokenizer.get_vocab()["<|end|>"], list[str]()
    for at in range(0, len(prompts), AT_ONCE):
        rows = sample(model, prompts[at : at + AT_ONCE], end, most, seed is None)
        replies += [str(tokenizer.decode(row)) for row in rows]
    return replies


def measure_panel(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: Namespace
) -> dict[str, float]:
    """Return shares answered right, with the chart ("chart") and without ("none"). "chart 4/1" has
    4 candidates, 1 of them right. Answers are drawn; with a chart there are "greedy" ones too."""
    seed = 1_000_003 + args.seed
    settings = [(0, 0), *((count, right) for count in PANELS for right in range(count + 1))]
    shares = {}
    for chart, (count, right) in product((True, False), settings):
        questions = draw_asked(seed, args.patients, chart, count, right)
        name = ("chart" if chart else "none") + (f" {count}/{right}" if count else "")
        shares[name] = round(share_right(model, tokenizer, questions, seed), 3)
        if chart:
            shares[f"{name} greedy"] = round(share_right(model, tokenizer, questions, None), 3)
    return shares


# -- the merger -------------------------------------------------------------------------------


ListQuestion = tuple[FindingsQuestion, str, tuple[str, ...]]  # document before it, candidates


def draw_lists(
    seed: int, patients: int, parts: int, chart: bool, candidate_kind: str, count: int = 8
) -> list[ListQuestion]:
    """Return `count` questions of `parts` fields for each seeded chart, after the chart or after
    nothing. `candidate_kind` tells the candidates: "all but one" (as many as parts, each wrong in
    another part), "two" (as many as parts, each with two other right parts and no more) or ""
    (none)."""
    rng = random.Random(f"merge/measure/{seed}/{parts}/{candidate_kind}")
    questions = []
    for patient in parse_patients(generate_clinic(seed, patients, FACTS, NOTES), "measured"):
        for question in draw_findings((patient,), parts, count, seed):
            fields, claims = list(question.parts), []
            for i in range(parts if candidate_kind else 0):
                claimed = dict(question.parts)
                if candidate_kind == "two":
                    fields_kept = fields[i], fields[(i + 1) % parts]
                    claimed = {
                        field: value for field, value in claimed.items() if field in fields_kept
                    }
                else:
                    claimed[fields[i]] = draw_value(rng, fields[i], claimed[fields[i]])
                claims.append(says_parts(claimed))
            rng.shuffle(claims)
            questions.append((question, patient.document if chart else "", tuple(claims)))
    return questions


def lists_right(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[ListQuestion],
    seed: int | None,
) -> tuple[float, float]:
    """Return the share of questions with all parts right and the mean F1 of the parts, in [0, 1],
    drawn at temperature 1, or greedily without a seed."""
    prompts = []
    for question, document, candidates in questions:
        text = question.text
        prompts.append((document, aggregation_prompt(text, candidates) if candidates else text))
    answers = [said_parts(text) for text in _replies(model, tokenizer, prompts, MAX_LIST, seed)]
    pairs = list(zip([question.parts for question, _, _ in questions], answers, strict=True))
    right = sum(all_right(parts, answer) for parts, answer in pairs)
    return right / len(pairs), sum(parts_f1(parts, answer) for parts, answer in pairs) / len(pairs)


def measure_merge(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: Namespace
) -> dict[str, tuple[float, float]]:
    """Return shares with all parts right and F1, of questions of `args.parts` fields with the chart
    and without, and with each kind of candidates of `draw_lists`. Answers are drawn, or greedy."""
    seed = 1_000_003 + args.seed
    settings = [(True, ""), *product((True, False), ("all but one", "two"))]
    shares = {}
    for chart, candidate_kind in settings:
        questions = draw_lists(seed, args.patients, args.parts, chart, candidate_kind)
        name = ("chart" if chart else "none") + (f", {candidate_kind}" if candidate_kind else "")
        for drawn, draw_seed in ((name, seed), (f"{name}, greedy", None)):
            right, f1 = lists_right(model, tokenizer, questions, draw_seed)
            shares[drawn] = round(right, 3), round(f1, 3)
    return shares
