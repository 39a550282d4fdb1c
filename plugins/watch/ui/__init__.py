"""Serve pages about runs to a browser: `forge ui`."""
