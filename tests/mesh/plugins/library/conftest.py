"""The server that the tests of this folder share."""

from rooms.registry.hub_setup import api, house, hub, library  # noqa: F401
from served import client, served  # noqa: F401
