"""The fixtures that the tests of this folder share."""

from rooms.services.planes_setup import plane, storage  # noqa: F401
