"""A batch in memory as rows of a tree: plan it once, use it for every pass of the model.

    padded, jagged or listed ids --plan_batch--> OnlineBatch --statistics--> values of each row
                                                             --scatter-----> values in the shape of the ids

The rows are `data.batch.Batch` with terms: one term for each scored token of each sequence. The log-probability of a
token that several sequences score is computed once, and `scatter` copies it to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treepack.columns import Values
from treepack.data.batch import Batch, TermTensors, route_tensor, scored_tokens
from treepack.errors import TreepackError
from treepack.online.options import DEFAULT_CAPACITY, OnlineOptions
from treepack.online.planning import SortedForest, plan_forest, sort_forest
from treepack.online.sequences import BatchForm, Flags, FlatSequences, Ids, read_sequences
from treepack.pack.placement import RowPlacer
from treepack.ragged import join_lists
from treepack.trajectory import Int64
from treepack.trie.nodes import paths


@dataclass(frozen=True)
class OnlineBatch:
    """The rows of a batch, and the places of the values of their tokens.

    Attributes:
        rows: the rows, by falling number of tokens. `trajectory_ids` are the indices of the sequences, as text.
        tokens_flat: tokens of all sequences.
        tokens_tree: tokens of their trie, the minimum of `num_tokens`.
        temperature: the temperature of all tokens; None if it is part of the terms of the rows.
        form: the form of the caller's batch.
        places: int64 [N], the place of each term of each row in the caller's flattened batch.
        max_token_id: the largest id of all sequences; -1 if they are empty.
    """

    rows: list[Batch]
    tokens_flat: int
    tokens_tree: int
    temperature: float | None
    form: BatchForm
    places: Tensor
    max_token_id: int

    @property
    def num_tokens(self) -> int:
        """Tokens that a pass of the model computes, without padding."""
        return sum(row.num_tokens for row in self.rows)

    def to(self, device: torch.device | str) -> OnlineBatch:
        """Return the same batch with its tensors on `device`."""
        return replace(self, rows=[row.to(device) for row in self.rows], places=self.places.to(device))

    def row_places(self, i: int) -> Tensor:
        """Return the place of each term of row i in the caller's flattened batch, int64 [N_i]."""
        counts = [len(_terms(row).index) for row in self.rows[: i + 1]]
        return self.places[sum(counts[:-1]) : sum(counts)]

    def scatter(self, values: Sequence[Tensor]) -> Any:
        """Return the values of all rows in the form of the caller's batch; differentiable.

        Args:
            values: of row i, [n_i], one for each of `rows[i].terms.tokens`. Values of padding rows, [0], may follow.

        Returns:
            a tensor [B, L], a nested tensor, or a list of tensors, on the device of the values; 0 for tokens that
            are not scored.

        Raises:
            TreepackError: if there are fewer values than rows, or a row has another number of values.
        """
        counts = [len(_terms(row).tokens) for row in self.rows]
        sizes = [len(each) for each in values]
        if sizes != counts + [0] * (len(sizes) - len(counts)):
            raise TreepackError(f"scatter: the values of the rows have the sizes {sizes}; expected {counts}")
        if not len(values):
            return self.form.restore(torch.zeros(self.form.size, device=self.places.device))
        joined = torch.cat(list(values))
        # Terms index the values of their row; sizes [2, 3] shift the indices of row 1 by 2: [0, 1], [2, 0] -> [0 1 4 2]
        shifts = np.cumsum([0, *counts]).tolist()
        parts = [_terms(row).index + shift for row, shift in zip(self.rows, shifts, strict=False)]
        index = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int32, device=joined.device)
        flat = joined.new_zeros(self.form.size)
        return self.form.restore(flat.scatter(0, self.places, joined.index_select(0, index)))


def _terms(row: Batch) -> TermTensors:
    assert row.terms is not None
    return row.terms


