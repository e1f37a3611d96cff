"""Advantages: fast equals slow, what the theory says of sums and stars, and what a packed row holds of them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle_rl as oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle_rl import Rollout
from strategies import make, trajectories

from treepack.errors import TreepackError
from treepack.pack import pack_rows
from treepack.plan import plan_rows
from treepack.rl.advantages import (
    ESTIMATORS,
    AdvantageOptions,
    Estimates,
    estimate,
    group_codes,
    with_advantages,
)
from treepack.rl.advantages_flat import dr_grpo, grpo, rloo
from treepack.rl.advantages_tree import tree_grpo_segments, treerpo
from treepack.rl.segments import segment_tree
from treepack.trajectory import Float64, Tokens, Trajectory, positions
from treepack.trie import Trie, build_trie, trajectories_of

ROOT = Path(__file__).parents[1]
REWARDS = [0.0, 0.5, 1.0, 0.1, 1 / 3]


def tokens_of(trajectory: Trajectory) -> Tokens:
    assert isinstance(trajectory.content, Tokens)
    return trajectory.content


@st.composite
def forests(draw: st.DrawFn, *, missing: bool = True) -> tuple[Trie, str]:
    """A trie of rewarded trajectories, often of several groups and steps, and how its segments are to be cut.

    One group of two different rewards is always there; another may have lost one of its rewards.
    """
    made = draw(trajectories(max_count=10))
    made += [
        make("x0", [0, 1, 1, 2], group="x", step=made[0].step, reward=0.0),
        make("x1", [0, 1, 2, 1, 0], group="x", step=made[0].step, reward=1.0),
    ]
    segment = draw(st.sampled_from(["node", "turn", "recorded", "1", "2", "3"]))
    found = []
    for trajectory in made:
        offsets = draw(st.sets(st.integers(1, len(tokens_of(trajectory).tokens) - 1), min_size=1))
        metadata = {"segments": sorted(offsets)} if segment == "recorded" else {}
        reward = trajectory.reward if trajectory.group_id == "x" else draw(st.sampled_from(REWARDS))
        found.append(replace(trajectory, reward=reward, metadata=metadata))
    if missing and draw(st.booleans()) and found[0].group_id != "x":
        found[0] = replace(found[0], reward=None)
    return build_trie(found, share=draw(st.sampled_from(["all", "group"]))), segment


def as_rollouts(members: list[Trajectory], segment: str, min_depth: int = 0) -> list[Rollout]:
    """The members of groups as the oracle has them, cut as `segment` says."""
    bare = [
        Rollout(tokens_of(t).tokens.tolist(), [0], str(t.group_id), t.step or 0, float(t.reward or 0)) for t in members
    ]
    found = []
    for trajectory, rollout, branches in zip(members, bare, oracle.branch_cuts(bare), strict=True):
        content = tokens_of(trajectory)
        trained = positions(content.starts, content.ends).tolist()
        cuts = {
            "node": branches,
            "turn": [p for p in trained if p - 1 not in trained],
            "recorded": trajectory.metadata.get("segments"),
        }.get(segment) or list(range(trained[0], len(rollout.tokens), int(segment)))
        found.append(replace(rollout, cuts=[cut for cut in cuts if cut == cuts[0] or cut - cuts[0] >= min_depth]))
    return found


def estimated(trie: Trie, **options: Any) -> tuple[list[Trajectory], Estimates]:
    """Estimates beside the trajectories they are of."""
    everyone = list(trajectories_of(trie))
    found = estimate(trie, AdvantageOptions(**options))
    assert len(found.kept) >= 2
    return [everyone[i] for i in found.kept], found


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


FLAT_CASES = [
    ("grpo", {}),
    ("grpo", {"std": "batch"}),
    ("dr-grpo", {}),
    ("rloo", {}),
    ("reinforce++", {}),
]


@pytest.mark.parametrize(("estimator", "options"), FLAT_CASES)
@given(forest=forests())
def test_flat_estimators_equal_their_formulas(estimator: str, options: Any, forest: Any) -> None:
    kept, found = estimated(forest[0], estimator=estimator, **options)
    close(found.values, oracle.flat(as_rollouts(kept, "node"), estimator, batch="std" in options))


@pytest.mark.parametrize("batch", [False, True])
@given(
    forest=forests(),
    variants=st.fixed_dictionaries(
        {name: st.booleans() for name in ("size_weighted", "reject_subgroups", "without_root", "reject_equal")}
    ),
    min_depth=st.sampled_from([0, 0, 2, 3]),
)
def test_treepo_equals_its_equations(batch: bool, forest: Any, variants: dict[str, bool], min_depth: int) -> None:
    std = "batch" if batch else "group"
    kept, found = estimated(forest[0], estimator="treepo", segment=forest[1], min_depth=min_depth, std=std, **variants)
    slow = {name: value for name, value in variants.items() if name != "reject_equal"}
    close(found.values, oracle.treepo(as_rollouts(kept, forest[1], min_depth), batch=batch, **slow))


@given(forest=forests(), min_depth=st.sampled_from([0, 0, 2]))
def test_tree_grpo_equals_its_equation(forest: Any, min_depth: int) -> None:
    kept, found = estimated(forest[0], estimator="tree-grpo", segment=forest[1], min_depth=min_depth)
    close(found.values, oracle.tree_grpo(as_rollouts(kept, forest[1], min_depth)))


SEGMENT_CASES = [
    ("treerpo", {}),
    ("treerl", {}),
    ("treerl", {"leaf_scaled": True}),
    ("tree-grpo", {"per_segment": True}),
]


@pytest.mark.parametrize(("estimator", "options"), SEGMENT_CASES)
@given(forest=forests(), min_depth=st.sampled_from([0, 0, 2]))
def test_every_trained_token_gets_the_advantage_of_its_segment(
    estimator: str, options: dict[str, Any], forest: Any, min_depth: int
) -> None:
    kept, found = estimated(forest[0], estimator=estimator, segment=forest[1], min_depth=min_depth, **options)
    rollouts = as_rollouts(kept, forest[1], min_depth)
    scaled = {name: value for name, value in options.items() if name == "leaf_scaled"}
    lines = oracle.segments(rollouts, estimator, **scaled)
    expected = [
        oracle.of_token(rollout, line, position)
        for trajectory, rollout, line in zip(kept, rollouts, lines, strict=True)
        for position in positions(tokens_of(trajectory).starts, tokens_of(trajectory).ends).tolist()
    ]
    close(found.values, expected)


def by_id(trie: Trie, **options: Any) -> dict[str, list[float]]:
    """Advantages of the trained tokens of each kept trajectory."""
    filled = with_advantages(trie, estimate(trie, AdvantageOptions(**options)))
    found = {}
    for trajectory in trajectories_of(filled):
        content = tokens_of(trajectory)
        assert (content.advantages is None) != (trajectory.advantage is None)
        found[trajectory.trajectory_id] = line_of(trajectory).tolist()
    return found


def line_of(trajectory: Trajectory) -> Float64:
    """The advantage of each trained token."""
    content = tokens_of(trajectory)
    return np.full(content.num_trained, trajectory.advantage) if content.advantages is None else content.advantages


@pytest.mark.parametrize("estimator", ESTIMATORS)
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
    found, expected = (
        by_id(made, estimator=estimator, **options) for made in (build_trie(renamed, share=trie.share), trie)
    )
    assert found.keys() == expected.keys()
    for name, values in found.items():
        close(values, expected[name])


@given(forest=forests(), segment=st.sampled_from(["turn", "1", "2"]))
def test_in_a_star_every_tree_estimator_is_a_flat_one(forest: tuple[Trie, str], segment: str) -> None:
    trie = forest[0]
    flat = {name: by_id(trie, estimator=name) for name in ("grpo", "dr-grpo")}
    for estimator, twin, times in (
        ("treepo", "grpo", 1),
        ("treerpo", "grpo", 1),
        ("tree-grpo", "grpo", 2),
        ("treerl", "dr-grpo", 2),
    ):
        keep = {"reject_equal": False}
        star = by_id(trie, estimator=estimator, segment=segment, min_depth=10**6, **keep)
        assert star.keys() == flat[twin].keys()
        for name, values in star.items():
            close(values, times * np.array(flat[twin][name]))


@given(forest=forests())
def test_sums_over_a_group_vanish(forest: tuple[Trie, str]) -> None:
    trie, segment = forest
    kept, found = estimated(trie, estimator="treepo", segment=segment)
    rollouts = as_rollouts(kept, segment)
    rewards = oracle.below(rollouts)
    counts = [sum(len(rewards[node]) > 1 for node in path) for path in oracle.paths(rollouts)]
    for family in {rollout.family for rollout in rollouts}:
        mine = np.array([rollout.family == family for rollout in rollouts])
        reward = np.array([rollout.reward for rollout in rollouts])[mine]
        group = np.zeros(len(reward), np.int64)
        for values in (grpo(reward, group), dr_grpo(reward, group), rloo(reward, group)):
            assert abs(values.sum()) < 1e-9
        assert abs((found.values * counts)[mine].sum()) < 1e-9  # each subgroup's differences cancel


@given(forest=forests())
def test_what_siblings_gain_their_siblings_lose(forest: tuple[Trie, str]) -> None:
    trie, segment = forest
    kept, _ = estimated(trie, estimator="treerpo", segment=segment)
    rollouts = as_rollouts(kept, segment)
    all_paths, inter = oracle.paths(rollouts), oracle.flat(rollouts, "grpo")
    children: dict[Any, dict[Any, float]] = {}
    steps: dict[Any, list[float]] = {}
    values = {name: lines_of(trie, segment, name) for name in ("treerpo", "tree-grpo")}
    for i, path in enumerate(all_paths):
        for k, up in enumerate(path):
            child = path[k + 1] if k + 1 < len(path) else i
            children.setdefault(up, {})[child] = values["treerpo"][i][k + 1]
            steps.setdefault(up, []).append(values["tree-grpo"][i][k + 1] - inter[i])
    assert max(abs(sum(below.values())) for below in children.values()) < 1e-9
    assert max(abs(sum(below)) for below in steps.values()) < 1e-9


def lines_of(trie: Trie, segment: str, estimator: str) -> list[list[float]]:
    """The advantages of the listed segments of every kept trajectory, root first."""
    kept = estimate(trie, AdvantageOptions(estimator)).kept
    reward = trie.trajectories["reward"].to_numpy()[kept]
    tree = segment_tree(trie, kept, np.unique(group_codes(trie)[kept], return_inverse=True)[1], segment=segment)
    values = {"treerpo": treerpo, "tree-grpo": tree_grpo_segments}[estimator](tree, reward)
    return [values[tree.owner == i].tolist() for i in range(len(kept))]


@pytest.mark.parametrize("estimator", ["grpo", "treepo", "treerpo", "treerl"])
@given(forest=forests(missing=False))
def test_terms_of_a_shared_token_add_up_as_trajectory_by_trajectory(estimator: str, forest: tuple[Trie, str]) -> None:
    options: dict[str, Any] = {"segment": forest[1]} if estimator.startswith("tree") else {}
    trie = with_advantages(forest[0], estimate(forest[0], AdvantageOptions(estimator, **options)))
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
            path, at = [], token
            while at >= 0:
                path.append(int(row.input_ids[at]))
                at = int(row.parent[at])
            key = (row.step, *reversed(path))
            packed[key] = packed.get(key, 0.0) + weight * advantage
    assert packed.keys() == alone.keys()
    close([packed[key] for key in alone], list(alone.values()))


def example() -> Trie:
    """The tree of the worked example of docs/tree-rl.md."""
    spans = [(2, 5, 1.0)], [(2, 5, 1.0)], [(2, 4, 1.0)]
    tokens = {"a": [1, 2, 3, 4, 5], "b": [1, 2, 3, 4, 6], "c": [1, 2, 8, 9]}
    rewards = {"a": 1.0, "b": 0.0, "c": 0.0}
    return build_trie([make(n, t, spans=s, reward=rewards[n]) for (n, t), s in zip(tokens.items(), spans, strict=True)])


def test_the_worked_example_of_the_page() -> None:
    page = (ROOT / "docs" / "tree-rl.md").read_text()
    number = r"(-?\d+\.\d{4})"
    rows = re.findall(rf"^\| `([a-z+-]+)(?: --([a-z-]+))?` \| ((?:{number} \| ){{3,5}})", page, re.MULTILINE)
    assert len(rows) == 12
    for estimator, option, cells, _ in rows:
        shown = [float(cell) for cell in cells.split("|")[:-1]]
        given = {option.replace("-", "_"): True} if option else {}
        found = by_id(example(), estimator=estimator, epsilon=0.0, **given)
        a, b, c = found["a"], found["b"], found["c"]
        assert (a[0], b[0], c[0]) == (a[1], b[1], c[1])
        values = [a[0], a[2], b[0], b[2], c[0]] if len(shown) == 5 else [a[0], b[0], c[0]]
        assert [round(value, 4) + 0.0 for value in values] == shown, (estimator, option)


def rewarded(rewards: list[float | None], **fields: Any) -> Trie:
    return build_trie([make(f"t{i}", [7, i, i], reward=reward, **fields) for i, reward in enumerate(rewards)])


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
    found = estimate(trie, AdvantageOptions("treepo"))
    assert found.rejected == {"rewards missing": 2, "a single trajectory": 1, "rewards all equal": 1}
    assert found.num_groups == 1
    dropped = with_advantages(trie, found)
    assert sorted(dropped.trajectories["trajectory_id"].to_pylist()) == ["good0", "good1"]
    zero = with_advantages(trie, found, rejected="zero")
    columns = {name: zero.trajectories[name].to_pylist() for name in ("trajectory_id", "advantage")}
    given = dict(zip(columns["trajectory_id"], columns["advantage"], strict=True))
    assert {name for name, value in given.items() if value} == {"good0", "good1"}
    assert set(given) == {made_one.trajectory_id for made_one in made}
    for estimator, groups_left in (("reinforce++", 3), ("grpo", 2)):
        assert estimate(trie, AdvantageOptions(estimator)).num_groups == groups_left
    assert by_id(trie, estimator="grpo")["equal0"] == [0.0, 0.0]


def test_values_that_differ_by_rounding_alone_are_equal() -> None:
    three = [make(f"t{i}", [7, 1, i], reward=0.1) for i in range(3)]  # their mean is not 0.1 in floating point
    trie = build_trie([*three, make("u", [7, 2, 2], reward=0.1), make("v", [7, 3, 3], reward=0.4)])
    found = by_id(trie, estimator="treerpo", segment="1")
    assert np.mean([0.1] * 3) != 0.1
    close(found["t0"][0], found["u"][0])
    assert found["t0"][1] == 0.0


SINGLE = [make("a", [7, 1], reward=1.0, group="a"), make("b", [7, 2], reward=0.0, group="b")]
BAD = [
    (rewarded([0.0, 1.0]), {"estimator": "gae"}, "estimator is 'gae'; expected one of grpo, dr-grpo"),
    (rewarded([0.0, 1.0]), {"estimator": "grpo", "without_root": True}, "without_root is an option of treepo; grpo"),
    (rewarded([0.0, 1.0]), {"estimator": "grpo", "epsilon": -1.0}, "epsilon is -1.0; expected 0 or a small"),
    (rewarded([0.0, 1.0]), {"estimator": "treepo", "min_depth": -1}, "min_depth is -1; expected 0 or a number"),
    (rewarded([0.0, 1.0]), {"estimator": "treepo", "segment": "0"}, "segment is '0'; expected auto, recorded, turn"),
    (rewarded([None, 1.0]), {"estimator": "grpo"}, r"no group is left to compare (rewards missing: 1); give the"),
    (build_trie(SINGLE), {"estimator": "rloo"}, "no group is left to compare (a single trajectory: 2); give the"),
    (rewarded([1e308, -1e308]), {"estimator": "grpo"}, "a reward of 1e+308 makes advantages overflow; give"),
    (build_trie([*trajectories_of(rewarded([0.0, 1.0]))], share="none"), {"estimator": "treepo"}, "--share none"),
    (rewarded([0.0, 1.0]), {"estimator": "treepo", "segment": "recorded"}, "no trajectory has 'segments' in its"),
    *(
        (rewarded([0.0, 1.0], metadata={"metadata": {"segments": wrong}}), {"estimator": "treepo"}, f"t0: {message}")
        for wrong, message in (
            ([1, 1], "'segments' does not ascend; expected the ascending token offsets"),
            ([0, 1], "'segments' leaves 1 .. 2, the tokens after the first"),
            ([3], "'segments' leaves 1 .. 2, the tokens after the first"),
            ([True], "'segments' is no list of integers"),
            ("1 2", "'segments' is no list of integers"),
        )
    ),
]


@pytest.mark.parametrize(("trie", "options", "message"), BAD)
def test_what_cannot_be_used_is_refused(trie: Trie, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TreepackError, match=re.escape(message)):
        estimate(trie, AdvantageOptions(**options))


def test_segments_of_some_trajectories_only_are_refused() -> None:
    with_them = make("a", [7, 1, 1], reward=0.0, metadata={"segments": [1]})
    with pytest.raises(TreepackError, match="made:b: its metadata has no 'segments' and that of other"):
        estimate(build_trie([with_them, make("b", [7, 2, 2], reward=1.0)]), AdvantageOptions("treerl"))
