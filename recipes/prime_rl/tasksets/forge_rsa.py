"""Train recursive self-aggregation under verifiers and prime-rl: the environment forge_rsa.

    load_environment(shape={"M": 1, "N": 4, "K": 2, "T": 3}, patients=4)

An episode is one question of forge_document_qa. Its first population answers the question N * M
times; each later one reads K answers of the one before and writes better ones. Every answer is a
trace of its own with its own reward, so that the model learns to answer and to aggregate. Parents
and prompts are those of `plugins.strategies.rsa`: drawn anew for each question, equal in every
process.

Each trace has the metric `population`, and those of the last population `majority_vote`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import verifiers.v1 as vf
from forge_document_qa import (
    DocumentQuestionsConfig,
    DocumentQuestionTask,
    questions,
)
from pydantic import BaseModel

from cartridge_forge.plugins.strategies.rsa.islands import RSAShape, draw_parents
from cartridge_forge.plugins.strategies.rsa.prompts import aggregation_prompt, as_task


class AggregationShape(BaseModel):
    """Hold M islands, N candidates in each, K parents, and T populations."""

    M: int = 1
    N: int = 4
    K: int = 2
    T: int = 3

    @property
    def checked(self) -> RSAShape:
        """Return it as the engine's own. Raises DataError for inconsistent numbers."""
        return RSAShape(self.M, self.N, self.K, self.T)


class AggregatedQuestionsConfig(DocumentQuestionsConfig):
    """Add the shape, the form of aggregation prompts, and the stream that draws parents."""

    shape: AggregationShape = AggregationShape()
    form: str = "general"
    rsa_seed: int = 0


class AggregatedQuestions(vf.Taskset[DocumentQuestionTask, AggregatedQuestionsConfig]):
    """The questions of forge_document_qa, under another config. Raises DataError for a shape or a
    form that does not exist."""

    def load(self) -> Iterable[DocumentQuestionTask]:
        _ = self.config.shape.checked, as_task(self.config.form)
        return questions(self.config)


class AggregationEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})


class AggregationEnv(vf.Env[AggregationEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        assert isinstance(task, DocumentQuestionTask)
        config: Any = self.taskset.config
        shape, form = config.shape.checked, as_task(config.form)
        stream = f"rsa/{config.rsa_seed}/{task.data.name}"
        texts: list[str] = []
        for step in range(shape.T):
            tasks = [task] * shape.slots
            if step:
                parents = draw_parents(shape, step, stream)
                tasks = [
                    self._again(task, [texts[p] for p in indices], form) for indices in parents
                ]
            traces = await asyncio.gather(*(agents.agent.run(one) for one in tasks))
            for trace in traces:
                trace.record_metric("population", step)
            texts = [_said(trace) for trace in traces]

    @staticmethod
    def _again(task: DocumentQuestionTask, candidates: list[str], form: Any) -> vf.Task:
        """Return the task with the candidates in its prompt."""
        prompt = aggregation_prompt(task.data.prompt_text, candidates, form)
        return task.with_data(prompt=prompt)

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        """Tell each trace of the last population whether its majority is right."""
        assert isinstance(task, DocumentQuestionTask)
        config: Any = self.taskset.config
        last = [t for t in episode.traces if t.metrics.get("population") == config.shape.T - 1]
        letters = Counter(filter(None, map(task.chosen, last)))
        (best, _), *_ = letters.most_common(1) or [(None, 0)]
        right = best is not None and task.data.question.is_correct(best)
        for trace in last:
            trace.record_metric("majority_vote", float(right))


def _said(trace: vf.Trace) -> str:
    texts = [message.content for message in trace.assistant_messages if message.content]
    return texts[-1] if texts else ""


def load_environment(agent: Mapping[str, Any] | None = None, **arguments: Any) -> vf.Env:
    """Return the environment; `arguments` are those of the taskset, `agent` overrides the harness,
    runtime or limits of who answers."""
    return vf.load_environment(
        vf.resolve_env_config(
            {"taskset": {"id": "forge_rsa", **arguments}, "agent": {**(agent or {})}}
        )
    )


__all__ = ["AggregatedQuestions", "AggregationEnv", "load_environment"]
