"""Files that several hosts must see alike."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cartridge_forge.actors.heartbeat import digest
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.pool.process import same_files


def process(seen: dict[str, tuple[str, bool]], local: bool = False) -> Any:
    async def look(paths: tuple[str, ...]) -> dict[str, tuple[str, bool]]:
        return {path: seen[path] for path in paths}

    heartbeat = SimpleNamespace(look=SimpleNamespace(call_one=look))
    return SimpleNamespace(host="w1", local=local, heartbeat=heartbeat)


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text("mesh: {}\n")
    return str(path)


def check(spec: str, theirs: tuple[str, bool], *, written: bool, local: bool = False) -> None:
    read, write = ([], [spec]) if written else ([spec], [])
    asyncio.run(
        same_files(process({spec: theirs}, local), role="trainer", read=read, writable_paths=write)
    )


def test_the_same_file_passes(spec: str) -> None:
    check(spec, (digest(Path(spec)), True), written=True)
    check(spec, (digest(Path(spec)), False), written=False)


@pytest.mark.parametrize(("theirs", "what"), [("", "is not there"), ("0" * 64, "is another file")])
def test_a_run_directory_that_is_not_shared_is_named(spec: str, theirs: str, what: str) -> None:
    with pytest.raises(RunError) as error:
        check(spec, (theirs, True), written=True)
    assert str(error.value) == (
        f"on w1, {spec} {what}, and trainer needs it; mount the same file system at "
        f"{Path(spec).parent} on this host and on every one that may run trainer"
    )


def test_a_model_that_is_missing_is_named(spec: str) -> None:
    with pytest.raises(RunError, match=r"have the same model at .* on every host"):
        check(spec, ("", False), written=False)


def test_a_run_directory_that_is_read_only_there(spec: str) -> None:
    with pytest.raises(RunError, match="on w1, trainer may not write to"):
        check(spec, (digest(Path(spec)), False), written=True)


def test_processes_of_this_host_are_not_asked(spec: str) -> None:
    check(spec, ("", False), written=True, local=True)
