"""Simulate one controller beside any number of hosts, from what it was measured to spend."""
