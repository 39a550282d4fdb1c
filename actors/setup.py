"""What every model-bearing actor is built from, and the first thing its process does."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from protocols.ports import TensorPlane


@dataclass(frozen=True)
class BaseModel:
    """Which frozen model an actor loads, and the documents it may read.

    `documents` maps a document's name to its token ids from position 0 (chat template included);
    `max_kv_bytes` bounds the KV of documents that the actor keeps.
    """

    path: str
    dtype: str
    threads: int
    documents: Mapping[str, tuple[int, ...]]
    max_kv_bytes: int
    plane: TensorPlane


def bootstrap(threads: int) -> Callable[[], None]:
    """A process's first act, before torch is imported: its share of the cores.

    Without it every process that imports torch takes all cores, and spinning OpenMP workers of
    several processes make each other ten times slower; they wait passively instead.
    """

    def prepare() -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        os.environ["TQDM_DISABLE"] = "1"
        logging.getLogger("transformers").setLevel(logging.ERROR)

    return prepare
