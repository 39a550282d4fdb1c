"""Load the frozen base model with prefix attention on its device, and hash the weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cartridge_forge.learning.decoder import (
    INDEX,
    WEIGHTS,
    LanguageModel,
    load_decoder,
)
from cartridge_forge.learning.decoder_config import DecoderConfig, decoder_config
from cartridge_forge.learning.model.control_tokens import special_tokens, token_count
from cartridge_forge.learning.model.hub import GGUF, model_files
from cartridge_forge.learning.model.verdict import ModelVerdict, kept_verdict
from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.plugins import optional, resolve

if TYPE_CHECKING:  # importing it takes seconds, which only code that renders text should pay
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

DEVICES = ("cpu", "cuda")
_AHEAD: dict[tuple[str, str], LanguageModel] = {}  # by path and dtype: what `read_ahead` loaded


def load_model(
    path: str,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    verdict: ModelVerdict | None = None,
) -> LanguageModel:
    """Load a causal LM from a directory (or a hub id if the hub is reachable), frozen, in eval
    mode, on `device`: in our decoder if it knows the model, else through transformers. `verdict`
    is that of the check that a caller has had made (`checked_model`); None: it is made now, unless
    it is kept. Raises DataError when there is no model at `path`, and for one that is not computed
    right."""
    ahead = _AHEAD.pop((path, dtype), None)
    if ahead is not None:
        return ahead.to(device)
    verdict = verdict or checked_model(path)
    require_weights(path)
    config = known_config(path)
    with _model_at(path):
        if config is not None:
            model: LanguageModel = load_decoder(Path(path), config, getattr(torch, dtype))
        else:
            load_other = resolve("hooks", "other_models")
            model = load_other(model_files(path), getattr(torch, dtype))
    model.tokens = token_count(path)
    model.unmoved = verdict.unmoved
    return model.to(device)


def checked_model(path: str) -> ModelVerdict:
    """Return the verdict on the model at `path`, which is made now unless it is kept. Raises
    DataError when there is no model at `path`, and for one that is not computed right."""
    verdict = kept_verdict(path) or checked_again(path)
    if verdict.refusal:
        raise DataError(verdict.refusal)
    return verdict


def checked_again(path: str) -> ModelVerdict:
    """Return the verdict on the model at `path`, made now and kept, a refusal too. Raises DataError
    when there is no model at `path`. Without the plug-in `library` a model is not checked."""
    check_model = optional("hooks", "model_check")
    if check_model is None:
        return ModelVerdict(path)
    require_weights(path)
    verdict: ModelVerdict
    with _model_at(path):
        verdict = check_model(model_files(path))
    resolve("hooks", "keep_verdict")(path, verdict)
    return verdict


def require_weights(path: str) -> None:
    """Have the weights of a model that is kept as a GGUF file written beside it as safetensors,
    where they are not there yet. Raises DataError for a damaged file."""
    folder = Path(path)
    if (folder / GGUF).is_file() and not (folder / WEIGHTS).is_file():
        resolve("hooks", "whole_weights")(folder)


@contextmanager
def _model_at(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"no model at {path!r}: {str(error).splitlines()[0]}; set model.path to a directory "
            "with config.json and *.safetensors, or to a hub id that this machine can reach"
        ) from error


def read_ahead(path: str, dtype: str) -> None:
    """Load a model that our decoder knows on the host, for the next `load_model` of it here and in
    each process that is forked from this one: they share its memory. Other models are left to it,
    and the check to who started this process. Raises DataError as that does."""
    require_weights(path)
    if known_config(path) is not None:
        verdict = kept_verdict(path) or ModelVerdict(path)
        _AHEAD[path, dtype] = load_model(path, dtype, verdict=verdict)


def known_config(path: str) -> DecoderConfig | None:
    """Return the facts of the model in a directory; None for one that our decoder does not know, or
    whose weights are not there as safetensors."""
    directory = Path(path)
    file = directory / "config.json"
    if not file.is_file() or not any((directory / name).is_file() for name in (WEIGHTS, INDEX)):
        return None
    return decoder_config(json.loads(file.read_bytes()))


def flush_denormals() -> None:
    """Make this thread, and those that it starts, treat denormal numbers as 0.

    Attention weights of tokens without attention underflow, and a CPU computes with denormals many
    times slower: a prefill of 16 rows took 178 ms with them, and 112 without. Call it only in
    threads that run models: other code may need denormals.
    """
    torch.set_flush_denormal(True)


class NoTokenizer(DataError):
    """Report that a model's folder or hub id has no tokenizer that can be read here."""


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer beside a model. Raises DataError for one without a chat template, as
    base models are."""
    tokenizer = tokenizer_of(path)
    if not tokenizer.chat_template:
        raise DataError(
            f"the model {Path(path).name} has no chat template ({path}): it is a base model, and "
            "runs, servers and questions need one that chats; take an instruct model, or add "
            "chat_template.jinja to its files"
        )
    return tokenizer


def tokenizer_of(path: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer. AutoTokenizer imports every model's code to choose a class;
    TokenizersBackend, which the files of our own models name, is loaded directly. Raises
    NoTokenizer where there is none."""
    config = Path(path) / "tokenizer_config.json"
    named = json.loads(config.read_text()).get("tokenizer_class") if config.is_file() else ""
    if named == "TokenizersBackend":
        from transformers import TokenizersBackend

        tokenizer: PreTrainedTokenizerBase = TokenizersBackend.from_pretrained(path)
        return tokenizer
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_files(path))
    except (OSError, ValueError) as error:
        is_missing = Path(path).is_absolute() and not Path(path).exists()
        why = "the folder is gone" if is_missing else str(error).splitlines()[0]
        raise NoTokenizer(
            f"no tokenizer at {path!r}: {why}; put the model's files back there, or set model.path "
            "to a directory that has them, or to a hub id that this machine can reach"
        ) from error


