"""Entropies and critic values of the tokens of rollouts, aligned with the trajectories of a trie.

    packed rows with term_entropy --entropies_of_terms--> one array per trajectory, or None
    JSONL or Parquet of records   --read_signals-------> TokenSignals(entropies, values, num_unknown)

A record names its rollout by the field that rollout files use (`id`, `trajectory_id`, ...) and has `entropies`,
`values` or both: one number per trained token, per token of the whole sequence, or per token from the first trained one
to the end. The entropy of a token belongs to the distribution from which it was drawn, its value to the state before
it. Other fields are ignored, so the rollout file itself is a valid input if it has these fields.

        tokens  p p p y y t t y         p prompt, y trained, t tool result
        lengths accepted: 8 (all), 5 (y y t t y), 3 (y y y)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.files.input_files.record_files import read_records
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.rollout_facts import IDS
from treepack.ingest.readers.fields.token_fields import number_values
from treepack.sequences import SpanView
from treepack.trajectory import Float64, Int32, Int64, positions
from treepack.trie.trie import Trie

_ENTROPIES, _VALUES = "entropies", "values"

PerToken = Sequence[Float64 | None]


@dataclass(frozen=True, slots=True)
class TokenSignals:
    """One array per trajectory of the trie, over its trained tokens, or None. A list is None if no record has it.

    `num_unknown` counts the records of rollouts that are not in the trie.
    """

    entropies: list[Float64 | None] | None
    values: list[Float64 | None] | None
    num_unknown: int


def entropies_of_terms(
    trie: Trie, rows: Iterable[tuple[Sequence[str], Int32, NDArray[np.floating[Any]]]]
) -> list[Float64 | None]:
    """Collect the entropies of the trained tokens of each trajectory of `trie` from packed rows; None if no row has it.

    Each of `rows` is a tuple of its trajectory_ids, its term_trajectory and its term_entropy.
    """
    index_of = {name: i for i, name in enumerate(trie.trajectories["trajectory_id"].to_pylist())}
    entropies: list[Float64 | None] = [None] * trie.num_trajectories
    for names, owner, entropy in rows:
        # owner [1, 0, 1] -> order [1, 0, 2], bounds [0, 1, 3]: entropy[order][1:3] belongs to the second name.
        order = np.argsort(owner, kind="stable")
        bounds = np.searchsorted(owner[order], np.arange(len(names) + 1)).tolist()
        values = entropy[order].astype(np.float64)
        for k, name in enumerate(names):
            if name in index_of:
                entropies[index_of[name]] = values[bounds[k] : bounds[k + 1]]
    return entropies


def read_signals(path: str | Path, trie: Trie) -> TokenSignals:
    """Read the entropies and values of the trajectories of `trie` from the records of `path`.

    Raises:
        TreepackError: unreadable file, two records of one rollout, a field that is not a list of numbers or has a wrong
            length, or no record with entropies or values.
    """
    index_of = {name: i for i, name in enumerate(trie.trajectories["trajectory_id"].to_pylist())}
    spans, lengths = SpanView.of(trie.trajectories), trie.lengths
    signals: dict[str, list[Float64 | None]] = {name: [None] * trie.num_trajectories for name in (_ENTROPIES, _VALUES)}
    seen: set[str] = set()
    used, num_unknown = set[str](), 0
    for record in read_records(str(path)):
        name = _name(record)
        if name in seen:
            raise TreepackError(f"{record.source}: an earlier record has the rollout {name}; give each rollout once")
        seen.add(name)
        index = index_of.get(name)
        if index is None:
            num_unknown += 1
            continue
        starts, ends, _ = spans[index]
        trained = positions(starts, ends)
        for field in (_ENTROPIES, _VALUES):
            if (numbers := record.value.get(field)) is not None:
                used.add(field)
                signals[field][index] = _numbers_at(numbers, trained, int(lengths[index]), record, field)
    if not used:
        fault = f"has neither {_ENTROPIES} nor {_VALUES} of any rollout of the trie"
        raise TreepackError(f"{path}: {fault}; expected records with the rollout's id and lists under these names")
    entropies, values = (signals[name] if name in used else None for name in (_ENTROPIES, _VALUES))
    return TokenSignals(entropies, values, num_unknown)


def _name(record: Record) -> str:
    return next((str(record.value[name]) for name in IDS if record.value.get(name) is not None), record.label)


def _numbers_at(numbers: Any, trained: Int64, length: int, record: Record, field: str) -> Float64:
    """Return the numbers at the `trained` positions of a sequence of `length` tokens.

    Raises:
        TreepackError: no list of numbers, or a length that none of the three alignments has.
    """
    what = f"{record.source}: {field}"
    if not isinstance(numbers, list | np.ndarray):
        raise TreepackError(f"{what} is not a list; expected one number per token")
    values = number_values(numbers, source=record.source, name=field)
    rest = length - int(trained[0])
    # The header: trained [3, 4, 7] -> {8: [3, 4, 7], 5: [0, 1, 4], 3: [0, 1, 2]}. If two lengths are equal, the indices
    # are too.
    places = {length: trained, rest: trained - trained[0], len(trained): np.arange(len(trained))}
    if (at := places.get(len(values))) is not None:
        selected: Float64 = values[at]
        return selected
    raise TreepackError(
        f"{what} has {len(values)} numbers; expected {len(trained)} (the trained tokens), "
        f"{rest} (from the first of them) or {length} (the whole sequence)"
    )
