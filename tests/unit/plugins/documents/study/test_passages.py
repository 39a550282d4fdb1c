"""Passages in place of a cartridge, and beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.documents.study.passages import (
    BETWEEN,
    NO_PREFIX,
    PassageIndex,
    PassagePrompts,
)
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.layout import CartridgeLayout

MODEL = str(REPOSITORY / "models" / "clinic-reader")
DRUGS = ["statin duratex", "insulin 86 units", "albumin 25 gram", "therapist evans"]
FILLER = "lungs are clear. sleep has improved. consent was obtained. pain is controlled. " * 4
CHART = f"{DRUGS[0]}. {FILLER}{DRUGS[1]}. {FILLER}{DRUGS[2]}. {FILLER}{DRUGS[3]}."


@dataclass
class Setup:
    tokenizer: Any
    conversation: ChatRenderer
    prompts: PassagePrompts


@pytest.fixture(scope="module")
def setup() -> Setup:
    tokenizer = load_tokenizer(MODEL)
    texts = {"a": CHART, "b": "albumin 31 gram. " + FILLER}
    conversation = ChatRenderer(tokenizer, texts)
    layout = CartridgeLayout({"a": "a", "b": "b"}, {"a": ("a",), "b": ("b",)})
    return Setup(
        tokenizer,
        conversation,
        PassagePrompts(layout, texts, tokenizer, conversation, 40, ["retrieved"]),
    )


@pytest.mark.parametrize("tokens", [24, 40, 64])
def test_passages_fit_the_tokens_of_a_cartridge(setup: Setup, tokens: int) -> None:
    index = PassageIndex([CHART], setup.tokenizer, setup.conversation, tokens)
    for drug in DRUGS:
        words = index.best(f"what is the {drug.split()[0]}?")
        assert drug in words
        assert tokens // 2 < len(index.head(words)) <= tokens


def test_passages_stand_in_the_order_of_the_text(setup: Setup) -> None:
    index = PassageIndex([CHART], setup.tokenizer, setup.conversation, 64)
    first, second = index.best("what are therapist and statin?").split(BETWEEN)
    assert "duratex" in first
    assert "evans" in second


def test_without_a_common_word_the_text_begins(setup: Setup) -> None:
    index = PassageIndex([CHART], setup.tokenizer, setup.conversation, 40)
    assert index.best("oxen?").startswith("statin duratex")


def test_passages_by_embeddings_need_no_common_word(setup: Setup) -> None:
    question = "Which hormone lowers glucose in diabetes?"
    parts = [CHART], setup.tokenizer, setup.conversation, 40
    assert "insulin" in PassageIndex(*parts, "embeddings").best(question)
    assert "insulin" not in PassageIndex(*parts, "bm25").best(question)


def test_a_whole_prompt_reads_passages_as_its_document(setup: Setup) -> None:
    message = (AgentMessage("user", "what is the insulin?"),)
    ids, ref = setup.prompts.as_document("a", message)
    assert ref == NO_PREFIX
    texts = setup.conversation.texts_of(ids)
    assert "insulin 86 units" in texts[0]
    assert texts[1] == "what is the insulin?"
    assert len(ids) <= 40 + len(setup.conversation.opening("a", message))


def test_passages_beside_a_cartridge_stand_before_the_question(setup: Setup) -> None:
    earlier = (AgentMessage("user", "statin?"), AgentMessage("assistant", "duratex"))
    ids = setup.prompts.before_question(
        "a", "a", (*earlier, AgentMessage("user", "what is the insulin?"))
    )
    *before, last = setup.conversation.texts_of(ids)
    assert before == ["statin?", "duratex"]
    assert "insulin 86 units" in last
    assert last.endswith(f"{BETWEEN}what is the insulin?")


def test_each_cartridge_has_passages_of_its_own_texts(setup: Setup) -> None:
    message = (AgentMessage("user", "what is the albumin?"),)
    of_a, of_b = (
        setup.conversation.texts_of(setup.prompts.as_document(c, message)[0]) for c in "ab"
    )
    assert "25 gram" in of_a[0]
    assert "31 gram" in of_b[0]


def test_too_few_tokens_are_refused(setup: Setup) -> None:
    with pytest.raises(DataError, match="do not fit into 3 tokens"):
        PassageIndex([CHART], setup.tokenizer, setup.conversation, 3)
    layout = CartridgeLayout({"a": "a"}, {"a": ("a",)})
    parts = layout, {"a": CHART}, setup.tokenizer, setup.conversation, 3
    PassagePrompts(*parts, ["document"])
    with pytest.raises(DataError, match="leave out the arms retrieved and retrieved_cartridge"):
        PassagePrompts(*parts, ["retrieved_cartridge"])
