"""Rollouts and the continuations of their prefixes are one tree: targets, ratios and advantages by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import oracle_rl as oracle
from support.command_line import Run
from support.strategies import make
from treepack.research.trace.targets import anchors, binary_rewards, recursive_targets
from treepack.rl.group_tree import group_codes
from treepack.rl.segments import segment_tree
from treepack.trajectory import Tokens
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie, trajectories_of

# Turns of one token, each but the last with an observation after it. With the continuations, the tree is
#
#     7 -+- 1 2 -+- 3 4 -+- 5     a    1        two prefixes of a, after turns 1 and 2, and one of b
#        |       |       '- 10    a2   1        targets 2/3, 1 and 1/3
#        |       '- 9             a1   0
#        '- 6 2 -+- 8             b    0
#                |- 11 2 13       b1   1
#                '- 12            b2   0
ROLLOUTS: dict[str, tuple[list[int], float]] = {"a": ([7, 1, 2, 3, 4, 5], 1.0), "b": ([7, 6, 2, 8], 0.0)}
VALUES = [("a", 1, 0.5), ("a", 2, 0.9), ("b", 1, 0.3)]
CONTINUATIONS: dict[str, list[tuple[str, list[int], float]]] = {
    "a": [("a1", [9], 0.0), ("a2", [3, 4, 10], 1.0)],
    "b": [("b1", [11, 2, 13], 1.0), ("b2", [12], 0.0)],
}
# One prompt with both outcomes; of three shared prefixes, the ones after turn 1 of a and of b have both.
STATS = """\
effective ratio  anchors  of_anchors  of_rollouts
           root        1     100.0 %      100.0 %
         prefix        3      66.7 %       75.0 %

     spearman  pairs  unpredicted  rho  p_value
       prefix      3            1    1        0
