"""Score texts with a process reward model, in a process of its own (protocols.limited_process).

    question SEP step 1 SEP ... step n SEP -> tokens of every part and of SEP -> classifier
    token classifier      P(positive) at the last token of the last SEP
    sequence classifier   P(positive) of the text

Every part is tokenised alone and SEP's tokens are put behind it, as TRL's PRMTrainer does, so that
a step's end is always the same tokens.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from cartridge_forge.protocols.errors import DataError

AT_ONCE = 16  # texts of one length in a forward pass


def score(request: Mapping[str, Any], data: bytes) -> list[float]:
    """Return P(positive) of the last step of every text in `data`, a JSON list of texts whose parts
    end with `steps`. Raises DataError for a model that is none, or a text that is too long."""
    torch.set_num_threads(request["threads"])
    model, tokenizer, most = _opened(request["path"], request["positive"])
    rows = [_ids(tokenizer, text, request) for text in json.loads(data)]
    too_long = max(map(len, rows), default=0)
    if most is not None and too_long > most:
        raise DataError(
            f"a question with its steps has {too_long} tokens, and the reward model reads {most}; "
            "lower max_tokens or max_steps"
        )
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        by_length[len(row)].append(i)  # of one length: no padding, which could change a score
    scores = [0.0] * len(rows)
    for places in by_length.values():
        for start in range(0, len(places), AT_ONCE):
            chosen = places[start : start + AT_ONCE]
            values = _positive(model, [rows[i] for i in chosen], request["positive"])
            for i, one in zip(chosen, values.tolist(), strict=True):
                scores[i] = one
    return scores


@torch.no_grad()
def _positive(model: Any, rows: Sequence[Sequence[int]], positive: int) -> Tensor:
    """Return P(positive) of every row, [len(rows)]."""
    logits = model(input_ids=torch.tensor(rows)).logits.float()
    if logits.dim() == 3:
        logits = logits[:, -1]
    if logits.shape[-1] == 1:
        return torch.sigmoid(logits[:, 0])
    return torch.softmax(logits, -1)[:, positive]


def _ids(tokenizer: Any, text: str, request: Mapping[str, Any]) -> list[int]:
    def ids(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False).input_ids)

    separator_ids = ids(request["separator"])
    if not separator_ids:
        raise DataError(
            f"the reward model's tokenizer has no token for separator {request['separator']!r}; "
            "give the one that the model was trained with"
        )
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    parts = text.removesuffix(request["steps"]).split(request["steps"])
    return [*begin, *(token for part in parts for token in (*ids(part), *separator_ids))]


@cache
def _opened(path: str, positive: int) -> tuple[Any, Any, int | None]:
    """Return the model, its tokenizer, and the most tokens that it reads."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        kinds = [str(name) for name in config.architectures or ()]
        if any(name.endswith("ForTokenClassification") for name in kinds):
            kind: Any = AutoModelForTokenClassification
        elif any(name.endswith("ForSequenceClassification") for name in kinds):
            kind = AutoModelForSequenceClassification
        else:
            raise DataError(
                f"{path} is no classifier of tokens or sequences: its config.json has the "
                f"architectures {', '.join(kinds) or 'none'}; give a process reward model"
            )
        model = kind.from_pretrained(
            path, local_files_only=True, use_safetensors=True, torch_dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        if isinstance(error, DataError):
            raise
        message = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"{Path(path)} cannot be read as a reward model: {message}; it is a directory with "
            "config.json, *.safetensors and a tokenizer, and needs no code of its own"
        ) from error
    if config.num_labels > 1 and positive >= config.num_labels:
        raise DataError(
            f"positive is {positive}, and the model in {path} has the labels 0 to "
            f"{config.num_labels - 1}; name the one of a good step"
        )
    return model.eval(), tokenizer, getattr(config, "max_position_embeddings", None)
