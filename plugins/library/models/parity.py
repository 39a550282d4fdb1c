"""Check that a model is computed right here: our log-probabilities against its own forward pass.

    plain    a short text in one pass
    prefix   its second part behind the keys and values of its first, as a cartridge is read
    packed   it again as the second of two sequences of one pass
    moved    keys moved to other positions, as composed cartridges are; against keys read there

The model's own forward pass is that of transformers, in eager attention and without a cache. Its
modules hold our tensors, so the weights exist once. Both sides take one config, in which the
borders of text are within the text and a large model has only its first layers of each kind
(`plugins.library.models.short_config`). A family needs no entry anywhere: what is computed wrongly
differs.

Both sides compute in float32 on the CPU, whatever type the model is used in: a bound of bfloat16
would hide a soft cap. Rounding is BOUND nats. A deep model whose activations are large rounds more:
between BOUND and DOUBT its own pass in float64 shows how much, and ours may differ by so many times
that.

Not seen: what these tokens do not reach (an expert that none is routed to), what differs by chance
(nothing here is sampled), layers that a large model was shortened by, other devices' kernels, and
the vLLM sampler, whose models are vLLM's own.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from cartridge_forge.learning.attention import FlatAttention, Observer
from cartridge_forge.learning.decoder import INDEX, WEIGHTS, LanguageModel, load_decoder
from cartridge_forge.learning.decoder_config import decoder_config
from cartridge_forge.learning.model.verdict import BOUND, ModelVerdict
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.library.models.adapter import load_by_transformers
from cartridge_forge.plugins.library.models.short_config import (
    FIXED_ROPES,
    ShortConfig,
    edited,
    short_configs,
)
from cartridge_forge.plugins.library.models.verdicts import WAYS, model_folder
from cartridge_forge.protocols.errors import DataError

TEXT, PREFIX, BEFORE = 48, 20, 56  # tokens: the text, its part that is a prefix, the text before it
DOUBT = 0.1  # nats: what is beyond is not rounding
ROUNDINGS = 4  # times the rounding of the model's own pass that ours may differ from it
PAGE = "docs/reference/models.md"
REMEDY = f"set model.path to a model of a family that {PAGE} lists as right"
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
# What keys of a config that change attention or logits are often called: for a hint, never a rule.
AT_THE_END = ("logit", "final", "head_bias")
BY_NAME = (*AT_THE_END, "cap", "scal", "multiplier", "sink", "alibi", "clip", "divisor")


def check_model(path: str) -> ModelVerdict:
    """Compute a short text in all ways by the model at `path`, a directory or hub id, and by the
    model's own forward pass. Raises DataError where there is no whole model at `path`."""
    start = time.monotonic()
    with _quiet():
        verdict = _checked(path)
    return replace(verdict, seconds=time.monotonic() - start)


def _checked(path: str) -> ModelVerdict:
    family, refusal = "unknown", ""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
        family = config.model_type
        for short in short_configs(config):
            try:
                return _compared(path, config, short)
            except DataError as error:  # what our own code does not compute
                refusal = str(error)
            except OSError:
                raise
            except Exception as error:  # whatever the code of some family raises
                refusal = _failure(path, family, error)
    except OSError:
        raise
    except Exception as error:
        refusal = _failure(path, family, error)
    return ModelVerdict(path, family, refusal=refusal)


def _failure(path: str, family: str, error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0][:200]
    return _refusal(
        path, family, f"transformers' code of it fails ({type(error).__name__}: {first})"
    )


def _refusal(path: str, family: str, why: str) -> str:
    return f"the model {path!r} of family {family!r} is not computed right here: {why}; {REMEDY}"


def _compared(path: str, config: PreTrainedConfig, short: ShortConfig) -> ModelVerdict:
    """Return the verdict on a model by the computation of its shortened config."""
    ids = _text(short.config)
    ours = _ours(path, short)
    with torch.no_grad():
        want, hidden = _own_pass(_theirs(ours, short, torch.float32), ids)
        nats, equal = _ways(ours, ids, want, hidden)
        moved, bound = _moved(ours, ids), BOUND
        if BOUND < max(map(_rank, nats.values())) < DOUBT:
            exact, _ = _own_pass(_theirs(ours, short, torch.float64), ids)
            bound = max(BOUND, ROUNDINGS * float((want - exact).abs().max()))
    verdict = ModelVerdict(
        path, config.model_type, nats, bound, layers=short.layers, of_layers=short.of_layers
    )
    wrong = {name: d for name, d in nats.items() if not d <= bound}
    if not wrong:
        return replace(verdict, unmoved=moved and _unmoved(path, moved))
    deviations = ", ".join(f"{d:.2g} nats {WAYS[name]}" for name, d in wrong.items())
    why = f"its log-probabilities are off its own forward pass by {deviations}"
    why += f" ({bound:.1g} is rounding)"
    if "plain" in wrong and equal:
        why += "; its last hidden states agree, so what follows them is not computed"
    if suspects := _suspects(config, set(wrong), equal):
        why += f"; suspected: {', '.join(suspects)}"
    return replace(verdict, refusal=_refusal(path, config.model_type, why))


