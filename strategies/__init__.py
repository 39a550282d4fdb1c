"""Test-time scaling and recursive self-aggregation, over anything that samples."""
