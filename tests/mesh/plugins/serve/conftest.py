"""The server that the tests of this folder share."""

from rooms.serving.resident_setup import (
    door,  # noqa: F401
    entries,  # noqa: F401
)
from served import client, served  # noqa: F401
from twins import llama, qwen3, twin  # noqa: F401
