"""Check rl.toml by prime-rl's own schema, where a checkout of it is on PYTHONPATH.

    PYTHONPATH=CHECKOUT/packages/prime-rl-configs/src:.:recipes/prime_rl/tasksets \\
      python -m recipes.prime_rl.validate

It needs verifiers and renderers, and neither torch nor a GPU.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from prime_rl.configs.rl import RLConfig


def main() -> None:
    content = tomllib.loads(Path(__file__).with_name("rl.toml").read_text())
    orchestrator = RLConfig.model_validate(content).orchestrator
    for source in [*orchestrator.train.source, *orchestrator.eval.source]:
        print(f"{source.name}: {source.env.taskset.id}, {type(source.env).__name__}")


if __name__ == "__main__":
    main()
