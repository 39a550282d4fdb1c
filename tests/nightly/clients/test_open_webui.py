"""Ask a cartridge in Open WebUI itself, by the API of its own pages. It pins versions of its
own and takes 2.4 GB: installed for this test alone, by `make install-open-webui`."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from chart_library import add_chart
from served import serve_command
from tutorial_pages import ROOT

COMMAND = ROOT / ".venv-open-webui/bin/open-webui"
CARTRIDGE = "clinic-reader+patient_01"

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not COMMAND.exists(), reason="2.4 GB: run `make install-open-webui`"),
]


@pytest.fixture(scope="module")
def webui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """Open WebUI over `forge serve`, as the page starts it but without accounts and a network;
    signed in."""
    home = tmp_path_factory.mktemp("home")
    add_chart(home / "library")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serve_command(home, "roles.generator.replicas=1", "spares=0") as (_, url, _):
        variables = {
            "PATH": os.environ["PATH"], "HOME": str(home), "DATA_DIR": str(home / "data"),
            "OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none",
            "ENABLE_OLLAMA_API": "false", "WEBUI_AUTH": "false", "WEBUI_SECRET_KEY": "of this test",
            "HF_HUB_OFFLINE": "1", "OFFLINE_MODE": "true", "RAG_EMBEDDING_ENGINE": "openai",
        }  # fmt: skip
        (home / "data").mkdir()
        with (home / "open-webui.log").open("w") as log:
            process = subprocess.Popen(
                [COMMAND, "serve", "--host", "127.0.0.1", "--port", str(port)],
                cwd=home, env=variables, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
                    sign_in(client, process, home / "open-webui.log")
                    yield client
            finally:
                process.kill()
                process.wait()


def sign_in(client: httpx2.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once it answers, with its token in the client's headers."""
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if client.get("/health").status_code == 200:
                break
        except httpx2.HTTPError:
            time.sleep(1)
    user = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
    client.headers["authorization"] = f"Bearer {user['token']}"


def test_its_list_has_every_cartridge(webui: httpx2.Client) -> None:
    names = [one["id"] for one in webui.get("/api/models").json()["data"]]
    assert names == ["clinic-reader", "auto", CARTRIDGE, f"{CARTRIDGE}@1"]


def test_a_cartridge_answers_in_it(webui: httpx2.Client) -> None:
    body: dict[str, Any] = {
        "model": CARTRIDGE, "stream": False, "temperature": 0, "max_tokens": 16,
        "messages": [{"role": "user", "content": "what is the pharmacy?"}],
    }  # fmt: skip
    reply = webui.post("/api/chat/completions", json=body).json()
    assert reply["choices"][0]["message"]["content"] == " the chart says pharmacy lakeside."
    streamed = webui.post("/api/chat/completions", json={**body, "stream": True}).text
    assert "lakeside" in streamed
    assert streamed.rstrip().endswith("data: [DONE]")
