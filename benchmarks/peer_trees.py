"""The trees of published figures about shared prefixes, as rows of random tokens: tree, flat and append-only.

    SHAPES["castform-1k"].tree() --> TurnTree --tree_rows, flat_rows, append_rows--> list[Batch]

A node of a `TurnTree` is a prompt or observation, and the answer after it, which alone is trained. A sample ends at
each answer and trains this answer, so three kinds of rows have equal losses:

    prompt 4 + answers 2, 3            tree         4 + 2 + 3 tokens, each answer once
                                       flat         a sequence for each sample: 6 + 7
    turns  a -> b, a -> c              flat         a, ab, ac: each sequence trains its last answer
                                       append-only  ab, ac: each trains both answers, and a counts half in each

Without turns that continue each other, append-only sequences are the flat ones. Shapes of stars have the sizes that
their authors give. Those by turns are random trees with the statistics of public rollouts, in tokens of a vocabulary
of 16,384 (docs/benchmarks.md, "Real rollouts"):

    tau-bench   gpt-4o, airline: one prompt of 3,900 tokens; 12.3 turns a rollout, 133 tokens each and answers of 99
    ToolBench   the largest of ten search trees: a prompt of 1,700, 75 turns of 180 tokens, 38 leaves, depth of 8 turns
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from training_rows import join_sequences, make_row
from workloads import Int64, Workload, row_of_nodes

from treepack.data.batch import Batch


class TurnTree(NamedTuple):
    """Nodes in depth-first order: parent (-1 for the root), tokens before the answer, tokens of the answer."""

    parent: list[int]
    before: list[int]
    answer: list[int]

    @property
    def workload(self) -> Workload:
        """The row of the tree, with the length of each sample."""
        size = [a + b for a, b in zip(self.before, self.answer, strict=True)]
        row = row_of_nodes("tree", self.parent, size)
        return Workload("tree", row.subtree_end, np.array([len(self.path(node)) for node in self.samples]))

    @property
    def samples(self) -> list[int]:
        """The nodes with an answer."""
        return [node for node, answer in enumerate(self.answer) if answer]

    @property
    def leaves(self) -> list[int]:
        """The nodes without children."""
        return sorted(set(range(len(self.parent))) - set(self.parent))

    def nodes_to(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`."""
        nodes = [node]
        while self.parent[nodes[-1]] >= 0:
            nodes.append(self.parent[nodes[-1]])
        return nodes[::-1]

    def tokens_of(self, node: int) -> Int64:
        """Return the places in the row of the tokens of a node."""
        size = [a + b for a, b in zip(self.before, self.answer, strict=True)]
        start = sum(size[:node])
        return np.arange(start, start + size[node])

    def path(self, node: int) -> Int64:
        """Return the places in the row of the tokens from the root to the end of `node`."""
        return np.concatenate([self.tokens_of(each) for each in self.nodes_to(node)])


class PeerShape(NamedTuple):
    """A model, a tree, and the speed-up that its authors claim over flat sequences, with the source."""

    model: str
    tree: Callable[[], TurnTree]
    claimed: str
    source: str


def star(prompt: int, count: int, answer: int) -> TurnTree:
    """Return a prompt with `count` answers."""
    return TurnTree([-1] + [0] * count, [prompt] + [0] * count, [0] + [answer] * count)


def conversations(prompt: int, rollouts: int, turns: float, before: int, answer: int) -> TurnTree:
    """Return rollouts of turns that share a prompt; the numbers are means of uniform distributions."""
    generator = np.random.default_rng(0)

    def draw(mean: float) -> int:
        return int(generator.integers(max(1, round(mean / 3)), round(mean * 5 / 3) + 1))

    tree = TurnTree([-1], [prompt], [0])
    for _ in range(rollouts):
        node = 0
        for _ in range(draw(turns)):
            node = _grow(tree, node, draw(before), draw(answer))
    return tree


def search(prompt: int, leaves: int, depth: int, before: int, answer: int) -> TurnTree:
    """Return a random binary tree of turns: a leaf above `depth` turns is split until there are `leaves`."""
    generator = np.random.default_rng(0)
    children, level, open_ends = {0: list[int]()}, {0: 0}, [0]
    while len(open_ends) < leaves:
        may_split = [node for node in open_ends if level[node] < depth]
        node = may_split[int(generator.integers(len(may_split)))]
        open_ends.remove(node)
        for _ in range(2):
            child = len(children)
            children[node].append(child)
            children[child], level[child] = [], level[node] + 1
            open_ends.append(child)
    tree = TurnTree([-1], [prompt], [0])
    waiting = [(child, 0) for child in reversed(children[0])]
    while waiting:
        node, parent = waiting.pop()
        place = _grow(tree, parent, before, answer)
        waiting += [(child, place) for child in reversed(children[node])]
    return tree


