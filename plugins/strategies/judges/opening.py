"""Open what the scorer process_reward asks, as a server or a frontier configures it.

async with opened_judge(spec, "serve/clinic") as judge:
    await run(strategy, sampler, messages, ..., judge=judge)
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from cartridge_forge.plugins.host.limited_process import (
    BrokenLimitError,
    LimitedProcess,
    ProcessLimits,
)
from cartridge_forge.plugins.replay.clients import connect
from cartridge_forge.plugins.replay.ledger import SpendLedger
from cartridge_forge.plugins.replay.panel import TeacherPanel, limits_of, probability_of_teacher
from cartridge_forge.plugins.replay.spec import ReplaySpec
from cartridge_forge.plugins.strategies.problem import Judge
from cartridge_forge.plugins.strategies.scorers import SEPARATOR
from cartridge_forge.plugins.strategies.spec import (
    ProcessRewardSpec,
    RewardJudgeSpec,
    RewardModelSpec,
)
from cartridge_forge.protocols.errors import DataError, RunError, SpecError

SCORE = "cartridge_forge.plugins.strategies.judges.reward_process:score"
WORKING = 2 * 1024**3  # bytes beside the weights, which are held twice while they are read


@asynccontextmanager
async def opened_judge(spec: ProcessRewardSpec | None, run: str) -> AsyncIterator[Judge | None]:
    """Yield the judge, None where none is configured; its process or its connections end with the
    block. Calls of an API are written to the ledger under `run`. Raises SpecError for a model that
    cannot be read, and for a missing key."""
    if spec is None:
        yield None
    elif spec.model is not None:
        async with _reward_model(spec.model) as judge:
            yield judge
    elif spec.judge is not None:
        async with _api_judge(spec.judge, run) as judge:
            yield judge


@asynccontextmanager
async def _reward_model(spec: RewardModelSpec) -> AsyncIterator[Judge]:
    process = LimitedProcess(SCORE, _limits(spec))
    request = {**spec.model_dump(include={"path", "separator", "positive", "threads"})}
    request["steps"] = SEPARATOR
    # One thread: the process scores one call at a time.
    with process, ThreadPoolExecutor(1, "reward-model") as thread:

        async def scored(texts: Sequence[str]) -> Sequence[float]:
            data = json.dumps(list(texts)).encode()
            calling = thread.submit(process.call, request, data)
            try:
                scores: list[float] = await asyncio.wrap_future(calling)
            except BrokenLimitError as error:
                raise RunError(
                    f"the reward model {spec.path} scored no {len(texts)} steps within "
                    f"{spec.timeout_s:g} s and its memory; raise process_reward.model.timeout_s, "
                    "or lower candidates"
                ) from error
            return scores

        try:
            await scored(())
        except DataError as error:
            raise SpecError(f"process_reward.model: {error}") from error
        yield scored


def _limits(spec: RewardModelSpec) -> ProcessLimits:
    weights = sum(file.stat().st_size for file in Path(spec.path).glob("*.safetensors"))
    cpu_s, memory = spec.timeout_s * (spec.threads + 1), WORKING + 4 * weights
    return ProcessLimits(cpu_s=cpu_s, wall_s=spec.timeout_s, memory=memory)


@asynccontextmanager
async def _api_judge(spec: RewardJudgeSpec, run: str) -> AsyncIterator[Judge]:
    teacher = spec.teacher
    replay = ReplaySpec(teachers=(teacher,), quorum=1, cap=spec.cap, deadline_s=spec.deadline_s)
    path = Path(spec.ledger)
    path.parent.mkdir(parents=True, exist_ok=True)
    client = connect(teacher)
    ledger = await asyncio.to_thread(SpendLedger, path, limits_of(replay))
    panel = TeacherPanel(replay, ledger, run, {teacher.name: client})

    async def judged(texts: Sequence[str]) -> Sequence[float]:
        deadline = time.monotonic() + spec.deadline_s
        asking = [probability_of_teacher(panel, teacher, text, deadline) for text in texts]
        # All have ended before an error is raised: no call is left unsettled.
        results = await asyncio.gather(*asking, return_exceptions=True)
        scores = []
        for one in results:
            if isinstance(one, BaseException):
                raise one
            probability, why = one
            if probability is None:
                raise RunError(
                    f"process_reward: the judge {teacher.name} gives no score: {why}; look at "
                    f"{path.name}, its cap and the provider's status"
                )
            scores.append(probability)
        return scores

    try:
        yield judged
    finally:
        await panel.close()
