"""What every model-bearing actor is built from, and the first thing its process does."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protocols.errors import PlaneError
from protocols.ports import TensorPlane
from protocols.types import TensorRef

if TYPE_CHECKING:  # a process says how many threads it has before torch is imported
    import torch
    from transformers import PreTrainedModel

KEPT_BYTES = 256 * 1024**2
PLACE = "FORGE_RANK_PLACE"  # a process that is one of several ranks finds its place there
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


@dataclass(frozen=True)
class ModelSource:
    """Which frozen model an actor loads, and the documents it may read.

    `documents` maps a document's name to its token ids from position 0 (chat template included);
    `max_kv_bytes` bounds the KV of documents that the actor keeps where the model computes, and
    `host_kv_bytes` what it keeps of them in host memory beside a GPU. `device` is "cpu" or
    "cuda" (`learning.model.device`).
    """

    path: str
    dtype: str
    threads: int
    documents: Mapping[str, tuple[int, ...]]
    max_kv_bytes: int
    plane: TensorPlane
    host_kv_bytes: int = 0
    device: str = "cpu"

    def load(self) -> PreTrainedModel:
        """The model on its device. Raises DataError where there is none, SpecError where a GPU is
        asked for and not there."""
        from learning.model.device import claim_device
        from learning.model.loading import load_model

        return load_model(self.path, self.dtype, claim_device(self.device))


class NoPlane:
    """Where no tensors travel between processes: generators that are served from files."""

    async def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> TensorRef:
        raise PlaneError(f"there is no tensor plane here to put {key} into; pass a file's path")

    async def get(self, packet: TensorRef) -> dict[str, torch.Tensor]:
        raise PlaneError(f"there is no tensor plane here that has {packet.key}; pass a file's path")

    async def delete(self, key: str) -> None:
        raise PlaneError(f"there is no tensor plane here that has {key}")

    async def keys(self, prefix: str = "") -> list[str]:
        return []


@dataclass(frozen=True)
class RankPlace:
    """Which rank of how many a process is, and the file at which they meet, as a URL that
    `learning.model.distributed.join` takes: "" for the only one."""

    rank: int = 0
    world: int = 1
    rendezvous: str = ""

    @classmethod
    def here(cls) -> RankPlace:
        """This process's, as its `bootstrap` left it."""
        told = os.environ.get(PLACE)
        if told is None:
            return cls()
        rank, world, meeting = told.split("/")
        return cls(int(rank), int(world), f"file://{tempfile.gettempdir()}/{meeting}")

    def left(self) -> None:
        """All ranks have met: the file has served."""
        if self.rendezvous:
            Path(self.rendezvous.removeprefix("file://")).unlink(missing_ok=True)


def bootstrap(threads: int, gpus: Sequence[int] = (), world: int = 1) -> Callable[[], None]:
    """A process's first act, before torch is imported: its share of the cores and GPUs.

    Without it every process that imports torch takes all cores, and spinning OpenMP workers of
    several processes make each other ten times slower; they wait passively instead. With `gpus`
    it sees those devices of the host alone; `world` processes that are one replica share them
    evenly, in order, and each knows its `RankPlace`.
    """
    # New with each start: where ranks have met before, others cannot. A file, for torch's TCP
    # store would listen on every interface; gloo's connections stay on this host's own.
    meeting = f"cartridge-forge-ranks-{uuid.uuid4().hex}"

    def prepare() -> None:
        devices = gpus
        if world > 1:
            from monarch.actor import current_rank

            rank = current_rank().rank
            devices = share(gpus, rank, world)
            os.environ[PLACE] = f"{rank}/{world}/{meeting}"
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        os.environ["TQDM_DISABLE"] = "1"
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(named(devices))
        logging.getLogger("transformers").setLevel(logging.ERROR)
        keep_freed_memory()

    return prepare


def named(devices: Sequence[int]) -> list[str]:
    """What CUDA calls these devices, by number among those that this process was left itself: of
    "4,7" number 1 is "7"."""
    left = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [left[i] if i < len(left) else str(i) for i in devices]


def share(gpus: Sequence[int], rank: int, world: int) -> Sequence[int]:
    """One rank's of the devices of all: of (4, 5, 6, 7) rank 1 of 2 has (6, 7)."""
    each = len(gpus) // world
    return gpus[rank * each : (rank + 1) * each]


def keep_freed_memory() -> None:
    """Let this process keep up to KEPT_BYTES that it freed, instead of giving them back at once.

    A forward pass frees and takes again the same megabytes layer by layer; glibc returns them each
    time, and the page faults of taking them again made half of a long prefill here (docs/log.md).
    Other C libraries are left as they are.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)


def warm_up(path: str, dtype: str) -> None:
    """What takes a model-bearing actor seconds to start, done beforehand: its imports, which
    loading the model completes (transformers imports a model's code when it is first asked for).
    """
    # Thousands of modules stay, and the collector would look through them all again and again: a
    # sixth of the time.
    gc.disable()
    try:
        from learning.model.loading import load_model

        load_model(path, dtype)
    finally:
        gc.enable()


def fresh_key(stem: str) -> str:
    """A key of the tensor plane that nobody else has, not even who was asked the same before and
    died of it. Keys decide nothing, so their suffix need not come from a seeded generator."""
    return f"{stem}/{uuid.uuid4().hex[:12]}"


def gpus_here() -> int:
    """How many GPUs torch sees on this machine. Imports torch: for who wants one."""
    import torch

    return torch.cuda.device_count()


VLLM_REMEDY = (
    "run `make install-vllm` (CPU), or `pip install vllm==0.32.0` where there are NVIDIA GPUs"
)


def missing_vllm() -> bool:
    """Whether vLLM is not installed here; imports nothing."""
    return importlib.util.find_spec("vllm") is None
