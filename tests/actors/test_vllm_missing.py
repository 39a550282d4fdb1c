"""Where vLLM is not installed everything else imports, and asking for it names the remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from actors.base import ModelSource
from actors.engine_generator import EngineGeneratorActor
from protocols.errors import RunError
from protocols.spec.sections import GeneratorSpec

HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.slow
def test_everything_else_imports_without_it() -> None:
    code = HIDE + (
        "import actors.vllm.draws, actors.engine_thread, actors.vllm.kv_layout\n"
        "import actors.engine_generator\n"
        "import forge_run.cli, forge_run.launch, training.controller\n"
        "import services.mesh, training.training_run\n"
        "assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], check=True)


def test_the_actor_says_which_command_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.engine_generator.missing_vllm", lambda: True)
    monkeypatch.setattr("actors.engine_generator.environment", lambda base: {})
    base = ModelSource("m", "float32", 1, {}, 1, None)  # type: ignore[arg-type]  # no plane
    actor = EngineGeneratorActor(base, frozenset(), 2, GeneratorSpec(backend="vllm"))
    with pytest.raises(RunError, match="not installed: run `make install-vllm`"):
        actor._engine.started.result(60)  # what its `ready` awaits
