"""Ask a cartridge: `forge ask NAME|auto QUESTION`, or with -i a chat.

    library (the default), --run RUN    an engine in this process, without a mesh
    --server URL                        a running `forge serve`

With `auto` the router chooses the cartridge by the question's words, and the choice is told; with
the name of a `forge make` of several documents it chooses among theirs. With --beside the model
answers without the cartridge, over passages of its document, and with the document too. With
--verify after the document says which tokens of the answer it would have changed, with --verify
exact the answer is the document's own. With --passages the document's passages that support the
answer are told, and with --fallback an answer of little confidence is written again with passages
before the question.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from cartridge_forge.forge_run.commands import note
from cartridge_forge.forge_run.model_check import check
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.wire.foreign import read_json
from cartridge_forge.plugins.documents.retrieval import Bm25Router, Choice
from cartridge_forge.plugins.documents.study.support import SupportingPassage, supporting_passages
from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo
from cartridge_forge.plugins.library.formats.cartridge_file import Provenance, date_of
from cartridge_forge.plugins.library.names import AUTO, parse_cartridge
from cartridge_forge.plugins.serve.engine.run_documents import document_of_source
from cartridge_forge.plugins.serve.spec import VerifySpec, load_serve
from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.plugins.strategies.samplers.sampler import SampleRequest, SampleResult
from cartridge_forge.protocols.errors import DataError, RunError, SpecError
from cartridge_forge.protocols.files import named_model
from cartridge_forge.protocols.secrets import secret_text
from cartridge_forge.protocols.spec.model import ModelSpec
from cartridge_forge.protocols.spec.sections import GeneratorSpec
from cartridge_forge.protocols.step import Sampling

if TYPE_CHECKING:  # its import takes a second
    from cartridge_forge.plugins.chat.renderer import ChatRenderer
    from cartridge_forge.plugins.documents.study.passages import Retriever
    from cartridge_forge.plugins.strategies.samplers.token_sampler import TokenSampler

ANSWER_SECONDS = 300.0  # most of a server's answer
LEAST_READ = 64  # tokens of passages, of a shorter cartridge too


@dataclass(frozen=True)
class AskedCartridge:
    """Hold a cartridge's file of so many tokens, and its model; `why` tells how the router chose
    it. `run` is the id or path of the run that made it, "" for none, and `name` its name there;
    `date` is the one that the run's prompts told, None where it is not known."""

    shown: str
    file: Path
    model: ModelSpec
    generator: GeneratorSpec
    why: Choice | None
    tokens: int
    run: str
    name: str
    date: datetime | None = None
    document: Path | None = None  # its text in the store, where it was given
    library: Path | None = None  # the store that it is from


@dataclass(frozen=True)
class AskedAnswer:
    """Hold an answer and the cartridge that gave it: the JSON of `forge ask --json`. `verify` is
    the `forge.verify` of a server's reply, None where the document was not asked. `passages`
    support the answer, None where they were not asked for. `confidence` is that of the cartridge's
    own answer, None of a server's and where nothing asked for it, and `fallback` tells whether
    passages were read after that one."""

    cartridge: str
    question: str
    answer: str
    tokens: int
    finish_reason: str
    routed: Choice | None
    verify: dict[str, Any] | None = None
    confidence: float | None = None
    fallback: bool = False
    passages: list[SupportingPassage] | None = None


@dataclass(frozen=True)
class AnswerSupport:
    """Tell whether the passages that support an answer are asked for (`passages`), and below which
    confidence the question is asked again with passages before it, None for never (`fallback`);
    and what ranks those that are read."""

    passages: bool
    fallback: float | None
    retriever: Retriever = "bm25"

    @property
    def reads(self) -> bool:
        """Return whether the document's text is needed."""
        return self.passages or self.fallback is not None


@dataclass(frozen=True)
class ArmAnswer:
    """Hold one arm's answer: the tokens before the question, those written, and the seconds of
    both; of the cartridge's `verify` too, as in `AskedAnswer`."""

    arm: str
    prefix_tokens: int
    answer: str
    tokens: int
    seconds: float
    verify: dict[str, Any] | None = None


NO_SUPPORT = AnswerSupport(passages=False, fallback=None)


