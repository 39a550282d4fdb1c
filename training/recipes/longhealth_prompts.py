"""Make the prompts of a run as token ids, from patients, tokenizer and config.

    document    <bos> system(document)              position 0 .. T-1     (prefix: cartridge or KV)
    prompt      user(question) + generation prompt   the tokens after any prefix

The chat template is applied to the whole conversation and cut where the document ends. So a prompt
has the same tokens after every prefix, and no second beginning-of-sequence token appears.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from documents.near_duplicates import LocatedText, overlaps
from environments.clinic.longhealth import (
    Patient,
    PatientQuestion,
    is_held_out,
    load_patients,
    parse_patients,
)
from environments.clinic.patients import generate_clinic
from environments.clinic.prompts import option_prompt, self_study_prompt, sentence_ends
from environments.renderer import NO_DOCUMENT, ChatRenderer
from protocols.errors import DataError
from protocols.seeds import stream_seed
from protocols.spec.learn import LearnSpec
from protocols.spec.sections import DataSpec
from protocols.teacher_replay import AgentMessage
from protocols.types import GenerateRequest, PrefixRef, Sampling, composed_ref
from training.types import StudyPrompt

Turn = TypeVar("Turn")


@dataclass(frozen=True)
class LongHealthQuestion:
    """Hold a held-out question: its `text`, its ids after a prefix, and `bare_ids` without one."""

    question: PatientQuestion
    text: str
    prompt_ids: tuple[int, ...]
    bare_ids: tuple[int, ...]


def read_patients(data: DataSpec) -> list[Patient]:
    """Return the run's patients, from `data.path` or generated. Raises DataError when too few."""
    if data.path is not None:
        patients = load_patients(data.path)
    else:
        assert data.facts is not None
        assert data.notes is not None
        clinic = generate_clinic(
            data.seed, data.patients, data.facts, data.notes, data.questions_per_fact
        )
        patients = parse_patients(clinic, f"the clinic of seed {data.seed}")
    if len(patients) < data.patients:
        raise DataError(
            f"data.patients is {data.patients} and {data.path} holds {len(patients)}; lower it"
        )
    return patients[: data.patients]


