"""Test how caches that other programs compacted are read, and what is refused of them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, MistralConfig

from cartridge_forge.plugins.library.formats.kv_cache import CompactedCache, checked, read, unpack
from cartridge_forge.protocols.errors import DataError

LAYERS, HEADS, ENTRIES, SIZE = 3, 2, 5, 4
HIDDEN = -torch.inf


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


KEYS, VALUES = drawn(LAYERS, HEADS, ENTRIES, SIZE), drawn(LAYERS, HEADS, ENTRIES, SIZE) + 1
BIASES = drawn(LAYERS, HEADS, ENTRIES)
PAIRS = [(k[None].clone(), v[None].clone()) for k, v in zip(KEYS, VALUES, strict=True)]
TRIPLES = [(k, b[None].clone(), v) for (k, v), b in zip(PAIRS, BIASES, strict=True)]
NAMED = {f"{kind}.{layer}": part for layer, row in enumerate(TRIPLES)
         for kind, part in zip(("keys", "biases", "values"), row, strict=True)}  # fmt: skip


def dynamic_cache() -> DynamicCache:
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(PAIRS):
        cache.update(keys, values, layer)
    return cache


def unpacked(state: Any, folder: Path) -> CompactedCache:
    """Save it as its maker does; read it in this process."""
    from safetensors.torch import load_file

    torch.save(state, folder / "cache.pt")
    unpack(folder / "cache.pt", folder / "cache.safetensors")
    return checked(load_file(folder / "cache.safetensors"), "cache.pt")


@pytest.mark.parametrize(
    "state",
    [PAIRS, tuple(PAIRS), list(map(list, PAIRS)), dynamic_cache(), list(dynamic_cache())],
    ids=["pairs", "tuple", "lists", "dynamic_cache", "its_items"],
)
def test_caches_without_biases_are_their_keys_and_values(tmp_path: Path, state: Any) -> None:
    cache = unpacked(state, tmp_path)
    assert cache.biases is None
    assert cache.kv.equal(torch.stack([KEYS, VALUES], 1))


def test_a_process_reads_the_pickle(tmp_path: Path) -> None:
    torch.save(TRIPLES, tmp_path / "cache.pt")
    cache = read(tmp_path / "cache.pt")
    assert cache.biases is not None
    assert cache.biases.equal(BIASES.double())
    assert cache.kv.equal(torch.stack([KEYS, VALUES], 1))


def test_safetensors_are_read_as_the_pickle_is(tmp_path: Path) -> None:
    save_file(NAMED, tmp_path / "cache.safetensors")
    cache, pickled = read(tmp_path / "cache.safetensors"), unpacked(TRIPLES, tmp_path)
    assert cache.biases is not None
    assert pickled.biases is not None
    assert cache.kv.equal(pickled.kv)
    assert cache.biases.equal(pickled.biases)


def test_the_cache_of_attention_matchings_code_is_read_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the names of its classes and attributes, in a module that is gone when it is read."""
    module = ModuleType("models.cache")
    kinds = [type(name, (), {"__module__": module.__name__})
             for name in ("CompactedPrefixCache", "CompactedPrefixLayer")]  # fmt: skip
    whole = kinds[0]()
    whole.layers, whole._rope_base = [], 7
    for keys, biases, values in TRIPLES:
        layer = kinds[1]()
        layer.keys, layer.beta, layer.values, layer.base_len = keys, biases, values, ENTRIES
        whole.layers.append(layer)
    for kind in kinds:
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.save(whole, tmp_path / "made.pt")
    monkeypatch.delitem(sys.modules, module.__name__)
    cache = read(tmp_path / "made.pt")
    assert cache.biases is not None
    assert cache.biases.equal(BIASES.double())
    assert cache.kv.equal(torch.stack([KEYS, VALUES], 1))


@pytest.mark.parametrize("hidden", [HIDDEN, torch.finfo(torch.float32).min])
def test_entries_that_a_bias_hides_are_left_out_of_each_head(hidden: float) -> None:
    """One of five in every head, another one in each; by hand for layer 1, head 0."""
    named = {key: part.clone() for key, part in NAMED.items()}
    for layer in range(LAYERS):
        for head in range(HEADS):
            named[f"biases.{layer}"][0, head, layer + head] = hidden
    cache = checked(named, "cache.pt")
    assert cache.biases is not None
    assert cache.kv.shape == (LAYERS, 2, HEADS, ENTRIES - 1, SIZE)
    rows = [0, 2, 3, 4]
    assert cache.kv[1, 0, 0].equal(KEYS[1, 0, rows])
    assert cache.kv[1, 1, 0].equal(VALUES[1, 0, rows])
    assert cache.biases[1, 0].equal(BIASES[1, 0, rows].double())


