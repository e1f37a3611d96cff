"""Simulated allocation: worlds keep their chances, arms spend the same budget, and gains resemble the paper's."""

from __future__ import annotations

import json
import math
import random as plain
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.command_line import Run
from support.paths import ROOT
from support.refusal import refusal
from support.strategies import make
from treepack.errors import TreepackError
from treepack.research.trace.allocation import allocate_prefixes, allocate_roots
from treepack.research.trace.options import BudgetExperiment
from treepack.research.trace.simulation import ARMS, ExperimentArm, interval, simulate
from treepack.research.trace.worlds import MarkovWorld, World, recorded_world
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie

SMALL = BudgetExperiment(candidates=60, budget=120, steps=20)


def recorded_trie() -> Trie:
    """Build group p, whose a and b share the first of three turns, and q with two single-turn rollouts."""
    turns = [(1, 2, 1.0), (3, 4, 1.0), (5, 6, 1.0)]
    return build_trie(
        [
            make("a", [7, 1, 2, 3, 4, 5], spans=turns, group="p", reward=1.0),
            make("b", [7, 1, 2, 6, 4, 5], spans=turns, group="p", reward=0.0),
            make("c", [7, 8, 2, 9], spans=turns[:2], group="p", reward=0.0),
            make("d", [9, 1], group="q", reward=1.0),
            make("e", [9, 2], group="q", reward=1.0),
        ]
    )


@pytest.mark.parametrize("value", [0.02, 0.5, 0.9])
def test_chances_keep_their_mean_from_turn_to_turn_and_are_those_of_the_outcome(value: float) -> None:
    count, random = 40_000, np.random.default_rng(1)
    rollouts = MarkovWorld(max_turns=4).roll_out(np.zeros(count, np.int64), np.full(count, value), random)
    # Five standard errors of a mean of `count` draws in 0 .. 1 with this mean.
    bound = 5 * math.sqrt(value * (1 - value) / count)
    assert np.abs(rollouts.value.mean(axis=0) - value).max() < bound
    assert abs(rollouts.reward.mean() - value) < bound
    assert set(rollouts.num_turns.tolist()) == {2, 3, 4}
    assert set(rollouts.reward.tolist()) == {0.0, 1.0}
    last = rollouts.value[np.arange(count), rollouts.num_turns - 1]
    # Among rollouts near one half, outcomes must match the last chance on average.
    sure = (last > 0.25) & (last < 0.75)
    assert abs((rollouts.reward - last)[sure].mean()) < 5 * 0.5 / math.sqrt(sure.sum())


def test_recorded_chances_are_shares_of_successes_drawn_towards_those_before() -> None:
    world = recorded_world(recorded_trie(), persistence=2.0)
    a, b, c, *_ = world.rollouts.value
    # (s + p v) / (n + p) with s = 1 of n = 2 through the shared turn, v = 1/3 of the group, p = 2.
    shared = (1 + 2 / 3) / (2 + 2)
    assert world.value.tolist() == pytest.approx([1 / 3, 1.0])
    assert a.tolist() == pytest.approx([1 / 3, shared, (1 + 2 * shared) / 3])
    assert b.tolist() == pytest.approx([1 / 3, shared, (0 + 2 * shared) / 3])
    assert c[:2].tolist() == pytest.approx([1 / 3, (0 + 2 / 3) / 3])
    assert world.rollouts.num_turns.tolist() == [3, 3, 2, 1, 1]


def test_recorded_rollouts_are_drawn_evenly_from_their_group() -> None:
    world, random = recorded_world(recorded_trie()), np.random.default_rng(0)
    rollouts = world.roll_out(np.repeat([0, 1], 30_000), np.zeros(60_000), random)
    assert rollouts.reward[:30_000].mean() == pytest.approx(1 / 3, abs=0.015)
    assert rollouts.reward[30_000:].min() == 1.0
    assert (rollouts.num_turns[:30_000] == 2).mean() == pytest.approx(1 / 3, abs=0.015)
    assert sorted(world.draw_prompts(2, random)[0].tolist()) == [0, 1]
    assert set(world.draw_prompts(50, random)[0].tolist()) == {0, 1}


def values_of(arms: list[ExperimentArm]) -> list[Any]:
    return [[getattr(arm, name).tolist() for name in ("root_ratio", "prefix_ratio", "cost")] for arm in arms]


@pytest.mark.parametrize("world", [MarkovWorld(), recorded_world(recorded_trie())])
def test_equal_seeds_give_equal_figures_and_others_others(world: World) -> None:
    first, again = simulate(world, SMALL), simulate(world, SMALL)
    assert values_of(first[0]) == values_of(again[0])
    assert first[1] == again[1]
    assert values_of(first[0]) != values_of(simulate(world, replace(SMALL, seed=1))[0])


