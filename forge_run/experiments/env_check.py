"""Play a few episodes of an environment and tell what would not train: `forge env check`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cartridge_forge.plugins.environments.checking import (
    CheckPlan,
    EnvironmentCheck,
    check_environment,
)
from cartridge_forge.plugins.environments.spec import EnvironmentSpec
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.spec_files.keys import is_shipped_mesh
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.spec_files.yaml_source import parse_value
from cartridge_forge.plugins.statistics.formatting import TableSection, facts, render
from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.packages import install_command, is_missing

COLUMNS = ("agent", "task", "turns", "reward", "slowest move", "ended as")
WORDS_A_TOKEN = 0.75  # of English, where no tokenizer is known


def command(
    *, target: str, sets: list[str], tasks: int, turns: int | None, seed: int, script: Path | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Print the episodes and findings; returns 1 where something would not train. Raises
    ForgeError."""
    status = 0
    checked = _checked(target, sets, tasks, turns, seed, script)
    if any(spec.kind == "desk" for spec, _ in checked) and is_missing("openenv"):
        raise DataError(f"the desk needs openenv; run `{install_command('openenv')}`")
    for spec, plan in checked:
        check = asyncio.run(check_environment(spec, plan))
        status = max(status, int(any(f.fault for f in check.findings)))
        if as_json:
            report = {"environment": spec.id, "findings": [asdict(f) for f in check.findings]}
            sys.stdout.write(json.dumps(report) + "\n")
        else:
            sys.stdout.write(render(_sections(spec, check), terminal=sys.stdout.isatty()))
    return status


def _checked(
    target: str, sets: list[str], tasks: int, turns: int | None, seed: int, script: Path | None
) -> list[tuple[EnvironmentSpec, CheckPlan]]:
    """Return the environments of a target with what is played of each."""
    lines = () if script is None else tuple(script.read_text(encoding="utf-8").splitlines())
    if not target.endswith((".yaml", ".yml")) and not is_shipped_mesh(target):
        spec = spec_of(target, sets, tasks)
        return [(spec, CheckPlan(tasks, turns or 8, seed, lines))]
    learn = EpisodesLearn.of(load_spec(target, sets=sets).spec.learn)
    if learn.episodes is None:
        raise SpecError(f"{target} has no section episodes; give a mesh that has environments")
    plan = CheckPlan(
        tasks, turns or learn.episodes.max_turns, seed, lines, learn.episodes.max_context,
        _counter(learn.model.path),
    )  # fmt: skip
    return [(spec, plan) for spec in learn.episodes.played]


def spec_of(target: str, sets: list[str], tasks: int) -> EnvironmentSpec:
    """Return the environment that a URL, `module:Factory` or a taskset's id names, with keys set
    as `key=value`. Raises SpecError for keys that it cannot have."""
    fields: dict[str, Any]
    if target.startswith(("http://", "https://")):
        fields = {"kind": "openenv", "url": target}
    elif ":" in target:
        fields = {"kind": "python", "factory": target, "folder": str(Path.cwd())}
    else:
        fields = {"kind": "verifiers", "taskset": target, "tasks": max(2, tasks)}
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals:
            raise SpecError(f"--set takes key=value: got {text!r}; write --set action=tool")
        fields[key.strip()] = parse_value(value, f"--set {text}")
    try:
        return EnvironmentSpec.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or target
        raise SpecError(f"{where}: {first['msg']}; see the keys of episodes.environment") from None


def _counter(model: str) -> Callable[[str], int]:
    """Return what counts a text's tokens: the model's tokenizer, or an estimate where the model is
    not there yet."""
    if not (Path(model) / "tokenizer.json").is_file():
        return lambda text: round(len(text.split()) / WORDS_A_TOKEN)
    from cartridge_forge.learning.model.loading import load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda text: len(tokenizer(text, add_special_tokens=False).input_ids)


def _sections(spec: EnvironmentSpec, check: EnvironmentCheck) -> tuple[TableSection, ...]:
    rows = tuple(
        (
            e.agent, e.task.id, str(len(e.actions)),
            "none" if e.reward is None else f"{e.reward:g}", f"{max(e.seconds):.3f} s",
            e.error.partition(":")[0] or ("done" if e.seen[-1].done else "still open"),
        )
        for e in check.episodes
    )  # fmt: skip
    finding_rows = [
        ("would not train" if f.fault else "trains badly", f"{f.what}: {f.remedy}")
        for f in check.findings
    ]
    verdict = facts("findings", finding_rows or [("", "nothing against training on it")])
    if not rows:
        return (verdict,)
    return (TableSection(f"episodes of {spec.id}", COLUMNS, rows), verdict)
