"""Several rows one after the other as one batch, so that a model computes them in one pass.

    [Batch, ...] --join_rows--> Batch with `edges`     terms_of_row(batch, i) -> the terms of row i alone

A row is a forest, and so are several rows: no token sees a token of other rows, so the joined batch has the numbers of
its rows. `edges` are the starts of the rows, so that losses are known row by row.

    rows of 3 and 2 tokens    parent -1 0 0 | -1 0  ->  -1 0 0 -1 3      subtree_end 3 2 3 | 2 2  ->  3 2 3 5 5
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from treepack.columns import LAWS, Column, Lists
from treepack.costs import limits
from treepack.data.batch import (
    Batch,
    RowEdges,
    TermTensors,
    empty_batch,
    is_route_recorded,
    missing_expert,
    select_terms,
)
from treepack.data.ragged_tensor import RaggedTensor, join_ragged
from treepack.data.teacher_law import TeacherLaw, concatenate_laws

# On a CPU, where launches cost nothing beside the products and attention is dense, rows stay alone.
GPU_PASS, CPU_PASS = limits.PASS_TOKENS, 1

_Row = TypeVar("_Row")

_PER_TOKEN = ("input_ids", "position_ids", "scale", "loss_weight")


def usual_pass(device: torch.device) -> int:
    """Return the tokens of a pass that are enough for speed on a device."""
    return GPU_PASS if device.type == "cuda" else CPU_PASS


def join_rows(batches: Sequence[Batch], *, multiple: int = 1) -> Batch:
    """Return rows, at least one, as one batch, padded to a multiple of `multiple` tokens.

    The rows must have the same columns of terms. Their own padding is left out. Groups of different rows stay apart,
    as they are when each row is computed alone. `row_id` and `step` come from the first row.
    """
    if len(batches) == 1 and len(batches[0].input_ids) % multiple == 0:
        return batches[0]
    sizes = [batch.num_tokens for batch in batches]
    *starts, total = accumulate(sizes, initial=0)
    tail = empty_batch(-total % multiple)
    columns: dict[str, Any] = {
        name: torch.cat([*(getattr(batch, name)[: batch.num_tokens] for batch in batches), getattr(tail, name)])
        for name in _PER_TOKEN
    }
    parents = [_shifted(batch.parent[:size], start) for batch, size, start in zip(batches, sizes, starts, strict=True)]
    ends = [batch.subtree_end[:size] + start for batch, size, start in zip(batches, sizes, starts, strict=True)]
    last = [batch.trajectory_ends + start for batch, start in zip(batches, starts, strict=True)]
    terms = None
    if all(batch.terms is not None for batch in batches):
        terms = concatenate_terms([batch.terms for batch in batches if batch.terms is not None], sizes)
    return replace(
        batches[0],
        **columns,
        parent=torch.cat([*parents, tail.parent]),
        subtree_end=torch.cat([*ends, tail.subtree_end + total]),
        trajectory_ids=tuple(name for batch in batches for name in batch.trajectory_ids),
        trajectory_ends=torch.cat(last),
        num_tokens=total,
        total_weight=sum(batch.total_weight for batch in batches),
        tokens_flat=sum(batch.tokens_flat for batch in batches),
        terms=terms,
        routes=concatenate_routes(batches, sizes, total + len(tail.input_ids)),
        edges=_edges(batches, sizes),
    )


def consecutive(rows: Iterable[_Row], tokens: Callable[[_Row], int], limit: int) -> Iterator[list[_Row]]:
    """Yield rows in their order, as many at a time as have at most `limit` tokens together, and at least one."""
    # tokens 5 4 3 6, limit 10 -> [5 4] [3 6]
    found: list[_Row] = []
    total = 0
    for row in rows:
        size = tokens(row)
        if found and total + size > limit:
            yield found
            found, total = [], 0
        found.append(row)
        total += size
    if found:
        yield found


def _shifted(values: Tensor, start: int) -> Tensor:
    return torch.where(values < 0, values, values + start)  # roots keep their -1


def _edges(batches: Sequence[Batch], sizes: list[int]) -> RowEdges:
    terms = [batch.terms for batch in batches]

    def edges(counts: list[int]) -> tuple[int, ...]:
        return tuple(accumulate(counts, initial=0))  # counts [3, 2] -> (0, 3, 5)

    return RowEdges(
        row_ids=tuple(batch.row_id for batch in batches),
        targets=edges([int(batch.loss_weight.count_nonzero()) for batch in batches]),
        tokens=edges(sizes),
        trajectories=edges([len(batch.trajectory_ends) for batch in batches]),
        scored=edges([0 if each is None else len(each.tokens) for each in terms]),
        terms=edges([0 if each is None else len(each.index) for each in terms]),
    )


def concatenate_terms(rows: Sequence[TermTensors], lengths: Sequence[int]) -> TermTensors:
    """Concatenate the terms of rows of `lengths` tokens; omit a column that a row with terms lacks.

    Laws, such as temperatures, are not omitted if a row has some: the other rows have missing entries.
    """
    for law in LAWS:
        if law.is_in_batches and any(getattr(terms, law.name) is not None for terms in rows):
            rows = [_with_entries(terms, law) for terms in rows]
    columns: dict[str, list[Any] | None] = {field.name: [] for field in fields(TermTensors)}
    # Indices are shifted by the sizes of the rows before. Two rows of 4 tokens, with [1, 3] and [2] trained:
    # tokens [1, 3] + [2 + 4] = [1, 3, 6], index [0, 1, 0] + [0 + 2] = [0, 1, 0, 2]
    shift = {"tokens": 0, "index": 0, "trajectory": 0, "group": 0, "rollout": 0}
    for terms, length in zip(rows, lengths, strict=True):
        for name in columns:
            values, column = getattr(terms, name), columns[name]
            if values is None:
                columns[name] = None  # stays None for the rows after this one
            elif column is not None:
                # -1 of `rollout` is not an index.
                column.append(_shifted(values, shift[name]) if name in shift else values)
        shift["tokens"] += length
        shift["index"] += len(terms.tokens)
        shift["trajectory"] += len(terms.group)
        # Group codes are below the number of trajectories, so groups of two rows never get the same code. A group
        # with trajectories in two rows gets two codes. This is correct: an objective compares within one row only.
        shift["group"] += len(terms.group)
        shift["rollout"] += len(terms.group)
    joins: dict[type, Any] = {RaggedTensor: join_ragged, TeacherLaw: concatenate_laws, Tensor: torch.cat}
    tensors: dict[str, Any] = {
        name: None if values is None else joins[type(values[0])](values) for name, values in columns.items()
    }
    return TermTensors(**tensors)


def terms_of_row(terms: TermTensors, edges: RowEdges, i: int) -> TermTensors:
    """Return the terms of row i of a joined batch, as they were before; `tokens` stay places in the batch."""
    scored, owners, own = (slice(each[i], each[i + 1]) for each in (edges.scored, edges.trajectories, edges.terms))
    cut = select_terms(terms, own, scored=scored, owners=owners)
    rollout = cut.rollout if cut.rollout is None else _shifted(cut.rollout, -owners.start)
    return replace(cut, index=cut.index - scored.start, trajectory=cut.trajectory - owners.start, rollout=rollout)


def _with_entries(terms: TermTensors, column: Column) -> TermTensors:
    """Return the terms with missing entries in a column of laws that they lack."""
    if getattr(terms, column.name) is not None:
        return terms
    num, device = len(terms.tokens), terms.tokens.device
    dtype = torch.from_numpy(np.zeros(0, column.kind.dtype)).dtype
    missing: dict[str, Any] = {}
    if isinstance(column.kind, Lists):
        missing[column.name] = RaggedTensor.empty(num, dtype, device)
    else:
        missing[column.name] = torch.full((num,), column.kind.missing, dtype=dtype, device=device)
    return replace(terms, **missing)


def concatenate_routes(batches: Sequence[Batch], sizes: Sequence[int], length: int) -> Tensor | None:
    """Return recorded experts of `length` tokens: first of `sizes` tokens of each row, then none.

    Rows without recorded experts have none; if no row has some, the result is None.
    """
    given = [batch.routes for batch in batches if batch.routes is not None]
    if not given:
        return None
    # uint8 beside int16 -> int16, whose entry for experts that were not recorded is another one.
    kind = next((routes.dtype for routes in given if routes.dtype != torch.uint8), torch.uint8)
    joined = torch.full((length, *given[0].shape[1:]), missing_expert(kind), dtype=kind, device=given[0].device)
    begin = 0
    for batch, size in zip(batches, sizes, strict=True):
        if batch.routes is not None:
            routes = batch.routes[:size]
            known = routes.to(kind)
            joined[begin : begin + len(routes)] = torch.where(is_route_recorded(routes), known, missing_expert(kind))
        begin += size
    return joined
