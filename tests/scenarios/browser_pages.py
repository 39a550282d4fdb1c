"""A browser, axe-core and a served run for tests of pages; or a reason why not."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from fake_run_control import FakeSteering, served
from format_setup import checkpoint_of
from recorded_run import EPISODE, SAID, finish, recorded_run

from cartridge_forge.learning.checkpoint import write_checkpoint
from cartridge_forge.plugins.chat.wire.foreign import listen
from cartridge_forge.plugins.watch.control.endpoints import Endpoints, write_endpoints
from cartridge_forge.plugins.watch.score_text import encoded, encoded_top
from cartridge_forge.plugins.watch.ui import asking
from cartridge_forge.plugins.watch.ui.access import PageAccess
from cartridge_forge.plugins.watch.ui.app import RunPages
from cartridge_forge.plugins.watch.ui.served_runs import ServedRuns
from cartridge_forge.protocols.step import SampleScores
from cartridge_forge.services.run_directory import RunDirectory

AXE = Path(sys.prefix) / "axe" / "package" / "axe.min.js"  # `make install-browser`
TOKEN = "of-the-test"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-dev-shm-usage")  # fmt: skip
WAIT_MS = 60_000


def lacking(reason: str) -> None:
    """Skip the test, unless FORGE_REQUIRE_BROWSER is set, as `make test-all` does where there is
    apt-get and npm."""
    if os.environ.get("FORGE_REQUIRE_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    found = shutil.which("chromium")
    if found is None:
        lacking("chromium is not here: run `make install-browser` where there is apt-get")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def axe() -> str:
    if not AXE.is_file():
        lacking("axe-core is not here: run `make install-browser` where there is npm")
    return AXE.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Pages:
    """Two runs that are served: one that ended, and one that goes on, whose control plane is
    `steering`."""

    address: str
    ended: RunDirectory
    live: RunDirectory
    steering: FakeSteering

    def url(self, page: str, run: RunDirectory, **query: str) -> str:
        more = "".join(f"&{key}={value}" for key, value in query.items())
        return f"{self.address}/{page}?run=tiny/{run.id}{more}&token={TOKEN}"


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    root = tmp_path_factory.mktemp("runs")
    ended, live = recorded_run(root), recorded_run(root, minute=1)
    for run in (ended, live):
        _fill(run)
    finish(ended)
    (live.path / "stacks").mkdir()
    (live.path / "stacks" / "trainer-0.txt").write_text("Thread 1 (idle)\n" + "x" * 300)
    with served(run=live.id) as control, _serving(root) as address:
        write_endpoints(live.path, Endpoints(control.address, None, os.getpid()))
        yield Pages(address, ended, live, control.steering)


def _fill(run: RunDirectory) -> None:
    """Give a run what a longer one has: scored tokens, an episode, two checkpoints."""
    scores = [0.0, 0.05, 0.2, 0.5, 2.0, 40.0, None]
    likely = [[(SAID[i] if i != 4 else 951, -0.1), (2, -2.5), (5, -4.0)] for i in range(6)]
    told = SampleScores(kl=encoded(scores), top=encoded_top(likely))
    run.append_token_scores("on_policy", 2, {"on_policy/2/0": told}, 10_000)
    run.append_episodes([EPISODE])
    for version in (2, 4):
        torch.manual_seed(version)
        write_checkpoint(run.checkpoints, f"version-{version:06d}", _checkpoint(version), keep=2)


def _checkpoint(version: int) -> Any:
    facts = {
        "names": ["patient_01", "patient_02"], "version": version, "arm": "on_policy",
        "step": version,
    }  # fmt: skip
    kv = torch.randn(2, 4, 2, 2, 28, 32)
    return checkpoint_of(facts, {"frozen": kv[..., :1, :], "trainable": kv[..., 1:, :]})


class _serving:
    """Serve the pages of a folder on a thread until the block ends."""

    def __init__(self, root: Path) -> None:
        app = PageAccess(RunPages(ServedRuns(root)).application(), TOKEN, "127.0.0.1", secure=False)
        self._socket = listen("127.0.0.1:0", "--listen")
        self._socket.listen()
        config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(timeout=30)
        self._socket.close()


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer the page's question at once: tests of `forge ask` ask a model."""
    monkeypatch.setattr(asking, "ask", _answer)


def _answer(run: Path, cartridge: str, question: str, most_tokens: int) -> dict[str, Any]:
    one = {"tokens": 7, "prefix_tokens": 28, "seconds": 0.5}
    arms = ("none", "cartridge", "document")
    told = [{"arm": arm, "answer": f"{cartridge}: {arm} <b>x</b>", **one} for arm in arms]
    return {"question": question, "answers": told, "note": None}


def until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
