"""`forge convert`, `forge inspect` and `forge cartridges`: what they print, write and refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_hub import TOKEN, fake_hub
from rooms.forge_run.cartridges_setup import REPOSITORY

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.plugins.library.formats import forge as ours


def test_push_and_pull_from_the_command_line(
    run: Path, library: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In processes of their own, with the hub and the token from the environment alone."""
    forge(["cartridges", "add", str(run), *library])
    with fake_hub() as hub:
        environment = {
            "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin",
        }  # fmt: skip
        code = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"

        def said(*words: str) -> str:
            done = subprocess.run(
                [sys.executable, "-c", code, "cartridges", *words, *library], check=False,
                env=environment, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert TOKEN not in done.stdout + done.stderr
            return done.stdout

        assert said("push", "p2", "me/p2").startswith(f"p2@1: {hub.url}/me/p2/commit/")
        oid = hub.repos["me/p2"].commits[0][0]
        assert said("pull", "me/p2", "--name", "mine") == f"mine@1: 16 tokens, {oid}\n"
    folder = tmp_path / "library"
    assert torch.equal(ours.read(folder / "mine/1").kv, ours.read(folder / "p2/1").kv)
