"""What a run learns: the typed `configs/*.yaml`."""

from __future__ import annotations

from pydantic import model_validator

from protocols.learn_rules import across_sections
from protocols.sections import LearnSections


class LearnSpec(LearnSections):
    """A learning config, `configs/*.yaml`: its sections (`protocols.sections`), which keep the
    rules between them (`protocols.learn_rules`)."""

    @model_validator(mode="after")
    def _across(self) -> LearnSpec:
        across_sections(self)
        return self