shared prefix      3            0    1        0
"""


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def record(name: str, prompt: list[int], response: list[int], reward: float) -> dict[str, Any]:
    """Build a token record in the form of a rollout system, whose prompt is not trained."""
    # Turns and observations alternate: a response of 3 tokens has the mask [1, 0, 1].
    mask = [1 - at % 2 for at in range(len(response))]
    fields = {"prompt_ids": prompt, "response_ids": response, "response_mask": mask}
    return {"id": name, "group_id": "A", "reward": reward, **fields}


@pytest.fixture
def whole(treepack: Run, tmp_path: Path) -> Path:
    """Build the trie of two rollouts and of the continuations that `allocate prefixes` selected."""
    rollouts = [record(name, tokens[:1], tokens[1:], reward) for name, (tokens, reward) in ROLLOUTS.items()]
    first = lines(tmp_path / "rollouts.jsonl", rollouts)
    assert treepack("build-trie", first, "--out", tmp_path / "bare").status == 0
    values = [{"group_id": "A", "trajectory_id": name, "turn": turn, "value": value} for name, turn, value in VALUES]
    predictions, prefixes = lines(tmp_path / "values.jsonl", values), tmp_path / "prefixes.jsonl"
    options = ("--predictions", predictions, "--expand", 2, "--out", prefixes)
    assert treepack("allocate", "prefixes", tmp_path / "bare", *options).status == 0
    records = []
    for prefix in map(json.loads, prefixes.read_text().splitlines()):
        name = prefix["trajectory_id"]
        assert prefix["num_continuations"] == len(CONTINUATIONS[name])
        prompt = ROLLOUTS[name][0][: prefix["num_tokens"]]
        records += [record(new, prompt, response, reward) for new, response, reward in CONTINUATIONS[name]]
    assert len(records) == 4
    both = (first, lines(tmp_path / "continued.jsonl", records))
    assert treepack("build-trie", *both, "--out", tmp_path / "trie").status == 0
    return tmp_path


@st.composite
def continued_tries(draw: st.DrawFn) -> Trie:
    """Draw rollouts of two groups; most start inside an earlier rollout and train only their own tokens."""
    made: list[tuple[list[int], str]] = []
    rollouts = []
    for i in range(draw(st.integers(2, 9))):
        prompt, group = [0], draw(st.sampled_from(["g", "h"]))
        if made and draw(st.integers(0, 3)) > 0:
            tokens, group = made[draw(st.integers(0, len(made) - 1))]
            prompt = tokens[: draw(st.integers(1, len(tokens)))]
        # A response starts with a trained token, and the mask of the rest is arbitrary.
        response = draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
        mask = [True, *(draw(st.booleans()) for _ in response[1:])]
        spans = [(at, at + 1, 1.0) for at, trained in enumerate(mask, start=len(prompt)) if trained]
        made.append((prompt + response, group))
        rollouts.append(make(f"t{i}", prompt + response, spans=spans, group=group))
    return build_trie(rollouts, share=draw(st.sampled_from(["all", "group"])))


@settings(max_examples=150)
@given(continued_tries())
def test_cuts_are_those_of_the_rollouts_that_are_continued(trie: Trie) -> None:
    rollouts = []
    for one in trajectories_of(trie):
        assert isinstance(one.content, Tokens)
        runs = [at for at in one.content.starts.tolist() if at not in one.content.ends]
        rollouts.append(oracle.Rollout(one.content.tokens.tolist(), runs, one.group_id or "", 0, 1.0))
    for segment, expected in (("turn", oracle.turn_cuts(rollouts)), ("3", oracle.even_cuts(rollouts, 3))):
        tree = segment_tree(trie, np.arange(len(rollouts)), group_codes(trie), segment=segment)
        cuts = [tree.start[tree.owner == i][1:].tolist() for i in range(len(rollouts))]
        assert cuts == expected


@pytest.mark.parametrize("segment", ["turn", "2"])
def test_targets_are_those_of_the_tree(whole: Path, segment: str) -> None:
    trie = read_trie(whole / "trie")
    prefixes = anchors(trie, segment=segment)
    target, below = recursive_targets(prefixes.tree, binary_rewards(trie), None)
    names = np.array(trie.trajectories["trajectory_id"].to_pylist())[prefixes.trajectory]
    shown = {
        (str(name), turn): (round(float(target[node]) * below[node]), int(below[node]))
        for name, turn, node in zip(names, prefixes.turn.tolist(), prefixes.node, strict=True)
    }
    # (successes, rollouts) below the two prefixes of a and the one of b; b1 has a prefix of its own after turn 2.
    first, second, other = (2, 3), (2, 2), (1, 3)
    of_first = [("a", 1), ("a1", 1), ("a2", 1)]
    of_second = [("a", 2), ("a2", 2)]
    of_other = [("b", 1), ("b1", 1), ("b2", 1)]
    assert shown == (
        dict.fromkeys(of_first, first)
        | dict.fromkeys(of_second, second)
        | dict.fromkeys(of_other, other)
        | {("b1", 2): (1, 1)}
    )
    assert (target[0], below[0]) == (0.5, 6)


def test_stats_judges_the_predictions_that_the_prefixes_were_chosen_by(treepack: Run, whole: Path) -> None:
    shown = treepack("stats", whole / "trie", "--predictions", whole / "values.jsonl")
    assert (shown.status, shown.notes) == (0, "")
    assert STATS in shown.out


def test_rollouts_that_share_less_than_the_first_trained_token_take_no_cuts() -> None:
    # They share only the token 7, which neither trains: b is no continuation of a.
    trie = build_trie([make("a", [7, 1, 2, 3], spans=[(1, 4, 1.0)]), make("b", [7, 5, 2, 3], spans=[(3, 4, 1.0)])])
    tree = segment_tree(trie, np.arange(2), np.zeros(2, np.int64), segment="turn")
    assert [tree.start[tree.owner == i].tolist() for i in range(2)] == [[0, 1], [0, 3]]
