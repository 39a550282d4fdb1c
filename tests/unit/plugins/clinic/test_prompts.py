"""Prompts and answers as text: exact words, unique cues, and what counts as an answer."""

import random
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import (
    Patient,
    PatientQuestion,
    cued_sentences,
    look_alikes,
    option_prompt,
    parse_answer,
    parse_patients,
    recite_prompt,
    right_answer,
    self_study_prompt,
    sentences,
    structure_prompt,
    summarise_prompt,
    unique_cue,
)

KINDS = ("recite", "structure", "summarise", "question", "choice")


def asks(*options: str) -> PatientQuestion:
    return PatientQuestion("patient_01/0", "patient_01", "which?", options, options[0])


FINDINGS = asks("stenosis", "fracture", "cyst", "ulcer", "normal")
ARTICLES = asks("a fracture", "a cyst", "an ulcer", "e coli", "nothing")
DOSES = asks("41 gram", "41 gram daily", "4 gram", "14 gram", "41 gram twice daily")
TWINS = asks("VCD", "VRd", "KRd", "VRd", "none of these")
LETTERS_AS_TEXT = asks("b", "c", "d", "e", "a")


@pytest.mark.parametrize(
    ("response", "question", "letter"),
    [
        # an option's text
        ("the answer is cyst.", FINDINGS, "c"),
        ("the chart says biopsy cyst. the answer is cyst.", FINDINGS, "c"),
        ("answer: ulcer", FINDINGS, "d"),
        ("The ANSWER is   FRACTURE", FINDINGS, "b"),
        ("the answer is:\n\n  'normal'", FINDINGS, "e"),
        ('the answer is "normal".', FINDINGS, "e"),
        ("the answer is cyst, as the biopsy says.", FINDINGS, "c"),
        ("the answer is cyst\nnothing else was seen", FINDINGS, "c"),
        # a letter
        ("answer: b", FINDINGS, "b"),
        ("the answer is b", FINDINGS, "b"),
        ("the answer is B.", FINDINGS, "b"),
        ("the answer is: b", FINDINGS, "b"),
        ("answer: (d)", FINDINGS, "d"),
        ("answer: d) ulcer", FINDINGS, "d"),
        ("answer: e: normal", FINDINGS, "e"),
        ("the answer is e because nothing was seen", FINDINGS, "e"),
        ("answer: A\n\nThe letter of 14 march says so.", FINDINGS, "a"),
        ("answer: A because the letter says so", FINDINGS, "a"),
        ("answer: a", FINDINGS, "a"),
        ("answer: a.", FINDINGS, "a"),
        ("answer: a\nas the letter says", FINDINGS, "a"),
        # as chat models mark it
        ("**Answer:** B", FINDINGS, "b"),
        ("**Answer**: **B**", FINDINGS, "b"),
        ("The answer is **C) cyst**.", FINDINGS, "c"),
        ("The answer is **cyst**.", FINDINGS, "c"),
        ("The answer is `d`", FINDINGS, "d"),
        (r"The answer is $\boxed{B}$.", FINDINGS, "b"),
        (r"The answer is \boxed{\text{e}}", FINDINGS, "e"),
        ("The correct answer is: option D", FINDINGS, "d"),
        ("The correct option is (E).", FINDINGS, "e"),
        ("So the best choice is B, a fracture.", FINDINGS, "b"),
        ("the answer is choice (a)", FINDINGS, "a"),
        # two letters choose nothing
        ("answer: A or B", FINDINGS, None),
        ("answer: (b) and (d)", FINDINGS, None),
        ("answer: B, C", FINDINGS, None),
        ("answer: c/d", FINDINGS, None),
        ("answer: b, because nothing else fits", FINDINGS, "b"),
        ("answer: d, a late one", FINDINGS, "d"),
        # texts that begin with a letter, and words that do
        ("the answer is a fracture.", ARTICLES, "a"),
        ("the answer is a cyst.", ARTICLES, "b"),
        ("the answer is e coli.", ARTICLES, "d"),
        ("the answer is a kind of swelling.", FINDINGS, None),
        ("the answer is a cyst.", FINDINGS, None),
        ("the answer is cystic.", FINDINGS, None),
        ("the answer is declined.", FINDINGS, None),
        ("the answer is b", LETTERS_AS_TEXT, "a"),
        ("the answer is a", LETTERS_AS_TEXT, "e"),
        # one option begins another
        ("the answer is 41 gram.", DOSES, "a"),
        ("the answer is 41 gram daily.", DOSES, "b"),
        ("the answer is 41 gram daily, with food.", DOSES, "b"),
        ("the answer is 41 gram twice daily", DOSES, "e"),
        ("the answer is 41 gram twice", DOSES, "a"),
        ("the answer is 41 grams", DOSES, None),
        ("the answer is 4 gram", DOSES, "c"),
        # two letters with one text: the first, which scores like the second
        ("the answer is VRd", TWINS, "b"),
        ("the answer is vrd.", TWINS, "b"),
        ("the answer is d", TWINS, "d"),
        # the last answer counts
        ("the answer is cyst. no: the answer is ulcer.", FINDINGS, "d"),
        ("answer: a\nwait. answer: e", FINDINGS, "e"),
        ("the answer is cyst. but the answer is", FINDINGS, "c"),
        ("the answer is cyst. in truth the answer is unknown", FINDINGS, None),
        # between tags
        ("<thinking>it may be a fracture</thinking>\n<answer>\nCyst\n</answer>", FINDINGS, "c"),
        ("<thinking>the answer is b.</thinking> <answer>ulcer</answer> as I said", FINDINGS, "d"),
        ("<answer>VRd</answer>", TWINS, "b"),
        ("<answer>(D)</answer>", TWINS, "d"),
        ("<Answer>The answer is: cyst.</Answer>", FINDINGS, "c"),
        ("<answer>cyst", FINDINGS, "c"),
        ("<answer>cyst</answer> <answer> </answer>", FINDINGS, "c"),
        ("<answer></answer>", FINDINGS, None),
        ("<answer>a cyst</answer>", FINDINGS, None),
        # no answer
        ("", FINDINGS, None),
        ("cyst", FINDINGS, None),
        ("b", FINDINGS, None),
        ("the answer is", FINDINGS, None),
        ("the answer is ...", FINDINGS, None),
        ("the answer is f", FINDINGS, None),
        ("the answer isn't b", FINDINGS, None),
    ],
)
def test_what_a_response_chose(
    response: str, question: PatientQuestion, letter: str | None
) -> None:
    assert parse_answer(response, question) == letter