@pytest.mark.parametrize("expand", [1, 2, 5])
def test_every_arm_spends_the_whole_budget(expand: int) -> None:
    arms, _ = simulate(MarkovWorld(max_turns=2), replace(SMALL, budget=121, expand=expand))
    for arm in arms:
        assert arm.cost.tolist() == pytest.approx([121 * (1 + expand / 2)] * 20)


def test_rollouts_without_prefixes_buy_half_as_many_rollouts() -> None:
    single = build_trie([make(f"t{i}", [7, i], group="g", reward=float(i % 2)) for i in range(4)])
    arms, rank = simulate(recorded_world(single), replace(SMALL, expand=2))
    assert rank is None  # all prompts are the same one
    for arm in arms:
        assert arm.cost.tolist() == [240] * 20
        assert (arm.prefix_ratio == 0).all()


def slow(world: MarkovWorld, experiment: BudgetExperiment, *, active: tuple[bool, bool], seed: int) -> float:
    """Compute equation 21 of one arm, rollout by rollout, over all steps; predictions are the true chances."""
    dice, mixed, rolled = plain.Random(seed), 0, 0
    for _ in range(experiment.steps):
        a, b = world.spread * world.success, world.spread * (1 - world.success)
        prompts = [dice.betavariate(a, b) for _ in range(experiment.candidates)]
        chosen = dice.sample(range(experiment.candidates), experiment.num_selected)
        counts = [experiment.budget // experiment.num_selected * (i in chosen) for i in range(experiment.candidates)]
        if active[0]:
            counts = allocate_roots(np.clip(prompts, 0.01, 0.99), experiment.budget).tolist()
        for prompt, count in zip(prompts, counts, strict=True):
            if count == 0:
                continue
            outcomes, anchors = [], []
            for _ in range(count):
                line = [prompt]
                for _ in range(dice.randint(2, world.max_turns) - 1):
                    v = min(max(line[-1], 1e-9), 1 - 1e-9)
                    line.append(dice.betavariate(world.persistence * v, world.persistence * (1 - v)))
                reward = dice.random() < line[-1]
                # Anchors are the prefixes after each turn but the last, with the outcome of the rollout.
                outcomes.append(reward)
                anchors.append([(v, reward) for v in line[1:]])
                # Uniform stage 2: expand continuations of each rollout, spread over its prefixes.
                if not active[1]:
                    ways = [experiment.expand // len(line[1:])] * len(line[1:])
                    for at in dice.sample(range(len(ways)), experiment.expand % len(ways)):
                        ways[at] += 1
                    outcomes += [dice.random() < v for v, way in zip(line[1:], ways, strict=True) for _ in range(way)]
            # TRACE in stage 2: all prefixes of the prompt compete for its continuations.
            if active[1]:
                value, seen = np.array([anchor for listed in anchors for anchor in listed], np.float64).T
                none, budget = np.zeros(len(value), np.int64), np.array([count * experiment.expand])
                ways = allocate_prefixes(np.clip(value, 0.01, 0.99), seen, none, budget).tolist()
                outcomes += [dice.random() < v for v, way in zip(value, ways, strict=True) for _ in range(way)]
            rolled += 1
            mixed += len(set(outcomes)) == 2
    return mixed / rolled


@pytest.mark.parametrize("active", ARMS)
def test_fast_equals_slow(active: tuple[bool, bool]) -> None:
    experiment = BudgetExperiment(candidates=30, budget=60, expand=2, root_noise=0.0, prefix_noise=0.0, steps=150)
    world = MarkovWorld(max_turns=4, spread=1.0)
    (arm,) = (arm for arm in simulate(world, experiment)[0] if (arm.active_roots, arm.active_prefixes) == active)
    # Both means vary: the difference of two independent ones has sqrt(2) times the error of one.
    mean, half = interval(arm.root_ratio)
    assert slow(world, experiment, active=active, seed=7) == pytest.approx(mean, abs=2.5 * math.sqrt(2) * half)


def gains(world: World, experiment: BudgetExperiment) -> list[tuple[float, float]]:
    """Return points of effective ratio above uniform and half of their interval: prefixes, roots, both."""
    arms, _ = simulate(world, experiment)
    return [interval(100 * (arm.root_ratio - arms[0].root_ratio)) for arm in arms[1:]]


def test_both_stages_gain_and_their_gains_stack_as_in_table_1() -> None:
    experiment = BudgetExperiment(steps=40)
    arms, _ = simulate(MarkovWorld(), experiment)
    (prefixes, p), (roots, r), (both, b) = gains(MarkovWorld(), experiment)
    assert 100 * arms[0].root_ratio.mean() == pytest.approx(42.8, abs=3)  # the paper's uniform arm
    assert prefixes - p > 3
    assert roots - r > 3
    assert both - b > max(prefixes + p, roots + r) + 2
    assert arms[3].mixed_prompts.mean() > arms[0].mixed_prompts.mean() + 10


def test_prefixes_of_single_rollouts_that_are_only_redrawn_gain_nothing() -> None:
    apart = [make(f"t{i}", [7, i, 2, 3], spans=[(1, 2, 1.0), (3, 4, 1.0)], reward=float(i % 2)) for i in range(6)]
    (prefixes, _), (roots, _), (both, _) = gains(recorded_world(build_trie(apart), persistence=0.0), SMALL)
    assert (prefixes, roots) == (0.0, both)


def test_useless_predictions_of_prompts_raise_the_ratio_by_fewer_prompts() -> None:
    arms, rank = simulate(MarkovWorld(), BudgetExperiment(root_noise=100.0, prefix_noise=100.0, steps=20))
    assert rank is not None
    assert abs(rank) < 0.1
    assert arms[1].root_ratio.mean() < arms[0].root_ratio.mean() + 0.01
    assert arms[2].root_ratio.mean() > arms[0].root_ratio.mean() + 0.1
    assert arms[2].mixed_prompts.mean() < 0.3 * arms[0].mixed_prompts.mean()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"budget": 1}, r"budget is 1; expected 2 \.\. 1,000,000"),
    ({"steps": 1}, r"steps is 1; expected 2 \.\. 1,000,000"),
    ({"root_noise": -1.0}, "root_noise is -1.0; expected 0 or a positive number"),
    ({"prefix_noise": math.nan}, "prefix_noise is nan; expected 0 or a positive number"),
    ({"selected": 0}, "selected is 0; expected 1 .. 512, the candidates"),
    ({"selected": 300, "budget": 599}, "a budget of 599 is too small for groups of two rollouts of 300 selected"),
]
BAD_WORLDS: list[tuple[dict[str, Any], str]] = [
    ({"max_turns": 1}, "max_turns is 1; expected 2 or more, else there is no prefix"),
    ({"success": 1.0}, "success is 1.0; expected a mean chance between 0 and 1"),
    ({"spread": 0.0}, "spread is 0.0; expected a number of at least 1e-6"),
    ({"persistence": math.inf}, "persistence is inf; expected a number of at least 1e-6"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_what_cannot_be_spent_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TreepackError, match=message):
        BudgetExperiment(**options)


@pytest.mark.parametrize(("options", "message"), BAD_WORLDS)
def test_worlds_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TreepackError, match=message):
        MarkovWorld(**options)


