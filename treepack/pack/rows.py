"""A plan becomes rows: every per-token column of the packed format, and the loss weights.

    Trie, Plan --pack_rows--> Row, Row, ...

A row lists its nodes depth-first, with the children of each in the order of `layout.py`. Then every column but the
loss weights is a formula over the row's nodes, spread over their tokens; the loss weights are added up trajectory by
trajectory.
"""

from __future__ import annotations

from collections.abc import Iterator

from treepack.errors import TreepackError
from treepack.pack.options import NORMALIZE, SEMANTICS
from treepack.pack.placement import RowPlacer
from treepack.pack.plan.plan import Plan
from treepack.pack.row import Row
from treepack.pack.weights import RowWeights
from treepack.trie.trie import Trie


def pack_rows(trie: Trie, plan: Plan, *, semantics: str = "branch", normalize: str = "token") -> Iterator[Row]:
    """Yield the rows of `plan` in order.

    `semantics` "branch" lets every trajectory that trains a token count there; "once" divides each one's weight by
    the number of trajectories of the whole trie that train it, so a shared token counts once. `normalize` is
    described at `trajectory_factors`. The loss of a set of rows is their weighted sum over their total weight.

    Raises:
        TreepackError: an unknown option.
    """
    for name, value, known in (("semantics", semantics, SEMANTICS), ("normalize", normalize, NORMALIZE)):
        if value not in known:
            raise TreepackError(f"{name} is {value!r}; expected one of {', '.join(known)}")
    layout = RowPlacer(trie)
    weights = RowWeights(trie, normalize=normalize, semantics=semantics)
    steps = trie.trajectories["step"].to_pylist()
    ids = trie.trajectories["trajectory_id"].to_pylist()
    groups = trie.trajectories["group_id"].to_pylist()
    for row_id, members in enumerate(plan.members()):
        placed = layout.placed(members)
        columns = layout.columns(placed)
        loss_weight, terms = weights.of(placed)
        yield Row(
            row_id=row_id,
            step=steps[members[0]],
            loss_weight=loss_weight,
            terms=terms,
            trajectory_ids=[ids[i] for i in placed.members.tolist()],
            trajectory_groups=[groups[i] for i in placed.members.tolist()],
            **columns,
        )
