"""Test the clinic's tiny models: the panel and its votes, and the reader."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from rooms.environments.clinic_setup import MODELS, PANEL, Parts

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import DocumentKVCache, document_kv
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import (
    PatientQuestion,
    aggregation_prompt,
    claims,
    option_prompt,
    parse_answer,
    parse_patients,
)
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling
from models.pretrain.measure import draw_asked, share_right
from models.pretrain.panel_tasks import (
    BROKEN_RATE,
    FIRST_SLIP,
    KEEP_RATE,
    REVIEWED_SLIP,
    can_read,
    draw_candidates,
    draw_turns,
    first_turn,
    leaders,
    reviewed_turn,
    rows,
)
from models.pretrain.reader_tasks import CorpusTurn, Difficulty, draw_conversation
from models.pretrain.train import encode

SODIUM = PatientQuestion(
    "q", "p", "what is the sodium?", ("41 mmol", "15 mmol", "62 mmol", "90 mmol", "77 mmol"),
    "62 mmol",
)  # fmt: skip

PROMPT = option_prompt(SODIUM.text, SODIUM.options)

SAYS_41, SAYS_62, SAYS_90 = (claims("sodium", f"{n} mmol") for n in (41, 62, 90))


def test_the_prompt_numbers_the_candidates() -> None:
    assert aggregation_prompt(PROMPT, [SAYS_41, "", " no\n idea "]) == (
        "what is the sodium? options: a) 41 mmol b) 15 mmol c) 62 mmol d) 90 mmol e) 77 mmol\n"
        " review the answers:\n"
        " 1: the chart says sodium 41 mmol. the answer is 41 mmol.\n"
        " 2:\n"
        " 3: no idea"
    )
    with pytest.raises(DataError, match="no candidates"):
        aggregation_prompt(PROMPT, [])


def test_the_prompt_is_made_of_whole_words(panel: Parts) -> None:
    """Six tokens say what to do (the plural s is one), three more begin a candidate's line."""
    _, tokenizer = panel
    said = [SAYS_41, SAYS_62, "", SAYS_90]
    together = len(tokenizer(aggregation_prompt(PROMPT, said)).input_ids)
    alone = [len(tokenizer(text).input_ids) for text in (PROMPT, SAYS_41, SAYS_62, SAYS_90)]
    assert together == sum(alone) + 6 + 3 * 4


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([SAYS_41], ["41 mmol"]),
        ([SAYS_41, SAYS_62, SAYS_62], ["62 mmol"]),
        ([SAYS_90, SAYS_41, "", "the chart says sodium 41 mmol."], ["41 mmol", "90 mmol"]),
        ([SAYS_90, claims("sodium", "11 mmol"), claims("sodium", "11 mmol")], ["90 mmol"]),
        (["", "the chart says sodium 41 mmol. the answer is"], list(SODIUM.options)),
    ],
)
def test_only_valid_answers_vote(candidates: list[str], expected: list[str]) -> None:
    assert leaders(candidates, SODIUM) == expected


@pytest.mark.parametrize(
    ("document", "readable"),
    [
        ("note 1: cardiology, 14 march. sodium 62 mmol. surgeon weber.", True),
        ("note 1: cardiology, 14 march. sodium 62", True),  # cut off before the unit
        ("note 1: cardiology, 14 march. sodium", False),
        ("note 1: cardiology, 14 march. sodium 41 mmol. glucose 62 mmol.", False),
        ("", False),
    ],
)
def test_what_can_be_read(document: str, readable: bool) -> None:
    assert can_read(document, SODIUM) is readable


def near(count: int, total: int, rate: float) -> bool:
    """Within four standard deviations."""
    return abs(count - total * rate) <= 4 * (total * rate * (1 - rate)) ** 0.5


def answer(turn: CorpusTurn) -> str:
    return turn.response.split("the answer is ")[1].removesuffix(".")


@pytest.mark.parametrize(("told", "kind"), [(True, "options"), (False, "guess")])
def test_first_answers_are_read_or_guessed(told: bool, kind: str) -> None:
    rng = random.Random(f"first/{told}")
    turns = [first_turn(rng, SODIUM, told) for _ in range(2000)]
    right = sum(answer(t) == SODIUM.correct for t in turns)
    assert near(right, 2000, 1 - FIRST_SLIP if told else 0.2)
    assert {answer(t) for t in turns} == set(SODIUM.options)
    assert {t.kind for t in turns} == ({kind, "slip"} if told else {kind})
    assert {t.prompt for t in turns} == {PROMPT}


