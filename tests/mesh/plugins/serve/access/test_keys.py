"""Who may ask for what, over TCP: hosts, origins, rights, cartridges, quotas, and the audit log."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_setup import MODEL, Served, add_cartridge, an_api_key, raw, serving, wait_until

from cartridge_forge.plugins.documents.retrieval import count_terms
from cartridge_forge.plugins.library.names import CartridgeName

WARD, LIBRARIAN, SCRAPER, SMALL = "sk-ward", "sk-librarian", "sk-scraper", "sk-small"
SINGLE = "sk-single"
PAGE = "https://ward.example"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("guarded")
    keys = (
        an_api_key("ward", WARD, cartridges=("p1", "later")),
        an_api_key("librarian", LIBRARIAN, rights=("admin",), cartridges=("p2",)),
        an_api_key("scraper", SCRAPER, rights=("metrics",)),
        an_api_key("small", SMALL, tokens_per_minute=40),
        an_api_key("single", SINGLE, in_flight=1),
    )
    with serving(
        directory, api_keys=keys, hosts=("forge.example",), origins=(PAGE,),
        audit=str(directory / "logs/audit.jsonl"), max_body_bytes=64 * 1024,
    ) as one:  # fmt: skip
        add_cartridge(one.house.library, "p1", seed=1)
        add_cartridge(one.house.library, "p2", seed=2)
        yield one


def audited(served: Served) -> list[dict[str, Any]]:
    assert served.house.http.audit is not None
    return [json.loads(line) for line in Path(served.house.http.audit).read_text().splitlines()]


def ask(served: Served, key: str, **more: Any) -> tuple[int, dict[str, Any], Any]:
    body = {"model": MODEL, "prompt": "Who is he?", "max_tokens": 2, "seed": 1, **more}
    given = {"authorization": f"Bearer {key}"}
    status, headers, content = raw(served, "/v1/completions", body, **given)
    return status, json.loads(content), headers


def code(served: Served, key: str, **more: Any) -> tuple[int, str]:
    status, answer, _ = ask(served, key, **more)
    return status, answer["error"]["code"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.com", 421), ("evil.com:8000", 421), ("localhost.evil.com", 421), ("", 421),
        ("127.0.0.1.evil.com", 421), ("localhost", 200), ("LOCALHOST:80", 200),
        ("127.0.0.1:9", 200), ("[::1]:80", 200), ("10.1.2.3", 200), ("forge.example:8000", 200),
    ],
)  # fmt: skip
def test_another_host_is_refused(guarded: Served, host: str, status: int) -> None:
    given = {"authorization": f"Bearer {WARD}", "host": host}
    assert raw(guarded, "/v1/models", method="GET", **given)[0] == status
    assert raw(guarded, "/health", method="GET", host=host)[0] == 200, "to all"


def test_web_pages_are_refused_but_those_that_are_named(guarded: Served) -> None:
    given = {"authorization": f"Bearer {WARD}"}
    for origin in ("https://evil.com", "null", f"{PAGE}.evil.com"):
        status, headers, content = raw(guarded, "/v1/models", method="GET", origin=origin, **given)
        assert (status, json.loads(content)["error"]["code"]) == (403, "unknown_origin")
        assert "access-control-allow-origin" not in headers
    status, headers, _ = raw(guarded, "/v1/models", method="GET", origin=PAGE, **given)
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    asked = {"access-control-request-method": "POST", "origin": PAGE}
    assert raw(guarded, "/v1/completions", method="OPTIONS", **asked)[0] == 200  # without a key


def test_a_key_reaches_the_routes_that_it_is_for(guarded: Served) -> None:
    routes = {"inference": "/v1/models", "admin": "/admin/cartridges", "metrics": "/metrics"}
    for key, right in ((WARD, "inference"), (LIBRARIAN, "admin"), (SCRAPER, "metrics")):
        given = {"authorization": f"Bearer {key}"}
        found = {r: raw(guarded, path, method="GET", **given)[0] for r, path in routes.items()}
        assert found == {r: 200 if r == right else 403 for r in routes}


def test_a_key_is_for_the_cartridges_that_it_names(guarded: Served) -> None:
    status, answer, _ = ask(guarded, WARD, model=f"{MODEL}+p1")
    assert (status, answer["forge"]["cartridge"]["name"]) == (200, "p1")
    assert ask(guarded, WARD)[0] == 200, "the bare model holds no document"
    for more in (
        {"model": f"{MODEL}+p2"},
        {"model": f"{MODEL}+nowhere"},
        {"forge": {"cartridge": "p2@1"}},
        {"forge": {"cartridges": ["p1", "p2"]}},
    ):
        assert code(guarded, WARD, **more) == (403, "cartridge_not_permitted")
    status, answer, _ = ask(guarded, WARD, model=f"{MODEL}+later")
    assert status == 404
    assert "p2" not in json.dumps(answer), "no other name is told"
    given = {"authorization": f"Bearer {WARD}"}
    body = {"model": "any", "prompt": "x", "max_tokens": 1}
    for name in ("p2", "p2/1", "p2@9", "nowhere"):
        body |= {"cartridges": [{"id": name, "source": "local"}]}
        refused = raw(guarded, "/custom/cartridge/completions", body, **given)
        assert refused[0] == 403, "whether it exists or not"
    body |= {"cartridges": [{"id": "later", "source": "local"}]}
    status, _, content = raw(guarded, "/custom/cartridge/completions", body, **given)
    assert status == 400
    assert b"p2" not in content
    assert raw(guarded, f"/v1/models/{MODEL}+p2", method="GET", **given)[0] == 403
    model, *others = json.loads(raw(guarded, "/v1/models", method="GET", **given)[2])["data"]
    assert list(model["forge"]["cartridges"]) == ["p1"]
    assert [one["id"] for one in others] == [f"{MODEL}+p1", f"{MODEL}+p1@1"]


def test_auto_chooses_among_the_cartridges_of_the_key(guarded: Served) -> None:
    library = guarded.house.library
    for name, text in (("p1", "the surgeon is Meyer"), ("p2", "the moon is made of cheese")):
        library.describe(library.get(CartridgeName(name)), [count_terms(text)])
    status, answer, _ = ask(guarded, WARD, model="auto", prompt="Who is the surgeon?")
    assert (status, answer["forge"]["cartridge"]["name"]) == (200, "p1")
    status, answer, _ = ask(guarded, WARD, model="auto", prompt="moon cheese?")
    assert (status, answer["error"]["code"]) == (400, "not_routed")
    assert "p2" not in json.dumps(answer)


def test_an_admin_key_changes_its_own_cartridges(guarded: Served) -> None:
    given = {"authorization": f"Bearer {LIBRARIAN}"}
    listed = json.loads(raw(guarded, "/admin/cartridges", method="GET", **given)[2])
    assert [c["name"] for c in listed["cartridges"]] == ["p2"]
    assert raw(guarded, "/admin/cartridges/p1", method="DELETE", **given)[0] == 403
    words = {"content-type": "text/plain", **given}
    path = "/admin/cartridges/p2/latest/words"
    assert raw(guarded, path, b"the moon", method="PUT", **words)[0] == 200
    assert audited(guarded)[-1] | {"time": ""} == {
        "time": "", "event": "changed", "key": "librarian", "peer": "127.0.0.1",
        "action": "words", "cartridges": ["p2@1"],
    }  # fmt: skip


def test_the_quota_of_a_key_is_told_and_holds(guarded: Served) -> None:
    status, answer, _ = ask(guarded, SMALL, max_tokens=50)
    assert status == 400
    assert (
        "may cost 59 tokens, read and sampled, and the key small has 40 a minute"
        in (answer["error"]["message"])
    )
    assert ask(guarded, SMALL, max_tokens=20)[0] == 200
    status, answer, headers = ask(guarded, SMALL, max_tokens=28)
    assert (status, answer["error"]["code"]) == (429, "key_tokens")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert ask(guarded, WARD, max_tokens=50)[0] == 200, "another key is not held back"


def test_requests_in_flight_are_counted_for_each_key(guarded: Served) -> None:
    guarded.backend.pause = 0.2
    try:
        first = threading.Thread(target=ask, args=(guarded, SINGLE), kwargs={"max_tokens": 4})
        first.start()
        wait_until(lambda: guarded.door.handler.admission.pending == 1)
        assert code(guarded, SINGLE, max_tokens=1) == (429, "key_in_flight")
        assert ask(guarded, WARD, max_tokens=1)[0] == 200
        first.join(60)
    finally:
        guarded.backend.pause = 0.0


def test_the_audit_log_has_who_asked_which_cartridge_and_no_text(guarded: Served) -> None:
    before = len(audited(guarded))
    _, answer, _ = ask(guarded, WARD, model=f"{MODEL}+p1", prompt="a secret of patient 1")
    ask(guarded, "sk-wrong")
    ask(guarded, SCRAPER)
    rows = audited(guarded)[before:]
    assert [row.pop("time")[-1] for row in rows] == ["Z"] * 3
    assert rows == [
        {"event": "asked", "key": "ward", "peer": "127.0.0.1", "request": answer["id"],
         "cartridges": ["p1@1"], "strategy": None, "prompt_tokens": rows[0]["prompt_tokens"]},
        {"event": "refused", "key": "-", "peer": "127.0.0.1", "path": "/v1/completions",
         "code": "invalid_api_key"},
        {"event": "refused", "key": "scraper", "peer": "127.0.0.1", "path": "/v1/completions",
         "code": "not_permitted"},
    ]  # fmt: skip
    path = Path(guarded.house.http.audit or "")
    assert "secret" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_audit_log_has_who_was_refused_which_cartridge(guarded: Served) -> None:
    before = len(audited(guarded))
    ask(guarded, WARD, model=f"{MODEL}+p2")
    raw(guarded, f"/v1/models/{MODEL}+p2", method="GET", authorization=f"Bearer {WARD}")
    raw(guarded, "/admin/cartridges/p1", method="DELETE", authorization=f"Bearer {LIBRARIAN}")
    assert [
        (row["event"], row["key"], row["path"], row["code"], row["cartridges"])
        for row in audited(guarded)[before:]
    ] == [
        ("refused", "ward", "/v1/completions", "cartridge_not_permitted", ["p2"]),
        ("refused", "ward", f"/v1/models/{MODEL}+p2", "cartridge_not_permitted", ["p2"]),
        ("refused", "librarian", "/admin/cartridges/p1", "cartridge_not_permitted", ["p1"]),
    ]


def test_text_is_written_only_where_the_server_is_told_to(tmp_path: Path) -> None:
    with serving(tmp_path, audit=str(tmp_path / "a.jsonl"), audit_text=True) as one:
        ask(one, "", prompt="Who is he?")
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1}
        raw(one, "/v1/chat/completions", chat)
        rows = audited(one)
        assert rows[0]["key"] == "-"
        assert rows[1]["text"] == [["user", "Who?"]]
        assert rows[0]["text"][0].split() == ["Who", "is", "he?"]


def test_nothing_is_served_that_cannot_be_written_down(tmp_path: Path) -> None:
    with serving(tmp_path, audit="/dev/full") as one:
        assert code(one, "") == (503, "audit_unavailable")
        assert one.backend.calls == 0
        assert one.door.handler.admission.pending == 0


POLITE, FLOODING = "sk-polite-0123456789", "sk-flooding-0123456789"
RIGHTS = ("inference",)


def test_a_polite_client_has_all_of_its_answers(tmp_path: Path) -> None:
    keys = (
        an_api_key("polite", POLITE, rights=RIGHTS),
        an_api_key("flooding", FLOODING, rights=RIGHTS),
    )
    with serving(tmp_path, api_keys=keys, max_pending=64) as one:
        over = threading.Event()
        statuses: list[int] = []

        def flood() -> None:
            body = {"model": MODEL, "prompt": "the ward", "max_tokens": 64, "n": 32}
            while not over.is_set():
                key = {"authorization": f"Bearer {FLOODING}"}
                statuses.append(raw(one, "/v1/completions", body, **key)[0])

        floods = [threading.Thread(target=flood) for _ in range(6)]
        for thread in floods:
            thread.start()
        try:
            while 429 not in statuses:  # the queue is full
                over.wait(0.01)
            body = {"model": MODEL, "prompt": "the ward", "max_tokens": 4}
            key = {"authorization": f"Bearer {POLITE}"}
            served = [raw(one, "/v1/completions", body, **key)[0] for _ in range(23)]
        finally:
            over.set()
            for thread in floods:
                thread.join()
        assert served == [200] * 23
        assert statuses.count(200) > 0
