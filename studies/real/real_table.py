"""What a cartridge of a real article is worth to a model that answers: the rows of docs/real.md.

    python -m studies.real.real_table ARTICLES --model DIR|NAME --out OUT

ARTICLES is a folder of NAME.txt and questions.json in SQuAD's form, with those names as titles. A
row is one article at one length P of its cartridge:

none, document   no document, and the whole one before the question
retrieved        the passage of P tokens that BM25 ranks first for the question
untrained        the cartridge where training starts
trained          the same after `--steps` steps

Each arm answers greedily, and reads the right answers. Outcomes are means over the article's
questions: `nll` of the right answer in nats a token, `f1` over words, `contained`: the share of
answers that have the words of the right one. Articles are cut to `--most` tokens, with the
questions whose answers are in what is left.

The rows of the shortest cartridge come first. OUT has a file of each row's outcomes, and one of
answers. A repeated command goes on: finished rows stay, and a run that broke off is resumed from
its last step.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.record import ROOT, benchmark
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.chat.rollouts import mean_nll
from cartridge_forge.plugins.documents.retrieval import Bm25Router
from cartridge_forge.plugins.documents.study.prompts import reading
from cartridge_forge.plugins.documents.study.question_files import (
    UserQuestion,
    normalised,
    read_questions,
)
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.processes import COMMAND, environment
from cartridge_forge.protocols.files import write_atomically
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling

MESH = ROOT / "meshes" / "documents.yaml"
# A machine beside other work may take hours for a call.
PATIENCE = ("call_timeout_s=86400", "spawn_timeout_s=86400")
ROLES = ("generator", "doc_teacher", "trainer")
GAP = "{mean: 2.0e-4}"  # nats: of 24 layers in float32 5.2e-5 was seen, over the bound of 5e-5
ATTEMPTS = 5  # of a row's run, each from the last step of the one before
ARMS = {"none": "none", "document": "document", "untrained": "untrained", "on_policy": "trained"}


def cut_article(folder: Path, name: str, most: int, tokenizer: Any, home: Path) -> Path:
    """Write an article's first `most` tokens and the questions that they answer to `home`/NAME.txt
    and questions.json; return `home`."""
    text = (folder / f"{name}.txt").read_text()
    ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    excerpt = text[: ends[:most][-1][1]]
    paragraphs = []
    for article in json.loads((folder / "questions.json").read_text())["data"]:
        for paragraph in article["paragraphs"] if article["title"] == name else ():
            begins = text.index(paragraph["context"])
            qas = [
                qa for qa in paragraph["qas"]
                if all(begins + a["answer_start"] + len(a["text"]) <= len(excerpt)
                       for a in qa["answers"])
            ]  # fmt: skip
            paragraphs.append({"context": excerpt[begins:], "qas": qas})
    home.mkdir(parents=True, exist_ok=True)
    write_atomically(home / f"{name}.txt", excerpt)
    squad = {"data": [{"title": name, "paragraphs": paragraphs}]}
    write_atomically(home / "questions.json", json.dumps(squad, indent=1))
    return home


def retrieved_answers(
    model: Any, tokenizer: Any, text: str, questions: Sequence[UserQuestion], tokens: int, new: int
) -> list[dict[str, Any]]:
    """Return each question's answer and the loss of the right one after the passage of `tokens`
    tokens that BM25 ranks first for it. Passages overlap by half."""
    from cartridge_forge.learning.decode import generate
    from cartridge_forge.learning.teacher import document_kv

    ids = tokenizer(text, add_special_tokens=False).input_ids
    begins = range(0, max(1, len(ids) - tokens // 2), max(1, tokens // 2))
    passages = {f"{b:05d}": tokenizer.decode(ids[b : b + tokens]) for b in begins}
    router, talk = Bm25Router.of_texts(passages), ChatRenderer(tokenizer, passages)
    requests, readings = [], []
    answers = [talk.saying(q.wording) if q.wording else () for q in questions]
    for q, answer_ids in zip(questions, answers, strict=True):
        ranked = router.top(q.text, 1)
        name = ranked[0][0] if ranked else next(iter(passages))
        prompt = talk.opening(name, (AgentMessage("user", q.text),))
        greedy = Sampling(temperature=0.0, max_tokens=new)
        requests.append(GenerateRequest(q.id, prompt, PrefixRef(name, 0), greedy, 0))
        readings.append(reading(requests[-1], answer_ids))
    heads = {ref: document_kv(model, talk.head(ref.name)) for ref in {r.prefix for r in requests}}
    ends = frozenset({tokenizer.eos_token_id})
    completions = generate(model, requests, heads.__getitem__, ends)
    read = generate(model, readings, heads.__getitem__, ends)
    return [
        {"id": q.id, "text": talk.decode(c.token_ids).strip(), "nll": mean_nll(r, len(ids)),
         "passage": c_request.prefix.name}
        for q, ids, c, r, c_request in zip(
            questions, answers, completions, read, requests, strict=True
        )
    ]  # fmt: skip


def trained_answers(
    home: Path, run: Path, options: argparse.Namespace, sets: Sequence[str]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Return each arm's answers of the run in `run`, which is started, or goes on where it broke
    off, and its results. Raises SystemExit where it fails ATTEMPTS times."""
    words = [
        *COMMAND, "run", str(MESH), "--resume", "unfinished",
        "--run-dir", str(run),
        *(word for one in (
            f"data.path={home}", f"data.questions={home / 'questions.json'}",
            f"model.path={options.path}", f"model.dtype={options.dtype}",
            f"train.steps={options.steps}",
            f"train.warm_start={{steps: {options.steps - options.last}}}",
            "rollout.verify=null", "train.checkpoint_every=1", f"train.sampler_gap={GAP}",
            f"evaluate.max_tokens={options.new}",
            "evaluate.probe_every=0", "evaluate.questions=128", "self_study.questions=96",
            "roles.generator.replicas=1", "spares=0",
            *(f"roles.{role}.threads={options.threads}" for role in ROLES), *PATIENCE, *sets,
        ) for word in ("--set", one)),
    ]  # fmt: skip
    for _ in range(ATTEMPTS):
        if finished := sorted(run.glob("documents/*/results.json")):
            results = json.loads(finished[-1].read_text())
            if results["status"] == "finished":
                break
        subprocess.run(words, env=environment(), stdin=subprocess.DEVNULL, check=False)
    else:
        raise SystemExit(f"the run in {run} fails; its last words are above")
    answers: dict[str, list[dict[str, Any]]] = {}
    lines = (finished[-1].parent / "answers.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        if row["text"] is not None and not row["sampled"]:
            answers.setdefault(row["arm"], []).append(row)
    return answers, results


def outcomes(
    questions: Sequence[UserQuestion], answers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the means over questions of an arm's outcomes."""
    by_id = {row["id"]: row for row in answers}
    scored = [(q, by_id[q.id]["text"], by_id[q.id]["nll"]) for q in questions]
    return {
        "n": len(scored),
        "nll": fmean(nll for _, _, nll in scored),
        "f1": fmean(q.scores(text)[1] for q, text, _ in scored),
        "contained": fmean(
            float(any(f" {normalised(a)} " in f" {normalised(text)} " for a in q.answers))
            for q, text, _ in scored
        ),
    }


def row(options: argparse.Namespace, name: str, tokens: int, tokenizer: Any) -> dict[str, Any]:
    """Measure one article at one length, or read what is measured."""
    file = options.home / "rows" / f"{name}-{tokens}.json"
    if file.exists():
        result: dict[str, Any] = json.loads(file.read_text())
        return result
    print(f"{name}, P = {tokens}", flush=True)
    home = cut_article(
        options.articles, name, options.most, tokenizer, options.home / "articles" / name
    )
    text = (home / f"{name}.txt").read_text()
    questions = read_questions(str(home / "questions.json"), {name: text}, "")
    passages = options.home / "passages" / f"{name}-{tokens}.json"
    if not passages.exists():
        from cartridge_forge.learning.model.loading import load_model

        model = load_model(options.path, options.dtype)
        rows = retrieved_answers(model, tokenizer, text, questions, tokens, options.new)
        del model  # before the run's processes load theirs
        passages.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(passages, json.dumps(rows))
    shortest = tokens == min(options.lengths)
    arms = "none,document,untrained,on_policy" if shortest else "untrained,on_policy"
    sets = [f"cartridge.tokens={tokens}", f"evaluate.arms=[{arms}]"]
    answers, results = trained_answers(
        home, options.home / "runs" / f"{name}-{tokens}", options, sets
    )
    answers_of = {ARMS[arm]: rows for arm, rows in answers.items()}
    answers_of["retrieved"] = json.loads(passages.read_text())
    result = {
        "article": name,
        "tokens": tokens,
        "document_tokens": results["compression"]["document_tokens"],
        "arms": {arm: outcomes(questions, rows) for arm, rows in answers_of.items()},
        "tokens_trained": results["tokens_trained"],
        "kl": results["kl"],
        "wall_seconds": results["wall_seconds"],
    }
    lines = [json.dumps({"arm": arm, **one}) for arm, rows in answers_of.items() for one in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file.with_suffix(".jsonl.gz"), "wt") as answered:
        answered.write("\n".join(lines) + "\n")
    write_atomically(file, json.dumps(result, indent=1))
    print(json.dumps(result["arms"]), flush=True)
    return result


def measure(options: argparse.Namespace) -> tuple[Mapping[str, float], Any]:
    from cartridge_forge.learning.model.loading import tokenizer_of

    sets = [f"model.path={options.model}", f"model.dtype={options.dtype}"]
    options.path = load_spec(str(MESH), sets=sets).spec.learn.model.path
    options.home = options.out.parent.absolute()
    tokenizer = tokenizer_of(options.path)
    rows = []
    for tokens in options.lengths:
        for path in sorted(options.articles.glob("*.txt")):
            size = len(tokenizer(path.read_text(), add_special_tokens=False).input_ids)
            if tokens < 1024 or size >= options.most:
                rows.append(row(options, path.stem, tokens, tokenizer))
    return {}, rows


if __name__ == "__main__":
    from cartridge_forge.actors.base import bootstrap

    bootstrap(1)()
    benchmark(
        __doc__,
        measure,
        {
            "articles": {"type": Path, "metavar": "ARTICLES"},
            "--model": ("smollm2-135m", "a model that `forge models add` has kept, or a directory"),
            "--threads": (1, "of each role"),
            "--dtype": ("auto", "the weights' type"),
            "--lengths": ([128, 512, 1024], "tokens of a cartridge; 1,024 for long articles alone"),
            "--most": (2000, "tokens that an article is cut to"),
            "--steps": (90, "of training"),
            "--last": (4, "of them on policy, after those on the document's own words"),
            "--new": (40, "most tokens of an answer"),
        },
    )
