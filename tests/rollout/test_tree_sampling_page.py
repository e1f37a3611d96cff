"""The numbers of docs/tree-sampling.md are those of the sampler."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
import sampling_bias

from support.paths import ROOT
from support.tree_estimates import PROMPT, before_fallback, estimate, grow, plain, query, weighted
from treepack.rollout.episode import SingleTurn
from treepack.rollout.options import Sampling, TreeOptions
from treepack.rollout.simulated import LengthLaw, SimulatedEngine
from treepack.rollout.tree import TokenUsage, Tree, TreeNode, weights_of_leaves

PAGE = (ROOT / "docs" / "tree-sampling.md").read_text()


def test_the_worked_tree_has_the_weights_and_means_of_the_page() -> None:
    rows = re.findall(r"^\| ([B-E]) \| ([\d,]+) \| (\d) \| (\S+) \| (\S+) \|$", PAGE, re.MULTILINE)
    nodes = {"prompt": node("prompt", None)}
    for name, parent in (("A", "prompt"), ("B", "prompt"), ("C", "A"), ("D", "A"), ("E", "A")):
        nodes[name] = node(name, nodes[parent])
    leaves = tuple(nodes[name] for name, *_ in rows)
    weights, before = weights_of_leaves(Tree(query("page"), nodes["prompt"], leaves, TokenUsage(), Sampling()))
    assert [float(Fraction(text)) for *_, text, _ in rows] == pytest.approx(before.tolist())
    assert [float(Fraction(text)) for *_, text in rows] == pytest.approx(weights.tolist())
    tokens = np.array([float(text.replace(",", "")) for _, text, *_ in rows])
    reward = np.array([float(text) for _, _, text, *_ in rows])
    shown = re.search(
        r"mean length is (\d+) by a plain mean, (\d+) by the weights and (\d+) by the weights before the fallback. "
        r"The pass rate is ([\d.]+), ([\d.]+) and ([\d.]+)\.\n",
        PAGE.replace("\nThe pass rate is\n", " The pass rate is ").replace("is\n0.5", "is 0.5"),
    )
    assert shown is not None
    expected = [values @ w for values in (tokens, reward) for w in (np.full(4, 1 / 4), weights, before)]
    assert [float(text) for text in shown.groups()] == pytest.approx(expected, abs=0.5e-3, rel=1e-3)


def node(name: str, parent: TreeNode | None) -> TreeNode:
    child = TreeNode(parent, 0, 0, np.ones(1, np.int32), SingleTurn(), is_fallback=name == "E")
    if parent is not None:
        parent.children.append(child)
    return child


def is_long(leaf: TreeNode) -> float:
    return float(leaf.end - len(PROMPT) == 8)


def test_the_example_of_long_and_short_responses_has_the_means_of_the_page() -> None:
    law = LengthLaw(np.bincount([4, 8]) / 2, num_prompt=len(PROMPT))
    cases = {"none": (300, {plain: "5/8", weighted: "1/2"}), "random": (700, {plain: "11/16", weighted: "9/16"})}
    for fallback, (num, means) in cases.items():
        trees = grow(SimulatedEngine(law), TreeOptions(width=4, segment=4, fallback=fallback), num)
        assert estimate(trees, is_long, before_fallback).distance(1 / 2) < 3
        for weights, mean in means.items():
            assert mean in PAGE
            found = estimate(trees, is_long, weights)
            assert found.distance(float(Fraction(mean))) < 3
            assert mean == "1/2" or found.distance(1 / 2) > 3


def test_the_benchmark_of_the_page_prints_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    sampling_bias.main(["--queries", "4", "--only", "700"])
    printed = capsys.readouterr().out
    for title in ("Mean length", "Pass rate", "Tokens"):
        header, _, *rows = printed.split(f"\n{title}\n\n")[1].split("\n\n")[0].strip().splitlines()
        assert len(rows) == 4
        assert {row.count("|") for row in rows} == {header.count("|")}


def test_the_program_of_the_page_prints_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(program, "docs/tree-sampling.md", "exec"), {"__name__": "__main__"})
    assert f"```text\n{capsys.readouterr().out}```" in PAGE
