"""Slow twin of leaf weights: an explicit tree of single tokens, and the product of 1 / children on each path.

Sampled     one recorded rollout: its tokens as keys, equal in two rollouts exactly if it is the same sampled token
weights_of  the weight of each rollout of one group that was sampled as one tree and then continued
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from treepack.rollout.tree import Tree

Key = tuple[Hashable, ...]


@dataclass(frozen=True)
class Sampled:
    """`keys`: one per token. `num_inherited`: the tokens of a continuation that its parent sampled, else 0."""

    name: str
    keys: tuple[Key, ...]
    is_fallback: bool = False
    num_inherited: int = 0


def sampled_leaves(tree: Tree) -> list[Sampled]:
    made = []
    for i, leaf in enumerate(tree.leaves):
        keys = [(node.number, at) for node in leaf.path() for at in range(len(node.tokens))]
        fallback = any(node.is_fallback for node in leaf.path())
        made.append(Sampled(f"{tree.query.key}/{i}", tuple(keys), fallback))
    return made


def continued(parent: Sampled, num_tokens: int, name: str, num_new: int) -> Sampled:
    keys = (*parent.keys[:num_tokens], *((name, at) for at in range(num_new)))
    return Sampled(name, keys, num_inherited=num_tokens)


def weights_of(rollouts: Sequence[Sampled], *, before_fallback: bool) -> dict[str, float]:
    """Weights by name; parents come before their continuations in `rollouts`."""
    root: dict[Key, dict] = {}  # type: ignore[type-arg]
    counted = []
    for one in rollouts:
        if before_fallback and (one.is_fallback or not _contains(root, one.keys[: one.num_inherited])):
            continue
        counted.append(one)
        node = root
        for key in one.keys:
            node = node.setdefault(key, {})
    weights = dict.fromkeys((one.name for one in rollouts), 0.0)
    for one in counted:
        node, weight = root, 1.0
        for key in one.keys:
            weight /= len(node)
            node = node[key]
        weights[one.name] = weight
    return weights


def _contains(root: dict[Key, dict], keys: Sequence[Key]) -> bool:  # type: ignore[type-arg]
    for key in keys:
        if key not in root:
            return False
        root = root[key]
    return True
