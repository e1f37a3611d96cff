"""The table of PROS against GRPO, dynamic sampling and random queries; see trace_tables.py.

python benchmarks/reproduction/pros_tables.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trace_tables import read_folder, write_tables

from treepack.errors import TreepackError

ARMS = {
    "pool-grpo": "GRPO",
    "pool-dynamic": "dynamic sampling",
    "pool-random": "random queries",
    "pros": "PROS",
}
COLUMNS = {
    "both_outcomes": "groups with both outcomes",
    "augmented": "groups of augmented queries",
    "rate_error": "estimated - observed pass rate, absolute",
    "rate_square": "squared error of estimated pass rates, without noise",
    "groups": "groups sampled / step",
    "pool": "queries of the pool",
    "reward": "reward of the sampled groups",
}


def main(arguments: Sequence[str]) -> None:
    """Write and print the table of PROS."""
    for text in write_tables(read_folder(arguments), "pros", ARMS, COLUMNS):
        print(text)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TreepackError as error:
        raise SystemExit(f"error: {error}") from error
