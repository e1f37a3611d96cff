"""Make the rows of a plan: every per-token column of the packed format, and the loss weights.

    Trie, Plan --pack_rows--> Row, Row, ...

A row contains its nodes in depth-first order, with the children of each node in the order of `child_order`. `placement`
computes every column except the loss weights, as a formula over the nodes. `weights` adds up the loss weights, one
trajectory after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

from treepack.errors import TreepackError
from treepack.files.column_views import ColumnView
from treepack.pack.options import NORMALIZE, SEMANTICS
from treepack.pack.placement import RowPlacer
from treepack.pack.plan.plan import Plan
from treepack.pack.row import Row
from treepack.pack.weights import RowWeights, WholeTrie
from treepack.trie.storage import PageReleaser
from treepack.trie.trie import Trie


def pack_rows(
    trie: Trie,
    plan: Plan,
    *,
    semantics: str = "branch",
    normalize: str = "token",
    whole: WholeTrie | None = None,
) -> Iterator[Row]:
    """Yield the rows of `plan` in order.

    With `semantics` "branch", a token counts for every trajectory that trains it. With "once", each of these weights is
    divided by the number of trajectories of the whole trie that train the token, so a shared token counts once.
    `trajectory_factors` describes `normalize`. The loss of a set of rows is their weighted sum over their total weight.
    If `trie` is a slice of a trie, `whole` contains the facts of the whole trie that its rows need.

    Raises:
        TreepackError: an unknown option.
    """
    for name, value, known in (("semantics", semantics, SEMANTICS), ("normalize", normalize, NORMALIZE)):
        if value not in known:
            raise TreepackError(f"{name} is {value!r}; expected one of {', '.join(known)}")
    placer = RowPlacer(trie)
    weights = RowWeights(trie, normalize=normalize, semantics=semantics, whole=whole)
    steps, ids, groups = (ColumnView(trie.trajectories[name]) for name in ("step", "trajectory_id", "group_id"))
    releaser = PageReleaser(weights.storage)
    for row_id, members in enumerate(plan.members()):
        nodes = placer.place(members)
        columns = placer.columns(nodes)
        loss_weight, terms = weights.of(nodes)
        yield Row(
            row_id=row_id,
            step=steps.value(int(members[0])),
            loss_weight=loss_weight,
            terms=terms,
            trajectory_ids=ids.values(nodes.members),
            trajectory_groups=groups.values(nodes.members),
            routes=None if trie.routes is None else trie.routes[nodes.source],
            **columns,
        )
        releaser.count(len(nodes.source))
