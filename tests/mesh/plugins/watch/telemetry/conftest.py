"""The fixtures that the tests of this folder share."""

from rooms.services.prometheus_setup import sink, told  # noqa: F401
