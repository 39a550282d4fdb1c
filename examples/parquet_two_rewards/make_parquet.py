"""Write the Parquet dataset of this example; its model is that of examples/gsm8k_like:

python examples/gsm8k_like/make_problems.py
python examples/parquet_two_rewards/make_parquet.py
"""

from __future__ import annotations

import random
import sys
from argparse import ArgumentParser
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "gsm8k_like"))

from make_problems import PAGE, problem  # noqa: E402


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE, help="where the file is written")
    parser.add_argument("--rows", type=int, default=400, help="problems of the dataset")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng, rows = random.Random("parquet"), dict[str, dict[str, object]]()
    while len(rows) < args.rows:
        text, answer = problem(rng)
        chat = [{"role": "user", "content": text}]
        rows[text] = {"messages": chat, "answer": answer, "words": len(text.split())}
    pages = [{**row, "page": PAGE} for row in rows.values()]
    parquet.write_table(pa.Table.from_pylist(pages), args.out / "problems.parquet")
    print(f"wrote {len(pages)} problems to {args.out / 'problems.parquet'}")


if __name__ == "__main__":
    main()