@given(st.text(max_size=60), st.sampled_from("abcde"))
def test_any_text_parses_to_an_option_or_nothing(noise: str, letter: str) -> None:
    assert parse_answer(noise, FINDINGS) in {None, *"abcde"}
    text = FINDINGS.options["abcde".index(letter)]
    assert parse_answer(f"{noise} the answer is {text}.", FINDINGS) == letter
    assert parse_answer(f"{noise} answer: {letter})", FINDINGS) == letter


def test_the_right_answer_is_worded_as_the_prompt_asks() -> None:
    tags = option_prompt("which?", TWINS.options, "think, then <answer>the option</answer>")
    assert right_answer(TWINS, tags) == "<answer>VCD</answer>"
    assert right_answer(TWINS, option_prompt("which?", TWINS.options)) == "answer: VCD"
    for asked in (tags, ""):
        assert parse_answer(right_answer(TWINS, asked), TWINS) == "a"
    clinic = PatientQuestion("p/0", "p", "what is the sodium?", ("1", "2", "3", "4", "5"), "2")
    assert right_answer(clinic, tags) == "the chart says sodium 2. the answer is 2."


def test_option_prompt_word_for_word() -> None:
    options = ("9 gram", "8 gram", "7 gram", "6 gram", "5 gram")
    listed = "what is it? options: a) 9 gram b) 8 gram c) 7 gram d) 6 gram e) 5 gram"
    assert option_prompt("what is it?", options) == listed
    assert option_prompt("what is it?", list(options), "Answer: letter") == (
        f"{listed}\nAnswer: letter"
    )


def test_an_option_prompt_takes_five_options() -> None:
    with pytest.raises(ValueError, match="zip"):
        option_prompt("what is it?", ("9 gram", "8 gram"))


def test_the_other_prompts_word_for_word() -> None:
    assert recite_prompt("sodium 41") == "recite from sodium 41."
    assert structure_prompt(2) == "list the findings of note 2."
    assert summarise_prompt(3) == "summarise note 3."


def test_sentences_end_at_a_stop_before_a_space() -> None:
    assert sentences("cardiology, 14 march. sodium 4.1 mmol. night was quiet.") == [
        "cardiology, 14 march",
        "sodium 4.1 mmol",
        "night was quiet",
    ]
    assert sentences("first.\n\nsecond.  third") == ["first", "second", "third"]
    assert sentences(" . ") == []


@pytest.mark.parametrize(
    ("document", "sentence", "cue"),
    [
        ("sodium 41 mmol. ecg normal.", "sodium 41 mmol", "sodium"),
        ("night was quiet. night was loud.", "night was loud", "night was loud"),
        ("cardiology, 14 march. cardiology, 15 march.", "cardiology, 14 march", "cardiology, 14"),
        ("march, then rest.", "march, then rest", "march"),  # no comma before the full stop
        ("it was so. it was so.", "it was so", None),
        ("x x x.", "x x", None),  # twice, though the places overlap
        ("nightly rest. night was quiet.", "night was quiet", "night"),  # words, not letters
        ("a b c. a b\nd. a b d.", "a b d", None),  # a line break between words changes nothing
        ("it (was) so? it [was] so.", "it (was) so? it [was] so", "it (was)"),
    ],
)
def test_the_shortest_unique_cue(document: str, sentence: str, cue: str | None) -> None:
    assert unique_cue(document, sentence) == cue


