"""Implement the tensor plane over TorchStore, in the only module that imports it.

    a process            the storage process, on the caller's mesh
    TorchStorePlane ---> controller (keys)
                    ---> storage volume (bytes)

`start` puts the controller, an actor that knows which keys exist, and one storage volume on a mesh
that the caller owns. A plane pickled into an actor takes the controller's handle with it.
TorchStore's own `initialize` spawns the controller in the root client's process, which then imports
torch (150 MB) and answers two calls for every tensor.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import logging
import os
import select
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

# Before torchstore is imported, in every process: where this is unset, importing it sets it *and*
# takes over the root logger (level INFO, a handler on stdout). The value is torchstore's own.
os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240")

import torch
from monarch._src.actor.actor_mesh import ActorMesh
from monarch.actor import Actor, ProcMesh, endpoint
from monarch.rdma import is_ibverbs_available

from cartridge_forge.protocols.errors import PlaneError
from cartridge_forge.protocols.packages import install_command
from cartridge_forge.protocols.step import TensorRef, check_key
from cartridge_forge.services.awake_clock import keep_awake_time
from cartridge_forge.services.planes.codec import missing_key, pack, unpack
from cartridge_forge.services.proc_info import began

try:
    from torchstore.client import LocalClient
    from torchstore.controller import Controller, ObjectType, StorageInfo
    from torchstore.storage_volume import StorageVolume
    from torchstore.strategy import TorchStoreStrategy
    from torchstore.transport.buffers import TransportBuffer
    from torchstore.transport.pipe import Pipe, Request
except ModuleNotFoundError as error:
    raise PlaneError(
        f"the torchstore plane needs a package that is not installed ({error}): run "
        f"`{install_command(str(error.name))}`, or choose the shared_memory plane"
    ) from error

# Without InfiniBand, 0.1.2 still asks Monarch for RDMA on every operation, by a function whose
# deprecation warning is an error under `-W error`, and then sends the tensor in the message. The
# variable selects that transport directly, the only one that it has on such machines.
os.environ.setdefault("TORCHSTORE_RDMA_ENABLED", "1" if is_ibverbs_available() else "0")

# TorchStore's main branch logs the transport of every transfer.
logging.getLogger("torchstore").setLevel(logging.WARNING)

# The storage process imports torch before it answers: seconds, on busy cores many.
START_TIMEOUT_S = 300.0

# Keys deleted between two returns of the store's free memory: what messages leave between the
# values in its heap grew by 1% of the bytes that passed. A return takes 1-6 ms.
TRIM_EVERY = 64

TAKEN = "the key has a writer"

T = TypeVar("T")


def _as_async(method: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    call.__name__ = method.__name__
    call.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]  # Monarch reads it
    return call


def _sync_endpoints(actor: type) -> dict[str, Any]:
    """Return async versions of the endpoints of `actor` that are plain functions.

    TorchStore 0.1.2 mixes both kinds in its controller (get_controller_strategy, keys,
    locate_volumes, notify_delete and notify_put are plain), which newer Monarch refuses at spawn.
    On TorchStore's main branch all are async, and this returns none. Remove it, with `_as_async`
    and the loop below, once a release has that.
    """
    methods = {name: getattr(value, "_method", None) for name, value in vars(actor).items()}
    return {
        name: endpoint(_as_async(method))
        for name, method in methods.items()
        if method is not None and not inspect.iscoroutinefunction(method)
    }


_volumes: list[StorageVolume] = []  # of this process: none, or one


class StoreWatch:
    """Bound waits for the store in process `pid`, which began as `services.proc_info.began` tells.
    The process of another host is not watched."""

    def __init__(self, pid: int, began: str) -> None:
        self._pid, self._began = pid, began
        self._opened = False
        self._descriptor: int | None = None
        self._waits: dict[asyncio.AbstractEventLoop, set[asyncio.Timeout]] = {}
        self._ended = False

    def __reduce__(self) -> tuple[type[StoreWatch], tuple[int, str]]:
        return StoreWatch, (self._pid, self._began)

    @property
    def ended(self) -> bool:
        """Return whether the store's process is known to have ended."""
        if not self._ended and self._descriptor is not None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            self._ended = bool(poll.poll(0))
        return self._ended

    @contextlib.asynccontextmanager
    async def bounded(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError in the body after `seconds`, or at once when the store has ended."""
        if not self._opened:  # the process, where it is of this host
            self._opened = True
            ticks, _, host = self._began.partition("/")
            if began(self._pid).partition("/")[2] == host:
                with contextlib.suppress(ProcessLookupError):
                    self._descriptor = os.pidfd_open(self._pid)
                    weakref.finalize(self, os.close, self._descriptor)
                # Looked at once it is open: another process may have its id by now.
                lost = began(self._pid).partition("/")[0] != ticks
                self._ended = self._descriptor is None or lost
        loop = asyncio.get_running_loop()
        keep_awake_time(loop)
        async with asyncio.timeout(0 if self.ended else seconds) as limit:
            waits = self._waits.setdefault(loop, set())
            if not waits and self._descriptor is not None and not self.ended:
                loop.add_reader(self._descriptor, self._see, loop)
            waits.add(limit)
            try:
                yield
            finally:
                waits.discard(limit)
                if not waits:
                    del self._waits[loop]
                    if self._descriptor is not None:
                        loop.remove_reader(self._descriptor)

    def _see(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._descriptor is not None
        self._ended = True
        loop.remove_reader(self._descriptor)  # it stays readable
        for limit in self._waits[loop]:
            if not limit.expired():  # its body has yet to notice that it ran out
                limit.reschedule(loop.time())


class HostedVolume(StorageVolume):
    """Let the controller in the same process reach the volume without a message, which would copy
    the values twice."""

    def __init__(self, id_func: Callable[[], str]) -> None:
        super().__init__(id_func)
        _volumes[:] = [self]


class StoreController(Controller):
    """Extend TorchStore's controller so that each key has one writer, whose value it has the volume
    store before it lists it. TorchStore's own client makes a call for each of the three."""

    def __init__(self) -> None:
        super().__init__()
        self._claimed: set[str] = set()
        self._discarded = 0

    @endpoint
    async def put(self, key: str, buffer: TransportBuffer, request: Request) -> None:
        """Store what the buffer carries. Raises KeyError where a put of the key has begun before,
        also one that failed, until the key is discarded."""
        self.assert_initialized()
        if key in self._claimed:
            raise KeyError(f"{TAKEN}: {key}")
        self._claimed.add(key)
        await _volumes[0].store.put(key, buffer, request)
        volume = OneVolume.get_volume_id()
        self.keys_to_storage_volumes[key] = {
            volume: StorageInfo(ObjectType.from_request(request), {request.tensor_slice})
        }

    @endpoint
    async def discard(self, keys: Sequence[str]) -> list[str]:
        """Delete the keys with their bytes, then free them for new writers. Return those that have
        no bytes, as after a put that failed half-way.

        TorchStore's own client makes three calls for each key, and its caller waits for each.
        """
        self.assert_initialized()
        stored = [key for key in keys if key in self.keys_to_storage_volumes]
        try:
            await asyncio.gather(*map(self._discard, stored))
        finally:
            self._claimed.difference_update(keys)
            self._discarded += len(keys)
        if self._discarded >= TRIM_EVERY:
            self._discarded = 0
            _call_libc("malloc_trim", 0)
        return sorted({*keys} - {*stored})

    async def _discard(self, key: str) -> None:
        # Unlisted first: a reader is told that the key is missing, and not that its bytes are.
        del self.keys_to_storage_volumes[key]
        await _volumes[0].store.delete(key)


for _name, _endpoint in _sync_endpoints(Controller).items():
    setattr(StoreController, _name, _endpoint)


class TensorClient(LocalClient):
    """Read and write values that are all whole tensors of the one volume, which says itself which
    keys it has not. TorchStore's own client asks its controller twice for each that it reads: what
    kind of value it is, and where it is."""

    async def put(self, key: str, value: torch.Tensor) -> None:
        volume: Any = SimpleNamespace(put=self._controller.put)
        await Pipe(volume).put_to_storage_volume(key, Request.from_any(value))

    async def _get_stored_object_type(self, key: str) -> ObjectType:
        return ObjectType.TENSOR

    async def _locate_volumes(self, key: str) -> dict[str, None]:
        return {OneVolume.get_volume_id(): None}


class OneVolume(TorchStoreStrategy):
    """Make every process use the one storage volume. (The released and main branches each have such
    a strategy, under different names; main's ignores the mesh.)"""

    @classmethod
    def get_volume_id(cls) -> str:
        return "0"

    @classmethod
    def get_client_id(cls) -> str:
        return "0"


class VolumeProcess(Actor):
    """Prepare a process to hold a storage volume. Importing this module in it is half of that."""

    @endpoint
    async def prepare(self) -> StoreWatch:
        """Make glibc return every freed block above 256 KB to the system at once, and return what
        notices the end of this process.

        Its threshold otherwise adapts upwards and the heaps of Monarch's threads fragment: with
        four writers of 1 MB this process grew by 110 MB in 1,000 publishes, and continued to grow.
        Not for processes that compute: torch is faster with the default.
        """
        m_mmap_threshold = -3  # malloc.h
        _call_libc("mallopt", m_mmap_threshold, 256 * 1024)
        return StoreWatch(os.getpid(), began(os.getpid()))


def _call_libc(function: str, *arguments: int) -> None:
    """Call a function of the C library's allocator, if it has that function (glibc)."""
    symbol = getattr(ctypes.CDLL(None), function, None)
    if symbol is not None:
        symbol(*arguments)


class HeapTrimmer:
    """Return freed heap to the system once `every_bytes` have passed through this process.

    Messages fragment the heap: a reader grew by 110 MB in 2,400 gets of 1 MB. A trim takes 1-6 ms,
    against about 600 ms for the transfers between two trims.
    """

    def __init__(self, every_bytes: int) -> None:
        self.every_bytes = every_bytes
        self._passed = 0

    def passed(self, size: int) -> None:
        self._passed += size
        if self._passed >= self.every_bytes:
            self._passed = 0
            _call_libc("malloc_trim", 0)


_trimmer = HeapTrimmer(64 << 20)


def _handle(actors: Any) -> Any:
    """Return the actors' handle without their process mesh. With it the handle could not be pickled
    any more once that mesh is stopped, and a replica that starts before the next store would fail.
    """
    return ActorMesh(actors._class, actors._mesh_name, actors._inner, actors._shape, proc_mesh=None)


class TorchStorePlane:
    """Implement `protocols.ports.TensorPlane` over the store whose controller is given.

    Every call has `timeout_s` seconds; PlaneError names the operation and the key.
    """

    def __init__(
        self, controller: Any, timeout_s: float = 60.0, watch: StoreWatch | None = None
    ) -> None:
        self.timeout_s = timeout_s
        self._controller, self._watch = controller, watch
        self._client: Any = None  # TorchStore's, made once per process

    def __reduce__(self) -> tuple[type[TorchStorePlane], tuple[Any, float, StoreWatch | None]]:
        return TorchStorePlane, (self._controller, self.timeout_s, self._watch)

    @classmethod
    async def start(cls, mesh: ProcMesh, timeout_s: float = 60.0) -> TorchStorePlane:
        """Return a plane over a new store on `mesh` (one process, which the caller spawns and
        stops). Callable from the root client or any actor. Raises PlaneError on failure."""
        strategy = OneVolume()
        plane = cls(_handle(mesh.spawn("controller", StoreController)), timeout_s)

        async def initialize() -> None:
            process = mesh.spawn("prepare", VolumeProcess)
            plane._watch = await process.prepare.call_one()
            volumes = await HostedVolume.spawn(1, mesh, id_func=strategy.get_volume_id)
            await plane._controller.init.call(
                strategy=strategy, num_storage_volumes=1, storage_volumes=volumes
            )

        limit = max(timeout_s, START_TIMEOUT_S)
        await plane._bounded("start", "the store", initialize(), limit)
        return plane

    async def stop(self) -> None:
        """Delete every key and free its memory. Later calls, in any process, raise PlaneError."""
        await self._bounded("stop", "the store", self._controller.teardown.call())
        self._client = None

    async def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> TensorRef:
        """Store a snapshot of the tensors, taken before the first await.

        Raises PlaneError if the key exists. A failed put keeps its key, because its data may still
        arrive: no second writer gets the key before `delete`.
        """
        check_key(key)
        buffer, layout = pack(tensors)

        async def put() -> None:
            await (await self._storage()).put(key, buffer)
            _trimmer.passed(buffer.numel())

        await self._bounded("put", key, put())
        return TensorRef(key, layout)

    async def get(self, packet: TensorRef) -> dict[str, torch.Tensor]:
        """Return the ref's tensors. Raises PlaneError for a missing key or another layout."""
        check_key(packet.key)

        async def get() -> torch.Tensor:
            try:
                buffer: torch.Tensor = await (await self._storage()).get(packet.key)
            except Exception:
                await self._controller.locate_volumes.call_one(packet.key)  # knows why
                raise
            _trimmer.passed(buffer.numel())
            return buffer

        return unpack(await self._bounded("get", packet.key, get()), packet.layout)

    async def delete(self, *keys: str) -> None:
        """Delete the keys and free their memory. Raises PlaneError for those that are missing."""
        for key in keys:
            check_key(key)

        async def delete() -> list[str]:
            missing: list[str] = await self._controller.discard.choose(keys)
            return missing

        if missing := await self._bounded("delete", ", ".join(keys), delete()):
            raise PlaneError(missing_key("delete", *missing))

    async def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with `prefix`, sorted."""

        async def keys() -> list[str]:
            names: list[str] = await (await self._storage()).keys()
            return names

        # Filtered here: TorchStore's own prefix matches whole dot-separated parts only.
        everything = await self._bounded("keys", prefix, keys())
        return sorted(key for key in everything if key.startswith(prefix))

    async def _storage(self) -> Any:
        """Return this process's client of the store."""
        if self._client is None:
            strategy = await self._controller.get_controller_strategy.call_one()
            self._client = TensorClient(self._controller, strategy)
        return self._client

    async def _bounded(
        self, operation: str, key: str, work: Coroutine[Any, Any, T], limit: float | None = None
    ) -> T:
        """Return the result of `work` within the timeout. Raises PlaneError for every failure."""
        limit = limit or self.timeout_s
        watch = self._watch
        try:
            if watch is None:
                return await asyncio.wait_for(work, limit)
            async with watch.bounded(limit):
                return await work
        except Exception as error:  # Monarch, TorchStore and remote code raise any type
            # Monarch's own report of a process that has ended names no store, and may come first.
            if watch is not None and watch.ended:
                raise PlaneError(
                    f"{operation} of {key!r} failed: the store's process has ended"
                ) from error
            if isinstance(error, TimeoutError):
                raise PlaneError(
                    f"{operation} of {key!r} took longer than {limit:g} s; is the storage "
                    "process alive? Raise timeout_s if it is only slow"
                ) from error
            if TAKEN in str(error):
                raise PlaneError(
                    f"{operation}: key {key!r} exists; versions are never overwritten"
                ) from error
            if "Unable to locate" in str(error):
                raise PlaneError(missing_key(operation, key)) from error
            if "torchstore.initialize" in str(error):  # assertion of a stopped controller
                raise PlaneError(f"{operation} of {key!r}: the plane has been stopped") from error
            raise PlaneError(f"{operation} of {key!r} failed: {_last_line(error)}") from error


def _last_line(error: Exception) -> str:
    """Return an error's message without the remote traceback that Monarch puts before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300] if lines else 'no message'}"


async def open_plane(mesh: ProcMesh | None, timeout_s: float) -> TorchStorePlane:
    """Start the plane on the `mesh` of the store's process. Raises PlaneError."""
    assert mesh is not None, "the torchstore plane needs a mesh for its storage process"
    return await TorchStorePlane.start(mesh, timeout_s)
