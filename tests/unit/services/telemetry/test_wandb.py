"""W&B without a key: a mistake of the spec, found before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import wandb

from protocols.errors import SpecError
from services.telemetry.wandb import WandbSink


def test_no_key_is_a_mistake_of_the_spec_and_asks_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(SpecError, match=r"telemetry\.sinks: .*WANDB_API_KEY, or WANDB_MODE=offl"):
        WandbSink(tmp_path, "run-1", "small", {})
    wandb.teardown()  # it would remember that there was no key
