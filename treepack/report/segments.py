"""Runs of tokens of one role, all trained or all not: the stripes of a block, and the sections of its text.

Trie, TokenRoles --segments_of--> RoleSegments

nodes       0             1        node 0 has segments 0 and 1, node 1 has 2 and 3
tokens      a b c d e     f g h
role        u u A A A     A A u    u: user; A: assistant, trained
segments    0   1         2   3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treepack.pack.weights import times_trained
from treepack.report.roles import TokenRoles
from treepack.trajectory import Int64
from treepack.trie.trie import Trie

TRAINED, STARTS = 8, 16  # bits of a kind above its role, which is below 8


@dataclass(frozen=True, slots=True)
class RoleSegments:
    """Segments in the order of the tokens; none crosses the bounds of a node.

    `first` int64 [num_segments + 1] is the first token of each and, at the end, N_tree. `kind` uint8 [num_segments] is
    the role as its place in `ROLES`, plus `TRAINED` if any trajectory trains its tokens, plus `STARTS` if a message
    starts with it. `of_node` int64 [num_nodes + 1]: node u has the segments `of_node[u] .. of_node[u + 1] - 1`.
    """

    first: Int64
    kind: NDArray[np.uint8]
    of_node: Int64


def segments_of(trie: Trie, roles: TokenRoles) -> RoleSegments:
    """Return the segments of `trie`. O(N_tree)."""
    trained = times_trained(trie) > 0  # bool [N_tree]
    # Tokens begin a segment if they differ from the token before, start a message, or are the first of a node:
    # role [2, 2, 3, 3], trained [0, 0, 0, 1], nodes at 0 -> begins at [0, 2, 3]
    value = roles.role + TRAINED * trained.astype(np.uint8)
    begins = np.ones(trie.tokens_tree, np.bool_)
    begins[1:] = (value[1:] != value[:-1]) | roles.starts[1:]
    begins[trie.node_start[:-1]] = True
    first = np.flatnonzero(begins)
    kind = value[first] + STARTS * roles.starts[first].astype(np.uint8)
    return RoleSegments(
        first=np.append(first, trie.tokens_tree),
        kind=kind.astype(np.uint8),
        of_node=np.searchsorted(first, trie.node_start, side="left").astype(np.int64),
    )
