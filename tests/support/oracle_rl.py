"""Slow, obvious twins of the estimators in treepack/rl: dict trees, plain loops, each paper's formula as it is written.

Rollout     tokens, where its segments start, group, step and reward
branch_cuts, turn_cuts, even_cuts    where segments start
paths       the nodes above each rollout's last segment, root first, as keys that equal prefixes share
flat, treepo, tree_grpo, segments, gae    the advantages, by estimator
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise

EPSILON = 1e-6
Node = tuple[Hashable, ...]


@dataclass(frozen=True)
class Rollout:
    """`cuts`: token offsets where its segments start, ascending, at least one; the tokens before are the root's."""

    tokens: list[int]
    cuts: list[int]
    group: str
    step: int
    reward: float

    @property
    def family(self) -> tuple[int, str]:
        return self.step, self.group


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


def std(values: Iterable[float], rewards: Iterable[float]) -> float:
    """Of a sample; 0 where the values differ by rounding only, seen against the rewards they come from."""
    listed, known = list(values), list(rewards)
    if len(listed) < 2:
        return 0.0
    middle = mean(listed)
    deviation = math.sqrt(math.fsum((value - middle) ** 2 for value in listed) / (len(listed) - 1))
    return deviation if deviation > 1e-12 * max(abs(reward) for reward in known) else 0.0


def over(value: float, deviation: float) -> float:
    return value / (deviation + EPSILON) if deviation else 0.0


def branch_cuts(rollouts: list[Rollout]) -> list[list[int]]:
    """Offsets at which each rollout differs from another of its group inside both; 0 for all if first tokens differ."""
    result = []
    for a in rollouts:
        cuts = set()
        for b in rollouts:
            shared = 0
            while a.family == b.family and shared < min(len(a.tokens), len(b.tokens)):
                if a.tokens[shared] != b.tokens[shared]:
                    cuts.add(shared)
                    break
                shared += 1
        result.append(sorted(cuts) or [0])
    return result


def common(a: Rollout, b: Rollout) -> int:
    """Tokens from the first on that two rollouts of a group have in common."""
    both = list(zip(a.tokens, b.tokens, strict=False)) if a.family == b.family else []
    return next((at for at, (x, y) in enumerate(both) if x != y), len(both))


def turn_cuts(rollouts: list[Rollout]) -> list[list[int]]:
    """Cuts of rollouts that come with their own, where runs of trained tokens start.

    A rollout continues the one with which it has most in common before its first own cut, if that was cut in there; of
    several the one first cut, and of these the one with the earlier cut where their cuts first differ.
    """
    first = [rollout.cuts[0] if rollout.cuts else len(rollout.tokens) for rollout in rollouts]
    cuts: dict[int, list[int]] = {}
    for i in sorted(range(len(rollouts)), key=lambda i: first[i]):
        shared = [min(common(rollouts[i], other), first[i]) for other in rollouts]
        others = [d for d in range(len(rollouts)) if first[d] < shared[d]]
        best = min(others, key=lambda d: (-shared[d], first[d], [*rollouts[d].cuts, math.inf]), default=None)
        taken = [] if best is None else [cut for cut in cuts[best] if cut < shared[best]]
        cuts[i] = taken + rollouts[i].cuts
    return [cuts[i] or [0] for i in range(len(rollouts))]


def even_cuts(rollouts: list[Rollout], size: int) -> list[list[int]]:
    """Cuts every `size` tokens from the first one that any rollout of the group trains on the path of each.

    Rollouts come with their first trained token as their only cut.
    """
    cuts = []
    for a in rollouts:
        begins = [b.cuts[0] for b in rollouts if b.cuts and b.cuts[0] < min(common(a, b), a.cuts[0])]
        cuts.append(list(range(min([*begins, a.cuts[0]]), len(a.tokens), size)))
    return cuts


def paths(rollouts: list[Rollout]) -> list[list[Node]]:
    """Nodes above the last segment of each rollout: its group, then each segment with all that came before it."""
    result: list[list[Node]] = []
    for rollout in rollouts:
        path: list[Node] = [(rollout.family,)]
        for stop in rollout.cuts[1:]:
            path.append((*path[-1], tuple(rollout.tokens[:stop])))
        result.append(path)
    return result


def flat(rollouts: list[Rollout], estimator: str, *, batch: bool = False) -> list[float]:
    advantages = []
    for one in rollouts:
        group = [r.reward for r in rollouts if r.family == one.family]
        step = [r.reward for r in rollouts if r.step == one.step]
        apart = one.reward - mean(group)
        if estimator == "dr-grpo":
            advantages.append(apart)
        elif estimator == "rloo":
            advantages.append(one.reward - (math.fsum(group) - one.reward) / (len(group) - 1))
        elif estimator == "reinforce++":
            advantages.append(over(one.reward - mean(step), std(step, step)))
        elif batch:
            differences = [
                r.reward - mean(s.reward for s in rollouts if s.family == r.family)
                for r in rollouts
                if r.step == one.step
            ]
            advantages.append(over(apart, std(differences, step)))
        else:
            advantages.append(over(apart, std(group, group)))
    return advantages


def below(rollouts: list[Rollout]) -> dict[Node, list[float]]:
    """Rewards of the rollouts through each node."""
    rewards = defaultdict(list)
    for rollout, path in zip(rollouts, paths(rollouts), strict=True):
        for node in path:
            rewards[node].append(rollout.reward)
    return rewards


