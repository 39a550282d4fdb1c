"""vLLM's own server in a process of its own, with our plugin as an installed package has it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import URLError

from cartridge_forge.protocols.files import REPOSITORY


@dataclass(frozen=True)
class StockServer:
    url: str
    process: subprocess.Popen[bytes]
    log: Path


def installed(directory: Path) -> Path:
    """A directory in which Python finds this package's entry points, as pyproject.toml states them:
    the environment may hold a package that was installed before they were."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    place = directory / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (place / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return directory


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def started(
    model: Path, library: Path, directory: Path, *options: str, **transfer: str
) -> StockServer:
    """Start a server of `model`, on loopback, and return without waiting for it."""
    port = free_port()
    config = {
        "kv_connector": "CartridgeLibraryConnector", "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"library": str(library)}, **transfer,
    }  # fmt: skip
    command: Sequence[str] = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",  # what `vllm serve` runs
        "--model", str(model), "--served-model-name", model.name, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--enforce-eager", "--block-size", "32",
        "--kv-cache-memory-bytes", "50000000", "--max-model-len", "1024", "--max-num-seqs", "32",
        "--max-num-batched-tokens", "96", "--kv-transfer-config", json.dumps(config), *options,
    ]  # fmt: skip
    return launched(command, port, directory)


def launched(command: Sequence[str], port: int, directory: Path) -> StockServer:
    """Start the command of a server, whose log is written to `directory`."""
    paths = [str(installed(directory / "site")), os.environ["PYTHONPATH"]]
    programs = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {
        **os.environ, "PATH": os.pathsep.join(programs), "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    log = directory / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    return StockServer(f"http://127.0.0.1:{port}", process, log)


def stop(server: StockServer) -> None:
    """End the server and all its processes."""
    server.process.terminate()
    try:
        server.process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(20)


@contextmanager
def stock_server(
    model: Path, library: Path, directory: Path, *options: str
) -> Iterator[StockServer]:
    """A server that answers; it ends with the block."""
    with answering(started(model, library, directory, *options)) as server:
        yield server


@contextmanager
def exported_server(script: Path, directory: Path, *options: str) -> Iterator[StockServer]:
    """The server of a folder that `forge export --for vllm` wrote, on loopback."""
    port = free_port()
    command = [str(script), "--host", "127.0.0.1", "--port", str(port), *options]
    with answering(launched(command, port, directory)) as server:
        yield server


@contextmanager
def answering(server: StockServer) -> Iterator[StockServer]:
    """Wait until a server answers, as long as its process lives; end it with the block."""
    try:
        while not answers(server.url):
            log = server.log.read_text(errors="replace")[-3000:]
            assert server.process.poll() is None, f"the server ended:\n{log}"
            time.sleep(0.2)
        yield server
    finally:
        stop(server)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (URLError, OSError):
        return False


def refusals(model: Path) -> dict[str, str]:
    """What the plugin says about a server's settings, by name; in a process of its own, because
    vLLM stays in one that imports it."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_server", str(model)], capture_output=True, timeout=300,
        check=True,
    )  # fmt: skip
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _refusals(model: Path) -> dict[str, str]:
    from vllm.engine.arg_utils import EngineArgs

    from cartridge_forge.plugins.vllm.plugin import NAME, refuse_settings, register

    register()
    register()  # vLLM may do so again
    config = EngineArgs(
        model=str(model), dtype="float32", kv_cache_memory_bytes=2**24, enforce_eager=True,
        kv_transfer_config={"kv_connector": NAME, "kv_role": "kv_consumer"},
    ).create_engine_config()  # fmt: skip

    def said(*changes: tuple[Any, str, Any]) -> str:
        with ExitStack() as undone:
            for place, key, value in changes:
                undone.enter_context(patch.object(place, key, value))
            try:
                refuse_settings(config)
            except ValueError as error:
                return str(error)
            return ""

    pipeline = (config.parallel_config, "pipeline_parallel_size", 2)
    found = {
        "none": said(),
        "asynchronous": said((config.scheduler_config, "async_scheduling", True)),
        "pipeline": said(pipeline),
        "context": said((config.parallel_config, "decode_context_parallel_size", 2)),
        "both": said((config.kv_transfer_config, "kv_load_failure_policy", "recompute"), pipeline),
    }
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return found | {"runner": said()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_refusals(Path(sys.argv[1]))) + "\n")