def text_of(path: str) -> Callable[[Sequence[int]], str]:
    """Return a function from ids to text without special tokens, by the tokenizer beside a model,
    which is loaded on the first call."""

    tokenizer = cache(partial(tokenizer_of, path))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer().decode(list(ids), skip_special_tokens=True))

    return decode


def text_ids(path: str) -> list[int]:
    """Return the ids that stand for text in the tokenizer beside a model: all but the special
    ones."""
    tokenizer = load_tokenizer(path)
    special = set(special_tokens(tokenizer).values())
    return sorted(i for i in tokenizer.get_vocab().values() if i not in special)


def base_hash(model: LanguageModel) -> str:
    """Return the SHA-256 over every weight, by its name in the files, which proves that the base
    did not change. A sharded or divided base is gathered tensor by tensor: all ranks must call
    this."""
    digest = hashlib.sha256()
    for name, tensor, rows in sorted(model.weights(), key=lambda one: one[0]):
        digest.update(name.encode())
        weight = tensor.detach()
        if model.sharded or model.tensor is not None:
            weight = resolve("hooks", "whole_weight")(name, weight, rows, model)
        else:
            weight = weight[rows]
        # A copy: numpy would pin the memory of a gathered weight, which its owner frees.
        digest.update(weight.clone().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def claim_device(name: str, rank: int = 0) -> torch.device:
    """Return the device that `asked` names, "cpu" or "cuda", and make it this process's current
    one. A rank that sees several GPUs takes the one of its number, modulo their count. Raises
    SpecError where a GPU is requested and torch sees none."""
    if name not in DEVICES:
        raise SpecError(f"a device is one of {DEVICES}: got {name!r}")
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise SpecError(
            f"a GPU is asked for and torch {torch.__version__} sees none: install a torch built "
            "for CUDA, check nvidia-smi and CUDA_VISIBLE_DEVICES, or set the role's gpus to 0"
        )
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)  # the default of FSDP and NCCL
    return device
