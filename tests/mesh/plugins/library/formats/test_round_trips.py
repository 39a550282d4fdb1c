"""Whatever a cartridge's shape, dtype and provenance: every format gives it back, bit by bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

from format_setup import cartridges, place, same, write
from hypothesis import given, settings
from hypothesis import strategies as st

from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.formats.convert import FORMATS, convert, detect, read


@settings(max_examples=15, deadline=None)
@given(made=cartridges())
def test_every_format_gives_it_back(made: CartridgeFile) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in FORMATS:
            path = write(made, Path(folder), name)
            assert detect(path) == name
            assert same(read(path), made), name
        assert len(list(Path(folder).iterdir())) == len(FORMATS)  # and nothing else is left


@settings(max_examples=12, deadline=None)
@given(made=cartridges(), order=st.permutations(sorted(FORMATS)))
def test_a_chain_of_conversions_loses_nothing(made: CartridgeFile, order: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        last = made
        for name in order:
            convert(last, place(Path(folder), name), name)
            last = read(place(Path(folder), name))
        assert same(last, made)
