"""Read the batch of a trainer: any of three forms to one array of tokens, and values back to the form.

    padded    [[0 5 6]     mask [[0 1 1]      tokens 5 6 7 8 9     offsets 0 2 5     places 1 2 3 4 5
               [7 8 9]]          [1 1 1]]
    jagged    a nested tensor of torch with layout jagged
    list      1-D arrays or tensors

`places` are indices into the flattened batch of the caller, one for the value of each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treepack.errors import TreepackError
from treepack.kept_sets import sets_of_tokens
from treepack.ragged import RaggedArray, join_lists
from treepack.trajectory import Float64, Int32, Int64, Routes, as_routes

_Bools = NDArray[np.bool_]
Ids = Tensor | NDArray[Any] | Sequence[Tensor | NDArray[Any]]  # a batch of token ids, in one of the three forms
Flags = Tensor | NDArray[Any] | Sequence[Tensor | NDArray[Any]] | None  # the same for yes and no


@dataclass(frozen=True)
class BatchForm:
    """The form of the caller's batch, of `size` values in total.

    Either `shape` is set, or `jagged`, the offsets and lengths of the nested tensor; or else it is a list, `lengths`.
    """

    size: int
    shape: tuple[int, int] | None = None
    jagged: tuple[Tensor, Tensor | None] | None = None
    lengths: tuple[int, ...] = ()

    def restore(self, values: Tensor) -> Any:
        """Return `values` [size] in the form of the batch; differentiable."""
        if self.shape is not None:
            return values.view(self.shape)
        if self.jagged is None:
            return list(torch.split(values, list(self.lengths))) if self.lengths else []
        # The caller's own offsets: torch combines two nested tensors only if they have the same ones.
        offsets, lengths = self.jagged
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths)


@dataclass(frozen=True)
class FlatSequences:
    """The sequences of a batch without padding.

    Sequence i has the tokens `tokens[offsets[i] : offsets[i + 1]]`; it may be empty. `tokens` int32 [N_flat], `offsets`
    int64 [num + 1], `places` int64 [N_flat]. `scored` int64 [N] are the indices of scored tokens, ascending, never the
    first token of a sequence. `temperature` is one for all, or float64 [N], one for each of `scored`. `routes`
    [N_flat, layers, k] are recorded experts, see `trajectory.missing_route`, or None. `kept_ids` [N] are the sets of
    token ids of `scored`, ascending, or None.
    """

    form: BatchForm
    tokens: Int32
    offsets: Int64
    places: Int64
    scored: Int64
    temperature: float | Float64
    routes: Routes | None = None
    kept_ids: RaggedArray | None = None


def read_sequences(
    input_ids: Ids, attention_mask: Flags, scored: Flags, temperature: Any, routes: Any = None, kept_ids: Any = None
) -> FlatSequences:
    """Read a batch; `plan_batch` describes the arguments.

    Raises:
        TreepackError: an argument has another shape or type, or a value that cannot be used.
    """
    form, ids, given = _flatten(input_ids)
    if ids.dtype.kind not in "iu" and ids.size:
        raise TreepackError(f"plan_batch: input_ids has the dtype {ids.dtype}; expected integers")
    if attention_mask is not None and form.shape is None:
        raise TreepackError(
            "plan_batch: attention_mask is for padded ids [B, L], but input_ids is a nested tensor or a list; leave "
            "the mask out"
        )
    if attention_mask is None:
        places, lengths = _all_places(form, given)
    else:
        mask = _flags(attention_mask, form, "attention_mask")
        places, lengths = np.flatnonzero(mask), np.count_nonzero(mask.reshape(form.shape or (0, 0)), axis=1)
    # Lengths 2, 0, 3 -> offsets 0 2 2 5
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    tokens = ids if len(places) == len(ids) else ids[places]
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < 1 << 31):
        wrong = int(np.flatnonzero((tokens < 0) | (tokens >= 1 << 31))[0])
        raise TreepackError(
            f"plan_batch: sequence {int(np.searchsorted(offsets, wrong, side='right')) - 1} contains the token id "
            f"{tokens[wrong]}; expected 0 or more, so mask padding out"
        )
    chosen = np.ones(len(places), bool) if scored is None else _flags(scored, form, "scored")[places]
    chosen[offsets[:-1][lengths > 0]] = False  # nothing predicts a first token
    indices = np.flatnonzero(chosen)
    temperatures = _temperature(temperature, form, offsets, places, indices)
    flat = tokens.astype(np.int32, copy=False)
    has_routes = any(each is not None for each in routes) if isinstance(routes, list | tuple) else routes is not None
    recorded = _routes(routes, form, offsets, places) if has_routes else None
    kept = None if kept_ids is None else _kept_sets(kept_ids, flat, offsets, indices)
    return FlatSequences(form, flat, offsets, places, indices, temperatures, recorded, kept)


def _flatten(input_ids: Ids) -> tuple[BatchForm, NDArray[Any], Int64]:
    """Return the form, the flat ids, and the start and length of each sequence in them, int64 [2, num]."""
    if isinstance(input_ids, Tensor) and input_ids.is_nested:
        if input_ids.layout != torch.jagged or input_ids.dim() != 2:
            raise TreepackError("plan_batch: input_ids is a nested tensor; expected two dimensions and layout jagged")
        nested: Any = input_ids  # torch does not declare the methods of nested tensors
        begins, own = nested.offsets(), nested.lengths()
        sizes = np.diff(_array(begins)) if own is None else _array(own)
        values = _array(nested.values())
        given = np.stack([_array(begins)[:-1], sizes]).astype(np.int64)
        return BatchForm(len(values), jagged=(begins, own)), values, given
    if isinstance(input_ids, list | tuple):
        arrays = [_array(each) for each in input_ids]
        for i, array in enumerate(arrays):
            if array.ndim != 1:
                raise TreepackError(
                    f"plan_batch: sequence {i} has the shape {list(array.shape)}; expected one dimension"
                )
        lengths = np.array([len(array) for array in arrays], np.int64)
        # An empty Python list becomes an array of floats, which must not decide the dtype.
        filled = [array for array in arrays if len(array)]
        flat = np.concatenate(filled) if filled else np.zeros(0, np.int32)
        given = np.stack([np.cumsum(lengths) - lengths, lengths])
        return BatchForm(len(flat), lengths=tuple(lengths.tolist())), flat, given
    padded = _array(input_ids)
    if padded.ndim != 2:
        raise TreepackError(
            f"plan_batch: input_ids has the shape {list(padded.shape)}; expected padded ids [B, L], a jagged nested "
            "tensor, or a list of 1-D arrays"
        )
    num, length = padded.shape
    given = np.stack([np.arange(num, dtype=np.int64) * length, np.full(num, length, np.int64)])
    return BatchForm(padded.size, shape=(num, length)), padded.ravel(), given


def _array(values: Any) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _all_places(form: BatchForm, given: Int64) -> tuple[Int64, Int64]:
    """Return the places of all tokens, and the length of each sequence."""
    starts, lengths = given
    if form.size == int(lengths.sum()):
        return np.arange(form.size), lengths
    # A nested tensor with holes: starts [0, 4], lengths [3, 2] -> shifts [0, 0, 0, 1, 1] -> places [0, 1, 2, 4, 5]
    shifts = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return np.arange(len(shifts)) + shifts, lengths


def _flags(values: Any, form: BatchForm, name: str) -> _Bools:
    """Return `values`, yes or no for each value of the caller's batch, flat."""
    return _like(values, form, name).astype(bool, copy=False)


