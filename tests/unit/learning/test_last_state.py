"""A trainer's last state: only what changed is written, and a crash leaves a whole state."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.checkpoint import Checkpoint, LastState, part_name
from cartridge_forge.learning.trainer_state import (
    CartridgeProgress,
    LearningRateSchedule,
    TrainerState,
)
from cartridge_forge.protocols.errors import CheckpointError

NAMES = [f"p{i}" for i in range(20)]


def state(version: int, *touched: tuple[int, int]) -> Checkpoint:
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
    last.write(state(1))
    last.write(state(2, (1, 2)))
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
    before, after = state(1), state(2, (0, 2), (2, 2))
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
        successor.write(state(3, (0, 2), (2, 3)))
        assert same(LastState(path).read(), state(3, (0, 2), (2, 3)))
        assert len(list(path.iterdir())) == 4, "nothing of the crash is left"


def test_another_line_s_numbers_never_replace_those_of_the_state_on_disk(tmp_path: Path) -> None:
    """A run that is resumed reaches a version again: its files have other names until the end."""
    LastState(tmp_path).write(state(2, (0, 2)))
    again = state(2, (0, 2))
    other = {name: {"trainable": part["trainable"] + 1} for name, part in again.parts.items()}
    last = LastState(tmp_path)
    last.read()
    last.forget()
    with pytest.MonkeyPatch.context() as patch:
        Writes(2 * 3).install(patch)  # all parts, no manifest
        with pytest.raises(KeyboardInterrupt):
            last.write(Checkpoint(again.facts, other))
    assert same(LastState(tmp_path).read(), state(2, (0, 2)))


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
    LastState(tmp_path / "last").write(state(4))
    (path,) = (tmp_path / "last").glob(file)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"^the trainer's last state .*last cannot be") as e:
        LastState(tmp_path / "last").read()
    assert str(e.value).endswith("; end the run and resume it from its last checkpoint")


def test_an_edited_fact_is_noticed(tmp_path: Path) -> None:
    LastState(tmp_path).write(state(4))
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
