"""`forge bench`: ways to compress a document, read on equal terms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cartridge_forge.forge_run.commands import bench as bench_command
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.documents.study.question_files import UserQuestion
from cartridge_forge.plugins.evaluate.bench.kinds import kind_results
from cartridge_forge.plugins.evaluate.bench.methods import METHODS, Bench, PromptPassages
from cartridge_forge.plugins.evaluate.bench.peft_methods import responses
from cartridge_forge.plugins.evaluate.bench.presses import best_entries, kvzip, snapkv
from cartridge_forge.plugins.evaluate.bench.reading import (
    INSTRUCTION,
    REFUSAL,
    BenchAnswer,
    BenchText,
    outcome,
    prefix_reader,
    read_text,
)
from cartridge_forge.plugins.evaluate.bench.running import BenchRow, results, run, seconds_to
from cartridge_forge.plugins.evaluate.bench.trained import TrainingSettings, training_rows
from cartridge_forge.plugins.statistics.intervals import ratio_interval
from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.files import REPOSITORY

MODEL = str(REPOSITORY / "models" / "clinic-reader")
CHART = """chart of oscar brandt, born 14 february, diagnosis asthma.
note 1: oncology, 17 december. albumin 25 gram. saturation 96 percent. analgesic calmosin. \
antihypertensive quensyl. platelets 88 giga. insulin 86 units. lungs are clear.
note 2: urology, 10 january. therapist evans. pharmacy lakeside. ultrasound bleeding. \
creatinine 32 micromol. rehabilitation eastham. calcium 41 mmol. sleep has improved."""
ANSWERS = {"insulin": "86 units", "therapist": "evans", "creatinine": "32 micromol"}
QUESTIONS = [
    UserQuestion(t, "chart", f"what is the {t}?", (f"the chart says {t} {a}.",), kind="words")
    for t, a in ANSWERS.items()
]
TOKENS = 20


@pytest.fixture(scope="module")
def bench() -> Bench:
    settings = TrainingSettings(steps=6, prompts=4, kinds=("recite",), lr=0.3, every=3)
    return Bench(load_model(MODEL), load_tokenizer(MODEL), MODEL, TOKENS, settings)


@pytest.fixture(scope="module")
def text(bench: Bench) -> BenchText:
    return read_text(bench.model, bench.tokenizer, "chart", CHART, QUESTIONS, 16)


@pytest.fixture(scope="module")
def attentions(text: BenchText) -> Tensor:
    """Return the weights [L, H_kv, S, T, T] of transformers' own pass over the document."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="eager")
    heads = text.kv.shape[2]
    with torch.no_grad():
        weights = network(torch.tensor([text.ids]), output_attentions=True).attentions
    return torch.stack([one[0].unflatten(0, (heads, -1)) for one in weights])


def test_the_whole_document_closes_the_gap(bench: Bench, text: BenchText) -> None:
    worth = outcome(text, prefix_reader(bench.model, text.kv))
    assert (worth.gap, worth.agreement) == pytest.approx((1.0, 1.0))
    assert worth.kl == pytest.approx(0.0, abs=1e-6)


def test_no_document_closes_nothing(bench: Bench, text: BenchText) -> None:
    bare = replace(
        text, questions=tuple(replace(q, with_text=q.bare) for q in text.questions)
    )  # fmt: skip
    assert outcome(bare, prefix_reader(bench.model, text.bare_kv)).gap == pytest.approx(
        0.0, abs=1e-6
    )


def test_the_ends_of_the_scale_are_methods(bench: Bench, text: BenchText) -> None:
    gaps = {name: outcome(text, next(METHODS[name](bench, text)).reader).gap
            for name in ("none", "document")}  # fmt: skip
    assert gaps == {"none": pytest.approx(0.0, abs=1e-6), "document": pytest.approx(1.0)}


