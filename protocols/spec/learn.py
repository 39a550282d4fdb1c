"""What a run learns: the typed `configs/*.yaml`."""

from __future__ import annotations

from pydantic import model_validator

from protocols.spec.rules import across_sections
from protocols.spec.sections import LearnSections


class LearnSpec(LearnSections):
    """A learning config, `configs/*.yaml`: its sections (`protocols.spec.sections`), which keep the
    rules between them (`protocols.spec.rules`)."""

    @model_validator(mode="after")
    def _across(self) -> LearnSpec:
        across_sections(self)
        return self
