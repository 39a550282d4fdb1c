"""The fixtures that the tests of this folder share."""

from evaluation_setup import exam, sat  # noqa: F401