def test_what_is_written_is_scored(bench: Bench, text: BenchText) -> None:
    """The replies are what the model with the document writes, and so are its answers here."""
    worth = outcome(text, prefix_reader(bench.model, text.kv), answered=True)
    replies = [text.renderer.decode(s.response_ids).strip() for s in text.replies]
    assert [a.text for a in worth.answers] == replies
    assert [a.id for a in worth.answers] == list(ANSWERS)
    assert worth.loss == pytest.approx(sum(a.loss for a in worth.answers) / 3)
    assert worth.f1 == sum(q.words(r)[1] for q, r in zip(QUESTIONS, replies, strict=True)) / 3
    assert worth.f1 > 0.5
    assert outcome(text, prefix_reader(bench.model, text.kv)).answers == ()


def test_an_unanswerable_question_counts_by_its_refusal(bench: Bench, text: BenchText) -> None:
    asked = [*QUESTIONS, UserQuestion("boot", "chart", "what is the boot?", kind="unanswerable")]
    other = read_text(bench.model, bench.tokenizer, "chart", CHART, asked, 16)
    assert [q.messages[-1].content for q in other.questions] == [
        f"{q.text}\n{INSTRUCTION}" for q in asked
    ]
    assert [q.messages[-1].content for q in text.questions] == [q.text for q in QUESTIONS]
    assert other.renderer.decode(other.questions[3].with_text.response_ids).strip() == REFUSAL
    assert len(other.right) == 3
    worth = outcome(other, prefix_reader(bench.model, other.kv), answered=True)
    assert [a.f1 is None for a in worth.answers] == [False, False, False, True]
    assert worth.gap == pytest.approx(1.0)  # of the three
    assert worth.loss == pytest.approx(sum(a.loss for a in worth.answers[:3]) / 3)


def test_snapkv_keeps_what_transformers_attends_to(
    bench: Bench, text: BenchText, attentions: Tensor
) -> None:
    tokens, window = 40, 20  # less than WINDOW, of so short a text
    before = len(text.ids) - window
    assert before > tokens
    scores = attentions[..., before:, :before].mean(dim=(2, 3))  # [L, H_kv, before]
    pooled = torch.zeros_like(scores)
    for place in range(before):  # zeros stand beyond both ends
        pooled[..., place] = scores[..., max(0, place - 3) : place + 4].sum(-1) / 7
    pooled[..., 0] = 1.0
    best = pooled.topk(tokens - window, dim=-1).indices.sort(-1).values
    places = torch.cat([best, torch.arange(before, before + window).expand(*best.shape[:2], -1)], 2)
    wanted = text.kv[:, 1].gather(2, places[..., None].expand(-1, -1, -1, text.kv.shape[-1]))
    prefix = snapkv(bench.model, text.kv, text.ids, tokens)
    torch.testing.assert_close(prefix[:, 1], wanted)


def test_kvzip_keeps_what_the_repetition_reads(bench: Bench, text: BenchText) -> None:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="eager")
    cue, length, heads = text.ids[-3:], len(text.ids), text.kv.shape[2]
    with torch.no_grad():
        read = torch.tensor([(*text.ids, *cue, *text.ids)])
        weights = network(read, output_attentions=True).attentions
    highest = torch.stack(
        [
            w[0].unflatten(0, (heads, -1))[..., length + 3 :, :length].amax(dim=(1, 2))
            for w in weights
        ]
    )  # [L, H_kv, T]
    highest[..., 0] = 2.0
    places = highest.topk(TOKENS, dim=-1).indices.sort(-1).values
    wanted = text.kv[:, 1].gather(2, places[..., None].expand(-1, -1, -1, text.kv.shape[-1]))
    prefix = kvzip(bench.model, text.kv, text.ids, TOKENS, cue)
    torch.testing.assert_close(prefix[:, 1], wanted)


