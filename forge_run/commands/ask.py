"""Ask a cartridge one question: `forge ask NAME|auto QUESTION`.

    library (the default), --run RUN    an engine in this process, without a mesh
    --server URL                        a running `forge serve`

With `auto` the router chooses the cartridge by the question's words, and the choice is told.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from documents.retrieval import Bm25Router, Choice
from forge_run.commands import note
from protocols.errors import DataError, RunError, SpecError
from protocols.secrets import secret_text
from protocols.spec.loading import load_resolved, load_serve
from protocols.spec.sections import GeneratorSpec, ModelSpec
from protocols.teacher_replay import AgentMessage
from protocols.types import Sampling
from registry.names import AUTO, parse_cartridge

ANSWER_SECONDS = 300.0  # most of a server's answer


@dataclass(frozen=True)
class AskedCartridge:
    """Hold a cartridge's file and its model; `why` tells how the router chose it."""

    shown: str
    file: Path
    model: ModelSpec
    generator: GeneratorSpec
    why: Choice | None


@dataclass(frozen=True)
class AskedAnswer:
    """Hold an answer and the cartridge that gave it: the JSON of `forge ask --json`."""

    cartridge: str
    question: str
    answer: str
    tokens: int
    finish_reason: str
    routed: Choice | None


def command(
    *,
    cartridge: str,
    question: str,
    run: Path | None,
    server: str | None,
    key_env: str | None,
    mesh: str,
    sets: Sequence[str],
    max_tokens: int,
    temperature: float,
    seed: int,
    as_json: bool,
) -> int:
    """Print the answer; what the router chose is told on stderr. Raises ForgeError."""
    for bars in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(bars, "1")
    if max_tokens < 1 or temperature < 0:
        raise SpecError(
            f"--max-tokens must be >= 1 and --temperature >= 0: got {max_tokens} and "
            f"{temperature:g}; leave them out for 64 and 0"
        )
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    if server is not None:
        found = _by_server(server, key_env, cartridge, question, sampling, seed)
    else:
        here = _of_library(mesh, sets, cartridge, question)
        with here if run is None else _of_run(run, cartridge, question) as asked:
            found = _in_process(asked, question, sampling, seed)
    if found.routed is not None:
        note(f"{found.cartridge}: {told(found.routed)}")
    print(json.dumps(asdict(found), indent=1) if as_json else found.answer.strip())
    return 0


def told(why: Choice) -> str:
    """Return a choice as text: `score 4.21, then patient_02 with 1.10`."""
    if why.runner_up is None:
        return f"score {why.score:.2f}, the only one with a word of the question"
    return f"score {why.score:.2f}, then {why.runner_up} with {why.runner_up_score:.2f}"


@contextmanager
def _of_library(
    mesh: str, sets: Sequence[str], cartridge: str, question: str
) -> Iterator[AskedCartridge]:
    from registry.formats import forge
    from registry.formats.base_model import read_base
    from registry.store import CartridgeStore
    from serving.routing import CartridgeRouter

    spec = load_serve(mesh, sets=sets).spec
    library = CartridgeStore(Path(spec.library), read_base(Path(spec.model.path)))
    why = None
    if cartridge == AUTO:
        router = CartridgeRouter(library)
        router.require()
        chosen = router.choose(question)
        entry, why = chosen.entry, chosen.why
    else:
        entry = library.get(parse_cartridge(cartridge))
    forge.read(entry.path.parent)  # against its checksums
    shown = "{}@{}".format(*entry.key)
    yield AskedCartridge(shown, entry.path, spec.model, spec.generator, why)


@contextmanager
def _of_run(run: Path, cartridge: str, question: str) -> Iterator[AskedCartridge]:
    from registry.formats import forge, run_checkpoint
    from registry.terms import TERMS, read_terms

    home = run_checkpoint.run_of(run)
    why = None
    if cartridge == AUTO:
        if not (terms := read_terms(home / TERMS)):
            raise DataError(
                f"{home} has no words of its texts ({TERMS}), which {AUTO} goes by: an older "
                "version made it; name a cartridge"
            )
        why = Bm25Router(terms).choose(question)
        cartridge = why.name
    learn = load_resolved(home / "spec.yaml").learn
    kept = run_checkpoint.read_all(run, [cartridge])[cartridge]
    with TemporaryDirectory(prefix="forge-ask-") as made:
        file = Path(made) / forge.FILE
        forge.write_file(kept, file)
        yield AskedCartridge(cartridge, file, learn.model, learn.generator, why)


def _in_process(asked: AskedCartridge, question: str, sampling: Sampling, seed: int) -> AskedAnswer:
    from actors.in_process import local_sampler
    from strategies.samplers.sampler import SampleRequest

    model, generator = asked.model, asked.generator
    request = SampleRequest("ask", (AgentMessage("user", question),), sampling, seed)
    with local_sampler(
        model.path, backend=generator.backend, dtype=model.dtype, cartridge=asked.file,
        threads=max(1, (os.cpu_count() or 2) // 2), kv_gib=generator.kv_gib,
    ) as sampler:  # fmt: skip
        (said,) = asyncio.run(sampler([request]))
    return AskedAnswer(asked.shown, question, said.text, said.tokens, said.finish_reason, asked.why)


def _by_server(
    url: str, key_env: str | None, cartridge: str, question: str, sampling: Sampling, seed: int
) -> AskedAnswer:
    import httpx2

    if key_env is not None and not secret_text(key_env):
        raise SpecError(f"--key-env {key_env}: no such variable; set it to the server's key")
    headers = {} if key_env is None else {"authorization": f"Bearer {secret_text(key_env)}"}
    body: dict[str, Any] = {
        "model": AUTO, "messages": [{"role": "user", "content": question}], "seed": seed,
        "max_tokens": sampling.max_tokens, "temperature": sampling.temperature,
    }  # fmt: skip
    try:
        with httpx2.Client(base_url=url, headers=headers, timeout=ANSWER_SECONDS) as client:
            if cartridge != AUTO:
                listed = _replied(client.get("/v1/models"), url)
                body["model"] = f"{listed['data'][0]['id']}+{cartridge}"
            reply = _replied(client.post("/v1/chat/completions", json=body), url)
        choice, forge = reply["choices"][0], reply["forge"]
        named, why = forge["cartridge"], forge.get("routed")
        return AskedAnswer(
            f"{named['name']}@{named['version']}", question, choice["message"]["content"],
            reply["usage"]["completion_tokens"], choice["finish_reason"],
            None if why is None else Choice(named["name"], **why),
        )  # fmt: skip
    except httpx2.HTTPError as error:
        raise RunError(f"no answer from {url}: {error}; is `forge serve` running there?") from error
    except (LookupError, TypeError, json.JSONDecodeError) as error:
        raise DataError(f"{url} is no `forge serve` of this version ({error!r})") from error


def _replied(reply: Any, url: str) -> Any:
    """Return the body. Raises DataError with the server's own words where it refuses."""
    if reply.status_code == 200:
        return reply.json()
    try:
        why = reply.json()["error"]["message"]
    except (LookupError, TypeError, ValueError):
        why = reply.reason_phrase
    raise DataError(f"{url} answers {reply.status_code}: {why}")
