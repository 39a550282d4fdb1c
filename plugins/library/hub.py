"""Push and pull cartridges to and from the Hugging Face hub, by its own client.

    push    create_repo, then one commit: cartridge.safetensors, manifest.json, a model card
    pull    the repository's list, then the files of whichever format they are, verified
    update  pull, unless the newest version is of that commit

The client reads HF_ENDPOINT and HF_TOKEN. A pull takes one commit, named by its hash, and reads its
files as any others: a pickle by the restricted loader alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitOperationAdd, HfApi

from cartridge_forge.plugins.library.formats import forge, peft, tokasaurus
from cartridge_forge.plugins.library.formats.convert import read
from cartridge_forge.plugins.library.hub_errors import asking
from cartridge_forge.plugins.library.model_card import (
    CARD,
    NOTHING_STATED,
    CardFacts,
    model_card,
)
from cartridge_forge.plugins.library.names import CartridgeName
from cartridge_forge.plugins.library.store import CartridgeStore, CartridgeVersion, add_cartridge
from cartridge_forge.protocols.errors import DataError


@dataclass(frozen=True)
class PullLimits:
    """Bound a pull: bytes of all its files, and whether a pickle is read, by the restricted
    loader."""

    most_bytes: int | None = None
    pickles: bool = True


def push(
    entry: CartridgeVersion, repo: str, *, private: bool = False, card: CardFacts = NOTHING_STATED,
    run: Path | None = None, api: HfApi | None = None,
) -> str:  # fmt: skip
    """Commit a version to a model repository, created if needed; returns the commit's URL. A
    repository without a card gets one, with what the directory of its `run` says.

    Raises DataError where the version is damaged, or the hub refuses.
    """
    hub, folder = api or HfApi(), entry.path.parent
    forge.read(folder)
    name = f"{entry.manifest.name}@{entry.manifest.version}"
    with asking(hub, repo):
        hub.create_repo(repo, private=private, exist_ok=True)
        files = [CommitOperationAdd(file, folder / file) for file in (forge.FILE, forge.MANIFEST)]
        have = {file.rfilename for file in hub.model_info(repo).siblings or ()}
        if CARD not in have:
            text = model_card(entry, repo, card, run)
            files.append(CommitOperationAdd(CARD, text.encode()))
        commit = hub.create_commit(repo, files, commit_message=f"Cartridge {name}")
    return str(commit.commit_url)


def update(
    library: CartridgeStore, repo: str, name: str, limits: PullLimits, api: HfApi
) -> CartridgeVersion:
    """Return the newest version of `name` after a pull, which is left out where that version is of
    the repository's newest commit. Raises DataError."""
    versions = library.versions(name)
    if versions:
        newest = library.get(CartridgeName(name, max(versions)))
        with asking(api, repo):
            commit = api.model_info(repo).sha
        source = newest.manifest.source
        if (source.get("hub"), source.get("revision")) == (repo, commit):
            return newest
    return pull(library, repo, name, api=api, limits=limits)


def pull(
    library: CartridgeStore, repo: str, name: str, *, revision: str | None = None,
    api: HfApi | None = None, limits: PullLimits = PullLimits(),
) -> CartridgeVersion:  # fmt: skip
    """Add a repository's cartridge as the next version of `name`. Raises DataError."""
    hub = api or HfApi()
    with TemporaryDirectory(prefix="forge-pull-") as folder:
        with asking(hub, repo):
            bounded = limits.most_bytes is not None
            info = hub.model_info(repo, revision=revision, files_metadata=bounded)
        sizes = {file.rfilename: file.size for file in info.siblings or ()}
        wanted = _wanted(list(sizes), repo)
        _check_limits({file: sizes[file] for file in wanted}, limits, repo)
        with asking(hub, repo):
            for file in wanted:
                hub.hf_hub_download(repo, file, revision=info.sha, local_dir=folder)
        target = Path(folder)
        if tokasaurus.CONFIG in wanted:  # its server gives the only .pt this name
            (target / wanted[0]).rename(target / tokasaurus.FILE)
        cartridge = read(target / wanted[0] if len(wanted) == 1 else target)
    return add_cartridge(library, name, cartridge, {"hub": repo, "revision": info.sha})


def _wanted(files: list[str], repo: str) -> list[str]:
    """Return the files that make up the repository's cartridge."""
    pickles = [file for file in files if file.endswith(".pt") and "/" not in file]
    for together in ((forge.FILE, forge.MANIFEST), (peft.WEIGHTS, peft.CONFIG)):
        if set(together) <= set(files):
            return list(together)
    if len(pickles) == 1:
        return [*pickles, *([tokasaurus.CONFIG] if tokasaurus.CONFIG in files else [])]
    raise DataError(
        f"{repo} holds no cartridge: there is neither {forge.FILE} with {forge.MANIFEST}, nor "
        f"{peft.WEIGHTS} with {peft.CONFIG}, nor one .pt; it has "
        f"{', '.join(files[:8]) or 'nothing'}"
    )


def _check_limits(sizes: Mapping[str, int | None], limits: PullLimits, repo: str) -> None:
    pickles = [file for file in sizes if file.endswith(".pt")]
    if pickles and not limits.pickles:
        raise DataError(
            f"{repo} holds a pickle, {pickles[0]}, and none is taken here; convert it to "
            "safetensors: forge convert"
        )
    if limits.most_bytes is None:
        return
    known_sizes = [size for size in sizes.values() if size is not None]
    if len(known_sizes) < len(sizes) or sum(known_sizes) > limits.most_bytes:
        size_text = (
            f"{sum(known_sizes):,} bytes" if len(known_sizes) == len(sizes) else "an unknown size"
        )
        raise DataError(
            f"the cartridge in {repo} has {size_text}, and {limits.most_bytes:,} are taken"
        )
