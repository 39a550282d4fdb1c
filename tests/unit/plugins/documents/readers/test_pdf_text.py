"""Words that the lines of a PDF break: what is joined, and what keeps its hyphen."""

import pytest

from cartridge_forge.plugins.documents.readers.pdf_text import joined_words


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("an exam-\nple of", "an example of"),
        ("an exam- \n  ple of", "an example of"),
        ("an exam\u2010\nple of", "an example of"),
        ("inter-\nna-\ntional", "international"),
        ("Über-\nsicht", "Übersicht"),
        ("строи-\nтельство", "строительство"),
        ("the pre-\n\ntence", "the pretence"),  # from page to page
        # The document has the compound, or its parts and not the whole.
        ("self-\nstudy, self-study", "self-study, self-study"),
        ("a well-\nknown man is well and known", "a well-known man is well and known"),
        ("some-\nthing of some thing; something", "something of some thing; something"),
        ("state-of-the-\nart", "state-of-the-art"),
        ("Jean-\nPaul", "Jean-Paul"),
        ("1990-\n1995", "1990-1995"),
        ("covid-\n19", "covid-19"),
        ("an x-\nray", "an x-ray"),
        ("short-\nand long-term", "short- and long-term"),
        # Neither a dash nor a list is a hyphen.
        ("and so -\nit was", "and so -\nit was"),
        ("- one\n- two", "- one\n- two"),
        ("so\u2014\nit was", "so\u2014\nit was"),
        ("co\u00adop, co\u00ad\nop", "coop, coop"),
        ("no hyphen\nhere", "no hyphen\nhere"),
    ],
)
def test_a_hyphen_at_the_end_of_a_line(text: str, joined: str) -> None:
    assert joined_words(text) == joined
