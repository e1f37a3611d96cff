"""Entropies and critic values of rollouts' tokens, lined up with the trajectories of a trie.

    packed rows with term_entropy --entropies_of_terms--> one array per trajectory, or None
    JSONL or Parquet of records   --read_signals-------> Signals(entropies, values, num_unknown)

A record names its rollout as a rollout file does (`id`, `trajectory_id`, ...) and has `entropies`, `values` or both:
numbers over the trained tokens, over the whole sequence, or from the first trained token to the end. That of a token
belongs to the distribution, and the state, that it was drawn from. Other fields are not looked at, so the rollout file
itself will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.columns import SpanView
from treepack.errors import TreepackError
from treepack.ingest.readers.fields import IDS
from treepack.ingest.readers.records import Record, read_records
from treepack.ingest.readers.token_fields import number_values
from treepack.trajectory import Float64, Int32, Int64, positions
from treepack.trie.trie import Trie

ENTROPIES, VALUES = "entropies", "values"

PerToken = Sequence[Float64 | None]


@dataclass(frozen=True, slots=True)
class Signals:
    """One array per trajectory of the trie, over its trained tokens, or None; each list is None if no record has any.

    `num_unknown` counts the records of rollouts that the trie does not hold.
    """

    entropies: list[Float64 | None] | None
    values: list[Float64 | None] | None
    num_unknown: int


def entropies_of_terms(
    trie: Trie, rows: Iterable[tuple[Sequence[str], Int32, NDArray[np.floating[Any]]]]
) -> list[Float64 | None]:
    """Entropies of the trained tokens of each trajectory of `trie`, from packed rows; None where no row has it.

    Each of `rows` is its trajectory_ids, its term_trajectory and its term_entropy.
    """
    place = {name: i for i, name in enumerate(trie.trajectories["trajectory_id"].to_pylist())}
    found: list[Float64 | None] = [None] * trie.num_trajectories
    for names, owner, entropy in rows:
        order = np.argsort(owner, kind="stable")
        bounds = np.searchsorted(owner[order], np.arange(len(names) + 1)).tolist()
        values = entropy[order].astype(np.float64)
        for k, name in enumerate(names):
            if name in place:
                found[place[name]] = values[bounds[k] : bounds[k + 1]]
    return found


def read_signals(path: str | Path, trie: Trie) -> Signals:
    """The entropies and values that the records of `path` hold for the trajectories of `trie`.

    Raises:
        TreepackError: unreadable, a rollout that is named twice, a field that is no list of numbers or has a number of
            them that fits nothing, or no entropies and values at all.
    """
    place = {name: i for i, name in enumerate(trie.trajectories["trajectory_id"].to_pylist())}
    spans, lengths = SpanView.of(trie.trajectories), trie.lengths
    found: dict[str, list[Float64 | None]] = {name: [None] * trie.num_trajectories for name in (ENTROPIES, VALUES)}
    seen: set[str] = set()
    used, num_unknown = set[str](), 0
    for record in read_records(str(path)):
        name = _name(record)
        if name in seen:
            raise TreepackError(f"{record.source}: the rollout {name} is named a second time; give each once")
        seen.add(name)
        index = place.get(name)
        if index is None:
            num_unknown += 1
            continue
        starts, ends, _ = spans[index]
        trained = positions(starts, ends)
        for field in (ENTROPIES, VALUES):
            if (given := record.value.get(field)) is not None:
                used.add(field)
                what = f"{record.source}: {field}"
                found[field][index] = _at_trained(given, trained, int(lengths[index]), record, field, what)
    if not used:
        held = f"holds neither {ENTROPIES} nor {VALUES} of a rollout of the trie"
        raise TreepackError(f"{path}: {held}; expected records with the rollout's id and lists under these names")
    entropies, values = (found[name] if name in used else None for name in (ENTROPIES, VALUES))
    return Signals(entropies, values, num_unknown)


def _name(record: Record) -> str:
    return next((str(record.value[name]) for name in IDS if record.value.get(name) is not None), record.label)


def _at_trained(given: Any, trained: Int64, length: int, record: Record, field: str, what: str) -> Float64:
    if not isinstance(given, list | np.ndarray):
        raise TreepackError(f"{what} is no list; expected one number per token")
    values = number_values(given, source=record.source, name=field)
    rest = length - int(trained[0])
    places = {length: trained, rest: trained - trained[0], len(trained): np.arange(len(trained))}
    if (at := places.get(len(values))) is not None:
        picked: Float64 = values[at]
        return picked
    raise TreepackError(
        f"{what} has {len(values)} numbers; expected {len(trained)} (the trained tokens), "
        f"{rest} (from the first of them on) or {length} (the whole sequence)"
    )
