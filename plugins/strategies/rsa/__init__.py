"""Run recursive self-aggregation: aggregate populations of answers into better ones."""

from cartridge_forge.plugins.strategies.rsa.engine import RSAEngine, RSAResult, RSARun
from cartridge_forge.plugins.strategies.rsa.islands import RSAShape

__all__ = ["RSAEngine", "RSAResult", "RSARun", "RSAShape"]
