"""Files of handbooks: what is read, and what is refused with place and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.clinic.desk import draw_desk
from cartridge_forge.plugins.clinic.handbooks import desk_handbook
from cartridge_forge.plugins.environments.action_parsing import DESK, JSON
from cartridge_forge.plugins.episodes.handbooks.checks import GovernedTurn, obeys
from cartridge_forge.plugins.episodes.handbooks.file import CheckSpec, HandbookFile
from cartridge_forge.plugins.episodes.handbooks.reading import read_handbook, read_handbooks
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import DataError, ForgeError, SpecError
from cartridge_forge.protocols.files import REPOSITORY

GOOD = """\
text: End with Bye. Be short.
rules:
  - {id: closing, check: {ends_with: "Bye."}}
  - {id: short, check: {sentences: 2}}
train:
  - turns: ["May I pay by card?", {user: "And by cheque?", rules: [short]}]
held_out:
  - turns: ["Where may I park?"]
"""


def written(folder: Path, text: str = GOOD, name: str = "desk.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def learn(path: str, *sets: str) -> EpisodesLearn:
    words = (f"data.path={path}", "data.facts=null", *sets)
    return EpisodesLearn.of(load_spec("meshes/handbook.yaml", sets=words).spec.learn)


def test_a_file_has_a_text_rules_and_tasks(tmp_path: Path) -> None:
    book = read_handbook(written(tmp_path))
    assert (book.name, book.text) == ("desk", "End with Bye. Be short.")
    (task,) = book.file.train
    assert [turn.message for turn in task.turns] == [
        ("user", "May I pay by card?"), ("user", "And by cheque?"),
    ]  # fmt: skip
    governing = [book.file.rule_ids(task, turn) for turn in task.turns]
    assert governing == [("closing", "short"), ("short",)]


def test_a_folder_and_json_are_read_with_the_text_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "front_desk"
    folder.mkdir()
    (folder / "rules.md").write_text("\nEnd with Bye.\n")
    values: dict[str, Any] = {
        "text_file": "rules.md", "rules": [{"id": "closing", "check": {"ends_with": "Bye."}}],
        "train": [{"turns": ["a?"]}], "held_out": [{"turns": ["b?"]}],
    }  # fmt: skip
    (folder / "handbook.json").write_text(json.dumps(values))
    book = read_handbook(folder)
    assert (book.name, book.text, book.folder) == ("front_desk", "End with Bye.", str(folder))


def test_a_text_within_a_package_is_read_and_the_package_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped protocol names commitizen, of which this has the file alone."""
    place = tmp_path / "commitizen" / "cz" / "conventional_commits"
    place.mkdir(parents=True)
    (tmp_path / "commitizen" / "__init__.py").write_text("raise RuntimeError")
    (place / "conventional_commits_info.txt").write_text("fix: a bug\n")
    file = REPOSITORY / "configs" / "handbooks" / "commits.yaml"
    with pytest.raises(DataError, match="commitizen is no installed package; run `pip install"):
        read_handbook(file)
    monkeypatch.syspath_prepend(str(tmp_path))
    book = read_handbook(file)
    assert (book.name, book.text) == ("commits", "fix: a bug")
    turns = [len(task.turns) for task in (*book.file.train, *book.file.held_out)]
    assert turns == [1, 1, 1, 4, 4, 12] * 2


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("ends_with", "ends_wiht", "unknown key ends_wiht at {}:3 (rules[0].check.ends_wiht); did "
         "you mean ends_with?"),
        ("sentences: 2", "sentences: 0", "sentences must be >= 1: got 0 at {}:4"),
        ("{sentences: 2}", "{sentences: 2, words: 9}", "must name one check (sentences, words given"
         "): got a mapping at {}:4"),
        ("{sentences: 2}", '{matches: "("}', "must be a regular expression"),
        ("{sentences: 2}", "{python: polite}", "must be package.module:function: got 'polite' at "
         "{}:4"),
        ("{sentences: 2}", "{calls_before: [a]}", "must name two different tools: got"),
        ("id: short", "id: closing", "must have names of their own"),
        ("id: short", "id: all", "must not be all, the name of all rules together: got 'all' at "
         "{}:4"),
        ("rules: [short]", "rules: [brief]", "must name rules of this handbook (closing, short): "
         "got [brief] at {}:6 (train[0].turns[1]); correct brief"),
        ('user: "And', 'tool: "And', None),
        ('["May I pay by card?", {user', '[{tool: "x"}, {user', "must begin each conversation with "
         "the user (turn 0 is a tool's)"),
        ('{user: "And by cheque?"', '{user: "a", tool: "b"', "must have user or tool, and not "
         "both"),
        ("held_out:\n  - turns: [\"Where may I park?\"]", "held_out: []", "must hold at least one "
         "item"),
        ("held_out:\n", "held_outs:\n", "held_out must be given: missing at {}"),
        ("Where may I park?\"]", "May I pay by card?\", \"And by cheque?\"]", "must be no training "
         "task: it is train[0] word for word: got 'May I pay by card?' at {}:8 (held_out[0])"),
        ("Where may I park?\"]", "Where may I park?\"]\n    rules: [short]", "must each govern a "
         "held-out task, and closing govern none: got [closing] at {}:2 (rules)"),
        ("{sentences: 2}", "{expected: equals}", "must have expected, which the rule short compares"
         " with"),
        ("text: End with Bye. Be short.\n", "", "must have one of text, text_file and package"),
        ("text: End", "text_file: no.md\ntext: End", "must have one of text, text_file and package "
         "(got text, text_file)"),
        ("text: End with Bye. Be short.", "text_file: no.md", "cannot be read"),
        ("text: End with Bye. Be short.", 'text: "  "', "has no text; write the rules into it"),
        ("text: End with Bye. Be short.", "package: json/no.txt", "cannot be read"),
        ("text: End", "text: End\ntext: End", "text"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_with_place_and_remedy(
    tmp_path: Path, old: str, new: str, told: str | None
) -> None:
    assert GOOD.count(old) >= 1
    path = written(tmp_path, GOOD.replace(old, new, 1))
    if told is None:
        read_handbook(path)
        return
    with pytest.raises(ForgeError) as error:
        read_handbook(path)
    assert told.format(path) in str(error.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no.yaml", tmp_path):
        with pytest.raises(DataError, match=r"data\.path names a YAML or JSON file, or a folder"):
            read_handbook(path)
    with pytest.raises(DataError, match=r"must end with \.yaml, \.yml, \.json"):
        read_handbook(written(tmp_path, name="desk.txt"))


def test_several_handbooks_are_named_apart_and_call_alike(tmp_path: Path) -> None:
    one, other = written(tmp_path, name="one.yaml"), written(tmp_path, name="other.yaml")
    both = learn(f"{one}:{other}", "data.patients=2")
    assert [book.name for book in read_handbooks(both)] == ["one", "other"]
    other.write_text(f"name: one\n{GOOD}")
    with pytest.raises(DataError, match="two handbooks have the name one"):
        read_handbooks(both)
    other.write_text(f"calls: desk\n{GOOD}")
    with pytest.raises(DataError, match="must have the same calls"):
        read_handbooks(both)


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (("data.path=a.yaml:b.yaml", "data.facts=null"), "patients must be 2"),
        (("data.path=a.yaml", "data.facts=3"), "facts is read with data.path null alone"),
        (("data.facts=null",), "facts must be given with data.source handbook"),
        (("episodes.cases=2",), "cases must be 1 but at desks"),
        (
            ("episodes=null", "rollout.prompts=4"),
            "source must be desk, environment, handbook or rows",
        ),
        (("objective.w_rl=1",), "verify must be null with objective.w_rl"),
        (("rollout.until_refused=0.05",), "until_refused must be null"),
        (
            ("train.mix={verified: 0.5, plain: 0.5}",),
            "mix is read with recipe longhealth or documents alone",
        ),
        (("train.staleness=1",), "verify must be null with train.staleness"),
        (("objective.w_doc=0", "objective.w_rl=1"), "verify must be null with objective.w_rl"),
    ],
)
def test_specs_that_do_not_fit_handbooks_are_refused(sets: tuple[str, ...], told: str) -> None:
    with pytest.raises(SpecError) as error:
        load_spec("meshes/handbook.yaml", sets=sets)
    assert told in str(error.value)


