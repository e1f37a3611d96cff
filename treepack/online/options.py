"""Options of online batches."""

from __future__ import annotations

from dataclasses import dataclass

from treepack.errors import TreepackError
from treepack.ingest.options import ROUTE_CONFLICTS
from treepack.model.head.token_loss import CHUNK
from treepack.option_fields import read_counts
from treepack.pack.options import EFFORTS

_METHODS = ("contiguous", "auto")
DEFAULT_CAPACITY = 1 << 16  # tokens; the memory of a longer row is seldom there


@dataclass(frozen=True)
class OnlineOptions:
    """Options of planning and computing a batch in memory."""

    # Maximum tokens of a row; a longer sequence gets a row of its own. None is `DEFAULT_CAPACITY`, so that a trainer's
    # micro-batch is usually one row, which has no more tokens than the micro-batch.
    capacity: int | None = None
    # "contiguous" cuts the order of the trie into rows with the minimum number of tokens; "auto" searches longer for
    # rows with fewer tokens, as `plan_rows` does.
    method: str = "contiguous"
    effort: str = "low"  # the work that "auto" may do, one of `pack.options.EFFORTS`
    with_entropies: bool = True  # False omits the entropies
    chunk: int = CHUNK  # tokens whose logits are in memory at a time
    recompute: bool = True  # keep the activations of one row and compute the others again; False keeps all
    # For recorded routes: "split" shares no token that has different experts, which is exact; "first" shares it, with
    # the experts of the first sequence in the order of the trie.
    route_conflicts: str = "split"

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        choices = (
            ("method", self.method, _METHODS),
            ("effort", self.effort, EFFORTS),
            ("route_conflicts", self.route_conflicts, ROUTE_CONFLICTS),
        )
        for name, value, known in choices:
            if value not in known:
                raise TreepackError(f"OnlineOptions: {name} is {value!r}; expected one of {', '.join(known)}")
        read_counts(self, "capacity", "chunk")
        for name, number in (("capacity", self.capacity), ("chunk", self.chunk)):
            if number is not None and number < 1:
                raise TreepackError(f"OnlineOptions: {name} is {number}; expected at least 1")
