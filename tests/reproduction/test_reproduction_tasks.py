"""The two tasks of the reproduction: their traces, rewards, environments and queries."""

import asyncio
from dataclasses import replace

import maze
import numpy as np
import pytest
import steps
from hypothesis import given
from hypothesis import strategies as st
from tasks import TASKS, make_task, pass_rates, sample_trees, tree_rewards
from words import ACTIONS, ID, STOP, WORDS, decode, encode

from treepack.errors import TreepackError
from treepack.rollout.engine import Sampling, Segment
from treepack.rollout.options import TreeOptions
from treepack.rollout.query import Query
from treepack.trajectory import Int32

SEEDS = st.integers(0, 2**31 - 1)
DIAL = steps.Dial()


@given(st.lists(st.integers(0, len(WORDS) - 1)))
def test_words_and_ids_are_inverse(ids: list[int]) -> None:
    assert encode(decode(ids)).tolist() == ids


@given(SEEDS, st.sampled_from(steps.LEVELS), st.sampled_from([5, 23, 97]))
def test_a_prompt_contains_its_problem(seed: int, level: int, modulus: int) -> None:
    problem = steps.draw(np.random.default_rng(seed), level, steps.Dial(modulus=modulus))
    assert steps.parse(problem.prompt(), modulus) == problem
    assert len(problem.operations) == level


@given(SEEDS, st.sampled_from(steps.LEVELS))
def test_a_trace_without_errors_has_the_right_result_in_each_line_and_the_reward_1(seed: int, level: int) -> None:
    rng = np.random.default_rng(seed)
    problem = steps.draw(rng, level, DIAL)
    words = decode(problem.trace(rng, 0.0).tolist()).split()
    number = problem.first
    for line in range(level):
        _, first, sign, operand, equals, result = words[6 * line : 6 * line + 6]
        assert (int(first), equals) == (number, "=")
        number = {"+": number + int(operand), "-": number - int(operand), "*": number * int(operand)}[sign] % 97
        assert int(result) == number
    assert steps.reward(encode(" ".join(words)), number) == 1.0
    assert len(words) <= steps.MAX_TOKENS


@given(SEEDS, st.sampled_from(steps.LEVELS))
def test_a_trace_of_wrong_lines_continues_with_each_wrong_result(seed: int, level: int) -> None:
    rng = np.random.default_rng(seed)
    problem = steps.draw(rng, level, DIAL)
    words = decode(problem.trace(rng, 1.0).tolist()).split()
    number = problem.first
    for line in range(level):
        _, first, sign, operand, _, result = words[6 * line : 6 * line + 6]
        assert int(first) == number
        assert int(result) != steps.OPERATIONS[sign](number, int(operand)) % 97
        number = int(result)
    assert steps.reward(encode(" ".join(words)), number) == 1.0  # the answer is the last result


def test_a_trace_has_a_wrong_line_as_often_as_the_dial_says() -> None:
    samples = steps.examples(2000, seed=1, dial=steps.Dial(error=0.2), levels=[4])
    right = [steps.reward(ids, steps.parse(ids[: int(mask.argmax())], 97).results()[-1]) for ids, mask in samples]
    # 0.8^4, and a wrong line that a later one makes good: less than 1/96 of the rest. Four standard errors are 0.044.
    assert abs(np.mean(right) - 0.8**4) < 0.044 + 0.01


@pytest.mark.parametrize("text", ["answer 66", "answer 65 <stop>", "66 <stop>", "answer 66 <stop> 66", "<stop>", ""])
def test_a_response_without_the_right_answer_at_its_end_has_no_reward(text: str) -> None:
    assert steps.reward(encode("a: 22 * 3 = 66 answer 66 <stop>"), 66) == 1.0
    assert steps.reward(encode(text), 66) == 0.0


@given(SEEDS, st.sampled_from(maze.LEVELS))
def test_a_perfect_player_opens_the_door_in_the_shortest_number_of_turns(seed: int, size: int) -> None:
    plan = maze.make_maze(seed, size, maze.Dial())
    state = maze.State(plan, plan.start)
    while state.outcome is None:
        state = state.after(state.best_action())
    assert (state.outcome, state.turns) == (1.0, plan.shortest())
    assert plan.shortest() <= maze.Dial().longest


@given(SEEDS, st.sampled_from(maze.LEVELS), st.lists(st.sampled_from(ACTIONS), max_size=maze.MAX_TURNS))
def test_a_maze_is_replayed_from_its_actions(seed: int, size: int, actions: list[str]) -> None:
    plan = maze.make_maze(seed, size, maze.Dial())
    state, ids = maze.State(plan, plan.start), [maze.prompt_ids(plan)]
    for action in actions:
        if state.outcome is None:
            state = state.after(action)
            ids.append(encode(f"{action} {state.observation()}"))
            assert plan.cell(state.place) != maze.WALL
            assert (plan.cell(state.place) == maze.PIT) <= (state.outcome == 0.0)
    assert maze.reward(np.concatenate(ids), plan) == (state.outcome or 0.0)


