"""The fixtures that the tests of this folder share."""

from twins import llama, qwen3, twin  # noqa: F401
