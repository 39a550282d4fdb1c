"""Keys that the chosen recipe, source of data, channel or engine does not read: refused by name in
every kind of run, or left out where what chose was written later."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cartridge_forge.plugins.rsa.spec import RsaLearn
from cartridge_forge.plugins.spec_files.keys import CONFIG_FILE, section_in
from cartridge_forge.plugins.spec_files.loading import load_resolved, load_spec
from cartridge_forge.plugins.spec_files.unread import without_unread
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.base import ReadWith
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.mesh import RunSpec

ALONE = ("objective.beta=0", "replay=null", "objective.sdpo.hints=feedback")
ENVIRONMENT = 'episodes.environment={kind: python, factory: "a:B", document: x.txt}'
GYM = "rsa.problems={kind: reasoning_gym, name: x}"
# One run of each recipe and source: its mesh, and what is set over it.
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "clinic": ("longhealth", ()),
    "longhealth": ("longhealth", ("data.source=longhealth", "data.path=x.json")),
    "study": ("documents", ("data.path=docs",)),
    "study_longhealth": ("longhealth_3b", ("data.path=x.json",)),
    "rows": ("documents", ("data.source=jsonl", "data.path=rows.jsonl", "self_study=null")),
    "judged_rows": (
        "three_channels",
        ("data.source=jsonl", "data.path=rows.jsonl", "reward=[{verifier: exact}]", *ALONE),
    ),
    "desk": ("three_channels", ()),
    "environment": ("three_channels", ("data.source=environment", ENVIRONMENT, *ALONE)),
    "handbook": ("handbook", ()),
    "rsa": ("rsagent", ()),
    "rsa_primer": ("rsagent", ("data.source=primer", "data.patients=1", GYM)),
}
PROMPTED = {"clinic", "longhealth", "study", "study_longhealth", "rows"}
EPISODES = {"judged_rows", "desk", "environment", "handbook"}
RSA = {"rsa", "rsa_primer"}
REWARDED = {"judged_rows", "desk", "environment", *RSA}
ROWS = {"rows", "judged_rows"}
# By the first part of a key's name that is one of these: the runs that read a key there. Others
# refuse it.
READ: dict[str, set[str]] = {
    "rollout.prompts": PROMPTED,
    "rollout.kinds": {"clinic", "longhealth"},
    "rollout.verify": PROMPTED | EPISODES - {"desk", "environment", "judged_rows"},
    "rollout.until_refused": PROMPTED,
    "generator": {"study_longhealth"},  # the one over vLLM
    "teacher.context_tokens": PROMPTED | RSA,
    "teacher.context": PROMPTED,
    "teacher.retrieved": set(),
    "teacher.top_k_of": PROMPTED,
    "teacher.tensor_parallel": PROMPTED | EPISODES,
    "loss": PROMPTED | EPISODES,
    "objective.grpo": REWARDED,
    "objective.sdpo": {"judged_rows", "desk", "environment"},
    "objective.alpha_warmup_steps": {"judged_rows", "desk", "environment"},
    "objective.dpo": {"desk"},
    "objective.balance": {"judged_rows", "desk", "environment"},
    "objective.balance_every": {"judged_rows", "desk", "environment"},
    "train.warm_start": PROMPTED | EPISODES,
    "train.mix": PROMPTED,
    "train.compose": PROMPTED,
    "evaluate.retriever": set(),
    "replay.gate": {"desk"},
    "data.path": {*PROMPTED, "judged_rows", "handbook", "rsa"},
    "data.questions": {"study"},
    "data.seed": {"clinic", *ROWS, "desk", "handbook", "rsa"},
    "data.facts": {"clinic", "desk", "handbook", "rsa"},
    "data.notes": {"clinic", "rsa"},
    "data.questions_per_fact": {"clinic", "rsa"},
    "data.own_fields": {"clinic", "rsa"},
    "data.held_out": {*PROMPTED, "judged_rows", "rsa"},
    "data.instruction": {*PROMPTED - {"rows"}, "rsa"},
    "data.name_document": PROMPTED,
    "data.rows": ROWS,
    "documents.long": {"study", "study_longhealth", "rows"},
    "documents.overlap": PROMPTED,
    "documents": {"study", *ROWS},
    "episodes.cases": {"desk"},
    "episodes.environment": {"desk", "environment"},
    "rsa.problems": RSA,
    "self_study.scores": set(),
}


def parts(annotation: Any, marks: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the types of a union, each with its bounds."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        yield from parts(inner, (*marks, *more))
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from parts(part, marks)
    else:
        yield annotation, marks


def values(field: FieldInfo) -> list[Any]:
    """Return values of a leaf key, some of which are valid and are not its default."""
    found: list[Any] = []
    for kind, marks in parts(field.annotation, tuple(field.metadata)):
        steps = [m.multiple_of for m in marks if getattr(m, "multiple_of", None)]
        if get_origin(kind) is Literal:
            found += get_args(kind)
        elif get_origin(kind) is tuple:
            item, _ = next(parts(get_args(kind)[0], ()))
            found += [[v] for v in get_args(item)] or [["x"]]
        elif get_origin(kind) is dict:
            found += [{"prompt": "x"}]
        else:
            plain: dict[Any, list[Any]] = {
                bool: [True, False], int: [2 * steps[0]] if steps else [2, 3, 1],
                float: [0.25, 2.0], str: ["x", "ascii"],
            }  # fmt: skip
            found += plain.get(kind, [])
    return [v for v in found if v != field.get_default(call_default_factory=True)]


def marked(
    section: type[BaseModel], prefix: str = "", outer: tuple[ReadWith, ...] = ()
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the leaf keys that are read with another, outside lists of sections."""
    for name, field in section.model_fields.items():
        marks = (*outer, *(m for m in field.metadata if isinstance(m, ReadWith)))
        below = section_in(field.annotation)
        if below is None and marks:
            yield f"{prefix}{name}", field
        elif below is not None and get_origin(field.annotation) is not tuple:
            yield from marked(below, f"{prefix}{name}.", marks)


