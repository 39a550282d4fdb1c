"""Read the trained cartridges that a run starts from, and record where each came from.

    open_start      reads and checks all of it, for the trainer
    read_start      cartridge.init.from  ->  {name: CartridgeFile}, or one for EVERY cartridge
    require_fit_of  layers, heads, RoPE, base model, frozen tokens and P, in one message
    record_of    ->  start.json of the run directory; `lineage` follows it back

The record of a cartridge that came from a run holds the record of that run's start, and so on back
to the first: the chain survives exports, because it is part of a cartridge's provenance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cartridge_forge.learning.cartridge import fingerprint
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import base_hash
from cartridge_forge.plugins.library.formats import convert, forge, run_checkpoint
from cartridge_forge.plugins.library.formats.base_model import (
    BaseModelInfo,
    misfits,
    other_weights,
    read_base,
)
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.names import parse_cartridge
from cartridge_forge.plugins.library.store import ORIGIN, CartridgeStore
from cartridge_forge.plugins.library.store import lineage as lineage
from cartridge_forge.protocols.errors import CheckpointError, DataError
from cartridge_forge.protocols.files import write_atomically
from cartridge_forge.protocols.spec.cartridge import RUN_PREFIX, CartridgeSpec, StartSpec
from cartridge_forge.protocols.spec.learn import LearnSpec

EVERY = "*"  # in place of a cartridge's name: a file that all of them start from


@dataclass(frozen=True)
class StartingCartridges:
    """Hold the trained cartridges that a run's start from, by name: keys and values
    [L, 2, H_kv, P, D] with the number of frozen tokens; and the `record` of how each one starts."""

    given: Mapping[str, tuple[Tensor, int]]
    record: Mapping[str, Any]

    def keep(self, path: Path) -> None:
        """Write the record, or compare it with an earlier one (`keep_record`)."""
        if self.given:
            keep_record(path, self.record)


def open_start(
    learn: LearnSpec, names: Collection[str], model: LanguageModel
) -> StartingCartridges:
    """Return the trained cartridges that these start from, checked against the spec and the whole
    model. Raises DataError, or CheckpointError, for one that cannot be started from."""
    from transformers.utils import CONFIG_NAME, cached_file

    start = learn.cartridge.start
    assert start is not None
    folder = Path(str(cached_file(learn.model.path, CONFIG_NAME))).parent
    base = read_base(folder)
    files = read_start(start, base, names)
    hashes: dict[str, str] = {learn.model.dtype: base_hash(model)}
    require_fit_of(files, learn.cartridge, base, lambda one: other_weights(one, folder, hashes))
    record = record_of(files, names, learn.cartridge) if files else {}
    return StartingCartridges({n: (one.kv, one.frozen) for n, one in files.items()}, record)


def read_start(
    start: StartSpec, base: BaseModelInfo, names: Collection[str] | None = None
) -> dict[str, CartridgeFile]:
    """Return the cartridges that `start` names: by name, or one for EVERY.

    With `names`, the run's cartridges, return those of them that there are. Raises DataError, or
    CheckpointError for a damaged run, where a cartridge cannot be read or, without
    `start.otherwise`, a name has none.
    """
    source = start.source
    if source is None:
        raise DataError(
            "cartridge.init has no from; name a cartridge, a run or a library, or give --continue "
            "RUN"
        )
    by_name = {} if isinstance(source, str) else source
    if names is not None and (unknown := sorted(set(by_name) - set(names))):
        raise DataError(
            f"cartridge.init.from names {unknown[0]}, and this run's cartridges are "
            f"{', '.join(sorted(names))}; correct the name or remove it"
        )
    if isinstance(source, str):
        cartridges = _read(source, start, base)
    else:
        read = {text: _read(text, start, base) for text in dict.fromkeys(by_name.values())}
        cartridges = {name: _one(read[text], text, name) for name, text in by_name.items()}
    return cartridges if names is None else _of(names, cartridges, start)


def _one(cartridges: Mapping[str, CartridgeFile], text: str, name: str) -> CartridgeFile:
    if name not in cartridges and EVERY not in cartridges:
        raise DataError(f"{text} has no cartridge {name}; it has {', '.join(sorted(cartridges))}")
    return cartridges[name if name in cartridges else EVERY]


def _of(
    names: Collection[str], cartridges: Mapping[str, CartridgeFile], start: StartSpec
) -> dict[str, CartridgeFile]:
    """Return the cartridges of a run that have one to start from."""
    if EVERY in cartridges:
        return dict.fromkeys(names, cartridges[EVERY])
    missing = sorted(set(names) - set(cartridges))
    if missing and start.otherwise is None:
        raise DataError(
            f"cartridge.init.from has no cartridge for {', '.join(missing)}; it has "
            f"{', '.join(sorted(cartridges)) or 'none'}; add one, or say how the others start: "
            "cartridge.init.otherwise: first_tokens"
        )
    return {name: cartridges[name] for name in names if name in cartridges}


def _read(text: str, start: StartSpec, base: BaseModelInfo) -> dict[str, CartridgeFile]:
    """Return the cartridges at one path or name."""
    path = Path(text.removeprefix(RUN_PREFIX))
    if text.startswith(RUN_PREFIX) or run_checkpoint.is_run(path):
        return _of_run(path)
    if path.exists():
        stored = _stored(path, base)
        files = stored or {EVERY: convert.read(path)}
        return {name: _from(one, str(path)) for name, one in files.items()}
    if start.library is None:
        raise DataError(
            f"cartridge.init.from names {text}: there is no such file, and no library to look it "
            "up in; correct the path, or set cartridge.init.library to a library's directory"
        )
    if not Path(start.library).is_dir():
        raise DataError(f"cartridge.init.library: there is no directory {start.library}")
    entry = CartridgeStore(Path(start.library), base).get(parse_cartridge(text))
    folder = entry.path.parent
    return {EVERY: _from(forge.read(folder), str(folder))}


def _of_run(path: Path) -> dict[str, CartridgeFile]:
    """Return the last cartridges of a run's arm: DIR, or DIR/ARM."""
    arm = None
    if not path.exists() and path.parent.is_dir():
        path, arm = path.parent, path.name
    checkpoint = run_checkpoint.chosen_checkpoint(path.resolve(), arm)
    files = run_checkpoint.read_all(checkpoint)
    return {name: _from(one, str(checkpoint)) for name, one in files.items()}


