"""Configure what a run learns: the typed `configs/*.yaml`."""

from __future__ import annotations

from pydantic import model_validator

from protocols.spec.rules import across_sections
from protocols.spec.sections import LearnSections


class LearnSpec(LearnSections):
    """Hold a learning config, `configs/*.yaml`: the sections of `protocols.spec.sections`,
    validated by the rules between them in `protocols.spec.rules`."""

    @model_validator(mode="after")
    def _across(self) -> LearnSpec:
        across_sections(self)
        return self