def test_with_the_fact_the_answer_is_right_whatever_the_candidates_say() -> None:
    rng = random.Random("told")
    turns = [reviewed_turn(rng, SODIUM, True) for _ in range(3000)]
    assert near(sum(t.kind == "slip" for t in turns), 3000, REVIEWED_SLIP)
    assert {t.kind for t in turns} == {"told", "slip"}
    assert all((answer(t) == SODIUM.correct) == (t.kind == "told") for t in turns)


def test_without_the_fact_the_candidates_decide() -> None:
    rng = random.Random("untold")
    counts: Counter[str] = Counter()
    for _ in range(4000):
        turn = reviewed_turn(rng, SODIUM, False)
        said = [line.partition(":")[2] for line in turn.prompt.split("\n")[2:]]
        leading = leaders(said, SODIUM)
        single = len(said) == 1 and len(leading) == 1
        assert (len(leading) > 1) == (turn.kind == "tied")
        assert (answer(turn) in leading) == (turn.kind != "slip")
        assert (turn.kind == "kept") <= single
        counts["single" if single else "clear" if len(leading) == 1 else "tied"] += 1
        counts[turn.kind] += 1
    assert near(counts["kept"], counts["single"], KEEP_RATE)
    assert near(counts["voted"], counts["clear"], 1 - REVIEWED_SLIP)


def test_candidates_are_right_at_every_rate_and_sometimes_broken() -> None:
    rng = random.Random("candidates")
    drawn = [draw_candidates(rng, SODIUM) for _ in range(3000)]
    assert Counter(map(len, drawn)).keys() == {1, 2, 3, 4}
    said = [c for candidates in drawn for c in candidates]
    letters = [parse_answer(c, SODIUM) for c in said]
    assert near(letters.count(None), len(said), BROKEN_RATE)
    right = [sum(parse_answer(c, SODIUM) == "c" for c in d) for d in drawn if len(d) == 4]
    assert min(Counter(right)[n] for n in range(5)) > 50


def test_a_sitting_tells_what_can_be_read() -> None:
    rng = random.Random("sittings")
    kinds: dict[str, Counter[str]] = {"whole": Counter(), "cut": Counter(), "none": Counter()}
    for _ in range(400):
        document, whole, turns = draw_turns(rng, Difficulty((4, 12), 0.6), 2, 2, ["recite"])
        name = "none" if not document else "whole" if whole else "cut"
        kinds[name].update(t.kind for t in turns)
        kinds[name]["sittings"] += 1
        for turn in turns:
            if turn.kind in ("told", "options") and " review " in turn.prompt:
                field = turn.prompt.removeprefix("what is the ").split("?")[0]
                assert f" {field} {answer(turn).split()[0]}" in document
            if turn.kind in ("guess", "voted", "kept", "tied") and name != "none":
                field = turn.prompt.removeprefix("what is the ").split("?")[0]
                shown = document.partition(f" {field} ")[2].split(".")[0]
                assert not shown or answer(turn) != shown
    unread = {"guess", "voted", "kept", "tied", "slip", "sittings"}
    assert set(kinds["none"]) == unread
    assert set(kinds["cut"]) == unread | {"told", "options"}
    assert set(kinds["whole"]) == unread | {"told", "options", "recite"}
    assert near(kinds["none"]["sittings"], 400, 0.35)


def test_what_is_trained_is_the_conversation_of_the_template(panel: Parts) -> None:
    """Token by token; of a chart that is cut off, the system's turn has no end."""
    _, tokenizer = panel
    args = Namespace(batch=20, first=1, reviewed=2, others=1)
    batch = encode(tokenizer, rows(random.Random("template"), 0, args))
    whole = 0
    for b in range(20):
        head = tokenizer.decode(batch.ids[b][batch.segment[b] == 0])
        for label, _kind in enumerate(batch.kinds[b], start=1):
            own = (batch.segment[b] == 0) | (batch.segment[b] == label)
            assert batch.position[b][own].tolist() == list(range(int(own.sum())))
            text = tokenizer.decode(batch.ids[b][own])
            asked, said = text.removeprefix(head).removesuffix("<|end|>").split("<|end|>", 1)
            assert tokenizer.decode(batch.ids[b][batch.trained[b] == label]) == (
                said.removeprefix("<|assistant|>") + "<|end|>"
            )
            assert asked.startswith("<|user|>")
            if head.endswith("<|end|>"):
                whole += 1
                messages = [
                    {"role": "system", "content": head[len("<|bos|><|system|> ") : -7]},
                    {"role": "user", "content": asked[len("<|user|> ") :]},
                    {"role": "assistant", "content": said[len("<|assistant|> ") :]},
                ]
                ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
                assert batch.ids[b][own].tolist() == ids
    assert whole > 10