def _stored(path: Path, base: BaseModelInfo) -> dict[str, CartridgeFile]:
    """Return the newest version of every cartridge of a library; none where it is no library."""
    if not path.is_dir() or not any(path.glob(f"*/*/{forge.MANIFEST}")):
        return {}
    library = CartridgeStore(path, base)
    entries = {name: library.entries(name) for name in library.names()}
    newest = {name: those[-1].path.parent for name, those in entries.items() if those}
    return {name: _from(forge.read(folder), str(folder)) for name, folder in newest.items()}


def _from(cartridge: CartridgeFile, where: str) -> CartridgeFile:
    return cartridge.with_source({ORIGIN: where})


def require_fit_of(
    files: Mapping[str, CartridgeFile],
    cartridge: CartridgeSpec,
    base: BaseModelInfo,
    weights: Callable[[CartridgeFile], list[str]] = lambda cartridge: [],
) -> None:
    """Raise one DataError with every reason why these cartridges cannot be started from.

    `weights` returns why a cartridge was trained with other weights than the model's.
    """
    reasons: dict[str, list[str]] = {}
    for name, one in files.items():
        wrong = [*misfits(one, base), *weights(one), *_length_misfits(one, cartridge)]
        if wrong:
            reasons.setdefault("; ".join(wrong), []).append(name)
    if reasons:
        raise DataError(
            "; ".join(
                f"cartridge.init cannot start {_shown(names)} from "
                f"{files[names[0]].facts.source[ORIGIN]}: {why}"
                for why, names in reasons.items()
            )
        )


