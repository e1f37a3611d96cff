"""Planners of micro-batches for TRL's AsyncGRPOTrainer: rows of samples that share prefixes, in any order of arrival.

    sample dicts of a queue --TreePlanner--> [row of rank 0, row of rank 1, ...]   like TRL's TokenBudgetBatcher

A planner collects a window of samples, sorts them by their tokens, and cuts the sorted list into rows, so that samples
with a common prefix are neighbours whatever their order of arrival was. TRL's own attention and loss compute the rows:
the result of `PlannedRow.pack` equals that of `TreeRow.pack` for the same samples.

In TRL's layout two samples share a token only if they also agree on the next one, so each further branch costs one more
token than in the rows of `treepack pack`:

    samples 1 2 3 and 1 2 4        1 - 2 - 3         the last token shared is 1, because 2 is
                                     \\ 2 - 4         followed by 3 in one sample, by 4 in the other
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from treepack.errors import TreepackError
from treepack.integrations.versions import check_program, installed_version
from treepack.pack.plan.cuts import best_starts, costs_in_order, range_measure, ranges_of
from treepack.pack.plan.problem import path_pairs
from treepack.trie.nodes import sort_sequences

_Sample = dict[str, Any]
_log = logging.getLogger("treepack")
_WINDOW = 64  # samples planned together: eight groups of eight


@dataclass(frozen=True)
class PlannedRow:
    """Samples of one rank's forward pass, sorted by their tokens; TRL's collator reads every attribute and `pack`.

    `shared` is the number of leading tokens that each sample has in common with the sample before it, 0 for the first.
    """

    samples: list[_Sample]
    shared: list[int]

    @cached_property
    def _sequences(self) -> list[np.ndarray]:
        return [_tokens(sample) for sample in self.samples]

    @cached_property
    def tokens(self) -> np.ndarray:
        """The tokens to compute, int64 [N]."""
        return np.concatenate([ids[n:] for ids, n in zip(self._sequences, self.shared, strict=True)])

    @property
    def load(self) -> int:
        """The number of (token, visible token) pairs, which is the cost of attention."""
        # Tokens at depths n .. length - 1 see depth + 1 tokens each.
        lengths, shared = np.array([len(ids) for ids in self._sequences]), np.array(self.shared)
        return int((path_pairs(lengths) - path_pairs(shared)).sum())

    def pack(self) -> dict[str, torch.Tensor]:
        """Return the row as TRL's collator expects it; see `TreeRow.pack` of trl for the keys and shapes."""
        sequences, shared = self._sequences, self.shared
        lengths = [len(ids) for ids in sequences]
        starts = np.cumsum([0, *(length - n for length, n in zip(lengths, shared, strict=True))])
        paths, path = [], np.zeros(0, np.int64)
        is_end = np.zeros(starts[-1], bool)  # last token of a segment: no child, or several
        for i, (length, n) in enumerate(zip(lengths, shared, strict=True)):
            if n and length > n:
                is_end[path[n - 1]] = True
            # Samples 1 2 3 and 1 2 4 share 1 token: paths [0, 1, 2] and [0] + [3, 4]
            path = np.concatenate([path[:n], np.arange(starts[i], starts[i] + length - n)])
            is_end[path[-1]] = True
            paths.append(path)
        positions = np.concatenate([np.arange(n, length) for length, n in zip(lengths, shared, strict=True)])
        ends = np.flatnonzero(is_end)
        offsets = np.concatenate([[0], ends + 1])
        # A segment attends to the path from the root to its own end. Its tokens are new in sample `owner`.
        owner = np.searchsorted(starts, ends, side="right") - 1
        visible = [paths[i][: positions[end] + 1] for i, end in zip(owner, ends, strict=True)]
        return {
            "input_ids": torch.from_numpy(self.tokens),
            "position_ids": torch.from_numpy(positions),
            "tree_kv_index": torch.from_numpy(np.concatenate(visible)),
            "tree_cu_seqlens_q": torch.from_numpy(offsets.astype(np.int32)),
            "tree_cu_seqlens_k": torch.from_numpy(np.cumsum([0, *map(len, visible)], dtype=np.int32)),
            "tree_max_seqlens": torch.tensor([int(np.diff(offsets).max()), max(map(len, visible))]),
            **self._terms(paths),
        }

    def _terms(self, paths: list[np.ndarray]) -> dict[str, torch.Tensor]:
        """Return the loss terms of all samples: one for each trained token, at the token that predicts it."""
        labels = np.full(len(self.tokens), -100, np.int64)
        columns: dict[str, list[np.ndarray]] = {
            name: [] for name in ("token_index", "old_log_probs", "advantages", "segment_id")
        }
        for i, (sample, ids, path) in enumerate(zip(self.samples, self._sequences, paths, strict=True)):
            # completion_mask [0, 1, 1] -> chosen [1, 2], predicted at path[0] and path[1]
            chosen = np.flatnonzero(np.asarray(sample["completion_mask"])[1:]) + 1
            sources = path[chosen - 1]
            labels[sources] = ids[chosen]
            columns["token_index"].append(sources)
            columns["old_log_probs"].append(np.asarray(sample["old_log_probs"], np.float32)[chosen])
            columns["advantages"].append(np.full(len(chosen), sample["advantage"], np.float32))
            columns["segment_id"].append(np.full(len(chosen), i, np.int64))
        terms = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}
        return {"shift_labels": torch.from_numpy(labels), **terms}


