"""Drawings of treepack show: every token once, trained ones marked, for any shape of the tree."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from support import strategies
from support.strategies import make
from treepack.analysis.show import selection, views
from treepack.analysis.show.bodies import DrawingOptions
from treepack.analysis.show.drawing import draw_trees, row_lines
from treepack.analysis.show.forest import forest_of_row, forest_of_trajectory, forest_of_trie, path_of_row
from treepack.analysis.show.nodes import ENDINGS, NODES
from treepack.errors import TreepackError
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows
from treepack.trajectory import Tokens, Trajectory, positions
from treepack.trie.builders.in_memory import build_trie

FULL = DrawingOptions(full=True)
# "[7" -> begins, 7; "9]*0.5" -> 9, ends, weight 0.5; "8" -> 8
WORD = re.compile(r"(\[?)(\d+)(\](?:\*([\d.e+-]+))?)?")


def texts(lines: Iterator[Text]) -> list[str]:
    return [line.plain for line in lines]


def shown(lines: Iterator[Text]) -> list[tuple[int, float]]:
    """Return ids and weights of all tokens in lines of ids with brackets, in the order of the lines."""
    pairs: list[tuple[int, float]] = []
    open_run: int | None = None
    for line in lines:
        body = line.plain[line.spans[0].end :]  # the first span is the gutter with the branches of the tree
        if body.startswith(("*", "=")):
            continue
        for begins, number, ends, weight in WORD.findall(body):
            # "[8", "9]*3" -> (8, 0), (9, 0) -> (8, 3), (9, 3): the weight follows the last id of its run
            open_run = len(pairs) if begins else open_run
            pairs.append((int(number), 0.0))
            if ends:
                assert open_run is not None
                pairs[open_run:] = [(token, float(weight or 1)) for token, _ in pairs[open_run:]]
                open_run = None
    return pairs


def rows_of(trajectories: list[Trajectory], capacity: int) -> tuple[list[Row], dict[str, Trajectory]]:
    trie = build_trie(trajectories)
    return list(pack_rows(trie, plan_rows(trie, capacity=capacity))), {t.trajectory_id: t for t in trajectories}


def weights_of(trajectory: Trajectory) -> list[float]:
    content = trajectory.content
    assert isinstance(content, Tokens)
    weights = np.zeros(len(content.tokens))
    weights[positions(content.starts, content.ends)] = np.repeat(content.span_weights, content.ends - content.starts)
    return list((weights * trajectory.weight).tolist())


@given(strategies.trajectories())
def test_a_tree_shows_every_token_once_with_its_weight_and_every_trajectory(rollouts: list[Trajectory]) -> None:
    forest = forest_of_trie(build_trie(rollouts))
    drawn = list(draw_trees(forest, FULL))
    expected = Counter(zip(forest.tokens.tolist(), forest.loss_weight.tolist(), strict=True))
    assert Counter(shown(iter(drawn))) == expected
    names = [re.findall(r"= (t\d)", text) for text in texts(iter(drawn))]
    assert sorted(name for ids in names for name in ids) == sorted(t.trajectory_id for t in rollouts)
    total = sum(sum(weights_of(t)) for t in rollouts)
    assert forest.loss_weight.sum() == pytest.approx(total)


@given(rollouts=strategies.trajectories(), capacity=st.integers(9, 24))
def test_a_row_shows_its_tokens_in_order_with_their_weights(rollouts: list[Trajectory], capacity: int) -> None:
    for row in rows_of(rollouts, capacity)[0]:
        drawn = list(row_lines(forest_of_row(row), FULL))
        assert shown(iter(drawn)) == list(zip(row.input_ids.tolist(), row.loss_weight.tolist(), strict=True))
        # "[435, 2117)  * 146 tokens" -> ("435", "2117")
        intervals = [match.groups() for text in texts(iter(drawn)) if (match := re.match(r"\s*\[(\d+), (\d+)\)", text))]
        assert all(row.subtree_end[int(first)] == int(end) for first, end in intervals)
        assert intervals


@given(rollouts=strategies.trajectories(), capacity=st.integers(9, 24))
def test_a_trajectory_is_the_same_from_rollout_trie_and_row(rollouts: list[Trajectory], capacity: int) -> None:
    # Rows have terms only if trajectories have rewards; the terms contain the weights of each trajectory.
    rewarded = [replace(t, reward=1.0) for t in rollouts]
    trie = build_trie(rewarded)
    rows, by_name = rows_of(rewarded, capacity)
    for row in rows:
        for i, name in enumerate(row.trajectory_ids):
            (of_trie,) = views.trajectory_views(trie, name, where="trie")
            alone = forest_of_trajectory(by_name[name])
            for forest in (of_trie.forest, path_of_row(row, i)):
                assert forest.tokens.tolist() == alone.tokens.tolist()
                assert forest.loss_weight.tolist() == pytest.approx(weights_of(by_name[name]))
            assert of_trie.forest.num_passing.tolist()[-1] >= 1


def test_branches_are_drawn_off_a_trunk() -> None:
    trie = build_trie(
        [
            make("a", [7, 8, 9, 1, 2], spans=[(3, 5, 1.0)], reward=1.0),
            make("b", [7, 8, 9, 3, 4, 5, 6, 7], spans=[(3, 5, 1.0), (6, 8, 0.5)]),
            make("c", [7, 8, 9, 3, 4, 5, 6, 8, 9], spans=[(3, 9, 1.0)], advantage=-0.5),
            make("d", [7, 8, 9, 3, 4], spans=[(3, 5, 1.0)], weight=2.0),
            make("e", [7, 8, 9, 3, 4], spans=[(3, 5, 1.0)], weight=2.0),
        ]
    )
    assert texts(draw_trees(forest_of_trie(trie), DrawingOptions())) == [
        "0  * 3 tokens x5",
        "   | 7 8 9",
        "3  |-* 2 tokens, 2 trained  = a  reward 1",
        "   |   [1 2]",
        "3  * 2 tokens x4, 2 trained, loss weight 12",
        "   | [3 4]*6",
        "   | = d",
        "   | = e",
        "5  * 2 tokens x2, 2 trained, loss weight 2.5",
        "   | [5] [6]*1.5",
        "7  |-* 1 token, 1 trained, loss weight 0.5  = b",
        "   |   [7]*0.5",
        "7  '-* 2 tokens, 2 trained  = c  advantage -0.5",
        "       [8 9]",
    ]


def test_turns_of_a_trajectory_show_weights_and_the_first_token_untrained() -> None:
    rollout = make(
        "a", [1, 2, 3, 4, 5, 6, 7], spans=[(1, 3, 1.0), (4, 6, 0.5), (6, 7, 1.0)], advantages=[1.0, 3.0, 0.0, 0.0, 6.0]
    )
    assert texts(views.lines(views.rollout_view(rollout), DrawingOptions())) == [
        "trajectory_id a   group_id g   num_tokens 7   tokens_trained 5   num_turns 2   source made:a",
        "",
        "0    1",
        "   + (turn 1: 2 tokens, mean advantage 2)",
        "1  + 2 3",
        "3    4",
        "   + (turn 2: 3 tokens, mean advantage 2, loss weight 0.5)",
        "4  + 5 6",
        "   + (loss weight 1)",
        "6  + 7",
    ]


def test_a_weight_for_every_token_does_not_cut_a_turn_to_pieces() -> None:
    rollout = make("a", [1, *range(2, 40)], spans=[(i, i + 1, 1 + i / 100) for i in range(1, 39)])
    first, label, turn = texts(views.lines(views.rollout_view(rollout), DrawingOptions()))[2:]
    assert (first, label) == (" 0    1", "    + (turn 1: 38 tokens, loss weights 1.01 to 1.38)")
    assert turn.startswith(" 1  + 2 3 4 ")
    assert [len(node["segments"]) for node in views.view_as_json(views.rollout_view(rollout), None)["nodes"]] == [39]


@pytest.mark.slow
def test_ten_thousand_branches_are_counted_where_they_are_left_out() -> None:
    # One trunk of 3 tokens and 10,000 branches of 1 to 7 tokens, of which the 99 largest are drawn.
    trie = build_trie([make(f"r{i}", [1, 2, 3, 10 + i] + [4] * (i % 7), reward=float(i % 2)) for i in range(10_000)])
    drawn = texts(draw_trees(forest_of_trie(trie), DrawingOptions()))
    assert len(drawn) < 3 * NODES
    sizes = [int(match[1]) for text in drawn if (match := re.search(r"-\* (\d+) tokens?", text))]
    (left_out,) = [text for text in drawn if "more branches" in text]
    branches, trajectories, tokens = (
        int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:more|tok|traj)", left_out)
    )
    assert branches == trajectories == 10_000 - len(sizes)
    assert tokens == trie.tokens_tree - 3 - sum(sizes)
    assert "rewards 0 to 1, mean 0.5" in left_out
    assert len(texts(draw_trees(forest_of_trie(trie), FULL))) > 20_000


def test_a_comb_of_any_depth_stays_at_the_left() -> None:
    """The depth of nesting is at most log2 of the number of tokens."""
    # 1 2, 1 1 2, 1 1 1 2, ...: at every node of a chain of 300, one branch.
    comb = [make(f"t{i}", [1] * (i + 1) + [2]) for i in range(300)]
    drawn = texts(draw_trees(forest_of_trie(build_trie(comb)), FULL))
    assert sum("= t" in text for text in drawn) == 300
    # 4 columns of gutter and two for each of a few levels, where 300 nested levels would need 600.
    assert max(len(text) - len(text.lstrip("0123456789 |'-*")) for text in drawn if "*" in text) < 14


def test_many_duplicates_are_named_in_part() -> None:
    trie = build_trie([make(f"r{i:03}", [1, 2], reward=1.0) for i in range(100)])
    named = [text.strip() for text in texts(draw_trees(forest_of_trie(trie), DrawingOptions())) if "=" in text]
    assert named == [*(f"= r{i:03}  reward 1" for i in range(ENDINGS - 1)), "= 97 more  reward 1 each"]


def test_trees_of_several_training_steps_name_them() -> None:
    one = build_trie([make("a", [1, 2]), make("b", [1, 3])])
    two = build_trie([make("a", [1, 2], step=4), make("b", [1, 2], step=5)])
    assert not any("step" in text for text in texts(draw_trees(forest_of_trie(one), DrawingOptions())))
    headers = [text for text in texts(draw_trees(forest_of_trie(two), DrawingOptions())) if "*" in text]
    assert headers == ["0  * 2 tokens, 1 trained, step 4  = a", "0  * 2 tokens, 1 trained, step 5  = b"]


def test_ids_are_never_shortened() -> None:
    rollout = make("r" * 300, [1, 2, 3], group="g" * 300)
    trie = build_trie([rollout])
    (of_trie,) = views.trajectory_views(trie, "r" * 300, where="trie")
    tree = views.group_view(trie, "g" * 300, where="trie")
    for drawn in (
        *(views.lines(view, DrawingOptions()) for view in (of_trie, tree)),
        views.group_lines([*selection.groups(trie)], DrawingOptions()),
    ):
        text = "\n".join(texts(drawn))
        assert "r" * 300 in text or "g" * 300 in text


def test_lines_fit_the_width() -> None:
    trie = build_trie([make(f"{i}" * 20, [1, 2, *range(1000 * i, 1000 * i + 400)], reward=0.5) for i in range(1, 4)])
    for width in (60, 100):
        (row,) = pack_rows(trie, plan_rows(trie, capacity=2000))
        (alone,) = views.trajectory_views(trie, "1" * 20, where="trie")
        for view in (views.group_view(trie, "g", where="trie"), alone):
            assert all(len(text) <= width for text in texts(views.lines(view, DrawingOptions(width=width))))
        assert all(len(text) <= width for text in texts(row_lines(forest_of_row(row), DrawingOptions(width=width))))


@given(strategies.trajectories(steps=False))
def test_overlap_of_a_group_is_that_of_its_own_tree(rollouts: list[Trajectory]) -> None:
    trie = build_trie(rollouts)
    groups = selection.groups(trie)
    assert {group.group_id for group in groups} == {t.group_id for t in rollouts}
    for group in groups:
        view = views.group_view(trie, group.group_id, where="trie")
        alone = build_trie([t for t in rollouts if t.group_id == group.group_id])
        assert view.facts["por"] == group.por
        assert (group.tokens_flat, group.tokens_tree) == (alone.tokens_flat, alone.tokens_tree)


def test_rollouts_after_the_wanted_one_are_not_read() -> None:
    def stream() -> Iterator[Trajectory]:
        yield make("a", [1, 2])
        yield make("b", [1, 2])
        yield make("c", [1, 2])
        raise AssertionError("read on")  # the generator may be read up to "c", which ends the samples of "b"

    (rollout,) = selection.first_named(stream(), "b", where="here", skipped={})
    assert rollout.trajectory_id == "b"
    counts = {"skipped: none trained": 2, **{f"field 'answer.{name}' not used": 9 for name in "abcdefgh"}}
    wanted = r"^here: has no trajectory 'x'; give .* 'a'; skipped: none trained: 2; fields not used: .* \(8 in total"
    with pytest.raises(TreepackError, match=wanted):
        list(selection.first_named(iter([make("a", [1, 2])]), "x", where="here", skipped=counts))