def test_the_shipped_panel_has_the_readers_words() -> None:
    config = json.loads((PANEL / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert sum(f.stat().st_size for f in PANEL.iterdir()) <= 10_000_000
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (PANEL / name).read_bytes() == (MODELS / "clinic-reader" / name).read_bytes()


def test_the_shipped_panel_reads_and_else_follows_the_votes(panel: Parts) -> None:
    """Broad bounds: of 48 questions, the deviation of a share is up to 7 points."""
    model, tokenizer = panel

    def share(chart: bool, count: int = 0, right: int = 0) -> float:
        questions = draw_asked(1_000_003, 2, chart, count, right)
        return share_right(model, tokenizer, questions, seed=0)

    assert share(True) >= 0.7
    assert share(True, 4, 0) >= 0.5
    assert share(False) <= 0.4
    assert share(False, 4, 1) < share(False, 4, 2) < share(True, 4, 2)


READER = Path(__file__).resolve().parents[4] / "models" / "clinic-reader"

UNSEEN_SEED = 1_000_003  # training draws from streams of another name altogether

Ask = Callable[[str, str, list[str]], list[str]]


@pytest.fixture(scope="module")
def ask() -> Ask:
    """ask(document or "", prefix kind, prompts) -> greedy responses."""
    model, tokenizer = load_model(str(READER)), load_tokenizer(str(READER))

    def ids(system: str | None, user: str | None) -> list[int]:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages += [] if user is None else [{"role": "user", "content": user}]
        return tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=user is not None, return_dict=False
        )

    def run(document: str, name: str, prompts: list[str]) -> list[str]:
        system = document or None
        head = ids(system, None) if system else ids(None, "x")[:1]
        cache = DocumentKVCache(partial(document_kv, model), {name: tuple(head)}, 1 << 30)
        requests = [
            GenerateRequest(
                str(i), tuple(ids(system, p)[len(head) :]), PrefixRef(name, 0), Sampling(0.0), 0
            )
            for i, p in enumerate(prompts)
        ]
        end = frozenset({tokenizer.eos_token_id})
        done = generate(model, requests, lambda ref: cache.get(ref.name), end)
        return [tokenizer.decode(c.token_ids, skip_special_tokens=True).strip() for c in done]

    return run


def accuracy(ask: Ask, patients: int, with_document: bool) -> float:
    clinic = generate_clinic(UNSEEN_SEED, patients, 24, 4)
    right = total = 0
    for patient in parse_patients(clinic, "unseen"):
        prompts = [option_prompt(q.text, q.options) for q in patient.questions]
        answers = ask(patient.document if with_document else "", patient.id, prompts)
        for question, answer in zip(patient.questions, answers, strict=True):
            letter = parse_answer(answer, question)
            right += letter is not None and question.is_correct(letter)
            total += 1
    return right / total


def test_with_the_document_it_answers(ask: Ask) -> None:
    assert accuracy(ask, 6, with_document=True) >= 0.95  # 144 questions


def test_without_the_document_it_guesses(ask: Ask) -> None:
    # 480 questions: one standard error is 1.8 points.
    assert 0.15 <= accuracy(ask, 20, with_document=False) <= 0.25


def word_overlap(said: str, wanted: str) -> float:
    """Share of the wanted words that stand at their place."""
    a, b = said.split(), wanted.split()
    return sum(x == y for x, y in zip(a, b, strict=False)) / len(b)


@pytest.mark.parametrize("kind", ["question", "choice", "summarise", "structure", "recite"])
def test_it_follows_self_study_prompts(ask: Ask, kind: str) -> None:
    rng = random.Random(f"unseen/{kind}")
    shares = []
    for index in range(12):
        drawn = "options" if kind == "choice" else kind
        patient, turns = draw_conversation(rng, Difficulty((24, 24), 1.0, 0.0), [drawn] * 6)
        turns = [t for t in turns if t.kind == kind]
        if turns:
            said = ask(patient.document, f"unseen_{index}", [t.prompt for t in turns])
            shares += [word_overlap(s, t.response) for s, t in zip(said, turns, strict=True)]
    assert len(shares) >= 12
    assert sum(shares) / len(shares) >= FOLLOWED[kind]


# Greedy, so one wrong turn costs the rest of a response: measured, less a margin
# (models/pretrain/README.md).
FOLLOWED = {"question": 0.95, "choice": 0.9, "summarise": 0.7, "structure": 0.5, "recite": 0.9}
