"""One packed row as torch tensors, the input of the model and of the loss.

    Row (numpy columns) --make_batch--> Batch (tensors, padded) --.to(device)--> model, loss

A padding token i attends to itself only and adds nothing to the loss: `subtree_end = i + 1`, position 0, parent -1,
weight 0. `terms` are the row's (trajectory, trained token) pairs, for objectives that need more than one weight per
token (`objectives.losses`). `schedule` is the work list of the attention kernel for this row;
`model.forward.prepare_batch` computes it, and it is None until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from treepack.columns import COLUMNS, LAWS, OF_TRAJECTORY, Sharing, Values
from treepack.data.ragged_tensor import RaggedTensor
from treepack.data.teacher_law import TeacherLaw
from treepack.errors import TreepackError
from treepack.ragged import RaggedArray
from treepack.trajectory import Routes, missing_route

if TYPE_CHECKING:
    from treepack.pack.row import Row, RowTerms
    from treepack.trajectory import Int32, Int64

# Token ids and indices are int64 because torch indexes with int64; loss weights stay float64, as in the files.
_DTYPES = {
    "input_ids": torch.int64,
    "position_ids": torch.int64,
    "parent": torch.int64,
    "subtree_end": torch.int32,
    "scale": torch.int32,
    "loss_weight": torch.float64,
}
# Columns of terms, and of trajectories, that `pack.row.RowTerms` and `TermTensors` have under the same name.
_OF_TERMS = tuple(column for column in COLUMNS if column.is_in_batches and column.sharing is Sharing.TERM)
_OF_TRAJECTORIES = tuple(column for column in OF_TRAJECTORY if column.is_in_batches)

# Fields of `TermTensors` with one value per term, and with one per entry of `tokens`; others have one per trajectory.
PER_TERM = ("index", "position", "trajectory", "weight", *(column.name for column in _OF_TERMS))
PER_SCORED = ("tokens", *(column.name for column in LAWS if column.is_in_batches), "teacher")
_Places = slice | Tensor


@dataclass(frozen=True)
class TermTensors:
    """The N terms of a row of K trajectories: one per (trajectory, trained token) pair.

    `tokens` int64 [n] are the row indices of all trained tokens, ascending. Term t is about the token
    `tokens[index[t]]`, with `index` int32 [N]: log-probabilities are computed once for `tokens` and gathered by
    `index`. `temperature` [n] is that of the sampler for each of `tokens`, and `kept_ids` [n], of int32, the token
    ids that its top-p, top-k or min-p left; an empty list is the whole vocabulary. A token whose terms have
    several temperatures or sets occurs once for each pair; without sets by ascending temperature, the missing one (NaN)
    last. Temperatures are float32, as in packed rows, or float64 in batches in memory (`online`).

    trajectory int32 [N]; weight float64 [N]; advantage float64 [N]; the log-probabilities float32 [N]; group int32 [K],
    equal for trajectories of the row that share a group; reward float64 [K]; rollout int32 [K], the first trajectory of
    the same rollout (-1 for a turn of several paths), or None if each trajectory is a separate rollout. A critic
    learns `returns` float64 [N], and `old_values` float64 [N] are its old values of the states before the tokens.
    `edge_factor` float64 [N] gives each edge of the sampled tree a total weight of 1. `position` int32 [N] is the place
    of the token in its trajectory, from 0. A column that the directory lacks is None; a missing value is NaN. `teacher`
    has the teacher's law at each of `tokens`, and `teacher_logprob` float32 [N] its log-probability.
    """

    tokens: Tensor
    index: Tensor
    trajectory: Tensor
    weight: Tensor
    group: Tensor
    advantage: Tensor | None = None
    sampling_logprob: Tensor | None = None
    old_logprob: Tensor | None = None
    ref_logprob: Tensor | None = None
    reward: Tensor | None = None
    temperature: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None
    edge_factor: Tensor | None = None
    rollout: Tensor | None = None
    kept_ids: RaggedTensor | None = None
    position: Tensor | None = None
    teacher_logprob: Tensor | None = None
    teacher: TeacherLaw | None = None

    def to(self, device: torch.device | str) -> TermTensors:
        """Return the same terms with their tensors on `device`."""
        return self._map(lambda tensor: _to_device(tensor, device))

    def pin_memory(self) -> TermTensors:
        """Return the same terms in page-locked memory, which a GPU can read while it computes."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> TermTensors:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {
            name: change(value) if isinstance(value, Tensor) else None if value is None else value.map(change)
            for name, value in values.items()
        }
        return TermTensors(**changed)


