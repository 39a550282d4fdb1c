"""Have a base model checked before anything starts with it, and say what that cost.

The check runs in a process of its own, which imports transformers. Its verdict is kept
(`plugins.library.models.verdicts`), so that a run's processes and the next command only read it.
"""

from __future__ import annotations

from cartridge_forge.forge_run.child import in_child
from cartridge_forge.learning.model.verdict import ModelVerdict
from cartridge_forge.plugins.library.models.verdicts import kept_verdict, model_folder, weight_files
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.mesh import RunSpec

MOVING_INITS = ("attention_matching",)  # make cartridges of keys that are moved


def check_for_run(spec: RunSpec) -> list[str]:
    """Return what to tell of the check of a run's model. A model whose weights are on other hosts
    alone is checked there, as it is loaded. Raises DataError for one that is not computed right, or
    whose keys cannot be moved as the run needs it."""
    path, local = spec.learn.model.path, spec.mesh.hosts.kind == "local"
    folder = model_folder(path)
    if not local if folder is None else not weight_files(folder):
        return []
    verdict, lines = check(path)
    if verdict.unmoved and (key := _moving_key(spec.learn)):
        raise DataError(f"{key}: {verdict.unmoved}")
    return lines


def refusal(spec: RunSpec) -> str:
    """Return why a run's model is refused, "" for one that is not, or that is not on this host."""
    if model_folder(spec.learn.model.path) is None:
        return ""
    try:
        check_for_run(spec)
    except DataError as error:
        return str(error)
    return ""


def check(path: str) -> tuple[ModelVerdict, list[str]]:
    """Return the verdict on a model, and what to tell of it: nothing where it was kept. Raises
    DataError where there is no model, or one that is not computed right."""
    if (stored := kept_verdict(path)) is not None:
        if stored.refusal:
            raise DataError(stored.refusal)
        return stored, []
    verdict = in_child(_checked, path)
    return verdict, [verdict_text(verdict)]


def check_again(path: str) -> ModelVerdict:
    """Return the verdict on a model, made now and kept, a refusal too. Raises DataError where there
    is no model."""
    return in_child(_checked_again, path)


def _checked(path: str) -> ModelVerdict:
    from cartridge_forge.learning.model.loading import checked_model  # imports torch, in the child

    return checked_model(path)


def _checked_again(path: str) -> ModelVerdict:
    from cartridge_forge.learning.model.loading import checked_again

    return checked_again(path)


def verdict_text(verdict: ModelVerdict) -> str:
    """Return a verdict as a line: how far off, how many layers, which seconds."""
    worst = max(verdict.nats.values(), default=float("nan"))
    return (
        f"model check: {verdict.family} is computed as its own forward pass does, within "
        f"{worst:.1g} nats ({verdict.layers} of {verdict.of_layers} layers, "
        f"{verdict.seconds:.1f} s; the verdict is kept)"
    )


def _moving_key(learn: LearnSpec) -> str:
    """Return the key of a run that needs keys at other positions, "" for none."""
    if learn.train.compose:
        return "train.compose"
    if learn.cartridge.fresh in MOVING_INITS:
        return f"cartridge.init {learn.cartridge.fresh}"
    return ""
