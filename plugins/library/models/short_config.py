"""Shorten a config, so that a short text crosses each of its borders and a large model is small.

Borders are numbers of tokens: a sliding window, a chunk, the length from which a rotary embedding
changes. They have many names, and a new family brings its own. What they have in common is that no
weight's shape depends on them: every whole number of a config beyond LONG that can be lowered
without another shape is taken for a border.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

LONG = 32  # tokens: a text of more crosses a border there
BORDERS = (8, 16, 32)  # what the borders of a config become, in their order
LARGE = 1 << 28  # numbers of a model's weights, beyond which some of its layers are computed
# Lengths that these rotary embeddings have are constants of their formulas, and not borders.
FIXED_ROPES = ("default", "linear", "llama3", "yarn")
SIZES = ("vocab_size", "hidden_size", "intermediate_size")  # never borders: spares a look at each

# Ids, and numbers that scale: lowered, one makes attention so sharp that rounding is all there is.
MAGNITUDES = ("_token_id", "_token_index", "_theta", "_scalar")

Edits = Mapping[tuple[str, Any], Any]  # by key and old value, anywhere in a config


@dataclass(frozen=True)
class ShortConfig:
    """Hold a shortened config, its model without weights, and the `edits` that made it. `layers`
    of `of_layers` are left."""

    config: PreTrainedConfig
    shell: PreTrainedModel
    edits: Edits
    layers: int
    of_layers: int


def short_configs(config: PreTrainedConfig) -> Iterator[ShortConfig]:
    """Yield a config shortened: its layers to the first ones of each kind where the model is large,
    and its borders; then with the most positions left as they are, and with all borders so, for a
    model that does not run with shorter ones. Raises as transformers does for a model that it
    cannot build."""
    shell = shell_of(config)
    layers = of_layers = len(_layers(shell, config))
    fewer: dict[tuple[str, Any], Any] = {}
    if sum(p.numel() for p in shell.parameters()) > LARGE:
        fewer, layers = _fewer_layers(config, shell)
    borders = _borders(edited_config(config, fewer))
    without_positions = {one: to for one, to in borders.items() if "position" not in one[0]}
    tried: list[Edits] = []
    for edits in (borders, without_positions, {}):
        if edits not in tried:
            tried.append(edits)
            short = edited_config(config, fewer | edits)
            yield ShortConfig(short, shell_of(short), fewer | edits, layers, of_layers)


def shell_of(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model of a config without memory for its weights."""
    with torch.device("meta"):
        shell: PreTrainedModel = AutoModelForCausalLM.from_config(deepcopy(config))  # type: ignore[no-untyped-call]
    return shell


def edited(tree: Any, edits: Edits) -> Any:
    """Return a copy of a config's tree of dicts with the edits made."""
    if not isinstance(tree, Mapping):
        return tree
    return {
        key: edits.get((key, _hashable(value)), edited(value, edits)) for key, value in tree.items()
    }


def edited_config(config: PreTrainedConfig, edits: Edits) -> PreTrainedConfig:
    """Return a copy of a config with the edits made."""
    if not edits:
        return deepcopy(config)
    fresh: PreTrainedConfig = type(config).from_dict(edited(config.to_dict(), edits))
    return fresh


def _hashable(value: Any) -> Any:
    return repr(value) if isinstance(value, list | dict) else value


def _numbers(tree: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers of a config that may be borders."""
    fixed = tree.get("rope_type", tree.get("type")) in FIXED_ROPES
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool) and value > LONG:
            named = key in SIZES or key.endswith(MAGNITUDES)
            if not named and not (fixed and key == "original_max_position_embeddings"):
                yield key, value


def _borders(config: PreTrainedConfig) -> dict[tuple[str, Any], Any]:
    """Return the edits that bring every border of a config within LONG."""
    shapes = _shapes(shell_of(config))
    candidates = [
        one for one in sorted(set(_numbers(config.to_dict()))) if _is_border(config, one, shapes)
    ]
    order = sorted({value for _, value in candidates})
    return {
        (key, value): BORDERS[min(order.index(value), len(BORDERS) - 1)]
        for key, value in candidates
    }


def _is_border(
    config: PreTrainedConfig, number: tuple[str, int], shapes: Mapping[str, torch.Size]
) -> bool:
    try:
        return _shapes(shell_of(edited_config(config, {number: BORDERS[0]}))) == shapes
    except Exception:  # transformers' and the model's own rules: a number that they do not take
        return False


def _shapes(shell: PreTrainedModel) -> dict[str, torch.Size]:
    return {
        name: tensor.shape for one in (shell.named_parameters(), shell.named_buffers())
        for name, tensor in one
    }  # fmt: skip


def _layers(shell: PreTrainedModel, config: PreTrainedConfig) -> list[nn.Module]:
    """Return a model's layers; none where they are not one list."""
    count = getattr(config, "num_hidden_layers", None)
    lists = [m for m in shell.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return list(lists[0]) if lists else []


def _fewer_layers(
    config: PreTrainedConfig, shell: PreTrainedModel
) -> tuple[dict[tuple[str, Any], Any], int]:
    """Return the edits that leave a model its first layers, so many that each kind is there, and
    their number: all of them where fewer would be of other kinds than in the whole model."""
    kinds = _kinds(_layers(shell, config))
    count, layers_kept = len(kinds), 1 + max((kinds.index(kind) for kind in kinds), default=-1)
    if layers_kept >= count:
        return {}, count
    named = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    tree = config.to_dict()
    edits: dict[tuple[str, Any], Any] = {(named, count): layers_kept}
    for key, value in tree.items():
        if isinstance(value, list) and len(value) == count:
            edits[key, repr(value)] = value[:layers_kept]
    try:
        short = edited_config(config, edits)
        if _kinds(_layers(shell_of(short), short)) == kinds[:layers_kept]:
            return edits, layers_kept
    except Exception:  # a rule of the config that fewer layers break
        pass
    return {}, count


def _kinds(layers: list[nn.Module]) -> list[Any]:
    """Return what each layer is: its modules' classes, the shapes of their weights and the plain
    values that they hold, but for the layer's own number."""
    lists = [
        {
            (where, name): value
            for where, module in layer.named_modules()
            for name, value in (
                ("class", type(module).__name__),
                *((n, p.shape) for n, p in module.named_parameters(recurse=False)),
                *((n, v) for n, v in vars(module).items() if isinstance(v, int | float | str)),
            )
        }
        for layer in layers
    ]
    numbers = (
        [key for key in lists[0] if all(one.get(key) == i for i, one in enumerate(lists))]
        if lists
        else []
    )
    return [{k: v for k, v in one.items() if k not in numbers} for one in lists]
