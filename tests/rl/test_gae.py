"""Generalised advantage estimation on trees equals that of each trajectory alone, with the same critic."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import oracle_rl as oracle
from support.command_line import Run
from support.critic_values import value_after, with_values
from support.markov_law import MarkovLaw
from support.sampled_trees import sample_trees, three_tokens
from support.strategies import make, trajectories
from support.trie_files import saved
from treepack.analysis.check import check
from treepack.pack.files import read_rows
from treepack.rl.advantages.advantage_options import TRUNCATED_KEY, AdvantageOptions
from treepack.rl.advantages.directory import write_advantages
from treepack.rl.advantages.estimate import estimate_advantages, with_advantages
from treepack.rl.advantages.gae import LIMITS
from treepack.rollout.options import TreeOptions
from treepack.rollout.records import tree_trajectories
from treepack.rollout.tree import ANSWER, REPETITION, STOPPED, TOO_DEEP, TOO_LONG
from treepack.trajectory import Tokens, Trajectory, positions
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie, trajectories_of

UNIT = st.sampled_from([0.0, 1.0]) | st.floats(0, 1)
FINISHES = [{}, {"finish": "answer"}, {"finish": "length"}, {"finish": "depth"}, {"finish": "repetition"}]


@st.composite
def rewarded(draw: st.DrawFn) -> list[Trajectory]:
    """Trajectories with rewards, some of them cut off; observations are between their trained spans."""
    return [
        replace(item, reward=draw(st.floats(-3, 3)), metadata=draw(st.sampled_from(FINISHES)))
        for item in draw(trajectories())
    ]


def content_of(item: Trajectory) -> Tokens:
    assert isinstance(item.content, Tokens)
    return item.content


def alone(item: Trajectory, *, gamma: float = 1.0, lam: float = 0.95) -> tuple[list[float], list[float], list[float]]:
    """Advantages, returns and old values of a trajectory, from its own tokens."""
    content, tokens = content_of(item), content_of(item).tokens.tolist()
    values = [value_after(tokens[:i]) for i in positions(content.starts, content.ends).tolist()]
    after = value_after(tokens) if item.metadata.get("finish") in ("length", "depth") else None
    assert item.reward is not None
    advantages, returns = oracle.gae(values, item.reward, after, gamma=gamma, lam=lam)
    return advantages, returns, values


def estimated(trie: Trie, **options: Any) -> dict[str, Tokens]:
    """The trained tokens of each trajectory after `advantages --estimator gae`."""
    chosen = AdvantageOptions("gae", **options)
    filled = with_advantages(trie, estimate_advantages(trie, chosen), rejected=chosen.rejected)
    return {item.trajectory_id: content_of(item) for item in trajectories_of(filled)}


def close(values: Any, expected: Any) -> None:
    np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-12)


@given(rewarded(), UNIT, UNIT, st.sampled_from(["all", "group", "none"]))
def test_every_trajectory_gets_the_advantages_and_returns_that_it_has_alone(
    rollouts: list[Trajectory], gamma: float, lam: float, share: str
) -> None:
    of = estimated(with_values(build_trie(rollouts, share=share)), gamma=gamma, lam=lam)
    assert len(of) == len(rollouts)
    for item in rollouts:
        content = of[item.trajectory_id]
        advantages, returns, values = alone(item, gamma=gamma, lam=lam)
        close(content.advantage, advantages)
        close(content.returns, returns)
        np.testing.assert_array_equal(content.old_values, values)


@given(rewarded())
def test_without_discount_an_ended_trajectory_returns_its_reward_and_lambda_0_takes_one_step(
    rollouts: list[Trajectory],
) -> None:
    ended = [replace(item, metadata={}) for item in rollouts]
    trie = with_values(build_trie(ended))
    for name, content in estimated(trie, lam=1.0).items():
        (reward,) = (item.reward for item in ended if item.trajectory_id == name)
        close(content.returns, np.full(content.num_trained, reward))
    for name, content in estimated(trie, lam=0.0).items():
        (reward,) = (item.reward for item in ended if item.trajectory_id == name)
        assert content.old_values is not None
        close(content.returns, [*content.old_values[1:], reward])


@pytest.mark.parametrize(
    ("metadata", "key", "truncated"),
    [
        ({"is_truncated": True}, "is_truncated", True),
        ({"is_truncated": False}, "is_truncated", False),
        ({"stop_reason": "max_tokens"}, "stop_reason", True),
        ({"finish": "repetition"}, "finish", False),
        ({"finish": "length"}, "none", False),
        ({"finish": ["length"]}, "finish", False),
        ({}, "finish", False),
        ({"metadata": {"finish": "length"}}, "finish", True),
        ({"info": {"is_truncated": True}}, "is_truncated", True),
        ({"extra_info": {"finish": "stop"}}, "finish", False),
        ({"extra": {"stop_reason": "length"}}, "stop_reason", True),
        ({"other": {"finish": "length"}}, "finish", False),
    ],
)
def test_the_metadata_says_if_the_value_after_the_end_counts(
    metadata: dict[str, Any], key: str, truncated: bool
) -> None:
    trie = with_values(build_trie([make("a", [1, 2, 3], reward=1.0, metadata=metadata)]))
    estimates = estimate_advantages(trie, AdvantageOptions("gae", truncated=key, lam=1.0))
    assert estimates.num_truncated == int(truncated)
    close(estimates.columns["returns"], [1.0 + value_after([1, 2, 3]) * truncated] * 2)


def test_a_field_of_truncation_that_no_rollout_has_is_a_note(treepack: Run, tmp_path: Path) -> None:
    metadata: list[dict[str, Any]] = [{"stop_reason": "length"}, {}]
    made = [make(f"t{i}", [1, 2, 3 + i], reward=1.0, metadata=each) for i, each in enumerate(metadata)]
    trie = with_values(build_trie(made))
    known = estimate_advantages(trie, AdvantageOptions("gae", truncated="stop_reason"))
    assert (known.num_truncated, known.notes) == (1, ())
    assert estimate_advantages(trie, AdvantageOptions("gae", truncated="none")).notes == ()
    for key in ("finish", "stop"):
        estimates = estimate_advantages(trie, AdvantageOptions("gae", truncated=key))
        assert estimates.num_truncated == 0
        assert [note.startswith(f"no rollout has the field {key}, so every") for note in estimates.notes] == [True]
    saved(trie, tmp_path / "trie")
    shown = treepack("advantages", tmp_path / "trie", "--estimator", "gae", "--out", tmp_path / "out")
    assert shown.status == 0
    assert "note: no rollout has the field finish" in shown.err


@given(rewarded(), st.sampled_from(["group", "batch"]))
def test_whitened_advantages_have_mean_0_and_deviation_1_in_their_scope_and_keep_the_returns(
    rollouts: list[Trajectory], whiten: str
) -> None:
    trie = with_values(build_trie(rollouts))
    raw, white = estimated(trie), estimated(trie, whiten=whiten, epsilon=0.0)
    scopes: dict[Any, list[str]] = {}
    for item in rollouts:
        key = (item.step, item.group_id if whiten == "group" else None)
        scopes.setdefault(key, []).append(item.trajectory_id)
    for names in scopes.values():
        before, after = (np.concatenate([of[name].advantage for name in names]) for of in (raw, white))
        spread = before.std(ddof=1) if len(before) > 1 else 0.0
        # Below this, the deviation is rounding.
        expected = (before - before.mean()) / spread if spread > 1e-9 * np.abs(before).max() else None
        if expected is not None:
            np.testing.assert_allclose(after, expected, rtol=1e-9, atol=1e-6)
        for name in names:
            np.testing.assert_array_equal(white[name].returns, raw[name].returns)


def test_a_group_without_a_reward_is_left_out_and_the_values_of_the_others_stay(tmp_path: Path) -> None:
    rollouts = [
        make("a", [1, 2, 3], reward=1.0),
        make("b", [1, 2, 4], group="h", reward=None),
        make("c", [1, 5], reward=0.0),
    ]
    trie = with_values(build_trie(rollouts))
    source = saved(trie, tmp_path / "trie")
    summary = write_advantages(source, tmp_path / "out", AdvantageOptions("gae"))
    assert summary.estimates.rejected == {"rewards missing": 1}
    check(tmp_path / "out")
    again = read_trie(tmp_path / "out", token_values=True)
    np.testing.assert_array_equal(again.token_values, with_values(build_trie([rollouts[0], rollouts[2]])).token_values)
    write_advantages(source, tmp_path / "kept", AdvantageOptions("gae", rejected="zero"))
    check(tmp_path / "kept")
    assert {
        item.trajectory_id: content_of(item).returns is None for item in trajectories_of(read_trie(tmp_path / "kept"))
    } == {
        "a": False,
        "b": True,
        "c": False,
    }


def test_the_commands_bring_returns_and_old_values_into_the_rows(treepack: Run, tmp_path: Path) -> None:
    rollouts = [
        make("a", [1, 2, 3, 4], spans=[(1, 2, 1.0), (3, 4, 1.0)], reward=1.0, metadata={"finish": "length"}),
        make("b", [1, 2, 5], reward=0.0),
    ]
    saved(with_values(build_trie(rollouts)), tmp_path / "trie")
    options = "--estimator gae --lambda 0.5 --gamma 0.9 --out".split()
    done = treepack("advantages", tmp_path / "trie", *options, tmp_path / "out")
    assert (done.status, done.notes) == (0, "")
    assert re.search(r"rollouts cut off +1\n", done.out)
    assert treepack("pack", tmp_path / "out", "--capacity", 64, "--out", tmp_path / "packed").status == 0
    assert treepack("stats", tmp_path / "packed", "--check").status == 0
    (row,) = read_rows(tmp_path / "packed")
    assert row.terms is not None
    for i, name in enumerate(row.trajectory_ids):
        (item,) = (each for each in rollouts if each.trajectory_id == name)
        own = row.terms.trajectory == i
        for column, expected in zip(
            (row.terms.advantage, row.terms.returns, row.terms.old_values),
            alone(item, gamma=0.9, lam=0.5),
            strict=True,
        ):
            assert column is not None
            close(column[own], expected)


@given(rewarded(), UNIT, UNIT)
def test_before_there_is_a_critic_the_returns_are_discounted_rewards_and_there_are_no_old_values(
    rollouts: list[Trajectory], gamma: float, lam: float
) -> None:
    for name, content in estimated(build_trie(rollouts), values="zero", gamma=gamma, lam=lam).items():
        (reward,) = (item.reward for item in rollouts if item.trajectory_id == name)
        assert reward is not None
        expected = [reward * (gamma * lam) ** k for k in reversed(range(content.num_trained))]
        close(content.returns, expected)
        close(content.advantage, expected)
        assert content.old_values is None


def test_limits_of_the_sampler_count_as_cut_off_and_its_other_endings_do_not() -> None:
    law = MarkovLaw(three_tokens(), stop=0)
    options = TreeOptions(width=6, max_tokens=5, segment=2, depth=3)
    trees = sample_trees(law, options, [[1], [2]], reward=lambda ids: float(len(ids)))
    items = [item for tree in trees for item in tree_trajectories(tree)]
    limits = {"length": True, "depth": True, "stop": False, "answer": False, "repetition": False}
    expected = [limits[item.metadata[TRUNCATED_KEY]] for item in items]
    assert len(set(expected)) == 2
    assert set(limits) == {ANSWER, STOPPED, TOO_LONG, TOO_DEEP, REPETITION}
    trie = with_values(build_trie(items))
    assert estimate_advantages(trie, AdvantageOptions("gae")).num_truncated == sum(expected)
    assert {name for name, is_limit in limits.items() if is_limit} == LIMITS & set(limits)
