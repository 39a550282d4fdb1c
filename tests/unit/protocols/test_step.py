"""Test the records of a step and of answers, the control protocol and steady time."""

from __future__ import annotations

import base64
import math
import re
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from grpc_tools import protoc
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.chat.rollouts import hash_of, mean_nll
from cartridge_forge.plugins.library.formats.cartridge_file import date_of, source_of
from cartridge_forge.plugins.statistics.gold import clusters, pairing_key
from cartridge_forge.plugins.watch.score_text import (
    LEAST,
    MOST,
    decoded,
    decoded_top,
    encoded,
    encoded_top,
)
from cartridge_forge.protocols.errors import CheckpointError, DataError
from cartridge_forge.protocols.files import steady_time
from cartridge_forge.protocols.records.answers import TEXT_LIMIT, Answer, cut, to_row
from cartridge_forge.protocols.records.run_files import CHAT_FILE, read_date, write_date
from cartridge_forge.protocols.step import (
    Completion,
    HintedTurn,
    PolicySample,
    PrecomputedScores,
    PreferencePair,
    Sample,
    Sampling,
    completions,
    hinted,
)

EPISODE = PolicySample(
    Sample(
        "e", "p1", (4, 91, 2), (7, 8, 40, 41, 9), (-0.1, -0.7, 0.0, 0.0, -0.2), (3, 3, -1, -1, 3)
    ),
    (True, True, False, False, True),
    Sampling(),
    "g",
    1.0,
)
ITEM = HintedTurn("e", 4, 5, (4, 91, 2, 7, 8, 40, 41, 60, 61))
PAIR = PreferencePair("p", "p1", (4, 91, 2), (7, 8), (9,), -1.7, -0.4, 3)


def test_a_turn_is_read_under_the_hint() -> None:
    (sample,) = hinted([ITEM], [EPISODE])
    assert sample == Sample("e[4:5]", "p1", ITEM.context_ids, (9,), (-0.2,), (3,))
    first, again = hinted([HintedTurn("e", 0, 2, (4, 60, 2)), ITEM], [EPISODE])
    assert (first.prompt_ids, first.response_ids) == ((4, 60, 2), (7, 8))
    assert again == sample


def test_the_sides_of_pairs_in_turn() -> None:
    sides = completions([PAIR, replace(PAIR, id="q", cartridge="p2")])
    assert [s.id for s in sides] == ["p/chosen", "p/rejected", "q/chosen", "q/rejected"]
    assert [s.response_ids for s in sides] == [(7, 8), (9,), (7, 8), (9,)]
    assert [s.cartridge for s in sides] == ["p1", "p1", "p2", "p2"]
    assert {s.prompt_ids for s in sides} == {(4, 91, 2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trained": (True,)}, "e has 5 response tokens, 1 trained marks and 5 sampler"),
        ({"reward": None}, "reward None and error_kind '': an episode has a reward, or None and"),
        ({"error_kind": "timeout"}, "reward 1.0 and error_kind 'timeout'"),
        ({"reward": float("nan")}, "reward nan; use None and an error_kind"),
        ({"trained": (True,) * 5}, r"trains on tokens \[2, 3\] .* which no version sampled"),
    ],
)
def test_an_episode_that_contradicts_itself(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(EPISODE, **change)


@pytest.mark.parametrize(
    "change", [{"start": 5}, {"start": -1}, {"context_ids": ()}, {"start": 4, "stop": 4}]
)
def test_an_item_needs_a_context_and_a_token(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"hinted turn of e spans \["):
        replace(ITEM, **change)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (replace(ITEM, sample="f"), "sample f, which is not in the batch"),
        (replace(ITEM, stop=6), r"tokens \[4, 6\), which are not all the student's own"),
        (replace(ITEM, start=1), r"tokens \[1, 5\), which are not all the student's own"),
    ],
)
def test_an_item_that_points_nowhere(item: HintedTurn, message: str) -> None:
    with pytest.raises(DataError, match=message):
        hinted([item], [EPISODE])


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        ((), ()),
        (((1, 2),), ((-0.1,),)),
        (((1, 2), (3, 4)), ((-0.1, -0.2),)),
        (((1, 2), (3,)), ((-0.1, -0.2), (-0.1,))),
        (((),), ((),)),
    ],
)
def test_stored_scores_have_as_many_at_every_token(ids: Any, logprobs: Any) -> None:
    with pytest.raises(DataError, match="as many at every token"):
        PrecomputedScores(0, ids, logprobs)


