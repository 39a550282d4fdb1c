"""The pages' data over HTTP: of a run by hand, of one that goes on, and of runs that are not
there."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_run_control import Served, served
from recorded_run import EPISODE, finish, recorded_run, train
from starlette.testclient import TestClient

from cartridge_forge.plugins.watch.control.endpoints import Endpoints, write_endpoints
from cartridge_forge.plugins.watch.report.template import STATIC
from cartridge_forge.plugins.watch.score_text import encoded, encoded_top
from cartridge_forge.plugins.watch.ui import app as ui_app
from cartridge_forge.plugins.watch.ui import asking
from cartridge_forge.plugins.watch.ui.access import PageAccess
from cartridge_forge.plugins.watch.ui.app import RunPages
from cartridge_forge.plugins.watch.ui.served_runs import ServedRuns
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.step import SampleScores
from cartridge_forge.services.run_directory import RunDirectory

TOKEN = "right-token"
BASE = "http://127.0.0.1:8420"


def client_of(where: Path, **more: Any) -> TestClient:
    pages = RunPages(ServedRuns(where), look_seconds=0.01)
    app = PageAccess(pages.application(), TOKEN, "127.0.0.1", secure=False)
    given = {"headers": {"authorization": f"Bearer {TOKEN}"}, "follow_redirects": False}
    return TestClient(app, base_url=BASE, **{**given, **more})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return recorded_run(tmp_path / "runs")


@pytest.fixture
def client(run: RunDirectory) -> TestClient:
    return client_of(run.path.parents[1])


def key(run: RunDirectory) -> str:
    return f"tiny/{run.id}"


def asked(client: TestClient, what: str, **query: Any) -> Any:
    reply = client.get(f"/api/{what}", params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_list_has_every_run_the_last_started_first(client: TestClient, tmp_path: Path) -> None:
    later = recorded_run(tmp_path / "runs" / "sweep", minute=5)
    finish(later)
    (tmp_path / "runs" / "empty").mkdir()
    first, second = asked(client, "runs")
    assert (first["key"], first["state"]) == (f"sweep/tiny/{later.id}", "finished")
    assert (second["state"], second["step"], second["kl"]) == ("unfinished", 2, 0.5)


def test_curves_and_steps_are_asked_for_from_where_they_ended(
    client: TestClient, run: RunDirectory
) -> None:
    curves = asked(client, "curves", run=key(run))
    assert [row["kl"] for row in curves["rows"]] == [1.0, 0.5]
    assert (curves["next"], curves["fresh"], curves["stride"]) == (2, True, 1)
    # 6 of 8 right: Wilson's interval.
    assert curves["rows"][1]["ci95"] == pytest.approx([0.4093, 0.9285], abs=1e-4)
    train(run, 3)
    more = asked(client, "curves", run=key(run), generation=0, after=2)
    assert [row["step"] for row in more["rows"]] == [3]
    assert more["fresh"] is False
    (step, *_) = asked(client, "steps", run=key(run))["rows"]
    assert (step["seconds"]["train"], step["tokens_per_second"]) == (2.0, 3.5)
    other = asked(client, "curves", run=key(run), generation=7, after=2)
    assert (len(other["rows"]), other["fresh"]) == (3, True)


def test_long_curves_are_thinned_but_for_validations(
    client: TestClient, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cartridge_forge.plugins.watch.pages.run_page.FIRST_ROWS", 2)
    train(run, 3)
    train(run, 4, accuracy=0.5)
    curves = asked(client, "curves", run=key(run))
    # Every second row of 4, and steps 2 and 4, which were validated.
    assert [row["step"] for row in curves["rows"]] == [1, 2, 3, 4]
    assert curves["stride"] == 2
    assert [row["step"] for row in asked(client, "steps", run=key(run))["rows"]] == [1, 3]


def test_events_are_told_without_the_steps(client: TestClient, run: RunDirectory) -> None:
    names = [row["event"] for row in asked(client, "events", run=key(run))]
    assert names == ["role_ready", "run_started"]


def test_rollouts_by_step_and_document(client: TestClient, run: RunDirectory) -> None:
    listed = asked(client, "rollouts", run=key(run))
    assert (listed["total"], listed["tokens"]) == (4, 28)
    assert [row["step"] for row in listed["rows"]] == [2, 2, 1, 1]
    assert listed["rows"][0]["prompt"] == "<|user|> what is the radiologist?<|end|><|assistant|>"
    chosen = asked(client, "rollouts", run=key(run), step=1, document="patient_02")
    assert [(row["step"], row["document"]) for row in chosen["rows"]] == [(1, "patient_02")]
    assert [row["step"] for row in asked(client, "rollouts", run=key(run), skip=3)["rows"]] == [1]


def test_a_rollout_token_by_token_and_the_same_question_at_other_versions(
    client: TestClient, run: RunDirectory
) -> None:
    found = asked(client, "rollout", run=key(run), number=2)
    row = found["row"]
    assert row["pieces"] == [" the", " chart", " says", " radiologist", " lakeside", ".", "<|end|>"]
    assert (row["versions"], row["logprobs"][0]) == ([1] * 7, -0.25)
    assert row["kl"] is None  # nothing was recorded of its tokens
    assert [(one["step"], one["versions"]) for one in found["same"]] == [(2, [1, 1]), (1, [0, 0])]


def test_the_scores_of_a_rollouts_tokens(client: TestClient, run: RunDirectory) -> None:
    scores = [0.0, None, 50.0, None, None, None, None]
    likely = [[(334, math.log(0.75)), (2, math.log(0.25))], [(369, 0.0), (2, -50.0)]]
    told = SampleScores(kl=encoded(scores), top=encoded_top(likely))
    run.append_token_scores("on_policy", 2, {"on_policy/2/0": told}, 10_000)
    row = asked(client, "rollout", run=key(run), number=2)["row"]
    assert row["kl"] == [0.0, None, pytest.approx(50.0), *[None] * 4]
    assert row["teacher"] == [
        [[" chart", pytest.approx(0.75, rel=0.01)], ["<|end|>", pytest.approx(0.25, rel=0.05)]],
        None, [[" says", 1.0], ["<|end|>", pytest.approx(0.0, abs=1e-9)]], *[None] * 4,
    ]  # fmt: skip
    other, scored = asked(client, "rollouts", run=key(run))["rows"][:2]
    assert (other["kl"], scored["kl"]) == (None, pytest.approx(25.0))


def test_held_out_answers_by_verdict(client: TestClient, run: RunDirectory) -> None:
    finish(run)
    wrong = asked(client, "rollouts", run=key(run), source="answers", verdict="wrong")
    assert [(row["arm"], row["gold"]) for row in wrong["rows"]] == [("none", "52 mmol")]
    found = asked(
        client, "rollout", run=key(run), source="answers", number=wrong["rows"][0]["number"]
    )
    assert (found["row"]["answer"], found["row"]["expected"]) == ("41 mmol", "52 mmol")
    assert [one["arm"] for one in found["same"]] == ["none", "on_policy"]


def test_right_answers_by_document_and_arm(client: TestClient, run: RunDirectory) -> None:
    assert asked(client, "overview", run=key(run))["documents"] == []
    finish(run)
    (only,) = asked(client, "overview", run=key(run))["documents"]
    # Both of 2 right on policy, and 1 of 2 without the document.
    assert only == {"document": "patient_01", "arms": {"on_policy": [2, 1.0], "none": [2, 0.5]}}


def test_an_episode_turn_by_turn(client: TestClient, run: RunDirectory) -> None:
    run.append_episodes([EPISODE, {**EPISODE, "reward": None, "error_kind": "context_full"}])
    right = asked(client, "rollouts", run=key(run), source="episodes", least=0.5)
    assert [(row["reward"], row["turns"]) for row in right["rows"]] == [(1.0, 1)]
    row = asked(client, "rollout", run=key(run), source="episodes", number=0)["row"]
    (turn,) = row["turns"]
    assert turn["pieces"][4] == " lakeside"
    assert (turn["hint"], turn["expected"]) == ("look at the handbook", "lakeside")
    assert row["opening"][0]["content"] == "who is the surgeon?"


def test_marks_tell_which_files_grew(run: RunDirectory) -> None:
    pages = RunPages(ServedRuns(run.path))
    first = pages.marks(run.id)
    assert first["metrics"] == [0, 2]
    assert pages.marks(run.id) == first
    train(run, 3)
    assert pages.marks(run.id)["metrics"] == [0, 3]


def test_a_server_of_pages_imports_no_torch() -> None:
    code = (
        "import sys, cartridge_forge.plugins.watch.ui.app; "
        "print([m for m in ('torch', 'monarch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True,
        cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.stdout == "[]\n"


def test_a_page_of_one_run(run: RunDirectory) -> None:
    client = client_of(run.path)
    assert client.get("/").headers["location"] == f"/run?run={run.id}"
    page = client.get(f"/run?run={run.id}")
    assert f'<body data-run="{run.id}">' in page.text
    assert 'href="/runs"' not in page.text


def test_pages_have_no_script_of_their_own_and_fetch_nothing_from_outside(
    client: TestClient, run: RunDirectory
) -> None:
    for name in ui_app.PAGES:
        page = client.get(f"/{name}", params={"run": key(run)})
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert not re.search(r"<script(?![^>]*\bsrc=)|\bon\w+=|\bstyle=", page.text)
        for path in re.findall(r'(?:src|href)="(/static[^"]*)"', page.text):
            assert client.get(path).status_code == 200, path
    for file in STATIC.glob("*.*s"):
        assert not re.search(r"https?://|innerHTML|eval\(", file.read_text()), file.name


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/api/overview?run=nobody", "there is no run 'nobody' under"),
        ("/api/overview?run=../../etc", "there is no run '../../etc' under"),
        ("/run", "there is no run ''"),
        ("/api/curves?run={run}&after=-1", "after must be a whole number from 0: got '-1'"),
        ("/api/rollouts?run={run}&source=votes", "source must be one of rollouts, answers, episod"),
        ("/api/rollouts?run={run}&step=x", "step must be a number: got 'x'; correct it"),
        ("/api/rollout?run={run}&number=99", "rollouts.jsonl has no row 99: it has 4"),
    ],
)
def test_a_request_that_cannot_be_answered(
    client: TestClient, run: RunDirectory, path: str, told: str
) -> None:
    reply = client.get(path.format(run=key(run)))
    assert reply.status_code == 400
    assert told in reply.json()["error"]


def test_a_place_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="there is nothing at nowhere: give a run's directory"):
        ServedRuns(Path("nowhere"))


# -- mesh, compare, ask ---------------------------------------------------------------------------


def test_the_mesh_of_a_run_that_ended(client: TestClient, run: RunDirectory) -> None:
    run.append_event("replica_lost", role="generator", replica="generator[1]", reason="killed")
    (run.path / "stacks").mkdir()
    (run.path / "stacks" / "trainer-0.txt").write_text("Thread 1 (idle)")
    found = asked(client, "mesh", run=key(run))
    assert (found["plane"], found["hosts"], found["pools"]) == ("torchstore", "local", [])
    roles = {role["role"]: role for role in found["roles"]}
    assert list(roles) == ["generator", "doc_teacher", "trainer"]
    generator = roles["generator"]
    assert (generator["replicas"], generator["pids"], generator["lost"]) == (2, [2, 3], 1)
    assert [event["event"] for event in found["changes"]] == ["replica_lost", "role_ready"]
    assert found["stacks"] == ["trainer-0.txt"]
    assert asked(client, "stacks", run=key(run), name="trainer-0.txt")["text"] == "Thread 1 (idle)"
    outside = client.get("/api/stacks", params={"run": key(run), "name": "../spec.yaml"})
    assert (outside.status_code, "has no stacks" in outside.json()["error"]) == (400, True)


def test_runs_are_compared_by_curves_settings_and_pairs(
    client: TestClient, run: RunDirectory, tmp_path: Path
) -> None:
    other = recorded_run(tmp_path / "runs", minute=1, sets=("train.lr=0.5",))
    finish(run)
    finish(other)
    both = {"run": [key(run), key(other)]}
    found = asked(client, "compare", **both)
    assert [[row["step"] for row in one["rows"]] for one in found["runs"]] == [[1, 2, 3, 4]] * 2
    (setting,) = found["settings"]
    assert (setting["key"], setting["values"][1]) == ("learn.train.lr", 0.5)
    alone = asked(client, "paired", run=key(run))
    right = next(one for one in alone["comparisons"] if one["metric"] == "right")
    # 1 of 2 right without the document, 2 of 2 on policy.
    assert (right["a"], right["b"], right["n"], right["difference"]) == (
        "none",
        "on_policy",
        2,
        0.5,
    )
    paired = asked(client, "paired", **both)
    assert {one["difference"] for one in paired["comparisons"]} == {0.0}


def test_runs_without_answers_have_curves_all_the_same(
    client: TestClient, run: RunDirectory
) -> None:
    assert len(asked(client, "compare", run=key(run))["runs"]) == 1
    paired = asked(client, "paired", run=key(run))
    assert (paired["comparisons"], "has no answers.jsonl" in paired["why_not"]) == ([], True)
    assert client.get("/api/compare").json()["error"] == "choose 1 to 8 runs: got 0"


def test_a_run_without_a_checkpoint_has_no_cartridges_yet(
    client: TestClient, run: RunDirectory
) -> None:
    assert asked(client, "cartridges", run=key(run))["cartridges"] == []
    gone = client.get("/api/cartridges", params={"run": key(run), "checkpoint": "version-000001"})
    assert gone.json()["checkpoints"] == []


def question(run: RunDirectory, **changes: Any) -> dict[str, Any]:
    asked = {"run": key(run), "cartridge": "patient_01", "question": "why?", "max_tokens": 4}
    return {**asked, **changes}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"question": "  "}, "a question has 1 to 4000 characters: got 2"),
        ({"question": "x" * 4001}, "a question has 1 to 4000 characters: got 4001"),
        ({"max_tokens": 0}, "max_tokens must be >= 1 and <= 512: got 0"),
        ({"max_tokens": "4"}, "the body must be a JSON object with run (str), cartridge (str)"),
        ({"max_tokens": True}, "the body must be a JSON object with run (str), cartridge (str)"),
        ({"cartridge": "--server"}, "a cartridge and a question do not begin with -"),
        ({"question": "--serve=x"}, "a cartridge and a question do not begin with -"),
    ],
)
def test_a_question_that_cannot_be_asked(
    client: TestClient, run: RunDirectory, changes: dict[str, Any], told: str
) -> None:
    reply = client.post("/api/ask", json=question(run, **changes))
    assert reply.status_code == 400
    assert reply.json()["error"].startswith(told)


def test_a_body_that_nests_too_deeply_is_no_question(client: TestClient) -> None:
    assert client.post("/api/ask", content="[" * 20_000).status_code == 400


def test_a_question_that_takes_too_long_is_given_up_and_frees_its_place(
    client: TestClient, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "SECONDS", 0.01)
    for _ in range(2):
        told = client.post("/api/ask", json=question(run)).json()["error"]
        assert told == "no answer within 0.01 s; ask with forge ask, which has no limit"


def test_one_question_is_answered_at_a_time(client: TestClient, run: RunDirectory) -> None:
    with asking._asking:
        told = client.post("/api/ask", json=question(run)).json()["error"]
    assert told == "another question is being answered; ask again when it is"


# -- who is let in --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"cookie": f"forge_ui_8420={TOKEN}"}, 200),
        ({"cookie": f"forge_ui_9999={TOKEN}"}, 401),  # of another port
        ({"authorization": f"Bearer {TOKEN}", "host": "evil.example:8420"}, 421),
        ({"authorization": f"Bearer {TOKEN}", "host": "localhost:8420"}, 200),
    ],
)
def test_only_who_has_the_token_is_let_in(
    run: RunDirectory, headers: dict[str, str], status: int
) -> None:
    client = client_of(run.path, headers=headers)
    for path in ("/api/runs", "/static/page.js"):
        assert client.get(path).status_code == status


def test_the_token_of_the_address_becomes_a_cookie_and_leaves_the_address(
    run: RunDirectory,
) -> None:
    client = client_of(run.path, headers={})
    reply = client.get(f"{BASE}//run?token={TOKEN}&run=a")
    assert reply.headers["location"] == "/run?run=a"
    cookie = reply.headers["set-cookie"]
    assert cookie == f"forge_ui_8420={TOKEN}; HttpOnly; Path=/; SameSite=lax"
    assert client.get("/?token=wrong").status_code == 401
    assert client.get("/api/runs").status_code == 200  # by the cookie


# -- a run that goes on ---------------------------------------------------------------------------


@pytest.fixture
def steered(run: RunDirectory) -> Iterator[Served]:
    with served(run=run.id) as here:
        write_endpoints(run.path, Endpoints(here.address, None, os.getpid()))
        yield here


def steer(client: TestClient, run: RunDirectory, **asked: Any) -> tuple[int, str]:
    reply = client.post("/api/steer", json={"run": key(run), **asked})
    found = reply.json() if reply.headers["content-type"] == "application/json" else {}
    return reply.status_code, found.get("told") or found.get("error") or reply.text


def test_buttons_reach_the_run(client: TestClient, run: RunDirectory, steered: Served) -> None:
    shown = asked(client, "overview", run=key(run))
    assert (shown["outcome"], shown["status"]["step"], shown["seconds_left"]) == (
        "running", 12, 190.0,
    )  # fmt: skip
    assert steer(client, run, action="pause") == (200, "pausing after the step in progress")
    assert steer(client, run, action="resume") == (200, "going on")
    assert steer(client, run, action="checkpoint") == (200, "wrote checkpoint step-000012")
    told = steer(client, run, action="scale", role="generator", replicas=4)
    assert told == (200, "generator: 4 wanted, 2 now")
    assert steer(client, run, action="stop")[0] == 200
    assert [call for call in steered.steering.asked if call != ("status",)] == [
        ("pause",), ("resume",), ("checkpoint",), ("scale", "generator", 4), ("stop",),
    ]  # fmt: skip


def test_the_mesh_of_a_run_that_goes_on(
    client: TestClient, run: RunDirectory, steered: Served
) -> None:
    (pool,) = asked(client, "mesh", run=key(run))["pools"]
    assert (pool["role"], pool["restarts"]) == ("generator", 6)
    assert [one["memory_bytes"] for one in pool["replicas"]] == [234_881_024, 0]


def test_a_refusal_of_the_run_is_shown(
    client: TestClient, run: RunDirectory, steered: Served
) -> None:
    assert steer(client, run, action="scale", role="cook", replicas=2) == (
        409, "there is no role cook; roles: generator",
    )  # fmt: skip
    for replicas in ("2", 0, -1, 10**30, 1.5, True, None):
        status, told = steer(client, run, action="scale", role="generator", replicas=replicas)
        assert (status, told[:45]) == (400, "replicas must be a whole number, >= 1 and <= ")
    status, told = steer(client, run, action="explode")
    assert (status, told[:22]) == (400, "action must be one of ")


def test_a_run_that_has_ended_cannot_be_steered(client: TestClient, run: RunDirectory) -> None:
    status, told = steer(client, run, action="stop")
    assert status == 409
    assert f"run {run.id} is not running" in told


def test_another_sites_page_cannot_steer(
    client: TestClient, run: RunDirectory, steered: Served
) -> None:
    body = {"run": key(run), "action": "stop"}
    for origin, status in (("https://evil.example", 403), (BASE, 200)):
        reply = client.post("/api/steer", json=body, headers={"origin": origin})
        assert reply.status_code == status
    assert client.post("/api/steer", content=b"{", headers={"origin": BASE}).status_code == 400
    assert steered.steering.asked == [("stop",)]


def test_marks_tell_that_a_run_goes_on(run: RunDirectory, steered: Served) -> None:
    pages = RunPages(ServedRuns(run.path))
    assert pages.marks(run.id)["running"] is True
    (run.path / "endpoints.json").unlink()
    assert pages.marks(run.id)["running"] is False
    assert json.dumps(pages.marks(run.id))