@dataclass(frozen=True)
class RowEdges:
    """Where each of the n rows of a joined batch begins (`joined.join_rows`).

    `row_ids` has n entries. The others have n + 1 ascending numbers: row i has the entries edge[i] .. edge[i + 1] - 1
    of the batch's tokens, tokens with loss weight (targets), trajectories, tokens of terms (scored) and terms.
    """

    row_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    trajectories: tuple[int, ...]
    scored: tuple[int, ...]
    terms: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """One packed row of T tokens, or several joined rows: `num_tokens` tokens of trajectories, then padding.

    input_ids, position_ids and parent are int64 [T]; subtree_end and scale int32 [T]; loss_weight float64 [T];
    trajectory_ends int64 [num_trajectories]. `routes` [T, layers, k] are recorded experts to be replayed
    (`model.experts.replay`), uint8 with k times 255 if none was recorded, or int16 with -1; or None. `tokens_flat`
    is the total length of the trajectories, with each shared token counted once for every trajectory through it.
    `edges` are set for joined rows, and None for one row.
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
    routes: Tensor | None = None
    edges: RowEdges | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Return the same row with its tensors on `device`, without its schedule, which belongs to one device."""
        terms = None if self.terms is None else self.terms.to(device)
        return self._map(lambda tensor: _to_device(tensor, device), terms)

    def pin_memory(self) -> Batch:
        """Return the same row in page-locked memory, which a GPU can read while it computes; without its schedule."""
        return self._map(Tensor.pin_memory, None if self.terms is None else self.terms.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor], terms: TermTensors | None) -> Batch:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        return Batch(**{**values, **tensors, "terms": terms, "schedule": None})

    @property
    def row_ids(self) -> tuple[int, ...]:
        """The `row_id` of each row."""
        return (self.row_id,) if self.edges is None else self.edges.row_ids

    @property
    def name(self) -> str:
        """The rows in messages; see `names_of`."""
        return names_of(self.row_ids)

    @property
    def targets(self) -> tuple[Tensor, Tensor, Tensor]:
        """The columns that the loss reads: input_ids, parent and loss_weight."""
        return self.input_ids, self.parent, self.loss_weight


def names_of(row_ids: Sequence[int]) -> str:
    """Return rows in messages: "row 3", or "rows 3, 5 and 7"; of more than 8 rows the first and the number."""
    if len(row_ids) > 8:
        return f"row {row_ids[0]} and {len(row_ids) - 1} others"
    *others, last = map(str, row_ids)
    return f"rows {', '.join(others)} and {last}" if others else f"row {last}"


def _to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    # A copy can overlap with computation only if its source is page-locked; a copy back to the CPU must wait.
    return tensor.to(device, non_blocking=tensor.is_pinned())


def empty_batch(length: int, *, terms: bool = False) -> Batch:
    """Return a row of `length` padding tokens, which a rank computes if it has no row left and another rank has one.

    With `terms`, the row has terms of length 0.
    """
    columns: dict[str, Any] = {name: torch.zeros(length, dtype=dtype) for name, dtype in _DTYPES.items()}
    columns["parent"] = torch.full((length,), -1)
    columns["subtree_end"] = torch.arange(1, length + 1, dtype=torch.int32)  # length 3: [1, 2, 3]
    columns["trajectory_ends"] = torch.zeros(0, dtype=torch.int64)
    columns["terms"] = _empty_terms() if terms else None
    return Batch(row_id=-1, step=None, trajectory_ids=(), num_tokens=0, total_weight=0.0, tokens_flat=0, **columns)