def command(
    *,
    cartridge: str,
    question: str | None,
    chat: bool,
    beside: bool,
    verify: str | None,
    passages: bool,
    fallback: float | None,
    retriever: Retriever,
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
    if (question is None) != chat:
        raise SpecError("give a question, or -i for a chat, and not both")
    if server is not None and (chat or beside):
        raise SpecError("-i and --beside are answered here; leave out --server")
    if verify == "exact" and (chat or beside):
        raise SpecError(
            "--verify exact gives the document's own answer, which --beside shows too, and is of "
            "one question; leave -i and --beside out, or give --verify after"
        )
    support = AnswerSupport(passages, fallback, retriever)
    if support.reads and (chat or beside):
        raise SpecError("--passages and --fallback are of one answer; leave out -i and --beside")
    if fallback is not None and server is not None:
        raise SpecError("--fallback is answered here; leave out --server")
    if fallback is not None and not 0 < fallback <= 1:
        raise SpecError(f"--fallback must be a confidence, above 0 and at most 1: got {fallback:g}")
    if fallback is not None and verify == "exact":
        raise SpecError(
            "--verify exact gives the document's own answer, which needs no fallback; leave one out"
        )
    if chat and (as_json or cartridge == AUTO):
        raise SpecError(f"a chat is with one cartridge, as text: not {AUTO}, and without --json")
    hide_bars()
    if max_tokens < 1 or temperature < 0:
        raise SpecError(
            f"--max-tokens must be >= 1 and --temperature >= 0: got {max_tokens} and "
            f"{temperature:g}; leave them out for 64 and 0"
        )
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    if server is not None:
        assert question is not None
        answer = _by_server(server, key_env, cartridge, question, sampling, seed, verify, passages)
    else:
        opening = library_cartridge(mesh, sets, cartridge, question or "")
        with opening if run is None else _of_run(run, cartridge, question or "") as cartridge_asked:
            if question is None or beside:
                return _sides(
                    cartridge_asked, question, beside, sampling, seed, as_json, verify, retriever
                )  # fmt: skip
            with sampler_of(cartridge_asked, verify) as sampler:
                answer = answer_of(
                    cartridge_asked, sampler, question, sampling, seed, verify, support
                )  # fmt: skip
    if answer.routed is not None:
        note(f"{answer.cartridge}: {choice_text(answer.routed)}")
    if as_json:
        print(json.dumps(asdict(answer), indent=1))
    else:
        print(_words(answer.answer, answer.verify))
        for passage in answer.passages or ():
            print(f"  [{passage.start}-{passage.stop}] {passage.text}")
    return 0


def hide_bars() -> None:
    """Have the libraries that load a model draw no progress bars."""
    for bars in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(bars, "1")


def _words(answer: str, verify: Mapping[str, Any] | None = None) -> str:
    """Return an answer as it is printed, with the document's marks, and say of an empty one that it
    is no mistake."""
    if not answer.strip():
        note("the answer is empty: the model ended it at once; ask in the document's own words")
    if verify is None:
        return answer.strip()
    note(verdict_text(verify))
    if verify["mode"] != "after":
        return answer.strip()
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return marked(answer, verify["choices"][0]["changed"], colours).strip()


def verdict_text(verify: Mapping[str, Any]) -> str:
    """Return what a verification found, as one sentence."""
    if verify["mode"] == "document":
        return "the document's own answer, written without a draft"
    if (draft := verify.get("draft")) is not None:
        return (
            f"the document's own answer: of {draft['proposed']} tokens that the cartridge proposed "
            f"it accepted {draft['accepted']}, in {draft['verifications']} passes"
        )
    (choice,) = verify["choices"]
    if not choice["tokens"]:
        return "there is no token that the document could accept"
    return (
        f"the document accepts {choice['accepted']:.0%} of {choice['tokens']} tokens (probability "
        f"{verify['below']:g} or more); {choice['agreed']:.0%} are its own likeliest"
    )


def marked(answer: str, changed: Sequence[Mapping[str, Any]], colours: bool) -> str:
    """Return an answer with the tokens that the document would have changed: red where it refuses
    them and yellow where another is likelier; without `colours` as [token -> document's], and with
    a ? before the arrow where the token is not refused."""
    text, at = "", 0
    for one in changed:
        begin, token = one["offset"], one["token"]
        if answer[begin : begin + len(token)] != token:  # an end token, or part of a character
            continue
        blank = token[: len(token) - len(token.lstrip())]
        if colours:
            mark = f"\x1b[{31 if one['refused'] else 33}m{token}\x1b[0m"
        else:
            arrow = "->" if one["refused"] else "?->"
            mark = f"{blank}[{token.strip()} {arrow} {one['document_token'].strip() or 'the end'}]"
        text += answer[at:begin] + mark
        at = begin + len(token)
    return text + answer[at:]


def choice_text(why: Choice) -> str:
    """Return a choice as text: `score 4.21, then patient_02 with 1.10`."""
    if why.runner_up is None:
        return f"score {why.score:.2f}, the only one with a word of the question"
    return f"score {why.score:.2f}, then {why.runner_up} with {why.runner_up_score:.2f}"


@contextmanager
def library_cartridge(
    mesh: str, sets: Sequence[str], cartridge: str, question: str
) -> Iterator[AskedCartridge]:
    """Yield the cartridge of a server's library that a name, or the router by the question, stands
    for, checked against its checksums. Raises DataError."""
    from cartridge_forge.plugins.library.formats import forge
    from cartridge_forge.plugins.library.formats.base_model import read_base
    from cartridge_forge.plugins.library.store import CartridgeStore
    from cartridge_forge.plugins.serve.routing import CartridgeRouter

    spec = load_serve(mesh, sets=sets).spec
    library = CartridgeStore(Path(spec.library), read_base(Path(spec.model.path)))
    why = None
    several = {name for name in library.folders() if name.startswith(f"{cartridge}.")}
    if cartridge == AUTO or (several and not library.versions(cartridge)):
        router = CartridgeRouter(library, None if cartridge == AUTO else several.__contains__)
        router.require()
        chosen = router.choose(question)
        entry, why = chosen.entry, chosen.why
    else:
        entry = library.get(parse_cartridge(cartridge))
    forge.read(entry.path.parent)  # against its checksums
    label, source = "{}@{}".format(*entry.key), entry.manifest.source
    yield AskedCartridge(
        label, entry.path, model_of(label, entry.manifest.facts, spec.model, library.base),
        spec.generator, why,
        entry.manifest.tokens, str(source.get("run", "")), str(source.get("name", "")),
        date_of(source), entry.document if entry.document.is_file() else None, library.directory,
    )  # fmt: skip


def model_of(label: str, facts: Provenance, served: ModelSpec, base: BaseModelInfo) -> ModelSpec:
    """Return the model that a cartridge is for: the one that the library's server serves, or a kept
    or shipped one of the name that it was trained with. Raises DataError where there is neither."""
    if facts.config_sha256 in ("", base.config_sha256):
        return served
    model = named_model(facts.base)
    if model is None:
        raise DataError(
            f"{label} was trained for the model {facts.base}, which is not kept "
            f"here; add it (forge models add {facts.base}), or name it: --set model.path=DIR"
        )
    return served.model_copy(
        update={"path": str(model), "dtype": facts.weights_dtype or served.dtype}
    )


@contextmanager
def _of_run(run: Path, cartridge: str, question: str) -> Iterator[AskedCartridge]:
    from cartridge_forge.plugins.library.formats import forge, run_checkpoint
    from cartridge_forge.plugins.library.terms import read_terms
    from cartridge_forge.protocols.records.run_files import TERMS

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
    cartridge_file = run_checkpoint.read_all(run, [cartridge])[cartridge]
    with TemporaryDirectory(prefix="forge-ask-") as folder:
        file = Path(folder) / forge.FILE
        forge.write_file(cartridge_file, file)
        yield AskedCartridge(
            cartridge,
            file,
            learn.model,
            learn.generator,
            why,
            cartridge_file.tokens,
            str(home),
            cartridge,
            date_of(cartridge_file.facts.source),
        )


@contextmanager
def sampler_of(cartridge: AskedCartridge, verify: str | None = None) -> Iterator[TokenSampler]:
    """Yield the sampler of a cartridge over an engine in this process, with its document where
    answers are verified. Raises SpecError, DataError and RunError."""
    if verify == "exact" and cartridge.generator.backend != "torch":
        raise SpecError(
            f"--verify exact needs the embedded engine, and generator.backend is "
            f"{cartridge.generator.backend}; give --set generator.backend=torch, or --verify after"
        )
    document = None if verify is None else document_of_cartridge(cartridge)
    with _engine(cartridge, document, max(1, (os.cpu_count() or 2) // 2)) as samplers:
        yield samplers["cartridge"]


@contextmanager
def _engine(
    cartridge: AskedCartridge, document: str | None, threads: int
) -> Iterator[Mapping[str, TokenSampler]]:
    from cartridge_forge.plugins.serve.engine.in_process import local_samplers

    model, generator = cartridge.model, cartridge.generator
    if generator.backend == "torch":
        for line in check(model.path)[1]:
            note(line)
    with local_samplers(
        model.path, backend=generator.backend, dtype=model.dtype, cartridge=cartridge.file,
        document=document, threads=threads, kv_gib=generator.kv_gib, date=cartridge.date,
    ) as samplers:  # fmt: skip
        yield samplers


def answer_of(
    cartridge: AskedCartridge, sampler: TokenSampler, question: str, sampling: Sampling,
    seed: int = 0, verify: str | None = None, support: AnswerSupport = NO_SUPPORT,
) -> AskedAnswer:  # fmt: skip
    """Return the answer to one question by the sampler of `sampler_of`, with the passages that
    support it, or after reading passages, as `support` asks for."""
    text = document_of_cartridge(cartridge) if support.reads else ""
    request = SampleRequest("ask", (AgentMessage("user", question),), sampling, seed)
    result, info = _sampled(sampler, request, verify)
    confidence = confidence_of(result.logprobs, info) if support.reads else None
    falls = support.fallback is not None and (confidence or 0.0) < support.fallback
    if support.reads:
        figure = "none" if confidence is None else f"{confidence:.2f}"
        note(f"confidence {figure}{': passages of the document are read' if falls else ''}")
    if falls:
        words = with_passages(question, text, sampler.conversation, cartridge, support.retriever)
        again = replace(request, messages=(AgentMessage("user", words),))
        result, info = _sampled(sampler, again, verify)
    passages = supporting_passages(text, question, result.text) if support.passages else None
    return AskedAnswer(
        cartridge.shown, question, result.text, result.tokens, result.finish_reason, cartridge.why,
        info, confidence, falls, passages,
    )  # fmt: skip


def confidence_of(logprobs: Sequence[float], verify: Mapping[str, Any] | None) -> float | None:
    """Return a confidence from 0 to 1: the share of the answer that its document accepts where that
    was asked, else the geometric mean of the tokens' probabilities; None of an empty answer, and of
    the document's own."""
    if verify is not None:
        choices = verify.get("choices")
        accepted: float | None = choices[0]["accepted"] if choices else None
        return accepted
    return math.exp(fmean(logprobs)) if logprobs else None


def with_passages(
    question: str, document: str, conversation: ChatRenderer, cartridge: AskedCartridge,
    retriever: Retriever,
) -> str:  # fmt: skip
    """Return the question behind the passages of a document that the retriever ranks first for it,
    as many tokens as the cartridge has, or LEAST_READ."""
    from cartridge_forge.learning.model.loading import load_tokenizer
    from cartridge_forge.plugins.documents.study.passages import PassageIndex

    tokenizer = load_tokenizer(cartridge.model.path)
    most = max(cartridge.tokens, LEAST_READ)
    index = PassageIndex([document], tokenizer, conversation, most, retriever)
    return f"{index.best(question)}\n\n{question}"


def _sampled(
    sampler: TokenSampler, request: SampleRequest, verify: str | None
) -> tuple[SampleResult, dict[str, Any] | None]:
    """Return the answer of a cartridge's sampler, and how its document verified it."""
    from cartridge_forge.plugins.serve.engine.in_process import DOCUMENT
    from cartridge_forge.plugins.serve.engine.verification import (
        ServedDocument,
        document_ref,
        verified_answer,
    )

    if verify is None:
        (result,) = asyncio.run(sampler([request]))
        return result, None
    ids = sampler.conversation.head(DOCUMENT)
    document, below = ServedDocument(ids, document_ref(ids)), VerifySpec().below
    result, info = asyncio.run(
        verified_answer(sampler, request, document, verify == "exact", below)
    )
    return result, info.plain()


def _sides(
    cartridge: AskedCartridge, question: str | None, compare: bool, sampling: Sampling, seed: int,
    as_json: bool, verify: str | None, retriever: Retriever,
) -> int:  # fmt: skip
    """Answer the question, or the lines of a chat until an empty one, by every arm."""
    from cartridge_forge.learning.model.loading import load_tokenizer
    from cartridge_forge.plugins.documents.study.passages import RETRIEVED

    if cartridge.why is not None:
        note(f"{cartridge.shown}: {choice_text(cartridge.why)}")
    document = document_of_cartridge(cartridge) if compare or verify else None
    sizes = {"none": 0, "cartridge": cartridge.tokens}
    tokenizer = load_tokenizer(cartridge.model.path)

    def tokens_of(text: str) -> int:
        return len(tokenizer(text).input_ids)

    if document is not None:
        sizes["document"] = tokens_of(document)
    with _engine(cartridge, document, os.cpu_count() or 1) as samplers:
        arms = {name: one for name, one in samplers.items() if compare or name == "cartridge"}
        if compare:  # passages stand before the question, without a cartridge
            arms = {"none": arms["none"], RETRIEVED: arms["none"], **arms}
        history: dict[str, tuple[AgentMessage, ...]] = dict.fromkeys(arms, ())
        for line in [question] if question is not None else _lines():
            answers = []
            for arm, sampler in arms.items():
                words = line
                if arm == RETRIEVED:
                    assert document is not None, "arms are compared with the document's"
                    words = with_passages(
                        line, document, sampler.conversation, cartridge, retriever
                    )  # fmt: skip
                    sizes[arm] = tokens_of(words) - tokens_of(line)
                messages = (*history[arm], AgentMessage("user", words))
                start = time.perf_counter()
                request = SampleRequest("ask", messages, sampling, seed)
                checks = verify if arm == "cartridge" else None
                one, info = _sampled(sampler, request, checks)
                seconds = time.perf_counter() - start
                history[arm] = (*messages, AgentMessage("assistant", one.text))
                answers.append(ArmAnswer(arm, sizes[arm], one.text, one.tokens, seconds, info))
            _print_sides(answers, as_json)
    return 0


def _lines() -> Iterator[str]:
    """Yield what a user types, until an empty line or the end."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


def _print_sides(answers: Sequence[ArmAnswer], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(one) for one in answers], indent=1))
    elif len(answers) == 1:
        print(_words(answers[0].answer, answers[0].verify))
    else:
        for one in answers:
            cost = f"{one.prefix_tokens:,} tokens before it, {one.tokens} written"
            answer = one.answer.strip() if one.verify is None else _words(one.answer, one.verify)
            print(f"{one.arm}  ({cost}, {one.seconds:.1f} s)\n  {answer}\n")


def document_of_cartridge(cartridge: AskedCartridge) -> str:
    """Return the text that a cartridge replaces. Raises DataError where its run or that run's
    documents are not there any more, or are others."""
    if cartridge.document is not None:
        return cartridge.document.read_text(encoding="utf-8")
    try:
        source = {"run": cartridge.run, "name": cartridge.name}
        return document_of_source(source, cartridge.shown, cartridge.library)
    except DataError as error:
        raise DataError(
            f"{error}; name the run by --run RUN, or give the text: forge cartridges document "
            f"{cartridge.shown} FILE"
        ) from error


def _by_server(
    url: str, key_env: str | None, cartridge: str, question: str, sampling: Sampling, seed: int,
    verify: str | None, passages: bool,
) -> AskedAnswer:  # fmt: skip
    import httpx2

    if key_env is not None and not secret_text(key_env):
        raise SpecError(f"--key-env {key_env}: no such variable; set it to the server's key")
    headers = {} if key_env is None else {"authorization": f"Bearer {secret_text(key_env)}"}
    body: dict[str, Any] = {
        "model": AUTO, "messages": [{"role": "user", "content": question}], "seed": seed,
        "max_tokens": sampling.max_tokens, "temperature": sampling.temperature,
    }  # fmt: skip
    forge_options: dict[str, Any] = {"passages": True} if passages else {}
    if verify is not None:
        forge_options["verify"] = True if verify == "exact" else verify
    if forge_options:
        body["forge"] = forge_options
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
            None if why is None else Choice(named["name"], **why), forge.get("verify"),
            passages=_passages_of(forge) if passages else None,
        )  # fmt: skip
    except httpx2.HTTPError as error:
        raise RunError(f"no answer from {url}: {error}; is `forge serve` running there?") from error
    except DataError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise DataError(f"{url} is no `forge serve` of this version ({error!r})") from error


def _passages_of(forge: Mapping[str, Any]) -> list[SupportingPassage]:
    """Return the passages of a reply's only choice."""
    return [SupportingPassage(**one) for one in forge["passages"][0]["passages"]]


def _replied(reply: Any, url: str) -> Any:
    """Return the body. Raises DataError with the server's own words where it refuses."""
    if reply.status_code == 200:
        return read_json(reply.content)
    try:
        why = read_json(reply.content)["error"]["message"]
    except (LookupError, TypeError, ValueError):
        why = reply.reason_phrase
    raise DataError(f"{url} answers {reply.status_code}: {why}")
