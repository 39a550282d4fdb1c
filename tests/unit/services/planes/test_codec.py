"""Packing is exact: what comes out equals what went in, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from second_device import elsewhere

from cartridge_forge.protocols.errors import PlaneError
from cartridge_forge.protocols.step import TensorLayout, check_key
from cartridge_forge.services.planes.codec import (
    layout_of,
    pack,
    packed_bytes,
    packed_chunks,
    staged,
    unpack,
)

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.complex64,
)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(bits(left), bits(right))
    )


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any shape up to three dimensions (0 allowed), any dtype, random bits (NaNs among them)."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    elements = torch.Size(shape).numel()
    raw = torch.randint(
        0, 256, (elements * dtype.itemsize,), generator=generator, dtype=torch.uint8
    )
    return raw.view(dtype).view(shape)


@given(st.dictionaries(st.text(max_size=8), tensors(), max_size=6))
def test_a_round_trip_is_bit_identical(named: dict[str, torch.Tensor]) -> None:
    buffer, layout = pack(named)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (packed_bytes(layout),)
    assert layout == layout_of(named)
    assert b"".join(packed_chunks(named)) == bytes(buffer.numpy())
    out = unpack(buffer.clone(), layout)
    assert list(out) == list(named)
    assert all(same(out[name], tensor) for name, tensor in named.items())


def test_entries_lie_on_64_byte_boundaries_in_order() -> None:
    named = {"a": torch.tensor([1, 2, 3], dtype=torch.uint8), "b": torch.tensor([7.0])}
    buffer, layout = pack(named)
    assert layout == TensorLayout((("a", (3,), "uint8"), ("b", (1,), "float32")))
    assert buffer.shape == (128,)
    assert buffer[:3].tolist() == [1, 2, 3]
    assert buffer[64:68].tolist() == [0, 0, 224, 64]  # 7.0 little-endian: 0x40e00000
    assert buffer[3:64].sum() == 0  # gaps are zero, so equal tensors pack to equal bytes
    assert buffer[68:].sum() == 0


@pytest.mark.parametrize(
    ("shape", "expected"), [((), 64), ((16,), 64), ((17,), 128), ((0, 3), 64), ((1000,), 4032)]
)
def test_sizes_of_float32(shape: tuple[int, ...], expected: int) -> None:
    assert packed_bytes(TensorLayout((("x", shape, "float32"),))) == expected


def test_no_tensors_still_make_a_buffer() -> None:
    buffer, layout = pack({})
    assert buffer.shape == (64,)  # mmap and RDMA refuse zero bytes
    assert unpack(buffer, layout) == {}


def test_the_packed_copy_is_a_snapshot() -> None:
    source = torch.ones(8, requires_grad=True)
    buffer, layout = pack({"x": source})
    with torch.no_grad():
        source.zero_()
    assert unpack(buffer, layout)["x"].tolist() == [1.0] * 8


def test_strided_and_expanded_sources_are_packed_by_value() -> None:
    grid = torch.arange(6).view(2, 3)
    named = {"t": grid.t(), "e": torch.tensor([5]).expand(4), "c": torch.tensor([1 + 2j]).conj()}
    buffer, layout = pack(named)
    assert b"".join(packed_chunks(named)) == bytes(buffer.numpy())
    out = unpack(buffer, layout)
    assert out["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert out["e"].tolist() == [5, 5, 5, 5]
    assert out["c"].tolist() == [1 - 2j]


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(64, dtype=torch.uint8),
        torch.zeros(192, dtype=torch.uint8),
        torch.zeros(128, dtype=torch.int8),
        torch.zeros(2, 64, dtype=torch.uint8),
        torch.zeros(256, dtype=torch.uint8)[::2],
    ],
    ids=["short", "long", "dtype", "two-dimensional", "strided"],
)
def test_a_buffer_of_another_layout_is_refused(buffer: torch.Tensor) -> None:
    with pytest.raises(PlaneError, match=r"needs a contiguous uint8 buffer of 128 bytes"):
        unpack(buffer, TensorLayout((("x", (20,), "float32"),)))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(PlaneError, match="'float3', which this torch does not know"):
        unpack(torch.zeros(64, dtype=torch.uint8), TensorLayout((("x", (1,), "float3"),)))


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(PlaneError, match="tensor 's' must be dense"):
        pack({"s": torch.eye(2).to_sparse()})


@pytest.mark.parametrize("key", ["", "..", "../x", "a/../b", "a\nb", "a\0b", "ü" * 60])
def test_bad_keys_are_refused(key: str) -> None:
    with pytest.raises(PlaneError, match="a key must"):
        check_key(key)


@pytest.mark.parametrize("key", ["a", "cartridge/patient_01@7", "a.b..c", "/a", "ü 1"])
def test_good_keys_pass(key: str) -> None:
    assert check_key(key) == key


def test_the_next_copy_is_under_way_while_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device whose copies take their time: begun and awaited by hand."""
    log: list[str] = []

    def begin(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        name = str(int(tensor))
        log.append(f"begin {name}")
        return tensor, lambda: log.append(f"wait {name}")

    monkeypatch.setattr("cartridge_forge.services.planes.codec._begin_copy", begin)
    for copy in staged([torch.tensor(i) for i in range(3)]):
        log.append(f"use {int(copy)}")
    assert log == [
        "begin 0", "begin 1", "wait 0", "use 0", "begin 2", "wait 1", "use 1", "wait 2", "use 2",
    ]  # fmt: skip


def test_what_lies_on_another_device_is_packed_by_value() -> None:
    named = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5).bfloat16()}
    expected = b"".join(packed_chunks(named))
    with elsewhere():
        there = {name: tensor.to("elsewhere") for name, tensor in named.items()}
        assert b"".join(packed_chunks(there)) == expected
