"""Run a model that `learning.model.decoder` does not know through transformers.

Our attention is registered with transformers as the implementation "cartridge", so that any model
whose layers call the attention interface runs unmodified. Tokens are one row of the flat list.
Importing transformers takes seconds, so this module is imported only for such models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from learning.model.decoder import Attention, LanguageModel
from learning.model.hub import model_files
from protocols.errors import DataError
from protocols.work import count

IMPLEMENTATION = "cartridge"
# Frequencies that change with the length of the text: the angle depends on more than the position.
BY_LENGTH = ("dynamic", "longrope")


def flat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    flat: Attention,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return attention [1, N, H_q, D] of query [1, H_q, N, D], key and value [1, H_kv, N, D]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    count(len(k))
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # an int, typed as Tensor | Module
    return flat.attend(layer, q, k, v, scaling, sliding_window)[None], None


class TransformersModel(LanguageModel):
    """Run a transformers model over flat tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._model = model
        self.base_model, self.lm_head = model.base_model, model.lm_head
        config = model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.kv_shape = (config.num_hidden_layers, config.num_key_value_heads, size)
        self.vocabulary = config.vocab_size
        self.longest = getattr(config, "max_position_embeddings", None)
        self.requires_grad_(False)
        self.eval()

    @property
    def weight(self) -> Tensor:
        embeddings: Any = self._model.get_input_embeddings()
        weight: Tensor = embeddings.weight
        return weight

    def forward(
        self, ids: Tensor, positions: Tensor, attention: Attention, read: Tensor | None = None
    ) -> Tensor:
        out = self.base_model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device),  # not read
            use_cache=False,
            flat=attention,
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden if read is None else hidden[read]

    def frequencies(self) -> Tensor:
        return rotary_frequencies(getattr(self.base_model, "rotary_emb", None))

    def weights(self) -> Iterator[tuple[str, Tensor, slice]]:
        for name, tensor in self._model.state_dict().items():
            yield name, tensor, slice(None)


def load_by_transformers(path: str, dtype: torch.dtype) -> TransformersModel:
    """Load a causal LM from a directory, or a hub id if the hub is reachable, on the host. Raises
    OSError where there is none."""
    AttentionInterface.register(IMPLEMENTATION, flat_attention)
    return TransformersModel(
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=IMPLEMENTATION)
    )


def frequencies_by_transformers(path: str) -> Tensor:
    """Return the frequencies of the model in this directory from its config alone. Raises DataError
    for a model that transformers does not know."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model_files(path))
        with torch.device("meta"):  # allocates no memory
            shell = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise DataError(
            f"keys of the model {path!r} cannot be moved to other positions, for transformers does "
            f"not know it: {str(error).splitlines()[0]}; use one cartridge before a prompt"
        ) from error
    rotary = getattr(shell.base_model, "rotary_emb", None)
    if rotary is not None:
        rotary = type(rotary)(shell.base_model.config)
    return rotary_frequencies(rotary)


def rotary_frequencies(rotary: Any) -> Tensor:
    """Return the frequencies of a rotary embedding, the base's scaling included, in float64."""
    kind = getattr(rotary, "rope_type", None)
    if rotary is None or kind in BY_LENGTH:
        raise DataError(
            f"keys of this model cannot be moved to other positions: its rotary embedding is "
            f"{kind}, which is not the same at every length; use a model with a fixed one"
        )
    inverse: Tensor = rotary.inv_freq
    return inverse.detach().double()