@pytest.mark.parametrize("side", ["context_ids", "chosen_ids", "rejected_ids"])
def test_a_pair_needs_all_three(side: str) -> None:
    with pytest.raises(DataError, match="pair p has an empty context or completion"):
        replace(PAIR, **{side: ()})


REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py"])
def test_the_committed_code_is_what_make_proto_writes(name: str, tmp_path: Path) -> None:
    known = Path(protoc.__file__).with_name("_proto")  # google's own, which ours imports
    written = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    sources = [f"-I{REPOSITORY}", f"-I{known}", "cartridge_forge/protocols/wire/control.proto"]
    assert protoc.main(["protoc", *written, *sources]) == 0
    folder = Path("cartridge_forge/protocols/wire")
    fresh, committed = (root / folder / name for root in (tmp_path, REPOSITORY))
    assert fresh.read_bytes() == committed.read_bytes(), "run `make proto`"


def test_buf_finds_no_fault() -> None:
    buf = Path(sys.executable).with_name("buf")
    done = subprocess.run([buf, "lint"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("", "", ""),
        # A field and a call that are new: whoever does not know them goes on.
        ("message PauseRequest {}", "message PauseRequest {\n  bool at_once = 1;\n}", ""),
        (
            "  uint32 replicas = 2;\n",
            "",
            'field "2" with name "replicas" on message "ScaleRequest"',
        ),
        ("uint32 replicas = 2;", "string replicas = 2;", 'from "uint32" to "string"'),
        ("  rpc Stop(StopRequest) returns (StopResponse);", "", 'RPC "Stop" on service "Control"'),
    ],
    ids=["as it is", "a new field", "a field removed", "another type", "a call removed"],
)
def test_a_change_that_breaks_released_clients_is_found(
    before: str, after: str, fault: str, tmp_path: Path
) -> None:
    buf = Path(sys.executable).with_name("buf")
    text = (REPOSITORY / "protocols/wire/control.proto").read_text()
    assert before in text
    (tmp_path / "protocols/wire").mkdir(parents=True)
    (tmp_path / "buf.yaml").write_text((REPOSITORY / "buf.yaml").read_text())
    (tmp_path / "protocols/wire/control.proto").write_text(text.replace(before, after, 1))
    against = ["--against", REPOSITORY / "protocols/wire/control.binpb"]
    done = subprocess.run(
        [buf, "breaking", *against], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode != 0) == bool(fault), done.stdout + done.stderr
    assert fault in done.stdout


def test_a_clock_that_is_set_back_ends_no_span_before_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, passed = steady_time(), time.monotonic()
    assert abs(before - time.time()) < 3600, "seconds since the epoch"
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: passed + 2.5)
    assert steady_time() - before == pytest.approx(2.5, abs=0.5)


# What reads the clock that can be set, and why no wait or limit goes wrong by it.
WALL_CLOCK = {
    "plugins/library/models/verdicts.py": "an age of files; a clock set back keeps no note",
    "protocols/files.py": "once, when the process begins",
    "plugins/library/store.py": "the age of what was left behind, and is in nobody's use",
    "plugins/serve/handler.py": "a field of a reply",
    "plugins/serve/routes/models.py": "a field of a reply",
    "plugins/serve/routing.py": "an age of a folder; a clock that was set back reads it again",
    "plugins/watch/telemetry/tensorboard.py": "the times of records",
    "plugins/replay/ledger.py": "the times of records; an age is bounded by the monotonic clock",
    "plugins/replay/panel.py": "the time of a record",
}
ROOMS = (
    "actors", "cartridge_forge", "forge_run", "learning", "plugins", "protocols", "services",
    "training",
)  # fmt: skip


def test_nothing_else_waits_by_the_clock_that_can_be_set() -> None:
    root = Path(__file__).resolve().parents[3]
    files = {p for room in ROOMS for p in (root / room).rglob("*.py")}
    found = {
        str(path.relative_to(root))
        for path in files
        if re.search(r"\btime\.(time|time_ns|gmtime|localtime)\b", path.read_text())
    }
    assert found == set(WALL_CLOCK)


ANSWER = Answer(
    id="p/1", fact="what is the sodium?", document="p", document_hash="0a", question_hash="1b",
    text="x" * 5000, answer="41 mmol", expected="41 mmol", right=1.0, nll=0.5, tokens=5000,
)  # fmt: skip


