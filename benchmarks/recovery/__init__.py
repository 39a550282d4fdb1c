"""Faults of whole runs and deaths of single roles, and the seconds until work goes on."""
