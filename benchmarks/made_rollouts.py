"""JSONL of made-up rollouts: 8,192 to 32,768 random tokens in groups of 16, with a mask and a reward.

Each rollout except the first of a group branches off an earlier one: at 92 to 100 % of its length (heavy: about nine
tokens in ten are repeats) or at 0 to 20 % (little: one in ten).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from treepack.trajectory import Int32

GROUP = 16
LENGTHS = (1 << 13, 1 << 15)
VOCABULARY = 150_000
FORKS = {"heavy": (0.92, 1.0), "little": (0.0, 0.2)}


def token_groups(forks: tuple[float, float], rng: np.random.Generator) -> Iterator[list[dict[str, Any]]]:
    """Groups of token records without end."""
    number = 0
    while True:
        length = int(rng.integers(*LENGTHS))
        family: list[Int32] = []
        for _ in range(GROUP):
            old = family[rng.integers(len(family))] if family else np.zeros(0, np.int32)
            kept = old[: int(len(old) * rng.uniform(*forks))]
            fresh = max(1, length - len(kept) + int(rng.integers(-200, 200)))
            family.append(np.concatenate([kept, rng.integers(0, VOCABULARY, fresh, dtype=np.int32)]))
        yield [
            {
                "id": f"{number}-{i}",
                "group_id": number,
                "reward": float(i % 2),
                "input_ids": ids,
                "loss_mask": (np.arange(len(ids)) >= len(ids) // 4).astype(np.uint8),
            }
            for i, ids in enumerate(family)
        ]
        number += 1


def write_rollouts(path: Path, kind: str, num_tokens: int) -> None:
    """Write whole groups of token records that have at least `num_tokens` tokens together."""
    done = 0
    with path.open("wb") as file:
        for group in token_groups(FORKS[kind], np.random.default_rng(0)):
            for record in group:
                file.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
                done += len(record["input_ids"])
            if done >= num_tokens:
                return
