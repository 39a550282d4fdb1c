"""Test pre-training of the tiny models, and their tokenizer."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.environments.clinic_setup import CLERK, MODELS, Parts, episodes
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from cartridge_forge.plugins.clinic import vocabulary as words
from cartridge_forge.plugins.clinic.desk import HINTS, parse_call
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import Patient, option_prompt, parse_patients
from models.pretrain.clerk_tasks import GUESSING, INFORMED, LADDER, ErrorRates, draw_row, rows
from models.pretrain.measure import measure_clerk
from models.pretrain.reader_tasks import TaughtMessage
from models.pretrain.tokenizer import SPECIAL, build_tokenizer
from models.pretrain.train import encode, hire

PAD, BOS, END, SYSTEM, USER, ASSISTANT = range(6)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="module")
def patient() -> Patient:
    (patient,) = parse_patients(generate_clinic(9, 1, 20, 4), "clinic")
    return patient


def conversation(
    tokenizer: PreTrainedTokenizerFast, *turns: tuple[str, str], prompt: bool = False
) -> list[int]:
    messages = [{"role": role, "content": content} for role, content in turns]
    ids = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=prompt, return_dict=False
    )
    return [*map(int, ids)]


def test_every_word_of_the_clinic_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    said = {
        *words.FIELDS,
        *words.FIRST_NAMES,
        *words.MONTHS,
        *words.DEPARTMENTS,
        *words.DIAGNOSES,
        *words.LAB_UNITS.values(),
        *(value for category in words.CATEGORIES for value in category.values),
        *(word for filler in words.REMARKS for word in filler.split()),
        *[
            "what",
            "is",
            "the",
            "answer",
            "chart",
            "says",
            "recite",
            "from",
            "list",
            "findings",
            "of",
            "note",
            "summarise",
        ],
    }
    assert len(said) > 300
    several = {w: tokenizer.tokenize(f" {w}") for w in said if len(tokenizer.tokenize(f" {w}")) > 1}
    assert several == {}


def test_a_document_has_one_token_a_word_or_mark(
    tokenizer: PreTrainedTokenizerFast, patient: Patient
) -> None:
    marks = sum(patient.document.count(mark) for mark in ".,:\n")
    expected = len(patient.document.split()) + marks
    assert len(tokenizer(patient.document).input_ids) == expected


@given(text=st.text(st.characters(exclude_categories=["Cs"])).filter(lambda t: "<|" not in t))
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """But for special tokens, which are no text, and for the one space that is put before a text,
    as words mid-sentence have it.
    """
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == (text if not text or text.startswith(" ") else f" {text}")
    assert BOS not in ids


def test_the_template_token_by_token(tokenizer: PreTrainedTokenizerFast) -> None:
    sodium, what = (tokenizer.convert_tokens_to_ids(word) for word in ("Ġsodium", "Ġwhat"))
    assert conversation(tokenizer, ("system", "sodium"), ("user", "what"), prompt=True) == [
        BOS, SYSTEM, sodium, END, USER, what, END, ASSISTANT,
    ]  # fmt: skip
    assert conversation(tokenizer, ("user", "what")) == [BOS, USER, what, END]


def test_a_conversation_begins_with_its_beginnings(
    tokenizer: PreTrainedTokenizerFast, patient: Patient
) -> None:
    """Each turn only appends, and the beginning-of-sequence token stands at the beginning alone."""
    question = patient.questions[0]
    turns = [
        ("system", patient.document),
        ("user", option_prompt(question.text, question.options)),
        ("assistant", f"the answer is {question.correct}."),
        ("user", "summarise note 2."),
    ]
    before: list[int] = [BOS]
    for count in range(1, 5):
        ids = conversation(tokenizer, *turns[:count])
        asked = conversation(tokenizer, *turns[:count], prompt=True)
        assert ids[: len(before)] == before
        assert asked == [*ids, ASSISTANT]
        assert ids.count(BOS) == 1
        assert ids.count(END) == count
        before = ids


def test_the_template_says_what_the_model_was_trained_on(
    tokenizer: PreTrainedTokenizerFast, patient: Patient
) -> None:
    """Training joins pieces that were tokenised alone; a conversation must be the same tokens."""
    prompt, response = "list the findings of note 1.", "sodium 41 mmol; ecg normal."
    document, asked, answered = tokenizer([patient.document, prompt, response]).input_ids
    assert conversation(
        tokenizer, ("system", patient.document), ("user", prompt), ("assistant", response)
    ) == [BOS, SYSTEM, *document, END, USER, *asked, END, ASSISTANT, *answered, END]


@given(
    document=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<")),
    asked=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<")),
)
def test_any_document_is_a_prefix_of_its_conversation(
    tokenizer: PreTrainedTokenizerFast, document: str, asked: str
) -> None:
    head = conversation(tokenizer, ("system", document))
    whole = conversation(tokenizer, ("system", document), ("user", asked), prompt=True)
    assert whole[: len(head)] == head
    assert whole.count(BOS) == head.count(BOS) == 1


def counted(drawn: list[list[TaughtMessage]]) -> tuple[Counter[str], int, int]:
    """Mistakes by kind; the calls at which any could happen; those before the note was read.

    None can right after a mistake, or in a call that is not taught.
    """
    found: Counter[str] = Counter()
    free = unread = 0
    for said in drawn:
        calls = [s for s in said if s.role == "assistant"]
        before = ["", *(c.kind for c in calls)]
        read = False
        for call, last in zip(calls, before, strict=False):
            if call.kind and last not in GUESSING:
                free += 1
                unread += not read
                found[call.kind] += call.kind in GUESSING
            read = read or call.kind == "read"
    return found, free, unread


@pytest.mark.parametrize(("known", "rates"), [(False, GUESSING), (True, INFORMED)])
def test_mistakes_come_at_their_rates(known: bool, rates: ErrorRates) -> None:
    found, free, unread = counted(episodes(f"rates/{known}", known, False, 3000))
    for name, rate in rates.items():
        chances = unread if name in ("blind_answer", "wrong_note") else free
        deviation = (chances * rate * (1 - rate)) ** 0.5
        assert abs(found[name] - chances * rate) < 4 * deviation, name
    assert min(found[name] for name in rates) > 0


def test_the_shipped_clerk_needs_the_handbook_and_follows_hints(clerk: Parts) -> None:
    """Broad bounds: of 60 cases, the deviation of a share is up to 6 points."""
    model, tokenizer = clerk
    shares = measure_clerk(model, tokenizer, Namespace(cases=60, fields=12, seed=1_000_003))
    assert 0.1 <= shares["none"] <= 0.5
    assert shares["none"] < shares["cut"] < shares["handbook"]
    assert shares["handbook"] >= 0.85
    assert shares["hinted"] >= 0.85


def test_a_seed_names_its_episodes() -> None:
    first, again, other = (random.Random(n) for n in ("clerk/1", "clerk/1", "clerk/2"))
    rows = [draw_row(first, 3) for _ in range(20)]
    assert rows == [draw_row(again, 3) for _ in range(20)]
    assert rows != [draw_row(other, 3) for _ in range(20)]


def test_half_the_rows_have_a_handbook() -> None:
    rng = random.Random("rows")
    rows = [draw_row(rng, 1) for _ in range(1000)]
    sizes = [len(desk.handbook) for desk, _ in rows if desk.handbook]
    assert 450 <= len(sizes) <= 550  # 500, one standard deviation is 16
    assert (min(sizes), max(sizes)) == (6, 24)


def test_what_is_trained_is_the_conversation_of_the_template(clerk: Parts) -> None:
    """Token by token; and of it the calls with their ends, of each taught kind one label."""
    _, tokenizer = clerk
    drawn = rows(random.Random("template"), len(LADDER) - 1, Namespace(batch=40, episodes=1))
    batch = encode(tokenizer, drawn)
    rng = random.Random("template")
    for b in range(40):
        desk, told = draw_row(rng, 1)
        head = [{"role": "system", "content": desk.document}] if desk.handbook else []
        kinds, label = batch.kinds[b].copy(), 0
        for segment, episode in enumerate(told, start=1):
            messages = head + [{"role": said.role, "content": said.text} for said in episode]
            ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
            own = (batch.segment[b] == 0) | (batch.segment[b] == segment)
            assert batch.ids[b][own].tolist() == ids
            assert batch.position[b][own].tolist() == list(range(len(ids)))
            for said in episode:
                if said.kind:
                    label += 1
                    text = tokenizer.decode(batch.ids[b][batch.trained[b] == label])
                    assert text == f" {said.text}<|end|>"
                    assert kinds.pop(0) == said.kind
        assert kinds == []


def test_mistakes_are_mistakes_of_their_kind() -> None:
    for said in episodes("kinds", False, False, 500):
        for call, reply in pairwise(s for s in said if s.role != "user"):
            text = {
                "unknown_tool": "no such tool.",
                "bad_arguments": "bad call.",
                "wrong_note": f"no note {parse_call(call.text).arguments.get('note')}.",
            }.get(call.kind)
            if text:
                assert reply.text.removesuffix(" the time is over.") == text


def test_a_guess_is_never_made_twice_and_is_any_department() -> None:
    first: Counter[str] = Counter()
    for said in episodes("guesses", False, False, 1600):
        places = [parse_call(s.text).arguments["department"] for s in said if s.kind == "guess"]
        assert len(set(places)) == len(places)
        first.update(places[:1])
    assert set(first) == set(words.DEPARTMENTS)
    assert max(first.values()) < 1.4 * min(first.values())


def test_a_hint_stands_before_the_call_that_follows_it() -> None:
    seen = 0
    for said in episodes("hints", False, True, 500):
        field = said[0].text.removeprefix("what is the ").removesuffix("?")
        for hint, call in pairwise(said[1:]):
            if hint.role != "user":
                continue
            seen += 1
            assert call.role == "assistant"
            assert call.kind in ("hinted", "guess")  # never a mistake
            if hint.text.startswith("the handbook says"):
                department = hint.text.removesuffix(".").split()[-1]
                assert hint.text == HINTS["where"].format(field=field, department=department)
                assert call.text == f"find {field} in {department}."
            elif hint.text.startswith("read note"):
                assert call.text == hint.text
    assert seen > 400


def test_a_reader_is_hired_with_one_token_more() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODELS / "clinic-reader")
    model = LlamaForCausalLM.from_pretrained(MODELS / "clinic-reader")
    before = len(tokenizer)
    old = model.model.embed_tokens.weight.detach().clone()
    hire(tokenizer, model, 0)
    assert tokenizer.get_vocab()["<|tool|>"] == before
    rows = model.lm_head.weight.detach()  # tied
    assert rows.shape[0] == before + 1
    assert rows[:before].equal(old)
    user = rows[tokenizer.get_vocab()["<|user|>"]]
    assert 0 < (rows[before] - user).norm() < 0.5 * user.norm()


def test_the_shipped_clerk_is_a_small_plain_llama() -> None:
    config = json.loads((CLERK / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == 1459
    assert {f.name for f in CLERK.iterdir()} == {
        f.name for f in (MODELS / "clinic-reader").iterdir()
    }
    assert sum(f.stat().st_size for f in CLERK.iterdir()) <= 10_000_000


def test_special_tokens_come_first_and_have_their_roles(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2, 3, 4, 5]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
