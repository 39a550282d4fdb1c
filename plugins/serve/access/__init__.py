"""Decide who may ask for what, and how much of it."""
