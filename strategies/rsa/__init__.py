"""Recursive self-aggregation: populations of answers that are aggregated into better ones."""

from strategies.rsa.engine import RSAEngine, RSAResult, Run
from strategies.rsa.islands import Shape

__all__ = ["RSAEngine", "RSAResult", "Run", "Shape"]
