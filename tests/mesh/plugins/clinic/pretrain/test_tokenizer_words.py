"""The tiny model's tokenizer: whole words, any text, and one beginning per conversation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from cartridge_forge.plugins.clinic import vocabulary as words
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import Patient, option_prompt, parse_patients
from models.pretrain.tokenizer import build_tokenizer

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
