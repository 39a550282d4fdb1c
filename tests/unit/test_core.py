"""The core imports nothing optional: what must be read to know one step, and what need not be."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

import pytest

from protocols.plugins import CORE, SHIPPED

ROOT = Path(__file__).parents[2]
# The core, as patterns of paths; "!" takes files out again. Once the others lie in plugins/, it is
# the folders of the core.
PATTERNS = (
    "protocols/*", "!protocols/wire/*", "!protocols/records/rsa.py",
    "!protocols/records/evaluation.py", "!protocols/records/gold.py",
    "!protocols/records/intervals.py", "!protocols/limited_process.py",
    "learning/*", "!learning/model/adapter.py", "!learning/model/parity.py",
    "!learning/model/short_config.py", "!learning/losses/grpo.py", "!learning/losses/sdpo.py",
    "!learning/losses/dpo.py", "!learning/losses/advantages.py",
    "!learning/attention_matching.py", "!learning/decoding/grammar.py",
    "!learning/decoding/engine.py", "!learning/model/calibration.py",
    "actors/__init__.py", "actors/base.py", "actors/heartbeat.py", "actors/ports.py",
    "actors/model_actors.py", "actors/trainer.py",
    "services/*", "!services/telemetry/*", "!services/control/*", "!services/tls/*",
    "!services/hosts/*", "services/hosts/__init__.py", "services/hosts/source.py",
    "!services/planes/relay*", "!services/pool/host_relays.py",
    "!services/pool/host_heartbeats.py", "!services/pool/membership.py",
    "!services/stored_runs/*", "!services/run_lease.py", "!services/role_clients/*",
    "training/*.py", "!training/*/*", "!training/routing.py",
    "training/recipes/__init__.py", "training/recipes/base.py", "environments/renderer.py",
)  # fmt: skip
MOST_LOADED, MOST_LINES = 95, 15_000  # of `import training.loop`
OPTIONAL_PACKAGES = (
    "torchstore", "openai", "anthropic", "grpc", "transformers", "kubernetes", "obstore", "sympy",
    "llguidance", "datasets", "pyarrow", "starlette", "uvicorn", "httpx", "vllm", "wandb",
    "tensorboard", "matplotlib", "prometheus_client",
)  # fmt: skip


def is_core(path: str) -> bool:
    """Whether a file, as a path from the root, is of the core."""
    core = False
    for pattern in PATTERNS:
        if fnmatch(path, pattern.removeprefix("!")):
            core = not pattern.startswith("!")
    return core


def rooms() -> list[str]:
    """The packages of the repository that are installed."""
    return sorted(
        path.parent.name
        for path in ROOT.glob("*/__init__.py")
        if path.parent.name not in ("tests", "benchmarks", "examples", "findings")
    )


def core_files() -> list[str]:
    return sorted(
        path
        for room in rooms()
        for file in (ROOT / room).rglob("*.py")
        if is_core(path := file.relative_to(ROOT).as_posix())
    )


def file_of(module: str) -> str | None:
    """The path of one of our modules, None for another's."""
    if not re.fullmatch(r"\w+(\.\w+)*", module):
        return None
    path = ROOT / module.replace(".", "/")
    for found in (path.with_suffix(".py"), path / "__init__.py"):
        if found.is_file():
            return found.relative_to(ROOT).as_posix()
    return None


def imported(source: str) -> Iterator[tuple[int, str]]:
    """The line and module of every import, also inside functions and for type checkers alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            assert node.module is not None
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def named(source: str) -> Iterator[tuple[int, str]]:
    """The line and text of every string that may be a module to import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            yield node.lineno, node.value.partition(":")[0]


def optional_imports(path: str, source: str) -> list[str]:
    """The lines of a file that import one of ours which is not of the core, or name it for an
    import outside the table of plug-ins."""
    by_name = [] if path == "protocols/plugins.py" else named(source)
    return [
        f"{path}:{line} {module}"
        for line, module in chain(imported(source), by_name)
        if (found := file_of(module)) is not None
        and not is_core(found)
        and not found.endswith("/__init__.py")
    ]


def test_the_core_imports_nothing_optional() -> None:
    files = core_files()
    assert "training/loop.py" in files
    assert "learning/step.py" in files
    found = [line for f in files for line in optional_imports(f, (ROOT / f).read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "from learning.losses.grpo import GRPO",
        "import learning.losses.grpo",
        "from learning.losses import grpo",
        "def f():\n    from learning.losses.grpo import GRPO",
        "if TYPE_CHECKING:\n    from learning.losses.grpo import GRPO",
        "import_module('learning.losses.grpo')",
        "PLACE = 'learning.losses.grpo:GRPO'",
    ],
)
def test_an_import_of_something_optional_is_seen(line: str) -> None:
    (found,) = set(optional_imports("learning/step.py", line))
    assert found.startswith("learning/step.py:")
    assert "learning.losses.grpo" in found


def test_no_place_of_the_table_but_the_cores_is_of_the_core() -> None:
    for plugin in SHIPPED:
        for kind, name, place in plugin.entries():
            assert not is_core(file_of(place.partition(":")[0]) or ""), (kind, name)
    for kind, name, place in CORE.entries():
        assert is_core(file_of(place.partition(":")[0]) or ""), (kind, name)


LOADED = """
import json, sys
import {module}
print(json.dumps({{n: m.__file__ for n, m in sys.modules.items() if getattr(m, "__file__", None)}}))
"""


def loaded_by(module: str) -> dict[str, str]:
    """The files of all modules that a fresh process has after this import, by name."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(module=module)],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_the_import_of_the_loop_loads_little() -> None:
    loaded = loaded_by("training.loop")
    of_rooms = set(rooms())
    ours = [Path(file) for name, file in loaded.items() if name.partition(".")[0] in of_rooms]
    assert not [f for f in ours if not is_core(f.relative_to(ROOT).as_posix())]
    lines = sum(len(file.read_text("utf-8").splitlines()) for file in ours)
    assert len(ours) <= MOST_LOADED, sorted(map(str, ours))
    assert lines <= MOST_LINES
    assert not {name.partition(".")[0] for name in loaded} & set(OPTIONAL_PACKAGES)


def test_a_trainer_of_doc_kl_loads_no_other_channel() -> None:
    channels = {"learning.losses.grpo", "learning.losses.sdpo", "learning.losses.dpo"}
    loaded = loaded_by("learning.trainer, learning.losses.objective, learning.losses.doc_kl")
    assert "learning.losses.doc_kl" in loaded
    assert not channels & loaded.keys()
