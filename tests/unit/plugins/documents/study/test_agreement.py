"""Which questions are held out, and agreement with the teacher by hand."""

from dataclasses import replace

import pytest

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.documents.study.agreement import (
    HeldOutQuestion,
    StudyQuestion,
    agreement,
    split,
)
from cartridge_forge.protocols.step import Completion


def studied(document: str, text: str) -> StudyQuestion:
    asked = (AgentMessage("user", text),)
    return StudyQuestion(f"{document}/{text}", document, "question", asked, (1,), ())


def test_a_question_stays_on_its_side_whatever_is_beside_it() -> None:
    one = [studied("a", f"question {i}") for i in range(10)]
    two = [studied("b", f"question {i}") for i in range(5)]
    training, held_out = split([*one, *two], 0.2)
    assert [s.document for s in held_out] == ["a", "b", "a"]
    assert {len(training["a"]), len(training["b"])} == {8, 4}
    alone, held_alone = split(one[::-1], 0.2)
    assert {s.key for s in held_alone} == {s.key for s in held_out if s.document == "a"}
    assert {s.key for s in alone["a"]} == {s.key for s in training["a"]}
    assert split(one[:2], 1.0)[0]["a"]  # one is always left to train on
    assert split(one, 0.0) == ({"a": one}, [])


def test_a_conversation_is_held_out_by_all_its_words() -> None:
    """`printf 'a\\nq' | sha256sum` begins with 79ac, that of 'a\\nq\\nyes\\nwhy' with aaf4: the
    lowest is held out. With the last word "how" it begins with 1020."""
    short = studied("a", "q")
    said = (AgentMessage("user", "q"), AgentMessage("assistant", "yes"))
    long = replace(short, key="long", messages=(*said, AgentMessage("user", "why")))
    assert long.text == "q\nyes\nwhy"
    assert split([long, short], 0.5) == ({"a": [long]}, [short])
    lower = replace(long, messages=(*said, AgentMessage("user", "how")))
    assert split([lower, short], 0.5) == ({"a": [short]}, [lower])


def test_agreement_by_hand() -> None:
    exams = [
        HeldOutQuestion(studied("a", "x"), (), (5, 6), (-0.1, -0.2), (5, 6)),
        HeldOutQuestion(studied("a", "y"), (), (7,), (-1.0,), (3,)),
    ]
    read_by = Completion("x", (1,), (0.0,), (0,), "length")
    read = [
        replace(read_by, prompt_logprobs=(-9.0, -0.4, -0.5), prompt_likeliest=(0, 5, 2)),
        replace(read_by, prompt_logprobs=(-9.0, -2.0), prompt_likeliest=(0, 3)),
    ]
    found = agreement(exams, read)
    assert found["agreement"]["kl"] == pytest.approx((0.3 + 1.0) / 2)
    assert found["agreement"]["top1"] == found["accuracy"] == pytest.approx((0.5 + 1.0) / 2)
    assert found["agreement"]["tokens"] == 3
    half = 12.7062 * 0.7 / 2  # t of one degree, the deviation 0.7 / sqrt(2), over sqrt(2)
    assert found["agreement"]["kl_ci95"] == [0.0, pytest.approx(0.65 + half, abs=1e-3)]
