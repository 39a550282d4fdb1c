"""Play the clinic desk: `ClinicDeskEnv(base_url=...)`."""

from recipes.openenv.clinic_desk.client import ClinicDeskEnv
from recipes.openenv.clinic_desk.models import DeskAction, DeskObservation, DeskState

__all__ = ["ClinicDeskEnv", "DeskAction", "DeskObservation", "DeskState"]
