"""Convert cartridges between formats and inspect them: `forge convert`, `forge inspect`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from cartridge_forge.plugins.library.formats import convert as formats
from cartridge_forge.plugins.library.formats.base_model import (
    made_for,
    misfits,
    other_weights,
    read_base,
    require_fit,
)
from cartridge_forge.plugins.library.formats.bias_folding import LayerFolding, read_compacted
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.formats.convert import norms, provenance
from cartridge_forge.plugins.statistics.formatting import TableSection, facts, render
from cartridge_forge.protocols.errors import DataError


def convert(
    *,
    source: Path,
    target: Path,
    to: str,
    dtype: str | None,
    force: bool,
    strict: bool,
    name: str | None,
    model: Path | None,
    document_tokens: int | None,
    text: Path | None,
) -> int:
    """Write `source` in the format `to` at `target`; with `document_tokens` it is a KV cache that
    another program compacted. Raises DataError."""
    folding: list[LayerFolding] = []
    if document_tokens is not None:
        if model is None:
            raise DataError("--document-tokens is for a cache of a model: name it with --model DIR")
        cartridge, folding = read_compacted(source, model, document_tokens, _read_text(text))
    elif text is not None:
        raise DataError(
            "--text is for the biases of a compacted cache: give --document-tokens T with it"
        )
    else:
        cartridge = formats.read(source, name)
    if model is not None and document_tokens is None:
        base = read_base(model)
        require_fit(cartridge, base)
        cartridge = made_for(cartridge, base)
    lost = [*_unfolded(folding), *formats.losses(cartridge, to, dtype)]
    if lost and strict:
        raise DataError(f"{'; '.join(lost)} (--strict)")
    for line in lost:
        print(f"warning: {line}", file=sys.stderr)
    formats.convert(cartridge, target, to, dtype=dtype, force=force)
    print(f"{target}: {to}, {cartridge.tokens} tokens, {dtype or cartridge.dtype}")
    if folding:
        sys.stdout.write("\n" + render([_table(folding)], terminal=sys.stdout.isatty()))
    return 0


def _read_text(file: Path | None) -> str | None:
    """Return the text of a file. Raises DataError."""
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is no UTF-8 text ({error}); give a file of plain text") from error


def _unfolded(folding: Sequence[LayerFolding]) -> list[str]:
    """Return what folded biases change, of the layer where they change most."""
    if not folding:
        return []
    number, worst = max(enumerate(folding), key=lambda one: one[1].relative)
    return [
        "biases are folded into keys, which is not exact: a number of the attention's output is "
        f"off by {worst.relative:.2%} of their root mean square on average in layer {number}, and "
        "by no more in the others"
    ]


def _table(folding: Sequence[LayerFolding]) -> TableSection:
    """Return the table of how biases were folded."""
    heads = ("layer", "largest bias", "(q.u - 1)^2", "output rms", "mean difference", "largest")
    rows = tuple(
        (str(number), *(f"{value:.4g}" for value in astuple(layer)))
        for number, layer in enumerate(folding)
    )
    return TableSection("biases folded into keys, by queries that were held out", heads, rows)


def inspect(*, source: Path, name: str | None, model: Path | None) -> int:
    """Print a cartridge's contents. Raises DataError for one that does not fit `model`."""
    cartridge = formats.read(source, name)
    report = sections(cartridge, formats.detect(source))
    sys.stdout.write(render(report, terminal=sys.stdout.isatty()))
    if model is not None:
        wrong = misfits(cartridge, read_base(model)) or other_weights(cartridge, model)
        if wrong:
            raise DataError(f"not for {model}: {'; '.join(wrong)}")
        print(f"\nfits {model}, by {_proof(cartridge)}")
    return 0


def sections(cartridge: CartridgeFile, format: str) -> list[TableSection]:
    """Return the tables that `forge inspect` prints."""
    shape, numbers = " x ".join(map(str, cartridge.kv.shape)), f"{cartridge.kv.numel():,}"
    about = (
        ("format", format),
        ("shape", f"{shape}: layers, keys and values, heads, tokens, head size"),
        ("tokens", f"{cartridge.tokens}, {cartridge.frozen} of them frozen"),
        ("numbers", f"{numbers} of {cartridge.dtype}, {cartridge.kv.nbytes:,} bytes"),
    )
    measured = tuple(
        (
            str(number), f"{layer.keys:.4f}", f"{layer.values:.4f}",
            f"{layer.largest_key:.4f}", f"{layer.largest_value:.4f}",
        )
        for number, layer in enumerate(norms(cartridge))
    )  # fmt: skip
    heads = ("layer", "keys rms", "values rms", "largest key", "largest value")
    return [
        facts("cartridge", about),
        facts("made for and of", provenance(cartridge)),
        TableSection("norms", heads, measured),
    ]


def _proof(cartridge: CartridgeFile) -> str:
    """Name the facts that were compared with the model, and those the cartridge lacks."""
    made_of = cartridge.facts
    compared = {
        "RoPE": made_of.rope, "config": made_of.config_sha256,
        "weights": made_of.weights_sha256 and made_of.weights_dtype,
    }  # fmt: skip
    compared_names = ["shape", *(name for name, value in compared.items() if value)]
    lacking = [name for name, value in compared.items() if not value]
    return ", ".join(compared_names) + (
        f"; it does not say which {' or '.join(lacking)}" if lacking else ""
    )
