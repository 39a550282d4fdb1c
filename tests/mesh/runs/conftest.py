"""The finished runs that the tests of this folder share."""

from finished_runs import finished, stale  # noqa: F401