def treepo(
    rollouts: list[Rollout],
    *,
    batch: bool = False,
    size_weighted: bool = False,
    reject_subgroups: bool = False,
    without_root: bool = False,
) -> list[float]:
    """TreePO, equations 5, 6 and 7."""
    rewards = below(rollouts)
    advantages: list[list[tuple[float, float]]] = []  # of each rollout: weight and advantage per subgroup
    for rollout, path in zip(rollouts, paths(rollouts), strict=True):
        mine: list[tuple[float, float]] = []
        for node in path[1:] if without_root else path:
            subgroup = rewards[node]
            if len(subgroup) > 1 and not (reject_subgroups and min(subgroup) == max(subgroup)):
                mine.append((len(subgroup) if size_weighted else 1, rollout.reward - mean(subgroup)))
        advantages.append(mine)
    result = []
    for one, mine in zip(rollouts, advantages, strict=True):
        scope = [i for i, r in enumerate(rollouts) if (r.step == one.step if batch else r.family == one.family)]
        deviation = std(
            [value for i in scope for _, value in advantages[i]],
            [rollouts[i].reward for i in scope],
        )
        total = sum(weight for weight, _ in mine)
        result.append(over(math.fsum(weight * value for weight, value in mine) / total, deviation) if mine else 0.0)
    return result


def tree_grpo(rollouts: list[Rollout]) -> list[float]:
    """Tree-GRPO, TRACE equation 48."""
    rewards, inter = below(rollouts), flat(rollouts, "grpo")
    advantages = []
    for rollout, path, second in zip(rollouts, paths(rollouts), inter, strict=True):
        family = rewards[path[0]]
        siblings = [rewards[node] for node in path if len(rewards[node]) > 1][-1]
        advantages.append(over(rollout.reward - mean(siblings), std(siblings, family)) + second)
    return advantages


def segments(rollouts: list[Rollout], estimator: str, *, leaf_scaled: bool = False) -> list[list[float]]:
    """The advantage of each rollout's root and segments, in order."""
    all_paths, rewards, inter = paths(rollouts), below(rollouts), flat(rollouts, "grpo")
    children: dict[Node, list[Node]] = defaultdict(list)
    leaves: dict[Node, float] = {}
    for i, path in enumerate(all_paths):
        leaf: Node = (*path[-1], "leaf", i)
        leaves[leaf] = rollouts[i].reward
        for up, node in zip(path, [*path[1:], leaf], strict=True):
            if node not in children[up]:
                children[up].append(node)

    def value(node: Node) -> float:
        return leaves[node] if node in leaves else mean(value(child) for child in children[node])

    lines = []
    for i, path in enumerate(all_paths):
        family, reward = rewards[path[0]], rollouts[i].reward
        line = [0.0 if estimator != "tree-grpo" else inter[i]]
        for up, node in zip(path, [*path[1:], (*path[-1], "leaf", i)], strict=True):
            if len(children[up]) == 1:
                line.append(line[-1])
                continue
            siblings = [value(child) for child in children[up]]
            mine = rewards.get(node, [reward])
            if estimator == "treerpo":
                line.append(over(value(node) - mean(siblings), std(siblings, family)))
            elif estimator == "tree-grpo":
                line.append(over(reward - mean(rewards[up]), std(rewards[up], family)) + inter[i])
            else:
                both = (mean(mine) - mean(family)) + (mean(mine) - mean(rewards[up]))
                line.append(both / math.sqrt(len(mine)) if leaf_scaled else both)
        lines.append(line)
    return lines


def of_token(rollout: Rollout, line: list[float], position: int) -> float:
    """The entry of `line`, root first, of the segment that holds token `position`."""
    return line[sum(cut <= position for cut in rollout.cuts)]


def gae(
    values: list[float], reward: float, after: float | None, *, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Advantages and returns of one trajectory alone, as the sums of their definition.

    `values` are those of the states before its trained tokens, `after` that after its last token if it was truncated.
    """
    rewards = [0.0] * (len(values) - 1) + [reward]
    following = [*values[1:], 0.0 if after is None else after]
    deltas = [r + gamma * later - now for r, later, now in zip(rewards, following, values, strict=True)]
    advantages = [sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(values))) for i in range(len(values))]
    return advantages, [a + now for a, now in zip(advantages, values, strict=True)]


def edges(rollouts: list[Rollout], trained: list[list[int]]) -> list[list[tuple[int, int]]]:
    """The terms (rollout, trained position) of each edge of the sampled trees that has a sibling, in some order.

    Segments without a sibling continue the edge above them. Those of a chain that begins at a root are no edge.
    """
    lines: list[list[Node]] = [[*path, (*path[-1], "leaf", i)] for i, path in enumerate(paths(rollouts))]
    parents = {node: up for line in lines for up, node in pairwise(line)}
    children: dict[Node, set[Node]] = defaultdict(set)
    for node, up in parents.items():
        children[up].add(node)
    terms: dict[Node, list[tuple[int, int]]] = defaultdict(list)
    for i, line in enumerate(lines):
        for position in trained[i]:
            node = line[sum(cut <= position for cut in rollouts[i].cuts)]
            while node in parents and len(children[parents[node]]) == 1:
                node = parents[node]
            if node in parents:
                terms[node].append((i, position))
    return list(terms.values())
