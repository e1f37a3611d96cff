"""Rows for benchmarks of training: trees of random tokens, rows of packed directories, and their sequences one by one.

    python benchmarks/training_rows.py PACKED ROWS.npz [--rows N]

writes rows of a packed directory, spread evenly over the number of trajectories through a token, to a file that
machines without pyarrow can read. Everything else here needs only numpy and torch.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from workloads import Int64, Workload

from treepack.costs.model_cost import FlopCount
from treepack.data.batch import Batch

Weights = np.ndarray[Any, np.dtype[np.float64]]

_COLUMNS = ("ids", "subtree_end", "ends", "weight")  # of each row, in this order


def parents_of(subtree_end: Int64) -> Int64:
    """`parent` [T] of a row, -1 at its roots."""
    parent, path = np.full(len(subtree_end), -1), list[int]()
    for token, end in enumerate(subtree_end.tolist()):
        while path and subtree_end[path[-1]] <= token:
            path.pop()
        parent[token] = path[-1] if path else -1
        if end > token + 1:
            path.append(token)
    return parent


def make_row(row_id: int, ids: Int64, subtree_end: Int64, ends: Int64, weight: Int64 | None = None) -> Batch:
    """A row whose every token that has a parent is trained, once for each trajectory through it."""
    parent = parents_of(subtree_end)
    scale, position = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
    np.add.at(scale, ends, 1)
    for token in range(len(ids) - 1, -1, -1):
        if parent[token] >= 0:
            scale[parent[token]] += scale[token]
    for token in range(len(ids)):
        position[token] = position[parent[token]] + 1 if parent[token] >= 0 else 0
    trained = (parent >= 0) if weight is None else weight > 0
    weights = torch.from_numpy(np.where(trained, scale, 0)).double()
    return Batch(
        row_id=row_id,
        step=None,
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(position),
        parent=torch.from_numpy(parent),
        subtree_end=torch.from_numpy(subtree_end).int(),
        scale=torch.from_numpy(scale).int(),
        loss_weight=weights,
        trajectory_ids=tuple(map(str, ends)),
        trajectory_ends=torch.from_numpy(ends),
        num_tokens=len(ids),
        total_weight=float(weights.sum()),
        tokens_flat=int(scale.sum()),
    )


def tree_rows(workload: Workload, vocabulary: int) -> list[Batch]:
    """The workload as one row of random tokens."""
    ids = np.random.default_rng(0).integers(0, vocabulary, workload.tokens)
    ends = np.flatnonzero(workload.subtree_end == np.arange(1, workload.tokens + 1))
    return [make_row(0, ids, workload.subtree_end, ends)]


def flat_rows(rows: list[Batch], most: int) -> list[Batch]:
    """Every trajectory as a sequence of its own, sequences end to end in rows of at most `most` tokens."""
    sequences = []
    for row in rows:
        parent, trained = row.parent.numpy(), row.loss_weight.numpy() > 0
        for end in row.trajectory_ends.tolist():
            path = []
            while end >= 0:
                path.append(end)
                end = parent[end]
            at = np.array(path[::-1])
            sequences.append((row.input_ids.numpy()[at], trained[at].astype(np.float64)))
    return join_sequences(sequences, most)


def join_sequences(sequences: list[tuple[Int64, Weights]], most: int) -> list[Batch]:
    """Sequences end to end in rows of at most `most` tokens; each has ids, and the weight of each token in the loss."""
    parts: list[list[tuple[Int64, Weights]]] = []
    part: list[tuple[Int64, Weights]] = []
    size = 0
    for sequence in sorted(sequences, key=lambda sequence: -len(sequence[0])):
        if part and size + len(sequence[0]) > most:
            parts.append(part)
            part, size = [], 0
        part.append(sequence)
        size += len(sequence[0])
    parts.append(part)
    made = []
    for number, part in enumerate(parts):
        ends = np.cumsum([len(ids) for ids, _ in part])
        subtree_end = np.repeat(ends, [len(ids) for ids, _ in part])
        ids, weight = (np.concatenate(columns) for columns in zip(*part, strict=True))
        row, weights = make_row(number, ids, subtree_end, ends - 1), torch.from_numpy(weight).double()
        made.append(replace(row, loss_weight=weights, total_weight=float(weights.sum())))
    return made


def count_work(rows: list[Batch]) -> FlopCount:
    """Return tokens, score pairs and targets of rows of trees or of separate sequences."""
    pairs = sum(int((row.position_ids + 1).sum()) for row in rows)
    targets = sum(int((row.loss_weight > 0).sum()) for row in rows)
    return FlopCount(sum(row.num_tokens for row in rows), pairs, targets)


def save_rows(packed: Path, count: int, out: Path) -> list[int]:
    """Write `count` rows of a packed directory to a file of numpy; return their numbers."""
    from treepack.data.dataset import PackedDataset

    dataset = PackedDataset(packed)
    rows = sorted((dataset[i] for i in range(len(dataset))), key=lambda row: row.tokens_flat / row.num_tokens)
    chosen = [rows[i] for i in np.unique((np.arange(count) + 0.5) * len(rows) // count).astype(int)]
    columns = [(row.input_ids, row.subtree_end, row.trajectory_ends, row.loss_weight) for row in chosen]
    arrays = {
        f"{name}_{i}": values.numpy()
        for i, each in enumerate(columns)
        for name, values in zip(_COLUMNS, each, strict=True)
    }
    np.savez_compressed(out, **arrays)
    return [row.row_id for row in chosen]


def load_rows(path: Path) -> list[Batch]:
    """Return the rows in a file of `save_rows`."""
    return [make_row(i, *columns) for i, columns in enumerate(load_columns(path))]


def load_columns(path: Path) -> list[tuple[Int64, Int64, Int64, Int64]]:
    """Return ids, subtree_end, ends and weight of the rows in a file of `save_rows`; the weights keep their type."""
    with np.load(path) as arrays:
        columns = [[arrays[f"{name}_{i}"] for name in _COLUMNS] for i in range(len(arrays) // len(_COLUMNS))]
    return [
        (ids.astype(np.int64), end.astype(np.int64), ends.astype(np.int64), weight)
        for ids, end, ends, weight in columns
    ]


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=1)
    options = parser.parse_args()
    print(f"rows {save_rows(options.packed, options.rows, options.out)} in {options.out}")


if __name__ == "__main__":
    main()
