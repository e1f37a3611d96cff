"""Input of the plan of memory: rows, model and options of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treepack.carry.pieces import align
from treepack.data.batch import Batch
from treepack.data.mixture import AnyDataset
from treepack.fit.climb import RunRows
from treepack.memory.device_memory import MemoryMeter
from treepack.model.experts.active import num_weights
from treepack.model.loaded import LoadedModel
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks
from treepack.train.run import row_operations
from treepack.train.setup.compute import ComputeSetting
from treepack.train.setup.run_data import RunData


@dataclass(frozen=True)
class MemoryInput:
    """A run before its memory is planned; options may still be "auto". Without a `meter` nothing is measured.

    `recorded` has the measurements of the run that this one continues.
    """

    data: RunData
    held_out: RunData | None
    loaded: LoadedModel
    options: TrainOptions
    compute: ComputeSetting
    ranks: Ranks
    meter: MemoryMeter | None = None
    recorded: Mapping[str, Any] = field(default_factory=dict)

    @property
    def datasets(self) -> list[AnyDataset]:
        """The rows of the run, and the held-out rows."""
        return [each.dataset for each in (self.data, self.held_out) if each is not None]

    @property
    def tokens(self) -> float:
        """Tokens of the whole run on this rank and the ranks that share its rows."""
        counts = self.data.dataset.num_tokens
        return sum(float(counts[step.rows].sum()) for step in self.data.schedule) / self.ranks.row_share[1]

    def longest_batch(self) -> Batch:
        """Read the longest row of all."""
        dataset = max(self.datasets, key=lambda each: int(each.num_tokens.max()))
        return dataset[int(dataset.num_tokens.argmax())]

    def rows(self) -> RunRows:
        """Return the numbers of the rows that the plan reads."""
        longest = max(int(each.num_tokens.max()) for each in self.datasets)
        steps = max(each.largest_step for each in (self.data, self.held_out) if each is not None)
        linear, pairs = row_operations(self.loaded, self.data.dataset)
        head = self.loaded.causal.get_output_embeddings()  # a model's layers do not have it, and a probe runs it
        if head is not None:
            linear = linear + 2.0 * num_weights(head.weight) * self.data.dataset.num_tokens
        return RunRows(
            longest=align(self.data.longest_row),
            longest_of_all=longest,
            step_tokens=-(-steps // self.ranks.row_share[1]),
            attention=float(np.sum(pairs) / max(1.0, np.sum(linear))),
        )
