"""Rollouts in files for the tests on a Ray cluster, and the content of the directories made of them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


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


def tables_of(read: Callable[[str], bytes]) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    """The manifest of a directory, and the rows of all its parts by the first word of their names."""
    manifest: dict[str, Any] = json.loads(read("manifest.json"))
    parts: dict[str, list[pa.Table]] = {}
    for entry in manifest["files"]:
        content = read(entry["name"])
        parts.setdefault(entry["name"].partition("-")[0], []).append(pq.read_table(io.BytesIO(content)))
    return manifest, {kind: pa.concat_tables(tables) for kind, tables in parts.items()}


def local_tables(directory: Path) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    return tables_of(lambda name: (directory / name).read_bytes())
