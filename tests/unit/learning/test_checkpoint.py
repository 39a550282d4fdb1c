"""Test checkpoints and the trainer's last state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cartridge_forge.learning import checkpoint
from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.checkpoint import (
    MANIFEST,
    Checkpoint,
    LastState,
    last_of_arms,
    list_checkpoints,
    part_name,
    read_checkpoint,
    write_checkpoint,
)
from cartridge_forge.learning.trainer_state import (
    CartridgeProgress,
    LearningRateSchedule,
    TrainerState,
)
from cartridge_forge.plugins.library.formats.run_checkpoint import is_checkpoint
from cartridge_forge.protocols.errors import CheckpointError
from cartridge_forge.protocols.files import sha256_of

STATE = "cartridge-0000-000000.safetensors"


def state(number: int) -> Checkpoint:
    return Checkpoint(
        {"version": number, "position": {"arm": "offline", "cursor": [1, 2]}},
        {STATE[:-12]: {"x": torch.full((3,), float(number)), "step": torch.tensor(7.0)}},
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
    whole = Checkpoint(facts, {"first": tensors, "second": {"x": torch.ones(2)}})
    path = write_checkpoint(tmp_path, "version-000003", whole, keep=1)
    assert path == tmp_path / "version-000003"
    found = read_checkpoint(path)
    assert (found.facts, found.path) == (facts, path)
    assert found.parts["second"]["x"].tolist() == [1, 1]
    assert found.parts["first"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.parts["first"][name].dtype == tensor.dtype
        assert torch.equal(found.parts["first"][name].nan_to_num(9), tensor.nan_to_num(9))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for number in (1, 2, 9, 10, 11):
        write(tmp_path, number, keep=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["version-000010", "version-000011"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version-000010", "version-000011"]


def test_a_checkpoint_that_is_there_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path, 4)
    before = (path / STATE).stat().st_mtime_ns, (path / MANIFEST).stat().st_mtime_ns
    other = Checkpoint({"version": 4}, {"x": {"x": torch.zeros(1)}})
    assert write_checkpoint(tmp_path, path.name, other, keep=9) == path
    assert ((path / STATE).stat().st_mtime_ns, (path / MANIFEST).stat().st_mtime_ns) == before


def test_a_damaged_one_is_replaced_when_the_run_comes_by_again(tmp_path: Path) -> None:
    """Resumed from the one before it, the run makes the same version once more."""
    path = write(tmp_path, 4)
    (path / STATE).write_bytes(b"torn")
    assert write(tmp_path, 4) == path
    assert read_checkpoint(path).parts[STATE[:-12]]["x"].tolist() == [4.0, 4.0, 4.0]


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
    assert sorted(events[:2]) == [f"flush {STATE}", f"flush {MANIFEST}"]
    assert events[2:] == [
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
    edit(path, lambda m: m["files"].update({STATE[:-12]: sha256_of(path / STATE)}))


DAMAGE = rf"is damaged: {STATE} does not match its checksum"
MANIFESTLESS = r"has no readable manifest \(.+\)"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, DAMAGE),
        (flip, DAMAGE),
        (lambda path: (path / STATE).unlink(), DAMAGE),
        (lambda path: edit(path, lambda m: m["files"].update({STATE[:-12]: "0" * 64})), DAMAGE),
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
    with pytest.raises(CheckpointError, match="has schema 1, this version reads 2 and 3; use"):
        read_checkpoint(path)


def numbered(since: dict[str, int], step: int) -> Checkpoint:
    """A trainer's state: each cartridge's numbers tell since when they are unchanged."""
    names = list(since)
    parts = {
        part_name("cartridge", i, since[name]): {
            "trainable": torch.full((2, 2, 1, 3, 4), i + since[name] / 100),
            "frozen": torch.full((2, 2, 1, 1, 4), float(i)),
        }
        for i, name in enumerate(names)
    }
    facts = {
        "names": names, "version": step, "arm": "on_policy",
        "cartridges": {name: {"since": since[name]} for name in names},
    }  # fmt: skip
    return Checkpoint(facts, parts)


def inodes(path: Path) -> dict[str, int]:
    return {p.name: p.stat().st_ino for p in path.glob("cartridge-*")}


def test_what_did_not_change_is_linked_from_the_checkpoint_before(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path, "version-000002", numbered({"a": 2, "b": 1}, 2), 1)
    held = inodes(first)
    second = write_checkpoint(
        tmp_path, "version-000004", numbered({"a": 4, "b": 1}, 4), 1, previous=first
    )
    assert list_checkpoints(tmp_path) == [second]  # and the links outlive the first
    assert inodes(second).keys() == {
        "cartridge-0000-000004.safetensors", "cartridge-0001-000001.safetensors",
    }  # fmt: skip
    assert (
        inodes(second)["cartridge-0001-000001.safetensors"]
        == held["cartridge-0001-000001.safetensors"]
    )
    found = read_checkpoint(second)
    assert found.cartridge("a")["trainable"].unique().item() == pytest.approx(0.04)
    assert found.cartridge("b")["trainable"].unique().item() == pytest.approx(1.01)


@pytest.mark.parametrize("fault", ["damaged", "gone", "no links", "no manifest"])
def test_what_cannot_be_linked_is_copied_or_written_anew(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_checkpoint(tmp_path, "version-000002", numbered({"a": 2, "b": 1}, 2), 9)
    shared = first / "cartridge-0001-000001.safetensors"
    if fault == "damaged":
        shared.write_bytes(shared.read_bytes()[:-1])
    elif fault == "gone":
        shared.unlink()
    elif fault == "no manifest":
        (first / MANIFEST).unlink()
    else:
        monkeypatch.setattr(checkpoint.os, "link", unsupported)
    state = numbered({"a": 4, "b": 1}, 4)
    second = write_checkpoint(tmp_path, "version-000004", state, 9, previous=first)
    assert not set(inodes(first).values()) & set(inodes(second).values())
    b = read_checkpoint(second).cartridge("b")
    assert torch.equal(b["trainable"], state.cartridge("b")["trainable"])


def unsupported(source: Path, target: Path) -> None:
    raise OSError("no hard links here")


def write_stacked(path: Path) -> None:
    """A checkpoint of schema 2, as versions before wrote it."""
    tensors = {
        "trainable": torch.arange(48.0).view(2, 1, 2, 1, 3, 4),
        "frozen": torch.arange(16.0).view(2, 1, 2, 1, 1, 4),
        "adam.step": torch.tensor(5.0),
        "adam.exp_avg": torch.ones(2, 1, 2, 1, 3, 4) * torch.tensor([1, 2]).view(2, 1, 1, 1, 1, 1),
    }
    facts = {
        "names": ["a", "b"], "version": 7, "arm": "on_policy", "step": 5, "steps": 9,
        "warmup_steps": 2, "last": None, "base_hash": "f0", "position": {"step": 5},
    }  # fmt: skip
    path.mkdir(parents=True)
    save_file(tensors, path / "state.safetensors")
    told = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    manifest = {
        "schema": 2, "sha256": sha256_of(path / "state.safetensors"), "facts": facts,
        "facts_sha256": told,
    }  # fmt: skip
    (path / MANIFEST).write_text(json.dumps(manifest))


def test_a_checkpoint_of_all_cartridges_stacked_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "version-000007"
    write_stacked(path)
    assert is_checkpoint(path)
    found = read_checkpoint(path)
    b = found.cartridge("b")
    assert b["trainable"].flatten().tolist() == list(range(24, 48))
    assert b["frozen"].flatten().tolist() == list(range(8, 16))
    assert b["adam.exp_avg"].unique().tolist() == [2]
    assert b["adam.step"] == found.cartridge("a")["adam.step"] == 5
    told = {"since": 7, "step": 5, "steps": 9, "warmup_steps": 2, "balance": {}}
    assert found.facts["cartridges"] == {"a": told, "b": told}
    (path / "state.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"damaged: state\.safetensors does not match"):
        read_checkpoint(path)


def test_what_an_arm_came_to_outlives_the_next_arm(tmp_path: Path) -> None:
    for number, arm in enumerate(["on_policy"] * 3 + ["offline"] * 4, start=1):
        facts = {"version": number, "arm": arm}
        whole = Checkpoint(facts, {"x": {"x": torch.zeros(1)}})
        write_checkpoint(tmp_path, f"version-{number:06d}", whole, keep=2)
    kept = [f"version-00000{n}" for n in (3, 6, 7)]
    assert [p.name for p in list_checkpoints(tmp_path)] == kept
    assert last_of_arms(tmp_path) == {
        "on_policy": tmp_path / kept[0],
        "offline": tmp_path / kept[2],
    }
    (tmp_path / kept[0] / MANIFEST).write_text("{")
    assert list(last_of_arms(tmp_path)) == ["offline"]


NAMES = [f"p{i}" for i in range(20)]


def last_state_state(version: int, *touched: tuple[int, int]) -> Checkpoint:
    """Cartridges a, b, c at a version: `touched` are (index, since), the others of version 0."""
    since = [dict(touched).get(i, 0) for i in range(3)]
    parts = {
        part_name("cartridge", i, at): {"trainable": torch.full((4, 5), i + at / 100)}
        for i, at in enumerate(since)
    }
    own = {name: {"since": at} for name, at in zip("abc", since, strict=True)}
    facts = {"names": ["a", "b", "c"], "version": version, "cartridges": own}
    return Checkpoint(facts, parts)


def same(found: Checkpoint | None, expected: Checkpoint) -> bool:
    if found is None or found.facts != expected.facts:
        return False
    return all(
        torch.equal(found.cartridge(n)["trainable"], expected.cartridge(n)["trainable"])
        for n in "abc"
    )


def test_a_state_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.arange(6.0).view(2, 3).T,
        "scalar": torch.tensor(1 / 3),
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
    }
    facts = {"names": ["ä"], "last": {"kl": 0.1, "tokens": 3}, "none": None}
    LastState(tmp_path / "last").write(Checkpoint(facts, {"one": tensors}))
    found = LastState(tmp_path / "last").read()
    assert found is not None
    assert found.facts == facts
    assert found.parts["one"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.parts["one"][name].dtype == tensor.dtype
        assert torch.equal(found.parts["one"][name].nan_to_num(9), tensor.nan_to_num(9))


def test_without_a_state_there_is_none(tmp_path: Path) -> None:
    assert LastState(tmp_path / "last").read() is None


def test_only_the_parts_of_the_newest_state_are_left(tmp_path: Path) -> None:
    last = LastState(tmp_path)
    last.write(last_state_state(1))
    last.write(last_state_state(2, (1, 2)))
    assert sorted(p.name[:21] for p in tmp_path.iterdir()) == [
        "cartridge-0000-000000", "cartridge-0001-000002", "cartridge-0002-000000", "manifest.json",
    ]  # fmt: skip


@dataclass
class Writes:
    """Counts what is written, and ends the process at write number `until`, or half-way in it."""

    until: int = 10**9
    torn: bool = False
    made: list[str] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        from cartridge_forge.learning import checkpoint as last_state

        save, text, replace = last_state.save_tensors, Path.write_text, Path.replace

        def saved(tensors: dict[str, torch.Tensor], path: Path) -> None:
            self.count(path, lambda: save(tensors, path))

        def written(path: Path, told: str) -> None:
            self.count(path, lambda: text(path, told))

        def renamed(path: Path, target: Path) -> None:
            self.count(target, lambda: replace(path, target))

        patch.setattr(last_state, "save_tensors", saved)
        patch.setattr(Path, "write_text", written)
        patch.setattr(Path, "replace", renamed)
        unlink = Path.unlink
        patch.setattr(Path, "unlink", lambda path: self.count(path, lambda: unlink(path)))

    def count(self, path: Path, do: Callable[[], object]) -> None:
        if len(self.made) == self.until:
            if self.torn and path.name.endswith(".partial"):
                path.write_bytes(b"half of")
            raise KeyboardInterrupt
        self.made.append(path.name)
        do()


@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_at_any_write_leaves_the_state_before_or_the_new_one(
    tmp_path: Path, torn: bool
) -> None:
    before, after = last_state_state(1), last_state_state(2, (0, 2), (2, 2))
    with pytest.MonkeyPatch.context() as patch:
        all_writes = Writes()
        LastState(tmp_path / "whole").write(before)
        last = LastState(tmp_path / "whole")
        last.read()
        all_writes.install(patch)
        last.write(after)
    # Two parts and the manifest, each written and renamed; then two files of the state before.
    assert len(all_writes.made) == 2 * 2 + 2 + 2
    renamed = all_writes.made.index("manifest.json")
    for until in range(len(all_writes.made)):
        path = tmp_path / str(until)
        LastState(path).write(before)
        last = LastState(path)
        last.read()
        with pytest.MonkeyPatch.context() as patch:
            Writes(until, torn).install(patch)
            with pytest.raises(KeyboardInterrupt):
                last.write(after)
        successor = LastState(path)
        assert same(successor.read(), after if until > renamed else before), until
        successor.write(last_state_state(3, (0, 2), (2, 3)))
        assert same(LastState(path).read(), last_state_state(3, (0, 2), (2, 3)))
        assert len(list(path.iterdir())) == 4, "nothing of the crash is left"


def test_another_line_s_numbers_never_replace_those_of_the_state_on_disk(tmp_path: Path) -> None:
    """A run that is resumed reaches a version again: its files have other names until the end."""
    LastState(tmp_path).write(last_state_state(2, (0, 2)))
    again = last_state_state(2, (0, 2))
    other = {name: {"trainable": part["trainable"] + 1} for name, part in again.parts.items()}
    last = LastState(tmp_path)
    last.read()
    last.forget()
    with pytest.MonkeyPatch.context() as patch:
        Writes(2 * 3).install(patch)  # all parts, no manifest
        with pytest.raises(KeyboardInterrupt):
            last.write(Checkpoint(again.facts, other))
    assert same(LastState(tmp_path).read(), last_state_state(2, (0, 2)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-1],
        lambda whole: b"",
        lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    ],
    ids=["torn", "empty", "weight"],
)
@pytest.mark.parametrize("file", ["cartridge-0001*", "manifest.json"])
def test_a_damaged_state_is_refused_by_name(
    tmp_path: Path, damage: Callable[[bytes], bytes], file: str
) -> None:
    LastState(tmp_path / "last").write(last_state_state(4))
    (path,) = (tmp_path / "last").glob(file)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"^the trainer's last state .*last cannot be") as e:
        LastState(tmp_path / "last").read()
    assert str(e.value).endswith("; end the run and resume it from its last checkpoint")


def test_an_edited_fact_is_noticed(tmp_path: Path) -> None:
    LastState(tmp_path).write(last_state_state(4))
    manifest = tmp_path / "manifest.json"
    whole = json.loads(manifest.read_text())
    whole["state"] = whole["state"].replace('"version": 4', '"version": 5')
    manifest.write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match=r"manifest\.json does not match its checksum"):
        LastState(tmp_path).read()


def test_a_state_of_one_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "last-state.safetensors").write_bytes(b"of an earlier version")
    with pytest.raises(CheckpointError, match=r"last-state.safetensors was written by an earlier"):
        LastState(tmp_path / "last-state").read()


def test_a_step_writes_its_own_cartridges(tmp_path: Path) -> None:
    """Of 20 cartridges two are touched: two twentieths of the bytes, and a manifest."""
    kv = torch.arange(20.0).view(20, 1, 1, 1, 1, 1).expand(20, 4, 2, 2, 65, 32)
    bank = CartridgeBank(NAMES, list(kv), frozen=1)
    schedule = LearningRateSchedule(0.02, 1, 9)
    progress = {n: CartridgeProgress(part, schedule) for n, part in bank.trainable.items()}
    trainer = TrainerState(bank, progress, None, None, "")

    def train(version: int, names: list[str]) -> None:
        for name in names:
            progress[name].parameter.grad = torch.ones_like(progress[name].parameter)
            progress[name].update(clip=1.0)
            progress[name].steps += 1
            progress[name].since = version
        trainer.version = version

    last = LastState(tmp_path)
    train(1, NAMES)
    last.write(trainer.checkpoint({}))
    before = {p.name: p.stat() for p in tmp_path.glob("cartridge-*")}
    full = sum(stat.st_size for stat in before.values())
    assert full > 20 * 3 * 4 * (4 * 2 * 2 * 64 * 32)  # numbers and two moments in float32
    for version, names in ((2, ["p3", "p7"]), (3, ["p7", "p19"])):
        train(version, names)
        last.write(trainer.checkpoint({}))
        now = {p.name: p.stat() for p in tmp_path.glob("cartridge-*")}
        fresh = [name for name in now if name not in before]
        assert sorted(int(name[10:14]) for name in fresh) == [int(name[1:]) for name in names]
        assert sum(now[name].st_size for name in fresh) <= full * 2 / 20
        assert (tmp_path / "manifest.json").stat().st_size < 8_000
        before = now
    found = LastState(tmp_path).read()
    assert found is not None
    for name in NAMES:
        assert torch.equal(found.cartridge(name)["trainable"], progress[name].parameter.detach())
