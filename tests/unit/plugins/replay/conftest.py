"""The fixtures that the tests of this folder share."""

from rooms.teachers.panel_setup import path, provider  # noqa: F401
