"""Foreign JSON within bounds, and what is a redirection to somebody else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cartridge_forge.plugins.chat.wire import foreign
from cartridge_forge.plugins.chat.wire.foreign import (
    count,
    items,
    number,
    read_json,
    stays,
    value_of,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 2.5, true, null, "x"]}', {"a": [1, 2.5, True, None, "x"]}),
        ("[NaN, Infinity, -Infinity, 1e400, -1e400]", [None] * 5),
        ("[" + "9" * 401 + ", -" + "9" * 401 + "]", [None, None]),
        ("9" * 308, int("9" * 308)),
        (b'"\xc3\xa9"', "é"),
        ("[" * 99 + "]" * 99, json.loads("[" * 99 + "]" * 99)),
    ],
    ids=["plain", "no numbers", "401 digits", "308 digits", "bytes", "99 deep"],
)
def test_what_fits_is_read(text: str | bytes, value: Any) -> None:
    assert read_json(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[1,]", "9" * 5000, b"\xff", "[" * 101 + "]" * 101, "[" * 10**6,
        '{"a":' * 101 + "1" + "}" * 101, '{"a":[' * 300 + "]}" * 300,
    ],
    ids=["none", "open", "comma", "5000 digits", "no text", "101", "10^6", "objects", "both"],
)  # fmt: skip
def test_what_does_not_fit_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_json(text)


def test_size_is_bounded() -> None:
    assert read_json('"12345678"', most_bytes=10) == "12345678"
    with pytest.raises(ValueError, match="more than 9 bytes"):
        read_json('"12345678"', most_bytes=9)
    assert foreign.MOST_BYTES == 33_554_432


ODD: list[Any] = [None, True, False, "1", "x", [], [1], {}, {"a": 1}, float("nan"), float("inf")]


@pytest.mark.parametrize("value", [*ODD, 10**400, -1, 10.1, 1e300], ids=repr)
def test_what_is_no_number_in_range_is_none(value: Any) -> None:
    assert number(value, 0, 10) is None
    assert count(value, 10) is None


def test_numbers_in_range() -> None:
    assert [number(v, -1, 1) for v in (-1, 0, 0.5, 1)] == [-1.0, 0.0, 0.5, 1.0]
    assert [count(v, 3) for v in (0, 3, 2.0, 2.5, 4)] == [0, 3, 2, None, None]


def test_fields_and_items_of_any_value() -> None:
    assert [value_of(v, "a") for v in ODD] == [None] * 8 + [1] + [None] * 2
    assert [items(v) for v in ODD] == [[]] * 6 + [[1]] + [[]] * 4


@pytest.mark.parametrize(
    ("location", "is_same"),
    [
        ("/v2/chat", True), ("chat/", True), ("?x=1", True), ("http://a.example:80/x", True),
        ("HTTP://A.example/x", True), ("//a.example/x", True), ("http://a.example:8080/x", False),
        ("https://a.example/x", False), ("http://b.example/x", False), ("//b.example/x", False),
        ("http://a.example@b.example/x", False), ("http://a.example.b.example/", False),
        ("http://a.example:x/", False), ("ftp://a.example/", False),
    ],
)  # fmt: skip
def test_a_redirection_stays_with_scheme_host_and_port(location: str, is_same: bool) -> None:
    assert stays("http://a.example/v1/chat", location) is is_same