def test_no_environment_is_needed_and_plain_rollouts_learn_from_rewards_too() -> None:
    spec = load_spec("meshes/handbook.yaml", sets=("rollout.verify=null", "objective.w_rl=1")).spec
    assert spec.learn.recipe == "episodes"
    assert spec.learn.needed_roles == {"generator", "doc_teacher", "trainer"}


def test_a_desk_s_handbook_has_tasks_of_1_4_and_12_turns_that_are_held_out() -> None:
    book = HandbookFile.model_validate(desk_handbook(3, 2, 24))
    desk = draw_desk(3, 2, 24)
    assert (book.name, book.text, book.calls) == ("desk_02", desk.document, "desk")
    lengths = [len(task.turns) for task in book.held_out]
    assert lengths == [1, 4, 12] * 12
    departments = dict(desk.handbook)
    for task in (*book.train, *book.held_out):
        firsts = task.turns[::3]
        fields = [str(turn.user).removeprefix("what is the ").removesuffix("?") for turn in firsts]
        assert len(set(fields)) == len(fields)
        assert [turn.expected for turn in firsts] == [
            f"find {field} in {departments[field]}." for field in fields
        ]
        assert all(turn.new for turn in firsts)


FIND = '{"tool": "find", "arguments": {"field": "sodium", "page": 2}}'
ANSWER = '{"tool": "answer", "arguments": {"value": "41"}}'