class LongHealthPrompts:
    """Make every prompt of a run. A generator named by seed, step and index makes each draw."""

    def __init__(self, spec: LearnSpec, patients: Sequence[Patient], tokenizer: Any) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self.patients = {p.id: p for p in patients}
        self.conversation = ChatRenderer(tokenizer, {p.id: p.document for p in patients})
        held_out = {
            p.id: [q for q in p.questions if is_held_out(q, spec.data.held_out)] for p in patients
        }
        near = _doubles(patients, held_out, spec.evaluate.alike)
        self._training = {
            p.id: [q for q in p.questions if q not in held_out[p.id] and q.id not in near]
            for p in patients
        }
        self._held_out = held_out
        self._prepared: dict[int, list[StudyPrompt]] = {}
        self._ends = sorted({end for p in patients for end in sentence_ends(p)})
        self.documents = {p.id: self.conversation.head(p.id) for p in patients}
        self.documents[NO_DOCUMENT] = self.conversation.head(None)

    @property
    def end_ids(self) -> frozenset[int]:
        """Return the tokens that end a response."""
        return frozenset({self._tokenizer.eos_token_id})

    def decode(self, ids: Sequence[int]) -> str:
        """Return a response's text without special tokens, for people and for answer parsing."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text.strip()

    def rollout(self, step: int, version: int) -> list[StudyPrompt]:
        """Return the on-policy prompts of 0-based `step`, over cartridge `version`."""
        prompts = self._prepared.pop(step, None) or self._prompts("on_policy", step)
        train = self._spec.train
        return in_company(prompts, version, sorted(self.patients), train.compose, train.seed)

    def prepare(self, step: int) -> None:
        """Make the on-policy prompts of `step` beforehand, while the models work."""
        self._prepared = {step: self._prompts("on_policy", step)}

    def offline(self, step: int) -> list[StudyPrompt]:
        """Return the prompts of `step` over the documents themselves, for the document teacher."""
        return self._prompts("offline", step)

    def _prompts(self, arm: str, step: int) -> list[StudyPrompt]:
        """Return one step's prompts over the documents, which take turns: with as many prompts as
        documents, every cartridge trains in every step."""
        rollout, seed = self._spec.rollout, self._spec.train.seed
        ids = sorted(self.patients)
        prompts = []
        for i in range(rollout.prompts):
            document = ids[(step * rollout.prompts + i) % len(ids)]
            # The prompt does not depend on the arm: both arms study the same material.
            rng = random.Random(f"prompt/{seed}/{step}/{i}")
            kind, text = self_study_prompt(
                self.patients[document], self._training[document], rollout.kinds, rng, self._ends
            )
            name = f"{arm}/{step + 1}/{i}"
            request = GenerateRequest(
                id=name,
                prompt_ids=self._prompt_ids(document, text),
                prefix=PrefixRef(f"document/{document}", 0),
                sampling=Sampling(
                    rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_tokens
                ),
                seed=stream_seed(f"sample/{seed}/{name}"),
            )
            prompts.append(StudyPrompt(document, kind, request))
        return prompts

    @cached_property
    def exams(self) -> list[LongHealthQuestion]:
        """Return the held-out questions to evaluate, patients in turn, at most
        `evaluate.questions`. Raises DataError when there is none."""
        by_patient = [list(self._held_out[p]) for p in sorted(self._held_out)]
        chosen = in_turns(by_patient)[: self._spec.evaluate.questions]
        if not chosen:
            raise DataError(
                "no held-out question: raise data.held_out (the share kept for evaluation) or "
                "give more questions"
            )
        exams = []
        for q in chosen:
            text = option_prompt(q.text, q.options, self._spec.data.instruction)
            over, bare = self._prompt_ids(q.patient, text), self._prompt_ids(None, text)
            exams.append(LongHealthQuestion(q, text, over, bare))
        return exams

    def exam_requests(
        self,
        exams: Sequence[LongHealthQuestion],
        arm: str,
        prefix: str,
        version: int,
        sampled: bool,
    ) -> list[GenerateRequest]:
        """Return one arm's requests: prefix "cartridge", "document" or "none" (no document)."""
        evaluate, seed = self._spec.evaluate, self._spec.train.seed
        sampling = Sampling(
            temperature=evaluate.temperature if sampled else 0.0, max_tokens=evaluate.max_tokens
        )
        requests = []
        for exam in exams:
            bare = prefix == NO_DOCUMENT
            ref = (
                PrefixRef(f"document/{NO_DOCUMENT}", 0)
                if bare
                else PrefixRef(f"{prefix}/{exam.question.patient}", version)
            )
            name = f"evaluate/{arm}/{exam.question.id}"
            ids = exam.bare_ids if bare else exam.prompt_ids
            # The draw does not depend on the arm, so that arms differ by their prefix alone.
            draw = stream_seed(f"exam/{seed}/{exam.question.id}")
            requests.append(GenerateRequest(name, ids, ref, sampling, draw))
        return requests

    def _prompt_ids(self, document: str | None, text: str) -> tuple[int, ...]:
        return self.conversation.opening(document, (AgentMessage("user", text),))


def _doubles(
    patients: Sequence[Patient], held_out: Mapping[str, Sequence[PatientQuestion]], alike: float
) -> set[str]:
    """Return ids of questions that nearly repeat a held-out one on the same patient."""
    asked = [LocatedText(p, q.text, q.id) for p, some in held_out.items() for q in some]
    every = [LocatedText(p.id, q.text, q.id) for p in patients for q in p.questions]
    near = {(x.training.document, x.training.text) for x in overlaps(every, asked, alike)}
    return {q.place for q in every if (q.document, q.text) in near}


def in_company(
    prompts: Sequence[StudyPrompt], version: int, names: Sequence[str], share: float, seed: int
) -> list[StudyPrompt]:
    """Return the prompts over their documents' cartridges of `version`; for about `share` of them,
    the cartridge of another of `names` stands before or after it."""
    found = []
    for prompt in prompts:
        rng = random.Random(f"compose/{seed}/{prompt.request.id}")
        order = [prompt.document]
        others = [name for name in names if name != prompt.document]
        if rng.random() < share and others:
            order.insert(rng.randrange(2), rng.choice(others))
        refs = [PrefixRef(f"cartridge/{name}", version) for name in order]
        found.append(over(prompt, composed_ref(refs)))
    return found


def over(prompt: StudyPrompt, prefix: PrefixRef) -> StudyPrompt:
    """Return the prompt with another prefix."""
    return replace(prompt, request=replace(prompt.request, prefix=prefix))


def in_turns(rows: Sequence[Sequence[Turn]]) -> list[Turn]:
    """Return items column by column; rows may end early: [[a, b], [c]] -> [a, c, b]."""
    longest = max((len(r) for r in rows), default=0)
    return [r[i] for i in range(longest) for r in rows if i < len(r)]
