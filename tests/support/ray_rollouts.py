"""Rollouts in files for the tests on a Ray cluster."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def write_rollouts(folder: Path, *, num_files: int = 3, groups: int = 12) -> Path:
    """Write JSONL files: groups of eight rollouts over one system prompt, which branch off each other; some repeat."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    system = rng.integers(0, 1000, 40).tolist()
    for number in range(num_files):
        lines = []
        for group in range(groups):
            prompt = [*system, *rng.integers(0, 1000, 20).tolist()]
            last: list[int] = []
            for k in range(8):
                answer = last[: rng.integers(0, len(last) + 1)] + rng.integers(0, 1000, rng.integers(1, 90)).tolist()
                last = last if k == 5 else answer
                record = {
                    "id": f"{group}/{k}",  # the same ids in every file
                    "group_id": f"{number}/{group}",
                    "input_ids": prompt + last,
                    "loss_mask": [0] * len(prompt) + [1] * len(last),
                    "reward": float(k % 3 == 0),
                }
                lines.append(json.dumps(record) + "\n")
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return folder
