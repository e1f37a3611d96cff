"""Rows for benchmarks of tree attention: trees as agents and samplers produce them, and rows of a packed directory.

    (parent, size) per node, depth-first --row_of_nodes--> Workload: subtree_end of every token, length of every path

`tree` counts each token once, `flat` once for every root-to-leaf path through it. A score pair is a token and one token
that it sees. Sizes are in tokens.

    chains      8 sequences of 8,192, nothing shared                            65,536 /  65,536
    star-4k     a prompt of 4,096 and 16 answers of 1,024                       20,480 /  81,920
    star-1k     a prompt of 1,024 and 8 answers of 8,192                        66,560 /  73,728
    star-512    a prompt of 1,024 and 64 answers of 512                         33,792 /  98,304
    short-2k    a prompt of 512 and 8 answers of 192                             2,048 /   5,632
    short-8k    a prompt of 2,048 and 12 answers of 512                          8,192 /  30,720
    agent-32k   a trunk of 3,000, nodes of 100 to 1,200, 35 % of them branch    32,239 / 111,199
    agent-64k   the same, larger                                                66,218 / 413,272
    caterpillar a trunk of 2,000, then 40 times a side leaf of 300 and 400 more 30,000 / 422,000

Needs numpy, and pyarrow for a packed directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Int64 = np.ndarray[Any, np.dtype[np.int64]]

TRUNK = 3000
BRANCHING = 0.35


@dataclass(frozen=True)
class Workload:
    """One row of T tokens.

    subtree_end is int64 [T], one past the last token of each token's subtree. paths is int64, the number of tokens of
    each sequence from a root to a leaf.
    """

    name: str
    subtree_end: Int64
    paths: Int64

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return len(self.subtree_end)

    @property
    def tokens_flat(self) -> int:
        """Tokens of the sequences one by one."""
        return int(self.paths.sum())

    @property
    def pairs(self) -> int:
        """Score pairs of the row."""
        return int((self.subtree_end - np.arange(self.tokens)).sum())


def depths(subtree_end: Int64) -> Int64:
    """Return the number of tokens that each token sees: all up to and including it, minus the ended subtrees."""
    # subtree_end 5 3 3 5 5 -> over 0 0 0 2 2 (tokens whose subtree has ended) -> depths 1 2 3 2 3
    length = len(subtree_end)
    over: Int64 = np.bincount(subtree_end, minlength=length + 1)[:length].cumsum()
    return np.arange(1, length + 1) - over


def row_of_nodes(name: str, parent: list[int], size: list[int]) -> Workload:
    """Return the row of a forest; nodes are in depth-first order, each with the number of its parent (root: -1)."""
    # parent -1 0 0, size 2 1 3 -> node ends 6 3 6 -> subtree_end 6 6 3 6 6 6
    end = np.cumsum(size)
    for node in range(len(size) - 1, -1, -1):
        if parent[node] >= 0:
            end[parent[node]] = max(end[parent[node]], end[node])
    return row_of_ends(name, np.repeat(end, size))


def row_of_ends(name: str, subtree_end: Int64) -> Workload:
    """Return the row with these intervals and a path to every leaf."""
    leaves = subtree_end == np.arange(1, len(subtree_end) + 1)
    return Workload(name, subtree_end, depths(subtree_end)[leaves])


def chains(name: str, count: int, size: int) -> Workload:
    """Return `count` sequences that share nothing."""
    return row_of_nodes(name, [-1] * count, [size] * count)


def star(name: str, prompt: int, count: int, size: int) -> Workload:
    """Return `count` answers to one prompt."""
    return row_of_nodes(name, [-1] + [0] * count, [prompt] + [size] * count)


def caterpillar(name: str, turns: int) -> Workload:
    """Return a conversation with one short side branch per turn."""
    parent, size, trunk = [-1], [2000], 0
    for _ in range(turns):
        parent += [trunk, trunk]
        size += [300, 400]
        trunk = len(size) - 1
    return row_of_nodes(name, parent, size)


def agent_tree(name: str, tokens: int, seed: int) -> Workload:
    """Return a random tree: a random open end grows by one node or, with probability `BRANCHING`, by two to four."""
    generator = np.random.default_rng(seed)
    parent, size, children, ends, total = [-1], [TRUNK], [list[int]()], [0], TRUNK
    while total < tokens:
        node = ends.pop(int(generator.integers(len(ends))))
        for _ in range(int(generator.integers(2, 5)) if generator.random() < BRANCHING else 1):
            if total < tokens:
                ends.append(len(size))
                children[node].append(len(size))
                children.append([])
                parent.append(node)
                size.append(min(int(generator.integers(100, 1201)), tokens - total))
                total += size[-1]
    order, waiting = list[int](), [0]
    while waiting:
        order.append(waiting.pop())
        waiting += reversed(children[order[-1]])
    place = {node: i for i, node in enumerate(order)}
    return row_of_nodes(name, [place.get(parent[node], -1) for node in order], [size[node] for node in order])


WORKLOADS: dict[str, Callable[[str], Workload]] = {
    "chains": lambda name: chains(name, 8, 8192),
    "star-4k": lambda name: star(name, 4096, 16, 1024),
    "star-1k": lambda name: star(name, 1024, 8, 8192),
    "star-512": lambda name: star(name, 1024, 64, 512),
    "short-2k": lambda name: star(name, 512, 8, 192),
    "short-8k": lambda name: star(name, 2048, 12, 512),
    "agent-32k": lambda name: agent_tree(name, 32_239, seed=2449),
    "agent-64k": lambda name: agent_tree(name, 66_218, seed=5404),
    "caterpillar": lambda name: caterpillar(name, 40),
}


def make_workload(name: str) -> Workload:
    """Return the workload called `name`."""
    return WORKLOADS[name](name)


def packed_workloads(directory: Path, count: int) -> list[Workload]:
    """Return `count` rows of a packed directory, evenly spaced in the order of their score pairs, largest first."""
    from treepack.pack.files import read_rows

    rows = sorted(read_rows(directory), key=lambda row: (-row.num_pairs, row.row_id))
    chosen = np.unique(np.linspace(0, len(rows) - 1, count).astype(int))
    workloads = []
    for row in (rows[i] for i in chosen):
        end = row.subtree_end.astype(np.int64)
        paths = depths(end)[row.trajectory_ends]
        workloads.append(Workload(f"{directory.name}:{row.row_id}", end, paths))
    return workloads
