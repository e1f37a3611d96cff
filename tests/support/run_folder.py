"""Directories of training runs for tests, written as the trainer writes them, without training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support.oracle_model import packed_directory
from support.paths import SAMPLE_DATA
from treepack.files.manifest import read_manifest
from treepack.tokenise.tokenization import fingerprint, load_tokenizer
from treepack.trajectory import Trajectory

TOKENIZER = SAMPLE_DATA / "tokenizer"
OPTIONS: dict[str, Any] = {"steps": None, "epochs": 1, "rows_per_step": 1, "seed": 0, "lr": 1e-3}


def step_record(step: int, **more: Any) -> dict[str, Any]:
    """Return the record of a line of metrics.jsonl, as the trainer writes it."""
    common = {"step": step, "epoch": 0, "loss": 2 / step, "lr": 1e-5 * step, "grad_norm": 1.5, "num_rows": 8}
    sums = {"tokens": 1000, "tokens_flat": 5000, "total_weight": 300.0, "seconds": 0.5, "wait_seconds": 0.01}
    speeds = {"tokens_per_second": 2000.0, "tokens_flat_per_second": 10000.0, "skipped_rows": []}
    return {**common, **sums, **speeds, **more}


def write_lines(folder: Path, records: Iterable[dict[str, Any]], *, mode: str = "w") -> None:
    """Write lines of metrics.jsonl; "a" appends."""
    with (folder / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def run_folder(folder: Path, *, packed: Path | None = None, options: dict[str, Any] | None = None) -> Path:
    """Return the directory of a run of the rows in `packed` without a step; run.json names the rows."""
    folder.mkdir()
    record: dict[str, Any] = {"format": "treepack-train", "version": 2, "model": "tiny.json"}
    record |= {"options": OPTIONS | (options or {}), "chosen": {"pass_tokens": 4096}}
    if packed is not None:
        hashes = "".join(entry["sha256"] for entry in read_manifest(packed)["files"])
        record |= {"packed": str(packed), "packed_sha256": hashlib.sha256(hashes.encode()).hexdigest()}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").touch()
    return folder


def packed_text(path: Path, rollouts: Iterable[Trajectory], *, capacity: int) -> Path:
    """Return a packed directory of rollouts that the tokenizer of the samples has made."""
    tokenizer = fingerprint(load_tokenizer(str(TOKENIZER)))
    return packed_directory(path, [*rollouts], capacity=capacity, tokenizer=tokenizer)
