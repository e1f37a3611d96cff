"""`treepack stats PACKED --check`, before and after, on rows with much and with little sharing.

    .venv/bin/python benchmarks/data_path/check.py                         5 minutes
    .venv/bin/python benchmarks/data_path/check.py --tokens 10_000_000     1 minute

Rows of 65,536 tokens by "contiguous", from tries of 10 and of 100 million tokens. Each version checks the rows that it
has written itself, against their trie. Units are tokens of the rollouts, as in `tokens_flat`.
"""

from __future__ import annotations

import json
import shutil

from before_after import Versions, arguments, header, treepack
from token_tries import KINDS, make_trie


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[10**7, 10**8])
    options = parser.parse_args()
    with Versions(options.before, options.folder, options.repeats) as versions:
        header()
        for num_tokens in options.tokens:
            for kind in KINDS:
                trie = make_trie(versions.folder, kind, num_tokens)
                packed = {side: versions.folder / f"packed-{side}" for side in ("before", "after")}
                for side, path in packed.items():
                    arguments_of_pack = ["--out", path, "--capacity", 65_536, "--method", "contiguous", "--quiet"]
                    versions.measure(side, treepack("pack", trie, *arguments_of_pack), path)
                totals = json.loads((packed["after"] / "manifest.json").read_bytes())["totals"]
                versions.compare(
                    f"stats --check, {kind}, {num_tokens // 10**6} M tokens",
                    treepack("stats", packed["before"], "--check"),
                    after=treepack("stats", packed["after"], "--check"),
                    units=("tokens", totals["tokens_flat"]),
                )
                for path in packed.values():
                    shutil.rmtree(path)


if __name__ == "__main__":
    main()
