"""Specs from files and overrides: every fault with its whole message, and what wins over what."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml, parse_document
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.mesh import RunSpec


def test_nesting_without_end_is_a_message_not_a_crash() -> None:
    with pytest.raises(SpecError, match="nests too deeply to be a spec"):
        parse_document("a: " + "[" * 2_000, "x.yaml", Path())


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()

trees = st.recursive(scalars, lambda c: st.lists(c) | st.dictionaries(st.text(), c), max_leaves=8)


@given(st.dictionaries(st.text(), trees, min_size=1, max_size=4))
def test_any_plain_values_survive_yaml(values: dict[str, object]) -> None:
    assert parse_document(dump_yaml(values), "x.yaml", Path()).values == values


@st.composite
def run_specs(draw: st.DrawFn) -> RunSpec:
    """Specs over every section, with texts and floats that YAML could mistake for others."""
    words = st.sampled_from(["1e5", "no", "null", "0x1", "a: b", "é", "tab\there", "~", "01"])
    counts, shares = st.integers(2, 2**40), st.floats(0.001, 0.999)
    steps = draw(counts)
    direction = draw(st.sampled_from(["forward", "reverse", "jsd", "cross_entropy"]))
    kinds = st.lists(
        st.sampled_from(["recite", "structure", "question"]), min_size=1, max_size=3, unique=True
    )
    return RunSpec.model_validate(
        {
            "mesh": {
                "name": draw(st.from_regex(r"[a-z][a-z0-9_]*", fullmatch=True)),
                "config": draw(words),
                "hosts": draw(
                    st.sampled_from(
                        [{"kind": "local"}, {"kind": "addresses", "addresses": ["tcp://[::1]:9"]}]
                    )
                ),
                "roles": {"generator": {"replicas": draw(counts), "gpus": draw(counts)}},
                "call_timeout_s": draw(st.floats(1e-9, 1e30)),
            },
            "learn": {
                "model": {"path": draw(words)},
                "data": {
                    "patients": draw(counts),
                    "path": draw(words),
                    "held_out": draw(shares),
                    "instruction": draw(words),
                },
                "cartridge": {"tokens": draw(counts)},
                "rollout": {"prompts": draw(counts), "max_tokens": 8, "kinds": draw(kinds)},
                "teacher": {"top_k": draw(st.just("full") | counts)},
                "loss": {
                    "direction": direction,
                    "beta": draw(shares) if direction == "jsd" else None,
                },
                "train": {"steps": steps, "warmup_steps": steps, "row_tokens": 9},
            },
        }
    )


@given(run_specs())
def test_a_resolved_spec_survives_its_dump(spec: RunSpec) -> None:
    written = parse_document(dump_yaml(spec.as_dict()), "spec.yaml", Path())
    assert RunSpec.model_validate(written.values) == spec