def plan_batch(
    input_ids: Ids,
    attention_mask: Flags = None,
    scored: Flags = None,
    options: OnlineOptions = OnlineOptions(),  # noqa: B008  a frozen value
    *,
    temperature: Any = 1.0,
    routes: Any = None,
    kept_ids: Any = None,
) -> OnlineBatch:
    """Plan the rows of a batch, on the CPU. No model is needed, and the same batch serves any number of passes.

    Sequences may be equal, empty, of one token, prefixes of others, or longer than the capacity.

    Args:
        input_ids: padded ids [B, L] with any padding, a jagged nested tensor, or a list of 1-D arrays; of torch or
            numpy, on any device.
        attention_mask: [B, L], not 0 at the tokens of padded ids; without it, every id is a token.
        scored: in the form of `input_ids`, True at each token whose log-probability is wanted; without it, all. The
            first token of a sequence has none, and its value is 0.
        options: how rows are planned.
        temperature: of the sampler: one number, one for each sequence [B], or one for each token in the form of
            `input_ids`.
        routes: experts that the sampler's routers chose, which the model uses again (`model.experts.replay`): integers
            [B, L, layers, k], a nested tensor [B, *, layers, k], or a list of [n, layers, k] with at most one row for
            each token, or None. `trajectory.as_routes` defines which are not recorded.
        kept_ids: token ids that the sampler's top-p, top-k or min-p left, and over which log-probabilities and
            entropies are then taken: for each sequence None, or a list of ids for each of its tokens, with the token
            itself; an empty list, or None, is the whole vocabulary. Lists of tokens that are not scored are ignored.

    Raises:
        TreepackError: an argument has another shape or type, or a value that cannot be used.
    """
    sequences = read_sequences(input_ids, attention_mask, scored, temperature, routes, kept_ids)
    forest = sort_forest(sequences, route_conflicts=options.route_conflicts)
    capacity = DEFAULT_CAPACITY if options.capacity is None else options.capacity
    maker = _RowMaker(sequences, forest)
    rows = [maker.row(i, members) for i, members in enumerate(plan_forest(forest, options, capacity))]
    places = np.concatenate(maker.places) if maker.places else np.zeros(0, np.int64)
    max_id = int(sequences.tokens.max(initial=-1))
    max_id = max_id if sequences.kept_ids is None else int(sequences.kept_ids.flat.max(initial=max_id))
    return OnlineBatch(
        rows=rows,
        tokens_flat=len(sequences.tokens),
        tokens_tree=len(forest.tokens),
        temperature=sequences.temperature if isinstance(sequences.temperature, float) else None,
        form=sequences.form,
        places=torch.from_numpy(places),
        max_token_id=max_id,
    )


class _RowMaker:
    """Make rows one after the other; `places` grows by the places of each row's terms."""

    def __init__(self, sequences: FlatSequences, forest: SortedForest) -> None:
        self.sequences, self.forest = sequences, forest
        self.placer = RowPlacer(forest)
        self.order = forest.order.tolist()
        self.starts = sequences.offsets.tolist()
        # Offsets [0, 2, 5], scored [1, 3, 4] -> the scored tokens of sequence 0 are scored[0:1], of sequence 1 [1:3].
        self.bounds = np.searchsorted(sequences.scored, sequences.offsets).tolist()
        self.places: list[Int64] = []

    def row(self, row_id: int, members: Int64) -> Batch:
        """Return the row of the sequences at the places `members` of the sorted order."""
        nodes = self.placer.place(members)
        columns = self.placer.columns(nodes, np.int64)
        length = int(nodes.begin[-1])
        ids = [self.order[k] for k in nodes.members.tolist()]
        token, at = [], []
        depth = self.forest.depth[nodes.nodes]
        for path, i in zip(paths(nodes.ends_at, nodes.begin, depth), ids, strict=True):
            mine = self.sequences.scored[self.bounds[i] : self.bounds[i + 1]]
            # Sequence 2 begins at 5 and is the row's tokens [0, 1, 7]: scored [6, 7] -> depths [1, 2] -> tokens [1, 7]
            token.append(path[mine - self.starts[i]])
            at.append(mine)
        counts = [len(each) for each in token]
        joined = np.concatenate(token)
        scored = scored_tokens(joined, length, self._laws(ids))
        num_terms = len(scored["index"])
        self.places.append(self.sequences.places[np.concatenate(at)])
        terms = TermTensors(
            **scored,
            trajectory=torch.from_numpy(np.repeat(np.arange(len(ids), dtype=np.int32), counts)),
            weight=torch.ones(num_terms, dtype=torch.float64),
            group=torch.arange(len(ids), dtype=torch.int32),
        )
        return Batch(
            row_id=row_id,
            step=None,
            input_ids=torch.from_numpy(columns["input_ids"]),
            position_ids=torch.from_numpy(columns["position_ids"]),
            parent=torch.from_numpy(columns["parent"]),
            subtree_end=torch.from_numpy(columns["subtree_end"]),
            scale=torch.from_numpy(columns["scale"]),
            loss_weight=torch.from_numpy(np.bincount(joined, minlength=length).astype(np.float64)),
            trajectory_ids=tuple(map(str, ids)),
            trajectory_ends=torch.from_numpy(columns["trajectory_ends"].astype(np.int64)),
            num_tokens=length,
            total_weight=float(num_terms),
            tokens_flat=int(columns["scale"].sum(dtype=np.int64)),
            terms=terms,
            routes=None if self.forest.routes is None else route_tensor(self.forest.routes[nodes.source]),
        )

    def _laws(self, ids: list[int]) -> dict[str, Values]:
        """Return the temperatures and kept sets of the scored tokens of sequences `ids`, if the caller gave some."""
        laws: dict[str, Values] = {}
        own = [slice(self.bounds[i], self.bounds[i + 1]) for i in ids]
        if not isinstance(temperature := self.sequences.temperature, float):
            laws["temperature"] = np.concatenate([temperature[each] for each in own])
        if (kept := self.sequences.kept_ids) is not None:
            laws["kept_ids"] = join_lists([kept[:0], *(kept[each] for each in own)])
        return laws
