"""The bank of cartridges: what it starts from, what of it is trainable, what is published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from learning.cartridge.bank import CartridgeBank, first_tokens
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
    assert torch.equal(bank.kv()[0], llama.kv["a"][:, :, :, :6])
    assert torch.equal(bank.kv()[1], llama.kv["c"][:, :, :, :6])
    assert torch.equal(bank.frozen[1], llama.kv["c"][:, :, :, :2])
    assert [p.shape[4] for p in bank.parameters()] == [4]
    assert bank.trainable.dtype == torch.float32


def test_frozen_tokens_stand_before_trainable_ones_and_names_choose_rows() -> None:
    bank = CartridgeBank(["x", "y", "z"], numbered(3, 4), frozen=1)
    assert bank.frozen.flatten().tolist() == [0, 10, 100, 110, 200, 210]
    assert bank.trainable[1].flatten().tolist() == [101, 102, 103, 111, 112, 113]
    assert bank.kv(["z", "x"]).flatten(1).tolist() == [
        [200, 201, 202, 203, 210, 211, 212, 213],
        [0, 1, 2, 3, 10, 11, 12, 13],
    ]


def test_gradient_reaches_the_trainable_tokens_of_the_named_cartridges() -> None:
    bank = CartridgeBank(["x", "y"], numbered(2, 3), frozen=1)
    (bank.kv(["y"]) * torch.tensor([5.0, 6.0, 7.0])[:, None]).sum().backward()
    assert bank.trainable.grad is not None
    assert bank.trainable.grad.flatten(1).tolist() == [[0, 0, 0, 0], [6, 7, 6, 7]]
    assert bank.frozen.grad is None


def test_the_bank_owns_its_numbers() -> None:
    source = numbered(2, 3)
    bank = CartridgeBank(["x", "y"], source, frozen=1)
    source.fill_(-1)
    assert bank.kv().min() == 0


def test_a_snapshot_is_detached_from_what_is_trained_on() -> None:
    bank = CartridgeBank(["x", "y"], numbered(2, 3), frozen=1)
    snapshot = bank.snapshot(torch.float32)
    rounded = bank.snapshot(torch.bfloat16)
    with torch.no_grad():
        bank.trainable.zero_()
    assert torch.equal(snapshot, numbered(2, 3))
    assert torch.equal(rounded, numbered(2, 3).bfloat16())
    assert not snapshot.requires_grad
    assert snapshot.is_contiguous()


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
        match=rf"0 <= frozen < P: got {len(names)} names, 2 prefixes of P=3, frozen={frozen}",
    ):
        CartridgeBank(names, numbered(2, 3), frozen)
