"""A polite client beside a key that floods: each of its requests is served, at once."""

from __future__ import annotations

import threading
from pathlib import Path

from serving_setup import MODEL, an_api_key, raw, serving

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