def _length_misfits(file: CartridgeFile, cartridge: CartridgeSpec) -> Iterator[str]:
    """Yield what is wrong with P and the frozen tokens."""
    start, tokens, frozen = cartridge.start, cartridge.tokens, cartridge.frozen
    assert start is not None
    if frozen is not None and frozen != file.frozen:
        yield (
            f"its first {file.frozen} tokens are frozen, and cartridge.frozen is {frozen}; set "
            f"cartridge.frozen to {file.frozen}, or to null"
        )
    if file.tokens < tokens and start.pad is None:
        yield (
            f"it has {file.tokens} tokens, and cartridge.tokens is {tokens}; set cartridge.tokens "
            f"to {file.tokens}, or cartridge.init.pad to attention_matching or random"
        )
    if file.tokens > tokens and not start.cut:
        yield (
            f"it has {file.tokens} tokens, and cartridge.tokens is {tokens}; set cartridge.tokens "
            f"to {file.tokens}, or cartridge.init.cut to true to keep the first {tokens}"
        )
    if file.tokens > tokens and file.frozen >= tokens:
        yield (
            f"its first {file.frozen} tokens are frozen, and cartridge.tokens {tokens} leaves "
            f"none to train; set it above {file.frozen}"
        )


def _shown(names: list[str]) -> str:
    if names == [EVERY]:
        return "the cartridges"
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def record_of(
    files: Mapping[str, CartridgeFile], names: Collection[str], cartridge: CartridgeSpec
) -> dict[str, Any]:
    """Return the JSON-able record of how each of `names` starts.

    A trained cartridge has `sha256`, the fingerprint of its numbers as they were read.
    """
    return {name: _record(files[name], cartridge) if name in files else {"init": cartridge.fresh}
            for name in sorted(names)}  # fmt: skip


def _record(file: CartridgeFile, cartridge: CartridgeSpec) -> dict[str, Any]:
    source = dict(file.facts.source)
    start, added = cartridge.start, cartridge.tokens - file.tokens
    assert start is not None
    changed = f"{added} tokens added by {start.pad}" if added > 0 else "cut" if added else ""
    return {
        ORIGIN: source.pop(ORIGIN), "sha256": fingerprint(file.kv), "tokens": file.tokens,
        "frozen": file.frozen, **({"changed": changed} if changed else {}), "source": source,
    }  # fmt: skip


def keep_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record, or compare it with the one that an earlier start of the run wrote. Raises
    CheckpointError where a cartridge's numbers are others now."""
    recorded = run_checkpoint.read_start_record(path)
    changed = [
        name
        for name in record
        if recorded and _number_of(record, name) != _number_of(recorded, name)
    ]
    if changed:
        raise CheckpointError(
            f"cartridge {changed[0]} started from other numbers than "
            f"{record[changed[0]].get(ORIGIN, 'its document')} has now: restore what {path} names, "
            "or start anew without --resume"
        )
    if not recorded:
        write_atomically(path, json.dumps(record, indent=1) + "\n")


def _number_of(record: Mapping[str, Any], name: str) -> Any:
    return record.get(name, {}).get("sha256")


def start_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each way in which cartridges start: `from PATH (step 180, ...): a, b`."""
    ways: dict[str, list[str]] = {}
    for name, one in record.items():
        method = f"by {one['init']}" if "init" in one else f"from {_origin(one)}"
        ways.setdefault(method, []).append(name)
    for method, names in ways.items():
        yield f"{method}: {', '.join(names)}"


def _origin(record: Mapping[str, Any]) -> str:
    step = record["source"].get("step")
    facts = [f"step {step}" if step else "", f"{record['tokens']} tokens",
             f"{record['frozen']} frozen", record.get("changed", "")]  # fmt: skip
    return f"{record[ORIGIN]} ({', '.join(filter(None, facts))})"
