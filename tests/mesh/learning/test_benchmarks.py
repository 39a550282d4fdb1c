"""The trainer's benchmarks, run small: what their tables claim."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import read


def rows_of(module: str, out: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", module, "--out", str(out), *options]
    subprocess.run(command, check=True, timeout=200, capture_output=True)
    rows: list[dict[str, Any]] = read(out)["results"]
    return rows


@pytest.mark.skipif(sys.platform != "linux", reason="reads its memory's peak from /proc")
def test_losses_in_chunks_are_the_same_and_make_less(tmp_path: Path) -> None:
    """A chunk of 16 of 64 tokens; 1 MiB holds as many tokens of 16,384."""
    rows = rows_of(
        "benchmarks.chunking", tmp_path / "losses.json",
        "--vocabulary", "16384", "--chunk-mb", "1", "--width", "32", "--repeats", "1",
        "--documents", "64", "--banks", "2", "--samples", "4",
    )  # fmt: skip
    flat = [row["of"] for row in rows if "gflops" in row]
    assert flat == ["score at 64", "bank of 1", "bank of 2", "even", "uneven"]
    rows = rows[: -len(flat)]
    for whole, chunked in zip(rows[::2], rows[1::2], strict=True):
        assert (whole["of"], whole["form"]) == (chunked["of"], "whole")
        assert chunked["form"] == "chunks of 16"
        assert chunked["largest"] == whole["largest"] / 4
        assert chunked["differs"] < 1e-5


def test_the_model_alone_is_asked_with_one_chart_and_with_two(tmp_path: Path) -> None:
    """The shipped reader has the answer in one chart."""
    sets = [word for key in ("data.patients=2", "evaluate.questions=20") for word in ("--set", key)]
    one, two = rows_of("studies.accuracy", tmp_path / "together.json", "together", *sets)
    assert (one["charts"], two["charts"], one["n"], two["n"]) == (1, 2, 20, 20)
    assert one["right"] >= 18 > two["right"]
