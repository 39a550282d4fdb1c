"""Build self-study prompts, which make the model write a user's turn about a passage.

    A    passage + seed          -> the user's turn    (the seed is of one of five kinds)
    B    passage + turn          -> the answer         (without the seed)
    A    passage + turn, answer  -> the next turn, which takes up the answer
    B    passage + conversation  -> its answer

The five kinds are those of the Cartridges paper (Eyuboglu et al., 2025); the wording is our own.
Where A writes nothing usable, `plain_turn` and `plain_next_turn` make a turn without a model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import regex

from cartridge_forge.plugins.documents.words import STRONG_END, word_spans

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

NEXT_SEEDS = (
    "The conversation above is about the passage above it. Write the user's next message: it asks "
    "about something in the last answer that the passage says more about.",
    "The conversation above is about the passage above it. Write the next message of the user, who "
    "doubts a point of the last answer, names it, and wants to know what the text has to say.",
    "The conversation above is about the passage above it. Write the message in which the user now "
    "wants the last answer put to use, shortened, or laid out in another form.",
)

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
PLAIN_NEXT = (
    'You said "{cue}". What does the text say about that?',
    'Say more about "{cue}".',
)
CUE_WORDS = (3, 9)
SENTENCE = regex.compile(rf"(?<=[.!?])\s+|\n+|{STRONG_END}\s*", regex.V1)


def asking(passage: str, kind: str, rng: random.Random) -> str:
    """Return A's prompt: the passage, then a seed of the kind."""
    return f"{passage.strip()}\n\n---\n\n{rng.choice(SEEDS[kind])} {WRITE}"


def asking_on(passage: str, history: Sequence[tuple[str, str]], rng: random.Random) -> str:
    """Return A's prompt for the turn after `history`, whose pairs are a user's turn and the
    answer."""
    turns = "\n\n".join(f"User: {turn}\n\nAssistant: {answer}" for turn, answer in history)
    return f"{passage.strip()}\n\n---\n\n{turns}\n\n---\n\n{rng.choice(NEXT_SEEDS)} {WRITE}"


def plain_turn(passage: str, kind: str, rng: random.Random) -> str:
    """Return a turn that refers to the passage by the first words of one of its sentences."""
    cue = _cue(passage, rng)
    return rng.choice(PLAIN[kind]).format(cue=cue)


def plain_next_turn(answer: str, rng: random.Random) -> str:
    """Return a turn that refers to the answer before it by first words of one of its sentences."""
    cue = _cue(answer, rng)
    return rng.choice(PLAIN_NEXT).format(cue=cue)


def _cue(text: str, rng: random.Random) -> str:
    sentence = rng.choice([s for s in SENTENCE.split(text) if s.strip()] or ["the text"])
    *_, last = word_spans(sentence)[: rng.randint(*CUE_WORDS)]
    return " ".join(sentence[: last[1]].split()).strip(" ,;:\"'")
