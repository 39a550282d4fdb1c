"""Load the frozen base model with prefix attention, compute document KV, and hash the weights."""

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

# Importing transformers takes seconds, three quarters of them for models, which the controller does
# not need: it only uses types and a tokenizer.
if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

PREFILL_CHUNK = 512  # tokens: bounds the score matrix while a long document is read


def load_model(
    path: str, dtype: str = "float32", device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load a causal LM from a directory (or a hub id if the hub is reachable), frozen, in eval
    mode, on `device`. Raises DataError when there is no model at `path`."""
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
    """Make this thread, and those that it starts, treat denormal numbers as 0.

    Attention weights of tokens without attention underflow, and a CPU computes with denormals many
    times slower: a prefill of 16 rows took 178 ms with them, and 112 without. Call it only in
    threads that run models: other code may need denormals.
    """
    torch.set_flush_denormal(True)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer beside a model. Raises DataError for one without a chat template."""
    tokenizer = _tokenizer(path)
    if not tokenizer.chat_template:
        raise DataError(f"the tokenizer at {path!r} has no chat template; add one to its files")
    return tokenizer


def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer. AutoTokenizer imports every model's code to choose a class;
    TokenizersBackend, which the files of our own models name, is loaded directly."""
    config = Path(path) / "tokenizer_config.json"
    named = json.loads(config.read_text()).get("tokenizer_class") if config.is_file() else ""
    if named == "TokenizersBackend":
        from transformers import TokenizersBackend

        tokenizer: PreTrainedTokenizerBase = TokenizersBackend.from_pretrained(path)
        return tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def text_of(path: str) -> Callable[[Sequence[int]], str]:
    """Return a function from ids to text without special tokens, by the tokenizer beside a model,
    which is loaded on the first call."""

    tokenizer = cache(partial(_tokenizer, path))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer().decode(list(ids), skip_special_tokens=True))

    return decode


def text_ids(path: str) -> list[int]:
    """Return the ids that stand for text in the tokenizer beside a model: all but the special
    ones."""
    tokenizer = load_tokenizer(path)
    special = set(tokenizer.all_special_ids)
    return sorted(i for i in tokenizer.get_vocab().values() if i not in special)


def kv_shape(model: PreTrainedModel) -> tuple[int, int, int]:
    """Return (layers L, key/value heads H_kv, head size D)."""
    config = model.config
    head_dim = getattr(config, "head_dim", None)
    return (
        config.num_hidden_layers,
        config.num_key_value_heads,
        head_dim or config.hidden_size // config.num_attention_heads,
    )


@torch.no_grad()
def document_kv(model: PreTrainedModel, token_ids: list[int] | tuple[int, ...]) -> Tensor:
    """Return keys (post-RoPE) and values of a token sequence read from position 0:
    [L, 2, H_kv, T, D]. It is read in chunks, each attending to the chunks before it as a prefix."""
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
    """Return final hidden states [B, T, width] for ids, positions [B, T] and a bool mask
    [B, 1, T, S]."""
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
    """Checkpoint each layer in forward passes run inside: a layer keeps only its input and runs
    again in the backward pass. Activations take the memory of one layer, at the cost of one more
    forward."""
    layers: Any = model.base_model.layers
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # restores the class's method


def base_hash(model: PreTrainedModel) -> str:
    """Return the SHA-256 over every parameter and persistent buffer, by name, which proves that the
    base did not change. A sharded base is gathered tensor by tensor: all ranks must call this."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(whole(tensor.detach()).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
