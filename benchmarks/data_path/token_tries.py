"""Tries of made-up rollouts, as `benchmarks/reading.py` makes them: much sharing (heavy) or little.

Rollouts of 8,192 to 32,768 random tokens in groups of 16, with a mask and a reward. heavy: nine tokens in ten repeat an
earlier rollout of the group; little: one in ten.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from reading import FORKS, write_rollouts

import treepack

KINDS = tuple(FORKS)


def make_trie(folder: Path, kind: str, num_tokens: int) -> Path:
    """Write the trie of rollouts that have at least `num_tokens` tokens together; return its directory."""
    rollouts, trie = folder / "rollouts.jsonl", folder / f"{kind}-{num_tokens}"
    write_rollouts(rollouts, kind, num_tokens)
    treepack.build_trie_directory([rollouts], trie)
    rollouts.unlink()
    return trie
