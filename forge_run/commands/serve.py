"""Run the generators and the HTTP server: `forge serve meshes/serve.yaml`.

    listen -> generators start -> serve ... SIGTERM or Ctrl-C -> drain -> generators end

No child process outlives this one: those that do not end in time are killed. A second signal ends
the server at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cartridge_forge.forge_run.commands import note
from cartridge_forge.forge_run.forkserver.client import fork_server
from cartridge_forge.forge_run.launch import ENGINE, kill_mesh, prepare_process
from cartridge_forge.forge_run.model_check import check
from cartridge_forge.forge_run.preflight import EMBEDDED, ON_VLLM, Fault, backend_faults, located
from cartridge_forge.plugins.chat.wire.foreign import listen
from cartridge_forge.plugins.cluster.manifests.sizing import model_shape
from cartridge_forge.plugins.serve.spec import (
    RIGHTS,
    ApiKeySpec,
    HttpSpec,
    HubSpec,
    ServeSpec,
    load_serve,
)
from cartridge_forge.plugins.spec_files.errors import SpecProblem, combined
from cartridge_forge.plugins.spec_files.loading import LoadedFile
from cartridge_forge.plugins.statistics.formatting import TableSection, bytes_text, facts, lines
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.secrets import secret_text
from cartridge_forge.protocols.spec.model import VALUE_BYTES, ShapeSpec

if TYPE_CHECKING:
    from cartridge_forge.plugins.decoding.verified.cost import (
        DraftGain,
        MachinePeaks,
        ServedLoad,
    )
    from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo
    from cartridge_forge.plugins.serve.access.keys import ApiKey
    from cartridge_forge.plugins.serve.metrics import ServingMetrics

STOP_SECONDS = 8.0
LAYER_SECONDS = 4e-4  # of a layer's pass on a CPU beyond FLOPs and bytes (studies/verified)
NO_SECRET = "is not in the environment, and the server reads it there"
EVERYTHING = "key_env"  # the name of that key in the audit log


def command(*, mesh: str, sets: Sequence[str], dry_run: bool) -> int | list[TableSection]:
    """Serve and return the exit code; with `dry_run` return the plan. Raises ForgeError."""
    loaded = load_serve(mesh, sets=sets)
    return plan(loaded) if dry_run else serve(loaded)


def serve(loaded: LoadedFile[ServeSpec]) -> int:
    """Serve until a signal. Returns the exit code: 0 after SIGTERM, 130 after Ctrl-C, 1 when the
    generators did not end in time. Raises ForgeError when the server cannot start or its generators
    fail."""
    faults = unmet(loaded)
    if faults:
        raise combined(faults)
    spec = loaded.spec
    if spec.generator.backend == "torch":  # others compute models by themselves
        for line in check(spec.model.path)[1]:
            note(line)
    listening = listen(spec.http.listen, "http.listen")
    # A terminal's Ctrl-C reaches the whole process group. Generators inherit that SIGINT is
    # ignored. Here it is also blocked in every thread, and one thread waits for it: block it
    # before the imports that start threads.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    prepare_process(spec.health)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    shared = spec.generator.backend == "torch"  # on a CPU
    model = (spec.model.path, spec.model.dtype) if shared else None
    with listening, fork_server([ENGINE], model) as ready:
        server = ServeProcess(spec, listening, ready)
        try:
            asyncio.run(server.run())
        finally:
            kill_mesh()
    if server.cut_off:
        return 1
    return 130 if server.signal == signal.SIGINT else 0


def plan(loaded: LoadedFile[ServeSpec]) -> list[TableSection]:
    """Return tables of the model, the limits and the cartridges to serve; starts nothing."""
    from cartridge_forge.plugins.library.formats.base_model import read_base
    from cartridge_forge.plugins.library.store import CartridgeStore

    spec = loaded.spec
    role, http = spec.roles.generator, spec.http
    base = read_base(Path(spec.model.path))
    context = spec.context_tokens or base.context
    named = ([f"the key in {http.key_env}"] if http.key_env else []) + [
        f"{name} ({', '.join(key.rights)})" for name, key in http.keys.items()
    ]
    key = ", ".join(named) or "no key"
    rows = [
        ("model", f"{spec.name}: {spec.model.path}, {spec.model.dtype}"),
        ("shape", f"L {base.layers}, H_kv {base.kv_heads}, D {base.head_dim}, {context} positions"),
        ("generators", f"{role.replicas} x {spec.generator.backend}, {role.threads} threads each"),
        ("listens on", f"http://{http.listen}, {key}"),
        (
            "at a time",
            f"{http.max_pending} sequences and {http.max_pending_tokens} tokens, "
            f"{http.deadline_s:g} s each at most",
        ),
        ("library", spec.library),
        ("verification", _verification(spec, base)),
    ]
    sections = [facts(f"serve {spec.name}", rows)]
    if (gains := gain_table(spec)) is not None:
        sections.append(gains)
    if Path(spec.library).is_dir():
        library = CartridgeStore(Path(spec.library), base)
        entries = tuple((n, ", ".join(map(str, library.versions(n)))) for n in library.names())
        if entries:
            sections.append(TableSection("cartridges", ("name", "versions"), entries))
    if faults := unmet(loaded):
        sections.append(lines("cannot serve here yet", (fault.text for fault in faults)))
    return sections


def _verification(spec: ServeSpec, base: BaseModelInfo) -> str:
    """Return what is configured of it, and how many tokens of documents a generator keeps."""
    verify = spec.verify
    mode = str(verify.mode).lower() if verify.mode else "where a request asks for it"
    if spec.generator.backend != "torch":
        return f"{mode}; documents' KV is in the paged memory (generator.kv_gib)"
    token = 2 * base.layers * base.kv_heads * base.head_dim * VALUE_BYTES[spec.model.dtype]
    return (
        f"{mode}; {bytes_text(verify.max_kv_bytes)} of documents' KV in each generator, "
        f"{bytes_text(token)} a token: {verify.max_kv_bytes // token:,} tokens"
    )


PLANNED = (2_000, 8_000, 32_000)  # tokens of documents
STREAMS = (1, 16, 64)
ACCEPTED = (0.7, 0.9)  # shares of the proposed tokens
PLANNED_CARTRIDGE, PLANNED_OWN = 512, 256  # tokens


def gain_table(spec: ServeSpec) -> TableSection | None:
    """Return how many times as fast as the document alone a drafted answer is by the cost model, on
    this machine and on an H200: streams each over a document of its own. None for a model of
    another shape."""
    from cartridge_forge.plugins.decoding.verified.cost import H200, ServedLoad, best_draft

    shape = _shape_of(spec)
    if shape is None:
        return None
    machine = machine_peaks(shape.layers)
    rows = []
    for document in PLANNED:
        for streams in STREAMS:
            load = ServedLoad(streams, streams, document, PLANNED_CARTRIDGE, PLANNED_OWN)
            gains = [
                best_draft(shape, size, peaks, load, accepted)
                for peaks, size in ((machine, VALUE_BYTES[spec.model.dtype]), (H200, 2))
                for accepted in ACCEPTED
            ]
            cells = [f"{one.gain:.2f}x{'' if one.pays else ', does not pay'}" for one in gains]
            rows.append((f"{document:,}", str(streams), *cells))
    heads = ("document", "streams", *(
        f"{peaks}, {accepted:.0%} accepted" for peaks in (machine.name, H200.name)
        for accepted in ACCEPTED
    ))  # fmt: skip
    title = f"where verify: true pays, cartridges of {PLANNED_CARTRIDGE} tokens"
    return TableSection(title, heads, tuple(rows))


def _shape_of(spec: ServeSpec) -> ShapeSpec | None:
    try:
        return model_shape(spec.model)
    except SpecError:
        return None


def unmet(loaded: LoadedFile[ServeSpec]) -> list[SpecProblem]:
    """Return the reasons why this spec cannot be served on this machine now; empty if it can."""
    return located(_faults(loaded.spec), loaded.place)


def _faults(spec: ServeSpec) -> Iterator[Fault]:
    role, gpus = spec.roles.generator, "roles.generator.gpus"
    if not (Path(spec.model.path) / "config.json").is_file():
        yield "model.path", spec.model.path, "has no config.json", "give a model's directory"
    if role.procs != 1:
        yield "roles.generator.procs", role.procs, "cannot run", "use 1, and more replicas"
    yield from backend_faults(spec.generator.backend)
    if spec.generator.backend != "vllm" and role.gpus:
        yield gpus, role.gpus, EMBEDDED, ON_VLLM
    judge = spec.process_reward and spec.process_reward.judge
    for secret in judge.teacher.secrets if judge else ():
        if not secret_text(secret):
            yield "process_reward.judge.teacher.key_env", secret, NO_SECRET, "export it"
    reward = spec.process_reward and spec.process_reward.model
    if reward and not (Path(reward.path) / "config.json").is_file():
        why = "has no config.json"
        yield "process_reward.model.path", reward.path, why, "give a model's directory"
    if spec.hub and spec.hub.token_env and not secret_text(spec.hub.token_env):
        yield "hub.token_env", spec.hub.token_env, NO_SECRET, "export it, or set it to null"
    if spec.http.key_env and not secret_text(spec.http.key_env):
        yield "http.key_env", spec.http.key_env, NO_SECRET, "export it, or set http.key_env to null"
    for name, key in spec.http.keys.items():
        if not secret_text(key.env):
            yield f"http.keys.{name}.env", key.env, NO_SECRET, "export it, or remove the key"


def api_keys(http: HttpSpec) -> tuple[ApiKey, ...]:
    """Return the keys of a server, read from the environment."""
    from cartridge_forge.plugins.serve.access.keys import ApiKey

    specs = dict(http.keys)
    if http.key_env:
        specs[EVERYTHING] = ApiKeySpec(env=http.key_env, rights=RIGHTS)
    return tuple(ApiKey.of(name, key, secret_text(key.env)) for name, key in specs.items())


def hub_token(hub: HubSpec | None) -> str | None:
    """Return the token that cartridges are fetched with, None for none."""
    return secret_text(hub.token_env) if hub and hub.token_env else None


def draft_gain(spec: ServeSpec) -> Callable[[ServedLoad, float], DraftGain] | None:
    """Return what a draft gains on this machine, whose ceilings are measured at the first call;
    None for a model of another shape than Llama's."""
    from cartridge_forge.plugins.decoding.verified.cost import best_draft

    shape = _shape_of(spec)
    if shape is None:
        return None
    measured = cache(partial(machine_peaks, shape.layers))

    def gain(load: ServedLoad, accepted: float) -> DraftGain:
        return best_draft(shape, VALUE_BYTES[spec.model.dtype], measured(), load, accepted)

    return gain


