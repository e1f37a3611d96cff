"""Rollouts of several trajectories: each counts once in its group, and all of its trajectories get its advantage."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import oracle_rl as oracle
from support.command_line import Run
from support.critic_values import value_after, with_values
from support.paths import ROOT
from support.refusal import refusal
from support.strategies import make, trajectories
from support.trie_files import saved
from treepack.analysis.check import check
from treepack.errors import TreepackError
from treepack.files.manifest import read_manifest
from treepack.files.schema import PACKED_FORMAT
from treepack.pack.capacity import fit_capacity
from treepack.pack.check import check_packed, check_row
from treepack.pack.files import read_rows
from treepack.pack.leaf_weights import weigh_leaves
from treepack.pack.plan.planning import plan_rows
from treepack.pack.rows import pack_rows
from treepack.research.pros.augmentation import augment
from treepack.research.trace.targets import anchors
from treepack.rl.advantages.advantage_options import FLAT, TREE, AdvantageOptions
from treepack.rl.advantages.estimate import estimate_advantages, with_advantages
from treepack.rl.rollout_parts import LOST_PARTS
from treepack.rl.rollouts import rollouts_of
from treepack.trajectory import Tokens, Trajectory, positions
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie, trajectories_of


def parts(name: str, *samples: Trajectory) -> list[Trajectory]:
    """The samples as trajectories of one rollout."""
    return [
        replace(item, trajectory_id=f"{name}/part-{i}", source=f"made:{name}", rollout_id=name, rollout_part=i)
        for i, item in enumerate(samples)
    ]


@st.composite
def rollouts(draw: st.DrawFn) -> list[list[Trajectory]]:
    """Rollouts of one to three trajectories, each with its reward, in two groups."""
    result: list[list[Trajectory]] = []
    left = draw(trajectories())
    while left:
        size = min(len(left), draw(st.integers(1, 3)))
        chosen, left = left[:size], left[size:]
        fields: dict[str, Any] = {
            "group_id": draw(st.sampled_from("gh")), "reward": draw(st.floats(-3, 3)), "step": chosen[0].step
        }  # fmt: skip
        chosen = [replace(item, **fields) for item in chosen]
        result.append(chosen if size == 1 else parts(f"r{len(result)}", *chosen))
    return result


def tokens_of(item: Trajectory) -> Tokens:
    assert isinstance(item.content, Tokens)
    return item.content


def filled(trie: Trie, estimator: str, **options: Any) -> dict[str, Trajectory]:
    chosen = AdvantageOptions(estimator, rejected="zero", **options)
    trie = with_advantages(trie, estimate_advantages(trie, chosen), rejected="zero")
    return {item.trajectory_id: item for item in trajectories_of(trie)}


@pytest.mark.parametrize("estimator", FLAT)
@given(made=rollouts())
def test_a_rollout_counts_once_whatever_its_number_of_trajectories(
    estimator: str, made: list[list[Trajectory]]
) -> None:
    # With its first trajectory alone, each rollout is one trajectory.
    whole = [replace(samples[0], rollout_id=None, rollout_part=None) for samples in made]
    # A group of two more rollouts, so that there is always something to compare.
    whole += (others := [make("x", [1, 2], group="x", reward=1.0), make("y", [1, 3], group="x", reward=0.0)])
    made = [*made, *([item] for item in others)]
    expected = filled(build_trie(whole), estimator)
    found = filled(build_trie(item for samples in made for item in samples), estimator)
    for one, samples in zip(whole, made, strict=True):
        for item in samples:
            advantage = found[item.trajectory_id].advantage
            assert advantage == pytest.approx(expected[one.trajectory_id].advantage, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("estimator", FLAT)
@given(made=rollouts(), data=st.data())
def test_agents_of_a_name_are_compared_as_if_each_was_a_rollout_of_a_group_of_that_name(
    estimator: str, made: list[list[Trajectory]], data: st.DataObject
) -> None:
    made = [*made, *(parts(name, make(name, [1, 2], group="x", reward=float(i))) for i, name in enumerate("uv"))]
    named: list[Trajectory] = []
    alone: dict[tuple[str, str], Trajectory] = {}
    owner: list[tuple[str, str]] = []
    for samples in made:
        agents = data.draw(st.lists(st.sampled_from(["", "search"]), min_size=len(samples), max_size=len(samples)))
        # An agent has its reward, or none and then that of the rollout, whose first agent always has one.
        own = {agents[0]: samples[0].reward}
        for item, agent in zip(samples, agents, strict=True):
            if agent not in own:
                own[agent] = data.draw(st.sampled_from([None, 2.0]))
            named.append(replace(item, metadata={"agent": agent} if agent else {}, reward=own[agent]))
            owner.append((str(item.rollout_id or item.trajectory_id), agent))
            reward = samples[0].reward if own[agent] is None else own[agent]
            group = f"{item.group_id}-{agent}"
            one = replace(item, rollout_id=None, rollout_part=None, group_id=group, reward=reward)
            alone.setdefault(owner[-1], one)
    if not any(agent for _, agent in owner):
        assert refusal(filled, build_trie(named), estimator, by="agent").startswith("no trajectory has the name of an")
        return
    try:
        expected = filled(build_trie(alone.values()), estimator)
    except TreepackError:  # each agent has one part, so that nothing can be compared
        assert "no group is left to compare" in refusal(filled, build_trie(named), estimator, by="agent")
        return
    found = filled(build_trie(named), estimator, by="agent")
    for item, key in zip(named, owner, strict=True):
        advantage = found[item.trajectory_id].advantage
        assert advantage == pytest.approx(expected[alone[key].trajectory_id].advantage, rel=1e-9, abs=1e-12)
        assert found[item.trajectory_id].group_id == item.group_id


def test_estimators_of_trees_and_paths_have_no_agents() -> None:
    assert refusal(AdvantageOptions, "gae", by="agent") == (
        "by is an option of grpo, dr-grpo, rloo, reinforce++; gae has none"
    )


@given(made=rollouts(), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.5]))
def test_gae_goes_on_from_one_trajectory_of_a_rollout_to_the_next(
    made: list[list[Trajectory]], gamma: float, lam: float
) -> None:
    limits = [{"finish": "length"} if i % 2 else {} for i in range(len(made))]
    made = [[replace(item, metadata=limit) for item in each] for each, limit in zip(made, limits, strict=True)]
    trie = with_values(build_trie(item for samples in made for item in samples))
    found = filled(trie, "gae", gamma=gamma, lam=lam)
    for samples, limit in zip(made, limits, strict=True):
        values = [
            value_after(tokens_of(item).tokens.tolist()[:i])
            for item in samples
            for i in positions(tokens_of(item).starts, tokens_of(item).ends).tolist()
        ]
        after = value_after(tokens_of(samples[-1]).tokens.tolist()) if limit else None
        assert samples[0].reward is not None
        advantages, returns = oracle.gae(values, samples[0].reward, after, gamma=gamma, lam=lam)
        contents = [tokens_of(found[item.trajectory_id]) for item in samples]
        for name, expected in (("advantage", advantages), ("returns", returns)):
            joined = np.concatenate([getattr(content, name) for content in contents])
            np.testing.assert_allclose(joined, expected, rtol=1e-9, atol=1e-9)


def example(**changes: Any) -> list[Trajectory]:
    """A rollout of two trajectories and one of one trajectory."""
    split = parts("r", make("0", [1, 2, 3], reward=1.0), make("1", [1, 4, 5], reward=1.0))
    return [split[0], replace(split[1], **changes), make("s", [1, 2, 6], reward=0.0)]


@pytest.mark.parametrize("estimator", TREE)
def test_estimators_of_the_tree_refuse_rollouts_of_several_trajectories(estimator: str) -> None:
    message = f"made:r: the rollout r is 2 trajectories, .* \\(1 such rollouts in total\\), and {estimator} needs one"
    with pytest.raises(TreepackError, match=message):
        estimate_advantages(build_trie(example()), AdvantageOptions(estimator))


@pytest.mark.parametrize("estimator", TREE)
def test_a_group_without_such_rollouts_is_not_refused(estimator: str) -> None:
    # The only rollout of its group is rejected anyway.
    alone = parts("r", make("0", [1, 2, 3], group="x", reward=1.0), make("1", [1, 4, 5], group="x", reward=1.0))
    others = [make("s", [1, 2, 6], reward=0.0), make("t", [1, 2, 7], reward=1.0)]
    estimates = estimate_advantages(build_trie([*alone, *others]), AdvantageOptions(estimator))
    assert estimates.rejected == {"a single rollout": 1}
    assert estimates.num_rollouts == len(estimates.kept) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": 0.5}, "r/part-0 and r/part-1 belong to one rollout, but their reward differs; give all"),
        ({"reward": None}, "belong to one rollout, but their reward differs"),
        ({"group_id": "h"}, "belong to one rollout, but their group_id or step differs"),
        ({"rollout_part": -1}, "made:r: has turns that several paths of a search tree share, 1 such .*--per-path"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TreepackError, match=message):
        estimate_advantages(build_trie(example(**changes)), AdvantageOptions("grpo"))


def test_rollouts_of_two_sources_with_one_id_are_two(tmp_path: Path) -> None:
    other = [replace(item, source="made:other") for item in example()[:2]]
    trie = build_trie([*example(), *other])
    assert sorted(np.bincount(rollouts_of(trie).of_trajectory).tolist()) == [1, 2, 2]
    assert estimate_advantages(trie, AdvantageOptions("grpo")).num_rollouts == 3


@given(made=rollouts(), data=st.data())
def test_rows_name_the_first_trajectory_of_each_rollout(made: list[list[Trajectory]], data: st.DataObject) -> None:
    items = [item for samples in made for item in samples]
    # Some trajectories of rollouts of several are turns of several paths.
    items = [
        replace(item, rollout_part=-1) if item.rollout_id is not None and data.draw(st.booleans()) else item
        for item in items
    ]
    trie = build_trie(items)
    for row in pack_rows(trie, plan_rows(trie, capacity=40)):
        check_row(row, capacity=40)
        assert row.terms is not None
        found = row.terms.rollout
        if found is None:
            assert all(item.rollout_id is None for item in items)
            continue
        owners = [next(item for item in items if item.trajectory_id == name) for name in row.trajectory_ids]
        keys = [(item.rollout_id, item.source) if item.rollout_id else item.trajectory_id for item in owners]
        whole = [i for i, item in enumerate(owners) if item.rollout_part != -1]
        expected = [
            -1 if item.rollout_part == -1 else next(k for k in whole if keys[k] == keys[i])
            for i, item in enumerate(owners)
        ]
        assert found.tolist() == expected


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_rollouts_that_lose_a_trajectory_are_counted(too_long: str) -> None:
    long = parts(
        "l", make("0", [1, 2, 3], reward=1.0), make("1", [1, *range(10, 30)], spans=[(15, 21, 1.0)], reward=1.0)
    )
    trie, counts = fit_capacity(build_trie([*example(), *long]), 10, too_long=too_long)
    assert counts[LOST_PARTS] == 1
    assert sorted(trie.trajectories["trajectory_id"].to_pylist()) == ["l/part-0", "r/part-0", "r/part-1", "s"]
    assert fit_capacity(build_trie(example()), 10, too_long=too_long)[1] == {}


def test_leaf_weights_and_prefixes_refuse_them_and_augment_counts_them() -> None:
    trie = build_trie([replace(item, metadata={"leaf_weight": 0.5}) for item in example()])
    for use in (
        lambda: weigh_leaves(trie, fallback_leaves=False),
        lambda: estimate_advantages(trie, AdvantageOptions("grpo", leaf_weights=True)),
        lambda: anchors(trie),
    ):
        assert "the rollout r is 2 trajectories" in refusal(use)
    augmented = augment(trie, [np.zeros(2) for _ in range(3)])
    assert augmented.queries == []
    assert augmented.counts == {"of several trajectories": 1, "not successful": 1}


def chat(answers: list[str], **facts: Any) -> str:
    messages = [{"role": "user", "content": "2 + 2?"}]
    for answer in answers:
        messages += [
            {"role": "assistant", "content": answer, "reasoning_content": "let me see"},
            {"role": "user", "content": "sure?"},
        ]
    return json.dumps({"messages": messages[:-1], **facts}) + "\n"


@pytest.mark.parametrize("expand", ["trajectory", "turns"])
def test_conversations_that_a_template_splits(treepack: Run, tmp_path: Path, expand: str) -> None:
    lines = [
        chat(["4", "yes"], id="win", group_id="g", reward=1.0),
        chat(["5", "no", "4"], id="lose", group_id="g", reward=0.0),
        chat(["4", "4"], id="alone", group_id="h", reward=1.0),
    ]
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    tokenizer = str(ROOT / "sample_data" / "tokenizer")
    done = treepack(
        "build-trie", tmp_path / "chats.jsonl", "--tokenizer", tokenizer, "--expand", expand, "--out", tmp_path / "trie"
    )
    assert done.status == 0, done.err
    done = treepack("advantages", tmp_path / "trie", "--estimator", "rloo", "--out", tmp_path / "credited")
    assert done.status == 0, done.err
    assert "rollouts compared" in done.out
    assert "groups rejected: a single rollout" in done.out
    rows = pq.read_table(next((tmp_path / "credited").glob("trajectories-*.parquet"))).to_pylist()
    assert {row["rollout_id"]: row["advantage"] for row in rows} == {"win": 1.0, "lose": -1.0}
    assert len(rows) == 5
    assert sorted(row["rollout_part"] for row in rows) == [0, 0, 1, 1, 2]
    done = treepack("pack", tmp_path / "credited", "--capacity", "512", "--out", tmp_path / "packed")
    assert done.status == 0, done.err
    check(tmp_path / "packed")
    (row,) = read_rows(tmp_path / "packed")
    assert row.terms is not None
    assert row.terms.rollout is not None
    first = row.terms.rollout.tolist()
    assert [row.trajectory_ids[i].split("/")[0] for i in first] == [name.split("/")[0] for name in row.trajectory_ids]
    done = treepack("select", "update", tmp_path / "state", "--rollouts", tmp_path / "trie", "--add-groups")
    assert done.status == 0, done.err
    assert re.search(r"rollouts +3\n", done.out)
    assert re.search(r"rollouts successful +2\n", done.out)


def test_the_check_of_packed_rows_compares_rollouts(treepack: Run, tmp_path: Path) -> None:
    saved(build_trie(example()), tmp_path / "trie")
    assert treepack("pack", tmp_path / "trie", "--capacity", "64", "--out", tmp_path / "packed").status == 0
    check(tmp_path / "packed")
    (part,) = (tmp_path / "packed").glob("part-*.parquet")
    table = pq.read_table(part)
    (recorded,) = table["trajectory_rollouts"].to_pylist()
    assert recorded in ([0, 0, 2], [0, 1, 0], [0, 1, 1])
    (row,) = read_rows(tmp_path / "packed")
    trie, manifest = read_trie(tmp_path / "trie"), read_manifest(tmp_path / "packed", PACKED_FORMAT)
    assert row.terms is not None
    numbers = row.terms.rollout_number
    assert numbers is not None
    other, impossible = "belongs to another rollout than in the trie", "trajectory_rollout{} is impossible"
    changes: list[tuple[dict[str, Any], str]] = [
        ({"rollout": np.array([0, 1, 2], np.int32), "rollout_number": None}, other),
        ({"rollout": np.array([1, 1, 2], np.int32), "rollout_number": None}, impossible.format("s")),
        ({"rollout_number": np.arange(3)}, impossible.format("_numbers")),
        ({"rollout_number": numbers + 1}, other),
    ]
    for change, message in changes:
        terms = replace(row.terms, **change)
        with pytest.raises(TreepackError, match=message):
            check_packed([replace(row, terms=terms)], manifest, trie)
