"""Trees of rollouts with several turns: replay and snapshots, prefixes, and errors of environments."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.maze import PROMPT, Maze, SnapshotMaze, maze_engine, reward_of
from support.refusal import refusal
from treepack.errors import TreepackError
from treepack.rollout.engine import Engine
from treepack.rollout.environment import start_episode
from treepack.rollout.options import TreeOptions, independent
from treepack.rollout.query import Query
from treepack.rollout.sampler import sample_tree
from treepack.rollout.tree import Tree

NO_IDS = np.zeros(0, np.int32)
TURNS = TreeOptions(width=8, max_tokens=40, segment=None, depth=6, max_repeats=0)
SEGMENTS = TreeOptions(width=8, max_tokens=40, segment=2, depth=20, first_forks=(2, 4), max_repeats=0)
ALL_OPTIONS = {"turns": TURNS, "segments": SEGMENTS, "independent": independent(width=8, max_tokens=40)}


@pytest.fixture(autouse=True)
def _no_environment_stays_open() -> Any:
    Maze.open = Maze.most_open = Maze.observed = 0
    yield
    assert Maze.open == 0


def sample(
    factory: Any, options: TreeOptions, query: Query | None = None, *, seed: int = 0, engine: Engine | None = None
) -> Tree:
    query = query or Query("q", "q", NO_IDS, source="p.jsonl:1")

    async def run() -> Tree:
        ids, episode = await start_episode(factory, query, stop_token_ids=(0,))
        whole = replace(query, prompt=ids)
        return await sample_tree(whole, engine or maze_engine(), options, episode=episode, seed=seed)

    return asyncio.run(run())


def shown(tree: Tree) -> list[tuple[Any, ...]]:
    return [(leaf.ids().tolist(), leaf.reward, leaf.finish, leaf.number) for leaf in tree.leaves]


@pytest.mark.parametrize("options", ALL_OPTIONS.values(), ids=ALL_OPTIONS)
@pytest.mark.parametrize("seed", range(2))
def test_replay_and_snapshots_give_the_same_tree(options: TreeOptions, seed: int) -> None:
    replayed = sample(Maze, options, seed=seed)
    num_replayed = Maze.observed
    Maze.observed = 0
    restored = sample(SnapshotMaze, options, seed=seed)
    assert shown(replayed) == shown(restored)
    # A restored environment observes each turn of the tree once.
    assert Maze.observed == sum(1 for node in restored.nodes() if len(node.tokens) and node.tokens[-1] == 0)
    assert Maze.observed <= num_replayed


@pytest.mark.parametrize("factory", [Maze, SnapshotMaze])
@pytest.mark.parametrize("options", ALL_OPTIONS.values(), ids=ALL_OPTIONS)
def test_the_reward_of_each_leaf_is_that_of_its_ids(factory: Any, options: TreeOptions) -> None:
    leaves = [leaf for seed in range(2) for leaf in sample(factory, options, seed=seed).leaves]
    assert [leaf.reward for leaf in leaves] == [reward_of(leaf.ids()) for leaf in leaves]
    assert len({leaf.reward for leaf in leaves}) > 2


@pytest.mark.parametrize("options", ALL_OPTIONS.values(), ids=ALL_OPTIONS)
def test_no_more_environments_are_open_than_paths(options: TreeOptions) -> None:
    tree = sample(Maze, options)
    assert len(tree.leaves) == 8
    assert Maze.most_open <= 8


@pytest.mark.parametrize("factory", [Maze, SnapshotMaze])
@pytest.mark.parametrize(
    "cut", ["after an observation", "inside an observation", "inside a turn", "after a stop token"]
)
def test_a_prefix_is_continued_in_the_middle_of_its_episode(factory: Any, cut: str) -> None:
    # Turns [1, 2] and [3]: north against the wall, east; then south.
    whole = [PROMPT, 1, 2, 0, 6, 8, 3, 0, 6, 9]
    sizes = {"after an observation": 6, "inside an observation": 5, "inside a turn": 7, "after a stop token": 8}
    prefix = whole[: sizes[cut]]
    turns = ((1, 4),) + (((6, len(prefix)),) if len(prefix) > 6 else ())
    query = Query("q@6", "q", np.array(prefix, np.int32), turns=turns, parent_rollout="q/0")
    tree = sample(factory, SEGMENTS, query, seed=1)
    # The environment completes the observation.
    completed = {"inside an observation": 6, "after a stop token": 10}
    assert tree.query.prompt.tolist() == whole[: completed.get(cut, len(prefix))]
    assert [leaf.reward for leaf in tree.leaves] == [reward_of(leaf.ids()) for leaf in tree.leaves]
    assert max(leaf.reward or 0 for leaf in tree.leaves) > 0


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ([12, 2, 0, 6, 8], "Maze gives other ids than the record from token 0 of the prompt on"),
        ([PROMPT, 2, 0, 6, 9], "Maze gives other ids than the record from token 1 of observation 1 on"),
    ],
)
def test_a_prefix_of_another_environment_is_refused(prefix: list[int], message: str) -> None:
    query = Query("q@5", "q", np.array(prefix, np.int32), turns=((1, 3),), source="p.jsonl:1")
    assert refusal(sample, Maze, TURNS, query).startswith(f"p.jsonl:1: query q@5: support.maze:{message}")


def test_a_prefix_that_ends_its_episode_is_refused() -> None:
    query = Query("q@5", "q", np.array([PROMPT, 2, 2, 3, 3, 0], np.int32), turns=((1, 6),))
    assert "Maze ends the episode after turn 1 of the prefix; continue shorter ones" in refusal(
        sample, Maze, TURNS, query
    )


def test_an_environment_that_is_not_deterministic_is_refused_without_snapshots() -> None:
    dice = random.Random(0)

    class Dice(Maze):
        def observe(self, response_ids: list[int]) -> list[int] | None:
            super().observe(response_ids)
            self.thrown = dice.randrange(1000, 9999)
            return [5, self.thrown, 8] if self.turns < 4 else None

        def reward(self) -> float:
            return getattr(self, "thrown", 0)

    class FairDice(Dice, SnapshotMaze):
        pass

    assert "answered turn 1 with other tokens than before; write snapshot and rest" in refusal(sample, Dice, TURNS)
    assert len(sample(FairDice, TURNS).leaves) == 8


class Truncated(Maze):
    """Its reward is the number of tokens of a turn that was cut off."""

    cut = 0

    def truncate(self, response_ids: list[int]) -> None:
        assert 0 not in response_ids
        self.cut = len(response_ids)

    def reward(self) -> float:
        return float(self.cut)


def test_an_environment_sees_a_turn_that_a_limit_cut_off() -> None:
    leaves = sample(Truncated, replace(SEGMENTS, max_tokens=5)).leaves
    assert [leaf.reward for leaf in leaves] == [float(len(leaf.turn)) for leaf in leaves]
    assert len({leaf.reward for leaf in leaves}) > 1


def test_an_answer_ends_the_turn_for_the_environment() -> None:
    options = replace(SEGMENTS, is_answer=lambda turn: bool((turn == 3).any()))
    for leaf in sample(Maze, options, seed=2).leaves:
        if leaf.finish == "answer" and leaf.tokens[-1] != 0:
            # The turn counts, although it has no stop token.
            assert leaf.reward == reward_of(np.append(leaf.ids()[: leaf.start + len(leaf.tokens)], 0))
            break
    else:
        raise AssertionError("no turn was ended by an answer alone")


def test_asynchronous_environments_are_awaited() -> None:
    class Slow(Maze):
        async def observe(self, response_ids: list[int]) -> list[int] | None:  # type: ignore[override]
            await asyncio.sleep(0)
            return super().observe(response_ids)

        async def close(self) -> None:  # type: ignore[override]
            super().close()

    async def made(fields: dict[str, Any], tokenizer: Any) -> Slow:
        return Slow(fields, tokenizer)

    assert shown(sample(made, SEGMENTS)) == shown(sample(Maze, SEGMENTS))


@pytest.mark.parametrize("number", range(12))
def test_a_cancelled_tree_closes_its_environments(number: int) -> None:
    class Cancelling(SnapshotMaze):
        async def observe(self, response_ids: list[int]) -> list[int] | None:  # type: ignore[override]
            if Maze.observed == number:
                trees[0].cancel()
            return super().observe(response_ids)

    trees: list[asyncio.Task[Tree]] = []

    async def run() -> None:
        ids, episode = await start_episode(Cancelling, Query("q", "q", NO_IDS))
        trees.append(asyncio.ensure_future(sample_tree(Query("q", "q", ids), maze_engine(), TURNS, episode=episode)))
        with pytest.raises(asyncio.CancelledError):
            await trees[0]

    asyncio.run(run())
    assert Maze.open == 0


def _with(**methods: Any) -> Any:
    return type("Broken", (Maze,), {"__module__": "rooms", "__qualname__": "Broken", **methods})


def _raise(*_: Any) -> Any:
    raise ValueError("two\nlines")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (_with(observe=_raise), r"support.maze:\S+|\S+_raise raised ValueError: two lines$"),
        (_with(reward=_raise), r"\S+_raise raised ValueError: two lines$"),
        (_with(__init__=_raise), r"rooms:Broken raised ValueError: two lines$"),
        (_with(reward=lambda _: float("nan")), "returned the reward nan; expected a finite number or None"),
        (_with(reward=lambda _: "1"), "returned a reward of type str; expected a number or None"),
        (_with(observe=lambda *_: []), "rooms:Broken returned no token ids from observe; return None at the end"),
        (_with(observe=lambda *_: "N"), "rooms:Broken returned a value of type str from observe; expected a list"),
        (_with(observe=lambda *_: [0.5]), "rooms:Broken returned a value of type list from observe; expected a list"),
        (_with(observe=lambda *_: [[1], [2, 3]]), "rooms:Broken returned a value of type list from observe; expected"),
        (_with(observe=lambda *_: [-1]), "rooms:Broken returned -1 .. -1 from observe; expected token ids, from 0 on"),
        (_with(prompt=lambda _: None), "rooms:Broken returned None for the prompt, and the record has no prompt"),
        (_with(snapshot=lambda _: 1), "rooms:Broken returned an environment with only one of snapshot and restore"),
    ],
)
def test_an_error_names_the_query_the_environment_and_the_problem(factory: Any, message: str) -> None:
    with pytest.raises(TreepackError, match=rf"^p\.jsonl:1: query q: .*({message})"):
        sample(factory, TURNS)


def test_an_object_without_the_methods_is_no_environment() -> None:
    def made(fields: dict[str, Any], tokenizer: Any) -> Any:
        return {}

    assert "returned an object of type dict without prompt, observe, reward" in refusal(sample, made, TURNS)
