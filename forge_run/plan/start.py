"""Plan from which trained cartridges a run starts, and check them before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

from cartridge_forge.forge_run.resuming import differences
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.formats.run_checkpoint import chosen_checkpoint
from cartridge_forge.plugins.library.starts.trained import (
    EVERY,
    read_start,
    record_of,
    require_fit_of,
    start_lines,
)
from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.files import read_rows
from cartridge_forge.protocols.spec.cartridge import StartSpec
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.run_directory import RunDirectory, outcome


def continued(spec: RunSpec, run_dir: Path | None, which: str) -> tuple[str, list[str]]:
    """Return the override of `cartridge.init` that starts from the last cartridges of a run, and
    what to tell of that run.

    The checkpoint is named, not the run: a run that goes on changes no run that started from it.
    Raises SpecError where the start is given twice, CheckpointError without such a run, and
    DataError for one without a checkpoint.
    """
    old = RunDirectory.open((run_dir or Path("runs")).absolute(), spec.mesh.name, which)
    start_spec = spec.learn.cartridge.start or StartSpec()
    if start_spec.source is not None:
        raise SpecError(
            f"--continue {which} and cartridge.init.from ({start_spec.source}) both say what "
            "cartridges start from; give one of them"
        )
    checkpoint = chosen_checkpoint(old.path)
    fresh = spec.learn.cartridge.fresh or "first_tokens"
    start = start_spec.model_copy(update={"source": str(checkpoint), "otherwise": fresh})
    recorded = load_resolved(old.spec).learn.model_dump(mode="json")
    changed = [
        key
        for key in differences(recorded, spec.learn.model_dump(mode="json"))
        if not key.startswith("cartridge.init")
    ]
    notes = [
        f"a new run after {old.id}, {checkpoint.name}: Adam's moments and the learning rate's "
        "schedule begin anew",
        f"other than in {old.id}: {', '.join(changed) or 'nothing'}",
    ]
    if (status := outcome(read_rows(old.events))) != "finished":
        notes.append(f"{old.id} is {status}: its last checkpoint is not its last step's")
    return f"cartridge.init={json.dumps(start.model_dump(mode='json'))}", notes


def started(spec: RunSpec) -> tuple[RunSpec, list[str]]:
    """Return the spec with the number of frozen tokens of the cartridges that it starts from, and
    lines that say where each comes from.

    Reads them. Raises DataError, or CheckpointError for a damaged run, for cartridges that cannot
    be started from; for a model of the hub the trainer does, which has it.
    """
    learn = spec.learn
    if learn.cartridge.start is None or not (Path(learn.model.path) / "config.json").is_file():
        return spec, []
    base = read_base(Path(learn.model.path))
    cartridges = read_start(learn.cartridge.start, base)
    require_fit_of(cartridges, learn.cartridge, base)
    record = record_of(cartridges, cartridges, learn.cartridge)
    labelled = {"every cartridge" if name == EVERY else name: one for name, one in record.items()}
    if EVERY not in cartridges and learn.cartridge.fresh is not None:
        labelled["others"] = {"init": learn.cartridge.fresh}
    counts = {one.frozen for one in cartridges.values()}
    if learn.cartridge.frozen is None and len(counts) == 1:
        update = {"init": learn.cartridge.start, "frozen": counts.pop()}
        cartridge = learn.cartridge.model_copy(update=update)
        learn = learn.model_copy(update={"cartridge": cartridge})
        spec = spec.model_copy(update={"learn": learn})
    return spec, list(start_lines(labelled))
