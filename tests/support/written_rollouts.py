"""Rollouts written as files for tests of commands."""

from __future__ import annotations

import json
from pathlib import Path


def write_rollouts(path: Path, *, num: int = 6) -> Path:
    lines = [
        {"id": f"r{i}", "group_id": i // 3, "reward": i % 2, "input_ids": [5, 6, 7, i, i], "loss_mask": [0, 0, 1, 1, 1]}
        for i in range(num)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
