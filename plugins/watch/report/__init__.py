"""Render report.html: one run on one page that needs no network."""