def machine_peaks(layers: int) -> MachinePeaks:
    """Return the ceilings of this machine's processor for a model of so many layers."""
    from cartridge_forge.forge_run.plan.calibration import host_peaks
    from cartridge_forge.plugins.decoding.verified.cost import MachinePeaks

    peaks = host_peaks()
    return MachinePeaks(peaks.name, peaks.flops, peaks.bandwidth, LAYER_SECONDS * layers)


class ServeProcess:
    """Run one server. `signal` is the signal that ended it; `cut_off` is set when the generators
    did not end in time. `ready` returns once processes can start."""

    def __init__(
        self, spec: ServeSpec, listening: socket.socket, ready: Callable[[], None]
    ) -> None:
        self.spec, self.listening, self._ready = spec, listening, ready
        self.signal = 0
        self.cut_off = False
        self._signalled = asyncio.Event()
        self._web: Any = None
        self._metrics: ServingMetrics | None = None

    async def run(self) -> None:
        """Serve until a signal. Raises ForgeError for generators that do not start or stay up."""
        from cartridge_forge.learning.model.control_tokens import vocabulary_of
        from cartridge_forge.learning.model.loading import load_tokenizer
        from cartridge_forge.plugins.serve.tokenization import Tokenization
        from cartridge_forge.plugins.strategies.judges.opening import opened_judge
        from cartridge_forge.services.mesh import open_generators

        spec = self.spec
        with self._signals():
            tokenizer = await asyncio.to_thread(load_tokenizer, spec.model.path)
            vocabulary = vocabulary_of(Path(spec.model.path))
            texts = Tokenization(tokenizer, spec.tool_calls, vocabulary)
            end_ids = texts.end_ids
            await asyncio.to_thread(self._ready)
            service, pool = await open_generators(
                spec.model, spec.generator, spec.roles.generator, texts.documents, end_ids,
                health=spec.health, spawn_timeout_s=spec.spawn_timeout_s,
                call_timeout_s=spec.http.deadline_s, spares=spec.spares, note=self._note,
                max_kv_bytes=spec.verify.max_kv_bytes,
            )  # fmt: skip
            try:
                if await self._first(service.ready()):
                    service.keep_spares()
                    async with opened_judge(spec.process_reward, f"serve/{spec.name}") as judge:
                        await self._serve(service, pool, texts, end_ids, judge)
            finally:
                try:
                    await asyncio.wait_for(service.stop(), STOP_SECONDS)
                except TimeoutError:
                    self.cut_off = True

    async def _serve(
        self, service: Any, pool: Any, texts: Any, end_ids: frozenset[int], judge: Any
    ) -> None:
        import uvicorn

        from cartridge_forge.plugins.library.formats.base_model import read_base
        from cartridge_forge.plugins.library.store import CartridgeStore
        from cartridge_forge.plugins.serve.access.connections import LimitedServer, limited
        from cartridge_forge.plugins.serve.app import create_server
        from cartridge_forge.plugins.serve.backend import RequestLimits, ServerConfig
        from cartridge_forge.plugins.serve.engine.pool_backend import PoolBackend
        from cartridge_forge.plugins.serve.engine.strategy_runner import CatalogueStrategies

        spec, http = self.spec, self.spec.http
        base = read_base(Path(spec.model.path))
        backend = PoolBackend(pool, http.deadline_s)
        host, port = http.listen.rpartition(":")[0], self.listening.getsockname()[1]
        context = min(base.context, spec.context_tokens or base.context)
        built = create_server(
            ServerConfig(
                model=spec.name, backend=backend, texts=texts,
                library=CartridgeStore(Path(spec.library), base),
                strategies=CatalogueStrategies(backend, texts, judge),
                limits=RequestLimits(spec.max_tokens, context, http.max_choices), end_ids=end_ids,
                http=http, held_cartridges=spec.held_cartridges,
                api_keys=api_keys(http),
                draining=self._signalled.is_set, hub=spec.hub,
                hub_token=hub_token(spec.hub), verify=spec.verify,
                drafts=spec.generator.backend == "torch", draft_gain=draft_gain(spec),
            )
        )  # fmt: skip
        self._metrics = built.handler.metrics
        self._web = LimitedServer(
            uvicorn.Config(
                built.app, log_config=None, access_log=False, lifespan="off", ws="none",
                server_header=False, timeout_graceful_shutdown=round(http.drain_s),
                **limited(http),
            )
        )  # fmt: skip
        self._web.capture_signals = contextlib.nullcontext  # this class handles them
        self.listening.listen()  # who reads the next line may connect at once
        running = asyncio.create_task(self._web.serve(sockets=[self.listening]))
        print(f"serving {spec.name} on http://{host}:{port}; Ctrl-C drains and ends", flush=True)
        try:
            await asyncio.wait(
                {running, service.failure, asyncio.create_task(self._signalled.wait())},
                return_when=asyncio.FIRST_COMPLETED,
            )
            self._web.should_exit = True
            await running
            if service.failure.done():
                service.failure.result()
        finally:
            await built.close()

    def _note(self, event: str, **facts: Any) -> None:
        fields = " ".join(f"{k}={v}" for k, v in facts.items())
        print(f"{event} {fields}", file=sys.stderr, flush=True)
        if event == "replica_lost" and self._metrics is not None:
            self._metrics.replica_lost(facts["cause"])

    async def _first(self, starting: Any) -> bool:
        """Return whether it started before a signal; raises its error if it failed."""
        task = asyncio.ensure_future(starting)
        signalled = asyncio.ensure_future(self._signalled.wait())
        await asyncio.wait({task, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if task.done():
            task.result()
            return not self._signalled.is_set()
        task.cancel()
        await asyncio.wait({task})
        return False

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals: the first drains, the second ends at once."""
        loop = asyncio.get_running_loop()

        def end(number: int) -> None:
            if self.signal and self._web is not None:
                self._web.force_exit = True
            self.signal = self.signal or number
            self._signalled.set()

        def wait() -> None:
            while True:
                signal.sigwait({signal.SIGINT})
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(end, signal.SIGINT)

        threading.Thread(target=wait, daemon=True).start()
        loop.add_signal_handler(signal.SIGTERM, end, signal.SIGTERM)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
