"""Test that tensors stay on their device, and that freed memory is given back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from channel_setup import scene
from rooms.learning.devices_setup import same, trainer_of
from second_device import Elsewhere, elsewhere
from twins import NEAR

from cartridge_forge.learning import ranks
from cartridge_forge.learning.cartridge import student_prefixes
from cartridge_forge.learning.initialization import CartridgeInit, InitSource, initial_bank
from cartridge_forge.learning.model.loading import base_hash, claim_device
from cartridge_forge.learning.teacher import TeacherDistribution, document_kv, score_kept
from cartridge_forge.plugins.library.starts.untrained import INITS, PADS
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.step import TrainBatch

if TYPE_CHECKING:
    from twins import Twin


def test_two_devices_in_one_operation_are_refused() -> None:
    with elsewhere():
        a, here = torch.ones(3, device="elsewhere"), torch.ones(3)
        assert isinstance(a, Elsewhere)
        assert a.device.type == "elsewhere"
        assert (a + 1)[torch.tensor([0, 2])].tolist() == [2.0, 2.0]  # indices may be on the host
        for mixed in (lambda: a + here, lambda: here.gather(0, a.long()), lambda: here[a.long()]):
            with pytest.raises(RuntimeError, match="two devices"):
                mixed()
        with pytest.raises((RuntimeError, TypeError)):
            a.numpy()
        assert (a.cpu() + here).tolist() == [2.0, 2.0, 2.0]


def test_a_document_is_read_and_the_base_hashed_where_the_model_is(
    llama: Twin, there: Twin
) -> None:
    assert there.model.device.type == "elsewhere"
    read = document_kv(there.model, there.documents["c"])
    assert isinstance(read, Elsewhere)
    here = document_kv(llama.model, llama.documents["c"])
    torch.testing.assert_close(read.cpu(), here, rtol=0, atol=NEAR)
    assert base_hash(there.model) == base_hash(llama.model)


@pytest.mark.parametrize("pad", [None, "random"])
def test_a_trained_cartridge_starts_beside_a_fresh_one(
    llama: Twin, there: Twin, pad: str | None
) -> None:
    """Its file is read on the host."""
    kv = llama.kv["b"][:, :, :, : 8 if pad is None else 5]
    start = CartridgeInit("first_tokens", 8, 1, pad=pad)
    here, elsewhere_too = (
        initial_bank(
            twin.model,
            [InitSource(n, twin.documents[n], partial(twin.kv.__getitem__, n), list) for n in "ac"],
            start,
            {"a": (kv, 1)},
        )
        for twin in (llama, there)
    )
    for name, part in elsewhere_too.trainable.items():
        assert isinstance(part.data, Elsewhere)
        (there_kv,), (here_kv,) = elsewhere_too.kv([name]), here.kv([name])
        torch.testing.assert_close(there_kv.detach().cpu(), here_kv.detach())


def source(twin: Twin) -> InitSource:
    return InitSource("c", twin.documents["c"], lambda: twin.kv["c"], lambda: range(5, 50))


@pytest.mark.parametrize("init", INITS)
def test_every_start_off_the_host(llama: Twin, there: Twin, init: str) -> None:
    start = CartridgeInit(init, 12, 1)
    here, elsewhere_too = (INITS[init](one.model, source(one), start) for one in (llama, there))
    assert isinstance(elsewhere_too, Elsewhere)
    # The closed form solves float32 sums, whose order is a device's own, with ridges above 1e-3.
    bound = 1e-4 * float(here.abs().max())
    torch.testing.assert_close(elsewhere_too.cpu(), here, rtol=0.0, atol=bound)


@pytest.mark.parametrize("pad", PADS)
def test_every_padding_off_the_host(llama: Twin, there: Twin, pad: str) -> None:
    start = CartridgeInit("first_tokens", 12, 1, pad=pad)
    here, elsewhere_too = (
        PADS[pad](one.model, source(one), start, one.kv["c"][:, :, :, :8]) for one in (llama, there)
    )
    assert isinstance(elsewhere_too, Elsewhere)
    torch.testing.assert_close(elsewhere_too.cpu(), here)


def test_a_composition_off_the_host(llama: Twin, there: Twin) -> None:
    """The student reads b, and then a, which learns."""
    here, elsewhere_too = (
        student_prefixes(one.model, trainer_of(one).bank, ["a\nb\na"])[0] for one in (llama, there)
    )
    assert here.shape[3] == 2 * 8
    assert isinstance(elsewhere_too, Elsewhere)
    torch.testing.assert_close(elsewhere_too.cpu(), here)


def test_a_top_k_teacher_off_the_host(llama: Twin, there: Twin) -> None:
    results = []
    for twin in (llama, there):
        trainer = trainer_of(twin)
        trainer.begin("documents", 2)
        doc = scene(llama, trainer_of(llama).bank).doc
        scores = score_kept(llama.model, doc, llama.kv, 24, 5)
        results.append(
            trainer.step(
                TrainBatch(doc=doc, scores={"doc_teacher": TeacherDistribution(**scores)}), 0
            )
        )
    same(*results)


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert claim_device("cpu") == torch.device("cpu")
    with pytest.raises(SpecError, match=r"a GPU is asked for and torch .* sees none"):
        claim_device("cuda")
    with pytest.raises(SpecError, match="a device is one of"):
        claim_device("gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert claim_device("cpu") == torch.device("cpu")
    assert claim_device("cuda", rank=2) == torch.device("cuda", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each rank sees its own alone
    assert claim_device("cuda", rank=2) == torch.device("cuda", 0)
    assert taken == [torch.device("cuda", 2), torch.device("cuda", 0)]


# A process of an actor keeps what it freed. One block of ten stays, so that nothing is at the end.
HELD = """
import asyncio, json
from cartridge_forge.actors.base import keep_freed_memory
from cartridge_forge.learning.ranks import FreedMemory
keep_freed_memory()
def held():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous"):
            return int(line.split()[1]) // 1024
