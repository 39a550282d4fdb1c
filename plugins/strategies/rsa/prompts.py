"""Write the prompts of an RSA run: the question, later with candidates to aggregate.

    general      the question unchanged
    math         an answer in \\boxed{}
    supergpqa    the letter of an option in \\boxed{}
    rg           an answer between <answer> and </answer>, as reasoning_gym reads it
    clinic       the embedded clinic's own words, for a model that knows no others

An aggregation prompt warns that candidates may be wrong, then has the problem, the numbered
candidates and the form of the answer. A single candidate is refined, not aggregated. A task has the
name of its answer form (`plugins.strategies.answers.extract`). The module does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cartridge_forge.plugins.clinic import text as clinic_prompts
from cartridge_forge.plugins.strategies.answers.extract import Form
from cartridge_forge.protocols.errors import DataError

REFINE = (
    "Below are a problem and an attempt at it. The attempt may be right, wrong or unfinished. "
    "Check its reasoning step by step: keep what holds and repair what does not. If the whole "
    "approach fails, set it aside and solve the problem in another way."
)
AGGREGATE = (
    "Below are a problem and several attempts at it. Each attempt may be right, wrong or "
    "unfinished, and many that agree may still be wrong. Compare them, take over the steps that "
    "hold, and combine what is useful into one solution that is better than any of them. If all "
    "attempts fail, set them aside and solve the problem in another way."
)
PROMPT_WORDS, ATTEMPT_WORDS = 640, 24  # characters, and so tokens at most: of all but the attempts
INSTRUCTIONS: Mapping[Form, str] = {
    "general": "",
    "math": "Reason step by step, and end with the final answer in \\boxed{}.",
    "supergpqa": "Reason step by step, and end with the letter of the right option, and nothing "
    "else, in \\boxed{}.",
    "rg": "Reason step by step, and end with the final answer as <answer>...</answer>.",
    "clinic": "",
}


def as_task(name: str) -> Form:
    """Return the task of this name. Raises DataError for an unknown one."""
    for task in INSTRUCTIONS:
        if name == task:
            return task
    raise DataError(
        f"rsa: task must be one of {', '.join(INSTRUCTIONS)}: got {name!r}; general fits any"
    )


def opening_prompt(question: str, task: Form) -> str:
    """Return the prompt of step 0: the question, and the form of its answer."""
    return "\n\n".join(filter(None, (question, INSTRUCTIONS[task])))


def aggregation_prompt(question: str, candidates: Sequence[str], task: Form) -> str:
    """Return the prompt of a later step with K >= 1 candidates, in their order."""
    if task == "clinic":
        return clinic_prompts.aggregation_prompt(question, candidates)
    parts = [REFINE if len(candidates) == 1 else AGGREGATE, f"Problem:\n{question}"]
    parts += [f"Attempt {i}:\n{text.strip()}" for i, text in enumerate(candidates, start=1)]
    parts.append(f"Write the improved solution. {INSTRUCTIONS[task]}".strip())
    return "\n\n".join(parts)