def _grow(tree: TurnTree, parent: int, before: int, answer: int) -> int:
    for column, value in zip(tree, (parent, before, answer), strict=True):
        column.append(value)
    return len(tree.parent) - 1


def tree_rows(tree: TurnTree, vocabulary: int) -> list[Batch]:
    """Return one row with every token once."""
    work, weight = tree.workload, np.zeros(tree.workload.tokens)
    for node in tree.samples:
        weight[tree.tokens_of(node)[tree.before[node] :]] = 1.0
    ids = np.random.default_rng(0).integers(0, vocabulary, work.tokens)
    ends = np.array([int(tree.tokens_of(node)[-1]) for node in tree.samples])
    weights = torch.from_numpy(weight)
    return [replace(make_row(0, ids, work.subtree_end, ends), loss_weight=weights, total_weight=float(weight.sum()))]


def flat_rows(tree: TurnTree, row: Batch) -> list[Batch]:
    """Return a sequence for each sample, in rows of at most as many tokens as the tree."""
    sequences = []
    for node in tree.samples:
        at = tree.path(node)
        weight = np.zeros(len(at))
        weight[len(at) - tree.answer[node] :] = 1.0
        sequences.append((row.input_ids.numpy()[at], weight))
    return join_sequences(sequences, row.num_tokens)


def append_rows(tree: TurnTree, row: Batch) -> list[Batch]:
    """Return a sequence for each leaf, in which all answers are trained; a shared answer counts once in total."""
    leaves = {leaf: tree.nodes_to(leaf) for leaf in tree.leaves}
    share = np.zeros(row.num_tokens)
    for leaf in leaves:
        share[tree.path(leaf)] += 1
    weight = row.loss_weight.numpy() / share
    paths = [tree.path(leaf) for leaf in leaves]
    return join_sequences([(row.input_ids.numpy()[at], weight[at]) for at in paths], row.num_tokens)


_CASTFORM = "castform.com/blog/train-prompt-cache, 8 answers"
_DUALKV = "arXiv 2605.15422"
SHAPES: dict[str, PeerShape] = {
    "castform-64": PeerShape("qwen3.5-4b", lambda: star(16_384, 8, 64), "7.5", _CASTFORM),
    "castform-1k": PeerShape("qwen3.5-4b", lambda: star(16_384, 8, 1024), "5.4", _CASTFORM),
    "castform-4k": PeerShape("qwen3.5-4b", lambda: star(8192, 8, 4096), "1.7", _CASTFORM),
    "dualkv-8b": PeerShape(
        "qwen3-8b", lambda: star(8192, 32, 2048), "1.63 to 2.09", f"{_DUALKV}: policy update, micro-batches of 4 and 8"
    ),
    "dualkv-kernel": PeerShape(
        "qwen3-8b", lambda: star(16_384, 28, 2048), "3.74", f"{_DUALKV}: attention alone, over FlashAttention-2"
    ),
    "dualkv-30b": PeerShape(
        "qwen3-30b-a3b", lambda: star(8192, 32, 2048), "3.82", f"{_DUALKV}: update, over 4 sequence ranks, 16 H100"
    ),
    "dualkv-30b-16k": PeerShape(
        "qwen3-30b-a3b", lambda: star(16_384, 28, 2048), "-", "the tree of table 1 with the model of 30B"
    ),
    "schedule-level": PeerShape(
        "llama-3.1-8b", lambda: star(16_384, 8, 1536), "up to 4.395",
        "arXiv 2606.01143 (2.930 compiled); its longest baseline, 17,920 tokens; number of answers assumed",
    ),
    "tau-bench": PeerShape(
        "qwen3-8b", lambda: conversations(3900, 8, 12.3, 133, 99), "8.31", "AReaL-DTA, arXiv 2602.00482, on tau2-bench"
    ),
    "toolbench": PeerShape(
        "qwen3-8b", lambda: search(1700, 38, 8, 60, 120), "6.2", "Tree Training, arXiv 2511.00413, on its own trees"
    ),
}  # fmt: skip
TINY_SHAPES: dict[str, PeerShape] = {
    "star": PeerShape("qwen3-8b", lambda: star(24, 3, 5), "-", "a dry run"),
    "experts": PeerShape("qwen3-30b-a3b", lambda: star(12, 2, 4), "-", "a dry run"),
    "hybrid": PeerShape("qwen3.5-4b", lambda: star(16, 2, 5), "-", "a dry run"),
    "turns": PeerShape("qwen3-8b", lambda: conversations(8, 2, 2.5, 3, 3), "-", "a dry run"),
    "search": PeerShape("llama-3.1-8b", lambda: search(6, 4, 3, 2, 3), "-", "a dry run"),
}
