"""How well questions about a document are answered with another's cartridge beside its own:

    python -m benchmarks.composing [MESH] [--share 0.5] [--out composing.json]
                                   [--set key.path=value]...

Two runs of the mesh's config in this process, without `train.compose` and with it; then the same
held-out questions over the document's cartridge alone [A], with the next document's behind [A, B]
or before it [B, A]. Keys are moved behind one another; `unmoved` leaves them at the positions that
they were trained at. The documents' own KV are composed as well: what composing costs where nothing
was trained. A question does not say whose chart it is about: those that B has too, word for word,
nobody can answer over both, and they stand in rows of their own. Intervals are Wilson's; the
questions are the same in all rows of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.inits import share
from benchmarks.record import arguments, provenance, write
from benchmarks.studying import Study
from protocols.spec_loading import load_spec
from protocols.types import PrefixRef, composed_ref
from services.tasks import Exam

# Of the documents in a ring, starting with the one that is asked about.
ORDERS: dict[str, Callable[[Sequence[str]], Sequence[str]]] = {
    "[A]": lambda ring: ring[:1],
    "[A, B]": lambda ring: ring[:2],
    "[B, A]": lambda ring: ring[1::-1],
}


def asked(study: Study, exams: list[Exam], kind: str, order: str, moved: bool) -> str:
    """Right answers over one order of prefixes of a kind, "cartridge" or "document"."""
    names = study.names
    requests = []
    for exam, request in zip(
        exams, study.tasks.exam_requests(exams, "bench", kind, 0, False), strict=True
    ):
        first = names.index(exam.question.patient)
        ring = [*names[first:], *names[:first]]
        prefix = composed_ref([PrefixRef(f"{kind}/{name}", 0) for name in ORDERS[order](ring)])
        requests.append(replace(request, prefix=prefix))
    return share([study.ask(exams, requests, moved)])


def by_owner(study: Study) -> dict[str, list[Exam]]:
    """The questions that B, the next document, does not have, and those that it has too."""
    names, patients = study.names, study.tasks.patients
    following = dict(zip(names, [*names[1:], names[0]], strict=True))
    texts = {name: {q.text for q in patients[name].questions} for name in names}
    found: dict[str, list[Exam]] = {"A's alone": [], "B's too": []}
    for exam in study.tasks.exams:
        both = exam.question.text in texts[following[exam.question.patient]]
        found["B's too" if both else "A's alone"].append(exam)
    return found


def rows(study: Study, name: str, kind: str) -> list[list[str]]:
    found = []
    for whose, exams in by_owner(study).items():
        for moved in (True, False):
            cells = [
                asked(study, exams, kind, order, moved) if moved or order != "[A]" else ""
                for order in ORDERS
            ]
            found.append([name if moved else f"{name}, unmoved", f"{whose}, {len(exams)}", *cells])
            print("| " + " | ".join(found[-1]) + " |", flush=True)
    return found


def main() -> None:
    parser = arguments(__doc__, "composing")
    parser.add_argument("mesh", nargs="?", default="meshes/longhealth.yaml")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    given = parser.parse_args()
    told = provenance("composing", vars(given))
    print("| | questions | " + " | ".join(ORDERS) + " |\n|" + "---|" * (len(ORDERS) + 2))
    found: list[Any] = []
    for compose in (0.0, given.share):
        sets = [*given.sets, f"train.compose={compose}"]
        learn = load_spec(given.mesh, sets=sets).spec.learn
        study = Study(learn)
        if not compose:
            found += rows(study, "documents, whole", "document")
        study.train(learn.train.steps)
        found += rows(study, f"trained, compose {compose:g}", "cartridge")
    write(given.out, told, {}, found)


if __name__ == "__main__":
    main()
