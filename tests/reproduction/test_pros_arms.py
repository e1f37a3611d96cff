"""The arms of PROS: the pool, augmented queries, the choice among them, and the error of estimated pass rates."""

from dataclasses import replace
from math import comb
from pathlib import Path

import maze
import numpy as np
import pros_arms
import pytest
from curves_arms import Sizes, State
from learner import learn, trajectories_of
from tasks import sample_trees

import treepack
from support.reproduction_learners import coin_learner, small_learner
from treepack.research.pros.augmentation import marks_of
from treepack.research.pros.pass_rates import estimate
from treepack.trajectory import Tokens, Trajectory


def tokens_of(rollout: Trajectory) -> list[int]:
    assert isinstance(rollout.content, Tokens)
    tokens: list[int] = rollout.content.tokens.tolist()
    return tokens


@pytest.mark.parametrize("task", ["maze", "steps"])
def test_rollouts_of_augmented_queries_continue_a_success_and_train_no_reused_token(task: str, tmp_path: Path) -> None:
    learner = small_learner(tmp_path / "policy", task)
    state = State(learner, Sizes(prompts=1, width=3), seed=0, step=1)
    pool = pros_arms.start_pool(state)
    originals = list(pool.queries.values())[:2]
    trees = pros_arms.sample_queries(state, originals)
    parents = {rollout.trajectory_id: rollout for rollout in trajectories_of(trees)}
    # Two levels: what a rollout of an augmented query adds becomes a query derived from the original one too.
    for _ in range(2):
        successes = [replace(each, reward=1.0) for each in parents.values()]
        queries = pros_arms.augmented_queries(learner, pool, successes)
        assert queries
        pool.add(queries)
        for query in queries:
            original = pool.queries[query.fields["parent_group"]]
            assert query.fields["parent_group"] in {each.key for each in originals}
            assert len(query.prompt) == len(original.prompt) + query.fields["num_reused"] == query.untrained_prefix
            assert any(tokens_of(each)[: len(query.prompt)] == query.prompt.tolist() for each in successes)
        state.step += 1
        trees = pros_arms.sample_queries(state, queries)
        parents = {rollout.trajectory_id: rollout for rollout in trajectories_of(trees)}
        for tree in trees:
            original = pool.queries[tree.query.fields["parent_group"]]
            for leaf in tree.leaves:
                ids = leaf.ids()[len(original.prompt) :]
                assert len(ids) <= learner.task.max_tokens + maze.OBSERVATION  # after the last turn
                if task == "maze":
                    world = maze.make_maze(original.fields["maze_seed"], original.fields["level"], learner.task.dial)
                    assert maze.reward(ids, world) == leaf.reward
        trie = treepack.build_trie(parents.values())
        assert len(marks_of(trie)) == trie.num_trajectories


@pytest.mark.parametrize("name", pros_arms.ARMS)
def test_a_step_of_each_arm_samples_trains_and_counts(name: str, tmp_path: Path) -> None:
    learner = coin_learner(tmp_path / "policy")
    state = State(learner, Sizes(prompts=2, width=4), seed=0)
    for step in (1, 2, 3):
        state.step = step
        decoded, figures = pros_arms.ARMS[name](state)
        assert decoded > 0
        assert figures["groups"] * 4 == figures["leaves"]
        assert figures["sampler_gap"] < 1e-5
    pool = state.memory["pool"]
    is_augmented = name in ("pool-random", "pros")
    assert (len(pool.queries) > 32) == is_augmented
    assert pool.counts.num_updates == 3
    assert pool.counts.tried.sum() > 0


def test_pros_prefers_queries_that_succeed_half_of_the_time(tmp_path: Path) -> None:
    learner = small_learner(tmp_path / "policy", "steps")
    state = State(learner, Sizes(prompts=1, width=2), seed=0, step=1)
    pool = pros_arms.start_pool(state)
    tried = np.full(len(pool.queries), 20.0)
    passed = np.where(np.arange(len(tried)) == 5, 10.0, 20.0)
    pool.counts = replace(pool.counts, tried=tried, passed=passed)
    log_odds = estimate(pool.counts.parent, passed, tried)
    assert pros_arms.nearest_queries(pool, log_odds, 1, 0) == [pool.names()[5]]
    assert set(pros_arms.random_queries(pool, log_odds, len(tried), 0)) == set(pool.names())


@pytest.mark.parametrize(("rate", "estimated"), [(0.3, 0.5), (0.0, 0.1), (0.8, 0.8)])
def test_the_error_of_estimated_pass_rates_has_no_bias(rate: float, estimated: float) -> None:
    width = 6
    passed = np.arange(width + 1)
    chance = np.array([comb(width, k) * rate**k * (1 - rate) ** (width - k) for k in passed])
    errors = pros_arms.squared_errors(np.full(width + 1, estimated), passed / width, np.full(width + 1, width))
    assert chance @ errors == pytest.approx((estimated - rate) ** 2, abs=1e-15)


def test_groups_with_one_outcome_train_nothing(tmp_path: Path) -> None:
    learner = small_learner(tmp_path / "policy", "steps")
    queries = learner.task.queries(2, seed=1)
    rollouts = trajectories_of(sample_trees(learner.task, queries, learner.engine, learner.task.independent(2), seed=1))
    before = [part.clone() for part in learner.policy.model.parameters()]
    assert learn(learner, [replace(each, reward=1.0) for each in rollouts], "grpo") == {}
    assert all(one.equal(other) for one, other in zip(before, learner.policy.model.parameters(), strict=True))
