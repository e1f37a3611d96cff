"""Tries of made-up rollouts, as `benchmarks/reading.py` makes them: much sharing (heavy) or little.

Rollouts of 8,192 to 32,768 random tokens in groups of 16, with a mask and a reward. heavy: nine tokens in ten repeat an
earlier rollout of the group; little: one in ten.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import orjson

sys.path.insert(0, str(Path(__file__).parents[1]))

from reading import FORKS, token_groups

import treepack

KINDS = tuple(FORKS)


def make_trie(folder: Path, kind: str, num_tokens: int) -> Path:
    """Write the trie of rollouts that have at least `num_tokens` tokens together; return its directory."""
    rollouts, trie = folder / "rollouts.jsonl", folder / f"{kind}-{num_tokens}"
    done = 0
    with rollouts.open("wb") as file:
        for group in token_groups(FORKS[kind], np.random.default_rng(0)):
            for rollout in group:
                file.write(orjson.dumps(rollout, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
                done += len(rollout["input_ids"])
            if done >= num_tokens:
                break
    treepack.build_trie_directory([rollouts], trie)
    rollouts.unlink()
    return trie
