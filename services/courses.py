"""Which course a run takes."""

from __future__ import annotations

from learning.model import load_tokenizer
from protocols.spec import RunSpec
from services.course import Course
from services.roles import Mesh
from services.rundir import RunDirectory
from services.self_study import SelfStudy
from services.tasks import Tasks, read_patients


def open_course(spec: RunSpec, mesh: Mesh, directory: RunDirectory) -> Course:
    """The course of a spec, over pools that are yet to be spawned into `mesh`."""
    learn = spec.learn
    tokenizer = load_tokenizer(learn.model.path)
    tasks = Tasks(learn, read_patients(learn.data), tokenizer)
    return SelfStudy(tasks, measured=bool(learn.evaluate.arms))
