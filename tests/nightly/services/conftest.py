"""The finished run that the tests of this folder compare with."""

from finished_runs import finished  # noqa: F401
