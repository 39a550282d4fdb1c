"""`forge convert` and `forge inspect`: a cartridge's file into another format, and what is in one.

Only argparse is imported here; torch comes with a command.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocols.errors import DataError

if TYPE_CHECKING:
    from forge_run.figures import Section
    from formats.value import Cartridge

FORMATS = ("forge", "hazy", "peft", "tokasaurus")
DTYPES = ("float32", "bfloat16", "float16")
SOURCE = "a cartridge of any format, a version in a library, a run or one of its checkpoints"


def add_formats(commands: Any) -> None:
    """Add both commands."""
    convert = commands.add_parser("convert", help="write a cartridge in another format")
    convert.add_argument("source", type=Path, metavar="SRC", help=SOURCE)
    convert.add_argument("target", type=Path, metavar="DST", help="the file or directory to write")
    convert.add_argument("--to", choices=FORMATS, required=True, help="the format of DST")
    convert.add_argument("--dtype", choices=DTYPES, help="of DST (default: as it is)")
    convert.add_argument("--force", action="store_true", help="replace DST if it is there")
    convert.add_argument(
        "--strict", action="store_true", help="refuse where something would be lost or not served"
    )
    _add_choice(convert)
    convert.set_defaults(act=_convert)
    inspect = commands.add_parser("inspect", help="shapes, norms and provenance of a cartridge")
    inspect.add_argument("source", type=Path, metavar="PATH", help=SOURCE)
    _add_choice(inspect)
    inspect.set_defaults(act=_inspect)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", metavar="NAME", help="which cartridge of a run that has several")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="refuse a cartridge that is not for this model"
    )


def _convert(options: argparse.Namespace) -> int:
    from formats.base import made_for, read_base, require_fit
    from formats.registry import convert, losses, read

    cartridge = read(options.source, options.name)
    if options.model is not None:
        base = read_base(options.model)
        require_fit(cartridge, base)
        cartridge = made_for(cartridge, base)
    lost = losses(cartridge, options.to, options.dtype)
    if lost and options.strict:
        raise DataError(f"{'; '.join(lost)} (--strict)")
    for line in lost:
        print(f"warning: {line}", file=sys.stderr)
    convert(cartridge, options.target, options.to, dtype=options.dtype, force=options.force)
    dtype = options.dtype or cartridge.dtype
    print(f"{options.target}: {options.to}, {cartridge.tokens} tokens, {dtype}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from forge_run.figures import render
    from formats.base import misfits, read_base
    from formats.registry import detect, read

    cartridge = read(options.source, options.name)
    shown = sections(cartridge, detect(options.source))
    sys.stdout.write(render(shown, terminal=sys.stdout.isatty()))
    if options.model is not None:
        from formats.weights import other_weights

        wrong = misfits(cartridge, read_base(options.model))
        wrong = wrong or other_weights(cartridge, options.model)
        if wrong:
            raise DataError(f"not for {options.model}: {'; '.join(wrong)}")
        print(f"\nfits {options.model}, by {_proof(cartridge)}")
    return 0


def sections(cartridge: Cartridge, format: str) -> list[Section]:
    """What `forge inspect` prints."""
    from forge_run.figures import Section
    from formats.measure import norms, provenance

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
        Section("cartridge", ("", ""), about),
        Section("made for and of", ("", ""), tuple(provenance(cartridge))),
        Section("norms", heads, measured),
    ]


def _proof(cartridge: Cartridge) -> str:
    """What was compared with the model, and what could not be."""
    facts = cartridge.facts
    said = {
        "shape": True, "RoPE": bool(facts.rope), "config": bool(facts.config_sha256),
        "weights": bool(facts.weights_sha256 and facts.weights_dtype),
    }  # fmt: skip
    known = [what for what, there in said.items() if there]
    silent = [what for what, there in said.items() if not there]
    return ", ".join(known) + (f"; it does not say which {' or '.join(silent)}" if silent else "")
