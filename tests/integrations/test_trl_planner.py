"""Planners for TRL's AsyncGRPOTrainer keep its promises, whatever the order of arrival."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treepack import TreepackError
from treepack.integrations import trl
from treepack.integrations.trl_planner import PlannedRow, TreePlanner, sort_samples


def make_sample(ids: list[int], first: int, group: int = 0) -> dict[str, Any]:
    """Return a sample whose tokens are trained from `first` on."""
    mask = [int(i >= first) for i in range(len(ids))]
    tensors = {"input_ids": torch.tensor(ids), "completion_mask": torch.tensor(mask)}
    logprobs = -torch.arange(1.0, len(ids) + 1) / 10
    return {**tensors, "old_log_probs": logprobs, "advantage": 0.5 * len(ids), "group_id": group, "metrics": {}}


samples = st.builds(make_sample, st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(0, 7))


def tokens_of(micro_batches: list[list[PlannedRow]]) -> list[list[list[int]]]:
    return [[row.tokens.tolist() for row in rows] for rows in micro_batches]


def sequences(planned: list[list[PlannedRow]]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(sample["input_ids"].tolist()) for rows in planned for row in rows for sample in row.samples)


@given(st.lists(samples, min_size=4, max_size=20), st.integers(1, 3))
def test_rows_keep_the_budget_and_no_rank_is_without_a_sample(given: list[dict[str, Any]], ranks: int) -> None:
    planned = list(TreePlanner(given, ranks, 8, defaultdict(list), window=len(given)))
    for rows in planned:
        assert len(rows) == ranks
        assert all(row.samples for row in rows)
        assert all(len(row.tokens) <= 8 for row in rows)
        assert all(sum(int(sample["completion_mask"].sum()) for sample in row.samples) <= 8 for row in rows)
    missing = Counter(tuple(sample["input_ids"].tolist()) for sample in given) - sequences(planned)
    assert missing.total() < ranks  # samples that do not fill all ranks


@given(st.lists(samples, min_size=2, max_size=12), st.randoms())
def test_the_order_of_arrival_does_not_change_the_rows(given: list[dict[str, Any]], rng: random.Random) -> None:
    shuffled = rng.sample(given, len(given))
    one, other = (list(TreePlanner(each, 2, 8, defaultdict(list), window=12)) for each in (given, shuffled))
    assert tokens_of(one) == tokens_of(other)


def test_the_planner_that_is_gone_names_the_other_one() -> None:
    with pytest.raises(TreepackError, match="CountPlanner is gone; put TreePlanner in the place of TokenBudgetBatcher"):
        trl.CountPlanner  # noqa: B018
    with pytest.raises(AttributeError, match="CountPlaner"):
        trl.CountPlaner  # noqa: B018


def test_a_sample_beyond_the_budget_is_counted_and_dropped() -> None:
    metrics: dict[str, list[Any]] = defaultdict(list)
    given = [make_sample([1] * 9, 1), make_sample([1, 2], 1)]
    planned = list(TreePlanner(given, 1, 8, metrics))
    assert sequences(planned) == Counter({(1, 2): 1})
    assert metrics == {"batch/dropped_oversize_total": [1.0]}


def test_a_window_smaller_than_the_ranks_is_refused() -> None:
    with pytest.raises(TreepackError, match="window is 1 for 2 processes"):
        TreePlanner([], 2, 8, {}, window=1)


@pytest.mark.integrations
@given(st.lists(samples, min_size=1, max_size=8))
def test_a_row_packs_as_the_row_of_trl_does(given: list[dict[str, Any]]) -> None:
    from trl.experimental.async_grpo.packing import TreeRow

    ordered, shared = sort_samples(given)
    theirs, ours = cast("Any", TreeRow)(), PlannedRow(ordered, shared)
    for sample in ordered:
        theirs.add(sample)
    expected, packed = theirs.pack(), ours.pack()
    assert packed.keys() == expected.keys()
    for name, column in expected.items():
        assert packed[name].dtype == column.dtype
        assert torch.equal(packed[name], column)
    assert (len(ours.tokens), ours.load) == (len(theirs.tokens), theirs.load)


@pytest.mark.integrations
def test_the_collator_of_trl_takes_the_rows_and_they_have_fewer_tokens() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout, TokenBudgetBatcher

    rng = random.Random(0)
    prompts = [[rng.randrange(50) for _ in range(20)] for _ in range(6)]
    given = [make_sample(prompts[i % 6] + [rng.randrange(50) for _ in range(8)], 20, group=i % 6) for i in range(48)]
    rng.shuffle(given)
    totals = []
    planners: list[Any] = [TokenBudgetBatcher, TreePlanner]
    for planner in planners:
        metrics: dict[str, list[Any]] = defaultdict(list)
        collator = DataCollatorForRollout(pad_token_id=0, num_processes=2, metrics=metrics, token_budget=64)
        batches = [collator([rows]) for rows in planner(given, 2, 64, metrics)]
        trained = sum(int((batch["token_index"] >= 0).sum()) for batch in batches)
        totals.append((sum(float(batch["global_n_forward_tokens"][0]) for batch in batches), trained))
    (theirs, trained), (ours, all_trained) = totals
    assert all_trained == 48 * 8 >= trained
    assert ours / all_trained < 0.8 * theirs / trained
