"""The fixtures that the tests of this folder share."""

from rooms.strategies.api_endpoint_setup import provider  # noqa: F401
