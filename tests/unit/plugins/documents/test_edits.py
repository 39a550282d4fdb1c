"""Test what an edit changed in a text, in characters and in tokens."""

from __future__ import annotations

from cartridge_forge.plugins.documents.edits import (
    TextChange,
    appended,
    changed_ids,
    changed_text,
    passage_spans,
    text_changes,
    unchanged_text,
)

OLD = "Sodium is 41. The surgeon is Weber.\nDiet was tolerated. Sleep has improved."
NEW = "Sodium is 52. The surgeon is Weber.\nSleep has improved. Gait is steady."


def test_passages_are_sentences_and_lines() -> None:
    spans = passage_spans("One. Two\n\n  three four.\n")
    assert spans == [(0, 4), (5, 8), (12, 23)]
    assert passage_spans(" \n ") == []
    lower = "sodium is 41. gait, e.g. walking, is steady."
    assert next(lower[a:b] for a, b in passage_spans(lower)) == "sodium is 41."
    capital = "Gait, e.g. walking, is steady."
    assert passage_spans(capital) == [(0, len(capital))]


def test_changes_are_whole_passages_of_both_texts() -> None:
    changes = text_changes(OLD, NEW)
    assert [(OLD[slice(*c.old)], NEW[slice(*c.new)]) for c in changes] == [
        ("Sodium is 41.", "Sodium is 52."),
        ("Diet was tolerated.", ""),
        ("", "Gait is steady."),
    ]
    assert changes[1].new == (35, 35)  # behind "Weber."
    spans = [c.new for c in changes]
    assert changed_text(NEW, spans) == "Sodium is 52.\n\nGait is steady."
    assert unchanged_text(NEW, spans) == "The surgeon is Weber.\n\nSleep has improved."


def test_other_white_space_between_passages_is_no_change() -> None:
    assert text_changes(OLD, OLD.replace("\n", "\n\n") + "\n") == []
    assert text_changes(OLD, f"{OLD} {OLD[:13]}") == [TextChange((75, 75), (76, 89))]


def test_a_text_is_appended_on_a_line_of_its_own() -> None:
    assert appended("one.\n\n", "\ntwo.\n") == "one.\ntwo."


def test_changed_ids_are_places_in_both() -> None:
    assert changed_ids([7, 1, 2, 3, 9], [7, 1, 5, 6, 3, 9, 9]) == [
        ((2, 3), (2, 4)),
        ((5, 5), (6, 7)),
    ]
    assert changed_ids([1, 2], [1, 2]) == []


def test_an_edit_of_a_long_text_of_few_words_is_where_it_is() -> None:
    """400 tokens of few kinds, none of which is rare; 250 lines of 25 kinds."""
    ids = [i * i % 31 for i in range(400)]
    edited = [*ids[:200], 99, *ids[201:]]
    assert changed_ids(ids, edited) == [((200, 201), (200, 201))]
    lines = [f"the pulse is {i * i * i % 1009 % 25}." for i in range(250)]
    old, new = "\n".join(lines), "\n".join([*lines[:100], "the pulse is 99.", *lines[101:]])
    (change,) = text_changes(old, new)
    assert (old[slice(*change.old)], new[slice(*change.new)]) == (lines[100], "the pulse is 99.")
