"""A tool with an argument of each type, and arguments of any shape."""

from __future__ import annotations

from hypothesis import strategies as st
from replay_setup import READ, a_state

from cartridge_forge.plugins.chat.messages import AgentTool

TYPED = AgentTool(
    "typed",
    "One argument of each type.",
    {
        "type": "object",
        "properties": {
            "i": {"type": "integer"},
            "n": {"type": "number"},
            "s": {"type": "string"},
            "b": {"type": "boolean"},
            "l": {"type": "array", "items": {"type": "integer"}},
            "o": {"type": "object", "properties": {"i": {"type": "integer"}}},
        },
    },
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
TYPED_STATE = a_state(tools=(TYPED, READ))
