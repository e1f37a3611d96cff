"""Kept sets: the token ids that top-p, top-k or min-p left at a sampled token, checked and in one form.

    ids 7 2 5, sampled 5  --as_kept_sets-->  2 5 7        no ids  ->  an empty list: the whole vocabulary

The sampler renormalises its distribution over these ids, so its log-probabilities are about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.ragged import RaggedArray
from treepack.trajectory import MAX_TOKEN_ID


def as_kept_sets(lists: RaggedArray, sampled: NDArray[Any], *, source: str, name: str) -> RaggedArray:
    """Return recorded sets as int32 [n], each ascending; an empty set stays empty.

    Args:
        lists: integers, the ids of each trained token in any order.
        sampled: [n], the sampled token ids.
        source: the trajectory, in errors.
        name: the field, in errors.

    Raises:
        TreepackError: an id is not a token id or repeats in its set, or a set lacks the sampled id.
    """
    ids, owners = lists.flat, np.repeat(np.arange(len(lists)), lists.sizes)
    if len(ids) and not (ids.min() >= 0 and ids.max() <= MAX_TOKEN_ID):
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise TreepackError(f"{source}: {name} hold the id {bad}; expected token ids in [0, {MAX_TOKEN_ID}]")
    inside = owners[1:] == owners[:-1]
    if (inside & (ids[1:] <= ids[:-1])).any():
        ids = ids[np.lexsort((ids, owners))]
    kept = RaggedArray(ids.astype(np.int32, copy=False), lists.offsets - lists.offsets[0])
    is_wrong = wrong_sets(kept, sampled)
    if not is_wrong.any():
        return kept
    wrong = int(is_wrong.argmax())
    own = kept.list(wrong)
    fault = f"lack the sampled id {sampled[wrong]}"
    if (own[1:] == own[:-1]).any():
        fault = f"repeat the id {own[1:][own[1:] == own[:-1]][0]}"
    raise TreepackError(
        f"{source}: {name} of trained token {wrong} {fault}; expected the distinct ids that the sampler kept, with the "
        "sampled one, or none"
    )


def sets_of_tokens(
    lists: Sequence[Any] | None, tokens: NDArray[Any], at: NDArray[Any], *, source: str, name: str
) -> RaggedArray:
    """Return the sets of the tokens at the places `at` [n], from a list of ids for each of `tokens`.

    Without `lists`, and for a list that is None or empty, the sets are empty.

    Raises:
        TreepackError: there is not one list for each token, or as `as_kept_sets`.
    """
    if lists is None:
        return RaggedArray.empty(len(at), np.int32)
    if not isinstance(lists, Sequence | np.ndarray) or len(lists) != len(tokens):
        found = f"{len(lists)} lists" if isinstance(lists, Sequence | np.ndarray) else type(lists).__name__
        raise TreepackError(f"{source}: {name} has {found} for {len(tokens)} tokens; expected a list of ids for each")
    joined = joined_ids([lists[i] for i in at.tolist()], source=source, name=name)
    return as_kept_sets(joined, tokens[at], source=source, name=name)


def joined_ids(lists: Sequence[Any], *, source: str, name: str) -> RaggedArray:
    """Return lists of integers, each of which may be None for an empty one.

    Raises:
        TreepackError: an entry is not a list of integers.
    """
    try:
        arrays = [np.zeros(0, np.int64) if ids is None or not len(ids) else np.asarray(ids) for ids in lists]
        kinds = {each.dtype for each in arrays}
        if all(kind.kind in "iu" for kind in kinds) and all(each.ndim == 1 for each in arrays):
            return RaggedArray.of(arrays, np.result_type(np.int64, *kinds))
    except (TypeError, ValueError, OverflowError):
        pass
    raise TreepackError(f"{source}: {name} has an entry that is not a list of token ids")


def wrong_sets(kept: RaggedArray, sampled: NDArray[Any]) -> NDArray[np.bool_]:
    """Return True for each set that does not ascend from 0 on, or lacks its id of `sampled` [n]; empty ones are right.

    The slow form: `any(b <= a for a, b in pairwise([-1, *ids])) or (ids and own not in ids)` for each `ids` and `own`.
    """
    # Sets [2 5] [] [5 3], sampled [5 1 3] -> owners [0 0 2 2]. Set 2 does not ascend.
    ids, sizes = kept.flat, kept.sizes
    owners = np.repeat(np.arange(len(kept)), sizes)
    good = (np.bincount(owners[ids == sampled[owners]], minlength=len(kept)) > 0) | (sizes == 0)
    good[owners[1:][(owners[1:] == owners[:-1]) & (ids[1:] <= ids[:-1])]] = False
    good[owners[ids < 0]] = False
    wrong: NDArray[np.bool_] = ~good
    return wrong


def known_sets(kept: RaggedArray | None) -> RaggedArray | None:
    """Return `kept`, None if all of its sets are empty."""
    return kept if kept is not None and len(kept.flat) else None
