"""Build the tiny model's tokenizer: byte-level BPE with one token for each word of the clinic.

It encodes any other text byte by byte, so every user question can be tokenized.
"""

from __future__ import annotations

import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cartridge_forge.plugins.clinic import vocabulary as words
from models.pretrain.reader_tasks import Difficulty, draw_conversation

SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHARTS = 400
KINDS = ["recite", "structure", "summarise", "question", "options"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer on drawn charts and on the bare word lists."""
    rng = random.Random("tokenizer")
    text: list[str] = []
    for _ in range(CHARTS):
        patient, turns = draw_conversation(rng, Difficulty((8, 24), 1.0), KINDS)
        text.append(patient.document)
        text += [t for turn in turns for t in (turn.prompt, turn.response)]
    singles = [*words.FIELDS, *words.FIRST_NAMES, *words.MONTHS, *words.DEPARTMENTS]
    singles += [*words.DIAGNOSES, *words.LAB_UNITS.values()]
    singles += [v for c in words.CATEGORIES for v in c.values]
    text += [f" {word}" for word in singles for _ in range(20)]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,  # never reached: merging stops when every word is one token
        min_frequency=10,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        additional_special_tokens=list(SPECIAL[3:]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
