"""Run the scripts of docs/how-to/clients.md against `forge serve`, each by its own client, and log
a run to the real trackio. `make install-clients` makes the two environments."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from chart_library import add_chart
from served import serve_command
from telemetry_stream import STEPS
from tutorial_pages import ROOT, TutorialBlock, blocks, console_scripts

pytestmark = pytest.mark.timeout(1800)

PAGE = ROOT / "docs/how-to/clients.md"
SHOWN = "http://127.0.0.1:8000"
CLIENTS, LLAMA_INDEX = ROOT / ".venv-clients/bin", ROOT / ".venv-llama-index/bin"
MODEL, QUESTION, PHARMACY = "clinic-reader+patient_01", "what is the pharmacy?", "lakeside"


@dataclass(frozen=True)
class PageServer:
    """Hold a server's URL, its home (FORGE_HOME), what it answers to the page's question, and the
    tokens of its cartridge."""

    url: str
    home: Path
    answer: str
    tokens: int


def test_there_are_pythons_with_the_clients() -> None:
    for folder in (CLIENTS, LLAMA_INDEX):
        assert (folder / "python").exists(), "the clients are not here: run `make install-clients`"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """`forge serve` with one cartridge: the keys and values of the first patient's whole chart."""
    home = tmp_path_factory.mktemp("home")
    tokens = add_chart(home / "library")
    with serve_command(home, "roles.generator.replicas=1", "spares=0") as (_, url, _):
        reply = httpx2.post(
            f"{url}/v1/chat/completions", timeout=600, json={
                "model": MODEL, "temperature": 0, "max_tokens": 16,
                "messages": [{"role": "user", "content": QUESTION}],
            },
        )  # fmt: skip
        answer = reply.json()["choices"][0]["message"]["content"]
        yield PageServer(url, home, answer, tokens)


def block(title: str) -> TutorialBlock:
    (one,) = (one for one in blocks(PAGE.read_text()) if one.title == title)
    return one


def run(python: Path, server: PageServer, folder: Path, title: str, *paths: Path) -> str:
    """Run a script of the page and return what it prints."""
    (folder / title).write_text(block(title).text.replace(SHOWN, server.url))
    path = os.pathsep.join(map(str, (*paths, os.environ["PATH"])))
    ended = subprocess.run(
        [python, title], cwd=folder, text=True, capture_output=True, timeout=1200, check=False,
        env={
            "PATH": path, "HOME": str(folder), "FORGE_HOME": str(server.home),
            "PYTHONPATH": str(ROOT),
        },
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_chart_is_answered(server: PageServer) -> None:
    assert PHARMACY in server.answer


def test_langchain_asks_and_streams(server: PageServer, tmp_path: Path) -> None:
    printed = run(CLIENTS / "python", server, tmp_path, "langchain_ask.py")
    assert printed == f"{server.answer}\n{server.answer}"


def test_llama_index_asks(server: PageServer, tmp_path: Path) -> None:
    printed = run(LLAMA_INDEX / "python", server, tmp_path, "llama_index_ask.py")
    assert printed == f"{server.answer}\n"


def test_llm_asks(server: PageServer, tmp_path: Path) -> None:
    """The page's commands but for pip's."""
    models = block("extra-openai-models.yaml")
    (tmp_path / models.title).write_text(models.text.replace(SHOWN, server.url))  # type: ignore[operator]
    (commands,) = (b.text for b in blocks(PAGE.read_text()) if "llm -m" in b.text)
    words = "\n".join(line for line in commands.splitlines() if not line.startswith("pip "))
    ended = subprocess.run(
        ["bash", "-euc", words], cwd=tmp_path, text=True, capture_output=True, timeout=1200,
        env={"PATH": f"{CLIENTS}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)},
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == server.answer.strip()


def test_the_requests_of_open_webui(server: PageServer) -> None:
    """Its own two, as open_webui/routers/openai.py of 0.12.4 builds them: the models with their
    names, and a streamed answer with the usage at its end."""
    headers = {"Authorization": "Bearer none", "Content-Type": "application/json"}
    listed = httpx2.get(f"{server.url}/v1/models", headers=headers, timeout=600).json()
    assert listed["object"] == "list"
    names = [one["id"] for one in listed["data"]]
    assert names == ["clinic-reader", "auto", MODEL, f"{MODEL}@1"]
    body = {
        "stream": True, "model": MODEL, "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 16,
    }  # fmt: skip
    text, usage = "", None
    with httpx2.stream(
        "POST", f"{server.url}/v1/chat/completions", headers=headers, json=body, timeout=600
    ) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage") or usage
                text += "".join(one["delta"].get("content") or "" for one in chunk["choices"])
    assert text == server.answer
    assert usage is not None
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_the_client_of_mcp_asks(server: PageServer, tmp_path: Path) -> None:
    """The script of the page, whose `forge` is this tree's; without `env` FORGE_HOME is lost."""
    scripts = console_scripts(tmp_path / "scripts")
    printed = run(scripts / "python", server, tmp_path, "mcp_ask.py", scripts).splitlines()
    assert printed[0] == (
        f"cartridge://library/patient_01 patient_01@1: {server.tokens} tokens of clinic-reader"
    )
    assert printed[1].strip() == server.answer.strip()


def test_trackio_keeps_a_run_and_its_continuation(tmp_path: Path) -> None:
    """Both times every row, under one run; its packages are those that the remedy installs."""
    script = Path(__file__).with_name("trackio_run.py")
    code = (
        f"import runpy, site; site.addsitedir({sysconfig.get_path('purelib')!r}); "
        f"runpy.run_path({str(script)!r})"
    )
    ended = subprocess.run(
        [CLIENTS / "python", "-c", code], text=True, capture_output=True, timeout=1200,
        env={
            "PATH": os.environ["PATH"], "HOME": str(tmp_path),
            "TRACKIO_DIR": str(tmp_path / "kept"),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/setups'}",
        },
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    kept: dict[str, Any] = json.loads(ended.stdout)
    assert kept["runs"] == ["run-1"]
    assert kept["config"]["mesh"] == {"name": "small"}
    assert kept["config"]["_Group"] == "small"
    losses = [r["on_policy/loss/doc_kl"] for r in kept["rows"] if "on_policy/loss/doc_kl" in r]
    assert losses == 2 * [2.0 / step for step in range(1, STEPS + 1)]
    steps = [r["offline/step"] for r in kept["rows"] if "offline/seconds/train" in r]
    assert steps == 2 * [1, 2, 3, 4]
    assert [r["step"] for r in kept["rows"]] == list(range(len(kept["rows"])))
    assert [r["on_policy/accuracy/sampled"] for r in kept["rows"]
            if "on_policy/accuracy/sampled" in r] == [0.5, 0.5]  # fmt: skip
