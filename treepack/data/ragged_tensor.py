"""Lists of numbers of different lengths as two tensors, with the operations that columns of terms need.

lists [5 7] [] [9]   ->   values 5 7 9   offsets 0 2 2 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from treepack.ragged import RaggedArray


@dataclass(frozen=True, eq=False)
class RaggedTensor:
    """n lists: list i is `values[offsets[i]:offsets[i + 1]]`; offsets are int64 [n + 1] and begin with 0."""

    values: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, lists: RaggedArray) -> RaggedTensor:
        """Return a copy of `lists`."""
        return cls(torch.tensor(lists.flat), torch.tensor(lists.offsets - lists.offsets[0]))

    @classmethod
    def empty(cls, num: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> RaggedTensor:
        """Return `num` lists without numbers."""
        return cls(torch.zeros(0, dtype=dtype, device=device), torch.zeros(num + 1, dtype=torch.int64, device=device))

    @property
    def sizes(self) -> Tensor:
        """Numbers of each list, int64 [n]."""
        return self.offsets.diff()

    @property
    def owners(self) -> Tensor:
        """The list of each of `values`, int64 [total], ascending."""
        places = torch.arange(len(self), device=self.offsets.device)
        return torch.repeat_interleave(places, self.sizes, output_size=len(self.values))

    def __len__(self) -> int:
        """Return the number of lists."""
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice | Tensor) -> RaggedTensor:
        """Return the lists of a slice of step 1, or of an integer tensor of indices; waits for a GPU."""
        if isinstance(rows, slice):
            begin, end, _ = rows.indices(len(self))
            offsets = self.offsets[begin : max(begin, end) + 1]
            return RaggedTensor(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
        rows = rows.to(self.offsets.device)
        lists = RaggedTensor(self.values, torch.nn.functional.pad(self.sizes[rows].cumsum(0), (1, 0)))
        starts = self.offsets[:-1][rows] - lists.offsets[:-1]
        # Lists of [2, 0, 1] numbers, rows [2, 0] -> starts [2, 0] - [0, 1], offsets [0, 1, 3] -> places [2] and [0, 1].
        sizes, total = lists.sizes, int(lists.offsets[-1])
        places = torch.repeat_interleave(starts, sizes, output_size=total) + torch.arange(total, device=starts.device)
        return RaggedTensor(self.values[places], lists.offsets)

    def split(self, size: int) -> list[RaggedTensor | None]:
        """Return the lists in parts of `size` lists, None for a part without numbers; waits for a GPU once."""
        edges = [*range(0, len(self), size), len(self)]
        cuts = self.offsets[edges].tolist()
        return [
            RaggedTensor(self.values[low:high], self.offsets[begin : end + 1] - low) if low < high else None
            for (begin, end), (low, high) in zip(pairwise(edges), pairwise(cuts), strict=True)
        ]

    def index_select(self, dim: int, rows: Tensor) -> RaggedTensor:
        """Return the lists `rows`, as `Tensor.index_select` does; `dim` is 0."""
        assert dim == 0, "lists have one dimension"
        return self[rows]

    def map(self, change: Callable[[Tensor], Tensor]) -> RaggedTensor:
        """Return the lists with both tensors changed, for example moved."""
        return RaggedTensor(change(self.values), change(self.offsets))


def join_ragged(parts: Sequence[RaggedTensor]) -> RaggedTensor:
    """Concatenate `parts`, at least one."""
    sizes = torch.cat([part.sizes for part in parts])
    return RaggedTensor(torch.cat([part.values for part in parts]), torch.nn.functional.pad(sizes.cumsum(0), (1, 0)))
