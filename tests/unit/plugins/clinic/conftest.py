"""The fixtures that the tests of this folder share."""

from rooms.environments.clinic_setup import clerk, panel  # noqa: F401
