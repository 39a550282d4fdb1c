"""The fixtures that the tests of this folder share."""

from rooms.registry.hub_setup import api, house, hub, library  # noqa: F401
