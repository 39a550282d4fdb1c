"""The server that the tests of this folder share."""

from rooms.serving.resident_setup import entries  # noqa: F401
from rooms.serving.schema_setup import door  # noqa: F401
from served import client, served  # noqa: F401
