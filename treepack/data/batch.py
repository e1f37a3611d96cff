"""One packed row as torch tensors: what the model and the loss read.

    Row (numpy columns) --make_batch--> Batch (tensors, padded) --.to(device)--> model, loss

Padding token i sees only itself and counts for nothing: `subtree_end = i + 1`, position 0, parent -1, weight 0.
`schedule` is what the model's attention prepared for the row (`model.placed`), if it has. `terms` are the row's
(trajectory, trained token) pairs, for objectives that need more than one weight per token (`objectives`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from treepack.errors import TreepackError

if TYPE_CHECKING:
    from treepack.pack.row import Row, RowTerms

_KINDS = {
    "input_ids": torch.int64,
    "position_ids": torch.int64,
    "parent": torch.int64,
    "subtree_end": torch.int32,
    "scale": torch.int32,
    "loss_weight": torch.float64,
}
_TERM_COLUMNS = ("trajectory", "weight", "advantage", "sampling_logprob", "old_logprob", "ref_logprob")


@dataclass(frozen=True)
class TermTensors:
    """The N terms of a row of K trajectories: one per (trajectory, trained token) pair.

    `tokens` int64 [n] are the row indices of all trained tokens, ascending, and `index` int32 [N] says which of them a
    term is about: log-probabilities are computed for `tokens` and gathered by `index`. trajectory int32 [N]; weight
    float64 [N]; advantage float64 [N]; the log-probabilities float32 [N]; group int32 [K], equal where trajectories of
    the row share a group; reward float64 [K]. What the directory does not hold is None, a missing value NaN.
    """

    tokens: Tensor
    index: Tensor
    trajectory: Tensor
    weight: Tensor
    advantage: Tensor | None
    sampling_logprob: Tensor | None
    old_logprob: Tensor | None
    ref_logprob: Tensor | None
    group: Tensor
    reward: Tensor | None

    def to(self, device: torch.device | str) -> TermTensors:
        """The same terms with their tensors on `device`."""
        return self._changed(lambda tensor: _moved(tensor, device))

    def pin_memory(self) -> TermTensors:
        """The same terms in memory that a GPU copies from while it works."""
        return self._changed(Tensor.pin_memory)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> TermTensors:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {name: None if value is None else change(value) for name, value in values.items()}
        return TermTensors(**changed)


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
    terms: TermTensors | None = None
    schedule: Any = None

    def to(self, device: torch.device | str) -> Batch:
        """The same row with its tensors on `device`; a schedule belongs to one device and stays behind."""
        terms = None if self.terms is None else self.terms.to(device)
        return self._changed(lambda tensor: _moved(tensor, device), terms)

    def pin_memory(self) -> Batch:
        """The same row in memory that a GPU copies from while it works; without its schedule."""
        return self._changed(Tensor.pin_memory, None if self.terms is None else self.terms.pin_memory())

    def _changed(self, change: Callable[[Tensor], Tensor], terms: TermTensors | None) -> Batch:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return Batch(**{**values, **changed, "terms": terms, "schedule": None})

    @property
    def targets(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the loss needs of the row: input_ids, parent and loss_weight."""
        return self.input_ids, self.parent, self.loss_weight


def _moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    return tensor.to(device, non_blocking=tensor.is_pinned())


def empty_batch(length: int, *, terms: bool = False) -> Batch:
    """A row of nothing but `length` padding tokens, for a rank that has no row left when others have one.

    With `terms`, it holds those of no trajectory.
    """
    columns: dict[str, Any] = {name: torch.zeros(length, dtype=kind) for name, kind in _KINDS.items()}
    columns["parent"] = torch.full((length,), -1)
    columns["subtree_end"] = torch.arange(1, length + 1, dtype=torch.int32)
    columns["trajectory_ends"] = torch.zeros(0, dtype=torch.int64)
    columns["terms"] = _no_terms() if terms else None
    return Batch(row_id=-1, step=None, trajectory_ids=(), num_tokens=0, total_weight=0.0, tokens_flat=0, **columns)


def _no_terms() -> TermTensors:
    kinds = {"tokens": torch.int64, "index": torch.int32, "trajectory": torch.int32, "group": torch.int32}
    kinds |= {"weight": torch.float64, "advantage": torch.float64, "reward": torch.float64}
    return TermTensors(
        **{field.name: torch.zeros(0, dtype=kinds.get(field.name, torch.float32)) for field in fields(TermTensors)}
    )


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
        terms=None if row.terms is None else _make_terms(row.terms, row.trajectory_groups, length),
        **tensors,
    )


def _make_terms(terms: RowTerms, groups: list[str], length: int) -> TermTensors:
    trained = np.zeros(length, bool)
    trained[terms.token] = True
    place = np.cumsum(trained, dtype=np.int32) - np.int32(1)
    codes = {name: code for code, name in enumerate(dict.fromkeys(groups))}
    columns: dict[str, Any] = {
        name: None if (values := getattr(terms, column)) is None else torch.tensor(values)
        for name, column in {**{name: name for name in _TERM_COLUMNS}, "reward": "trajectory_rewards"}.items()
    }
    return TermTensors(
        tokens=torch.from_numpy(np.flatnonzero(trained)),
        index=torch.from_numpy(place[terms.token]),
        group=torch.tensor([codes[name] for name in groups], dtype=torch.int32),
        **columns,
    )