def _empty_terms() -> TermTensors:
    # Every column of terms and trajectories is present. A row of padding has no laws.
    dtypes: dict[str, Any] = dict.fromkeys(("index", "trajectory", "group", "position"), np.int32)
    dtypes |= {"tokens": np.int64, "weight": np.float64}
    dtypes |= {column.name: column.kind.dtype for column in (*_OF_TERMS, *_OF_TRAJECTORIES)}
    columns: dict[str, Any] = {name: torch.from_numpy(np.zeros(0, dtype)) for name, dtype in dtypes.items()}
    return TermTensors(**columns)


def make_batch(row: Row, *, multiple: int = 1) -> Batch:
    """Return one packed row as a `Batch`, padded to a multiple of `multiple` tokens.

    Raises:
        TreepackError: if it is not a row, or its token columns differ in length.
    """
    if not hasattr(row, "input_ids"):
        raise TreepackError(f"make_batch: row has the type {type(row).__name__}; expected a Row of plan_packing")
    length = len(row.input_ids)
    padding = -length % multiple  # length 5, multiple 4: 3 tokens
    # Length 5, 3 tokens of padding: subtree_end of the padding is [6, 7, 8], so each of them sees only itself.
    fill = {"parent": np.array(-1), "subtree_end": np.arange(length + 1, length + padding + 1)}
    tensors: dict[str, Any] = {}
    for name, dtype in _DTYPES.items():
        column = getattr(row, name)
        if column.shape != (length,):
            raise TreepackError(
                f"row {row.row_id}: {name} has {column.size} entries for {length} tokens; pack the trie again"
            )
        tail = np.broadcast_to(fill.get(name, np.array(0)), padding).astype(column.dtype)
        tensors[name] = torch.from_numpy(np.concatenate([column, tail])).to(dtype)
    return Batch(
        row_id=row.row_id,
        step=row.step,
        trajectory_ids=tuple(row.trajectory_ids),
        trajectory_ends=torch.from_numpy(row.trajectory_ends.astype(np.int64)),
        num_tokens=length,
        total_weight=float(row.loss_weight.sum()),
        tokens_flat=int(row.scale.sum()),
        routes=None if row.routes is None else route_tensor(row.routes, padding),
        terms=None if row.terms is None else _make_terms(row, row.terms),
        **tensors,
    )


def route_tensor(routes: Routes, padding: int = 0) -> Tensor:
    """Return routes as a tensor, with none for `padding` tokens; 65535 of uint16 is -1 of int16."""
    tail = np.full((padding, *routes.shape[1:]), missing_route(routes), routes.dtype)
    joined = np.concatenate([routes, tail])
    return torch.from_numpy(joined if joined.dtype == np.uint8 else joined.view(np.int16))


def is_route_recorded(routes: Tensor) -> Tensor:
    """Return True where `routes` [..., k] has experts, and not k times `missing_expert`; bool [..., 1]."""
    # uint8 [3 255] -> True, because the experts of a token differ.
    return (routes != missing_expert(routes.dtype)).any(dim=-1, keepdim=True)


def missing_expert(dtype: torch.dtype) -> int:
    """Return the entry of experts that were not recorded: 255 in uint8, -1 in int16."""
    return 255 if dtype == torch.uint8 else -1


def _make_terms(row: Row, terms: RowTerms) -> TermTensors:
    groups = row.trajectory_groups
    laws = {column.name: values for column in LAWS if (values := getattr(terms, column.name)) is not None}
    scored = scored_tokens(terms.token, len(row.input_ids), laws)
    # Groups are numbered by first appearance: ["x", "y", "x"] -> [0, 1, 0].
    codes = {name: code for code, name in enumerate(dict.fromkeys(groups))}
    columns: dict[str, Any] = {
        column.name: None if (values := getattr(terms, column.name)) is None else torch.tensor(values)
        for column in (*_OF_TERMS, *_OF_TRAJECTORIES)
    }
    return TermTensors(
        **scored,
        trajectory=torch.tensor(terms.trajectory),
        weight=torch.tensor(terms.weight),
        group=torch.tensor([codes[name] for name in groups], dtype=torch.int32),
        position=torch.from_numpy(row.position_ids[terms.token].astype(np.int32)),
        **columns,
    )


