"""What a reader sees of Markdown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.documents.formats import ReadOptions, read_markdown
from cartridge_forge.plugins.documents.readers.markdown_text import markdown_text
from cartridge_forge.protocols.errors import DataError

README = """# Salt tables

[![CI](https://img.shields.io/ci.svg)](https://ci.example.com) [![PyPI][pypi]][package]
![build](https://github.com/a/b/badge.svg)

<p align="center">
  <img src="logo.png" alt="A lamp" width="100">
</p>

The tables are old. ![Tide tables](tides.png "of 1912") hang there.
See [the docs](https://x.org/docs) and [the package][package].
<!-- a note
of ours -->

```html
<img src="kept.png"> [![kept](a.svg)](b)
```

Write `<img alt="x">` or `![alt](src)`; a `List<T>` stays.

[pypi]: https://img.shields.io/pypi.svg
[package]: https://pypi.org/p
"""
SEEN = """# Salt tables

  A lamp

The tables are old. Tide tables hang there.
See [the docs](https://x.org/docs) and [the package][package].

```html
<img src="kept.png"> [![kept](a.svg)](b)
```

Write `<img alt="x">` or `![alt](src)`; a `List<T>` stays.

"""


def test_badges_images_and_layout_are_left_out() -> None:
    shown = markdown_text(README)
    assert shown.startswith(SEEN)
    assert "shields" not in shown


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("![](a.png) words", "words"),
        ("some ![](a.png) words ![](b.png)", "some words"),
        ("[![a](b.svg)](c)[![d](e.svg)](f)\n\nwords\n", "words\n"),
        ("words\n\n[![a](b.svg)](c)\n\nmore\n", "words\n\nmore\n"),
        ('<a href="x"><img src="y"></a>\nwords', "words"),
        ("one<br/>two <sub>3</sub>", "one two 3"),
        ("![see (this)](a_(b).png)", "see (this)"),
        ("[a link](x) and ![a picture][p]\n\n[p]: y.png\n", "[a link](x) and a picture\n\n"),
        ("a < b and c > d, if x<p and y>q", "a < b and c > d, if x<p and y>q"),
        ("~~~\n![a](b)\n~~~\n![a](b)", "~~~\n![a](b)\n~~~\na"),
        ("````\n```\n![a](b)\n````\n", "````\n```\n![a](b)\n````\n"),
    ],
)
def test_by_hand(text: str, seen: str) -> None:
    assert markdown_text(text) == seen


@given(st.text("ab `~\n#*_()|-.:", max_size=60))
def test_text_without_images_and_tags_stays_as_it_is(text: str) -> None:
    assert markdown_text(text) == text


def test_a_page_of_badges_alone_is_left_out_with_the_reason() -> None:
    with pytest.raises(DataError, match="images without text"):
        read_markdown(b"[![a](b.svg)](c)\n", ReadOptions())
