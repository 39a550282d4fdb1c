"""The frozen base model: loading it with prefix attention, reading document KV, its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from learning.model.attention import PrefixContext, register
from learning.model.fsdp import whole
from protocols.errors import DataError

# transformers takes seconds, three quarters of them for models: the controller, which only names
# our types and has a tokenizer, does without those.
if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

PREFILL_CHUNK = 512  # tokens: bounds the score matrix while a long document is read


def load_model(
    path: str, dtype: str = "float32", device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load a causal LM from a directory (or a hub id where a hub is at hand), frozen, in eval mode,
    on `device`: whatever works with it goes where it is.

    Raises DataError when there is no model there.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation=register()
        )
    except OSError as error:
        raise DataError(
            f"no model at {path!r}: {str(error).splitlines()[0]}; set model.path to a directory "
            "with config.json and *.safetensors, or to a hub id that this machine can reach"
        ) from error
    model.requires_grad_(False)
    model.eval()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    model.to(device)  # type: ignore[arg-type]  # transformers wraps it without its types
    return model


def flush_denormals() -> None:
    """Let this thread, and those that it starts, compute as if the tiniest numbers were 0.

    Attention weights of tokens that are not looked at underflow, and a CPU computes with such
    numbers many times slower: a prefill of 16 rows took 178 ms with them, and 112 without. For
    threads of models alone: other code may mean such numbers.
    """
    torch.set_flush_denormal(True)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model; it must carry a chat template."""
    tokenizer = _tokenizer(path)
    if not tokenizer.chat_template:
        raise DataError(f"the tokenizer at {path!r} has no chat template; add one to its files")
    return tokenizer


def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    """AutoTokenizer's. It imports every model's code to find out which class to take; where the
    files say that they need none, as those of our own models do, that is taken at once."""
    config = Path(path) / "tokenizer_config.json"
    named = json.loads(config.read_text()).get("tokenizer_class") if config.is_file() else ""
    if named == "TokenizersBackend":
        from transformers import TokenizersBackend

        tokenizer: PreTrainedTokenizerBase = TokenizersBackend.from_pretrained(path)
        return tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def text_of(path: str) -> Callable[[Sequence[int]], str]:
    """What ids say, without special tokens, by the tokenizer beside a model; it is loaded when it
    is first needed."""

    tokenizer = cache(partial(_tokenizer, path))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer().decode(list(ids), skip_special_tokens=True))

    return decode


def text_ids(path: str) -> list[int]:
    """The ids of the tokenizer beside a model that stand for text: all but the special ones."""
    tokenizer = load_tokenizer(path)
    special = set(tokenizer.all_special_ids)
    return sorted(i for i in tokenizer.get_vocab().values() if i not in special)


def kv_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """(layers L, key/value heads H_kv, head size D)."""
    config = model.config
    head_dim = getattr(config, "head_dim", None)
    return (
        config.num_hidden_layers,
        config.num_key_value_heads,
        head_dim or config.hidden_size // config.num_attention_heads,
    )


@torch.no_grad()
def document_kv(model: PreTrainedModel, token_ids: list[int] | tuple[int, ...]) -> Tensor:
    """Keys (post-RoPE) and values of a token sequence read from position 0: [L, 2, H_kv, T, D].

    Read in chunks, each attending to the chunks before it as a prefix.
    """
    ids = torch.tensor([list(token_ids)], device=model.device)
    done: Tensor | None = None
    for start in range(0, ids.shape[1], PREFILL_CHUNK):
        chunk = ids[:, start : start + PREFILL_CHUNK]
        context = PrefixContext(kv=None if done is None else done[None], capture=True)
        length = chunk.shape[1]
        causal = torch.ones(1, 1, length, length, dtype=torch.bool, device=ids.device).tril()
        positions = torch.arange(start, start + length, device=ids.device)[None]
        hidden_states(model, chunk, positions, causal, context)
        new = torch.cat(context.captured)  # B = 1 each: [L, 2, H_kv, T, D]
        done = new if done is None else torch.cat([done, new], dim=3)
    assert done is not None, "a document has at least its beginning-of-sequence token"
    return done


def hidden_states(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, mask: Tensor, context: PrefixContext
) -> Tensor:
    """Final hidden states [B, T, width] for ids, positions [B, T] and a bool mask [B, 1, T, S]."""
    out = model.base_model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,
        use_cache=False,
        prefix=context,
    )
    hidden: Tensor = out.last_hidden_state
    return hidden


@contextmanager
def recomputing(model: PreTrainedModel) -> Iterator[None]:
    """In a forward pass made here, each layer keeps its input alone, and is run again in the
    backward pass: the memory of one layer's activations instead of all, for a forward more."""
    layers: Any = model.base_model.layers
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own shows again


def base_hash(model: PreTrainedModel) -> str:
    """SHA-256 over every parameter and persistent buffer, by name: proves the base never moved.

    The same of a sharded base, gathered tensor by tensor: all ranks must ask.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(whole(tensor.detach()).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
