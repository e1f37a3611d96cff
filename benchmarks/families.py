"""Packing problems without tokens: named families of trees, like the trees of agents and samplers, and hard ones.

A family is a function (num_leaves, rng) -> PlanTree with exactly `num_leaves` leaves. `make_tree` seeds it, so the same
name, number and seed always give the same tree. Sizes are in tokens. Paths have at most about 100,000 tokens, for any
number of leaves. If a family is hard at one capacity only, it names this capacity.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from made_tries import forest_of_trees, tree_of

from treepack.pack.plan.problem import PlanForest, PlanTree
from treepack.trajectory import Int64

Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class Family:
    """A family of trees: `make(num_leaves, rng)`; the trees are hard at `capacity`, None if at no special one."""

    name: str
    make: Callable[[int, Rng], PlanTree]
    capacity: int | None = None


def families() -> list[Family]:
    """Return all families, in a fixed order."""
    return [
        Family("star, short prompt", lambda n, rng: star(n, rng, prompt=300, median=1200)),
        Family("star, long prompt", lambda n, rng: star(n, rng, prompt=4000, median=500)),
        Family("random turns", random_turns),
        Family("turns of one chain", lambda n, rng: chains(n, rng, count=1)),
        Family("turns of 8 chains", lambda n, rng: chains(n, rng, count=max(8, n // 150))),
        Family("sub-agents", sub_agents),
        Family("nearly equal", nearly_equal),
        Family("balanced ternary", balanced_ternary),
        Family("random recursive", random_recursive),
        Family("beam search", beam_search),
        Family("one-token branches", one_token_branches),
        Family("comb", comb, 8192),
        Family("halves", halves, 8192),
        Family("thirds", thirds, 8192),
        Family("triplets", triplets, 8192),
        Family("triplets in groups", grouped_triplets, 8192),
    ]


def forests() -> dict[str, Callable[[int, int], PlanForest]]:
    """Return functions (num_leaves, seed) that make many small trees, whose rows can be merged."""
    return {"stars of 16": stars_of_16, "mixed trees": mixed_trees}


def make_tree(family: Family, num_leaves: int, *, seed: int = 0) -> PlanTree:
    """Return the tree of `family` with `num_leaves` leaves for `seed`."""
    # crc32 and not hash(), which differs from process to process.
    rng = np.random.default_rng([seed, num_leaves, zlib.crc32(family.name.encode())])
    tree = family.make(num_leaves, rng)
    assert tree.num_leaves == num_leaves, f"{family.name}: {tree.num_leaves} leaves, not {num_leaves}"
    return tree


def star(num_leaves: int, rng: Rng, *, prompt: int, median: int) -> PlanTree:
    """GRPO: one prompt, answers of lognormal lengths, at most 24,000 tokens."""
    answers = np.clip(np.exp(rng.normal(np.log(median), 0.8, num_leaves)), 8, 24_000).astype(np.int64)
    return _star(int(prompt * rng.uniform(0.5, 2)), answers)


def _star(root: int, leaves: Int64) -> PlanTree:
    return tree_of(np.concatenate([[-1], np.zeros(len(leaves), np.int64)]), np.concatenate([[root], leaves]))


def one_token_branches(num_leaves: int, rng: Rng) -> PlanTree:
    """A long prompt and answers of one token."""
    return _star(int(rng.integers(4000, 8000)), np.ones(num_leaves, np.int64))


def stars_of_16(num_leaves: int, seed: int) -> PlanForest:
    """GRPO groups of 16, every prompt with its own length."""
    rng = np.random.default_rng([seed, num_leaves, 16])
    sizes = np.diff(np.append(np.arange(0, num_leaves, 16), num_leaves))
    return forest_of_trees([star(n, rng, prompt=int(rng.integers(200, 3000)), median=900) for n in sizes.tolist()])


def mixed_trees(num_leaves: int, seed: int) -> PlanForest:
    """Small trees of 4 to 60 leaves of most families, their paths at most 32,768 tokens."""
    rng = np.random.default_rng([seed, num_leaves, 60])
    kinds = [family for family in families() if family.name not in ("turns of one chain", "one-token branches")]
    trees, left = [], num_leaves
    while left:
        leaves = min(left, int(rng.integers(4, 61)))
        tree = kinds[int(rng.integers(len(kinds)))].make(leaves, rng)
        if tree.length.max() <= 32_768:
            trees.append(tree)
            left -= leaves
    return forest_of_trees(trees)


class _Growing:
    """Nodes of a tree that grows level by level; `add` returns the numbers of the new nodes."""

    def __init__(self, root: int) -> None:
        self.parents = [np.array([-1])]
        self.sizes = [np.array([root])]
        self.num = 1

    def add(self, parents: Int64, sizes: Int64) -> Int64:
        self.parents.append(parents)
        self.sizes.append(sizes)
        self.num += len(parents)
        return np.arange(self.num - len(parents), self.num)

    def tree(self) -> PlanTree:
        return tree_of(np.concatenate(self.parents), np.concatenate(self.sizes))


def random_turns(num_leaves: int, rng: Rng) -> PlanTree:
    """A trunk of about 3,000 tokens, turns of 100 to 1,200; after each turn a path forks with probability 0.35.

    Growth stops at `num_leaves` paths; then each path continues for up to 8 turns.
    """
    nodes = _Growing(int(rng.integers(2000, 4000)))
    paths = np.array([0])
    while len(paths) < num_leaves:
        forks = np.flatnonzero(rng.random(len(paths)) < 0.35)[: num_leaves - len(paths)]
        above = np.sort(np.concatenate([paths, paths[forks]]))
        paths = nodes.add(above, rng.integers(100, 1201, len(above)))
    # Up to 8 further turns of 650 tokens, the mean of a turn, as one node.
    nodes.add(paths, np.maximum(rng.integers(100, 1201, num_leaves), 650 * rng.integers(0, 9, num_leaves)))
    return nodes.tree()


def chains(num_leaves: int, rng: Rng, *, count: int) -> PlanTree:
    """One trajectory per turn of `count` conversations under one prompt: a side leaf of about 300, then a trunk of 400.

    Conversations of more than 240 turns have shorter turns, so that they stay below 100,000 tokens.
    """
    count = min(count, num_leaves)
    turns = np.diff(np.linspace(0, num_leaves, count + 1).astype(np.int64))
    parents, sizes = [-1], [int(rng.integers(1000, 4000))]
    for number in turns.tolist():
        trunk = 0
        scale = min(1.0, 240 / number)
        for turn in range(number):
            parents.append(trunk)
            sizes.append(max(1, int(scale * rng.lognormal(np.log(300), 0.5))))
            if turn < number - 1:
                parents.append(trunk)
                sizes.append(max(1, int(scale * rng.lognormal(np.log(400), 0.4))))
                trunk = len(parents) - 1
    return tree_of(np.array(parents), np.array(sizes))


def sub_agents(num_leaves: int, rng: Rng) -> PlanTree:
    """Main agents of 20 to 60 turns; every other turn spawns sub-agents that see its context, and may spawn others."""
    parents, sizes = [-1], [int(rng.integers(3000, 6000))]
    leaves = 0

    def add(up: int, low: int, high: int) -> int:
        parents.append(up)
        sizes.append(int(rng.integers(low, high)))
        return len(parents) - 1

    while leaves < num_leaves:
        main = 0
        for _ in range(int(rng.integers(20, 61))):
            for _ in range(int(rng.integers(1, 5)) if rng.random() < 0.5 else 0):
                if leaves < num_leaves - 1:
                    agent = add(main, 300, 3000)
                    leaves += 1
                while rng.random() < 0.3 and leaves < num_leaves - 1:
                    add(agent, 200, 1500)
                    leaves += 1
                    agent = add(agent, 200, 800)
            main = add(main, 150, 900)
            if leaves >= num_leaves - 1:
                break
        leaves += 1
    return tree_of(np.array(parents), np.array(sizes))


def nearly_equal(num_leaves: int, rng: Rng) -> PlanTree:
    """All paths have 24,000 tokens within 1 %; forks are anywhere, so neighbours share few tokens or nearly all."""
    parents, sizes = [], []
    todo = [(-1, 0, num_leaves)]
    while todo:
        up, depth, leaves = todo.pop()
        left = int(24_000 * rng.uniform(0.99, 1.01)) - depth
        parents.append(up)
        if leaves == 1:
            sizes.append(max(1, left))
            continue
        sizes.append(max(1, int(left * rng.uniform(0.02, 0.4))))
        first = max(1, int(leaves * rng.uniform(0.05, 0.6)))
        node = len(parents) - 1
        todo += [(node, depth + sizes[node], part) for part in (first, leaves - first)]
    return tree_of(np.array(parents), np.array(sizes))


def balanced_ternary(num_leaves: int, rng: Rng) -> PlanTree:
    """Every node has three children until there are enough leaves; 100 to 1,000 tokens each."""
    parents, leaves, node = [-1], 1, 0
    while leaves < num_leaves:
        children = min(3, num_leaves - leaves + 1)
        parents += [node] * children
        leaves += children - 1
        node += 1
    return tree_of(np.array(parents), rng.integers(100, 1001, len(parents)))


def random_recursive(num_leaves: int, rng: Rng) -> PlanTree:
    """The parent of every node is drawn uniformly from all nodes before it; 20 to 2,000 tokens each."""
    # Only a second child makes a new leaf: the first one replaces its parent as a leaf.
    parents, has_child, leaves = [-1], [False], 1
    while leaves < num_leaves:
        up = int(rng.integers(len(parents)))
        leaves += has_child[up]
        has_child[up] = True
        parents.append(up)
        has_child.append(False)
    return tree_of(np.array(parents), np.exp(rng.uniform(np.log(20), np.log(2000), len(parents))).astype(np.int64))


def beam_search(num_leaves: int, rng: Rng) -> PlanTree:
    """Every survivor is expanded four times, one expansion in four survives; at most 60 levels of 100 to 600 tokens."""
    # Each level adds 3 leaves per survivor, so a width of num_leaves / 180 needs about 60 levels.
    width = max(2, num_leaves // 180)
    nodes = _Growing(int(rng.integers(1000, 3000)))
    survivors, leaves = np.array([0]), 1
    while leaves < num_leaves:
        room = num_leaves - leaves
        above = np.repeat(survivors, 4)[: room + -(-room // 3)]  # a node with c children adds c - 1 leaves
        leaves += len(above) - len(np.unique(above))
        children = nodes.add(above, rng.integers(100, 601, len(above)))
        survivors = np.sort(rng.choice(children, min(width, len(children)), replace=False))
    return nodes.tree()


def comb(num_leaves: int, rng: Rng) -> PlanTree:
    """Short trunk pieces, and teeth of 1/2, 1/3 or 1/4 of the tokens that a row of 8,192 has left there."""
    parents, sizes, trunk, depth = [-1], [200], 0, 200
    piece = max(1, min(40, 4000 // num_leaves))
    for tooth in range(num_leaves):
        parents.append(trunk)
        left = 8192 - depth
        sizes.append(left // int(rng.integers(2, 5)) + int(rng.integers(-60, 61)))
        if tooth < num_leaves - 1 and depth < 4400:
            parents.append(trunk)
            sizes.append(piece)
            trunk, depth = len(parents) - 1, depth + piece
    return tree_of(np.array(parents), np.array(sizes))


def halves(num_leaves: int, rng: Rng) -> PlanTree:
    """A prompt of 500 tokens, and leaves near half of the tokens that a row of 8,192 has left."""
    return _star(500, (8192 - 500) // 2 + rng.integers(-400, 401, num_leaves))


def thirds(num_leaves: int, rng: Rng) -> PlanTree:
    """A prompt of 500 tokens, and leaves near a third of the tokens that a row of 8,192 has left."""
    return _star(500, (8192 - 500) // 3 + rng.integers(-250, 251, num_leaves))


def triplets(num_leaves: int, rng: Rng) -> PlanTree:
    """A prompt of 512 tokens, and leaves in threes that fill a row of 8,192 exactly, so a plan without a gap exists."""
    return _star(512, _triplets(num_leaves, rng, 8192 - 512))


def _triplets(num: int, rng: Rng, room: int) -> Int64:
    # Every size is between a quarter and half of the room, so a row contains at most three leaves.
    first = rng.integers(room // 4 + 1, room // 2, -(-num // 3))
    low = np.maximum(room // 4 + 1, room - first - room // 2 + 1)
    high = np.minimum(room // 2, room - first - room // 4)
    second = rng.integers(low, np.maximum(high, low + 1))
    return rng.permutation(np.concatenate([first, second, room - first - second])[:num])


def grouped_triplets(num_leaves: int, rng: Rng) -> PlanTree:
    """Groups of up to 24 triplet leaves below prefixes of 100 to 1,000 tokens, all below a prompt of 512."""
    parents, sizes, leaves = [-1], [512], 0
    while leaves < num_leaves:
        prefix, number = int(rng.integers(100, 1001)), min(24, num_leaves - leaves)
        parents.append(0)
        sizes.append(prefix)
        group = len(parents) - 1
        parents += [group] * number
        sizes += _triplets(number, rng, 8192 - 512 - prefix).tolist()
        leaves += number
    return tree_of(np.array(parents), np.array(sizes))
