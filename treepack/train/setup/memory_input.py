"""Input of the choices of memory: rows, model and options of a run."""

from __future__ import annotations

from dataclasses import dataclass

from treepack.data.mixture import AnyDataset
from treepack.model.loaded import LoadedModel
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks
from treepack.train.setup.compute import ComputeSetting
from treepack.train.setup.run_data import RunData


@dataclass(frozen=True)
class MemoryInput:
    """A run before its memory is planned; options may still be "auto"."""

    data: RunData
    held_out: RunData | None
    loaded: LoadedModel
    options: TrainOptions
    compute: ComputeSetting
    ranks: Ranks

    @property
    def datasets(self) -> list[AnyDataset]:
        """The rows of the run, and the held-out rows."""
        return [each.dataset for each in (self.data, self.held_out) if each is not None]

    @property
    def longest_of_all(self) -> int:
        """Tokens of the longest row, whether it is trained, held out or left out."""
        return max(int(each.num_tokens.max()) for each in self.datasets)

    @property
    def largest_step(self) -> int:
        """Tokens of the largest step of a rank, held-out rows included: no pass is usefully longer."""
        largest = max(each.largest_step for each in (self.data, self.held_out) if each is not None)
        return -(-largest // self.ranks.size)
