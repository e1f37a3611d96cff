"""Tokens of JSONL to a trie, on one core, before and after: `treepack build-trie --workers 1`.

    python benchmarks/data_path/token_jsonl.py [--tokens 10e6,100e6] [--kinds heavy,little] [--logprobs 10e6]

Input are the made-up rollouts of benchmarks/reading.py: ids, a mask of 0 and 1, a reward, 8,192 to 32,768 tokens each.
Nine tokens in ten repeat an earlier rollout (heavy), or one in ten (little). With log-probabilities, each token has a
float of about 17 digits, too. Tokens per second are flat tokens per
second of processor time. Both versions must write the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import orjson
from before_after import OUT, ROOT, Versions, arguments, header, treepack

sys.path.append(str(ROOT / "benchmarks"))

from reading import FORKS, token_groups


def make(path: Path, kind: str, num_tokens: float, *, has_logprobs: bool) -> int:
    """Write groups of rollouts with at least `num_tokens` flat tokens; return their number."""
    total, rng = 0, np.random.default_rng(1)
    with path.open("wb") as file:
        for group in token_groups(FORKS[kind], np.random.default_rng(0)):
            for record in group:
                total += len(record["input_ids"])
                if has_logprobs:
                    record["logprobs"] = -rng.exponential(size=len(record["input_ids"]))
                file.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
            if total >= num_tokens:
                return total
    raise AssertionError("the groups end")


def digest(folder: Path) -> str:
    """Return one hash of the names and the bytes of all files."""
    sha256 = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        sha256.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            sha256.update(hashlib.file_digest(file, "sha256").digest())
    return sha256.hexdigest()


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", default="10e6,100e6", help="flat tokens of the inputs")
    parser.add_argument("--kinds", default="heavy,little", help="kinds of inputs")
    parser.add_argument("--logprobs", default="10e6", help="flat tokens of the inputs with log-probabilities")
    parsed = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # Linux; the commands inherit it
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    cases = [(num_tokens, kind, False) for num_tokens in _numbers(parsed.tokens) for kind in parsed.kinds.split(",")]
    cases += [(num_tokens, "heavy", True) for num_tokens in _numbers(parsed.logprobs)]
    with Versions(parsed.before, parsed.folder, parsed.repeats) as versions:
        header()
        for num_tokens, kind, has_logprobs in cases:
            compare(versions, num_tokens, kind, has_logprobs=has_logprobs)


def compare(versions: Versions, num_tokens: float, kind: str, *, has_logprobs: bool) -> None:
    """Print a line of the table."""
    path = versions.folder / "rollouts.jsonl"
    total = make(path, kind, num_tokens, has_logprobs=has_logprobs)
    digests: set[str] = set()
    versions.compare(
        f"build-trie of {num_tokens / 1e6:.0f} M tokens of JSONL, {kind}" + has_logprobs * ", log-probabilities",
        treepack("build-trie", path, "--out", OUT, "--workers", 1),
        units=("tokens", total),
        inspect=lambda side, out: digests.add(digest(out)),
    )
    if len(digests) > 1:
        sys.exit("the versions wrote different bytes")
    path.unlink()


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


if __name__ == "__main__":
    main()
