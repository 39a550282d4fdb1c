"""Name the environment's action, observation and state."""

from cartridge_forge.plugins.environments.openenv.desk_env import (
    DeskAction,
    DeskObservation,
    DeskState,
)

__all__ = ["DeskAction", "DeskObservation", "DeskState"]