MARKED = dict(marked(CONFIG_FILE.root))


def entry(key: str) -> str:
    """Return the entry of READ that a key belongs to: the longest that begins its name."""
    return max((e for e in READ if f"{key}.".startswith(f"{e}.")), key=len)


def outcome(run: str, key: str) -> str:
    """Return "" where a run takes some other value of the key, or the message of its refusal; a
    refusal of a value alone, or by a rule, is none."""
    mesh, sets = RUNS[run]
    message = "nothing was tried"
    for value in values(MARKED[key]):
        override = f"{key}={json.dumps(value)}"
        try:
            load_spec(mesh, sets=(*sets, override))
        except SpecError as error:
            lines = [line for line in str(error).splitlines() if f"({key})" in line]
            if " is read with " in str(error):
                return next((line for line in lines if " is read with " in line), str(error))
            message = str(error)
        else:
            return ""
    return message


@pytest.mark.parametrize("run", RUNS)
def test_what_a_run_does_not_read_is_refused_by_name(run: str) -> None:
    refused = {key: outcome(run, key) for key in MARKED if run not in READ[entry(key)]}
    for key, message in refused.items():
        assert message, f"{key} is silently ignored"
        if " is read with " in message and f"({key})" in message:  # and not a section around it
            assert message.strip().startswith(f"{key.rpartition('.')[2]} is read with ")
            assert f" at --set {key}=" in message
            assert "; remove it" in message


@pytest.mark.parametrize("run", RUNS)
def test_what_a_run_reads_is_taken(run: str) -> None:
    read = {key: outcome(run, key) for key in MARKED if run in READ[entry(key)]}
    in_vain = {key: m for key, m in read.items() if " is read with " in m}
    # Within a section that is read, keys of another kind of it are not.
    others = {key for key in in_vain if f"({key})" in in_vain[key] and entry(key) != key}
    assert {key: m for key, m in in_vain.items() if key not in others} == {}
    assert len(others) < len(read) / 2


def test_every_section_of_a_plug_in_says_what_reads_it() -> None:
    """Each is a recipe's own, null where another is chosen, or says so by its keys."""
    assert {entry(key) for key in MARKED} == set(READ)  # no mark was taken away
    unmarked = []
    for name, field in CONFIG_FILE.root.model_fields.items():
        below = section_in(field.annotation)
        if name in LearnSpec.model_fields or field.get_default() in (None, ()):
            continue
        assert below is not None
        keys = [f"{name}.{inner}" for inner in below.model_fields]
        unmarked += [k for k in keys if not any(f"{m}.".startswith(f"{k}.") for m in MARKED)]
    # How many documents, in any source; what kind of source; and two estimates for plans.
    assert unmarked == [
        "data.source", "data.patients", "data.document_tokens", "data.prompt_tokens",
    ]  # fmt: skip
    objective = section_in(CONFIG_FILE.root.model_fields["objective"].annotation)
    assert objective is not None
    channels = [n for n, f in objective.model_fields.items() if section_in(f.annotation)]
    assert channels == ["dpo", "grpo", "sdpo"]
    for name in channels:
        marks = objective.model_fields[name].metadata
        assert any(isinstance(mark, ReadWith) for mark in marks), name


def message(*sets: str, mesh: str = "longhealth", overlays: tuple[str, ...] = ()) -> str:
    with pytest.raises(SpecError) as error:
        load_spec(mesh, sets=sets, overlays=overlays)
    return str(error.value)


