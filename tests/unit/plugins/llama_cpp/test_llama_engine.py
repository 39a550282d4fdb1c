"""llama.cpp's engine over tiny random GGUF files: its tokens are those of the embedded engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf_setup import ARCHITECTURES, SCALING, drawn, trained_pieces, write_gguf

from cartridge_forge.learning.cartridge import fingerprint
from cartridge_forge.learning.model.loading import load_model, tokenizer_of
from cartridge_forge.learning.teacher import context_ids, document_kv
from cartridge_forge.plugins.decoding.engine import TorchEngine
from cartridge_forge.plugins.decoding.grammar import Grammars
from cartridge_forge.plugins.library.base_models.kept import from_gguf
from cartridge_forge.plugins.llama_cpp.engine import FIRST_POSITIONS, MOST_ROWS, LlamaEngine
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.ports import TokenChunk
from cartridge_forge.protocols.response_rules import LogitRules, ResponseGrammar
from cartridge_forge.protocols.step import (
    Completion,
    Draft,
    GenerateRequest,
    PrefixRef,
    Sampling,
    StopCondition,
)

END = 2
DOCUMENTS = {"none": (1,), "chart": (1, *range(40, 90))}
WARD, OTHER = PrefixRef("cartridge/ward", 3), PrefixRef("cartridge/other", 3)
CHART = PrefixRef("document/chart", 0)
PROMPT = (5, 300, 17, 41, 8, 120)
GREEDY = Sampling(temperature=0.0, max_tokens=24)
NEAR = 1e-3  # nats: float32 sums in another order
Engines = tuple[TorchEngine, LlamaEngine]


def kept_model(family: str, folder: Path) -> Path:
    """A directory of a tiny random model of a family, with its GGUF file in float32."""
    architecture, make = ARCHITECTURES[family]
    network, pieces = drawn(make), trained_pieces()
    network.resize_token_embeddings(pieces.get_piece_size())  # llama.cpp has no padded ones
    file = write_gguf(folder / "x.gguf", architecture, network, pieces, **SCALING.get(family, {}))
    (folder / "model").mkdir()
    from_gguf(file, folder / "model", "float32")
    return folder / "model"


def both(model: Path) -> Engines:
    """Both engines over a model, with two cartridges of 24 and 9 tokens."""
    path, ends = str(model), frozenset({END})
    network = load_model(path)
    text = tokenizer_of(path).decode
    whole = document_kv(network, DOCUMENTS["chart"]).float()
    noise = torch.randn(whole.shape, generator=torch.Generator().manual_seed(3))
    kv = whole + 0.1 * noise
    cartridges = {("ward", 3): kv[:, :, :, :24].clone(), ("other", 3): kv[:, :, :, :9].clone()}
    grammars = Grammars(lambda: tokenizer_of(path), ends)

    def document(name: str) -> torch.Tensor:
        ids = context_ids(DOCUMENTS, name)
        return document_kv(network, ids) if ids else whole[:, :, :, :0]

    ours = TorchEngine(network, document, ends, text, grammars)
    theirs = LlamaEngine(path, "float32", 1, DOCUMENTS, ends, text, grammars)
    for engine in (ours, theirs):
        engine.hold(cartridges)
    return ours, theirs


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return both(kept_model("llama", tmp_path_factory.mktemp("llama")))


def completed(
    engine: TorchEngine | LlamaEngine, *requests: GenerateRequest
) -> dict[str, Completion]:
    """The completions of requests that come together, by id."""
    for request in requests:
        engine.add(request.id, request, request.prefix)
    done: dict[str, Completion] = {}
    while len(done) < len(requests):
        done |= {key: news for key, news in engine.step() if isinstance(news, Completion)}
    return done


def request(name: str, prefix: PrefixRef = WARD, seed: int = 7, **more: object) -> GenerateRequest:
    made = GenerateRequest(name, PROMPT, prefix, GREEDY, seed)
    return replace(made, **more)  # type: ignore[arg-type]  # any field


def require_equal(ours: Completion, theirs: Completion) -> None:
    assert theirs.token_ids == ours.token_ids
    assert (theirs.finish_reason, theirs.ended_by) == (ours.finish_reason, ours.ended_by)
    assert (theirs.served, theirs.versions) == (ours.served, ours.versions)
    assert theirs.logprobs == pytest.approx(ours.logprobs, abs=NEAR)
    assert theirs.prompt_logprobs == pytest.approx(ours.prompt_logprobs, abs=NEAR)
    assert theirs.prompt_likeliest == ours.prompt_likeliest


@pytest.mark.parametrize("family", ["untied_llama", "qwen2", "qwen3"])
def test_each_family_writes_our_tokens(family: str, tmp_path: Path) -> None:
    ours, theirs = both(kept_model(family, tmp_path))
    asked = request("greedy")
    require_equal(completed(ours, asked)["greedy"], completed(theirs, asked)["greedy"])
    theirs.close()


def test_requests_in_one_batch_write_our_tokens(engines: Engines) -> None:
    ours, theirs = engines
    warm = Sampling(temperature=0.9, top_p=0.9, top_k=40, max_tokens=16)
    composed = PrefixRef("cartridge/ward", 3, (OTHER,))
    asked = [
        request("greedy"), request("other", OTHER, logprobs=False), request("bare", CHART),
        request("none", PrefixRef("document/none", 0)), request("empty", PrefixRef("document/", 0)),
        request("drawn", sampling=warm), request("composed", composed, sampling=warm, seed=8),
        request("scored", prompt_logprobs=True, prompt_ids=PROMPT * 12, top_logprobs=3),
        request("rules", rules=LogitRules(bias=((9, 4.0),), presence_penalty=1.5), sampling=warm),
        request("until", until=StopCondition(strings=("e",))),
        request("grammar", grammar=ResponseGrammar("regex", "(yes|no), it (is|was)")),
    ]  # fmt: skip
    mine, others = completed(ours, *asked), completed(theirs, *asked)
    for one in asked:
        require_equal(mine[one.id], others[one.id])
    kv = theirs._held["ward", 3]
    assert others["greedy"].served == (fingerprint(kv),)
    assert others["greedy"].versions == (3,) * 24
    assert len(others["scored"].prompt_logprobs) == len(PROMPT) * 12 - 1
    assert [ids for (ids, _) in others["scored"].top_logprobs[0]] == [
        ids for (ids, _) in mine["scored"].top_logprobs[0]
    ]


def test_a_new_version_serves_beside_the_old_one(engines: Engines) -> None:
    ours, theirs = engines
    newer = {("ward", 4): ours._held["other", 3].clone()}
    for engine in engines:
        engine.hold(newer)
    new = PrefixRef("cartridge/ward", 4)
    asked = [request("old"), request("new", new)]
    mine, others = completed(ours, *asked), completed(theirs, *asked)
    for one in asked:
        require_equal(mine[one.id], others[one.id])
    assert others["old"].token_ids != others["new"].token_ids
    for engine in engines:
        engine.let_go([("ward", 4)])
    assert new not in theirs._prefixes


def test_the_pool_grows_for_what_waits_and_frees_what_ends(engines: Engines) -> None:
    ours, theirs = engines
    warm = Sampling(temperature=0.8, max_tokens=20)
    asked = [
        request(f"r{i}", WARD if i % 3 else OTHER, seed=i, sampling=warm)
        for i in range(MOST_ROWS + 6)
    ]
    assert sum(len(one.prompt_ids) + 20 for one in asked) > FIRST_POSITIONS
    mine, others = completed(ours, *asked), completed(theirs, *asked)
    assert {len(one.token_ids) for one in others.values() if one.finish_reason == "length"} == {20}
    # Sums in another order move a draw that falls on a boundary: one of 10,000.
    equal = [one.token_ids == mine[key].token_ids for key, one in others.items()]
    assert sum(equal) > 0.9 * len(equal)
    assert theirs._pool.positions > FIRST_POSITIONS
    assert not theirs._running
    assert len(theirs._free_rows) == MOST_ROWS
    assert all(not one.users for one in theirs._prefixes.values())


def test_a_stream_is_told_each_token_once_and_a_cancelled_one_ends(engines: Engines) -> None:
    _, theirs = engines
    whole = completed(theirs, request("whole"))["whole"]
    theirs.add("told", request("told"), WARD, stream=True)
    theirs.add("left", request("left"), WARD)
    tokens: list[int] = []
    done: dict[str, Completion] = {}
    while len(done) < 2:
        for key, news in theirs.step():
            if isinstance(news, TokenChunk):
                assert news.first == len(tokens)
                tokens += news.token_ids
            else:
                done[key] = news
        if len(tokens) == 5:
            theirs.cancel("left")
    assert tuple(tokens) == whole.token_ids == done["told"].token_ids
    assert (done["left"].finish_reason, done["left"].token_ids) == (
        "cancelled", whole.token_ids[:5],
    )  # fmt: skip


def test_what_it_does_not_serve_is_refused_with_the_remedy(engines: Engines) -> None:
    _, theirs = engines
    mixed = PrefixRef("document/chart", 0, (WARD,))
    draft = Draft(WARD, 4)
    most = theirs._most_positions
    for asked, why in (
        (request("a", mixed), "composes a document.*generator.backend: torch"),
        (request("b", CHART, draft=draft), "has a draft.*generator.backend: torch"),
        (request("c", sampling=Sampling(max_tokens=most)), "raise generator.kv_gib"),
        (request("d", PrefixRef("document/lost", 0)), "no document 'lost'"),
        (request("e", prompt_ids=()), "has an empty prompt"),
    ):
        with pytest.raises(DataError, match=why):
            theirs.add(asked.id, asked, asked.prefix)
    assert not theirs._rows
    with pytest.raises(PublishError, match="was it trained for another base"):
        theirs.hold({("odd", 1): torch.zeros(8, 2, 2, 3, 16)})


def test_windows_and_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    model = kept_model("mistral", tmp_path)
    with pytest.raises(DataError, match=r"see a window of the text.*backend: torch"):
        LlamaEngine(str(model), "float32", 1, DOCUMENTS, frozenset({END}), lambda ids: "")
    (model / "model.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(DataError, match=r"reads no model in .*model\.gguf"):
        LlamaEngine(str(model), "float32", 1, DOCUMENTS, frozenset({END}), lambda ids: "")
    (model / "model.gguf").unlink()
    with pytest.raises(DataError, match=r"has no model\.gguf.*forge models add FILE\.gguf"):
        LlamaEngine(str(model), "float32", 1, DOCUMENTS, frozenset({END}), lambda ids: "")
