"""Write the Parquet dataset of this example:

python -m examples.parquet_two_rewards.problems
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from examples.gsm8k_like.problems import PAGE, different


def main() -> None:
    parser = ArgumentParser(description="Write word problems as Parquet.")
    path = Path(__file__).with_name("problems.parquet")
    parser.add_argument("--out", type=Path, default=path, help="where they are written")
    args = parser.parse_args()
    rows = [
        {
            "messages": [{"role": "user", "content": text}],
            "answer": answer,
            "words": len(text.split()),
            "page": PAGE,
        }
        for text, answer in different(400, "parquet").items()
    ]
    parquet.write_table(pa.Table.from_pylist(rows), args.out)
    print(f"{args.out}: {len(rows)} problems")


if __name__ == "__main__":
    main()