def test_kept_entries_stay_as_far_from_the_prompt(bench: Bench, text: BenchText) -> None:
    scores = torch.arange(len(text.ids)).float().expand(*text.kv.shape[0:1], text.kv.shape[2], -1)
    prefix = best_entries(bench.model, text.kv, scores, TOKENS)  # the first entry, and the last 19
    last = outcome(text, prefix_reader(bench.model, prefix))
    # Of the last layers' entries a prompt reads the same as behind the document: here the exact
    # keys are those of a document that begins 19 entries before the prompt.
    q = torch.randn(text.kv.shape[-1], generator=torch.Generator().manual_seed(0))
    at = bench.model.frequencies()
    behind = at.turned(q.expand(text.kv.shape[0], 1, 1, -1).double(), len(text.ids))
    moved = at.turned(q.expand(text.kv.shape[0], 1, 1, -1).double(), TOKENS)
    document = (text.kv[:, 0, :, -19:].double() * behind).sum(-1)
    cartridge = (prefix[:, 0, :, 1:].double() * moved).sum(-1)
    torch.testing.assert_close(document, cartridge, rtol=1e-4, atol=1e-4)
    assert last.gap < 1.0


def test_passages_hold_the_answers(bench: Bench, text: BenchText) -> None:
    (point,) = METHODS["passages"](replace(bench, tokens=60), text)
    assert outcome(text, point.reader).gap > 0.3
    tokens, rest = divmod(point.numbers, bench.token_numbers)
    assert rest == 0
    assert tokens < len(text.ids)


def test_both_together_take_as_many_tokens(bench: Bench, text: BenchText) -> None:
    both = replace(bench, tokens=60)
    beside = PromptPassages.for_text(both, text)
    assert beside.cartridge_tokens == 30
    for q in QUESTIONS:
        with_passages = beside.worded(q.text, q.text)
        assert with_passages.endswith(q.text)
        alone, together = (
            len(text.renderer.opening("chart", [AgentMessage("user", words)]))
            for words in (q.text, with_passages)
        )
        assert 10 <= together - alone <= 30  # one passage of 15, or two
    (point,) = METHODS["matching_passages"](both, text)
    assert point.numbers == 60 * bench.token_numbers
    assert outcome(text, point.reader).gap > 0.3


def test_passages_stand_before_every_other_prompt_of_a_kind(bench: Bench, text: BenchText) -> None:
    settings = replace(bench.training, steps=3, prompts=4, kinds=("recite", "cloze"))
    beside = PromptPassages.for_text(replace(bench, tokens=60), text).worded
    plain, mixed = (
        [s for rows in training_rows(bench.tokenizer, text, settings, wording=how) for s in rows]
        for how in (None, beside)
    )
    longer = [len(b.prompt_ids) > len(a.prompt_ids) for a, b in zip(plain, mixed, strict=True)]
    assert longer == [True, True, False, False] * 3
    assert [s.response_ids for s in plain] == [s.response_ids for s in mixed]


def test_peft_reads_the_prefix_as_our_decoder_does(bench: Bench, text: BenchText) -> None:
    pytest.importorskip("peft", reason="the extra for PEFT is not installed")
    stopped = replace(bench, training=replace(bench.training, steps=1, every=1))
    (point,) = METHODS["peft_cartridge"](stopped, text)
    import peft

    from cartridge_forge.plugins.evaluate.bench.peft_methods import transformers_model

    config = peft.CartridgeConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=TOKENS, num_frozen_tokens=1
    )
    network = peft.get_peft_model(transformers_model(MODEL), config)
    first = text.kv[:, :, :, :TOKENS]
    network.prompt_encoder["default"].load_prompt_embeddings(
        first.permute(3, 0, 1, 2, 4).reshape(TOKENS, -1)
    )
    with torch.no_grad():
        theirs = responses(network, text.right, ())
    torch.testing.assert_close(
        theirs, prefix_reader(bench.model, first).read(text.right), rtol=0, atol=1e-4
    )
    assert point.numbers == TOKENS * bench.token_numbers


BY_PEFT = ("peft_cartridge", "lora")