class TreePlanner(IterableDataset):  # type: ignore[type-arg]
    """Micro-batches of rows of at most `token_budget` tokens, one row for each rank, in place of `TokenBudgetBatcher`.

    As in TRL, a row has at most `token_budget` tokens to compute and at most as many trained tokens, and longer samples
    are dropped with a warning. The rows of one micro-batch have similar loads, and none is empty. Within a window of
    samples, the result does not depend on their order.

    Args:
        dataset: iterable of TRL's sample dicts.
        num_processes: ranks, which is the number of rows of a micro-batch.
        token_budget: maximum number of tokens of a row.
        metrics: TRL's lists of metrics; dropped samples are counted there.
        window: samples that are planned together. More samples share more, and wait longer.
    """

    def __init__(
        self,
        dataset: Iterable[_Sample],
        num_processes: int,
        token_budget: int,
        metrics: dict[str, list[Any]],
        *,
        window: int = _WINDOW,
    ) -> None:
        _check_trl("TreePlanner")
        if window < num_processes:
            raise TreepackError(
                f"TreePlanner: window is {window} for {num_processes} processes; expected at least one sample for each"
            )
        self.dataset, self.num_processes, self.token_budget = dataset, num_processes, token_budget
        self.metrics, self.window = metrics, window

    def __iter__(self) -> Iterator[list[PlannedRow]]:
        """Yield one list of `num_processes` rows for each micro-batch."""
        waiting: list[_Sample] = []
        for sample in self.dataset:
            if len(sample["input_ids"]) > self.token_budget:
                _log.warning(
                    "dropping a sample of %d tokens; raise token_budget, which is %d",
                    len(sample["input_ids"]),
                    self.token_budget,
                )
                self.metrics["batch/dropped_oversize_total"].append(1.0)
                continue
            waiting.append(sample)
            if len(waiting) >= self.window:
                micro_batches, waiting = self._plan(waiting)
                yield from micro_batches
        micro_batches, waiting = self._plan(waiting)
        yield from micro_batches
        if waiting:
            _log.warning("not training the last samples, %d, because they do not fill all ranks", len(waiting))

    def _plan(self, samples: list[_Sample]) -> tuple[list[list[PlannedRow]], list[_Sample]]:
        """Return micro-batches, and the samples of the rows that are too few for another one."""
        ordered, shared = sort_samples(samples)
        rows, ranks = _fill_sample_rows(ordered, shared, self.token_budget), self.num_processes
        # 7 rows for 4 ranks -> 8 rows, if there are 8 samples or more
        rows = _split(rows, min(len(samples), -(-len(rows) // ranks) * ranks))
        # Ranks wait for the slowest one, so rows of similar loads go together.
        rows.sort(key=lambda row: -row.load)
        full = len(rows) // ranks * ranks
        micro_batches = [rows[start : start + ranks] for start in range(0, full, ranks)]
        return micro_batches, [sample for row in rows[full:] for sample in row.samples]


def _check_trl(planner: str) -> None:
    """Refuse another version of trl, in which other classes than the planned ones may make micro-batches.

    Raises:
        TreepackError: naming the version, and the class that it lacks.
    """
    if installed_version("trl") is None:
        return
    try:
        module = importlib.import_module("trl.experimental.async_grpo")
    except ImportError:
        module = importlib.import_module("trl")
    names = ("packing.TreeRow", "async_grpo_trainer.TokenBudgetBatcher")
    check_program("trl", module, names, user=planner)


def sort_samples(samples: Sequence[_Sample]) -> tuple[list[_Sample], list[int]]:
    """Return the samples sorted by their tokens, and the number of tokens that each shares with the one before it."""
    sequences = [_tokens(sample) for sample in samples]
    tokens = np.concatenate([np.zeros(0, np.int32), *sequences]).astype(np.int32)
    order, shared_tokens = sort_sequences(tokens, np.cumsum([0, *map(len, sequences)]))
    shared = list(shared_tokens)
    for k in range(1, len(order)):
        # Samples 1 2 3 and 1 2 4 have 2 tokens in common and share 1, because the second is followed by another token.
        if not shared[k] == len(sequences[order[k - 1]]) == len(sequences[order[k]]):
            shared[k] = max(shared[k] - 1, 0)
    return [samples[i] for i in order], shared


def _fill_sample_rows(samples: list[_Sample], shared: list[int], budget: int) -> list[PlannedRow]:
    """Cut sorted samples into the minimum of rows, and with these into the minimum of tokens.

    Args:
        samples: sorted, none longer than the budget.
        shared: the number of tokens that each sample shares with the one before it.
        budget: maximum number of tokens of a row, and of its trained tokens.
    """
    again = np.array(shared, np.int64)
    lengths = np.array([len(_tokens(sample)) for sample in samples], np.int64)
    trained = np.array([int(np.asarray(sample["completion_mask"]).sum()) for sample in samples], np.int64)
    measures = [range_measure(lengths, again, budget), range_measure(trained, np.zeros_like(again), budget)]
    return _rows(samples, shared, best_starts(measures, costs_in_order([1] * len(samples), shared)))


def _split(rows: list[PlannedRow], count: int) -> list[PlannedRow]:
    """Halve the row of several samples with the largest load, until there are `count` rows."""
    rows = list(rows)
    while len(rows) < count:
        i = max((i for i, row in enumerate(rows) if len(row.samples) > 1), key=lambda i: rows[i].load)
        samples, shared = rows[i].samples, rows[i].shared
        middle = len(samples) // 2
        rows[i : i + 1] = [_row(samples, shared, 0, middle), _row(samples, shared, middle, len(samples))]
    return rows


def _row(samples: list[_Sample], shared: list[int], start: int, stop: int) -> PlannedRow:
    return PlannedRow(samples[start:stop], [0, *shared[start + 1 : stop]])


def _rows(samples: list[_Sample], shared: list[int], starts: list[int]) -> list[PlannedRow]:
    return [_row(samples, shared, a, b) for a, b in ranges_of(starts, len(samples))]


def _tokens(sample: _Sample) -> np.ndarray:
    return np.asarray(sample["input_ids"], np.int64)
