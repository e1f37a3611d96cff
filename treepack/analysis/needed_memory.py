"""Memory that statistics and checks of a trie need besides its tokens: its nodes, trajectories and trained spans.

Tokens, and columns with a value per token, are mapped files if they are large. Arrays with a value per node, trajectory
or span stay in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from treepack.errors import TreepackError
from treepack.memory.budget import usual_memory
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class _MemoryNeed:
    """Peak memory of a command in bytes for each node, trajectory and trained span, and the verb that names it."""

    verb: str
    node: int
    trajectory: int
    span: int


# Measured with a million trajectories of one turn: 170 and 380 bytes for a trajectory and its node; and with 100,000 of
# 20 turns: 50 and 200 bytes for a span.
CHECKING = _MemoryNeed("checking", 100, 200, 60)
DESCRIBING = _MemoryNeed("describing", 150, 400, 200)


def refuse_too_large(trie: Trie, need: _MemoryNeed, *, memory: int | None) -> None:
    """Refuse a trie whose nodes, trajectories and spans do not fit into `memory` bytes, None for `usual_memory`.

    Raises:
        TreepackError: naming the memory that is needed.
    """
    memory = usual_memory() if memory is None else memory
    num_spans = sum(len(chunk.flatten()) for chunk in trie.trajectories["trained"].chunks)
    needed = need.node * trie.num_nodes + need.trajectory * trie.num_trajectories + need.span * num_spans
    if needed > memory:
        raise TreepackError(
            f"{need.verb} {trie.num_trajectories:,} trajectories, {trie.num_nodes:,} nodes and {num_spans:,} trained "
            f"spans needs about {-(-needed >> 20):,} MB of memory, and {memory >> 20:,} MB may be used; give --memory "
            f"{-(-needed >> 20)}M"
        )
