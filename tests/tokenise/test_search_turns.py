"""Turns of search trees: one sample for each turn of the tree, with the gradient of one sample for each path."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.byte_tokenizer import PLAIN, STRIPPING, save
from support.command_line import Run
from support.paths import SAMPLE_DATA
from support.read_rollouts import tokenize
from treepack.pack.plan.planning import plan_rows
from treepack.pack.rows import pack_rows
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import Chat, Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie

TREE = SAMPLE_DATA / "search_tree.json"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save(tmp_path_factory.mktemp("search"), PLAIN))


def path_of(name: str, answers: Sequence[str], *, source: str = "tree.json", **more: Any) -> Trajectory:
    """Return a path of a search tree: a user message after each answer but the last."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Q"}]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "next"}]
    weights = [float(message["role"] == "assistant") for message in messages[:-1]]
    return Trajectory(name, source, Chat(messages[:-1], weights), "g", **more)


def turns_of(paths: list[Trajectory], tokenizer: Any, *, per_path: bool = False) -> list[Trajectory]:
    samples = list(tokenize(paths, tokenizer=tokenizer, expand="turns", per_path=per_path))
    assert all(isinstance(sample, Trajectory) for sample in samples)
    return samples  # type: ignore[return-value]


def content_of(sample: Trajectory) -> Tokens:
    assert isinstance(sample.content, Tokens)
    return sample.content


def test_a_turn_on_two_paths_is_one_sample_with_their_weight_and_mean_reward(tokenizer: Any) -> None:
    paths = [
        path_of("leaf-0", ["A", "B"], reward=1.0, weight=3.0, notes=("n",)),
        path_of("leaf-1", ["A", "C"], reward=0.0, weight=1.0, notes=("n",)),
    ]
    shared, *others = turns_of(paths, tokenizer)
    assert (shared.trajectory_id, shared.weight, shared.reward) == ("leaf-0/turn-0", 4.0, 0.75)
    assert shared.metadata == {"num_paths": 2}
    assert shared.notes == ("n", "n")
    assert [(each.trajectory_id, each.weight, each.reward) for each in others] == [
        ("leaf-0/turn-1", 3.0, 1.0),
        ("leaf-1/turn-1", 1.0, 0.0),
    ]
    sums = sum((Counter(each.totals) for each in (shared, *others)), Counter())
    assert {name: sums[name] for name in ("trees", "paths", "turns_on_paths", "merged_turns")} == {
        "trees": 1,
        "paths": 2,
        "turns_on_paths": 2,
        "merged_turns": 1,
    }
    assert sums["append_only_sequences"] == 2


def test_equal_last_turns_are_independent_samples(tokenizer: Any) -> None:
    choices = [path_of(f"choice-{i}", ["A"], reward=float(i)) for i in range(3)]
    assert [sample.reward for sample in turns_of(choices, tokenizer)] == [0.0, 1.0, 2.0]
    longer = [*choices[:2], path_of("longer", ["A", "B"], reward=5.0)]
    merged, rest = turns_of(longer, tokenizer)
    assert (merged.weight, merged.reward, rest.reward) == (3.0, 2.0, 5.0)


def test_turns_of_other_records_groups_or_weights_stay_apart(tokenizer: Any) -> None:
    path = path_of("a", ["A", "B"])
    chat = path.content
    assert isinstance(chat, Chat)
    others = [
        replace(path, source="other.json"),
        replace(path, group_id="h"),
        replace(path, step=1),
        replace(path, reward=1.0),
        replace(path, content=replace(chat, message_weights=[0.0, 0.5, 0.0, 0.5])),
    ]
    for other in others:
        assert len(turns_of([path, other], tokenizer)) == 4
    assert len(turns_of([path, path], tokenizer)) == 3
    assert len(turns_of([path, path], tokenizer, per_path=True)) == 4


@st.composite
def search_trees(draw: st.DrawFn) -> list[Trajectory]:
    """Paths of up to two records, whose answers are few, so that many paths share turns."""
    paths = []
    for i in range(draw(st.integers(1, 6))):
        answers = draw(st.lists(st.sampled_from("AB"), min_size=1, max_size=3))
        more: dict[str, Any] = {
            "weight": draw(st.sampled_from([0.5, 1.0, 3.0])),
            "advantage": draw(st.sampled_from([-1.0, 0.25, 2.0])),
        }
        source = draw(st.sampled_from(["r.jsonl:1", "r.jsonl:2"]))
        paths.append(path_of(f"p{i}", answers, source=source, **more))
    return sorted(paths, key=lambda path: path.source)


def linear_loss(samples: list[Trajectory]) -> Counter[tuple[tuple[int, ...], int]]:
    """Return the coefficient of each log-probability in the loss -weight * advantage * log p, by prefix and token."""
    loss: Counter[tuple[tuple[int, ...], int]] = Counter()
    for sample in samples:
        content = content_of(sample)
        ids = content.tokens.tolist()
        for start, end, weight in zip(content.starts, content.ends, content.span_weights, strict=True):
            for k in range(start, end):
                loss[tuple(ids[:k]), ids[k]] -= sample.weight * weight * (sample.advantage or 0.0)
    return loss