def scored_tokens(token: Int32 | Int64, length: int, laws: Mapping[str, Values]) -> dict[str, Any]:
    """Return the fields `index` and `PER_SCORED` of `TermTensors` for the terms of a row of `length` tokens.

    `token` [N] is the token of each term, and `laws` the entries [N] of columns of `columns.LAWS` by name, numbers or
    lists; numbers keep their dtype. The words of a teacher and their log-probabilities become one law.

    The slow form: `pairs = sorted({(token[t], law(t)) for t in terms})`, then `index[t] = pairs.index(...)`.
    """
    codes = np.zeros(len(token), np.int64)
    for values in laws.values():
        codes = _with_law(token, codes, values)
    if codes.any():
        # As one key per pair. Temperatures .5 and 1 with the codes 0 and 1, token [4, 4, 7] at [1, .5, .5]:
        #   keys 2 token + code [9, 8, 14] -> sorted [8, 9, 14], index [1, 0, 2] -> tokens [4, 4, 7] at [.5, 1, .5]
        keys = token.astype(np.int64, copy=False) * (codes.max() + 1) + codes
        _, first, index = np.unique(keys, return_index=True, return_inverse=True)
        tokens = token[first].astype(np.int64)
    else:
        # Two trajectories 0 - 1 - 2 and 0 - 1 - 3 with tokens 1, 2 and 3 trained, in a row of 4 tokens:
        #   token         [1, 2, 1, 3]    one entry per term
        #   place        [-, 2, 1, 3]     of a term about each token
        #   rank         [-1, 0, 1, 2]    number of trained tokens before this one
        #   tokens        [1, 2, 3]       and index = rank[token] = [0, 1, 0, 2]
        place = np.full(length, -1)
        place[token] = np.arange(len(token))
        tokens = np.flatnonzero(place >= 0)
        index, first = (np.cumsum(place >= 0) - 1)[token], place[tokens]
    entries: dict[str, Any] = {name: values[first] for name, values in laws.items()}
    ids, logprobs = (entries.pop(name, None) for name in ("teacher_topk_ids", "teacher_topk_logprobs"))
    return {
        "tokens": torch.from_numpy(tokens),
        "index": torch.from_numpy(index.astype(np.int32)),
        "teacher": None if ids is None or logprobs is None else TeacherLaw.of(ids, logprobs),
        **{
            name: RaggedTensor.of(values) if isinstance(values, RaggedArray) else torch.from_numpy(values)
            for name, values in entries.items()
        },
    }


def _with_law(token: Int32 | Int64, codes: Int64, values: Values) -> Int64:
    """Return numbers of the terms: terms about a token differ in them if they differ in `codes` or in `values`."""
    if not isinstance(values, RaggedArray):
        distinct = np.unique(values)  # ascending, NaN once, last
        # searchsorted finds NaN, too: NaN is sorted after all numbers. Terms of the smaller number keep smaller codes.
        return codes * len(distinct) + np.searchsorted(distinct, values)
    # Only lists of a token with several terms are compared: token [4, 4, 7], sets [1 2] [1 3] [1 2] -> [0, 1, 0].
    several = np.bincount(token)[token] > 1
    numbers: dict[tuple[int, bytes], int] = {}
    result = codes.copy()
    for i in np.flatnonzero(several).tolist():
        key = int(codes[i]), values.list(i).tobytes()
        result[i] = numbers.setdefault(key, len(numbers))
    return result


def select_terms(
    terms: TermTensors, own: _Places, *, scored: _Places | None = None, owners: _Places | None = None
) -> TermTensors:
    """Return the terms at `own`, a slice or int64 places [k], with the columns that belong to them.

    Columns of tokens and of trajectories are cut to the places `scored` and `owners`, and stay whole for None. Indices
    stay as they are. Lists of numbers wait for a GPU; leave out the lists that are not needed.
    """
    places = dict.fromkeys(PER_TERM, own) | dict.fromkeys(PER_SCORED, scored)
    chosen: dict[str, Any] = {}
    for field in fields(terms):
        values, at = getattr(terms, field.name), places.get(field.name, owners)
        if values is not None and at is not None:
            is_gathered = isinstance(values, Tensor) and isinstance(at, Tensor)
            chosen[field.name] = values.index_select(0, at) if is_gathered else values[at]
    return replace(terms, **chosen)
