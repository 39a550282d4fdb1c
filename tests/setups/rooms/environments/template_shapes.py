"""Chat templates in the shapes of model families, each with a small byte-level tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cartridge_forge.learning.model.loading import load_tokenizer

WORDS = (
    "the sodium of the patient is 41 mmol. the surgeon is dr quill, and the ward has 12 beds.\n\n"
    "what is the sodium? who is the surgeon? why? it is high. - one\n- two (three) \n" * 4
)
LOOP = "{% for m in messages %}"
HEADERS = (
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' "
    "}}"
)
ASSISTANT = (
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
STRICT = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
)
IN_FIRST = (  # the system's text at the head of the first user's turn
    "{% if messages[0].role == 'system' %}{% set before = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set before = '' %}{% set rest = messages %}"
    "{% endif %}{% for m in rest %}" + STRICT
)
GEMMA_TURN = (
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + "
    "(before if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """A family's template, its special tokens (the first begins a text), the tokenizer's end token,
    and those of generation_config.json."""

    template: str
    special: tuple[str, ...]
    eos: str
    ends: tuple[str, ...] = ()


SHAPES = {
    # Llama 3.2: the date in the system block; headers that tokenizer.json alone marks as special.
    "llama3": Shape(
        "{{ bos_token }}{% if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}"
        "{% else %}{% set date = '26 Jul 2024' %}{% endif %}{% if messages[0].role == 'system' %}"
        "{% set said = messages[0].content | trim %}{% set messages = messages[1:] %}{% else %}"
        "{% set said = '' %}{% endif %}{{ '<|start_header_id|>system<|end_header_id|>\n\nToday: ' "
        "+ date + '\n\n' + said + '<|eot_id|>' }}" + LOOP + HEADERS + "{% endfor %}" + ASSISTANT
        + "{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
         "<|end_of_text|>", "<|eom_id|>"),
        "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "gemma3": Shape(
        "{{ bos_token }}" + IN_FIRST + GEMMA_TURN,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>",
        ("<eos>", "<end_of_turn>"),
    ),
    "gemma2": Shape(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system "
        "turn') }}{% endif %}{% set before = '' %}" + LOOP + STRICT + GEMMA_TURN,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>",
        ("<eos>", "<end_of_turn>"),
    ),
    "llama2": Shape(
        "{% if messages[0].role == 'system' %}{% set before = '<<SYS>>\n' + messages[0].content + "
        "'\n<</SYS>>\n\n' %}{% set rest = messages[1:] %}{% else %}{% set before = '' %}{% set "
        "rest = messages %}{% endif %}{% for m in rest %}{% if m.role == 'user' %}{{ bos_token + "
        "'[INST] ' + (before if loop.first else '') + m.content | trim + ' [/INST]' }}{% else %}"
        "{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}",
        ("<s>", "</s>"), "</s>", ("</s>",),
    ),
    # Mistral v0.3: in the last user's turn.
    "mistral": Shape(
        "{% if messages[0].role == 'system' %}{% set before = messages[0].content + '\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set before = '' %}{% set rest = messages %}"
        "{% endif %}{{ bos_token }}{% for m in rest %}" + STRICT + "{% if m.role == 'user' %}"
        "{{ '[INST] ' + (before if loop.last else '') + m.content + '[/INST]' }}{% else %}"
        "{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", ("</s>",),
    ),
    # As Mistral's, with a blank after the system's text.
    "last": Shape(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set before = messages[0].content + "
        "' ' %}{% set messages = messages[1:] %}{% else %}{% set before = '' %}{% endif %}" + LOOP
        + "{{ '<|' + m.role + '|>' }}{% if loop.last and m.role == 'user' %}{{ before }}{% endif %}"
        "{{ m.content + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        ("<|bos|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>",
    ),
    # Phi-3 as it was first published: the system's text is left out.
    "phi3": Shape(
        "{{ bos_token }}" + LOOP + "{% if m.role != 'system' %}{{ '<|' + m.role + '|>\n' + "
        "m.content + '<|end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|endoftext|>", ("<|endoftext|>", "<|end|>"),
    ),
    # Phi-3.5: a system block, and an end token behind a conversation without a generation prompt.
    "phi35": Shape(
        LOOP + "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|endoftext|>",
    ),
    # Nothing ends a turn but the header of the next.
    "glm4": Shape(
        "[gMASK]<sop>" + LOOP + "{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>",
         "<|observation|>"),
        "<|endoftext|>", ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    # A system's text alone is refused.
    "asks": Shape(
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('no question') }}{% endif %}" + LOOP + "{{ '<|im_start|>' + m.role + "
        "'\n' + m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>",
        ("<|im_end|>", "<|endoftext|>"),
    ),
}  # fmt: skip


@cache
def tokenizer(name: str) -> Any:
    """The tokenizer of a shape, loaded from a directory as a model's is. Only the begin and end
    token are named in tokenizer_config.json."""
    shape, home = SHAPES[name], Path(mkdtemp(prefix="template-"))
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator([WORDS], trainer)
    fast.add_special_tokens([AddedToken(t, special=True) for t in shape.special])
    fast.save(str(home / "tokenizer.json"))
    config = {
        "tokenizer_class": "TokenizersBackend", "bos_token": shape.special[0],
        "eos_token": shape.eos, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    (home / "chat_template.jinja").write_text(shape.template)
    if shape.ends:
        ends = [fast.token_to_id(token) for token in shape.ends]
        (home / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return load_tokenizer(str(home))
