"""The model auto: which cartridge answers, what the reply says of it, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from serving_setup import MODEL, Served, add_cartridge, raw, refused, serving

from cartridge_forge.plugins.documents.retrieval import Bm25Router, count_terms
from cartridge_forge.plugins.library.names import CartridgeName
from cartridge_forge.plugins.serve.routing import CartridgeRouter, RoutedChoice, WordIndex
from cartridge_forge.protocols.records.run_files import TERMS

TEXTS = {
    "harbour": "The harbour keeps nine boats. The tide is measured at the lock.",
    "orchard": "The orchard has forty pear trees and a wall of stone.",
}
BOATS: list[Any] = [
    {"role": "user", "content": "How many pear trees are there?"},
    {"role": "assistant", "content": "Forty."},
    {"role": "user", "content": [{"type": "text", "text": "And boats in the harbour?"}]},
]


@pytest.fixture
def routed(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, max_body_bytes=4096) as one:
        library = one.house.library
        for seed, (name, text) in enumerate(TEXTS.items()):
            add_cartridge(library, name, seed)
            library.describe(library.get(CartridgeName(name)), [count_terms(text)])
        add_cartridge(library, "mute", seed=9)
        yield one


def chat(served: Served, **more: Any) -> tuple[int, Any, dict[str, Any]]:
    body = {"model": "auto", "messages": BOATS, "max_tokens": 4, "temperature": 0, **more}
    status, headers, content = raw(served, "/v1/chat/completions", body)
    return status, headers["x-forge-cartridge"], json.loads(content)


def test_the_last_user_message_decides_and_the_reply_says_so(routed: Served) -> None:
    status, header, reply = chat(routed)
    assert (status, header, reply["model"]) == (200, "harbour@1", "auto")
    assert reply["forge"]["cartridge"] == {"name": "harbour", "version": 1, "tokens": 8}
    (name, score), (other, second) = Bm25Router.of_texts(TEXTS).top("And boats in the harbour?", 2)
    assert (name, other) == ("harbour", "orchard")
    assert reply["forge"]["routed"] == {
        "score": score, "runner_up": "orchard", "runner_up_score": second,
    }  # fmt: skip
    _, named_header, named = chat(routed, model=f"{MODEL}+harbour")
    assert named["choices"] == reply["choices"]
    assert named_header == "harbour@1"
    assert "routed" not in named["forge"]


def test_auto_is_taken_wherever_a_cartridge_is_named(routed: Served) -> None:
    pears: list[Any] = [{"role": "user", "content": "Who counts the PEAR trees?"}]
    for more in (
        {"model": f"{MODEL}+auto"},
        {"model": MODEL, "forge": {"cartridge": "auto"}},
        {"model": "auto:twice"},
        {"model": "auto", "forge": {"cartridge": "auto", "strategy": "twice"}},
    ):
        assert chat(routed, messages=pears, **more)[1] == "orchard@1"
    body: dict[str, Any] = {"model": "auto", "max_tokens": 2}
    for prompt in ("nine boats", ["nine boats"]):
        status, headers, _ = raw(routed, "/v1/completions", {**body, "prompt": prompt})
        assert (status, headers["x-forge-cartridge"]) == (200, "harbour@1")
    body |= {"cartridges": [{"id": "auto", "source": "local"}]}
    for route, asked in (
        ("chat/completions", {"messages": pears}),
        ("completions", {"prompt": "pear"}),
    ):
        status, headers, _ = raw(routed, f"/custom/cartridge/{route}", {**body, **asked})
        assert (status, headers["x-forge-cartridge"]) == (200, "orchard@1")


def test_a_stream_names_the_cartridge_before_its_first_token(routed: Served) -> None:
    with OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0) as client:
        asked = client.chat.completions.with_raw_response
        reply = asked.create(model="auto", messages=BOATS, max_tokens=3, stream=True)
        assert reply.headers["x-forge-cartridge"] == "harbour@1"
        *_, last = reply.parse()
        told: Any = last.model_extra
        assert told["forge"]["routed"]["runner_up"] == "orchard"
    status, header, _ = chat(routed, model=MODEL)
    assert (status, header) == (200, None)


def test_what_cannot_be_routed_is_refused(routed: Served) -> None:
    path, ask = "/v1/chat/completions", {"model": "auto", "max_tokens": 2}
    status, param, message = refused(
        routed, path, {**ask, "messages": [{"role": "user", "content": "Zebra?"}]}
    )
    assert (status, param) == (400, "model")
    assert "name one: harbour, orchard (without words, so never chosen: mute)" in message
    assert refused(routed, path, {**ask, "messages": [{"role": "system", "content": "boats"}]})[
        0
    ] == 400  # fmt: skip
    for prompt in (["boats", "pears"], [5, 6]):
        status, param, _ = refused(routed, "/v1/completions", {**ask, "prompt": prompt})
        assert (status, param) == (400, "prompt")
    more = {"messages": BOATS, "forge": {"cartridges": ["harbour"]}}
    assert refused(routed, path, {**ask, **more})[:2] == (400, "forge.cartridges")
    more = {"messages": BOATS, "model": f"{MODEL}+auto", "forge": {"cartridge": "harbour"}}
    assert refused(routed, path, {**ask, **more})[:2] == (400, "forge.cartridge")


def test_cartridges_that_come_and_go_change_what_auto_chooses(routed: Served) -> None:
    def listed() -> Any:
        return json.loads(raw(routed, "/v1/models", method="GET")[2])["data"][0]["forge"]["auto"]

    assert listed() == ["harbour", "orchard"]
    assert raw(routed, "/v1/models/auto", method="GET")[0] == 200
    text = "Boats, boats and the harbour itself."
    put = "/admin/cartridges/mute/latest/words"
    status, _, content = raw(routed, put, text.encode(), "PUT", **{"content-type": "text/plain"})
    assert (status, json.loads(content)["routed"]) == (200, True)
    assert listed() == ["harbour", "mute", "orchard"]
    assert chat(routed)[1] == "mute@1"
    assert raw(routed, put, b"\xff", "PUT")[0] == 400
    assert raw(routed, put, b"boats " * 700, "PUT")[0] == 413
    # A newer version without its words is not routed to, and neither is an older one.
    add_cartridge(routed.house.library, "mute", seed=3)
    assert chat(routed)[1] == "harbour@1"
    raw(routed, "/admin/cartridges/mute/2", method="DELETE")
    assert chat(routed)[1] == "mute@1"
    for name in ("mute", "harbour", "orchard"):
        raw(routed, f"/admin/cartridges/{name}", method="DELETE")
    assert listed() == []
    status, _, reply = chat(routed)
    assert (status, reply["error"]["code"]) == (404, "not_routed")
    assert "forge cartridges words NAME FILE" in reply["error"]["message"]
    _, _, page = raw(routed, "/metrics", method="GET")
    counted = [line for line in page.decode().splitlines() if "serve_routed_total{" in line]
    assert sorted(counted) == [
        'forge_serve_routed_total{cartridge="harbour"} 1.0',
        'forge_serve_routed_total{cartridge="mute"} 2.0',
    ]


def test_a_damaged_list_of_words_is_as_none(routed: Served) -> None:
    library = routed.house.library
    router = CartridgeRouter(library)
    assert router.choose("boats").entry.key == ("harbour", 1)
    file = library.get(CartridgeName("harbour")).path.parent / TERMS
    file.write_text(file.read_text().replace('"nine": 1', '"nine": 2'))
    assert router.names() == ("orchard",)
    assert CartridgeRouter(library).names() == ("orchard",)


def test_the_index_is_read_beside_the_thread_that_parses(
    routed: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nobody can read the index, a plain request is answered, and one for `auto` waits."""
    threads: dict[str, set[str]] = {"look": set(), "choose": set()}
    look, choose = WordIndex.look, CartridgeRouter.choose

    def noted_look(index: WordIndex, *arguments: Any) -> None:
        threads["look"].add(threading.current_thread().name.partition("_")[0])
        look(index, *arguments)

    def noted_choose(router: CartridgeRouter, text: str) -> RoutedChoice:
        threads["choose"].add(threading.current_thread().name.partition("_")[0])
        return choose(router, text)

    monkeypatch.setattr(WordIndex, "look", noted_look)
    monkeypatch.setattr(CartridgeRouter, "choose", noted_choose)
    handler = routed.door.handler
    with ThreadPoolExecutor(1) as asking:
        with handler.index.lock:
            waiting = asking.submit(chat, routed)
            assert chat(routed, model=f"{MODEL}+orchard")[:2] == (200, "orchard@1")
            assert not waiting.done()
        assert waiting.result(60)[:2] == (200, "harbour@1")
    add_cartridge(routed.house.library, "mill", seed=4)
    routed.house.library.describe(
        routed.house.library.get(CartridgeName("mill")), [count_terms("wheat flour")]
    )
    question = [{"role": "user", "content": "wheat?"}]
    assert chat(routed, messages=question)[1] == "mill@1"
    assert chat(routed, messages=question, model="auto:twice")[1] == "mill@1"
    assert threads == {"look": {"routing"}, "choose": {"routing"}}


def test_models_come_in_pages(routed: Served) -> None:
    def page(query: str) -> tuple[list[str], list[str], bool, str | None]:
        status, _, content = raw(routed, f"/v1/models{query}", method="GET")
        body = json.loads(content)
        assert status == 200
        forge = body["data"][0]["forge"]
        return list(forge["cartridges"]), forge["auto"], body["has_more"], body["last_id"]

    assert page("") == (["harbour", "mute", "orchard"], ["harbour", "orchard"], False, "orchard")
    assert page("?limit=2") == (["harbour", "mute"], ["harbour"], True, "mute")
    assert page("?limit=2&after_id=mute") == (["orchard"], ["orchard"], False, "orchard")
    assert page("?after_id=zebra") == ([], [], False, None)
    for query in ("?limit=0", "?limit=1001", "?limit=many"):
        status, _, content = raw(routed, f"/v1/models{query}", method="GET")
        assert (status, json.loads(content)["error"]["param"]) == (400, "limit")