def weights_by_prefix(samples: list[Trajectory]) -> dict[tuple[int, ...], float]:
    """Return the loss weight of each trained token in packed rows, by the tokens up to it."""
    trie = build_trie(samples)
    weights: dict[tuple[int, ...], float] = {}
    for row in pack_rows(trie, plan_rows(trie, capacity=1000)):
        for j in np.flatnonzero(row.loss_weight):
            path, k = list[int](), int(j)
            while k >= 0:
                path.append(int(row.input_ids[k]))
                k = int(row.parent[k])
            weights[tuple(path)] = weights.get(tuple(path), 0.0) + float(row.loss_weight[j])
    return weights


@settings(max_examples=40)
@given(search_trees())
def test_merged_turns_have_the_gradient_of_one_sample_for_each_path(tokenizer: Any, paths: list[Trajectory]) -> None:
    merged, apart = turns_of(paths, tokenizer), turns_of(paths, tokenizer, per_path=True)
    # The gradient is the sum of these coefficients times the gradients of the log-probabilities.
    one, other = linear_loss(merged), linear_loss(apart)
    assert one.keys() == other.keys()
    for key, value in other.items():
        assert one[key] == pytest.approx(value, rel=1e-12, abs=1e-12)
    assert weights_by_prefix(merged) == pytest.approx(weights_by_prefix(apart), rel=1e-12)
    # By the definition: one sample for each record and each sequence of answers that begins a path, unless all paths
    # end there; then it has one sample for each.
    ends: dict[tuple[str, ...], list[bool]] = {}
    for path in paths:
        assert isinstance(path.content, Chat)
        answers = [message["content"] for message in path.content.messages[1::2]]
        for k in range(1, len(answers) + 1):
            ends.setdefault((path.source, *answers[:k]), []).append(k == len(answers))
    assert len(merged) == sum(len(each) if all(each) else 1 for each in ends.values())
    assert sum(sample.metadata.get("num_paths", 1) for sample in merged) == len(apart)


def test_a_turn_that_was_sampled_at_two_temperatures_is_two_samples(tokenizer: Any) -> None:
    def samples(*temperatures: float) -> list[Trajectory]:
        paths = [path_of(name, [*"A", name], temperature=t) for name, t in zip("BC", temperatures, strict=True)]
        return turns_of(paths, tokenizer)

    assert [sample.temperature for sample in samples(0.5, 0.5)] == [0.5] * 3
    assert [sample.temperature for sample in samples(0.5, 1.0)] == [0.5, 0.5, 1.0, 1.0]


@settings(max_examples=10)
@given(search_trees())
def test_a_path_in_two_parts_is_merged_too(tmp_path_factory: pytest.TempPathFactory, paths: list[Trajectory]) -> None:
    stripping = load_tokenizer(save(tmp_path_factory.mktemp("stripping"), STRIPPING))
    assert len(turns_of(paths, stripping)) <= len(turns_of(paths, stripping, per_path=True))


@pytest.mark.slow
def test_commands_make_and_count_one_sample_for_each_turn_of_the_tree(treepack: Run, tmp_path: Path) -> None:
    arguments = (TREE, "--tokenizer", SAMPLE_DATA / "tokenizer", "--expand", "turns")
    done = treepack("build-trie", *arguments, "--out", tmp_path / "merged")
    apart = treepack("build-trie", *arguments, "--per-path", "--workers", 2, "--out", tmp_path / "apart")
    assert (done.status, apart.status) == (0, 0)
    entries = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("merged", "apart")]
    merged, per_path = (entry["conversations"] for entry in entries)
    gone = merged["num_turns_on_paths"] - merged["num_merged_turns"]
    assert gone == per_path["num_samples"] - merged["num_samples"] > 0
    assert [entry["options"].get("per_path") for entry in entries] == [None, True]
    first = done.out.splitlines()[0]
    assert first.startswith(f"1 search tree with {merged['num_paths']} paths, {merged['num_samples']} trajectories: ")
    assert first.endswith(
        f"{merged['num_turns_on_paths']} turns on several paths became {merged['num_merged_turns']} trajectories"
    )
    # Forecast and verdict count a turn of the tree once, whatever the trie stores.
    lines = [
        {
            line["capacity"]: (line["tokens_flat"], line["flops_flat"])
            for line in json.loads(treepack("stats", tmp_path / name, "--json").out)["forecast"]["lines"]
            if line["baseline"] == "turns"
        }
        for name in ("merged", "apart")
    ]
    assert lines[0] == lines[1]
    refused = treepack("build-trie", TREE, "--per-path", "--out", tmp_path / "none")
    assert refused.status == 2
    assert "Error: --per-path is for one sample per turn" in refused.err
