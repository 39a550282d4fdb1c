"""Checkpoints: whole or not there, and every way to be damaged has its message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from learning import checkpoint
from learning.checkpoint import (
    MANIFEST,
    STATE,
    Checkpoint,
    last_of_arms,
    list_checkpoints,
    read_checkpoint,
    read_state,
    write_checkpoint,
    write_state,
)
from protocols.errors import CheckpointError


def state(number: int) -> Checkpoint:
    return Checkpoint(
        {"version": number, "position": {"arm": "offline", "cursor": [1, 2]}},
        {"x": torch.full((3,), float(number)), "step": torch.tensor(7.0)},
    )


def write(directory: Path, number: int, keep: int = 9) -> Path:
    return write_checkpoint(directory, f"version-{number:06d}", state(number), keep)


def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.arange(6.0).view(2, 3).T,
        "scalar": torch.tensor(1 / 3),
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "double": torch.tensor([1e-300], dtype=torch.float64),
    }
    facts = {"names": ["ä", "b"], "nested": {"n": 1, "none": None}, "rate": 0.1}
    path = write_checkpoint(tmp_path, "version-000003", Checkpoint(facts, tensors), keep=1)
    assert path == tmp_path / "version-000003"
    found = read_checkpoint(path)
    assert found.facts == facts
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name].nan_to_num(9), tensor.nan_to_num(9))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for number in (1, 2, 9, 10, 11):
        write(tmp_path, number, keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["version-000010", "version-000011"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version-000010", "version-000011"]


def test_a_checkpoint_that_is_there_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path, 4)
    before = (path / STATE).stat().st_mtime_ns, (path / MANIFEST).stat().st_mtime_ns
    other = Checkpoint({"version": 4}, {"x": torch.zeros(1)})
    assert write_checkpoint(tmp_path, path.name, other, keep=9) == path
    assert ((path / STATE).stat().st_mtime_ns, (path / MANIFEST).stat().st_mtime_ns) == before


def test_a_damaged_one_is_replaced_when_the_run_comes_by_again(tmp_path: Path) -> None:
    """Resumed from the one before it, the run makes the same version once more."""
    path = write(tmp_path, 4)
    (path / STATE).write_bytes(b"torn")
    assert write(tmp_path, 4) == path
    assert read_checkpoint(path).tensors["x"].tolist() == [4.0, 4.0, 4.0]


def test_a_crash_before_the_rename_leaves_nothing_to_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)

    def crash(self: Path, target: Path) -> None:
        assert (self / MANIFEST).is_file()  # everything was written; only the name is missing
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(OSError, match="power cut"):
            write(tmp_path, 2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["version-000001"]
    write(tmp_path, 2)  # what the crash left is in nobody's way
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version-000001", "version-000002"]


def test_all_is_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    flush, rename = checkpoint.flush, Path.rename

    def flushed(path: Path) -> None:
        events.append(f"flush {path.name}")
        flush(path)

    def renamed(self: Path, target: Path) -> Path:
        events.append(f"{self.name} -> {target.name}")
        return rename(self, target)

    monkeypatch.setattr(checkpoint, "flush", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    write(tmp_path, 5)
    assert events == [
        f"flush {STATE}",
        f"flush {MANIFEST}",
        "flush .version-000005.partial",
        ".version-000005.partial -> version-000005",
        f"flush {tmp_path.name}",
    ]


def edit(path: Path, change: Callable[[dict], object]) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


def truncate(path: Path) -> None:
    (path / STATE).write_bytes((path / STATE).read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray((path / STATE).read_bytes())
    data[-1] ^= 1
    (path / STATE).write_bytes(data)


def forge(path: Path) -> None:
    (path / STATE).write_bytes(b"no safetensors")
    edit(path, lambda m: m.update(sha256=checkpoint.sha256_of(path / STATE)))


DAMAGE = r"is damaged: state.safetensors does not match its checksum"
MANIFESTLESS = r"has no readable manifest \(.+\)"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, DAMAGE),
        (flip, DAMAGE),
        (lambda path: (path / STATE).unlink(), DAMAGE),
        (lambda path: edit(path, lambda m: m.update(sha256="0" * 64)), DAMAGE),
        (
            lambda path: edit(path, lambda m: m["facts"].update(version=9)),
            "was edited: its facts do not match their checksum",
        ),
        (lambda path: (path / MANIFEST).unlink(), MANIFESTLESS),
        (lambda path: (path / MANIFEST).write_text('{"facts": {'), MANIFESTLESS),
        (lambda path: (path / MANIFEST).write_bytes(b"\xff\xfe"), MANIFESTLESS),
        (lambda path: (path / MANIFEST).write_text("[]"), MANIFESTLESS),
        (lambda path: edit(path, lambda m: m.pop("facts_sha256")), MANIFESTLESS),
    ],
)
def test_damage_is_named_and_the_one_before_it_is_offered(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    for number in (1, 2, 3):
        write(tmp_path, number)
    path = tmp_path / "version-000002"
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(path)
    assert str(caught.value).startswith(f"checkpoint {path} ")
    assert str(caught.value).endswith(f"; the one before it is {tmp_path / 'version-000001'}")
    damage(tmp_path / "version-000001")
    with pytest.raises(CheckpointError, match=message + "; there is none before it$"):
        read_checkpoint(tmp_path / "version-000001")
    assert read_checkpoint(tmp_path / "version-000003").facts["version"] == 3


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none") == []
    with pytest.raises(CheckpointError, match="version-000001 has no readable manifest"):
        read_checkpoint(tmp_path / "version-000001")


def test_a_file_that_is_no_safetensors_whatever_its_checksum(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    forge(path)
    with pytest.raises(CheckpointError, match="version-000001 cannot be read"):
        read_checkpoint(path)


def test_another_schema(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    edit(path, lambda m: m.update(schema=1))
    with pytest.raises(CheckpointError, match="has schema 1, this version reads 2; use the cartr"):
        read_checkpoint(path)


def test_a_last_state_is_read_back_bit_for_bit_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "last-state.safetensors"
    tensors = {
        "transposed": torch.arange(6.0).view(2, 3).T,
        "scalar": torch.tensor(1 / 3),
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
    }
    facts = {"names": ["ä", "b"], "last": {"kl": 0.1, "tokens": 3}, "none": None}
    for number in (1, 2):
        write_state(path, Checkpoint({**facts, "version": number}, tensors))
    found = read_state(path)
    assert found.facts == {**facts, "version": 2}
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name].nan_to_num(9), tensor.nan_to_num(9))
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing else is left"


def test_a_crash_while_the_last_state_is_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last-state.safetensors"
    write_state(path, state(1))

    def crash(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half of")
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", crash)
        with pytest.raises(OSError, match="killed"):
            write_state(path, state(2))
    assert read_state(path).facts["version"] == 1
    write_state(path, state(3))
    assert read_state(path).facts["version"] == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-1],
        lambda whole: whole[:20],
        lambda whole: b"",
        lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),  # a weight
        lambda whole: whole.replace(b'version\\": 4', b'version\\": 5'),  # a fact
        lambda whole: whole.replace(b"crc32", b"crc23"),
        lambda whole: whole.replace(b"facts", b"stcaf"),
    ],
    ids=["torn", "torn header", "empty", "weight", "fact", "no checksum", "no facts"],
)
def test_a_damaged_last_state_is_refused_by_name(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "last-state.safetensors"
    write_state(path, state(4))
    whole = path.read_bytes()
    damaged = damage(whole)
    assert damaged != whole, "this damage changes nothing"
    path.write_bytes(damaged)
    with pytest.raises(
        CheckpointError, match=r"^the trainer's last state .*last-state\.safetensors"
    ) as e:
        read_state(path)
    assert str(e.value).endswith("; end the run and resume it from its last checkpoint")


def test_no_last_state(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"last state .*/none cannot be read"):
        read_state(tmp_path / "none")


def test_what_an_arm_came_to_outlives_the_next_arm(tmp_path: Path) -> None:
    for number, arm in enumerate(["on_policy"] * 3 + ["offline"] * 4, start=1):
        facts = {"version": number, "arm": arm}
        whole = Checkpoint(facts, {"x": torch.zeros(1)})
        write_checkpoint(tmp_path, f"version-{number:06d}", whole, keep=2)
    kept = [f"version-00000{n}" for n in (3, 6, 7)]
    assert [p.name for p in list_checkpoints(tmp_path)] == kept
    assert last_of_arms(tmp_path) == {
        "on_policy": tmp_path / kept[0],
        "offline": tmp_path / kept[2],
    }
    (tmp_path / kept[0] / MANIFEST).write_text("{")
    assert list(last_of_arms(tmp_path)) == ["offline"]
