"""The arms of TRACE: both stages, continuations, the predictor, and the table."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import maze
import numpy as np
import pytest
import trace_arms
import trace_tables
from curves_arms import Sizes, State
from learner import Learner, trajectories_of
from tasks import sample_trees
from trace_predictor import Fitting, predictions, prompt_values, refit, start_predictor
from trace_rounds import active_lines, continuation_queries, uniform_lines

import treepack
from support.reproduction_learners import coin_learner, small_learner
from treepack.errors import TreepackError
from treepack.rollout.tree import Tree
from treepack.trie.trie import Trie


def bare_trees(learner: Learner, *, num: int, width: int) -> tuple[list[Tree], Trie]:
    queries = learner.task.queries(num, seed=1)
    trees = sample_trees(learner.task, queries, learner.engine, learner.task.independent(width), seed=3)
    return trees, treepack.build_trie(trajectories_of(trees))


@pytest.mark.parametrize("is_active", [False, True])
@pytest.mark.parametrize("task", ["maze", "steps"])
def test_continuations_spend_the_budget_and_continue_their_rollouts_in_the_same_world(
    task: str, is_active: bool, tmp_path: Path
) -> None:
    learner = small_learner(tmp_path / "policy", task)
    trees, trie = bare_trees(learner, num=2, width=2)
    predictor = start_predictor(tmp_path / "policy", device="cpu", segment=learner.segment, seed=0)
    if is_active:
        lines = active_lines(trie, predictions(predictor, trie), 2, learner.segment)
    else:
        lines = uniform_lines(trie, 2, learner.segment, np.random.default_rng(0))
    # What has no prefix gets half as many rollouts of its prompt.
    assert sum(line.count * (2 if line.rollout is None else 1) for line in lines) == 2 * 4
    assert sum(line.rollout is not None for line in lines) > 2
    queries = {tree.query.group_id: tree.query for tree in trees}
    more, options = continuation_queries(trie, lines, queries, learner.task.independent(1))
    grown = sample_trees(learner.task, more, learner.engine, options, seed=3)
    leaf_of = {f"{tree.query.key}/{i}": leaf for tree in trees for i, leaf in enumerate(tree.leaves)}
    for tree, line in zip(grown, lines, strict=True):
        original = queries[line.group]
        for leaf in tree.leaves:
            ids = leaf.ids()
            begin = original.prompt if line.rollout is None else leaf_of[line.rollout].ids()[: line.size]
            assert ids[: len(begin)].tolist() == begin.tolist()
            assert len(ids) - len(original.prompt) <= learner.task.max_tokens + maze.OBSERVATION
            if task == "maze":
                world = maze.make_maze(original.fields["maze_seed"], original.fields["level"], learner.task.dial)
                assert maze.reward(ids[len(original.prompt) :], world) == leaf.reward


def test_the_predictor_learns_the_shares_of_successes_and_values_a_prompt_alone_as_with_its_rollouts(
    tmp_path: Path,
) -> None:
    learner = small_learner(tmp_path / "policy", "steps")
    trees, trie = bare_trees(learner, num=3, width=2)
    # Prompts 0 and 1 always fail, and prompt 2 always succeeds.
    hopeful = trees[2].query.group_id
    rollouts = [replace(each, reward=float(each.group_id == hopeful)) for each in trajectories_of(trees)]
    trie = treepack.build_trie(rollouts)
    predictor = start_predictor(
        tmp_path / "policy",
        device="cpu",
        segment=learner.segment,
        seed=0,
        fitting=Fitting(rate=3e-3),
    )
    queries = [tree.query for tree in trees]
    assert prompt_values(predictor, queries).tolist() == [0.5] * 3
    losses = [refit(predictor, trie, seed=number) for number in range(8)]
    values = prompt_values(predictor, queries)
    assert losses[0] == pytest.approx(0.25)
    assert values[2] > 0.7 > 0.3 > values[:2].max()
    predicted = predictions(predictor, trie)
    assert predicted.group_ids == [query.group_id for query in queries]
    np.testing.assert_allclose(predicted.root_value, values, rtol=1e-5)


@pytest.mark.parametrize("name", trace_arms.ARMS)
def test_a_step_of_each_arm_spends_the_budget_and_trains(name: str, tmp_path: Path) -> None:
    learner = coin_learner(tmp_path / "policy")
    state = State(learner, Sizes(prompts=4, width=4), seed=0)
    assert trace_arms.budget_of(state).rollouts == 8
    before = [part.clone() for part in learner.policy.model.parameters()]
    for step in (1, 2):
        state.step = step
        decoded, figures = trace_arms.ARMS[name](state)
        assert (figures["rollouts"], figures["continuations"]) == (8, 16)
        assert decoded == figures["step_decoded"] > 0
        assert figures["reused"] > 0
        assert figures["mixed"] <= figures["prompts"]
        assert figures["sampler_gap"] < 1e-5
    assert any(not one.equal(other) for one, other in zip(before, learner.policy.model.parameters(), strict=True))


def test_the_table_compares_arms_by_seed_up_to_the_tokens_that_all_have_reached(tmp_path: Path) -> None:
    def write(arm: str, seed: int, rates: list[float], mixed: list[int]) -> None:
        names: dict[str, Any] = {"task": "maze", "arm": arm, "seed": seed}
        lines = [names | {"step": 0, "decoded": 0, "pass_rate": rates[0]}]
        for step, (rate, each) in enumerate(zip(rates[1:], mixed, strict=True), 1):
            figures = {"mixed": each, "step_decoded": 100, "root_ratio": each / 8, "spearman_root": None}
            lines.append(
                names | {"step": step, "decoded": 100 * step, "pass_rate": rate, "step_seconds": 1.0} | figures
            )
        (tmp_path / f"maze-{arm}-{seed}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")

    write("trace-uniform", 0, [0.2, 0.3, 0.4], [8, 2])
    write("trace-uniform", 1, [0.2, 0.3, 0.6], [8, 4])
    write("trace", 0, [0.2, 0.3, 0.5, 0.9], [8, 4, 8])
    write("trace", 1, [0.2, 0.3, 0.7, 0.9], [8, 6, 8])
    runs, tokens = trace_tables.read_arms(tmp_path, "maze", list(trace_tables.TRACE_ARMS))
    assert tokens == 200
    # The first step has no predictions, and step 3 of `trace` is beyond the common tokens.
    assert trace_tables.figure(runs["trace"][1], "root_ratio") == 6 / 8
    assert trace_tables.figure(runs["trace"][1], "mixed_per_token") == 60
    assert np.isnan(trace_tables.figure(runs["trace"][1], "spearman_root"))
    (text,) = trace_tables.write_tables(tmp_path, "trace", trace_tables.TRACE_ARMS, trace_tables.TRACE_COLUMNS)
    assert text == (tmp_path / "trace-maze.md").read_text()
    first, last = text.splitlines()[-2:]
    assert first.startswith("| uniform, uniform | 2 | 0.500 ± ")
    assert last.startswith("| active, active | 2 | 0.600 ± ")
    assert "| +0.100 ± 0.000 |" in last
    with pytest.raises(TreepackError, match="contains no run of pros; run"):
        trace_tables.write_tables(tmp_path, "pros", {"pros": "PROS"}, {})