def test_layers_that_are_padded_to_another_length_are_equal_without_it() -> None:
    named = dict(NAMED)
    for kind in ("keys", "values"):
        named[f"{kind}.1"] = torch.cat([NAMED[f"{kind}.1"], torch.zeros(1, HEADS, 2, SIZE)], 2)
    padding = torch.full((1, HEADS, 2), HIDDEN)
    named["biases.1"] = torch.cat([NAMED["biases.1"], padding], 2)
    assert checked(named, "cache.pt").kv.equal(torch.stack([KEYS, VALUES], 1))


def test_biases_of_zero_are_none() -> None:
    named = NAMED | {f"biases.{layer}": torch.zeros(1, HEADS, ENTRIES) for layer in range(LAYERS)}
    assert checked(named, "cache.pt").biases is None


def changed(key: str, index: tuple[int, ...], number: float) -> dict[str, Tensor]:
    part = NAMED[key].clone()
    part[index] = number
    return {key: part}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("biases.2", (0, 1, 3), HIDDEN),
         "unequal length.*layer 2 head 1 has 4, layer 2 head 0 has 5.*equal budget"),
        (changed("biases.1", (0, 0, 2), torch.nan), "layer 1 head 0 entry 2 has a bias of nan"),
        (changed("biases.1", (0, 0, 2), torch.inf), "layer 1 head 0 entry 2 has a bias of inf"),
        (changed("keys.1", (0, 1, 2, 0), torch.nan), "layer 1 head 1 holds keys or values"),
        (changed("values.0", (0, 0, 4, 1), torch.inf), "layer 0 head 0 holds keys or values"),
        ({"keys.1": NAMED["keys.1"][0]}, r"layer 1: keys are \[2, 5, 4\]"),
        ({"keys.1": NAMED["keys.1"].repeat(2, 1, 1, 1)}, r"layer 1: keys are \[2, 2, 5, 4\].*one"),
        ({"values.1": NAMED["values.1"][:, :, 1:]}, r"layer 1: values are \[1, 2, 4, 4\], and"),
        ({"biases.1": NAMED["biases.1"][:, :1]}, r"layer 1: biases are \[1, 1, 5\], and keys"),
        ({"keys.1": NAMED["keys.1"].double()}, "layer 1: keys are torch.float64"),
        ({"values.1": NAMED["values.1"].half()}, "values of torch.float16.*keys of layer 0"),
        ({"keys.9": NAMED["keys.1"]}, "lacks biases.3"),
        ({"weights.0": NAMED["keys.1"]}, "has weights.0"),
    ],
)  # fmt: skip
def test_what_is_no_cache_is_refused_with_its_place(
    change: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        checked(NAMED | change, "cache.pt")


@pytest.mark.parametrize("kind", ["keys", "biases", "values"])
def test_a_layer_without_one_of_its_tensors_is_refused(kind: str) -> None:
    with pytest.raises(DataError, match=f"lacks {kind}.1"):
        checked({key: part for key, part in NAMED.items() if key != f"{kind}.1"}, "cache.pt")


def test_a_cache_whose_entries_are_all_hidden_is_refused() -> None:
    hidden = {f"biases.{n}": torch.full((1, HEADS, ENTRIES), HIDDEN) for n in range(LAYERS)}
    with pytest.raises(DataError, match="no entries that are not hidden"):
        checked(NAMED | hidden, "cache.pt")
    with pytest.raises(DataError, match="holds nothing"):
        checked({}, "cache.pt")


def sliding_cache() -> DynamicCache:
    cache = DynamicCache(config=MistralConfig(num_hidden_layers=1, sliding_window=4))
    cache.update(*PAIRS[0], 0)
    return cache


class Opaque:
    """A class of the user."""


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"keys": KEYS}, r"holds a dict and no list of layers: save torch.save\(\[\(keys, values"),
        ([], "has no layers"),
        ([PAIRS[0], KEYS], "layer 1 is a Tensor: save"),
        ([PAIRS[0], (*PAIRS[1], KEYS, KEYS)], "layer 1 is 4 parts: save"),
        ([PAIRS[0], (KEYS[:1], None)], "values of layer 1 are NoneType"),
        ([(KEYS[:1], KEYS[:1].to_sparse())], "values of layer 0 are torch.sparse_coo"),
        ([(torch.zeros(1, 1, 1, 1).expand(1, 2, 10_000, 4), PAIRS[0][1])], "claims more numbers"),
        (sliding_cache(), "refused: .*DynamicSlidingWindowLayer"),
        (Opaque(), "refused: .*Opaque"),
    ],
)
def test_other_pickles_are_refused(tmp_path: Path, state: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        unpacked(state, tmp_path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no file"):
        read(tmp_path)
    (tmp_path / "text.safetensors").write_text("no tensors are here")
    with pytest.raises(DataError, match=r"text\.safetensors is no safetensors file"):
        read(tmp_path / "text.safetensors")
