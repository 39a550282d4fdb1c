"""Build self-study prompts, which make the model write a user's turn about a passage.

    A    passage + seed  -> the user's turn      (reads the passage and one of five kinds of seed)
    B    passage + turn  -> the answer           (reads the passage and the turn only)

The five kinds are those of the Cartridges paper (Eyuboglu et al., 2025); the wording is our own.
Where A writes nothing usable, `plain_turn` makes a turn of the kind without a model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

WRITE = (
    "Write that message and nothing else. It must be understood by someone who does not see the "
    "passage: name what it is about."
)

SEEDS: Mapping[str, tuple[str, ...]] = {
    "structuring": (
        "Think of a reader who wants part of the passage above laid out in a fixed form: as JSON, "
        "YAML, a table or a list with headings. Write the message in which they ask for it, say "
        "which facts it must hold and what the form looks like.",
        "A program is to be fed with facts of the passage above. Write the message of an engineer "
        "who asks for them as records with named fields, and who lists those fields.",
    ),
    "summarization": (
        "Someone has no time to read the passage above. Write the message in which they ask for a "
        "summary of one part of it, and say which part and how long it may be.",
        "Write a message that asks for the chief points of the passage above, for a reader of your "
        "choice: a child, an expert, or someone in a hurry.",
    ),
    "question": (
        "Write one question whose answer stands in the passage above and nowhere else: about a "
        "name, a date, a number, a cause or an order of events.",
        "Write one question that joins two facts of the passage above, so that neither of them "
        "alone answers it.",
    ),
    "use_case": (
        "Who would need what the passage above says for their work, and what for? Write the "
        "message of such a person, with the task that they have before them.",
        "Write the message of someone who must decide something and needs facts of the passage "
        "above for it. They describe their situation in a sentence, then ask.",
    ),
    "creative": (
        "Write a message that asks for something made out of the passage above: a dialogue, a "
        "riddle, a letter, a headline, a lesson, or a tale that keeps its facts.",
        "Write a message that asks what would have been otherwise, had one fact of the passage "
        "above been different. It says which.",
    ),
}

PLAIN: Mapping[str, tuple[str, ...]] = {
    "structuring": (
        'List the facts of the passage that begins with "{cue}", one on each line.',
        'Write the passage from "{cue}" on as a table of two columns: what, and which value.',
    ),
    "summarization": (
        'Summarise the passage that begins with "{cue}" in two sentences.',
        'What are the chief points of what follows "{cue}"?',
    ),
    "question": (
        'What does the text say after "{cue}"?',
        'How does the passage go on that begins with "{cue}"?',
    ),
    "use_case": (
        'I need to explain the passage that begins with "{cue}" to a colleague. What must I say?',
        'I check facts for a newspaper. What is claimed from "{cue}" on?',
    ),
    "creative": (
        'Write a headline for the passage that begins with "{cue}".',
        'Tell what follows "{cue}" as a letter to a friend.',
    ),
}
CUE_WORDS = (3, 9)
SENTENCE = re.compile(r"(?:(?<=[.!?])\s+|\n+)")


def asking(passage: str, kind: str, rng: random.Random) -> str:
    """Return A's prompt: the passage, then a seed of the kind."""
    return f"{passage.strip()}\n\n---\n\n{rng.choice(SEEDS[kind])} {WRITE}"


def plain_turn(passage: str, kind: str, rng: random.Random) -> str:
    """Return a turn that refers to the passage by the first words of one of its sentences."""
    sentences = [s.split() for s in SENTENCE.split(passage) if s.split()]
    words = rng.choice(sentences or [["the", "text"]])
    cue = " ".join(words[: rng.randint(*CUE_WORDS)]).strip(" ,;:\"'")
    return rng.choice(PLAIN[kind]).format(cue=cue)
