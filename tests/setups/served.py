"""Servers that tests of this folder share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from serving_setup import Served, add_cartridge, serving

ROOT = Path(__file__).resolve().parents[2]

SERVE = str(ROOT / "meshes/serve.yaml")


@contextmanager
def serve_command(directory: Path, *sets: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A server as its command starts it: the process, the server's URL, and the process group that
    a terminal would signal."""
    words = [f"library={directory / 'library'}", "http.listen=127.0.0.1:0", *sets]
    code = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", SERVE, *[w for s in words for w in ("--set", s)]],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        cwd=directory, env={**os.environ, "FORGE_TEST_SERVE": str(directory)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"on (http://\S+);", line):
                break
        else:
            pytest.fail("it did not start")
        yield process, found[1], process.pid
    finally:
        process.kill()
        process.communicate()


def documented_nll(
    client: OpenAI, model: Path = ROOT / "models/clinic-reader"
) -> Callable[[str, str, str], float]:
    """Return the function of docs/how-to/serve.md that reads an answer over HTTP, with the
    tokenizer of `model`."""
    page = (ROOT / "docs" / "how-to" / "serve.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (block,) = [b for b in blocks if "def gold_nll" in b]
    names: dict[str, Any] = {"client": client}
    shown = '"models/clinic-reader"'
    assert shown in block
    exec(block.rpartition("\n\n\n")[0].replace(shown, repr(str(model)), 1), names)
    return names["gold_nll"]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), max_pending=64, keep_alive_s=0.05) as one:
        add_cartridge(one.house.library, "p1", seed=1)
        add_cartridge(one.house.library, "p1", seed=2, tokens=12)
        yield one


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one
