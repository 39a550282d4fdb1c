"""The server that the tests of this folder share."""

from served import client, served  # noqa: F401
