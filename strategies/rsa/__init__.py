"""Recursive self-aggregation: populations of answers that are aggregated into better ones."""

from strategies.rsa.engine import RSAEngine, RSAResult, RSARun
from strategies.rsa.islands import RSAShape

__all__ = ["RSAEngine", "RSAResult", "RSARun", "RSAShape"]
