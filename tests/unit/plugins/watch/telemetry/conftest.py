"""The fixtures that the tests of this folder share."""

from rooms.services.sinks_setup import sink, told  # noqa: F401
