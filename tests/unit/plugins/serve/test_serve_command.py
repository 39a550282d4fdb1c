"""`forge serve` as a user starts and ends it: nothing of it is left."""

from __future__ import annotations

import json
import math
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from format_setup import checkpoint_of
from pydantic import BaseModel, ValidationError
from rooms.serving.resident_setup import ROUTES

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.learning.checkpoint import write_checkpoint
from cartridge_forge.plugins.chat.wire.anthropic_messages import MessagesRequest
from cartridge_forge.plugins.chat.wire.openai_chat import ChatRequest, CompletionRequest
from cartridge_forge.plugins.chat.wire.openai_responses import ResponsesRequest
from cartridge_forge.plugins.serve.app import Server
from cartridge_forge.plugins.serve.routes.models import cartridge_models
from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.files import library_folder

ROOT = Path(__file__).resolve().parents[4]

SERVE = str(ROOT / "meshes/serve.yaml")


def test_the_plan_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", SERVE, "--dry-run", "--set", f"library={tmp_path}"]
    assert forge([*words, "--set", "http.key_env=FORGE_NO_SUCH_KEY"]) == 0
    said = capsys.readouterr().out
    assert "L 4, H_kv 2, D 32, 4096 positions" in said
    assert "http.key_env: FORGE_NO_SUCH_KEY is not in the environment" in said