@pytest.mark.parametrize(
    "method", ["offline", "on_policy", "mixture", "offline_passages", *BY_PEFT]
)
def test_training_goes_on_from_its_start(bench: Bench, text: BenchText, method: str) -> None:
    bench = replace(bench, tokens=60) if method == "offline_passages" else bench
    points = list(METHODS[method](bench, text))
    assert [p.step for p in points] == ([3, 6] if method in BY_PEFT else [0, 3, 6])
    assert [p.last for p in points] == [False] * (len(points) - 1) + [True]
    again = list(METHODS[method](bench, text))
    assert outcome(text, points[-1].reader) == outcome(text, again[-1].reader)


def test_fewer_steps_than_the_rate_takes_to_rise(bench: Bench, text: BenchText) -> None:
    short = replace(bench, training=replace(bench.training, steps=1))
    assert [point.step for point in METHODS["offline"](short, text)] == [0, 1]


def test_lora_writes_what_it_reads_as_likeliest(bench: Bench, text: BenchText) -> None:
    *_, point = METHODS["lora"](bench, text)
    samples = [q.with_text for q in text.questions]
    written = point.reader.write(samples, text.renderer.end_ids)
    read = point.reader.read(
        [replace(s, response_ids=ids) for s, ids in zip(samples, written, strict=True)]
    )
    assert read.argmax(-1).tolist() == [i for ids in written for i in ids]


def test_lora_has_about_the_prefix_numbers(bench: Bench, text: BenchText) -> None:
    (point, *_) = METHODS["lora"](bench, text)
    assert 0.5 <= point.numbers / (TOKENS * bench.token_numbers) <= 2.0


def test_a_text_without_words_for_a_prompt_is_refused(bench: Bench, text: BenchText) -> None:
    settings = replace(bench.training, kinds=("continue",))
    rows = training_rows(bench.tokenizer, replace(text, text=". . ."), settings)
    with pytest.raises(DataError, match="no words for a prompt of the kind continue"):
        next(rows)


def test_questions_that_the_text_does_not_help_with_are_refused(bench: Bench) -> None:
    wrong = UserQuestion("1", "chart", "what is the insulin?", ("chart of oscar brandt",))
    with pytest.raises(DataError, match="nothing can be compared"):
        read_text(bench.model, bench.tokenizer, "chart", CHART, [wrong], 16)
    unanswerable = UserQuestion("2", "chart", "what is the boot?")
    with pytest.raises(DataError, match="no question that can be answered"):
        read_text(bench.model, bench.tokenizer, "chart", CHART, [unanswerable], 16)


def test_results_are_means_over_texts() -> None:
    def row(text: str, step: int, seconds: float, gap: float) -> BenchRow:
        return BenchRow(text, "m", step, seconds, 100, 1.0, gap, 0.1, 0.5)

    rows = [row("a", 0, 1.0, 0.2), row("a", 5, 3.0, 0.6), row("b", 0, 2.0, 0.5),
            row("b", 5, 5.0, 0.4)]  # fmt: skip
    (one,) = results(rows)
    assert (one.gap, one.seconds, one.steps, one.texts) == (pytest.approx(0.5), 4.0, 5, 2)
    assert seconds_to(rows, 0.5) == {"m": 2.5}
    assert seconds_to(rows, 0.55) == {"m": None}


def test_a_kind_s_gap_is_one_ratio_over_texts() -> None:
    def row(method: str, text: str, *losses: float) -> BenchRow:
        kinds = ("words", "words", "whole", "unanswerable")
        answers = tuple(
            BenchAnswer(str(i), kind, loss, None if kind == "unanswerable" else loss / 4,
                        kind == "unanswerable" and method == "m", "")
            for i, (kind, loss) in enumerate(zip(kinds, losses, strict=True))
        )  # fmt: skip
        return BenchRow(text, method, 0, 1.0, 100, 1.0, 0.0, 0.1, 0.5, 0.2, answers)

    rows = [row("none", "a", 4, 2, 1, 1), row("none", "b", 4, 4, 1, 1),
            row("document", "a", 1, 1, 1, 1), row("document", "b", 0, 0, 1, 1),
            row("m", "a", 2, 2, 1, 1), row("m", "b", 1, 1, 1, 1)]  # fmt: skip
    by_kind = {(r.method, r.kind): r for r in kind_results(rows)}
    words = by_kind["m", "words"]
    # Of a: 3 -> 2 of 3 -> 1, of b: 4 -> 1 of 4 -> 0: closed 1 + 3 of 2 + 4.
    assert (words.questions, words.gap) == (4, pytest.approx(4 / 6))
    assert words.gap_interval == ratio_interval([1, 3], [2, 4])
    assert words.f1 == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert by_kind["m", "whole"].gap is None  # nothing to close
    none = by_kind["m", "unanswerable"]
    assert (none.gap, none.f1, none.declines) == (None, None, 1.0)
    assert by_kind["document", "unanswerable"].declines == 0.0
    assert kind_results([replace(r, answers=()) for r in rows]) == []


