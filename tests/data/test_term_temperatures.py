"""Pairs of token and temperature: each is scored once, whichever trajectories share the token."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.strategies import make
from support.tempered import tempered
from treepack.data.batch import Batch, TermTensors, empty_batch, make_batch
from treepack.data.row_parts import RowPart, restrict_row
from treepack.model.collation import collate
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie


def one_row(rollouts: list[Trajectory]) -> Row:
    trie = build_trie([replace(item, step=None) for item in rollouts])
    (row,) = pack_rows(trie, plan_rows(trie, capacity=1000, method="contiguous"))
    return row


def pairs(terms: TermTensors) -> list[tuple[int, str]]:
    """Token and temperature of each entry of `tokens`; the temperature as text, because NaN is not equal to itself."""
    assert terms.temperature is not None
    return [(token, str(value)) for token, value in zip(terms.tokens.tolist(), terms.temperature.tolist(), strict=True)]


def terms_of(batch: Batch) -> TermTensors:
    assert batch.terms is not None
    return batch.terms


@given(tempered())
def test_each_pair_of_token_and_temperature_occurs_once(rollouts: list[Trajectory]) -> None:
    row = one_row([replace(rollouts[0], temperature=0.5), *rollouts[1:]])
    assert row.terms is not None
    assert row.terms.temperature is not None
    terms = terms_of(make_batch(row, multiple=8))
    assert terms.index.dtype == torch.int32
    # The pair that a term refers to is its own, and no pair is without a term or there twice.
    own = list(zip(row.terms.token.tolist(), map(str, row.terms.temperature.tolist()), strict=True))
    assert [pairs(terms)[i] for i in terms.index.tolist()] == own
    assert sorted(pairs(terms)) == sorted(set(own))
    # Sorted by token, then by temperature, NaN last.
    assert terms.temperature is not None
    keys = zip(terms.tokens.tolist(), terms.temperature.nan_to_num(torch.inf).tolist(), strict=True)
    assert all(a < b for a, b in pairwise(keys))


@given(tempered())
def test_without_temperatures_every_trained_token_occurs_once(rollouts: list[Trajectory]) -> None:
    contents = [item.content for item in rollouts if isinstance(item.content, Tokens)]
    row = one_row([make(f"t{i}", content.tokens.tolist(), reward=1.0) for i, content in enumerate(contents)])
    terms = terms_of(make_batch(row))
    assert row.terms is not None
    assert terms.temperature is None
    assert terms.tokens.tolist() == sorted(set(row.terms.token.tolist()))
    assert terms.tokens[terms.index].tolist() == row.terms.token.tolist()


def test_terms_that_share_a_token_at_one_temperature_share_its_entry() -> None:
    known = {"a": 1.0, "b": 0.5, "c": 1.0, "d": None, "e": None}
    rollouts = [make(name, [1, 2, 3], reward=1.0, temperature=value) for name, value in known.items()]
    terms = terms_of(make_batch(one_row(rollouts)))
    assert pairs(terms) == [(1, "0.5"), (1, "1.0"), (1, "nan"), (2, "0.5"), (2, "1.0"), (2, "nan")]


def test_collated_rows_keep_their_pairs_and_a_row_without_temperatures_has_nan() -> None:
    tempered_row = make_batch(one_row([make("a", [1, 2], reward=1.0, temperature=0.5)]))
    plain = make_batch(one_row([make("b", [1, 2, 3], reward=1.0)]))
    terms = collate([tempered_row, plain, empty_batch(2, terms=True)])["terms"]
    assert pairs(terms) == [(1, "0.5"), (4, "nan"), (5, "nan")]
    assert terms.index.tolist() == [0, 1, 2]


@given(tempered(), st.data())
def test_a_part_of_a_row_keeps_the_pairs_of_its_terms(rollouts: list[Trajectory], data: st.DataObject) -> None:
    batch = make_batch(one_row([replace(rollouts[0], temperature=0.5), *rollouts[1:]]))
    count = len(batch.trajectory_ids)
    chosen = tuple(data.draw(st.lists(st.sampled_from(range(count)), min_size=1, unique=True).map(sorted)))
    part = terms_of(restrict_row(batch, RowPart(chosen, 0, 99)))
    whole = terms_of(batch)
    is_chosen = np.isin(whole.trajectory.numpy(), chosen)
    expected = [pairs(whole)[i][1] for i in whole.index[torch.from_numpy(is_chosen)].tolist()]
    assert [pairs(part)[i][1] for i in part.index.tolist()] == expected
    assert len(set(pairs(part))) == len(part.tokens) == len(set(part.index.tolist()))
