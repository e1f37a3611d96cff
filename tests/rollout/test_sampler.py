"""Sampled trees have the shape that the options ask for, and are a function of the seed and the answers alone."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import virtual_time
from support.tree_estimates import PROMPT, grow, grow_tree, log_normal_law, query, two_speeds
from support.watched_engines import FailingEngine, ScriptedLaw, WatchedEngine, fingerprint
from treepack.errors import TreepackError
from treepack.rollout.engine import EngineError, Segment
from treepack.rollout.episode import SingleTurn
from treepack.rollout.options import BRANCHING, FALLBACK, Sampling, TreeOptions, independent
from treepack.rollout.requests import LimitedEngine, run_queries
from treepack.rollout.sampler import sample_tree
from treepack.rollout.simulated import SimulatedEngine
from treepack.rollout.tree import Tree, mean_decoded
from treepack.trajectory import Int32

options_of_any_shape = st.builds(
    TreeOptions,
    width=st.integers(1, 20),
    max_tokens=st.integers(1, 60),
    segment=st.none() | st.integers(1, 20),
    depth=st.none() | st.integers(1, 8),
    first_forks=st.none() | st.integers(1, 8) | st.just((2, 8)),
    branches=st.integers(1, 3),
    branching=st.sampled_from(BRANCHING),
    fallback=st.sampled_from(FALLBACK),
)


@given(options_of_any_shape, st.integers(0, 10**9))
def test_any_tree_has_its_width_and_no_request_exceeds_what_is_left_of_its_path(
    options: TreeOptions, seed: int
) -> None:
    engine = WatchedEngine(SimulatedEngine(two_speeds()))
    (tree,) = grow(engine, options, seed=seed)
    if options.fallback == "random":
        assert len(tree.leaves) == options.width
    assert 1 <= len(tree.leaves) <= options.width
    for request in engine.requests:
        rest = options.max_tokens - (len(request.ids) - len(PROMPT))
        assert request.max_tokens == min(rest, options.segment or rest)
    for leaf in tree.leaves:
        assert leaf.end - len(PROMPT) <= options.max_tokens
        assert options.depth is None or leaf.depth <= options.depth


@given(options_of_any_shape, st.integers(0, 10**9))
def test_nodes_leaves_and_usage_of_any_tree_are_consistent(options: TreeOptions, seed: int) -> None:
    engine = WatchedEngine(SimulatedEngine(two_speeds()))
    (tree,) = grow(engine, options, seed=seed)
    nodes = list(tree.nodes())
    assert [node for node in nodes if not node.children] == [node for node in nodes if node.finish is not None]
    assert set(tree.leaves) == {node for node in nodes if node.finish is not None}
    assert sorted(node.number for node in nodes) == list(range(len(nodes)))
    for node in nodes:
        assert node.parent is None or node.start == node.parent.end
        assert len(node.ids()) == node.end
    # Each request continues the exact ids of a node, and its answers are all the children of the tree.
    paths = {tuple(node.ids().tolist()) for node in nodes}
    assert {request.ids for request in engine.requests} <= paths
    assert sum(request.count for request in engine.requests) == len(nodes) - 1
    assert len({request.seed for request in engine.requests}) == len(engine.requests)
    assert tree.usage.requests == len(engine.requests)
    assert tree.usage.decoded == sum(len(node.tokens) for node in nodes[1:])
    assert tree.usage.prefilled == sum(len(request.ids) for request in engine.requests)


@given(st.integers(1, 12), st.integers(1, 30), st.none() | st.integers(1, 12))
def test_independent_rollouts_are_requested_at_once_and_never_fork(width: int, longest: int, count: int | None) -> None:
    engine = WatchedEngine(SimulatedEngine(two_speeds()))

    async def sample() -> Tree:
        options = independent(width=width, max_tokens=longest)
        return await sample_tree(query("q", count=count), engine, options, episode=SingleTurn())

    tree = virtual_time.run(sample())
    assert [request.count for request in engine.requests] == [count or width]
    assert [leaf.parent for leaf in tree.leaves] == [tree.root] * (count or width)
    assert mean_decoded(tree) == pytest.approx(tree.usage.decoded / len(tree.leaves))


def test_the_bounds_of_the_first_forks_are_drawn_for_each_query() -> None:
    options = TreeOptions(first_forks=(2, 8), segment=4, depth=1, fallback="none")
    trees = grow(SimulatedEngine(two_speeds()), options, 100)
    assert set(np.bincount([len(tree.root.children) for tree in trees]).nonzero()[0]) == set(range(2, 9))


def test_a_fallback_waits_until_no_path_of_the_query_is_active() -> None:
    """So the leaves from before the fallback are those of a tree without one."""
    options = TreeOptions(width=12, segment=4, depth=None, max_tokens=40, fallback="none")
    law = SimulatedEngine(two_speeds())
    for small, full in zip(grow(law, options, 12), grow(law, replace(options, fallback="random"), 12), strict=True):
        kept = [leaf for leaf in full.leaves if not any(node.is_fallback for node in leaf.path())]
        assert [leaf.ids().tolist() for leaf in kept] == [leaf.ids().tolist() for leaf in small.leaves]
        assert full.leaves[: len(kept)] == tuple(kept)


SMALL = TreeOptions(width=6, segment=5, depth=None, max_tokens=30, first_forks=(2, 4), branching="likely")


async def all_queries(engine: WatchedEngine, *, max_queries: int, max_requests: int) -> list[Tree]:
    limited = LimitedEngine(engine, max_requests=max_requests, attempts=1, timeout=1000)

    starts = [partial(grow_tree, f"q{i}", limited, SMALL, seed=5) for i in range(6)]
    async with aclosing(run_queries(starts, max_queries=max_queries)) as results:
        return [tree async for tree in results]


def test_trees_are_equal_bit_for_bit_in_any_completion_order() -> None:
    expected = {tree.query.key: fingerprint(tree) for tree in grow(SimulatedEngine(two_speeds()), SMALL, 6, seed=5)}
    orders, sequences = set(), set()
    for number in range(8):
        engine = WatchedEngine(SimulatedEngine(two_speeds()), order=np.random.default_rng(number))
        trees = virtual_time.run(all_queries(engine, max_queries=1 + number % 4, max_requests=1 + number % 5))
        assert {tree.query.key: fingerprint(tree) for tree in trees} == expected
        orders.add(tuple(tree.query.key for tree in trees))
        sequences.add(tuple(engine.requests))
    assert len(orders) > 3
    assert len(sequences) > 3


def test_another_query_has_other_seeds_for_the_same_prompt() -> None:
    first, second = grow(SimulatedEngine(two_speeds()), SMALL, 2)
    assert [leaf.ids().tolist() for leaf in first.leaves] != [leaf.ids().tolist() for leaf in second.leaves]


def test_every_leaf_has_the_reward_of_its_whole_response() -> None:
    async def score(response: Int32) -> float:
        return float(response.sum())

    options = replace(SMALL, max_tokens=12)  # some paths stop, others are cut off
    for tree in grow(SimulatedEngine(two_speeds()), options, 10, episode=SingleTurn(score)):
        assert [leaf.reward for leaf in tree.leaves] == [leaf.ids()[1:].sum() for leaf in tree.leaves]
        assert all(node.reward is None for node in tree.nodes() if node.children)


def test_a_failing_request_cancels_the_others_of_its_tree() -> None:
    options = TreeOptions(width=8, segment=4, depth=None, max_tokens=64)
    law, _ = log_normal_law()
    watched = WatchedEngine(SimulatedEngine(law), order=np.random.default_rng(0))
    failing = FailingEngine(watched, lambda number: "lost" if number == 6 else "")

    async def sample() -> None:
        with pytest.raises(TreepackError, match="the connection was lost"):
            await grow_tree("q", failing, options)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(sample())
    assert watched.cancelled > 0
    assert (watched.under_way, watched.answered + watched.cancelled) == (0, len(watched.requests))


class Answering:
    """Answers every request with the same segments."""

    sampling = Sampling()

    def __init__(self, *segments: Segment) -> None:
        self.segments = list(segments)

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        return self.segments

    async def publish(self, version: str) -> None: ...

    async def close(self) -> None: ...


TWO = np.array([3, 4], np.int32)


@pytest.mark.parametrize(
    ("segments", "sentence"),
    [
        ([], "answered 0 continuations; expected 1"),
        ([Segment(TWO, None, "stop")] * 2, "answered 2 continuations; expected 1"),
        ([Segment(TWO[:0], None, "stop")], "continued a prompt by 0 tokens; expected 1 to 4"),
        ([Segment(np.tile(TWO, 3), None, "length")], "continued a prompt by 6 tokens; expected 1 to 4"),
        ([Segment(TWO, None, "tool_calls")], "ended a continuation with 'tool_calls'; expected stop or length"),
        ([Segment(TWO, None, "length")], "stopped after 2 of 4 tokens without a stop token"),
        ([Segment(TWO, np.zeros(1, np.float32), "stop")], "not one finite number per token"),
        ([Segment(TWO, np.array([0, np.nan], np.float32), "stop")], "not one finite number per token"),
    ],
)
def test_an_answer_that_was_not_asked_for_is_refused(segments: list[Segment], sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        grow(Answering(*segments), TreeOptions(width=1, segment=4))


def test_printing_a_node_does_not_print_its_tree() -> None:
    (tree,) = grow(SimulatedEngine(ScriptedLaw([5])), TreeOptions(width=4, segment=4, max_tokens=40, max_repeats=0))
    assert repr(tree.leaves[0]).count("Node") == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"width": 0}, "width is 0; expected at least 1"),
        ({"segment": 0}, "segment is 0; expected at least 1"),
        ({"first_forks": (3, 2)}, "first_forks is .* expected a number from 1 on, or bounds such as 2-8"),
        ({"fallback": "longest"}, "fallback is 'longest'; expected one of random, none"),
        ({"branching": "low"}, "branching is 'low'; expected one of even, likely, unlikely"),
        ({"branching_temperature": (0.0, 1.0)}, "branching_temperature is .* expected positive numbers"),
        ({"max_repeats": -1}, "max_repeats is -1; expected a number of repetitions, or 0 for no check"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_its_name(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(TreepackError, match=sentence):
        TreeOptions(**changes)  # type: ignore[arg-type]
