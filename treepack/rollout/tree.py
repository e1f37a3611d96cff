"""A sampled tree: nodes of one segment each, and the weights of its leaves.

        prompt -+- A -+- C   leaf   forks 2 and 2    weight 1/4          weights before the fallback: D 1/4, E 0
                |     +- D   leaf                    weight 1/4 -> 1/6
                |     '- E   leaf   by fallback                   1/6
                '- B         leaf   forks 2          weight 1/2

The weight of a leaf is the product of 1 / forks on its path, so the weights of a tree sum to 1. A weighted mean over
the leaves estimates the mean over independent rollouts without bias, as long as the number of forks of a node does not
depend on the nodes below it. A plain mean is biased: paths that end early stop forking while longer ones multiply. A
fallback adds forks because of the nodes below. So estimates use the leaves from before the first fallback, with their
weights at that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.rollout.engine import Segment
from treepack.rollout.episode import Episode
from treepack.rollout.options import Sampling
from treepack.rollout.query import Query
from treepack.trajectory import Float32, Float64, Int32

NO_TOKENS = np.zeros(0, np.int32)
ANSWER, STOPPED, TOO_LONG, TOO_DEEP, REPETITION = "answer", "stop", "length", "depth", "repetition"
FINISHED_WELL = frozenset({ANSWER, STOPPED})


@dataclass(eq=False, slots=True, repr=False)
class TreeNode:
    """One segment: the tokens that an engine added in one request, and the tokens that the environment appended.

    `start` is the number of tokens on the path before it, `number` its position in the order of sampling, 0 at the
    root, which is the prompt. `turn` int32 are the tokens of the policy's turn that is not finished yet, up to
    this node. `finish` is None unless the node is a leaf. `routes` [n, layers, k] are the experts of the tokens
    that the engine computed first for this node, up to its last one but one: of `tokens`, and before them of the
    prompt, or the last token and the observation of the parent.
    """

    parent: TreeNode | None
    number: int
    start: int
    tokens: Int32
    episode: Episode
    logprobs: Float32 | None = None
    observation: Int32 = field(default_factory=lambda: NO_TOKENS)
    turn: Int32 = field(default_factory=lambda: NO_TOKENS)
    depth: int = 0
    version: str = ""
    is_fallback: bool = False
    finish: str | None = None
    reward: float | None = None
    children: list[TreeNode] = field(default_factory=list)
    routes: NDArray[np.integer[Any]] | None = None

    def __repr__(self) -> str:
        """Without parent and children, because asyncio prints the results of its tasks: a whole tree takes seconds."""
        return f"Node({self.number}, start={self.start}, num_tokens={len(self.tokens)}, finish={self.finish!r})"

    @property
    def end(self) -> int:
        """Number of tokens on the path, this node included."""
        return self.start + len(self.tokens) + len(self.observation)

    @property
    def num_computed(self) -> int:
        """Number of tokens on the path that the engine has computed; it never computes the last sampled one."""
        return 0 if self.parent is None else self.start + len(self.tokens) - 1

    def path(self) -> list[TreeNode]:
        """Return the nodes from the root to this node."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]

    def ids(self) -> Int32:
        """Return all token ids of the path, int32 [end]."""
        return np.concatenate([part for node in self.path() for part in (node.tokens, node.observation)])


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of the requests of a tree.

    `decoded` were sampled. `prefilled` were sent, once for each request. `cached` of them came from the engine's cache;
    None if it is not reported.
    """

    requests: int = 0
    decoded: int = 0
    prefilled: int = 0
    cached: int | None = None

    def plus(self, num_ids: int, segments: list[Segment]) -> TokenUsage:
        """Return the usage with one more request of `num_ids` tokens, answered by `segments`."""
        cached = [segment.num_cached for segment in segments if segment.num_cached is not None]
        return TokenUsage(
            requests=self.requests + 1,
            decoded=self.decoded + sum(len(segment.tokens) for segment in segments),
            prefilled=self.prefilled + num_ids,
            # All segments of a request share its prefill, so it counts once.
            cached=(self.cached or 0) + max(cached) if cached else self.cached,
        )


@dataclass(frozen=True, slots=True)
class Tree:
    """The rollouts of one query: `leaves` in the order in which their paths ended."""

    query: Query
    root: TreeNode
    leaves: tuple[TreeNode, ...]
    usage: TokenUsage
    sampling: Sampling

    def nodes(self) -> Iterator[TreeNode]:
        """Yield all nodes, parents first."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children)


def weights_of_leaves(tree: Tree) -> tuple[Float64, Float64]:
    """Return the weight of each leaf, and its weight before the first fallback, float64 [num_leaves] each.

    Both sum to 1. The second is 0 for the leaves that a fallback added, and equals the first if there was none.
    """
    weights = np.ones((2, len(tree.leaves)))
    for i, leaf in enumerate(tree.leaves):
        for node in leaf.path()[1:]:
            assert node.parent is not None
            siblings = node.parent.children
            weights[0, i] /= len(siblings)
            before = sum(not sibling.is_fallback for sibling in siblings)
            # Divided as above, so that both weights have equal bits if there was no fallback.
            weights[1, i] = 0.0 if node.is_fallback else weights[1, i] / before
    return weights[0], weights[1]


def mean_decoded(tree: Tree) -> float:
    """Return the mean number of tokens that an independent rollout of the query decodes, estimated without bias."""
    lengths = np.array([sum(len(node.tokens) for node in leaf.path()[1:]) for leaf in tree.leaves])
    return float(lengths @ weights_of_leaves(tree)[1])
