"""What every test may rely on: fast supervision, a fault hook that does not exit, no orphans; and
which tests stay together where they run side by side."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
HELPERS = [ROOT / "tests", *(ROOT / "tests" / name for name in ("fakes", "setups", "scenarios"))]
# Found again in the environment of every process that descends from this session (side by side,
# from this worker of it).
SESSION = f"FORGE_TEST_SESSION={os.getpid()}"

# Set before anything imports Monarch or torch; child processes inherit them.
os.environ.update(
    {
        "FORGE_TEST_SESSION": str(os.getpid()),
        # Actors are defined in test files too, and their processes import those by name.
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT), *map(str, HELPERS), os.environ.get("PYTHONPATH")])
        ),
        # One thread a process: spinning OpenMP workers of several processes starve each other.
        "OMP_NUM_THREADS": os.environ.get("FORGE_TEST_THREADS", "1"),
        # As in a run (forge_run.launch), but polled every 2 s for 5, and with shorter limits.
        "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "2s",
        "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "3s",
        "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "3s",
        "HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "3s",
        "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "5s",
        "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "5s",
        "HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT": "8s",
    }
)
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# jsonschema makes 38 parsers of it at import, a second of work, for formats that no test asks for.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]


# What collection imports stays, and to look for garbage in it was 30% of collection's time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that nothing is left at the interpreter's end


# Of a test that does not say how many. `make test-all` looks for longer (night). The same examples
# in every run of the suite; HYPOTHESIS_PROFILE=many draws others each time.
settings.register_profile("few", max_examples=15, deadline=None, derandomize=True)
settings.register_profile("night", max_examples=120, deadline=None, derandomize=True)
settings.register_profile("many", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "few"))

# Tests of vLLM stay together, for its memory.
OF_VLLM = tuple(
    f"tests/{tier}/{name}.py"
    for tier in ("mesh", "nightly")
    for name in (
        "actors/test_in_process", "actors/test_engine_generator", "actors/test_vllm_generator",
        "actors/test_vllm_plugin", "actors/test_vllm_replica", "services/test_strategies_run",
    )
)  # fmt: skip


# Files that read one finished run, made once for all of them (tests/setups/finished_runs.py).
OF_ONE_RUN = tuple(
    f"tests/{name}.py"
    for name in (
        "mesh/runs/test_object_store", "mesh/runs/test_whole",
        "nightly/runs/resumed/test_interrupted",
        "nightly/runs/test_ranks", "nightly/runs/test_clock", "nightly/runs/test_clock",
    )
)  # fmt: skip


# Files of one long test in parts, which need not stay together.
IN_PARTS = ("tests/nightly/runs/test_sequences.py",)


def group(nodeid: str) -> str:
    """Return what a test stays with under `--dist loadfile`: the tests of vLLM with each other, and
    those that read one finished run; a part with none; else the tests of its file."""
    path = nodeid.partition("::")[0]
    if path in IN_PARTS:
        return nodeid
    return "vllm" if path in OF_VLLM else "one run" if path in OF_ONE_RUN else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist's own for files, over groups. (Its `loadgroup` does not see marks that are set
    in a conftest.)"""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs first: they take longest, and nobody waits for one at the end."""

    def late(item: pytest.Item) -> tuple[bool, bool]:
        return "/runs/" not in item.nodeid.partition("::")[0], group(item.nodeid) != "one run"

    items.sort(key=late)


def living_descendants() -> list[str]:
    """Pid and command line of every process that this session started and that still runs."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.name != str(os.getpid()) and (
                SESSION.encode() in (process / "environ").read_bytes().split(b"\0")
            ):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append(f"{process.name}: {command}")
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


@pytest.fixture(scope="session", autouse=True)
def _no_process_left() -> Iterator[None]:
    """Fail the session if anything it started outlives Monarch's shutdown."""
    yield
    if "monarch.actor" in sys.modules:
        from monarch.actor import shutdown_context

        shutdown_context().get(timeout=30)
    if (
        hazy := sys.modules.get("cartridge_forge.plugins.library.formats.hazyresearch")
    ) is not None:
        hazy.PROCESS.end()  # it waits for the next file until this process ends
    deadline = time.monotonic() + 60
    while (left := living_descendants()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"the tests left processes behind: {left}"


@pytest.fixture(scope="session", autouse=True)
def _faults_end_nothing(_no_process_left: None) -> None:
    """Let a fault that no actor handled pass: Monarch's own hook ends the process.

    One hook for the whole session: a killed process gives several events or none, and a late one
    would find the next test without it.
    """
    import monarch.actor

    monarch.actor.unhandled_fault_hook = lambda failure: None


@pytest.fixture(autouse=True)
def _hook_comes_back(_faults_end_nothing: None) -> Iterator[None]:
    """A service made in this process takes the hook for itself."""
    import monarch.actor

    hook = monarch.actor.unhandled_fault_hook
    yield
    monarch.actor.unhandled_fault_hook = hook
