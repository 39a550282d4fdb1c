"""The fixtures of tiny random models."""

from rooms.learning.devices_setup import there  # noqa: F401
from twins import llama, make_samples, qwen3, twin  # noqa: F401
