"""What an arm writes by itself: measures worked by hand, and forms with texts on both sides."""

from __future__ import annotations

import math

import pytest

from cartridge_forge.plugins.evaluate.formats import FORMATS, FormatPrompt
from cartridge_forge.plugins.evaluate.own_text import WrittenText, is_in, summary, whole_sentences

DOCUMENT = "The sodium is 41 mmol. The patient, who is 63, was seen on Monday. All is well."


def written(
    text: str, own: list[float], teacher: list[float], *, sampled: bool = True, ended: bool = True
) -> WrittenText:
    """A text of tokens with these probabilities; a token is the teacher's likeliest above 1/2."""
    return WrittenText(
        text=text, document=DOCUMENT, logprobs=tuple(map(math.log, own)),
        teacher_logprobs=tuple(map(math.log, teacher)), matches=tuple(p > 0.5 for p in teacher),
        ended=ended, sampled=sampled,
    )  # fmt: skip


def test_measures_of_sampled_texts_are_those_worked_by_hand() -> None:
    first = written("The sodium is 41 mmol. The sodium is 40 mmol.", [0.5, 0.8], [0.25, 0.9])
    second = written("all is well", [0.4, 0.5, 0.5, 0.5], [0.8, 0.04, 0.5, 0.25], ended=False)
    one = summary([first, second])
    # min(1, T/S): 1/2, 1, then 1, 0.08, 1, 1/2.
    assert one["accepted"] == pytest.approx((0.5 + 1 + 1 + 0.08 + 1 + 0.5) / 6)
    kl = [
        math.log(s / t)
        for s, t in ((0.5, 0.25), (0.8, 0.9), (0.4, 0.8), (0.5, 0.04), (1, 1), (2, 1))
    ]
    assert one["kl"] == pytest.approx(sum(kl) / 6)
    assert one["teacher_nll"] == pytest.approx(-math.log(0.25 * 0.9 * 0.8 * 0.04 * 0.5 * 0.25) / 6)
    assert one["until_refused"] == (2 + 1) / 6  # the second text's second token has 0.04
    assert (one["tokens"], one["sentences"]) == (6, 2)  # the second text was cut in its only one
    assert one["precision"] == 0.5


def test_of_greedy_texts_the_teachers_likeliest_tokens_count() -> None:
    one = summary(
        [written("All is well.", [0.9, 0.9, 0.9, 0.9], [0.9, 0.6, 0.4, 0.3], sampled=False)]
    )
    assert (one["accepted"], one["kl"], one["precision"]) == (0.5, None, 1.0)
    assert one["until_refused"] == 1.0


def test_a_sentence_is_whole_and_stands_in_the_document_word_by_word() -> None:
    text = "One is here. Two is cut"
    assert whole_sentences(text, False, DOCUMENT) == ["One is here."]
    assert whole_sentences(text, True, DOCUMENT) == ["One is here.", "Two is cut"]
    assert whole_sentences("...", True, DOCUMENT) == []
    lower = "sodium 4.5 mmol. glucose 7 mmol. all"
    assert whole_sentences(lower, False, DOCUMENT) == []
    assert whole_sentences(lower, False, "a is b. c is d.") == [
        "sodium 4.5 mmol.",
        "glucose 7 mmol.",
    ]
    assert is_in("the patient who is 63 WAS seen on Monday.", DOCUMENT)
    assert not is_in("The sodium is 4", DOCUMENT)  # 41 is another word
    assert not is_in("The patient was seen on Monday.", DOCUMENT)
    assert is_in("肺部没有异常。", "今天检查。肺部没有异常。心脏正常。")


OBEYS = {
    "one_word": (["Blue.", "red"], ["", "It is blue."]),
    "yes_or_no": (["Yes", "no."], ["Yes, it is.", ""]),
    "five_words": (["Deep, wide, blue water."], ["The sea is deep, wide and blue.", " "]),
    "bullets": (["- apple\n- pear\n- fig"], ["- apple\n- pear", "Fruits:\n- a\n- b\n- c"]),
    "numbered": (["1. It helps.\n2) It is fun."], ["1. It helps. 2. It is fun.", "2. a\n1. b"]),
    "upper": (["HELLO, MY FRIEND!"], ["Hello", "!!"]),
    "json": (['{"city": "Paris", "country": "France"}'], ['{"city": "Paris"}', "[1]", "Paris"]),
    "ends_with": (["Good night under the moon."], ["The moon says good night."]),
    "begins_with": (["Water falls."], ["It is water.", ""]),
    "integers": (["1, 2, 3, 4"], ["1 2 3 4", "1, 2, 3", "1, 2, 3, 4 are the numbers"]),
    "quoted": (['"Haste makes waste."'], ['He said "haste".', '"', ""]),
    "two_lines": (["Snow falls\n\nall day"], ["Snow falls all day", "a\nb\nc"]),
}


@pytest.mark.parametrize("prompt", FORMATS, ids=lambda prompt: prompt.id)
def test_a_form_is_obeyed_or_not(prompt: FormatPrompt) -> None:
    good, bad = OBEYS[prompt.id]
    assert all(map(prompt.obeys, good))
    assert not any(map(prompt.obeys, bad))