blocks = [bytearray(1 << 16) for _ in range(3000)]
kept = blocks[::10]
full = held()
del blocks
freed = held()
async def give_back():
    FreedMemory().give_back()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
asyncio.run(give_back())
print(json.dumps([full, freed, held()]))
"""


def test_what_is_free_between_blocks_in_use_is_given_back() -> None:
    told = subprocess.run(
        [sys.executable, "-c", HELD], capture_output=True, text=True, check=True, timeout=60
    )
    full, freed, left = json.loads(told.stdout)
    blocks = 3000 * 2**16 / 2**20  # MiB; a tenth of them is in use
    assert full - freed < 0.1 * blocks
    assert freed - left > 0.8 * blocks


class CountingLibrary:
    """Count the calls of glibc's `malloc_trim`."""

    trims = 0

    def malloc_trim(self, pad: int) -> int:
        self.trims += 1
        return 1


@dataclass(eq=False)
class HandTimer:
    """Stand in for a timer of the event loop."""

    loop: HandLoop
    when: float
    call: Callable[[], None]

    def cancel(self) -> None:
        self.loop.due.remove(self)


class HandLoop:
    """Stand in for the event loop, with a clock set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due: list[HandTimer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[..., None], *given: object) -> HandTimer:
        self.due.append(HandTimer(self, when, partial(call, *given)))
        return self.due[-1]

    def pass_until(self, now: float) -> None:
        self.now = now
        for timer in [each for each in self.due if each.when <= now]:
            self.due.remove(timer)
            timer.call()


def test_it_is_done_once_in_a_time_and_when_no_pass_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, loop = CountingLibrary(), HandLoop()
    monkeypatch.setattr(ranks.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(ranks.asyncio, "get_running_loop", lambda: loop)
    freed = ranks.FreedMemory()
    assert (ranks.GIVE_BACK_SECONDS, ranks.IDLE_SECONDS) == (2.0, 0.5)
    seen = []
    for now, passes in (
        (100.0, 1), (100.5, 3),  # at once, then too soon
        (100.9, 0), (101.0, 0),  # no pass for half a second
        (101.2, 1), (101.6, 1), (102.0, 1), (102.4, 1), (102.8, 1), (102.9, 0), (103.0, 0),  # busy
        (110.0, 1),
    ):  # fmt: skip
        loop.now = now
        for _ in range(passes):
            freed.give_back()
        loop.pass_until(now)
        seen.append(library.trims)
    assert seen == [1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 3, 4]
