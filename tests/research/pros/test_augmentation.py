"""Augmented queries: the cut of a rollout, the record of the query, and that reused tokens are never trained again."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.paths import ROOT
from support.refusal import refusal
from support.strategies import make, trajectories
from treepack.calls.chat_records import read_chat
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.tokens.token_records import read_tokens
from treepack.pack.plan.planning import plan_rows
from treepack.pack.rows import pack_rows
from treepack.research.pros.augmentation import AugmentedQueries, augment, valuable_prefix
from treepack.research.pros.signals import entropies_of_terms, read_signals
from treepack.trajectory import Float64, Tokens, Trajectory, positions
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie, trajectories_of

few = settings(max_examples=40)  # every example builds a trie


def slow_cut(entropy: list[float], value: list[float] | None, allowed: list[bool]) -> int:
    """Find the cut by the definition of the paper, token by token."""
    length = len(entropy)
    window = [t for t in range(length) if length / 4 <= t < 3 * length / 4 and allowed[t]]
    if value is not None and window:
        ranked = sorted((value[t] for t in window), reverse=True)
        # The lowest value of the highest tenth, rounded up: of 12 values, the second highest.
        lowest = ranked[math.ceil(len(window) / 10) - 1]
        window = [t for t in window if value[t] >= lowest]
    return max(window, key=lambda t: (entropy[t], -t), default=-1)


@few
@given(
    line=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.booleans()), min_size=1, max_size=90),
    with_values=st.booleans(),
    with_boundaries=st.booleans(),
)
def test_the_cut_is_the_one_of_the_paper(
    line: list[tuple[int, int, bool]], with_values: bool, with_boundaries: bool
) -> None:
    entropy, value = [float(e) for e, _, _ in line], [float(v) for _, v, _ in line]
    allowed = [a or not with_boundaries for _, _, a in line]
    cut = valuable_prefix(
        np.array(entropy),
        value=np.array(value) if with_values else None,
        allowed=np.array(allowed) if with_boundaries else None,
    )
    assert cut == slow_cut(entropy, value if with_values else None, allowed)


def entropies_of(made: list[Trajectory], trie: Trie, seed: int) -> list[Float64 | None]:
    """Return random entropies for the trained tokens of each trajectory of the trie, in the order of the trie."""
    by_id: dict[str, Float64] = {}
    for i, trajectory in enumerate(made):
        assert isinstance(trajectory.content, Tokens)
        by_id[trajectory.trajectory_id] = np.random.default_rng([seed, i]).random(trajectory.content.num_trained)
    return [by_id[name] for name in trie.trajectories["trajectory_id"].to_pylist()]


@few
@given(made=trajectories(max_length=12), rewards=st.data(), boundary=st.sampled_from(["token", "turn"]))
def test_every_query_is_the_beginning_of_a_successful_rollout_up_to_a_trained_token(
    made: list[Trajectory], rewards: st.DataObject, boundary: str
) -> None:
    made = [replace(t, reward=rewards.draw(st.sampled_from([None, 0.0, 1.0, 1.0]))) for t in made]
    trie = build_trie(made)
    result = augment(trie, entropies_of(made, trie, 0), boundary=boundary)
    by_id = {t.trajectory_id: t for t in trajectories_of(trie)}
    prompts = set()
    for query in result.queries:
        parent = by_id[query.parent_trajectory]
        assert isinstance(parent.content, Tokens)
        size = len(query.prompt_token_ids)
        trained = positions(parent.content.starts, parent.content.ends).tolist()
        assert (parent.reward, parent.group_id) == (1.0, query.parent_group)
        np.testing.assert_array_equal(query.prompt_token_ids, parent.content.tokens[:size])
        place = trained.index(size)
        # The window T/4 <= t < 3T/4, in integers.
        assert len(trained) <= 4 * place < 3 * len(trained)
        assert boundary == "token" or size - 1 not in trained
        assert query.num_reused == size - trained[0]
        prompts.add((query.parent_group, *query.prompt_token_ids.tolist()))
    assert len(prompts) == len(result.queries) == result.counts["cut"]
    assert len({query.query_id for query in result.queries}) == len(prompts)
    assert sum(result.counts.values()) == len(made)
    assert result.counts["without a reward"] == sum(t.reward is None for t in made)
    assert result.counts["not successful"] == sum(t.reward == 0 for t in made)


def test_a_prefix_has_the_same_id_in_every_step_and_rollouts_that_share_it_give_one_query() -> None:
    made = [make(f"t{i}", [7, 1, 2, 3, i], reward=1.0, step=step) for i, step in ((4, 0), (5, 0), (6, 1))]
    trie = build_trie(made)
    result = augment(trie, [np.array([0.0, 0.0, 1.0, 0.0])] * 3)
    assert [query.prompt_token_ids.tolist() for query in result.queries] == [[7, 1, 2]]
    assert result.counts == {"cut": 1, "with the prefix of another": 2}
    assert result.queries[0].parent_trajectory == "t4"
    alone = augment(build_trie(made[2:]), [np.array([0.0, 0.0, 1.0, 0.0])])
    assert alone.queries[0].query_id == result.queries[0].query_id
    other = augment(build_trie([replace(made[2], group_id="h")]), [np.array([0.0, 0.0, 1.0, 0.0])])
    assert other.queries[0].query_id != result.queries[0].query_id


def test_a_prefix_of_a_rollout_of_an_augmented_query_is_one_of_the_original_query() -> None:
    # Of the prompt 7 1 2, the first token is the original prompt and two are reused. The window of 4 trained tokens is
    # [1, 3), and entropy 2 is the highest in it, so the cut is before the third: 7 1 2 3 4, of which 4 are reused.
    marks = {"query_id": "g~1", "parent_group": "g", "num_reused": 2, "untrained_prefix": 3}
    for metadata in (marks, {"extra_info": marks}):
        rollout = make("t", [7, 1, 2, 3, 4, 5, 6], spans=[(3, 7, 1.0)], group="g~1", reward=1.0, metadata=metadata)
        (query,) = augment(build_trie([rollout]), [np.array([9.0, 1.0, 2.0, 9.0])]).queries
        assert (query.parent_group, query.num_reused) == ("g", 4)
        assert query.prompt_token_ids.tolist() == [7, 1, 2, 3, 4]


def test_the_worked_example_of_the_page() -> None:
    page = " ".join((ROOT / "docs" / "tree-rl.md").read_text().split())
    shown = re.search(
        r"with the entropies ((?:[\d.]+, )+[\d.]+)\. The window is (\d) <= t < (\d), .*? at t = (\d), so four tokens "
        r".*? at t = 2 to 5, are ((?:[\d.]+, )+[\d.]+), .* and three tokens are reused",
        page,
    )
    assert shown is not None
    entropy = np.array([float(number) for number in shown[1].split(", ")])
    # The page names the values in the window only; others do not matter.
    value = np.zeros(8)
    value[2:6] = [float(number) for number in shown[5].split(", ")]
    assert (int(shown[2]), int(shown[3]), len(entropy)) == (2, 6, 8)
    assert valuable_prefix(entropy) == int(shown[4]) == 4
    assert valuable_prefix(entropy, value=value) == 3


# One of the two response tokens is reused too, so only token 4 is trained.
REUSING = {"prompt_token_ids": [5, 6, 7], "response_ids": [8, 9], "untrained_prefix": 4}


@pytest.mark.parametrize(
    ("record", "trained"),
    [
        ({**REUSING, "untrained_prefix": 3}, [3, 4]),
        (REUSING, [4]),
        ({**REUSING, "untrained_prefix": None, "metadata": {"untrained_prefix": 4}}, [4]),
        ({"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0.5, 1, 0.5], "untrained_prefix": 3}, [3, 4]),
        # Padding on the left does not count: positions count 5 6 7 8 9.
        (
            {
                "input_ids": [0, 5, 6, 7, 8, 9],
                "attention_mask": [0, 1, 1, 1, 1, 1],
                "untrained_prefix": 2,
                "loss_mask": [0, 1, 1, 1, 0, 1],
            },
            [2, 4],
        ),
    ],
)
def test_readers_train_nothing_of_what_a_rollout_took_over(record: dict[str, Any], trained: list[int]) -> None:
    (rollout,) = read_tokens(Record("r:1", "r", record), ReadOptions())
    assert isinstance(rollout, Trajectory)
    assert isinstance(rollout.content, Tokens)
    assert positions(rollout.content.starts, rollout.content.ends).tolist() == trained
    changed = record["untrained_prefix"] != 3 or "input_ids" in record
    assert ("reused tokens not trained" in rollout.notes) == changed


@pytest.mark.parametrize("prefix", [-1, 6, True, "4", 2.0])
def test_a_reused_prefix_that_cannot_be_is_refused(prefix: object) -> None:
    with pytest.raises(TreepackError, match=r"^r:1: untrained_prefix is .*; expected 0 to 5, the number of tokens$"):
        list(read_tokens(Record("r:1", "r", {**REUSING, "untrained_prefix": prefix}), ReadOptions()))


@few
@given(made=trajectories())
def test_entropies_of_packed_rows_go_to_the_trajectories_they_are_of(made: list[Trajectory]) -> None:
    trie = build_trie([replace(t, reward=1.0) for t in made])
    expected = entropies_of(made, trie, 5)
    names = trie.trajectories["trajectory_id"].to_pylist()
    rows = []
    for row in pack_rows(trie, plan_rows(trie, capacity=12)):
        assert row.terms is not None
        known = [expected[names.index(name)] for name in row.trajectory_ids]
        places = row.position_ids[row.terms.token]
        # Terms of a row are in the order of its tokens, and trajectories may alternate.
        entropy = np.zeros(len(places), np.float32)
        for k, values in enumerate(known):
            terms = np.flatnonzero(row.terms.trajectory == k)
            assert values is not None
            entropy[terms[np.argsort(places[terms])]] = values
        rows.append((row.trajectory_ids, row.terms.trajectory, entropy))
    for entropies, values in zip(entropies_of_terms(trie, rows), expected, strict=True):
        assert entropies is not None
        assert values is not None
        np.testing.assert_array_equal(entropies, values.astype(np.float32))
    assert entropies_of_terms(trie, []) == [None] * len(made)


def test_text_that_continues_an_augmented_query_is_refused() -> None:
    record = {"prompt": "a", "completion": "b", "metadata": {"untrained_prefix": 4}}
    assert refusal(list, read_chat(Record("r:1", "r", record), ReadOptions())).startswith(
        "r:1: has untrained_prefix, which counts tokens, and text; give token"
    )


def one() -> Trie:
    """Build a rollout of six tokens, of which 2, 3 and 5 (from 0) are trained."""
    return build_trie([make("t", [1, 2, 3, 4, 5, 6], spans=[(2, 4, 1.0), (5, 6, 1.0)], reward=1.0)])


@pytest.mark.parametrize(
    ("recorded", "selected"),
    [([0.3, 0.4, 0.6], [0.3, 0.4, 0.6]), ([3, 4, 5, 6], [3, 4, 6]), ([1, 2, 3, 4, 5, 6], [3, 4, 6])],
)
def test_signals_are_over_the_trained_tokens_the_tokens_from_the_first_of_them_or_all(
    tmp_path: Path, recorded: list[float], selected: list[float]
) -> None:
    path = tmp_path / "signals.jsonl"
    lines = [{"id": "t", "values": recorded, "input_ids": [1]}, {"id": "of another step", "values": [1]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    signals = read_signals(path, one())
    assert signals.entropies is None
    assert signals.values is not None
    assert signals.values[0] is not None
    assert signals.values[0].tolist() == selected
    assert signals.num_unknown == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"id": "t", "values": [1, 2]}'], "s:1: values has 2 numbers; expected 3 (the trained tokens), 4 (from the"),
        (['{"id": "t", "entropies": 1}'], "s:1: entropies is not a list; expected one number per token"),
        (['{"id": "t", "entropies": ["x"]}'], "s:1: entropies is not a flat list of numbers; expected one per token"),
        (['{"id": "t", "values": [1, 2, 3]}'] * 2, "s:2: an earlier record has the rollout t; give each rollout once"),
        (['{"id": "u", "values": [1]}'], "s: has neither entropies nor values of any rollout of the trie; expected"),
    ],
)
def test_signals_that_fit_nothing_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "s").write_text("".join(line + "\n" for line in lines))
    assert message in refusal(read_signals, tmp_path / "s", one())


def with_marks(**marks: object) -> Trie:
    metadata = {"query_id": "g~1", "parent_group": "g", "num_reused": 1, "untrained_prefix": 2} | marks
    return build_trie([make("t", [1, 2, 3, 4], spans=[(2, 4, 1.0)], reward=1.0, metadata=metadata)])


@pytest.mark.parametrize(
    ("trie", "entropy", "options", "message"),
    [
        (one(), None, {}, "t: entropies are missing; run treepack logprobs --entropies on its packed rows and give"),
        (one(), [1.0] * 4, {}, "t: entropies are 4 numbers; expected 3, one per trained token"),
        (one(), [1.0, math.nan, 2.0], {}, "t: entropies contain nan; expected finite numbers"),
        (one(), [1.0, 2.0, 3.0], {"values": [None]}, "t: values are missing; run"),
        (one(), [1.0, 2.0, 3.0], {"boundary": "word"}, "boundary is 'word'; expected token or turn"),
        (one(), [1.0, 2.0, 3.0], {"success_above": math.inf}, "success_above is inf; expected a finite reward"),
        (
            with_marks(num_reused=3),
            [1.0, 2.0],
            {},
            "made:t: num_reused of an augmented query is missing or wrong; copy",
        ),
        (
            with_marks(parent_group=None),
            [1.0, 2.0],
            {},
            "made:t: parent_group of an augmented query is missing or wrong",
        ),
        (
            with_marks(untrained_prefix=3),
            [1.0, 2.0],
            {},
            "made:t: a reused token is trained; build the trie again",
        ),
    ],
)
def test_rollouts_that_cannot_be_cut_are_refused(
    trie: Trie, entropy: list[float] | None, options: dict[str, Any], message: str
) -> None:
    assert message in refusal(augment, trie, [None if entropy is None else np.array(entropy)], **options)


def test_rollouts_that_give_no_query_are_counted_by_reason() -> None:
    made = [
        make("short", [1, 2], reward=1.0),
        make("one turn", [1, 2, 3, 4], reward=1.0),
        make("failed", [1, 3], reward=-1.0),
        make("unknown", [1, 4]),
    ]
    result: AugmentedQueries = augment(build_trie(made), entropies_of(made, build_trie(made), 0), boundary="turn")
    assert result.queries == []
    assert result.counts == {
        "of a single token": 1,
        "without a turn that starts in the window": 1,
        "not successful": 1,
        "without a reward": 1,
    }
