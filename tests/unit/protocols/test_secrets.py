"""Secrets are named, read late, hidden in errors, and kept from processes that need none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cartridge_forge.forge_run.cli import forge_run
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.secrets import IN_ADDRESS, confined, read_secret, redacted

SECRET = "sk-live-51Hx9c"
MESH = "meshes/three_channels.yaml"
TEACHER = (
    "{name: a, provider: openai, model: m, base_url: 'https://x.org', prices: {input: 1.0, "
    "output: 1.0}, %s}"
)


def overlay(path: Path, text: str) -> str:
    (path / "over.yaml").write_text(text)
    return str(path / "over.yaml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"headerz: {{X-Key: {SECRET}}}", "did you mean headers?"),
        (f"headers: {{X-Key: {SECRET}}}", "must be the name of an environment variable"),
        (f"headers: {SECRET}", "headers is refused"),
        (f"headers: [{SECRET}]", "headers is refused"),
        (f"key_env: {SECRET}", "must be the name of an environment variable"),
        (f"key_env: [{SECRET}]", "key_env must be text: got a value that is not shown"),
        (f"key: {SECRET}", "unknown key key"),
        (f"base_url: 'https://me:{SECRET}@x.org'", "must hold no user, password or query"),
        (f"base_url: 'https://x.org?key={SECRET}'", "must hold no user, password or query"),
    ],
)
def test_no_error_of_a_teacher_shows_what_was_written(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = TEACHER % text
    if "base_url" in text:
        written = written.replace("base_url: 'https://x.org', ", "")
    over = overlay(tmp_path, f"replay: {{teachers: [{written}], quorum: 1}}\n")
    assert forge_run([MESH, "--config", over, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert SECRET not in said


@pytest.mark.parametrize(
    "override",
    [
        f"replay.teachers=[{SECRET}]",
        f"replay={SECRET}",
        f"replay.key={SECRET}",
        f"telemetry.wandb={SECRET}",
        f"telemetry.otlp.headers={{authorization: {SECRET}}}",
        f"environment.headers={{authorization: {SECRET}}}",
        f"judge={{model: {SECRET}}}",
        f"control.token_env={SECRET}",
        f"control={SECRET}",
        f"replay.teachers=[{{key_env: {SECRET}}}]",
    ],
)
def test_no_error_of_an_override_shows_its_value(override: str) -> None:
    with pytest.raises(SpecError) as raised:
        load_spec(MESH, sets=[override])
    seen: BaseException | None = raised.value
    while seen is not None:
        assert SECRET not in f"{seen} {seen!r}"
        seen = seen.__cause__ or seen.__context__


def test_a_resolved_spec_holds_names_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_KEY", SECRET)
    (tmp_path / "key").write_text(f"{SECRET}\n")
    named = f"headers: {{X-Team: TEAM_KEY}}, key_env: 'file:{tmp_path}/key'"
    over = overlay(tmp_path, f"replay: {{teachers: [{TEACHER % named}], quorum: 1}}\n")
    spec = load_spec(MESH, overlays=[over]).spec
    assert spec.learn.replay is not None
    (teacher,) = spec.learn.replay.teachers
    assert teacher.secrets == (f"file:{tmp_path}/key", "TEAM_KEY")
    text = dump_yaml(spec.as_dict())
    assert "TEAM_KEY" in text
    assert SECRET not in text
    for name in teacher.secrets:
        read = read_secret("teacher a", name, "its API key")
        assert read.get_secret_value() == SECRET
        assert SECRET not in f"{read} {read!r} {vars(spec)}"
    assert redacted(f"401 for {SECRET}") == "401 for [secret]"


def test_a_missing_secret_names_its_place(tmp_path: Path) -> None:
    message = r"x: the environment variable NO_SUCH must hold a key, got none; export it"
    with pytest.raises(SpecError, match=message):
        read_secret("x", "NO_SUCH", "a key")
    with pytest.raises(SpecError, match="the file /nowhere/key must hold a key, got none; write"):
        read_secret("x", "file:/nowhere/key", "a key")


def test_a_process_gets_ordinary_variables_and_those_it_needs() -> None:
    given = {
        "PATH": "/bin", "OMP_NUM_THREADS": "2", "HYPERACTOR_TLS_KEY": "/tls.key",
        "TOKENIZERS_PARALLELISM": "false", "https_proxy": "http://proxy:3128",
        "OPENAI_API_KEY": "a", "HF_TOKEN": "b", "FORGE_CONTROL_TOKEN": "c", "MY_DATABASE": "d",
        "AWS_SECRET_ACCESS_KEY": "e", "HTTPS_PROXY": "http://me:pw@proxy:3128",
        "SSH_AUTH_SOCK": "/ssh", "WANDB_API_KEY": "f", "FORGE_CHAT_API_KEY": "g",
    }  # fmt: skip
    plain = {k: given[k] for k in list(given)[:5]}
    assert confined(given) == plain
    assert confined(given, ["OPENAI_API_KEY", "ABSENT"]) == {**plain, "OPENAI_API_KEY": "a"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("lr: got 'sk-proj-0123456789abcdef01' here", "lr: got '[secret]' here"),
        ("hf_0123456789abcdefghij", "[secret]"),
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer [secret]"),
        ("https://me:hunter2@x.org/a", "https://me:[secret]@x.org/a"),
        # No secrets: ports of two addresses, a hash, words that begin alike.
        ("tcp://w2:26600@tcp://0.0.0.0:26600", "tcp://w2:26600@tcp://0.0.0.0:26600"),
        ("9f86d081884c7d659a2feaa0c55ad015", "9f86d081884c7d659a2feaa0c55ad015"),
        ("sk-short, hf_model, a basic question", "sk-short, hf_model, a basic question"),
    ],
)
def test_a_secret_is_known_by_its_form(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_an_address_with_a_password_is_refused_wherever_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert IN_ADDRESS.search(f"https://me:{SECRET}@x.org/questions.json")
    assert not IN_ADDRESS.search("http://127.0.0.1:8000/questions.json")
    assert forge_run([MESH, "--dry-run", "--set", f"data.path=https://me:{SECRET}@x.org/a"]) == 2
    said = capsys.readouterr().err
    assert "path must be an address without a password: got a value that is not shown" in said
    assert SECRET not in said
