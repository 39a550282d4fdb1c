"""Provide test-time scaling and recursive self-aggregation over any `Sampler`."""