def test_a_cue_has_at_most_so_many_words() -> None:
    document = "a b c d. a b c e."
    assert unique_cue(document, "a b c d", most=3) is None
    assert unique_cue(document, "a b c d", most=4) == "a b c d"


def places(document: str, cue: str) -> int:
    """How often the cue stands in the document as whole words, counted character by character."""
    text = " ".join(document.split())

    def is_word(i: int) -> bool:
        return 0 <= i < len(text) and (text[i].isalnum() or text[i] == "_")

    return sum(
        text.startswith(cue, i) and not is_word(i - 1) and not is_word(i + len(cue))
        for i in range(len(text))
    )


words = st.sampled_from(["a", "b", "ab", "41", "4.1", "(x)", "é", "a,", "b;", "c:", ",", "_", "-"])
notes = st.lists(st.lists(words, min_size=1, max_size=6).map(" ".join), min_size=1, max_size=6)


@given(notes, st.sampled_from([". ", ".\n", ".\n\n"]), st.sampled_from([" ", "\n", "  "]))
@example(["a a a", "a a"], ". ", " ")
def test_a_cue_stands_once_and_begins_its_sentence(told: list[str], stop: str, space: str) -> None:
    document = stop.join(told).replace(" ", space) + "."
    for sentence in sentences(document):
        cue = unique_cue(document, sentence)
        if cue is None:
            continue
        assert places(document, cue) == 1
        assert " ".join(sentence.split()).startswith(cue)
        parts = sentence.split()
        for count in range(1, len(cue.split())):
            shorter = " ".join(parts[:count]).rstrip(" ,;:")
            assert not shorter or places(document, shorter) > 1, "a shorter cue would have done"


@pytest.fixture(scope="module")
def patient() -> Patient:
    (patient,) = parse_patients(generate_clinic(9, 1, 20, 4), "clinic")
    return patient


def drawn(
    patient: Patient, questions: list[PatientQuestion], kinds: tuple[str, ...], count: int = 300
) -> list[tuple[str, str]]:
    return [
        self_study_prompt(patient, questions, kinds, random.Random(f"test/{i}"))[:2]
        for i in range(count)
    ]


def test_only_training_questions_are_drawn(patient: Patient) -> None:
    training, held_out = list(patient.questions[:12]), patient.questions[12:]
    prompts = drawn(patient, training, KINDS, 600)
    asked = {text for kind, text in prompts if kind == "question"}
    asked = {text for text in asked if not text.startswith("what about ")}
    assert asked == {q.text for q in training}, "all of them in 600 draws, and no other"
    assert not {text for _, text in prompts} & {q.text for q in held_out}


def test_kinds_are_respected(patient: Patient) -> None:
    questions = list(patient.questions)
    for kind in KINDS:
        assert {k for k, _ in drawn(patient, questions, (kind,), 50)} == {kind}
    kinds = [k for k, _ in drawn(patient, questions, KINDS, 600)]
    for kind in KINDS:  # B(600, 1/5): 120, standard deviation 9.8
        assert 71 < kinds.count(kind) < 169


def test_what_each_kind_says(patient: Patient) -> None:
    everything = drawn(patient, list(patient.questions), KINDS, 600)
    said = {kind: {t for k, t in everything if k == kind} for kind in KINDS}
    assert said["structure"] == {f"list the findings of note {i}." for i in (1, 2, 3, 4)}
    assert said["summarise"] == {f"summarise note {i}." for i in (1, 2, 3, 4)}
    for text in said["recite"]:
        cue = text.removeprefix("recite from ").removesuffix(".")
        assert text == f"recite from {cue}."
        assert places(patient.document, cue) == 1


def test_questions_about_the_document_point_at_one_place_of_it(patient: Patient) -> None:
    """Without training questions all are about a sentence; with some, about half of them."""
    for training, share in (([], 1.0), (list(patient.questions[:12]), 0.5)):
        asked = [t for _, t in drawn(patient, training, ("question",), 400)]
        about = [t for t in asked if t.startswith("what about ")]
        assert abs(len(about) / 400 - share) < 0.1  # B(400, 1/2): standard deviation 0.025
        for text in about:
            cue = text.removeprefix("what about ").removesuffix("?")
            assert text == f"what about {cue}?"
            assert places(patient.document, cue) == 1


