"""The fixtures that the tests of this folder share."""

from rooms.forge_run.cartridges_setup import run  # noqa: F401
from rooms.forge_run.control_setup import home, running  # noqa: F401