def rsa_learn(mesh: str, *sets: str, overlays: tuple[str, ...] = ()) -> RsaLearn:
    return RsaLearn.of(load_spec(mesh, sets=sets, overlays=overlays).spec.learn)


def test_what_chooses_and_what_is_read_with_it_have_places(tmp_path: Path) -> None:
    overlay = tmp_path / "over.yaml"
    overlay.write_text("objective:\n  w_doc: 1\n  grpo: {kl: 0.1, mismatch: {high: 3.0}}\n")
    told = message(overlays=(str(overlay),))
    assert [line.strip() for line in told.splitlines()] == [
        "2 faults in the spec:",
        "high is read with objective.w_rl alone, and objective.w_rl is 0.0: got 3.0 at "
        f"{overlay}:3 (objective.grpo.mismatch.high); remove it, or set objective.w_rl",
        "kl is read with objective.w_rl alone, and objective.w_rl is 0.0: got 0.1 at "
        f"{overlay}:3 (objective.grpo.kl); remove it, or set objective.w_rl",
    ]


def test_a_later_choice_leaves_out_what_a_file_has_for_another(tmp_path: Path) -> None:
    off = ("objective.beta=0", "replay=null", "objective.alpha=0")
    learn = rsa_learn("three_channels", *off)
    assert learn.objective.dpo == type(learn.objective.dpo)()
    assert learn.objective.alpha_warmup_steps == 0  # 4 in the file
    # In an overlay too; the file's own keys of vLLM are those of its engine alone.
    overlay = tmp_path / "cpu.yaml"
    overlay.write_text("generator: {backend: torch}\n")
    generator = rsa_learn("longhealth_3b", "data.path=x", overlays=(str(overlay),)).generator
    assert (generator.backend, generator.kv_gib, generator.block_tokens) == ("torch", 1.0, 32)


def test_the_order_of_overrides_decides() -> None:
    kl, no_weight = "objective.grpo.kl=0.1", "objective.w_rl=0"
    others = ("objective.alpha=0", "objective.beta=0", "replay=null")
    assert rsa_learn("three_channels", *others, kl, no_weight).objective.grpo.kl == 0.0
    told = message(*others, no_weight, kl, mesh="three_channels")
    assert told.startswith("kl is read with objective.w_rl alone, and objective.w_rl is 0.0: got")


def test_one_file_must_agree_with_itself(tmp_path: Path) -> None:
    overlay = tmp_path / "over.yaml"
    overlay.write_text("loss: {beta: 0.3, direction: forward}\n")
    assert message(overlays=(str(overlay),)).startswith("beta is read with loss.direction jsd")


def test_a_section_in_a_list_is_judged_by_its_own_keys() -> None:
    rewards = "reward=[{verifier: exact}, {python: 'a:b', folder: r}, {verifier: math, rubric: r}]"
    told = message("data.source=jsonl", "data.path=r.jsonl", *ALONE, rewards, mesh="three_channels")
    assert told == (
        "rubric is read with reward[2].verifier judge alone, and reward[2].verifier is math: got "
        f"'r' at --set {rewards} (reward[2].rubric); remove it, or set reward[2].verifier: judge"
    )


class OtherLearn(RsaLearn):
    """A config of another package's recipe."""

    @property
    def recipe(self) -> str:
        return "of_another_package"


def test_a_recipe_of_another_package_may_read_what_ours_do() -> None:
    learn = rsa_learn("longhealth", "rollout.kinds=[recite]", "teacher.context_tokens=99")
    written = learn.model_dump(mode="json", by_alias=True)
    assert without_unread(OtherLearn.model_validate(written))[0].model_dump() == learn.model_dump()
    written["generator"]["kv_gib"] = 2.0  # other marks hold
    assert without_unread(OtherLearn.model_validate(written))[0].generator.kv_gib == 1.0


@pytest.mark.parametrize("run", RUNS)
def test_a_resolved_spec_reads_back_and_keeps_what_older_runs_did_not_read(
    run: str, tmp_path: Path
) -> None:
    mesh, sets = RUNS[run]
    spec = load_spec(mesh, sets=sets).spec
    assert RunSpec.model_validate(spec.as_dict()) == spec
    written: dict[str, Any] = json.loads(json.dumps(spec.as_dict()))
    if run not in PROMPTED:
        written["learn"]["rollout"]["prompts"] = 8  # required of every run, once
    if run not in REWARDED:
        written["learn"]["objective"]["grpo"]["kl_reference"] = "document"
    path = tmp_path / "spec.yaml"
    path.write_text(dump_yaml(written))
    assert load_resolved(path) == spec