def test_cartridges_of_a_run_are_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"names": ["p1", "p2"], "version": 9, "arm": "on_policy", "step": 9}
    parts = {"frozen": torch.ones(2, 4, 2, 2, 1, 32), "trainable": torch.ones(2, 4, 2, 2, 3, 32)}
    (tmp_path / "run/checkpoints").mkdir(parents=True, exist_ok=True)
    write_checkpoint(tmp_path / "run/checkpoints", "version-000009", checkpoint_of(facts, parts), 2)
    words = ["cartridges", "add", str(tmp_path / "run"), "--serve", SERVE]
    words += ["--set", f"library={tmp_path / 'library'}"]
    assert forge(words) == 0
    assert forge([*words, "--name", "p2=ward"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "p1@1: 4 tokens, version-000009",
        "p2@1: 4 tokens, version-000009",
        "ward@1: 4 tokens, version-000009",
    ]
    assert forge([*words, "--name", "p9"]) == 2
    assert "the run has no cartridge p9; it has p1, p2" in capsys.readouterr().err


def run_of(home: Path, name: str, status: str | None, value: float = 1.0) -> None:
    """A run's directory as far as its cartridges go; without a status it still runs."""
    facts = {"names": ["p1"], "version": 9, "arm": "on_policy", "step": 9}
    parts = {"frozen": torch.ones(1, 4, 2, 2, 1, 32), "trainable": torch.ones(1, 4, 2, 2, 3, 32)}
    parts["trainable"] *= value
    (home / name / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_checkpoint(home / name / "checkpoints", "version-000009", checkpoint_of(facts, parts), 2)
    if status:
        (home / name / "results.json").write_text(json.dumps({"status": status}))


def test_finished_runs_are_added_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "runs/ward"
    run_of(home, "20260102T000000Z-a", "finished")
    run_of(home, "20260101T000000Z-b", "finished")
    run_of(home, "20260103T000000Z-c", None)
    run_of(home, "20260104T000000Z-d", "stopped")
    run_of(home, "20260105T000000Z-e", "finished", value=math.nan)
    (home / "latest").symlink_to("20260102T000000Z-a")
    library = tmp_path / "library"
    words = ["cartridges", "sync", str(tmp_path / "runs"), "--serve", SERVE]
    words += ["--set", f"library={library}"]
    assert forge(words) == 0
    said = capsys.readouterr()
    assert said.out == "p1@1: 4 tokens, version-000009\np1@2: 4 tokens, version-000009\n"
    assert "20260105T000000Z-e: layer 0 of the cartridge holds numbers" in said.err
    told = [json.loads((library / f"p1/{i}/manifest.json").read_text()) for i in (1, 2)]
    runs = [manifest["source"]["run"] for manifest in told]
    assert runs == ["20260101T000000Z-b", "20260102T000000Z-a"], "the oldest first"

    shutil.rmtree(library / "p1/1")  # dropped: it does not come back
    (home / "20260103T000000Z-c/results.json").write_text('{"status": "finished"}')
    assert forge(words) == 0
    assert capsys.readouterr().out == "p1@3: 4 tokens, version-000009\n"

    assert forge(["cartridges", "sync", str(tmp_path / "nowhere"), *words[3:]]) == 2
    assert "nowhere; check the path" in capsys.readouterr().err


def test_what_keeps_it_from_starting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for setting, said in (
        ("http.key_env=FORGE_NO_SUCH_KEY", "export it, or set http.key_env to null"),
        ("model.path=/nowhere", "has no config.json"),
        ("roles.generator.gpus=1", "set generator.backend: vllm, the one GPU sampler, or 0"),
        ("http.listen=203.0.113.1:1", "set http.key_env to an environment variable"),
    ):
        assert forge(["serve", SERVE, "--set", setting, "--set", f"library={tmp_path}"]) == 2
        assert said in capsys.readouterr().err


def test_an_address_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert forge(["serve", SERVE, "--set", f"http.listen={address}"]) == 2
    assert f"cannot listen on {address}" in capsys.readouterr().err


def test_every_version_is_a_model_and_the_name_alone_is_the_newest() -> None:
    cartridges = {"p1": [1, 3], "p2": [2]}
    assert cartridge_models("org/base", cartridges) == [
        "org/base+p1", "org/base+p1@3", "org/base+p1@1", "org/base+p2", "org/base+p2@2",
    ]  # fmt: skip
    assert cartridge_models("base", {}) == []


def test_the_schema_names_every_route(door: Server) -> None:
    paths = door.api.openapi()["paths"]
    assert set(ROUTES) < set(paths)
    assert {"/v1/models", "/health", "/ready", "/metrics", "/admin/cartridges/{name}"} < set(paths)
    for route in ROUTES:
        answers = paths[route]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "429", "503", "504"} <= set(answers)


@pytest.mark.parametrize(
    ("request_type", "body"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
        (CompletionRequest, {"prompt": "a"}),
        (ResponsesRequest, {"input": "a"}),
        (MessagesRequest, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ],
)
def test_a_field_that_is_null_is_as_one_that_was_not_sent(
    request_type: type[BaseModel], body: dict[str, Any]
) -> None:
    """Known or not, as clients that send all their fields write them."""
    sent = {"model": "clinic-reader", **body}
    plain = request_type.model_validate(sent)
    nulls = {"prediction": None, "stream": None, "temperature": None, "tools": None}
    assert request_type.model_validate({**sent, **nulls}) == plain
    with pytest.raises(ValidationError, match="prediction"):
        request_type.model_validate({**sent, "prediction": {}})


SHIPPED = str(ROOT / "meshes/serve.yaml")


def test_the_shipped_file_loads_with_local_paths() -> None:
    loaded = load_serve(SHIPPED, sets=["http.max_pending=8", "roles.generator.replicas=1"])
    spec = loaded.spec
    assert (spec.http.max_pending, spec.roles.generator.replicas) == (8, 1)
    assert spec.model.path == str(ROOT / "models/clinic-reader")
    assert spec.library == str(library_folder())
    assert str(loaded.place("http.max_pending")) == "--set http.max_pending=8"
    assert str(loaded.place("library")).endswith("serve.yaml:7")


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["http.listen=0.0.0.0:80"], "set http.key_env to an environment variable with a key"),
        (["http.max_pending=0"], r"max_pending must be >= 1: got 0 at --set .* \(http.max_pend"),
        (["name='a b'"], "name must be letters, digits"),
        (["train.lr=1"], "unknown key train at --set train.lr=1"),
        (["http.port=1"], "unknown key port at --set http.port .*known here: listen"),
        (["http.listen"], "--set takes key.path=value"),
    ],
)
def test_mistakes_name_place_and_remedy(sets: list[str], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        load_serve(SHIPPED, sets=sets)


def test_beyond_loopback_with_a_key_or_on_purpose() -> None:
    for more in ("http.key_env=FORGE_API_KEY", "http.open_to_all=true"):
        spec = load_serve(SHIPPED, sets=["http.listen=0.0.0.0:8000", more]).spec
        assert spec.http.listen == "0.0.0.0:8000"
