"""Define the Recipe interface: a step's rollout, its train batch, and how arms are measured.

LongHealthRecipe    one answer to each prompt about a document (plugins.documents.study.longhealth)
ToolEpisodesRecipe  episodes of several turns with tools       (plugins.episodes.recipe)
RSARecipe           runs of recursive self-aggregation         (plugins.rsa.recipe)
DocumentsRecipe     answers to self-study about documents      (plugins.documents.study.recipe)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.protocols.layout import CartridgeLayout
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.records.answers import KeepAnswers
from cartridge_forge.protocols.records.run_files import ArmResult, MeasuredAccuracy
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.protocols.step import TrainBatch
from cartridge_forge.services.mesh import Mesh
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.training.records import (
    GenerateCall,
    Rollout,
    ScoreGroup,
    StepRecord,
    no_scoring,
    rollout_from,
)

# (the cartridge that a question is about, the question) -> the cartridge to answer it over
Route = Callable[[str, str], str]


def own_cartridge(cartridge: str, question: str) -> str:
    return cartridge


class QuestionRouting(Protocol):
    """Choose each held-out question's cartridge, over the texts that cartridges learned
    (`plugins.documents.study.routing`)."""

    def own(self, cartridge: str, question: str) -> str:
        """Return the question's own cartridge, and count whether the router finds it."""
        ...

    def chosen(self, cartridge: str, question: str) -> str:
        """Return the router's choice."""
        ...

    @property
    def accuracy(self) -> Mapping[str, Any] | None:
        """Return the share of questions whose own cartridge is found; None where none counts."""
        ...

    def write(self, file: Path) -> None:
        """Write what the router reads, for those who use the cartridges."""
        ...

    def remembered(self, generate: GenerateCall) -> GenerateCall:
        """Return a call that generates each request once, whatever its id."""
        ...


class Recipe(Protocol):
    """Choose prompts, make train batches and measure arms. `documents` maps the name of each
    context to its token ids from position 0, `layout` tells which cartridge learns from which, and
    `texts` maps each cartridge to the contexts' texts; `end_ids` end a response; `note` is told
    when a run starts, "" for nothing. Methods that are not abstract do nothing."""

    documents: Mapping[str, tuple[int, ...]]
    layout: CartridgeLayout
    texts: Mapping[str, Sequence[str]]
    end_ids: frozenset[int]
    note: str = ""
    question: str = "What is this about?"  # for the command that is printed

    def prepare(self, step: int) -> None:
        """Make the prompts of `step` beforehand, while the models work."""
        return

    def follow(self, newest: Callable[[], int]) -> None:
        """Sample ahead of training from now on: `newest` returns the newest published version,
        which may be drawn over where a rollout takes long. A recipe that does nothing here samples
        each rollout over one version."""
        return

    def updates(self, steps: int) -> Mapping[str, int]:
        """Return by cartridge in how many of an arm's `steps` it is drawn, where that is not in
        all: its learning rate falls over these."""
        return {}

    @abstractmethod
    async def sample(
        self, step: int, version: int, generate: GenerateCall, ended: ScoreGroup = no_scoring
    ) -> Rollout:
        """Return the on-policy rollout of 0-based `step`, over cartridge `version`. `ended` gets
        samples that are complete before that, in groups that depend on requests and responses,
        never on timing."""

    def restored(self, saved: dict[str, Any]) -> Rollout:
        """Return a rollout that a checkpoint saved before it was trained."""
        return rollout_from(saved)

    @abstractmethod
    async def train_batch(self, rollout: Rollout, version: int) -> TrainBatch:
        """Return the train batch of a rollout for `version`, without the teachers' scores."""

    @abstractmethod
    async def offline(self, first: int, generate: GenerateCall) -> list[Rollout]:
        """Return rollouts that the document teacher writes for the next few steps, from `first`."""

    def repeated(self, rollout: Rollout) -> frozenset[str]:
        """Return the ids of the samples of a rollout without a student's text that later rollouts
        have again: the document teacher's scores of these are kept. Here none."""
        return frozenset()

    @abstractmethod
    async def measure(
        self, arm: str, prefix: str, version: int, *, most: int | None, sampled: bool,
        generate: GenerateCall, keep: KeepAnswers | None = None, route: Route = own_cartridge,
    ) -> MeasuredAccuracy:  # fmt: skip
        """Measure one arm on the first `most` held-out questions (None: all), greedily or by
        sampling; prefix "cartridge", "document" or "none". `keep` gets every answer, once. `route`
        chooses each question's cartridge, where questions are known before they are asked: those of
        episodes and of recursive self-aggregation keep their own."""

    @abstractmethod
    def record(self, rollout: Rollout, arm: str, step: int, directory: RunDirectory) -> None:
        """Write a trained rollout to the run's directory."""

    def facts(self, record: StepRecord) -> Mapping[str, Any]:
        """Return further columns of the step's row of metrics.jsonl: here those of its channels,
        where doc_kl is not the only one, and of verified rollouts."""
        terms, verified = record.output.terms, record.rollout.verified
        channels = {"channels": terms} if terms.keys() - {"doc_kl"} else {}
        return {**channels, "verified": verified} if verified else channels

    def warning(self, rollout: Rollout) -> str:
        """Return what is probably wrong with a rollout, "" for nothing."""
        return ""

    def results(self, state: Mapping[str, ArmResult], answers: Iterable[Any]) -> Mapping[str, Any]:
        """Return further entries of results.json, from the results of the arms and the rows of
        answers.jsonl."""
        return {}

    def event_facts(self, directory: RunDirectory) -> Mapping[str, Any]:
        """Return further fields of the step's event, which may depend on timing."""
        return {}

    def saved(self) -> dict[str, Any]:
        """Return the recipe's unfinished work as JSON, for a checkpoint."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Resume the unfinished work of a checkpoint's `saved`."""
        return

    async def close(self) -> None:
        """Cancel unfinished work."""
        return


def open_recipe(spec: RunSpec, mesh: Mesh, directory: RunDirectory | None = None) -> Recipe:
    """Return the recipe of a spec, over pools that are yet to be spawned into `mesh`; it may write
    into the run's `directory`. Raises SpecError where its plug-in is not installed."""
    learn = spec.learn
    recipe: Recipe = resolve("recipes", learn.recipe)(
        learn, load_tokenizer(learn.model.path), mesh, directory
    )
    return recipe
