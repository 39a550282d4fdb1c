"""Run recursive self-aggregation: aggregate populations of answers into better ones."""

from strategies.rsa.engine import RSAEngine, RSAResult, RSARun
from strategies.rsa.islands import RSAShape

__all__ = ["RSAEngine", "RSAResult", "RSARun", "RSAShape"]
