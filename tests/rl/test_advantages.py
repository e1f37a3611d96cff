"""Advantages: equality with the slow twins, the properties of sums and stars, and the terms of packed rows."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import oracle_rl as oracle
from support.oracle_rl import Rollout
from support.paths import ROOT
from support.strategies import make, trajectories
from treepack.pack.plan.planning import plan_rows
from treepack.pack.rows import pack_rows
from treepack.rl.advantages.advantage_options import ESTIMATORS, AdvantageOptions
from treepack.rl.advantages.estimate import AdvantageEstimates, estimate_advantages, with_advantages
from treepack.rl.advantages.flat import dr_grpo, grpo, rloo
from treepack.rl.advantages.tree import tree_grpo_segments, treerpo
from treepack.rl.group_tree import group_codes
from treepack.rl.segments import segment_tree
from treepack.trajectory import Float64, Tokens, Trajectory, positions
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie, trajectories_of

few = settings(max_examples=16)  # every example builds a trie
# 0.1 and 1/3 have no exact binary form, so means of equal rewards are off by rounding.
REWARDS = [0.0, 0.5, 1.0, 0.1, 1 / 3]


def tokens_of(trajectory: Trajectory) -> Tokens:
    assert isinstance(trajectory.content, Tokens)
    return trajectory.content


@st.composite
def forests(draw: st.DrawFn, *, missing: bool = True) -> tuple[Trie, str]:
    """Draw a trie of rewarded trajectories, often of several groups and steps, and a `segment` to cut it by.

    The trie always contains a group x of two different rewards. Another group may lack one of its rewards.
    """
    made = draw(trajectories(max_count=10))
    made += [
        make("x0", [0, 1, 1, 2], group="x", step=made[0].step, reward=0.0),
        make("x1", [0, 1, 2, 1, 0], group="x", step=made[0].step, reward=1.0),
    ]
    segment = draw(st.sampled_from(["node", "turn", "recorded", "1", "2", "3"]))
    members = []
    for trajectory in made:
        offsets = draw(st.sets(st.integers(1, len(tokens_of(trajectory).tokens) - 1), min_size=1))
        metadata = {"segments": sorted(offsets)} if segment == "recorded" else {}
        reward = trajectory.reward if trajectory.group_id == "x" else draw(st.sampled_from(REWARDS))
        members.append(replace(trajectory, reward=reward, metadata=metadata))
    if missing and draw(st.booleans()) and members[0].group_id != "x":
        members[0] = replace(members[0], reward=None)
    return build_trie(members, share=draw(st.sampled_from(["all", "group"]))), segment


def as_rollouts(members: list[Trajectory], segment: str, min_depth: int = 0) -> list[Rollout]:
    """Convert members of groups to rollouts of the oracle, cut by `segment`."""
    rollouts = []
    for t in members:
        content = tokens_of(t)
        trained = positions(content.starts, content.ends).tolist()
        cuts = [p for p in trained if p - 1 not in trained]
        rollouts.append(Rollout(content.tokens.tolist(), cuts, str(t.group_id), t.step or 0, float(t.reward or 0)))
    cut = {
        "node": oracle.branch_cuts,
        "turn": oracle.turn_cuts,
        "recorded": lambda _: [t.metadata["segments"] for t in members],
    }.get(segment) or partial(oracle.even_cuts, size=int(segment))
    # min_depth removes cuts within so many tokens after the first one: [2, 4, 7] with 3 -> [2, 7].
    return [
        replace(rollout, cuts=[at for at in cuts if at == cuts[0] or at - cuts[0] >= min_depth])
        for rollout, cuts in zip(rollouts, cut(rollouts), strict=True)
    ]


def estimate(trie: Trie, **options: Any) -> tuple[list[Trajectory], AdvantageEstimates]:
    """Return the estimates and the trajectories to which they belong."""
    everyone = list(trajectories_of(trie))
    estimates = estimate_advantages(trie, AdvantageOptions(**options))
    assert len(estimates.kept) >= 2
    return [everyone[i] for i in estimates.kept], estimates


def close(values: Any, expected: Any) -> None:
    np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-12)


FLAT_CASES = [
    ("grpo", {}),
    ("grpo", {"std": "batch"}),
    ("dr-grpo", {}),
    ("rloo", {}),
    ("reinforce++", {}),
]


@pytest.mark.parametrize(("estimator", "options"), FLAT_CASES)
@few
@given(forest=forests())
def test_flat_estimators_equal_their_formulas(estimator: str, options: Any, forest: Any) -> None:
    kept, estimates = estimate(forest[0], estimator=estimator, **options)
    close(estimates.values, oracle.flat(as_rollouts(kept, "node"), estimator, batch="std" in options))


@pytest.mark.parametrize("batch", [False, True])
@few
@given(
    forest=forests(),
    variants=st.fixed_dictionaries(
        {name: st.booleans() for name in ("size_weighted", "reject_subgroups", "without_root", "reject_equal")}
    ),
    min_depth=st.sampled_from([0, 0, 2, 3]),
)
def test_treepo_equals_its_equations(batch: bool, forest: Any, variants: dict[str, bool], min_depth: int) -> None:
    std = "batch" if batch else "group"
    kept, estimates = estimate(
        forest[0], estimator="treepo", segment=forest[1], min_depth=min_depth, std=std, **variants
    )
    slow = {name: value for name, value in variants.items() if name != "reject_equal"}
    close(estimates.values, oracle.treepo(as_rollouts(kept, forest[1], min_depth), batch=batch, **slow))


@few
@given(forest=forests(), min_depth=st.sampled_from([0, 0, 2]))
def test_tree_grpo_equals_its_equation(forest: Any, min_depth: int) -> None:
    kept, estimates = estimate(forest[0], estimator="tree-grpo", segment=forest[1], min_depth=min_depth)
    close(estimates.values, oracle.tree_grpo(as_rollouts(kept, forest[1], min_depth)))


SEGMENT_CASES = [
    ("treerpo", {}),
    ("treerl", {}),
    ("treerl", {"leaf_scaled": True}),
    ("tree-grpo", {"per_segment": True}),
]


@pytest.mark.parametrize(("estimator", "options"), SEGMENT_CASES)
@few
@given(forest=forests(), min_depth=st.sampled_from([0, 0, 2]))
def test_every_trained_token_gets_the_advantage_of_its_segment(
    estimator: str, options: dict[str, Any], forest: Any, min_depth: int
) -> None:
    kept, estimates = estimate(forest[0], estimator=estimator, segment=forest[1], min_depth=min_depth, **options)
    rollouts = as_rollouts(kept, forest[1], min_depth)
    scaled = {name: value for name, value in options.items() if name == "leaf_scaled"}
    lines = oracle.segments(rollouts, estimator, **scaled)
    expected = [
        oracle.of_token(rollout, line, position)
        for trajectory, rollout, line in zip(kept, rollouts, lines, strict=True)
        for position in positions(tokens_of(trajectory).starts, tokens_of(trajectory).ends).tolist()
    ]
    close(estimates.values, expected)


def by_id(trie: Trie, **options: Any) -> dict[str, list[float]]:
    """Return the advantages of the trained tokens of each kept trajectory."""
    filled = with_advantages(trie, estimate_advantages(trie, AdvantageOptions(**options)))
    lines = {}
    for trajectory in trajectories_of(filled):
        content = tokens_of(trajectory)
        assert (content.advantage is None) != (trajectory.advantage is None)
        lines[trajectory.trajectory_id] = line_of(trajectory).tolist()
    return lines


def line_of(trajectory: Trajectory) -> Float64:
    """Return the advantage of each trained token."""
    content = tokens_of(trajectory)
    return np.full(content.num_trained, trajectory.advantage) if content.advantage is None else content.advantage


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "gae"])
@few
@given(forest=forests(), names=st.permutations([0, 1, 2]))
def test_neither_the_order_of_trajectories_nor_the_names_of_tokens_matter(
    estimator: str, forest: tuple[Trie, str], names: list[int]
) -> None:
    trie, segment = forest
    options = {"segment": segment} if estimator in ("treepo", "treerpo", "tree-grpo", "treerl") else {}
    renamed = [
        replace(t, content=replace(tokens_of(t), tokens=np.array(names, np.int32)[tokens_of(t).tokens]))
        for t in reversed(list(trajectories_of(trie)))
    ]
    lines, expected = (
        by_id(made, estimator=estimator, **options) for made in (build_trie(renamed, share=trie.share), trie)
    )
    assert lines.keys() == expected.keys()
    for name, values in lines.items():
        close(values, expected[name])


# In a star: tree estimator, flat estimator, and the factor between them.
TWINS = [("treepo", "grpo", 1), ("treerpo", "grpo", 1), ("tree-grpo", "grpo", 2), ("treerl", "dr-grpo", 2)]


@few
@given(forest=forests(), segment=st.sampled_from(["turn", "1", "2"]))
def test_in_a_star_every_tree_estimator_is_a_flat_one(forest: tuple[Trie, str], segment: str) -> None:
    # No cut within 10^6 tokens after the first one: every trajectory is a root and a leaf.
    trie = forest[0]
    flat = {name: by_id(trie, estimator=name) for name in ("grpo", "dr-grpo")}
    for estimator, twin, times in TWINS:
        star = by_id(trie, estimator=estimator, segment=segment, min_depth=10**6, reject_equal=False)
        assert star.keys() == flat[twin].keys()
        for name, values in star.items():
            close(values, times * np.array(flat[twin][name]))


@few
@given(
    rest=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=3, max_size=9), st.sampled_from(REWARDS)), min_size=2)
)
@pytest.mark.parametrize("per_segment", [False, True])
def test_rollouts_of_several_segments_that_share_the_prompt_alone_are_a_star(per_segment: bool, rest: Any) -> None:
    # Token 10 + i after the prompt keeps the rollouts apart, so their later segments are chains of only children.
    made = [
        make(f"t{i}", [7, 10 + i, *tail], reward=reward, metadata={"segments": [1, 2, len(tail)]})
        for i, (tail, reward) in enumerate(rest)
    ]
    trie = build_trie(made)
    for estimator, twin, times in TWINS:
        options: dict[str, Any] = {"per_segment": per_segment} if estimator == "tree-grpo" else {}
        star = by_id(trie, estimator=estimator, reject_equal=False, **options)
        for name, values in by_id(trie, estimator=twin).items():
            close(star[name], times * np.array(values))


@few
@given(forest=forests())
def test_sums_over_a_group_vanish(forest: tuple[Trie, str]) -> None:
    trie, segment = forest
    kept, estimates = estimate(trie, estimator="treepo", segment=segment)
    rollouts = as_rollouts(kept, segment)
    rewards = oracle.below(rollouts)
    # |J| of each trajectory, by which treepo divides.
    counts = [sum(len(rewards[node]) > 1 for node in path) for path in oracle.paths(rollouts)]
    for family in {rollout.family for rollout in rollouts}:
        members = np.array([rollout.family == family for rollout in rollouts])
        reward = np.array([rollout.reward for rollout in rollouts])[members]
        group = np.zeros(len(reward), np.int64)
        for values in (grpo(reward, group), dr_grpo(reward, group), rloo(reward, group)):
            assert abs(values.sum()) < 1e-9
        assert abs((estimates.values * counts)[members].sum()) < 1e-9  # each subgroup's differences cancel


@few
@given(forest=forests())
def test_what_siblings_gain_their_siblings_lose(forest: tuple[Trie, str]) -> None:
    trie, segment = forest
    kept, _ = estimate(trie, estimator="treerpo", segment=segment)
    rollouts = as_rollouts(kept, segment)
    all_paths, inter = oracle.paths(rollouts), oracle.flat(rollouts, "grpo")
    # For each node: treerpo of its children, and the first term of tree-grpo of each trajectory through it.
    children: dict[Any, dict[Any, float]] = {}
    steps: dict[Any, list[float]] = {}
    values = {name: lines_of(trie, segment, name) for name in ("treerpo", "tree-grpo")}
    for i, path in enumerate(all_paths):
        for k, up in enumerate(path):
            child = path[k + 1] if k + 1 < len(path) else i
            children.setdefault(up, {})[child] = values["treerpo"][i][k + 1]
            steps.setdefault(up, []).append(values["tree-grpo"][i][k + 1] - inter[i])
    branching = [up for up, below in children.items() if len(below) > 1]
    assert max(abs(sum(children[up].values())) for up in branching) < 1e-9
    assert max(abs(sum(steps[up])) for up in branching) < 1e-9


def lines_of(trie: Trie, segment: str, estimator: str) -> list[list[float]]:
    """Return the advantages of the listed segments of every kept trajectory, root first."""
    kept = estimate_advantages(trie, AdvantageOptions(estimator)).kept
    reward = trie.trajectories["reward"].to_numpy()[kept]
    tree = segment_tree(trie, kept, np.unique(group_codes(trie)[kept], return_inverse=True)[1], segment=segment)
    values = {"treerpo": treerpo, "tree-grpo": tree_grpo_segments}[estimator](tree, reward)
    return [values[tree.owner == i].tolist() for i in range(len(kept))]


@pytest.mark.parametrize("estimator", ["grpo", "treepo", "treerpo", "treerl"])
@few
@given(forest=forests(missing=False))
def test_terms_of_a_shared_token_add_up_as_trajectory_by_trajectory(estimator: str, forest: tuple[Trie, str]) -> None:
    options: dict[str, Any] = {"segment": forest[1]} if estimator.startswith("tree") else {}
    trie = with_advantages(forest[0], estimate_advantages(forest[0], AdvantageOptions(estimator, **options)))
    # Sum of weight * advantage for each step and token path: trajectory by trajectory, and over the terms of rows.
    alone: dict[Any, float] = {}
    for trajectory in trajectories_of(trie):
        content = tokens_of(trajectory)
        weights = trajectory.weight * np.repeat(content.span_weights, content.ends - content.starts)
        trained = positions(content.starts, content.ends).tolist()
        for position, advantage, weight in zip(trained, line_of(trajectory), weights, strict=True):
            key = (trajectory.step, *content.tokens[: position + 1].tolist())
            alone[key] = alone.get(key, 0.0) + weight * advantage
    packed: dict[Any, float] = {}
    for row in pack_rows(trie, plan_rows(trie, capacity=1000)):
        terms = row.terms
        assert terms is not None
        assert terms.advantage is not None
        for token, weight, advantage in zip(terms.token.tolist(), terms.weight, terms.advantage, strict=True):
            # From the token up to the root of the row; reversed, this is the prefix that ends with the token.
            path, at = [], token
            while at >= 0:
                path.append(int(row.input_ids[at]))
                at = int(row.parent[at])
            key = (row.step, *reversed(path))
            packed[key] = packed.get(key, 0.0) + weight * advantage
    assert packed.keys() == alone.keys()
    close([packed[key] for key in alone], list(alone.values()))


def example() -> Trie:
    """Build the tree of the worked example of docs/tree-rl.md."""
    spans = [(2, 5, 1.0)], [(2, 5, 1.0)], [(2, 4, 1.0)]
    tokens = {"a": [1, 2, 3, 4, 5], "b": [1, 2, 3, 4, 6], "c": [1, 2, 8, 9]}
    rewards = {"a": 1.0, "b": 0.0, "c": 0.0}
    return build_trie([make(n, t, spans=s, reward=rewards[n]) for (n, t), s in zip(tokens.items(), spans, strict=True)])


def test_the_worked_example_of_the_page() -> None:
    page = (ROOT / "docs" / "tree-rl.md").read_text()
    number = r"(-?\d+\.\d{4})"
    rows = re.findall(rf"^\| `([a-z+-]+)(?: --([a-z-]+))?` \| ((?:{number} \| ){{3,5}})", page, re.MULTILINE)
    assert len(rows) == 12  # eight rows of one value per trajectory, four of one value per segment
    for estimator, option, cells, _ in rows:
        shown = [float(cell) for cell in cells.split("|")[:-1]]
        variant = {option.replace("-", "_"): True} if option else {}
        lines = by_id(example(), estimator=estimator, epsilon=0.0, **variant)
        a, b, c = lines["a"], lines["b"], lines["c"]
        assert (a[0], b[0], c[0]) == (a[1], b[1], c[1])
        # Trained tokens of a: 3, 4 and 5. The first two are one segment, so columns are 3 4 | 5 of a, 3 4 | 6 of b, 8
        # 9.
        values = [a[0], a[2], b[0], b[2], c[0]] if len(shown) == 5 else [a[0], b[0], c[0]]
        assert [round(value, 4) + 0.0 for value in values] == shown, (estimator, option)


def test_groups_that_cannot_be_used_are_counted_once_each() -> None:
    groups: dict[str, list[float | None]] = {
        "lost": [None, 1.0],
        "nan": [math.nan, 1.0],
        "one": [1.0],
        "equal": [0.1, 0.1, 0.1],
        "good": [0.0, 1.0],
    }
    made = [
        make(f"{name}{i}", [7, i, k], group=name, reward=reward)
        for k, (name, rewards) in enumerate(groups.items())
        for i, reward in enumerate(rewards)
    ]
    trie = build_trie(made)
    estimates = estimate_advantages(trie, AdvantageOptions("treepo"))
    assert estimates.rejected == {"rewards missing": 2, "a single rollout": 1, "rewards all equal": 1}
    assert estimates.num_groups == 1
    dropped = with_advantages(trie, estimates)
    assert sorted(dropped.trajectories["trajectory_id"].to_pylist()) == ["good0", "good1"]
    zero = with_advantages(trie, estimates, rejected="zero")
    columns = {name: zero.trajectories[name].to_pylist() for name in ("trajectory_id", "advantage")}
    advantages = dict(zip(columns["trajectory_id"], columns["advantage"], strict=True))
    assert {name for name, value in advantages.items() if value} == {"good0", "good1"}
    assert set(advantages) == {made_one.trajectory_id for made_one in made}
    # reinforce++ compares steps, so the single trajectory counts too; grpo keeps equal rewards, with 0.
    for estimator, groups_left in (("reinforce++", 3), ("grpo", 2)):
        assert estimate_advantages(trie, AdvantageOptions(estimator)).num_groups == groups_left
    assert by_id(trie, estimator="grpo")["equal0"] == [0.0, 0.0]


def test_trajectories_of_rejected_groups_can_stay_beside_those_with_advantages_per_token() -> None:
    made = [make(f"t{i}", [7, i % 2, i], group=f"g{i // 2}", reward=None if i == 2 else i) for i in range(4)]
    trie = build_trie(made)
    filled = with_advantages(trie, estimate_advantages(trie, AdvantageOptions("treerl")), rejected="zero")
    (row,) = pack_rows(filled, plan_rows(filled, capacity=99))
    assert row.terms is not None
    assert row.terms.advantage is not None
    names = np.array(row.trajectory_ids)[row.terms.trajectory]
    assert sorted(row.trajectory_ids) == ["t0", "t1", "t2", "t3"]
    assert {name for name, value in zip(names, row.terms.advantage, strict=True) if value} == {"t0", "t1"}
    assert np.isfinite(row.terms.advantage).all()


def test_values_that_differ_by_rounding_alone_are_equal() -> None:
    three = [make(f"t{i}", [7, 1, i], reward=0.1) for i in range(3)]  # their mean is not 0.1 in floating point
    trie = build_trie([*three, make("u", [7, 2, 2], reward=0.1), make("v", [7, 3, 3], reward=0.4)])
    lines = by_id(trie, estimator="treerpo", segment="1")
    # The subgroup of three has the value 0.1 up to rounding, so it equals the sibling with 0.1.
    assert np.mean([0.1] * 3) != 0.1
    close(lines["t0"][0], lines["u"][0])
    assert lines["t0"][1] == 0.0
