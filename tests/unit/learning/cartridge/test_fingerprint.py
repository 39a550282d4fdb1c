"""Fingerprints are of the numbers in memory, whatever the tensor is called or was told to be."""

import hashlib
import json

import pytest
import torch
from torch import Tensor

from learning import cartridge as module
from learning.cartridge import Fingerprints, fingerprint
from protocols.types import PrefixRef, composed_ref


def bank(dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(2, 3, 2, 2, 5, 4, generator=torch.Generator().manual_seed(1))
    return drawn.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_sha256_of_shape_dtype_and_each_heads_bytes(dtype: torch.dtype) -> None:
    kv = bank(dtype)[0]
    heads = []
    for h in range(2):
        raw = bytes(kv[:, :, h].contiguous().flatten().view(torch.uint8).tolist())
        heads.append(hashlib.sha256(raw).hexdigest())
    header = [[3, 2, 2, 5, 4], str(dtype).removeprefix("torch."), heads]
    assert fingerprint(kv) == hashlib.sha256(json.dumps(header).encode()).hexdigest()


def test_every_bit_shape_and_dtype_changes_it() -> None:
    kv = bank()[0]
    seen = {fingerprint(kv), fingerprint(kv.double()), fingerprint(kv.reshape(3, 2, 2, 4, 5))}
    for place in [(0, 0, 0, 0, 0), (2, 1, 1, 4, 3)]:
        other = kv.clone()
        other.view(torch.int32)[place] ^= 1
        seen.add(fingerprint(other))
    seen.add(fingerprint(kv.flip(0)))
    assert len(seen) == 6


def test_it_is_computed_once_for_a_tensor_and_anew_after_a_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    real = module.head_digests
    monkeypatch.setattr(module, "head_digests", lambda kv: calls.append(1) or real(kv))
    known, held = Fingerprints(), bank()
    with torch.no_grad():  # a view as an actor takes it, a new object each time
        first = [known.fingerprint(held[c]) for c in (0, 1, 0, 1)]
        assert len(calls) == 2
        assert first == [fingerprint(held[c]) for c in (0, 1, 0, 1)]
        calls.clear()
        held[1, 0, 0, 0, 0, 0] += 1  # written in place: both views belong to the same tensor
        assert known.fingerprint(held[1]) == fingerprint(held[1]) != first[1]
        assert known.fingerprint(held[0]) == first[0]


def test_a_new_tensor_in_the_memory_of_a_freed_one_is_another() -> None:
    known = Fingerprints()
    prints = set()
    for value in range(20):  # the allocator gives the same address again
        kv = torch.full((1, 2, 1, 64, 32), float(value))
        prints.add(known.fingerprint(kv))
        del kv
    assert len(prints) == 20


def test_a_prefix_names_its_parts_and_the_tensor_in_use() -> None:
    known, held = Fingerprints(), bank()
    a, b = PrefixRef("cartridge/a", 3), PrefixRef("cartridge/b", 3)
    held_as = {"cartridge/a": held[0], "cartridge/b": held[1]}

    def single(ref: PrefixRef) -> Tensor:
        return held_as[ref.name]

    assert known.served(a, held[0], single) == (fingerprint(held[0]),)
    assert known.served(a, held[1], single) == (fingerprint(held[1]),)  # what is in use counts
    both = composed_ref([b, a])
    assert known.served(both, torch.zeros(1), single) == tuple(map(fingerprint, held.flip(0)))
    assert known.served(PrefixRef("document/a", 0), held[0], single) == ("",)
