"""Ask external teachers for the actions that they prefer in the student's states, and for hints."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint

from cartridge_forge.plugins.chat.messages import PanelVerdict, ReplayState
from cartridge_forge.plugins.host.stored_files import LedgerFile
from cartridge_forge.plugins.replay.budget import SpendTotals
from cartridge_forge.plugins.replay.ledger import SpendLedger
from cartridge_forge.plugins.replay.panel import (
    TeacherPanel,
    ask_teachers,
    hint_of_teacher,
    limits_of,
    score_of_teacher,
)
from cartridge_forge.plugins.replay.spec import ReplaySpec
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.services import StoredPlace


class TeacherReplayActor(Actor):
    """Run one of K replicas that share a ledger, and through it budget, rates and circuit breakers.

    `service.spawn(TeacherReplayActor, n=8, args=(spec, "runs/x/teachers.jsonl", "run-7"))`; the
    role's `max_ongoing` bounds the states in progress on one replica. All K run on the ledger's
    host.
    """

    def __init__(
        self,
        spec: ReplaySpec,
        ledger: str,
        run: str,
        offline: bool = False,
        stored: StoredPlace | None = None,
    ) -> None:
        """Charge all calls to `run`, whose caps they share. With `offline` the ledger answers
        alone, and neither keys nor a network are needed. `stored`: where the run is in an object
        store, for a host that shares no directory with the controller's; the ledger is stored
        before an answer is returned."""
        self._stored = stored
        self._file: LedgerFile | None = None
        self._spec, self._path, self._run, self._offline = spec, Path(ledger), run, offline
        self._desk: TeacherPanel | None = None

    @concurrent_endpoint
    async def ready(self) -> int:
        """Return this process's id. Raises SpecError for a missing key, DataError for a bad ledger:
        here and not in `__init__`, so that the service can report the cause."""
        await asyncio.to_thread(self._open)
        return os.getpid()

    @concurrent_endpoint
    async def vote(self, state: ReplayState) -> PanelVerdict:
        """Return the verdict and every vote on a state within `deadline_s`; failed teachers
        abstain."""
        verdict = await ask_teachers(self._at_desk(), state)
        await self._keep()
        return verdict

    @concurrent_endpoint
    async def hint(
        self, teacher: str, state: ReplayState, request: str, timeout_s: float
    ) -> tuple[str, str]:
        """Return (hint, "") by the named teacher within `timeout_s`, or ("", why). The last message
        of the state reports a failure; `asked` ends the prompt."""
        named = next(t for t in self._spec.teachers if t.name == teacher)
        deadline = time.monotonic() + timeout_s
        hint = await hint_of_teacher(self._at_desk(), named, state, request, deadline)
        await self._keep()
        return hint

    @concurrent_endpoint
    async def score(
        self, teacher: str, state: ReplayState, rubric: str, reference: str, timeout_s: float
    ) -> tuple[float | None, str]:
        """Return (number from 0 to 1, "") that the named teacher gives the last message of a state
        within `timeout_s`, or (None, why)."""
        named = next(t for t in self._spec.teachers if t.name == teacher)
        deadline = time.monotonic() + timeout_s
        score = await score_of_teacher(self._at_desk(), named, state, rubric, reference, deadline)
        await self._keep()
        return score

    @concurrent_endpoint
    async def totals(self) -> dict[str, SpendTotals]:
        """Return money and calls of this run over all replicas: "" for the sum, and by teacher."""
        ledger = self._at_desk().ledger
        names = ["", *(teacher.name for teacher in self._spec.teachers)]
        return {n: await asyncio.to_thread(ledger.totals, self._run, n) for n in names}

    async def _keep(self) -> None:
        if self._file is not None:
            await asyncio.to_thread(self._file.keep)

    async def __cleanup__(self, _: Exception | None) -> None:
        if self._desk is not None:
            await self._desk.close()

    def _open(self) -> None:
        from cartridge_forge.plugins.replay.clients import (
            connect,  # the SDKs take a second to import
        )

        if self._stored is not None:
            self._file = LedgerFile(self._stored, self._path)
            self._file.fetch()
        if self._offline and not self._path.is_file():
            raise DataError(f"no ledger to replay from at {self._path}; name one, or go online")
        clients = {} if self._offline else {t.name: connect(t) for t in self._spec.teachers}
        ledger = SpendLedger(self._path, limits_of(self._spec))
        self._desk = TeacherPanel(self._spec, ledger, self._run, clients)

    def _at_desk(self) -> TeacherPanel:
        assert self._desk is not None, "the service asks `ready` first"
        return self._desk