def _rank(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def _text(config: PreTrainedConfig) -> Tensor:
    """Return ids [BEFORE + TEXT] of ordinary tokens: another text, then the text."""
    special: set[int] = set()
    for key, value in config.to_dict().items():
        if key.endswith(("_token_id", "_token_index")):
            special |= set(value if isinstance(value, list) else [value])
    ordinary = torch.tensor([i for i in range(config.vocab_size) if i not in special])
    draws = torch.Generator().manual_seed(1)
    return ordinary[torch.randint(len(ordinary), (BEFORE + TEXT,), generator=draws)]


def _ours(path: str, short: ShortConfig) -> LanguageModel:
    """Return our model of the shortened config, as `learning.model.loading.load_model` chooses."""
    folder = model_folder(path)
    if folder is not None and any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        raw = json.loads((folder / "config.json").read_bytes())
        decoder = decoder_config(edited(raw, short.edits)) if Path(path).is_dir() else None
        if decoder is not None:
            return load_decoder(folder, decoder, torch.float32)
    return load_by_transformers(path, torch.float32, deepcopy(short.config))


def _theirs(ours: LanguageModel, short: ShortConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return transformers' model over our tensors, or over copies in another type."""
    state = {
        name: tensor if rows == slice(None) else tensor[rows]
        for name, tensor, rows in ours.weights()
    }
    family: Any = type(short.shell)
    config = deepcopy(short.config)
    if hasattr(config, "quantization_config"):  # ours are whole by now
        del config.quantization_config
    model, facts = family.from_pretrained(
        None, config=config, state_dict=state, attn_implementation="eager", dtype=dtype,
        output_loading_info=True,
    )  # fmt: skip
    if facts["missing_keys"]:
        raise ValueError(f"we do not read {', '.join(sorted(facts['missing_keys'])[:3])}")
    loaded: PreTrainedModel = model
    return loaded


def _own_pass(theirs: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities [TEXT, V] of the model's own forward pass, and its last hidden
    states [TEXT, width] where it tells them."""
    out = theirs(ids[None, BEFORE:], use_cache=False, output_hidden_states=True)
    states = getattr(out, "hidden_states", None)
    return out.logits[0].log_softmax(-1), states[-1][0] if states else None


def _ways(
    ours: LanguageModel, ids: Tensor, want: Tensor, hidden: Tensor | None
) -> tuple[dict[str, float], bool]:
    """Return the largest difference of a log-probability in each of WAYS, and whether the last
    hidden states of the plain pass agree."""
    text = ids[BEFORE:]
    layers, heads, size = ours.kv_shape
    none = torch.zeros(layers, 2, heads, 0, size, dtype=ours.dtype)
    at = torch.arange(BEFORE)
    tail = at[PREFIX:TEXT]

    # From short to long: a module may keep what the longest text before made of it.
    logits = ours.projection()
    kv = document_kv(ours, text[:PREFIX].tolist())
    after_prefix = _hidden(ours, text[PREFIX:], tail, [TEXT - PREFIX], kv)
    plain = _hidden(ours, text, at[:TEXT], [TEXT], none)
    packed = _hidden(
        ours, ids, torch.cat([at, at[:TEXT]]), [BEFORE, TEXT], none,
        read=torch.arange(BEFORE, BEFORE + TEXT),
    )  # fmt: skip
    nats = {
        name: float((logits(states).log_softmax(-1) - reference).abs().max())
        for name, states, reference in (
            ("plain", plain, want), ("prefix", after_prefix, want[PREFIX:]),
            ("packed", packed, want)
        )
    }  # fmt: skip
    equal = hidden is not None and torch.allclose(plain, hidden, rtol=1e-3, atol=1e-3)
    return nats, equal


def _hidden(
    ours: LanguageModel, ids: Tensor, positions: Tensor, lengths: list[int], prefix: Tensor,
    read: Tensor | None = None, observer: Observer | None = None,
) -> Tensor:  # fmt: skip
    attention = FlatAttention(lengths, [len(lengths)], positions, [prefix], read, observer)
    states: Tensor = ours(ids, positions, attention, read)
    return states


def _moved(ours: LanguageModel, ids: Tensor) -> str:
    """Return why keys moved by BEFORE positions are not those that are read there; "" where they
    are."""
    text = ids[BEFORE : BEFORE + PREFIX]
    layers, heads, size = ours.kv_shape
    none = torch.zeros(layers, 2, heads, 0, size, dtype=ours.dtype)
    theirs = torch.empty(layers, heads, PREFIX, size, dtype=ours.dtype)

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        theirs[layer] = k.transpose(0, 1)

    _hidden(ours, text, torch.arange(PREFIX) + BEFORE, [PREFIX], none, observer=keep)
    try:
        document = document_kv(ours, text.tolist())[:, 0]
        keys = ours.frequencies().turned(document.double(), BEFORE)
    except DataError as error:
        return str(error)
    except Exception as error:
        return f"its rotary embedding is not known ({type(error).__name__}: {error})"
    off = float((keys - theirs).abs().max() / theirs.abs().max())
    return (
        "" if off <= BOUND else f"keys moved to other positions are off by {off:.2g} of the largest"
    )


def _unmoved(path: str, why: str) -> str:
    return (
        f"cartridges of the model {path!r} cannot be composed: {why}; use one cartridge before a "
        f"prompt, or a model that {PAGE} lists for composition"
    )


def _suspects(config: PreTrainedConfig, wrong: set[str], equal: bool) -> list[str]:
    """Return what of a config probably makes the difference: a hint."""
    tree = config.get_text_config().to_dict()
    kind = (tree.get("rope_parameters") or {}).get("rope_type", "default")
    suspects = [f"rope_type {kind}"] * (kind not in FIXED_ROPES)
    if "plain" in wrong:
        for key, value in tree.items():
            neutral = value in (None, False, 1.0) or isinstance(value, dict | list | str)
            named = any(word in key for word in (AT_THE_END if equal else BY_NAME))
            suspects += [f"{key} {value}"] * (named and not neutral)
    elif kinds := set(tree.get("layer_types") or ()) - set(ATTENTION):
        suspects.append(f"layers of the kind {', '.join(sorted(kinds))}")
    return suspects


@contextmanager
def _quiet() -> Iterator[None]:
    """Let transformers say nothing inside."""
    hf_logging: Any = logging
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(hf_logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
