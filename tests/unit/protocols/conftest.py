"""The fixture of a tiny random model."""

from twins import llama  # noqa: F401
