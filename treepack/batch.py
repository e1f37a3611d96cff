"""One packed row as torch tensors: what the model and the loss read.

    Row (numpy columns) --make_batch--> Batch (tensors, padded) --.to(device)--> model, loss

Padding token i sees only itself and counts for nothing: `subtree_end = i + 1`, position 0, parent -1, weight 0.
`schedule` is what the model's attention prepared for the row (`model.placed`), if it has.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from treepack.errors import TreepackError

if TYPE_CHECKING:
    from treepack.pack import Row

_KINDS = {
    "input_ids": torch.int64,
    "position_ids": torch.int64,
    "parent": torch.int64,
    "subtree_end": torch.int32,
    "scale": torch.int32,
    "loss_weight": torch.float64,
}


@dataclass(frozen=True)
class Batch:
    """One packed row of T tokens, of which the first `num_tokens` are no padding.

    input_ids, position_ids and parent are int64 [T]; subtree_end and scale int32 [T]; loss_weight float64 [T];
    trajectory_ends int64 [num_trajectories]. `tokens_flat` is what its trajectories hold one by one.
    """

    row_id: int
    step: int | None
    input_ids: Tensor
    position_ids: Tensor
    parent: Tensor
    subtree_end: Tensor
    scale: Tensor
    loss_weight: Tensor
    trajectory_ids: tuple[str, ...]
    trajectory_ends: Tensor
    num_tokens: int
    total_weight: float
    tokens_flat: int
    schedule: Any = None

    def to(self, device: torch.device | str) -> Batch:
        """The same row with its tensors on `device`; a schedule belongs to one device and stays behind."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return Batch(**{**values, **moved, "schedule": None})

    @property
    def targets(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the loss needs of the row: input_ids, parent and loss_weight."""
        return self.input_ids, self.parent, self.loss_weight


def make_batch(row: Row, *, multiple: int = 1) -> Batch:
    """A `Batch` from one packed row, padded to a multiple of `multiple` tokens.

    Raises:
        TreepackError: if its token columns differ in length.
    """
    length = len(row.input_ids)
    padding = -length % multiple
    fill = {"parent": np.array(-1), "subtree_end": np.arange(length + 1, length + padding + 1)}
    tensors = {}
    for name, kind in _KINDS.items():
        column = getattr(row, name)
        if column.shape != (length,):
            raise TreepackError(
                f"row {row.row_id}: {name} has {column.size} entries for {length} tokens; pack the trie again"
            )
        tail = np.broadcast_to(fill.get(name, np.array(0)), padding).astype(column.dtype)
        tensors[name] = torch.from_numpy(np.concatenate([column, tail])).to(kind)
    return Batch(
        row_id=row.row_id,
        step=row.step,
        trajectory_ids=tuple(row.trajectory_ids),
        trajectory_ends=torch.from_numpy(row.trajectory_ends.astype(np.int64)),
        num_tokens=length,
        total_weight=float(row.loss_weight.sum()),
        tokens_flat=int(row.scale.sum()),
        **tensors,
    )
