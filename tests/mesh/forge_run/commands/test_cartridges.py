"""Test commands about cartridges."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_hub import TOKEN, fake_hub
from format_setup import READER, cartridge, same
from rooms.forge_run.cartridges_setup import MESH, REPOSITORY

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.plugins.library.formats import forge as ours
from cartridge_forge.plugins.library.formats.convert import FORMATS, read
from cartridge_forge.plugins.library.terms import read_terms
from cartridge_forge.protocols.records.run_files import TERMS


def test_push_and_pull_from_the_command_line(
    run: Path, library: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In processes of their own, with the hub and the token from the environment alone."""
    forge(["cartridges", "add", str(run), *library])
    with fake_hub() as hub:
        environment = {
            "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin",
        }  # fmt: skip
        code = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"

        def said(*words: str) -> str:
            done = subprocess.run(
                [sys.executable, "-c", code, "cartridges", *words, *library], check=False,
                env=environment, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert TOKEN not in done.stdout + done.stderr
            return done.stdout

        assert said("push", "p2", "me/p2").startswith(f"p2@1: {hub.url}/me/p2/commit/")
        oid = hub.repos["me/p2"].commits[0][0]
        assert said("pull", "me/p2", "--name", "mine") == f"mine@1: 16 tokens, {oid}\n"
    folder = tmp_path / "library"
    assert torch.equal(ours.read(folder / "mine/1").kv, ours.read(folder / "p2/1").kv)


def test_the_parser_knows_every_format() -> None:
    from cartridge_forge.forge_run.cli import DTYPES
    from cartridge_forge.forge_run.cli import FORMATS as offered
    from cartridge_forge.plugins.library.formats.cartridge_file import DTYPES as known

    assert (set(offered), set(DTYPES)) == (set(FORMATS), set(known))


def test_a_run_is_converted_to_every_format_and_inspected(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {}
    for name in FORMATS:
        target = tmp_path / (f"{name}.pt" if name == "hazy" else name)
        code = forge(["convert", str(run), str(target), "--to", name, "--name", "p2",
                      "--model", str(READER)])  # fmt: skip
        assert code == 0
        assert capsys.readouterr().out == f"{target}: {name}, 16 tokens, float32\n"
        made[name] = read(target)
    assert all(same(made[name], made["forge"]) for name in FORMATS)
    assert made["forge"].frozen == 1
    assert made["forge"].facts.source == {
        "run": "r1", "checkpoint": "version-000002", "version": 2, "arm": "on_policy",
        "step": 2, "name": "p2",
        "metrics": {"kl": 0.25, "tokens": 9},
    }  # fmt: skip
    assert forge(["inspect", str(tmp_path / "peft"), "--model", str(READER)]) == 0
    out = capsys.readouterr().out
    assert "shape    4 x 2 x 2 x 16 x 32: layers, keys and values, heads, tokens, head size" in out
    assert "tokens   16, 1 of them frozen" in out
    assert ["rope.rope_theta", "500000.0"] in [line.split() for line in out.splitlines()]
    assert out.endswith("by shape, RoPE, config; it does not say which weights\n")
    assert forge(["inspect", str(run), "--name", "p1"]) == 0
    assert "source.metrics.kl" in capsys.readouterr().out


def test_what_would_be_lost_is_a_warning_or_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", str(run), str(tmp_path / "c.pt"), "--to", "hazy", "--name", "p1"]
    assert forge([*command, "--dtype", "bfloat16", "--strict"]) == 2
    assert "rounded from float32 to bfloat16 (--strict)" in capsys.readouterr().err
    assert not (tmp_path / "c.pt").exists()
    assert forge([*command, "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().err == "warning: numbers are rounded from float32 to bfloat16\n"
    assert read(tmp_path / "c.pt").dtype == "bfloat16"
    assert forge(command) == 2
    assert "is there already; give another path, or --force" in capsys.readouterr().err
    assert forge([*command, "--force"]) == 0
    assert read(tmp_path / "c.pt").dtype == "float32"


def test_a_compacted_cache_of_another_program_is_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With biases: the table of how they were folded, a row a layer; without, none."""
    shape, draws = (1, 2, 6, 32), torch.Generator().manual_seed(4)
    pairs = [[torch.randn(shape, generator=draws) for _ in range(2)] for _ in range(4)]
    torch.save([(k, torch.ones(1, 2, 6), v) for k, v in pairs], tmp_path / "am.pt")
    torch.save(pairs, tmp_path / "press.pt")
    (tmp_path / "text").write_text("Who is the surgeon of the ward, and where is she? " * 40)

    target = str(tmp_path / "c")

    def convert(source: str, *more: str) -> int:
        return forge(["convert", str(tmp_path / source), target, "--to", "peft", *more])

    model, tokens = ("--model", str(READER)), ("--document-tokens", "90")
    text = ("--text", str(tmp_path / "text"))
    assert convert("am.pt", *model) == 2
    assert "it holds a list and no dict" in (err := capsys.readouterr().err)
    assert "read by forge convert with --model DIR and --document-tokens T" in err
    assert convert("am.pt", *tokens) == 2
    assert "name it with --model DIR" in capsys.readouterr().err
    assert convert("am.pt", *text) == 2
    assert "give --document-tokens T with it" in capsys.readouterr().err
    assert convert("am.pt", *model, *tokens, *text, "--strict") == 2
    assert "biases are folded into keys, which is not exact" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
    assert convert("am.pt", *model, *tokens, *text) == 0
    out, err = capsys.readouterr()
    assert err.startswith("warning: biases are folded into keys")
    first, _, title, heads, *rows = out.splitlines()
    assert first == f"{target}: peft, 6 tokens, float32"
    assert title == "biases folded into keys, by queries that were held out"
    assert heads.split()[:3] == ["layer", "largest", "bias"]
    assert [row.split()[:2] for row in rows] == [[str(layer), "1"] for layer in range(4)]
    folding = read(tmp_path / "c").facts.source["folding"]
    assert [f"{folding[n]['miss']:.4g}" for n in "0123"] == [row.split()[2] for row in rows]
    assert convert("press.pt", *model, *tokens, "--strict", "--force") == 0
    assert capsys.readouterr() == (f"{first}\n", "")
    assert read(tmp_path / "c").facts.source == {"file": "press.pt", "document_tokens": 90}


def test_another_base_is_refused_by_inspect_and_convert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FORMATS["forge"].write(cartridge(), tmp_path / "c")
    assert forge(["inspect", str(tmp_path / "c"), "--model", str(READER)]) == 2
    out, err = capsys.readouterr()
    assert "keys rms" in out
    assert "not for" in err
    assert "its keys are rotated by factor 8.0, rope_theta 500000.0, rope_type llama3" in err
    assert "has the shape [4, 2, 2, P, 32]: got [2, 2, 2, 16, 4]" in err
    command = ["convert", str(tmp_path / "c"), str(tmp_path / "d"), "--to", "peft"]
    assert forge([*command, "--model", str(READER)]) == 2
    assert not (tmp_path / "d").exists()


def test_a_run_of_several_asks_for_a_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forge(["inspect", str(run)]) == 2
    assert "has 2 cartridges: p1, p2; choose with --name" in capsys.readouterr().err
    assert forge(["inspect", str(run), "--name", "p9"]) == 2
    assert "the run has no cartridge p9; it has p1, p2" in capsys.readouterr().err
    assert forge(["inspect", str(tmp_path / "gone")]) == 2
    assert "there is nothing at" in capsys.readouterr().err


def test_the_library_is_filled_listed_tagged_compared_and_pruned(
    run: Path, library: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        assert forge(["cartridges", *words, *library]) == 0
        return capsys.readouterr().out

    said("add", str(run / "checkpoints/version-000001"), "--name", "p1")
    assert said("add", str(run), "--name", "p1") == "p1@2: 16 tokens, version-000002\n"
    assert said("tag", "p1@1", "best") == "p1@1 is p1@best\n"
    rows = [line.split() for line in said("list").splitlines()[2:]]
    assert [row[:5] for row in rows] == [
        ["p1@1", "best", "16", "1", "float32"],
        ["p1@2", "16", "1", "float32", rows[1][4]],
    ]
    assert rows[0][-1] == "r1/version-000001"

    told = said("diff", "p1@best", "p1")
    assert "source.checkpoint  version-000001  version-000002" in told
    # The frozen token is the same, the others are twice what they were.
    layer = told.splitlines()[-1].split()
    assert layer[0] == "3"
    assert 0.5 < float(layer[1]) < 1 < float(layer[2]) + 0.2

    forge(["convert", str(run), str(tmp_path / "p1.pt"), "--to", "hazy", "--name", "p1"])
    capsys.readouterr()
    assert said("add", str(tmp_path / "p1.pt"), "--name", "ward") == (
        "ward@1: 16 tokens, version-000002\n"
    )
    assert "1.000000" in said("diff", "ward", str(tmp_path / "p1.pt"))

    said("add", str(run), "--name", "p1")
    assert said("prune", "p1", "--keep", "1", "--dry-run").startswith("would drop p1@2\n")
    assert said("prune", "--keep", "1").startswith("dropped p1@2\n")
    assert [line.split()[0] for line in said("list").splitlines()[2:]] == ["p1@1", "p1@3", "ward@1"]
    said("tag", "p1", "best", "--remove")
    assert "best" not in said("list")


def test_a_version_gets_the_words_of_files(
    run: Path, library: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.md").write_text("Salt, salt and tide.")
    (tmp_path / "b.txt").write_text("A reef.")
    assert forge(["cartridges", "add", str(run), "--name", "p1", *library]) == 0
    files = [str(tmp_path / "a.md"), str(tmp_path / "b.txt")]
    assert forge(["cartridges", "words", "p1", *files, *library]) == 0
    assert capsys.readouterr().out.endswith("p1@1: the words of 2 texts\n")
    assert read_terms(tmp_path / "library/p1/1" / TERMS) == {
        "p1": [{"and": 1, "salt": 2, "tide": 1}, {"a": 1, "reef": 1}]
    }
    assert forge(["cartridges", "list", *library]) == 0
    assert "yes" in capsys.readouterr().out.splitlines()[-1].split()


def test_what_is_not_there_is_told(
    library: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FORMATS["forge"].write(cartridge(), tmp_path / "c")
    for words, why in (
        (("tag", "p1", "best"), "there is no cartridge p1; the library has none"),
        (("diff", "p1", "p2"), "there is no cartridge p1"),
        (("diff", "a b", "p2"), "is no cartridge; write its name"),
        (("push", "p1", "me/p1"), "there is no cartridge p1"),
        (("words", "p1", MESH), "there is no cartridge p1"),
        (("prune", "--keep", "0", "p1"), "there is no cartridge p1"),
        (("add", str(tmp_path / "c")), "is no run, so name what it is to be called"),
        (("add", str(tmp_path / "c"), "--name", "ward"), "got [2, 2, 2, 16, 4]"),
    ):
        assert forge(["cartridges", *words, *library]) == 2
        assert why in capsys.readouterr().err
