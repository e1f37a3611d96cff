"""Texts about the trajectories of a rollout: sub-agents, edits of the history, and failures that were kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from support.command_line import Run
from support.strategies import make
from support.trie_files import saved
from treepack.analysis.part_notes import part_notes
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import trajectories_of


def part(number: int, tokens: list[int], *, agent: str = "", rollout: str = "S", **facts: Any) -> Trajectory:
    facts |= {"agent": agent} if agent else {}
    item = make(f"{rollout}/{number}", tokens)
    return replace(item, rollout_id=rollout, rollout_part=number, source="made", metadata=facts)


def notes_of(items: list[Trajectory]) -> dict[str, str]:
    trie = build_trie(items)
    names = [item.trajectory_id for item in trajectories_of(trie)]
    return dict(zip(names, part_notes(trie), strict=True))


def test_the_notes_of_a_session() -> None:
    items = [
        part(0, [1, 2, 3, 4, 5, 6]),
        part(4, [1, 2, 7, 8]),
        part(5, [1, 2, 7, 8, 9]),
        part(9, [9, 9], agent="explorer"),
        part(10, [9, 9, 3], agent="explorer", failed="SandboxError"),
        replace(part(0, [5, 5], rollout="alone"), rollout_id=None, rollout_part=None),
    ]
    assert notes_of(items) == {
        "S/0": "",
        "S/4": "edited after 2 of 6 tokens",
        "S/5": "",
        "S/9": "sub-agent explorer",
        "S/10": "sub-agent explorer, failed: SandboxError",
        "alone/0": "",
    }


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(
    drawn=st.lists(
        st.tuples(
            st.sampled_from("rs"), st.sampled_from(["", "x"]), st.lists(st.integers(1, 2), min_size=1, max_size=5)
        ),
        min_size=1,
        max_size=8,
    )
)
def test_an_edit_is_a_part_that_does_not_continue_the_part_of_its_agent_before_it(
    drawn: list[tuple[str, str, list[int]]],
) -> None:
    items = [part(i, tokens, agent=agent, rollout=name) for i, (name, agent, tokens) in enumerate(drawn)]
    found = notes_of(items)
    for i, (name, agent, tokens) in enumerate(drawn):
        own = [(who, said) for rollout, who, said in drawn[:i] if rollout == name]
        expected = []
        if own and own[0][0] != agent:
            expected.append(f"sub-agent {agent}" if agent else "the main agent")
        same = [said for who, said in own if who == agent]
        if same and (kept := common(same[-1], tokens)) < len(same[-1]):
            expected.append(f"edited after {kept} of {len(same[-1])} tokens")
        assert found[f"{name}/{i}"] == ", ".join(expected)


def test_show_and_the_page_have_them(treepack: Run, tmp_path: Path) -> None:
    items = [part(0, [1, 2, 3, 4]), part(1, [1, 2, 7]), part(2, [9, 9], agent="explorer")]
    saved(build_trie([replace(item, group_id="g") for item in items]), tmp_path / "trie")
    drawn = treepack("show", tmp_path / "trie")
    assert "= S/1  edited after 2 of 4 tokens" in drawn.out
    assert "= S/2  sub-agent explorer" in drawn.out
    done = treepack("show", tmp_path / "trie", "--trajectory", "S/1", "--json")
    assert json.loads(done.out)["part"] == "edited after 2 of 4 tokens", done.out


def test_a_failure_that_is_kept_is_drawn_with_its_cause(treepack: Run, tmp_path: Path) -> None:
    record = {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "response_length": 2, "status": "aborted", "reward": 0.0}
    (tmp_path / "in.jsonl").write_text(json.dumps(record))
    done = treepack(
        "build-trie", tmp_path / "in.jsonl", "--format", "slime", "--failed", "keep", "--out", tmp_path / "t"
    )
    assert done.status == 0, done.err
    assert "failed: aborted" in treepack("show", tmp_path / "t").out