def test_a_row_has_the_arm_and_a_bounded_text() -> None:
    row = to_row(ANSWER, "on_policy", 180, sampled=True)
    assert (row["arm"], row["step"], row["sampled"]) == ("on_policy", 180, True)
    assert row["text"] is not None
    assert len(row["text"]) == TEXT_LIMIT
    assert row["text"].endswith("x [cut: 5,000 characters]")
    assert (row["answer"], row["right"], row["nll"], row["reward"]) == ("41 mmol", 1.0, 0.5, None)
    assert cut("y" * TEXT_LIMIT) == "y" * TEXT_LIMIT
    assert cut(None) is None


def test_hashes_tell_apart_what_names_do_not() -> None:
    assert hash_of("a", "b") != hash_of("ab") != hash_of("a")
    assert hash_of("\ud800") != hash_of("\ud801")  # half a character, as a tiny model samples it
    one = to_row(ANSWER, "none", 0, sampled=False)
    elsewhere = to_row(replace(ANSWER, document_hash="0c"), "none", 0, sampled=False)
    assert pairing_key(one) != pairing_key(elsewhere)
    documents, facts = clusters([one, elsewhere, one])
    assert documents == ["p/0a", "p/0c", "p/0a"]
    assert facts == [f"{name}/what is the sodium?" for name in documents]


def test_the_loss_is_the_mean_over_the_answer() -> None:
    read = Completion("r", (1,), (-0.1,), (0,), "stop", prompt_logprobs=(-9.0, -1.0, -2.0))
    assert mean_nll(read, 2) == pytest.approx(1.5)
    assert mean_nll(read, 4) is None
    assert mean_nll(read, 0) is None


def test_a_date_is_kept_to_the_second(tmp_path: Path) -> None:
    write_date(tmp_path, datetime(2026, 7, 26, 23, 59, 59, 120_000, tzinfo=UTC))
    assert (tmp_path / CHAT_FILE).read_text() == '{"date": "2026-07-26T23:59:59"}\n'
    found = read_date(tmp_path)
    assert found == datetime(2026, 7, 26, 23, 59, 59)
    assert source_of(found) == {"chat_date": "2026-07-26T23:59:59"}
    assert date_of({"run": "r", **source_of(found)}) == found


def test_what_keeps_no_date(tmp_path: Path) -> None:
    assert read_date(tmp_path) is None
    assert source_of(None) == {}
    for source in ({}, {"chat_date": None}, {"chat_date": "soon"}):
        assert date_of(source) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"date": "soon"}', '{"date": 3}'])
def test_a_damaged_date_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / CHAT_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"chat.json has no date .* restore it from a copy"):
        read_date(tmp_path)


def test_known_values_are_these_bytes() -> None:
    # Half way in the logarithm is sqrt(1e-5 * 50) = 0.02236.
    values = [0.0, LEAST, -1e-9, 0.02236068, MOST, 900.0, None, math.nan]
    assert base64.b64decode(encoded(values)) == bytes([0, 0, 0, 127, 254, 254, 255, 255])


def test_what_was_written_is_read() -> None:
    read = decoded("AH/+/w==")
    assert read[0] == 0.0
    assert read[1:3] == pytest.approx([0.02236068, 50.0])
    assert read[3] is None
    with pytest.raises(ValueError, match=r"padding|base64"):
        decoded("A")


@given(st.floats(min_value=1.1 * LEAST, max_value=MOST))
def test_a_value_is_off_by_three_percent_at_most(value: float) -> None:
    (read,) = decoded(encoded([value]))
    assert read == pytest.approx(value, rel=0.0309)


def test_likely_tokens_are_five_bytes_each() -> None:
    # -log p of 0 is byte 0, and of sqrt(1e-5 * 50) byte 127.
    text = encoded_top([[(258, 0.0), (7, -0.02236068)]])
    assert base64.b64decode(text) == bytes([2, 1, 0, 0, 0, 7, 0, 0, 0, 127])
    assert decoded_top(text, [None, 0.5]) == [None, [(258, 0.0), (7, pytest.approx(-0.02236068))]]
    assert decoded_top("", [None, 0.5]) == [None, None]
    with pytest.raises(ValueError, match="10 bytes are not the likeliest of 3 tokens"):
        decoded_top(text, [0.5, 0.5, 0.5])