def _like(values: Any, form: BatchForm, name: str) -> NDArray[Any]:
    """Return `values` flat, after a check that they have the form of the batch."""
    try:
        other, flat, _ = _flatten(values)
    except TreepackError:
        other, flat = None, np.zeros(0)
    # The offsets of two nested tensors may be different objects, but must have the same numbers.
    if other is None or _numbers(other) != _numbers(form):
        raise TreepackError(f"plan_batch: {name} is not of the shape of input_ids; give it one value for each token")
    return flat


def _numbers(form: BatchForm) -> tuple[Any, ...]:
    jagged = None if form.jagged is None else form.jagged[0].tolist()
    return form.size, form.shape, jagged, form.lengths


def _temperature(values: Any, form: BatchForm, offsets: Int64, places: Int64, scored: Int64) -> float | Float64:
    """Return the temperature of all scored tokens, or of each of them.

    They keep float64, because a model in float64 divides its logits by them.
    """
    is_batch = isinstance(values, list | tuple) and len(values) > 0 and np.ndim(_array(values[0])) == 1
    if is_batch or (isinstance(values, Tensor) and values.is_nested):
        chosen = _like(values, form, "temperature")[places[scored]]
    else:
        array = _array(values)
        if array.ndim == 0:
            one = float(array)
            _check_temperatures(np.array([one]))
            return one
        if array.shape == (len(offsets) - 1,):
            # Sequences of 2, 0 and 3 tokens, the tokens 1, 3 and 4 scored -> sequences [0, 2, 2]
            chosen = array[np.searchsorted(offsets, scored, side="right") - 1]
        else:
            chosen = _like(values, form, "temperature")[places[scored]]
    _check_temperatures(chosen)
    return chosen.astype(np.float64)


