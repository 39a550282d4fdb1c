"""The type `auto`, settled by the processor and by where the model's processes run."""

from __future__ import annotations

from pathlib import Path

import pytest

from cartridge_forge.forge_run.preflight import slow_products
from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.protocols.spec import model as of
from cartridge_forge.protocols.spec.loading import load_spec

FLAGS = {
    "fast": "flags\t\t: fpu avx512f amx_bf16 amx_tile\n",
    "zen4": "flags\t\t: fpu avx512f avx512_bf16\n",
    "slow": "flags\t\t: fpu avx512f\n",
}


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{FLAGS[kind]}")
    monkeypatch.setattr(of, "CPUINFO", tmp_path / "cpuinfo")


def dtype(*sets: str) -> str:
    return load_spec("longhealth", sets=["model.dtype=auto", *sets]).spec.learn.model.dtype


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(
    ("kind", "expected"), [("fast", "bfloat16"), ("zen4", "bfloat16"), ("slow", "float32")]
)
def test_auto_is_what_this_processor_multiplies(kind: str, expected: str) -> None:
    assert dtype() == expected
    assert load_serve("serve", sets=["model.dtype=auto"]).spec.model.dtype == expected
    assert load_spec("longhealth").spec.learn.model.dtype == "float32"  # as the file says


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("kind", ["fast"])
def test_auto_of_other_hosts_is_float32_and_on_gpus_bfloat16() -> None:
    elsewhere = ("hosts.kind=addresses", "hosts.addresses=[tls://10.0.0.1:26600]")
    assert dtype(*elsewhere) == "float32"
    assert dtype(*elsewhere, "roles.trainer.gpus=1") == "bfloat16"


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(("kind", "warnings"), [("fast", 0), ("slow", 1)])
def test_bfloat16_without_instructions_is_warned_of(kind: str, warnings: int) -> None:
    told = slow_products(load_spec("longhealth", sets=["model.dtype=bfloat16"]).spec)
    assert len(told) == warnings
    assert all("about 5 times slower than float32; set model.dtype=auto" in line for line in told)
    assert slow_products(load_spec("longhealth").spec) == []


def test_no_file_about_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(of, "CPUINFO", tmp_path / "missing")
    assert not of.multiplies_bfloat16()
