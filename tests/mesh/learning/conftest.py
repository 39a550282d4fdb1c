"""The fixtures of tiny random models."""

from twins import llama, make_samples, qwen3, twin  # noqa: F401
