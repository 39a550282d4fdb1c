"""The calculator, Sokoban and code fixing run and learn, from their mesh files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from example_runs import EXAMPLES, counts, ran, ran_whole

from cartridge_forge.plugins.environments.verifiers.worker_process import PYTHON
from cartridge_forge.plugins.replay.fake_provider.server import LoopbackServer
from cartridge_forge.protocols.files import iter_rows

pytestmark = [
    pytest.mark.timeout(3600),  # a busy machine takes long
    pytest.mark.filterwarnings("ignore:Accessing `Tool.inputSchema`"),
]


@contextmanager
def calculator() -> Iterator[Mapping[str, str]]:
    from examples.calculator.server import calculator_app

    with LoopbackServer(calculator_app(), "calculator", ws="websockets-sansio") as server:
        yield {"episodes.environment.url": server.url}


def test_the_calculator_runs_beside_an_environment_that_is_gone(tmp_path: Path) -> None:
    """Two environments: the tools of a live server, and a server that nobody started. The dead
    one's episodes are counted as errors, and the run goes on."""
    with calculator() as live:
        url = live["episodes.environment.url"]
        shared = f"kind: openenv, action: tool, document: {EXAMPLES / 'calculator' / 'rules.txt'}"
        run = ran("calculator", tmp_path, {
            "episodes.environment": "{}",
            "episodes.environments": f"[{{{shared}, name: live, url: '{url}'}}, "
            f"{{{shared}, name: gone, url: 'http://127.0.0.1:9', timeout_s: 5}}]",
            "data.patients": "2",
        })  # fmt: skip
    for row in counts(run):
        assert row["environment/live/count"] == row["environment/gone/count"] == 4
        assert row["environment/gone/errored"] == 4
        assert "environment/gone/reward" not in row
    episodes = list(iter_rows(run.episodes))
    errors = {e["error_kind"] for e in episodes if e["task"]["environment"] == "gone"}
    assert errors == {"environment_died"}
    assert {e["task"]["document"] for e in episodes} == {"live", "gone"}


@pytest.mark.skipif(not PYTHON.exists(), reason="make install-verifiers")
def test_sokoban_runs(tmp_path: Path) -> None:
    run = ran("sokoban", tmp_path, {"episodes.max_turns": "3"})
    assert [row["count"] for row in counts(run)] == [8, 8]
    episodes = list(iter_rows(run.episodes))
    assert all(e["error_kind"] in ("", "no_verdict", "context_full") for e in episodes)
    assert max(len(e["turns"]) for e in episodes) == 3


def risen(name: str, folder: Path, sets: Mapping[str, str]) -> None:
    """The sampled accuracy after training is above the interval of the untrained cartridge's."""
    results = json.loads(ran_whole(name, folder, sets).results.read_bytes())
    before, after = (results["arms"][arm]["sampled"] for arm in ("untrained", "on_policy"))
    assert after["ci95"][0] > before["ci95"][1]


def test_code_fixing_learns(tmp_path: Path) -> None:
    risen("code_fixing", tmp_path, {})


def test_the_calculator_learns(tmp_path: Path) -> None:
    with calculator() as live:
        risen("calculator", tmp_path, live)


@pytest.mark.skipif(not PYTHON.exists(), reason="make install-verifiers")
def test_sokoban_learns(tmp_path: Path) -> None:
    risen("sokoban", tmp_path, {})


def test_code_fixing_runs(tmp_path: Path) -> None:
    run = ran("code_fixing", tmp_path, {})
    assert [row["count"] for row in counts(run)] == [8, 8]
    assert [row["errored"] for row in counts(run)] == [0, 0]
    episodes = list(iter_rows(run.episodes))
    assert {e["task"]["environment"] for e in episodes} == {"code_fixing"}
    assert all(e["reward"] in (0.0, 1.0) for e in episodes)
    said = [t["observation"]["messages"][0]["content"] for e in episodes for t in e["turns"]]
    assert all("f(" in text or text.endswith(".") for text in said)
    assert json.loads(run.results.read_bytes())["status"] == "finished"
