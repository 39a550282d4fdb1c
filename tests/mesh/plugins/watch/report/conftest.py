"""The fixtures that the tests of this folder share."""

from report_setup import html, run  # noqa: F401
