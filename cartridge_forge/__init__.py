"""Train, measure and ask cartridges from Python.

    from cartridge_forge import Forge

    forge = Forge(model="models/clinic-reader", documents="notes")
    for event in forge.train():
        print(event)
    forge.cartridges["monday"].ask("who called?")

`__all__` is what semantic versioning covers; the other packages of this distribution may change in
any release. Importing it imports no torch: names are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cartridge_forge.cartridge import Cartridge
    from cartridge_forge.evaluation import ComparedArms
    from cartridge_forge.events import (
        ArmMeasured,
        CartridgesUsable,
        CheckpointSaved,
        RunBegan,
        RunEnded,
        RunEvent,
        RunWarning,
        StepTrained,
    )
    from cartridge_forge.forge import Forge
    from cartridge_forge.protocols.errors import (
        ControlError,
        DataError,
        ForgeError,
        RunError,
        SpecError,
    )
    from cartridge_forge.training_process import TrainingProcess

_HOMES = {
    "Forge": "cartridge_forge.forge",
    "Cartridge": "cartridge_forge.cartridge",
    "ComparedArms": "cartridge_forge.evaluation",
    "TrainingProcess": "cartridge_forge.training_process",
    "RunEvent": "cartridge_forge.events",
    "RunBegan": "cartridge_forge.events",
    "StepTrained": "cartridge_forge.events",
    "CheckpointSaved": "cartridge_forge.events",
    "CartridgesUsable": "cartridge_forge.events",
    "ArmMeasured": "cartridge_forge.events",
    "RunWarning": "cartridge_forge.events",
    "RunEnded": "cartridge_forge.events",
    "ForgeError": "cartridge_forge.protocols.errors",
    "SpecError": "cartridge_forge.protocols.errors",
    "DataError": "cartridge_forge.protocols.errors",
    "RunError": "cartridge_forge.protocols.errors",
    "ControlError": "cartridge_forge.protocols.errors",
}

__all__ = [
    "ArmMeasured",
    "Cartridge",
    "CartridgesUsable",
    "CheckpointSaved",
    "ComparedArms",
    "ControlError",
    "DataError",
    "Forge",
    "ForgeError",
    "RunBegan",
    "RunEnded",
    "RunError",
    "RunEvent",
    "RunWarning",
    "SpecError",
    "StepTrained",
    "TrainingProcess",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("cartridge-forge")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