def _kept_sets(values: Any, tokens: Int32, offsets: Int64, scored: Int64) -> RaggedArray:
    """Return the kept ids of the scored tokens.

    Raises:
        TreepackError: a sequence has another number of lists than tokens, or a set is not possible.
    """
    if not isinstance(values, list | tuple) or len(values) != len(offsets) - 1:
        found = f"{len(values)} entries" if isinstance(values, list | tuple) else f"the type {type(values).__name__}"
        raise TreepackError(
            f"plan_batch: kept_ids has {found}; expected a list with one entry for each of {len(offsets) - 1} sequences"
        )
    # Sequences of 2 and 3 tokens, tokens 1, 3 and 4 scored -> places [1] and [1, 2]
    bounds = np.searchsorted(scored, offsets)
    sets = [RaggedArray.empty(0, np.int32)]
    for i, own in enumerate(values):
        places = scored[bounds[i] : bounds[i + 1]] - offsets[i]
        source = f"plan_batch: sequence {i}"
        sets.append(sets_of_tokens(own, tokens[offsets[i] : offsets[i + 1]], places, source=source, name="kept_ids"))
    return join_lists(sets)


def _routes(values: Any, form: BatchForm, offsets: Int64, places: Int64) -> Routes:
    """Return the recorded experts of all tokens, [N_flat, layers, k].

    Raises:
        TreepackError: they are not of the form of the batch, or no experts.
    """
    is_list = isinstance(values, list | tuple)
    if is_list and form.shape is None and form.jagged is None and len(values) == len(offsets) - 1:
        parts = [np.zeros(0) if each is None else _array(each) for each in values]
        known = [part for part in parts if part.ndim == 3 or part.size]
        shape = known[0].shape[1:] if known else (1, 1)
        if len(shape) != 2:
            raise TreepackError(
                f"plan_batch: routes of a sequence have the shape {list(known[0].shape)}; expected integers [tokens, "
                "layers, k], or None for a sequence without routes"
            )
        sizes = np.diff(offsets).tolist()
        parts = [part if part.ndim == 3 or part.size else np.full((0, *shape), -1) for part in parts]
        for i, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            if part.shape[1:] != shape or len(part) > size:
                raise TreepackError(
                    f"plan_batch: routes of sequence {i} have the shape {list(part.shape)}; expected at most {size} "
                    f"tokens, and {shape[0]} layers with {shape[1]} experts as in other sequences"
                )
        # Rows may be missing at the end: 2 rows for 3 tokens -> one row of -1.
        tails = [np.full((size - len(part), *shape), -1) for part, size in zip(parts, sizes, strict=True)]
        pairs = [each for pair in zip(parts, tails, strict=True) for each in pair]
        rows = np.concatenate(pairs) if pairs else np.full((0, *shape), -1)
    else:
        rows = _rows_like(values, form)[places]
    return as_routes(rows, len(places), source="plan_batch", name="routes")


def _rows_like(values: Any, form: BatchForm) -> NDArray[Any]:
    """Return the experts at all places of a padded or jagged batch, [size, layers, k].

    Raises:
        TreepackError: they have another shape.
    """
    rows: NDArray[Any] = np.zeros(0)
    if form.shape is not None and not isinstance(values, list | tuple):
        rows = _array(values)
        rows = rows.reshape(form.size, *rows.shape[2:]) if rows.shape[:2] == form.shape else rows[:0]
    elif form.jagged is not None and isinstance(values, Tensor) and values.is_nested:
        nested: Any = values
        # The offsets of two nested tensors may be different objects, but must have the same numbers.
        rows = _array(nested.values()) if nested.offsets().tolist() == form.jagged[0].tolist() else rows
    if rows.ndim != 3 or len(rows) != form.size:
        raise TreepackError(
            "plan_batch: routes are not of the shape of input_ids; give it experts [layers, k] for each token"
        )
    return rows


def _check_temperatures(values: NDArray[Any]) -> None:
    wrong = values[~((values > 0) & np.isfinite(values))]
    if len(wrong):
        raise TreepackError(
            f"plan_batch: temperature {wrong[0]} of a scored token; expected a number above 0, the one that the "
            "sampler used"
        )
