"""Factors that let each edge of a sampled tree count once in a loss, however many trajectories pass through it.

    SegmentTree, loss weights of trained tokens --edge_factors--> factor e_t of each trained token

        prompt -+- [4 5] -+- [8]     a       edges: [4 5] of a and b, [8], [9 9], [6 6]
                |         '- [9 9]   b       a's tokens 4 5 have 1/4 each, and b's too; 8 has 1, 9 9 and 6 6 have 1/2
                '- [6 6]             c

TreeRPO's objective (TRACE, arXiv 2606.11119, equation 47) is a mean over the edges that sibling comparisons use, of the
mean over the tokens of an edge, and each edge counts once:

    J = 1/|E| sum_(p, c) in E  1/|o_c| sum_t  (clipped surrogate of token t of o_c, minus beta KL)

A trajectory has a term for each of its trained tokens, so an edge that m trajectories share has m terms for each token.
With the loss weight w_t of a term, and the sum over all terms of its edge,

    e_t = 1 / sum_(u of the edge) w_u        so the terms of an edge have a total e_t w_t of 1, and
    J   = sum_t e_t w_t J_t / sum_t e_t w_t       over all terms of a step, in rows that were cut anywhere

An edge is a chain of only children: nothing was sampled beside its later segments, and all of it has one advantage. A
chain that starts at the root is compared with nothing; it is not in E, and its factor is 0.
"""

from __future__ import annotations

import numpy as np

from treepack.rl.advantages.tree import chain_heads
from treepack.rl.segments import SegmentTree
from treepack.trajectory import Float64, Int64


def edge_factors(tree: SegmentTree, trajectory: Int64, position: Int64, weight: Float64) -> Float64:
    """Return e_t of each trained token, float64 [num_trained].

    `trajectory` and `position`, int64 [num_trained], belong to the trained tokens, ascending, as in
    `SegmentTree.segment_of`; `weight` float64 [num_trained] are their loss weights.
    """
    edge = chain_heads(tree)[tree.node[tree.segment_of(trajectory, position)]]
    total = np.bincount(edge, weights=weight, minlength=len(tree.parent))[edge]
    is_compared = (tree.parent[edge] >= 0) & (total > 0)
    return np.divide(1.0, total, out=np.zeros(len(edge)), where=is_compared)
