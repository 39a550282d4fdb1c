#!/usr/bin/env bash
# xgrammar 0.2.8 (vLLM's first choice for JSON schemas): it compiles a schema without some of its keywords, and does not
# say so. llguidance 1.7.6 keeps each of them or refuses the schema by the keyword's name.
#
# Guess: a keyword that the compiler cannot keep is an error, or at least a line of warning, as `pattern` beside
# `maxLength` is.
# Seen 2026-12-01: what stands beside `$ref` or `anyOf` is dropped, so is `type` beside `enum`; `not`, `if`, `contains`,
# `uniqueItems` and `dependentRequired` are not read. Each answer below breaks its schema, each is let through to its end,
# and nothing is printed. `minimum`, `maxLength` and `minProperties` on their own are kept.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 xgrammar==0.2.8 llguidance==1.7.6
cat > "$work/schemas.py" <<'PY'
import json
import sys

import llguidance
import xgrammar

whole, pair = {"type": "integer"}, {"a": {"type": "integer"}, "b": {"type": "integer"}}
one_of_two = [{"required": ["b"]}, {"required": ["a", "b"]}]
schemas = {  # a schema, and JSON that breaks it
    "minimum": ({"type": "integer", "minimum": 5}, "3"),
    "maxLength": ({"type": "string", "maxLength": 2}, '"abc"'),
    "minProperties": ({"type": "object", "additionalProperties": whole, "minProperties": 2}, '{"a": 1}'),
    "minimum beside $ref": ({"$defs": {"n": whole}, "$ref": "#/$defs/n", "minimum": 5}, "3"),
    "properties beside anyOf": ({"type": "object", "properties": pair, "anyOf": one_of_two}, '{"a": 1}'),
    "type beside enum": ({"type": "integer", "enum": ["x", 3]}, '"x"'),
    "not": ({"not": {"type": "string"}}, '"a"'),
    "if": ({"type": "object", "properties": pair, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a": 1}'),
    "contains": ({"type": "array", "items": whole, "contains": {"const": 5}}, "[1]"),
    "uniqueItems": ({"type": "array", "items": whole, "uniqueItems": True}, "[1, 1]"),
    "dependentRequired": ({"type": "object", "properties": pair, "dependentRequired": {"a": ["b"]}}, '{"a": 1}'),
}
letters = [chr(code) for code in range(32, 127)]
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([*letters, "</s>"], stop_token_ids=[len(letters)]))
accepted = set()
for name, (schema, answer) in schemas.items():
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    if matcher.accept_string(answer) and matcher.accept_token(len(letters)):
        accepted.add(name)
    other = llguidance.LLMatcher(tokenizer := llguidance.LLTokenizer("byte"),
                                 llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    ids = tokenizer.tokenize_str(answer)
    kept = other.is_error() or other.try_consume_tokens(ids) < len(ids) or not other.is_accepting()
    assert kept, name
    print(f"{name}: xgrammar {'accepts' if name in accepted else 'refuses'} {answer}", file=sys.stdout)
assert accepted == set(schemas) - {"minimum", "maxLength", "minProperties"}, accepted
PY
"$work/venv/bin/python" "$work/schemas.py" 2> "$work/printed"
if grep -q . "$work/printed"; then cat "$work/printed"; exit 1; fi