def test_recorded_worlds_need_binary_rewards_and_a_persistence_that_is_not_negative() -> None:
    assert "persistence is -1; expected 0 or a positive number" in refusal(
        recorded_world, recorded_trie(), persistence=-1
    )
    assert "has the reward 0.5; TRACE needs 0 for failure or 1 for success" in refusal(
        recorded_world, build_trie([make("a", [7, 1], reward=0.5)])
    )


def test_the_command_prints_every_arm_with_intervals(treepack: Run, tmp_path: Path) -> None:
    command = ("simulate", "allocation", "--candidates", 60, "--budget", 120, "--steps", 20)
    shown = treepack(*command)
    assert (shown.status, shown.notes) == (0, "")
    lines = shown.out.splitlines()
    assert [line.split()[:2] for line in lines[-4:]] == [
        ["uniform", "uniform"],
        ["uniform", "TRACE"],
        ["TRACE", "uniform"],
        ["TRACE", "TRACE"],
    ]
    report = treepack(*command, "--json").json
    arms = simulate(MarkovWorld(), SMALL)[0]
    assert isinstance(report["arms"], list)
    for line, stated, arm in zip(lines[-4:], report["arms"], arms, strict=True):
        mean, half = interval(arm.root_ratio)
        assert stated["root_ratio"] == [mean, half]
        assert f" {100 * mean:.1f} +- {100 * half:.1f} " in line


def test_the_table_of_the_page_is_what_the_command_prints_without_options(treepack: Run) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    number = r"([\d.,]+)"
    shown = re.findall(rf"^\| (?:uniform|TRACE) \| (?:uniform|TRACE) \| {number} \+- {number} \|", page, re.MULTILINE)
    arms = treepack("simulate", "allocation", "--json").json["arms"]
    assert isinstance(arms, list)
    ratios = [100 * arm["root_ratio"][i] for arm in arms for i in (0, 1)]
    assert [float(part) for pair in shown for part in pair] == pytest.approx(
        ratios, abs=0.6
    )  # numpy's draws may change


def test_the_command_draws_from_a_trie(treepack: Run, tmp_path: Path) -> None:
    rollouts = [
        {"id": f"r{i}", "group_id": "g", "reward": i % 2, "input_ids": [7, i, 2, 3], "loss_mask": [0, 1, 0, 1]}
        for i in range(4)
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    assert treepack("build-trie", tmp_path / "rollouts.jsonl", "--out", tmp_path / "trie").status == 0
    command = ("simulate", "allocation", tmp_path / "trie", "--candidates", 10, "--budget", 20, "--steps", 5)
    assert treepack(*command, "--persistence", 0, "--json").status == 0
    refused = treepack(*command, "--max-turns", 4)
    assert refused.status == 1
    assert refused.err == "treepack: --max-turns describes the Markov model; leave it out with a trie\n"
