"""Ask questions about documents under verifiers and prime-rl: the taskset forge_document_qa.

    load_environment(patients=4, facts=6, notes=2)         generated patients
    load_environment(path="benchmark_v5.json")             LongHealth's own file, which stays local

The document is the system prompt. With `document=False` it is left out, for a served model whose
cartridge stands for it. The reward is 1 for the right option, else 0; a metric tells answers that
choose none, so that they are not taken for wrong choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import verifiers.v1 as vf

from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import (
    Patient,
    PatientQuestion,
    is_held_out,
    load_patients,
    option_prompt,
    parse_answer,
    parse_patients,
)

INSTRUCTION = "End with a line: answer: LETTER"


class DocumentQuestionsConfig(vf.TasksetConfig):
    """Choose documents and questions. A question is held out by a hash of its text and patient, as
    in our own runs: `held_out` takes those, else the others."""

    path: str = ""
    seed: int = 0
    patients: int = 4
    facts: int = 6
    notes: int = 2
    held_out: bool = False
    held_out_share: float = 0.3
    document: bool = True
    instruction: str = INSTRUCTION


class DocumentQuestionData(vf.TaskData):
    patient: str
    text: str
    options: tuple[str, ...]
    correct: str

    @property
    def question(self) -> PatientQuestion:
        return PatientQuestion(self.name or "", self.patient, self.text, self.options, self.correct)


class DocumentQuestionTask(vf.Task[DocumentQuestionData, vf.State]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        letter = self.chosen(trace)
        return float(letter is not None and self.data.question.is_correct(letter))

    @vf.metric
    async def unparsed(self, trace: vf.Trace) -> float:
        return float(self.chosen(trace) is None)

    def chosen(self, trace: vf.Trace) -> str | None:
        """Return the letter that the last message chose."""
        texts = [message.content for message in trace.assistant_messages if message.content]
        return parse_answer(texts[-1], self.data.question) if texts else None


class DocumentQuestions(vf.Taskset[DocumentQuestionTask, DocumentQuestionsConfig]):
    def load(self) -> Iterable[DocumentQuestionTask]:
        return questions(self.config)


def questions(config: DocumentQuestionsConfig) -> Iterator[DocumentQuestionTask]:
    """Yield the questions that a config chooses, document by document."""
    for patient in _patients(config):
        for question in patient.questions:
            if is_held_out(question, config.held_out_share) != config.held_out:
                continue
            yield DocumentQuestionTask(
                DocumentQuestionData(
                    name=question.id,
                    prompt=option_prompt(question.text, question.options, config.instruction),
                    system_prompt=patient.document if config.document else None,
                    patient=question.patient,
                    text=question.text,
                    options=question.options,
                    correct=question.correct,
                ),
                config.task,
            )


def _patients(config: DocumentQuestionsConfig) -> list[Patient]:
    if config.path:
        return load_patients(config.path)
    records = generate_clinic(config.seed, config.patients, config.facts, config.notes)
    return parse_patients(records, "the generated clinic")


def load_environment(agent: Mapping[str, Any] | None = None, **arguments: Any) -> vf.Env:
    """Return the environment, one agent that answers once; `arguments` are those of the taskset,
    `agent` overrides its harness, runtime or limits."""
    plain = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    return vf.load_environment(
        vf.resolve_env_config(
            {
                "taskset": {"id": "forge_document_qa", **arguments},
                "agent": {**plain, **(agent or {})},
            }
        )
    )


__all__ = ["DocumentQuestions", "load_environment"]
