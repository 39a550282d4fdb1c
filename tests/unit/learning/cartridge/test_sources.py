"""What a cartridge of several contexts starts from: an equal share of each, as one text."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from learning.initialization import CartridgeInit, first_of_each, init_sources, initial_bank, shares
from learning.teacher import DocumentKVCache, document_kv
from protocols.errors import DataError

if TYPE_CHECKING:
    from twins import Twin


def test_shares_by_hand() -> None:
    assert shares([9, 9, 9], 9) == [3, 3, 3]
    assert shares([9, 9, 9], 11) == [4, 4, 3], "what is not divisible goes to the first"
    assert shares([9, 1, 9], 11) == [5, 1, 5], "what the second leaves over goes to the others"
    assert shares([9, 1, 9], 12) == [6, 1, 5]
    assert shares([2, 1, 3], 6) == [2, 1, 3]
    assert first_of_each([(1, 2, 3), (4,), (5, 6, 7)], 5) == [1, 2, 4, 5, 6]


def test_a_cartridge_of_several_contexts_starts_with_the_first_tokens_of_each(llama: Twin) -> None:
    documents = {"none": llama.documents["a"][:1], **{n: llama.documents[n] for n in "ac"}}
    cache = DocumentKVCache(partial(document_kv, llama.model), documents, 1 << 30)
    layout = {"both": ("a", "c"), "c": ("c",)}
    sources = init_sources(layout, documents, cache, 4096, list)
    both, alone = sources
    a, c = documents["a"], documents["c"]
    assert both.ids == (*a, *c[1:])
    assert both.parts == (a, c[1:])
    assert (alone.ids, alone.parts) == (c, ())
    bank = initial_bank(llama.model, sources, CartridgeInit("first_tokens", 9, 1))
    expected = document_kv(llama.model, (*a[:4], *c[1:6]))
    torch.testing.assert_close(bank.kv(["both"])[0].detach(), expected)
    torch.testing.assert_close(bank.kv(["c"])[0].detach(), llama.kv["c"][:, :, :, :9])


def test_a_text_over_the_models_context_is_read_by_no_initialization(llama: Twin) -> None:
    documents = {n: llama.documents[n] for n in "ac"}
    sources = init_sources({"both": ("a", "c")}, documents, llama.cached(), 16, list)
    for init in ("attention_matching", "random_vectors"):
        with pytest.raises(DataError, match=r"cartridge both learns from \d+ tokens"):
            initial_bank(llama.model, sources, CartridgeInit(init, 9, 1))
    initial_bank(llama.model, sources, CartridgeInit("first_tokens", 9, 1))
