"""Calls in texts, cut in every way; the templates that tell tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving_setup import READER

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.chat.messages import AgentMessage, AgentTool
from cartridge_forge.plugins.chat.wire.detokenizer import TextPiece
from cartridge_forge.plugins.serve.responses import joined
from cartridge_forge.plugins.serve.structured.call_formats import (
    DESK,
    HERMES,
    LLAMA3_JSON,
    CallFormat,
    text_with_calls,
)
from cartridge_forge.plugins.serve.structured.call_reading import CalledTools, with_calls
from cartridge_forge.plugins.serve.tokenization import Tokenization

F = '{"name": "f", "arguments": {"a": "}\\"{", "b": [1, {}]}}'
ARGUMENTS = '{"a": "}\\"{", "b": [1, {}]}'
CASES: list[tuple[CallFormat, str, str, list[tuple[str, str]]]] = [
    (HERMES, "no call, 1 < 2.\n", "no call, 1 < 2.\n", []),
    (HERMES, f"<tool_call>\n{F}\n</tool_call>", "", [("f", ARGUMENTS)]),
    (
        HERMES,
        f"I look.\n\n<tool_call>{F}</tool_call>\n<tool_call>\n"
        '{"name":"g","arguments":{}}\n</tool_call> and more',
        "I look.",
        [("f", ARGUMENTS), ("g", "{}")],
    ),
    (
        HERMES,
        '<tool_call>\n{"arguments": {"x": "é"}, "name": "g"}\n</tool_call>',
        "",
        [("g", '{"x": "é"}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "g", "arguments": "{\\"x\\": 1}"}</tool_call>',
        "",
        [("g", '{"x": 1}')],
    ),
    (HERMES, '<tool_call>{"name": "g", "arguments": {"x": 1}}', "", [("g", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "g", "arguments": {"x": ', "", [("g", '{"x": ')]),
    (
        HERMES,
        'a <tool_call>{"name": "unknown", "arguments": {}}</tool_call> b',
        'a <tool_call>{"name": "unknown", "arguments": {}}</tool_call> b',
        [],
    ),
    (HERMES, "a <tool_call>nothing", "a <tool_call>nothing", []),
    (HERMES, "a </tool_call> <tool", "a </tool_call> <tool", []),
    (LLAMA3_JSON, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (
        LLAMA3_JSON,
        ' {"name": "f", "parameters": {"a": 1}}; {"parameters": {}, "name": "g"} so',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (LLAMA3_JSON, '{"answer": {"a": 1}} it is', '{"answer": {"a": 1}} it is', []),
    (LLAMA3_JSON, 'as {"name": "f", "parameters": {}}', 'as {"name": "f", "parameters": {}}', []),
    (LLAMA3_JSON, '\n{"name": ', '\n{"name": ', []),
    (DESK, " find surgeon in cardiology.", "", []),
]


def read(form: CallFormat, parts: list[str], most: int | None = None) -> TextPiece:
    names = {"f", "g", "find"}
    reader = form.read(CalledTools(names, most, "call_{}".format))
    pieces = [with_calls(reader, TextPiece(part, ())) for part in parts]
    return joined([*pieces, with_calls(reader, TextPiece("", (), "stop"))])


@pytest.mark.parametrize("case", range(len(CASES) - 1))
def test_calls_are_read_however_the_text_is_cut(case: int) -> None:
    form, text, said, calls = CASES[case]
    for size in (1, 2, 3, 5, 7, 1000):
        whole = read(form, [text[i : i + size] for i in range(0, len(text), size)])
        assert whole.text == said
        assert [(call.name, call.arguments) for call in whole.calls] == calls
        assert [call.id for call in whole.calls] == [f"call_{i}" for i in range(len(calls))]
        ended = bool(calls) and calls[-1][1].endswith("}")
        assert whole.finish_reason == ("tool_calls" if ended else "stop")


def test_no_more_calls_than_may_come() -> None:
    form, text, said, calls = CASES[2]
    one = read(form, list(text), most=1)
    assert (one.text, [c.name for c in one.calls]) == (said, [calls[0][0]])


def test_the_desks_sentence() -> None:
    (call,) = read(DESK, [" find sur", "geon in cardiology."]).calls
    assert (call.name, call.arguments) == (
        "find",
        '{"field": "surgeon", "department": "cardiology"}',
    )
    for text in ("find surgeon.", "read note 17.", "hello."):
        assert read(DESK, [text]) == TextPiece(text, (), "stop")


QWEN = (
    "{{ bos_token }}{%- if tools %}<|system|>{% if messages[0].role == 'system' %}"
    "{{ messages[0].content }}{% endif %}"
    "# Tools <tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools><|end|>"
    "{%- elif messages[0].role == 'system' %}<|system|>{{ messages[0].content }}<|end|>{% endif %}"
    "{%- for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}"
    '{%- for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|end|>'
    "{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{%- for m in messages %}<|{{ m.role }}|>"
    "{%- if tools and m.role == 'user' and loop.last %}{{ tools | tojson }}{% endif %}"
    '{%- if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{%- else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
FIND = AgentTool("find", "a note", {"type": "object", "properties": {"x": {"type": "integer"}}})


def texts(template: str | None, name: Any = None) -> Tokenization:
    tokenizer = load_tokenizer(str(READER))
    if template:
        tokenizer.chat_template = template
    return Tokenization(tokenizer, name)


def told(template: str | None, cartridge: bool, *chat: AgentMessage) -> str:
    one = texts(template)
    return one.decode(one.chat(chat or (AgentMessage("user", "who?"),), cartridge, (FIND,)).ids)


def test_the_form_is_the_templates_own() -> None:
    assert texts(QWEN).calls is HERMES
    assert texts(LLAMA).calls is LLAMA3_JSON
    assert texts(None).calls is HERMES
    assert texts(None, "desk").calls is DESK
    assert texts(LLAMA, "hermes").calls is HERMES


def test_tools_are_told_by_the_template_or_before_the_first_message() -> None:
    assert "# Tools <tools>" in told(QWEN, False)
    assert told(LLAMA, True).strip().startswith('[{"')
    # A cartridge stands for the system block: the tools cannot be in it.
    for text in (told(QWEN, True), told(None, False), told(None, True)):
        assert "You can call these functions" in text
        assert '{"name": "find", "description": "a note", "parameters": ' in text
        assert text.rstrip().endswith("who?")
    system = told(None, False, AgentMessage("system", "be brief"), AgentMessage("user", "who?"))
    assert system.index("</tools>") < system.index("be brief") < system.index("who?")


def test_earlier_calls_are_written_as_the_template_writes_them() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}
    for template in (QWEN, LLAMA):
        one = texts(template)
        chat = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        rendered = one.tokenizer.apply_chat_template(chat, tokenize=False)
        assert text_with_calls(one.calls, "", [("f", '{"a": [1, "é"]}')]) in rendered
    assert text_with_calls(HERMES, "so", [("f", "{}"), ("g", "{}")]) == (
        'so\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )
    assert text_with_calls(DESK, "", [("read", '{"note": 17}')]) == "read note 17."


def test_marks_that_are_special_tokens_are_read() -> None:
    tokenizer = load_tokenizer(str(READER))
    marks = ["<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    one = Tokenization(tokenizer)
    text = f"so <tool_call>{F}</tool_call>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert set(tokenizer.convert_tokens_to_ids(marks)) < set(ids)
    assert "tool_call" not in one.decode(ids)
    (call,) = read(HERMES, [one.decode_calls(ids)]).calls
    assert (call.name, json.loads(call.arguments)) == ("f", json.loads(ARGUMENTS))
    assert one.decode_calls(ids[:1]) == one.decode(ids[:1])