def check(**given: Any) -> CheckSpec:
    return CheckSpec.model_validate(given)


@pytest.mark.parametrize(
    ("given", "texts", "obeyed"),
    [
        ({"ends_with": "Bye."}, ["Yes. Bye.", " No.\nBye. \n"], True),
        ({"ends_with": "Bye."}, ["Yes. Bye.", "No. bye."], False),
        ({"ends_with": "Bye."}, ["<think>so: Bye.</think> Yes."], False),
        ({"begins_with": "feat"}, ["feat: a"], True),
        ({"begins_with": "feat"}, ["a feat"], False),
        ({"contains": "A-12"}, ["see A-12 there", "A-12"], True),
        ({"contains": "A-12"}, ["see A-12", "see a-12"], False),
        ({"lacks": "sorry"}, ["Yes.", "Sorry."], True),
        ({"lacks": "sorry"}, ["Yes.", "I am sorry."], False),
        ({"matches": r"\A[a-z]+(\([a-z]+\))?: \S"}, ["fix(core): stop", "feat: go"], True),
        ({"matches": r"\A[a-z]+(\([a-z]+\))?: \S"}, ["Fix: stop"], False),
        ({"sentences": 2}, ["It is 3.5 m, e.g. here. No more."], True),
        ({"sentences": 2}, ["One. Two! Three?"], False),
        ({"sentences": 1}, ["find surgeon in cardiology."], True),
        ({"sentences": 1}, ["find surgeon. read note."], False),
        ({"words": 3}, ["one, two three!"], True),
        ({"words": 3}, ["one two three four"], False),
        ({"calls_before": ["find", "answer"]}, [FIND, "hm", ANSWER], True),
        ({"calls_before": ["find", "answer"]}, [FIND], True),
        ({"calls_before": ["find", "answer"]}, [ANSWER, FIND], False),
        ({"calls_before": ["find", "answer"]}, ["hm"], False),
        ({"calls": {"tool": "find"}}, [FIND], True),
        ({"calls": {"tool": "find", "arguments": {"page": 2}}}, [f"I look. {FIND}"], True),
        ({"calls": {"tool": "find", "arguments": {"page": 3}}}, [FIND], False),
        ({"calls": {"tool": "find", "arguments": {"note": None}}}, [FIND], False),
        ({"calls": {"tool": "find"}}, [FIND, ANSWER], False),
    ],
)
def test_a_check_looks_at_every_answer(
    given: dict[str, Any], texts: list[str], obeyed: bool
) -> None:
    assert obeys(check(**given), [GovernedTurn(text) for text in texts], JSON) is obeyed


@pytest.mark.parametrize(
    ("how", "text", "obeyed"),
    [
        ("equals", " find a. ", True),
        ("equals", "I find a.", False),
        ("contains", "I find a.", True),
    ],
)
def test_an_answer_is_compared_with_what_its_turn_expects(
    how: str, text: str, obeyed: bool
) -> None:
    turns = [GovernedTurn("read note 1.", "read note 1."), GovernedTurn(text, "find a.")]
    assert obeys(check(expected=how), turns, JSON) is obeyed


def test_calls_at_a_desk_are_its_words() -> None:
    turns = [GovernedTurn("find sodium in urology."), GovernedTurn("read note 7.")]
    assert obeys(check(calls_before=["find", "read"]), turns, DESK)
    assert not obeys(check(calls_before=["find", "read"]), turns[::-1], DESK)
    assert obeys(check(calls={"tool": "read", "arguments": {"note": 7}}), turns[1:], DESK)


def test_a_regular_expression_that_does_not_end_is_interrupted() -> None:
    with pytest.raises(TimeoutError):
        obeys(check(matches=r"(a|aa)+b(?<=c)\Z"), [GovernedTurn("a" * 60)], JSON)
