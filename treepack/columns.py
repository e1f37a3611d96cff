"""The table of columns: each value that a rollout may have beside its tokens, described once.

    COLUMNS = advantage, sampling_logprob, ..., teacher_topk_logprobs       one entry per trained token
    OF_TRAJECTORY = reward, rollout, trajectory_weight, rollout_number      one entry per trajectory

Schemas, tries, rows, batches, checks and `show` are loops over this table. To add a column, add an entry here, and a
field of its name to `trajectory.Tokens`, `pack.row.RowTerms` and `data.batch.TermTensors`; tests compare these fields
with the table. The entry goes last, because files keep the order of their columns. Then use the column in a loss.

Not in the table, because different rules apply to each: token ids and the structure of the tree, trained spans and
their weights, the routes of experts (they are part of a node's identity), and the values of a critic at nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.kept_sets import wrong_sets
from treepack.ragged import RaggedArray, join_lists

_Bools = NDArray[np.bool_]


class Axis(Enum):
    """The unit that has one entry in a column."""

    TRAINED = "trained token"
    TRAJECTORY = "trajectory"


class Sharing(Enum):
    """How entries of several trajectories relate at a token that they share."""

    TERM = "each pair of trajectory and trained token has its own entry"
    LAW = "the entry changes the distribution of the token, which is computed once for each distinct entry"


@dataclass(frozen=True, slots=True)
class Numbers:
    """Entries that are numbers: arrays [n]. NaN is a missing one, or `missing` in a column without NaN."""

    dtype: type[np.number[Any]]
    missing: float = np.nan

    def filled(self, values: Any, num: int) -> NDArray[Any]:
        """Return `num` entries: `values` [num], or one number without dimensions for all, or None for missing ones."""
        if values is None:
            return np.full(num, self.missing)
        return np.broadcast_to(values, num)

    def join(self, parts: Sequence[Any]) -> NDArray[Any]:
        """Concatenate `parts`, at least one, as `dtype`."""
        return np.concatenate(parts).astype(self.dtype, copy=False)

    def is_missing(self, values: Any) -> _Bools:
        """Return True for each missing entry of `values`, numbers with NaN."""
        missing: _Bools = np.isnan(values)
        return missing

    def equal(self, a: Any, b: Any) -> bool:
        """Return True if both have the same entries; a missing entry equals a missing one."""
        return np.array_equal(a, b, equal_nan=True)


@dataclass(frozen=True, slots=True)
class Lists:
    """Entries that are lists of numbers: a `RaggedArray` of n lists. An empty list is a missing entry."""

    dtype: type[np.number[Any]]

    def filled(self, values: Any, num: int) -> RaggedArray:
        """Return `num` lists: `values`, or empty ones for None."""
        lists: RaggedArray = RaggedArray.empty(num, self.dtype) if values is None else values
        return lists

    def join(self, parts: Sequence[Any]) -> RaggedArray:
        """Concatenate `parts`, at least one."""
        return join_lists(parts)

    def is_missing(self, values: Any) -> _Bools:
        """Return True for each missing entry of `values`."""
        missing: _Bools = values.sizes == 0
        return missing

    def equal(self, a: Any, b: Any) -> bool:
        """Return True if both have the same lists; NaN equals NaN."""
        same: bool = a.equals(b)
        return same


_Kind = Numbers | Lists
Values = NDArray[Any] | RaggedArray
# True for each entry that is impossible: of the entries, and the token ids that they are about, int32 [n].
_Wrong = Callable[[Any, NDArray[Any]], _Bools]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """One column of the table.

    Attributes:
        name: field of `Tokens`, `RowTerms` and `TermTensors`.
        kind: numbers or lists, and their dtype in packed rows.
        packed: column of packed rows.
        packed_doc: its description in the schema.
        stored: column of the trajectories of a trie; None if only packed rows have it.
        stored_doc: its description; by default `packed_doc` with "per trained token".
        whole: column of a trie with one number for all trained tokens of a trajectory, if it may be stored so.
        whole_doc: its description.
        axis: one entry per trained token or per trajectory.
        sharing: the rule for a token that several trajectories train.
        is_always: each trie has the column, with nulls if nothing is known.
        makes_terms: rows have terms if a trajectory has a value of this column.
        is_computed: `treepack advantages` writes it, and no reader. A trajectory then has all values or none.
        is_in_batches: batches have the column, because losses may read it.
        wrong: finds impossible entries.
        remedy: what to do if a loss needs the column and rows lack it.
    """

    name: str
    kind: _Kind
    packed: str
    packed_doc: str
    stored: str | None = None
    stored_doc: str = ""
    whole: str | None = None
    whole_doc: str = ""
    axis: Axis = Axis.TRAINED
    sharing: Sharing = Sharing.TERM
    is_always: bool = False
    makes_terms: bool = False
    is_computed: bool = False
    is_in_batches: bool = True
    wrong: _Wrong | None = None
    remedy: str = ""

    @property
    def sources(self) -> tuple[str, ...]:
        """Columns of a trie that it comes from."""
        return tuple(name for name in (self.whole, self.stored) if name is not None)


def _infinite(values: NDArray[Any], _: NDArray[Any]) -> _Bools:
    impossible: _Bools = np.isinf(values)
    return impossible


def _negative(values: NDArray[Any], _: NDArray[Any]) -> _Bools:
    impossible: _Bools = (values < 0) | np.isinf(values)
    return impossible


_TEACHER_REMEDY = "write them with `treepack logprobs --column teacher{}`, or give --teacher MODEL"

# Parquet stores the descriptions, so a changed word changes the bytes and the sha256 of every new file.
COLUMNS = (
    Column(
        name="advantage",
        kind=Numbers(np.float64),
        packed="term_advantage",
        packed_doc="advantage",
        stored="advantages",
        whole="advantage",
        whole_doc="advantage of the whole trajectory",
        is_always=True,
        makes_terms=True,
        remedy="compute them with `treepack advantages`, or give every rollout an advantage, and pack again",
    ),
    Column(
        name="sampling_logprob",
        kind=Numbers(np.float32),
        packed="term_sampling_logprob",
        packed_doc="sampler's log-probability",
        stored="sampling_logprobs",
        is_always=True,
        makes_terms=True,
        remedy="give every rollout the sampler's log-probabilities and pack them again, or omit --importance-cap, "
        "--importance-mask, --sequence-mask and --old-logprobs",
    ),
    Column(
        name="old_logprob",
        kind=Numbers(np.float32),
        packed="term_old_logprob",
        packed_doc="trainer's old log-probability",
        stored="old_logprobs",
        is_always=True,
        makes_terms=True,
        remedy="write all of them with `treepack logprobs --column old`",
    ),
    Column(
        name="ref_logprob",
        kind=Numbers(np.float32),
        packed="term_ref_logprob",
        packed_doc="reference log-probability",
        stored="ref_logprobs",
        is_always=True,
        makes_terms=True,
        remedy="write them with `treepack logprobs --column ref`",
    ),
    Column(
        name="entropy",
        kind=Numbers(np.float32),
        packed="term_entropy",
        packed_doc="entropy of its distribution, in nats",
        is_in_batches=False,
    ),
    Column(
        name="temperature",
        kind=Numbers(np.float32),
        packed="term_temperature",
        packed_doc="sampler's temperature, rounded to float32: 0.7 becomes 0.69999999",
        stored="temperatures",
        stored_doc="sampler's temperature per trained token",
        whole="temperature",
        whole_doc="sampler's temperature for the whole trajectory",
        sharing=Sharing.LAW,
        wrong=_negative,
    ),
    Column(
        name="returns",
        kind=Numbers(np.float64),
        packed="term_return",
        packed_doc="return, the target of the critic",
        stored="returns",
        stored_doc="return per trained token, the target of the critic",
        is_computed=True,
        wrong=_infinite,
        remedy="run `treepack advantages --estimator gae` (without a critic: --values zero), and pack again",
    ),
    Column(
        name="old_values",
        kind=Numbers(np.float64),
        packed="term_old_value",
        packed_doc="critic's old value of the state before the token",
        stored="old_values",
        stored_doc="critic's old value per trained token, of the state before the token",
        is_computed=True,
        wrong=_infinite,
        remedy="compute all of them with `treepack advantages --estimator gae`, or give --value-clip 0",
    ),
    Column(
        name="edge_factor",
        kind=Numbers(np.float64),
        packed="term_edge_factor",
        packed_doc="factor that gives each edge of the sampled tree a total loss weight of 1",
        stored="edge_factors",
        stored_doc="factor per trained token that gives each compared edge of its sampled tree a total loss weight of "
        "1; 0 on other edges",
        is_computed=True,
        wrong=_negative,
        remedy="write them with `treepack advantages --estimator treerpo --edges` and pack again",
    ),
    Column(
        name="teacher_logprob",
        kind=Numbers(np.float32),
        packed="term_teacher_logprob",
        packed_doc="teacher's log-probability",
        stored="teacher_logprobs",
        makes_terms=True,
        remedy=_TEACHER_REMEDY.format(""),
    ),
    Column(
        name="kept_ids",
        kind=Lists(np.int32),
        packed="term_kept_ids",
        packed_doc="token ids that top-p, top-k or min-p left, ascending; an empty list is the whole vocabulary",
        stored="kept_ids",
        stored_doc="token ids that top-p, top-k or min-p left, ascending, per trained token; an empty list is the "
        "whole vocabulary",
        sharing=Sharing.LAW,
        wrong=wrong_sets,
    ),
    Column(
        name="teacher_topk_ids",
        kind=Lists(np.int32),
        packed="term_teacher_topk_ids",
        packed_doc="likeliest token ids of a teacher",
        stored="teacher_topk_ids",
        is_in_batches=False,  # batches have `teacher`, one law of both columns
        sharing=Sharing.LAW,
    ),
    Column(
        name="teacher_topk_logprobs",
        kind=Lists(np.float32),
        packed="term_teacher_topk_logprobs",
        packed_doc="log-probability of each of term_teacher_topk_ids",
        stored="teacher_topk_logprobs",
        is_in_batches=False,  # batches have `teacher`, one law of both columns
        stored_doc="log-probability of each of teacher_topk_ids",
        sharing=Sharing.LAW,
        remedy=_TEACHER_REMEDY.format(" --top-k 64"),
    ),
)

OF_TRAJECTORY = (
    Column(
        name="reward",
        kind=Numbers(np.float64),
        packed="trajectory_rewards",
        packed_doc="reward of each trajectory",
        stored="reward",
        axis=Axis.TRAJECTORY,
        makes_terms=True,
        remedy="give every rollout a reward and pack them again",
    ),
    # The first trajectory of the row with the same rollout. If it is missing, each trajectory is a separate rollout.
    Column(
        name="rollout",
        kind=Numbers(np.int32),
        packed="trajectory_rollouts",
        packed_doc="index into trajectory_ids of the first trajectory of the row that belongs to the same rollout; -1 "
        "for a turn on several paths of a search tree",
        stored="rollout_id",
        axis=Axis.TRAJECTORY,
    ),
    Column(
        name="trajectory_weight",
        kind=Numbers(np.float64, missing=1.0),
        packed="trajectory_weights",
        packed_doc="weight of each trajectory, with its leaf weight; the column is missing if all are 1",
        stored="weight",
        axis=Axis.TRAJECTORY,
        is_in_batches=False,
    ),
    Column(
        name="rollout_number",
        kind=Numbers(np.int64),
        packed="trajectory_rollout_numbers",
        packed_doc="number of the rollout of each trajectory in all rows of a trie, from a hash of its rollout_id and "
        "source; -1 for a turn on several paths of a search tree",
        stored="rollout_id",
        axis=Axis.TRAJECTORY,
        is_in_batches=False,
    ),
)

LAWS = tuple(column for column in COLUMNS if column.sharing is Sharing.LAW)
COMPUTED = tuple(column for column in COLUMNS if column.is_computed)
BY_NAME = {column.name: column for column in (*COLUMNS, *OF_TRAJECTORY)}
BY_PACKED = {column.packed: column for column in (*COLUMNS, *OF_TRAJECTORY)}
MAKES_TERMS = frozenset(name for column in BY_NAME.values() if column.makes_terms for name in column.sources)
"""Columns of a trie any value of which gives rows terms."""


def remedy(packed: str) -> str:
    """Return what to do if a loss needs a column of packed rows and they lack it; `term_token` means all terms."""
    if packed == "term_token":
        return "give the rollouts rewards, advantages or log-probabilities and pack them again"
    return BY_PACKED[packed].remedy
