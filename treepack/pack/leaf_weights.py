"""Leaf weights of sampled trees as weights of their trajectories.

    Trie --weigh_leaves--> Trie with weight <- weight * n * leaf weight, for n rollouts in the group

Each tree then counts as n rollouts, and the gradient estimate is that of independent rollouts, without the bias of a
sampler that forks. Leaves that a fallback added have the weight 0 and are left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pyarrow as pa

from treepack.errors import TreepackError
from treepack.rl.group_tree import group_codes
from treepack.rl.leaf_weights import required_leaf_weights
from treepack.rl.rollouts import refuse_split
from treepack.trie.builders.out_of_core import rebuild
from treepack.trie.trie import Trie, trajectories_of

LEFT_OUT = "left out: leaf weight 0, as a fallback added them"


def weigh_leaves(trie: Trie, *, fallback_leaves: bool) -> tuple[Trie, Counter[str]]:
    """Multiply the trajectory weights of `trie` by the leaf weights; return the trie that is left, and counts.

    The leaves have their weights from before the first fallback, or with `fallback_leaves` their final ones.
    Trajectories whose leaf weight is 0 are left out; the trie is then built again in O(N_flat).

    Raises:
        TreepackError: the trie has no leaf weights, a rollout of several trajectories, factors of edges, or any error
            of `leaf_weights`.
    """
    refuse_split(trie, what="leaf weights need", remedy="leave out --leaf-weights")
    columns = trie.trajectories
    if "edge_factors" in columns.column_names and columns["edge_factors"].null_count < columns.num_rows:
        raise TreepackError(
            "the trie has factors of edges, which count each edge once, whatever its leaves weigh; leave out "
            "--leaf-weights, or compute the advantages without --edges"
        )
    weights = required_leaf_weights(trie).times_size(group_codes(trie))
    factor = weights.all if fallback_leaves else weights.before_fallback
    table: pa.Table = trie.trajectories
    place = table.schema.get_field_index("weight")
    # Weights of 1, leaf weights [1/2, 1/4, 1/4] -> factor [3/2, 3/4, 3/4]; four equal leaves keep their weights.
    weight = pa.array(table["weight"].to_numpy() * factor)
    weighted = replace(trie, trajectories=table.set_column(place, table.schema.field(place), weight))
    counts: Counter[str] = Counter()
    if (factor > 0).all():
        return weighted, counts
    counts[LEFT_OUT] = int((factor == 0).sum())
    kept = zip((factor > 0).tolist(), trajectories_of(weighted), strict=True)
    return rebuild(trie, (one for is_kept, one in kept if is_kept)), counts