def test_a_repeated_command_goes_on(bench: Bench, text: BenchText, tmp_path: Path) -> None:
    file, opened_texts = tmp_path / "bench.json", []

    def opened(name: str) -> tuple[Bench, BenchText]:
        opened_texts.append(name)
        return bench, text

    def measured(methods: list[str], **settings: Any) -> list[BenchRow]:
        return run(file, settings, ["chart"], methods, opened, lambda row: None, lambda error: None)

    first = measured(["first_tokens"])
    assert measured(["first_tokens"]) == first
    assert opened_texts == ["chart"]
    both = measured(["first_tokens", "kvzip"])
    assert both[0] == first[0]
    assert [r.method for r in both] == ["first_tokens", "kvzip"]
    with pytest.raises(SpecError, match="other settings"):
        measured(["first_tokens"], tokens=5)


def test_a_text_that_does_not_help_is_left_out(
    bench: Bench, text: BenchText, tmp_path: Path
) -> None:
    notes: list[str] = []

    def opened(name: str) -> tuple[Bench, BenchText]:
        if name == "chart":
            return bench, text
        raise DataError(f"{name} does not help")

    def texts_of(*names: str) -> list[str]:
        file = tmp_path / f"{'+'.join(names)}.json"
        rows = run(file, {}, names, ["first_tokens"], opened, lambda row: None,
                   lambda error: notes.append(str(error)))  # fmt: skip
        return [row.text for row in rows]

    assert texts_of("other", "chart", "third") == ["chart"]
    assert notes == ["other does not help", "third does not help"]
    with pytest.raises(DataError, match="third does not help"):
        texts_of("other", "third")


def test_the_command_compares_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "charts"
    folder.mkdir()
    (folder / "chart.txt").write_text(CHART)
    paragraph = {
        "context": CHART,
        "qas": [
            {
                "id": t,
                "question": f"what is the {t}?",
                "kind": "words",
                "answers": [{"text": f"{t} {a}", "answer_start": CHART.index(f"{t} {a}")}],
            }
            for t, a in ANSWERS.items()
        ],
    }
    questions = tmp_path / "questions.json"
    questions.write_text(json.dumps({"data": [{"title": "chart", "paragraphs": [paragraph]}]}))

    def compare(methods: str) -> Any:
        return bench_command.command(
            folder, questions, model=MODEL, tokens=TOKENS, methods=methods, steps=5, most=2000,
            questions_each=16, out=tmp_path / "out", show=lambda line: None,
        )  # fmt: skip

    table, by_kind = compare("none, document, first_tokens, passages, attention_matching")
    assert [row[:3] for row in by_kind.rows[:2]] == [
        ("none", "words", "3"),
        ("document", "words", "3"),
    ]
    assert by_kind.rows[1][3] == "100.0%"
    assert [row[0] for row in table.rows][2:] == ["first_tokens", "passages", "attention_matching"]
    gaps = {row["method"]: row["gap"] for row in json.loads(
        (tmp_path / "out" / "bench.json").read_text())["rows"]}  # fmt: skip
    assert gaps["attention_matching"] > gaps["first_tokens"]
    with pytest.raises(SpecError, match="no method 'zip'; there are none, document, first_tokens"):
        compare("zip")