@given(SEEDS)
def test_a_path_of_the_warm_up_trains_its_actions_only(seed: int) -> None:
    ((ids, mask),) = maze.examples(1, seed=seed, dial=maze.Dial())
    assert set(ids[mask == 1].tolist()) <= set(maze.STOP_TOKENS)
    assert not set(ids[mask == 0].tolist()) & set(maze.STOP_TOKENS)


class _RandomActions:
    """An engine that answers each turn with a random action."""

    sampling = Sampling(stop_token_ids=maze.STOP_TOKENS)

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        drawn = np.random.default_rng(seed).choice(maze.STOP_TOKENS, (count, 1)).astype(np.int32)
        return [Segment(tokens, np.full(1, -np.log(6), np.float32), "stop") for tokens in drawn]

    async def publish(self, version: str) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


def test_a_tree_of_maze_turns_has_the_rewards_of_its_replayed_paths() -> None:
    task = make_task("maze", pits=0.05, walls=0.0, longest=4)
    options = TreeOptions(width=8, max_tokens=task.max_tokens, segment=None, depth=None)
    queries = task.queries(12, seed=3, levels=[5])
    trees = sample_trees(task, queries, _RandomActions(), options, seed=2)
    outcomes = set()
    for query, tree in zip(queries, trees, strict=True):
        plan = maze.make_maze(query.fields["maze_seed"], 5, task.dial)
        replayed = [maze.reward(leaf.ids(), plan) for leaf in tree.leaves]
        assert tree_rewards(tree).tolist() == replayed
        assert all(leaf.depth <= maze.MAX_TURNS for leaf in tree.leaves)
        outcomes |= set(replayed)
    assert outcomes == {0.0, 1.0}
    assert len(pass_rates(trees)) == 12


def test_a_prefix_of_a_maze_is_continued_after_a_replay() -> None:
    task = make_task("maze")
    (query,) = task.queries(1, seed=5)
    plan = maze.make_maze(query.fields["maze_seed"], query.fields["level"], task.dial)
    state = maze.State(plan, plan.start)
    ids, turns = query.prompt, []
    while state.turns + 1 < plan.shortest():
        turns.append((len(ids), len(ids) + 1))
        action = state.best_action()
        state = state.after(action)
        ids = np.concatenate([ids, encode(f"{action} {state.observation()}")])
    prefix = replace(query, key="prefix", prompt=ids, turns=tuple(turns))

    async def finish() -> tuple[Int32, float | None]:
        prompt, episode = await task.start(prefix)
        episode, observation = await episode.after(encode("open"))
        assert observation is None
        return prompt, await episode.reward(np.zeros(0, np.int32))

    prompt, reward = asyncio.run(finish())
    assert prompt.tolist() == ids.tolist()
    assert reward == 1.0


@pytest.mark.parametrize("name", TASKS)
def test_queries_are_a_function_of_the_seed_and_levels_take_turns(name: str) -> None:
    task = make_task(name)
    queries, again, other = (task.queries(6, seed=seed, levels=[5, 6]) for seed in (1, 1, 2))
    assert [query.prompt.tolist() for query in queries] == [query.prompt.tolist() for query in again]
    assert all(a.prompt.tolist() != b.prompt.tolist() for a, b in zip(queries, other, strict=True))
    assert [query.fields["level"] for query in queries] == [5, 6, 5, 6, 5, 6]
    assert not {query.key for query in queries} & {query.key for query in other}


def test_a_dial_without_the_field_and_an_unknown_task_are_refused() -> None:
    with pytest.raises(TreepackError, match="the dial of maze has no error; it has walls, pits, noise, longest"):
        make_task("maze", error=0.1)
    with pytest.raises(TreepackError, match="expected one of steps, maze"):
        make_task("chess")
    with pytest.raises(TreepackError, match=r"levels are \[1, 2\]; expected some of \[2, 3"):
        make_task("steps", levels=[1, 2])


def test_a_prefix_of_a_chain_is_scored_with_the_part_of_the_answer_that_it_contains() -> None:
    task = make_task("steps")
    (query,) = task.queries(1, seed=1)
    answer = query.fields["answer"]
    prefix: Query = replace(query, prompt=np.concatenate([query.prompt, encode(f"a: 1 + 2 = 3 answer {answer}")]))

    async def score(words: str) -> float | None:
        _, episode = await task.start(prefix)
        episode, _ = await episode.after(encode(words))
        return await episode.reward(np.zeros(0, np.int32))

    assert asyncio.run(score("<stop>")) == 1.0
    assert asyncio.run(score("answer <stop>")) == 0.0
    assert ID["<stop>"] == STOP
