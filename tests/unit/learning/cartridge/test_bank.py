"""The bank of cartridges: what it starts from, what of it is trainable, what is published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from learning.cartridge import CartridgeBank, first_tokens
from protocols.errors import DataError

if TYPE_CHECKING:
    from twins import Twin


def numbered(cartridges: int, tokens: int) -> torch.Tensor:
    """[C, 1, 2, 1, P, 1] with 100 c + 10 (key 0 or value 1) + p at position p."""
    c = torch.arange(cartridges)[:, None, None] * 100
    kind = torch.arange(2)[:, None] * 10
    return (c + kind + torch.arange(tokens)).float()[:, None, :, None, :, None]


def test_a_bank_starts_from_the_first_tokens_of_each_document(llama: Twin) -> None:
    bank = first_tokens({"c": llama.kv["c"], "a": llama.kv["a"]}, tokens=6, frozen=2)
    assert bank.names == ("a", "c")
    for name, kv in zip(bank.names, bank.kv(bank.names), strict=True):
        assert torch.equal(kv, llama.kv[name][:, :, :, :6])
        assert torch.equal(bank.frozen[name], llama.kv[name][:, :, :, :2])
        assert bank.trainable[name].shape[3] == 4
        assert bank.trainable[name].dtype == torch.float32
        assert bank.tokens(name) == 6


def test_frozen_tokens_stand_before_trainable_ones_and_names_choose_rows() -> None:
    bank = CartridgeBank(["x", "y", "z"], numbered(3, 4), frozen=1)
    assert [bank.frozen[n].flatten().tolist() for n in "xyz"] == [[0, 10], [100, 110], [200, 210]]
    assert bank.trainable["y"].flatten().tolist() == [101, 102, 103, 111, 112, 113]
    assert [kv.flatten().tolist() for kv in bank.kv(["z", "x"])] == [
        [200, 201, 202, 203, 210, 211, 212, 213],
        [0, 1, 2, 3, 10, 11, 12, 13],
    ]


def test_gradient_reaches_the_trainable_tokens_of_the_named_cartridges() -> None:
    bank = CartridgeBank(["x", "y"], numbered(2, 3), frozen=1)
    (bank.kv(["y"])[0] * torch.tensor([5.0, 6.0, 7.0])[:, None]).sum().backward()
    gradient = bank.trainable["y"].grad
    assert gradient is not None
    assert gradient.flatten().tolist() == [6, 7, 6, 7]
    assert bank.trainable["x"].grad is None
    assert bank.frozen["y"].grad is None


def test_cartridges_may_differ_in_length() -> None:
    bank = CartridgeBank(["x", "y"], [numbered(1, 3)[0], numbered(1, 5)[0]], frozen=2)
    assert [kv.shape[3] for kv in bank.kv("yx")] == [5, 3]
    assert [bank.trainable[name].shape[3] for name in "xy"] == [1, 3]


def test_a_fingerprint_is_of_the_named_cartridges_and_every_bit() -> None:
    bank = CartridgeBank(["x", "y"], numbered(2, 3), frozen=1)
    both, x = bank.fingerprint("xy"), bank.fingerprint("x")
    with torch.no_grad():
        bank.trainable["y"].view(torch.int32)[0, 0, 0, 0, 0] ^= 1
    assert bank.fingerprint("x") == x
    assert bank.fingerprint("xy") != both


def test_the_bank_owns_its_numbers() -> None:
    source = numbered(2, 3)
    bank = CartridgeBank(["x", "y"], source, frozen=1)
    source.fill_(-1)
    assert min(kv.min() for kv in bank.kv("xy")) == 0


def test_a_document_no_longer_than_the_cartridge_is_refused(llama: Twin) -> None:
    with pytest.raises(
        DataError,
        match=r"document b has 17 tokens, no more than the cartridge's 17; lower cartridge.tokens",
    ):
        first_tokens(llama.kv, tokens=17, frozen=1)


@pytest.mark.parametrize(("names", "frozen"), [("xy", -1), ("xy", 3), ("x", 1), ("xyz", 1)])
def test_a_bank_that_cannot_be_is_refused(names: str, frozen: int) -> None:
    with pytest.raises(
        DataError,
        match=rf"0 <= frozen < P: got {len(names)} names, 2 prefixes of P=\[3, 3\], "
        rf"frozen={frozen}",
    ):
        CartridgeBank(names, numbered(2, 3), frozen)
