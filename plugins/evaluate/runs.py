"""Read finished runs as arms of one evaluation, and check that they are comparable.

run       spec, results, the last checkpoint of every arm -> cartridges
runs      one base model, one set of documents            -> arms: none, document, of each
          budget P truncated, retrieved (passages of P tokens) and untrained, and of each run
          offline, hybrid or on_policy, and its cartridge with passages before the question
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from cartridge_forge.learning.checkpoint import last_of_arms
from cartridge_forge.learning.initialization import first_of_each, parts_of
from cartridge_forge.learning.teacher import context_ids
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.chat.rollouts import contexts_of
from cartridge_forge.plugins.documents.near_duplicates import LocatedText
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.documents.study.passages import (
    LEAST_TOKENS,
    NO_PREFIX,
    RETRIEVED,
    RETRIEVED_CARTRIDGE,
    PassagePrompts,
    Retriever,
    passage_tokens,
)
from cartridge_forge.plugins.documents.study.prompts import texts_of
from cartridge_forge.plugins.documents.study.routing import RoutedQuestions
from cartridge_forge.plugins.evaluate.arms import EvalArm
from cartridge_forge.plugins.evaluate.questions import EvalSubjects, EvalSuite, first_tokens_of
from cartridge_forge.plugins.library.formats.run_checkpoint import read_all
from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.protocols.errors import CheckpointError, DataError, SpecError
from cartridge_forge.protocols.files import iter_rows
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.protocols.step import NO_DOCUMENT, SEPARATOR, PrefixRef
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.training.records import with_title

KINDS = (
    "none", "document", "truncated", RETRIEVED, "untrained", "offline", "hybrid", "on_policy",
    RETRIEVED_CARTRIDGE,
)  # fmt: skip
ROUTED = "routed"  # not by default: it asks everything again, to differ where the router errs
TRAINED = ("offline", "on_policy")  # names in checkpoints; a hybrid is under on_policy


@dataclass(frozen=True)
class TrainedArm:
    """Hold the trained cartridges of one arm of a run."""

    kind: str
    step: int
    tokens: int
    cartridges: Mapping[str, Tensor]
    base_hash: str


@dataclass(frozen=True)
class FinishedRun:
    """Hold a run with its trained arms."""

    directory: RunDirectory
    spec: RunSpec
    trained: tuple[TrainedArm, ...]
    notes: tuple[str, ...]

    @property
    def learn(self) -> DocumentsLearn:
        return DocumentsLearn.of(self.spec.learn)


def read_run(path: Path, *, unfinished: bool = False) -> FinishedRun:
    """Return a finished run, or with `unfinished` also another one, by its last checkpoints. Raises
    SpecError for a folder that is no run, CheckpointError for a run that did not finish, where that
    is not allowed, or that has no checkpoint."""
    directory = RunDirectory(path.resolve())
    if not directory.spec.is_file():
        raise SpecError(f"{path} is no run directory: name one, such as runs/longhealth/latest")
    results = directory.read_results() or {}
    status = results.get("status", "unfinished")
    if status != "finished" and not unfinished:
        raise CheckpointError(
            f"run {directory.id} is {status}: only finished runs are compared; go on with it by "
            "forge-run --resume, or compare its last checkpoint by --unfinished"
        )
    spec = load_resolved(directory.spec)
    found, notes = [], []
    last = last_of_arms(directory.checkpoints)
    rows = [*iter_rows(directory.metrics)] if directory.metrics.is_file() else []
    for arm in TRAINED:
        trained_rows = [row for row in rows if row["arm"] == arm]
        if arm not in results.get("tokens_trained", {}) and not (unfinished and trained_rows):
            continue
        if arm not in last:
            notes.append(f"run {directory.id} has no checkpoint of its arm {arm}: left out")
            continue
        held = read_all(last[arm])
        source = next(iter(held.values())).facts
        if status == "finished":
            tokens = results["tokens_trained"][arm]
        else:  # rows may be later than the checkpoint
            step, steps = int(source.source["step"]), spec.learn.train.steps
            tokens = sum(row["tokens"] for row in trained_rows if row["step"] <= step)
            of_steps = f" of {steps}" if arm == "on_policy" else ""
            notes.append(f"run {directory.id} is {status}: {arm} as after step {step}{of_steps}")
        kind = "hybrid" if arm == "on_policy" and results.get("warm_steps") else arm
        cartridges = {name: c.kv for name, c in held.items()}
        found.append(
            TrainedArm(kind, int(source.source["step"]), tokens, cartridges, source.weights_sha256)
        )
    if not found:
        raise CheckpointError(
            f"run {directory.id} has no checkpoint of an arm that it trained; it cannot be "
            "evaluated any more: train it again"
        )
    return FinishedRun(directory, spec, tuple(found), tuple(notes))


def require_comparable(runs: Sequence[FinishedRun]) -> None:
    """Raise SpecError where runs differ in anything that all arms must share."""
    first = runs[0]
    for run in runs[1:]:
        who = f"runs {first.directory.id} and {run.directory.id}"
        if run.directory.path == first.directory.path:
            raise SpecError(f"run {run.directory.id} is named twice; name it once")
        hashes = {t.base_hash for r in (first, run) for t in r.trained}
        if len(hashes) > 1 or run.learn.model.dtype != first.learn.model.dtype:
            raise SpecError(
                f"{who} were trained over other base models ({first.learn.model.path}, "
                f"{run.learn.model.path}): their prefixes fit one each; evaluate them apart"
            )
        ours, theirs = (
            DocumentsLearn.of(r.learn).data.model_dump(mode="json") for r in (first, run)
        )
        changed = sorted(k for k in ours if ours[k] != theirs[k])
        if changed:
            raise SpecError(
                f"{who} differ in {', '.join(f'data.{k}' for k in changed)}: they were asked about "
                "other documents or held out other questions; evaluate them apart"
            )
        if _layout(DocumentsLearn.of(first.learn)) != _layout(DocumentsLearn.of(run.learn)):
            raise SpecError(
                f"{who} differ in cartridge.per, cartridge.groups or the teacher's contexts: they "
                "were asked in other words; evaluate them apart, and `forge compare` them"
            )


def _layout(learn: DocumentsLearn) -> tuple[object, ...]:
    """Return what decides the contexts and cartridges of a run."""
    files, of = learn.documents, learn.cartridge
    read = (learn.teacher.context_tokens, files.long, files.overlap)
    return (of.per, of.groups, *read)


def require_documents(run: FinishedRun, paper: EvalSuite) -> None:
    """Raise DataError where a run's cartridges replace other documents than the suite's."""
    names = set(paper.about.layout.cartridges)
    for trained in run.trained:
        if set(trained.cartridges) != names:
            raise DataError(
                f"run {run.directory.id} has cartridges of {', '.join(sorted(trained.cartridges))}"
                f", and the questions are about {', '.join(sorted(names))}; bring its data back"
            )


@dataclass(frozen=True)
class EvaluatedRun:
    """Hold arms with what generators need for them: document ids, and cartridges by version; and
    notes on arms that are left out."""

    arms: tuple[EvalArm, ...]
    documents: Mapping[str, tuple[int, ...]]
    cartridges: Mapping[int, tuple[str, Tensor]]
    notes: tuple[str, ...] = ()


def enter(
    runs: Sequence[FinishedRun], paper: EvalSuite, kinds: Sequence[str] | None, tokenizer: Any,
    retriever: Retriever = "bm25",
) -> EvaluatedRun:  # fmt: skip
    """Return the arms of these kinds, ordered as KINDS, each trained one before its routed one; for
    None all of KINDS, without passages where a cartridge has too few tokens for them. Raises
    SpecError for an unknown kind."""
    notes: tuple[str, ...] = ()
    if kinds is None:
        kinds, smallest = KINDS, min(run.learn.cartridge.tokens for run in runs)
        if passage_tokens(paper.about.conversation, smallest) < LEAST_TOKENS:
            kinds = [kind for kind in KINDS if kind not in (RETRIEVED, RETRIEVED_CARTRIDGE)]
            notes = (f"no passage fits into {smallest} tokens: the arms {RETRIEVED} are left out",)
    known = (*KINDS, ROUTED)
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise SpecError(f"--arms: there is no arm {unknown[0]}; name some of {', '.join(known)}")
    layout, abouts = paper.about.layout, paper.abouts
    over = {about: layout.cartridge_of(document) for about, document in abouts.items()}
    documents = dict(paper.heads)
    found: list[EvalArm] = []
    if "none" in kinds:
        found.append(EvalArm("none", "none", None, float(len(paper.heads[NO_DOCUMENT]))))
    if "document" in kinds:
        whole = {about: PrefixRef(f"document/{about}", 0) for about in abouts}
        read = [len(context_ids(paper.heads, i.about)) for i in paper.items]
        found.append(EvalArm("document", "document", whole, fmean(read)))
    budgets = sorted({run.learn.cartridge.tokens for run in runs})
    for kind in ("truncated", "untrained"):
        if kind not in kinds:
            continue
        for budget in budgets:
            # An untrained cartridge is the KV of its contexts' first P tokens, cut wherever they
            # end; truncated documents are as much of their text as a whole prompt of P tokens
            # holds.
            cut = (
                first_tokens_of(paper, budget, tokenizer)
                if kind == "truncated"
                else {
                    name: tuple(first_of_each(parts_of(contexts, paper.heads), budget))
                    for name, contexts in layout.contexts.items()
                }
            )
            documents |= {f"{kind}/{budget}/{n}": ids for n, ids in cut.items()}
            prefixes = {a: PrefixRef(f"document/{kind}/{budget}/{n}", 0) for a, n in over.items()}
            name = kind if len(budgets) == 1 else f"{kind} P={budget}"
            found.append(EvalArm(name, kind, prefixes, fmean(map(len, cut.values())), budget))
    about = paper.about
    places = {
        budget: PassagePlaces(
            paper,
            PassagePrompts(
                about.layout, about.texts, tokenizer, about.conversation, budget, kinds, retriever
            ),
        )
        for budget in budgets
    }
    for budget in budgets if RETRIEVED in kinds else ():
        name = RETRIEVED if len(budgets) == 1 else f"{RETRIEVED} P={budget}"
        prefixes = dict.fromkeys(abouts, NO_PREFIX)
        retrieval = places[budget].as_document
        found.append(EvalArm(name, RETRIEVED, prefixes, float(budget), budget, passages=retrieval))
    cartridges: dict[int, tuple[str, Tensor]] = {}
    routed = routed_questions(paper) if ROUTED in kinds else {}
    more = bool(routed) or RETRIEVED_CARTRIDGE in kinds
    trained = [(run, t) for run in runs for t in run.trained if t.kind in kinds or more]
    for run, t in sorted(trained, key=lambda pair: KINDS.index(pair[1].kind)):
        versions = {name: len(cartridges) + i for i, name in enumerate(layout.cartridges)}
        cartridges |= {version: (name, t.cartridges[name]) for name, version in versions.items()}
        prefixes = {a: PrefixRef(f"cartridge/{name}", versions[name]) for a, name in over.items()}
        budget = run.learn.cartridge.tokens
        name = t.kind if len(runs) == 1 else f"{t.kind} {run.directory.id}"
        arm = EvalArm(
            name, t.kind, prefixes, float(budget), budget, run.directory.id, run.spec.mesh.name,
            t.step, t.tokens,
        )  # fmt: skip
        if t.kind in kinds:
            found.append(arm)
        if routed:
            refs = {ids: PrefixRef(f"cartridge/{n}", versions[n]) for ids, n in routed.items()}
            found.append(replace(arm, name=f"{name}, {ROUTED}", kind=ROUTED, routed=refs))
        if RETRIEVED_CARTRIDGE in kinds:
            found.append(
                replace(
                    arm, name=f"{name}, {RETRIEVED}", kind=RETRIEVED_CARTRIDGE,
                    tokens=2.0 * budget, passages=places[budget].before_question,
                )
            )  # fmt: skip
    if not found:
        raise SpecError(f"none of the runs trained an arm of {', '.join(kinds)}; name others")
    return EvaluatedRun(tuple(found), documents, cartridges, notes)


@dataclass(frozen=True)
class PassagePlaces:
    """Put passages into the prompts of a suite: `as_document` in its place, `before_question` in
    the last turn. Both take what a prompt is about, its ids after a prefix, and that prefix, and
    return the ids with passages and what stands before them."""

    paper: EvalSuite
    prompts: PassagePrompts

    def as_document(
        self, about: str, ids: tuple[int, ...], prefix: PrefixRef
    ) -> tuple[tuple[int, ...], PrefixRef]:
        cartridge, messages, answer = self._parts(about, ids)
        prompt, ref = self.prompts.as_document(cartridge, messages)
        return (*prompt, *answer), ref

    def before_question(
        self, about: str, ids: tuple[int, ...], prefix: PrefixRef
    ) -> tuple[tuple[int, ...], PrefixRef]:
        cartridge, messages, answer = self._parts(about, ids)
        context = about.split(SEPARATOR)[0]
        return (*self.prompts.before_question(cartridge, context, messages), *answer), prefix

    def _parts(
        self, about: str, ids: tuple[int, ...]
    ) -> tuple[str, tuple[AgentMessage, ...], tuple[int, ...]]:
        """Return the cartridge, the messages, and the ids after the last of them: the beginning of
        an answer. Raises DataError for ids that are no conversation of the suite."""
        conversation, layout = self.paper.about.conversation, self.paper.about.layout
        context = about.split(SEPARATOR)[0]
        texts = conversation.texts_of(ids)
        for count in range(len(texts), 0, -1):
            messages = tuple(
                AgentMessage("assistant" if at % 2 else "user", text)
                for at, text in enumerate(texts[:count])
            )
            opening = conversation.opening(context, messages) if count % 2 else ()
            if opening and ids[: len(opening)] == opening:
                cartridge = layout.cartridge_of(layout.documents[context])
                return cartridge, messages, ids[len(opening) :]
        raise DataError(
            f"a prompt about {about} cannot be read back as messages in this chat template: leave "
            f"out the arms {RETRIEVED} and {RETRIEVED_CARTRIDGE}"
        )


def routed_questions(paper: EvalSuite) -> dict[tuple[int, ...], str]:
    """Return the cartridge that the router chooses for each question, by its ids after a prefix.
    Raises SpecError where there is one cartridge alone."""
    about = paper.about
    if len(about.layout.cartridges) < 2:
        raise SpecError("--arms: routed needs several cartridges to choose from; leave it out")
    routing = RoutedQuestions(texts_of(about.layout, about.texts))
    found = {}
    for item in paper.items:
        own = about.layout.cartridge_of(item.asked.document)
        asked = with_title(about.titles, contexts_of(item.about)[0], item.asked.text)
        found[item.prompt_ids] = routing.chosen(own, asked)
    return found


def trained_on(run: FinishedRun, about: EvalSubjects) -> Iterator[LocatedText]:
    """Yield the turns of every prompt that the run trained on, without its document's title and
    options, each prompt once."""
    wraps: dict[str, tuple[int, int]] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for row in iter_rows(run.directory.rollouts):
        document, ids = row["document"], tuple(row["prompt_ids"])
        if (document, ids) in seen:
            continue
        seen.add((document, ids))
        context = row.get("contexts", [document])[0]
        if context not in wraps:
            wraps[context] = _wrap(about.conversation, context)
        before, after = wraps[context]
        for text in about.conversation.texts_of(ids[before : len(ids) - after]):
            text = text.removeprefix(with_title(about.titles, context, "")).strip()
            if row["kind"] == "choice":
                text = text.partition(" options: ")[0]
            yield LocatedText(document, text, f"run {run.directory.id}, rollouts.jsonl {row['id']}")


def _wrap(conversation: ChatRenderer, context: str) -> tuple[int, int]:
    """Return how many ids the template puts before and after a user's words."""
    one, two = (
        conversation.opening(context, (AgentMessage("user", words),))
        for words in ("cat", "why dog")
    )
    before = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    pairs = zip(reversed(one[before:]), reversed(two[before:]), strict=False)
    return before, next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