def test_a_choice_offers_the_sentence_s_end_once_among_look_alikes(patient: Patient) -> None:
    ends = {cue: rest for _, cue, rest in cued_sentences(patient)}
    for _, text in drawn(patient, [], ("choice",), 200):
        asked, listed = text.split("? options: ")
        right = ends[asked.removeprefix("what about ")]
        options = re.split(r" ?[a-e]\) ", listed)[1:]
        assert len(options) == len(set(options)) == 5
        assert options.count(right) == 1
        if re.search(r"\d", right):
            # Other numbers, the rest of the words as they are.
            assert {re.sub(r"\d", "0", o) for o in options} == {re.sub(r"\d", "0", right)}
        else:
            assert set(options) <= set(ends.values())
            if len(right.split()) == 1:
                assert all(len(o.split()) == 1 for o in options), "there are enough of one word"


def test_other_documents_lend_their_ends() -> None:
    """A patient with two sentences of its own has a choice of five only with others' ends."""
    short = Patient("p", "n", "b", "d", ("statin zantor. nurse weber.",), ())
    rng = random.Random("lend")
    assert self_study_prompt(short, [], ("choice",), rng)[0] == "structure"
    others = ["abilar", "cordel", "no new pain", "dravil", "gruber", "hassan"]
    for _ in range(50):
        kind, text, _ = self_study_prompt(short, [], ("choice",), rng, others)
        assert kind == "choice"
        assert "no new pain" not in text, "three words beside one: the farthest is left out"


def test_look_alikes_by_hand() -> None:
    rng = random.Random("alike")
    ends = ["a b c", "x", "y z", "u v", "w"]
    assert set(look_alikes("p q", ends, 2, rng)) == {"y z", "u v"}
    assert set(look_alikes("p q", ends, 4, rng)) < set(ends)
    assert sorted(look_alikes("x", ends, 1, rng)) == ["w"]
    numbers = look_alikes("41 mmol", ends, 4, rng)
    assert len(set(numbers)) == 4
    assert all(re.fullmatch(r"[1-9]\d mmol", n) and n != "41 mmol" for n in numbers)
    # The year and the day both change; each keeps its number of digits.
    (dated,) = look_alikes("3 may 1999", ends, 1, rng)
    assert re.fullmatch(r"\d may [1-9]\d{3}", dated)
    assert dated != "3 may 1999"


def test_too_few_numbers_are_filled_up_with_ends() -> None:
    """One digit gives nine others at most: eleven options need two ends."""
    options = look_alikes("7", ["x", "y", "z"], 11, random.Random("few"))
    digits = [o for o in options if o.isdigit()]
    assert len(options) == len(set(options)) == 11
    assert len(digits) == 9
    assert "7" not in digits


def test_a_note_without_a_unique_cue_is_listed_instead() -> None:
    mute = Patient("p", "n", "b", "d", ("so. so.", "so. so."), ())
    for kind, text in drawn(mute, [], ("recite",), 20):
        assert kind == "structure"
        assert text in {"list the findings of note 1.", "list the findings of note 2."}


def test_the_generator_alone_decides(patient: Patient) -> None:
    questions = list(patient.questions)
    assert drawn(patient, questions, KINDS) == drawn(patient, questions, KINDS)


def test_a_whole_note_is_asked_for_by_its_first_sentence() -> None:
    (patient,) = parse_patients(generate_clinic(0, 1, 12, 1), "test")
    kind, text, _ = self_study_prompt(patient, [], ("recite_note",), random.Random(0))
    first = sentences(patient.texts[0])[0]
    cue = unique_cue(patient.document, first)
    assert cue is not None
    assert (kind, text) == ("recite_note", f"recite from {cue}.")
    assert patient.texts[0].startswith(cue)


def test_findings_ask_for_fields_of_the_chart_and_name_their_notes() -> None:
    (patient,) = parse_patients(generate_clinic(0, 1, 12, 3), "test")
    counts = set()
    for seed in range(50):
        kind, text, places = self_study_prompt(patient, [], ("findings",), random.Random(seed))
        fields = re.findall(r"what is the (\w+)\?", text)
        assert (kind, text) == ("findings", " ".join(f"what is the {f}?" for f in fields))
        notes = {i for f in fields for i, t in enumerate(patient.texts) if f" {f} " in f" {t}"}
        assert places == tuple((n, 0, len(patient.texts[n])) for n in sorted(notes))
        counts.add(len(set(fields)))
    assert counts == {2, 3, 4}
    other = Patient("p", "n", "b", "d", ("the night was quiet.",), ())
    kind, text, _ = self_study_prompt(other, [], ("findings",), random.Random(0))
    assert (kind, text) == ("structure", "list the findings of note 1.")
