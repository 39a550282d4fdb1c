"""How well questions about a document are answered with another's cartridge beside its own:

    python -m benchmarks.composing [MESH] [--share 0.5] [--out composing.json]
                                   [--set key.path=value]...

Two runs of the mesh's config in this process, without `train.compose` and with it; then the same
held-out questions over the document's cartridge alone [A], with the next document's behind [A, B]
or before it [B, A], and with three. Keys are moved behind one another; `unmoved` leaves them at
the positions that they were trained at. The document's own KV are composed as well: what composing
costs where nothing was trained. Intervals are Wilson's; the questions are the same in every row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.inits import share
from benchmarks.provenance import provenance
from benchmarks.studying import Study
from protocols.spec_loading import load_spec
from protocols.types import PrefixRef, composed_ref

# Of the documents in a ring, starting with the one that is asked about.
ORDERS: dict[str, Callable[[Sequence[str]], Sequence[str]]] = {
    "[A]": lambda ring: ring[:1],
    "[A, B]": lambda ring: ring[:2],
    "[B, A]": lambda ring: ring[1::-1],
    "[B, A, C]": lambda ring: [ring[1], ring[0], ring[2]],
}


def asked(study: Study, kind: str, order: str, moved: bool) -> str:
    """Right answers over one order of prefixes of a kind, "cartridge" or "document"."""
    exams, names = study.tasks.exams, study.names
    requests = []
    for exam, request in zip(
        exams, study.tasks.exam_requests(exams, "bench", kind, 0, False), strict=True
    ):
        first = names.index(exam.question.patient)
        ring = [*names[first:], *names[:first]]
        prefix = composed_ref([PrefixRef(f"{kind}/{name}", 0) for name in ORDERS[order](ring)])
        requests.append(replace(request, prefix=prefix))
    return share([study.ask(exams, requests, moved)])


def rows(study: Study, name: str, kind: str) -> list[list[str]]:
    found = []
    for moved in (True, False):
        orders = [order for order in ORDERS if moved or order != "[A]"]
        cells = [asked(study, kind, order, moved) for order in orders]
        found.append([name if moved else f"{name}, unmoved", *([""] * (not moved)), *cells])
        print("| " + " | ".join(found[-1]) + " |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("mesh", nargs="?", default="meshes/longhealth.yaml")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    given = parser.parse_args()
    print("| | " + " | ".join(ORDERS) + " |\n|" + "---|" * (len(ORDERS) + 1))
    found: list[Any] = []
    for compose in (0.0, given.share):
        sets = [*given.sets, f"train.compose={compose}"]
        learn = load_spec(given.mesh, sets=sets).spec.learn
        study = Study(learn)
        if not compose:
            found += rows(study, "documents, whole", "document")
        study.train(learn.train.steps)
        found += rows(study, f"trained, compose {compose:g}", "cartridge")
    if given.out is not None:
        config = {"mesh": given.mesh, "share": given.share, "sets": given.sets}
        told = {**provenance("benchmarks.composing", config), "rows": found}
        given.out.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
