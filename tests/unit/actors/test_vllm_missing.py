"""Where vLLM is not installed everything else imports, and asking for it names the remedy."""

from __future__ import annotations

import pytest

from cartridge_forge.actors.base import ModelSource
from cartridge_forge.actors.engine_generator import EngineGeneratorActor
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.spec.sections import GeneratorSpec


def test_the_actor_says_which_command_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cartridge_forge.actors.engine_generator.missing_vllm", lambda: True)
    monkeypatch.setattr("cartridge_forge.actors.engine_generator.environment", lambda base: {})
    base = ModelSource("m", "float32", 1, {}, 1, None)  # type: ignore[arg-type]  # no plane
    actor = EngineGeneratorActor(base, frozenset(), 2, GeneratorSpec(backend="vllm"))
    with pytest.raises(RunError, match="not installed: run `make install-vllm`"):
        actor._engine.started.result(60)  # what its `ready` awaits
