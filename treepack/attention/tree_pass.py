"""Arguments of one forward pass over a row for the attention of every layer, beside the row itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treepack.attention.autograd import KeptOutputs
    from treepack.attention.operator import PackedSchedules


@dataclass(eq=False)
class TreePass:
    """The tensors that attention keeps or carries during a pass, and the tokens that this rank has.

    A model passes it through its layers as one argument. torch.compile makes another version of a layer for each set
    of arguments and for each type among them, so the object is there in every pass, even if all fields are None. For
    the same reason it is not frozen: some versions of torch.compile read all fields of a frozen dataclass.

    Attributes:
        kept: outputs of attention for layers that are computed again; None if no layer is.
        carry: the `carry.stack.CarriedStack` of a row that runs in pieces; None for a whole row.
        packed: schedules for attention inside the graph of a compiled layer; None if a compiled layer breaks its graph
            at attention.
        share: the `sequence.share.TokenShare` of a row that several ranks compute together; None for one rank.
    """

    kept: KeptOutputs | None = None
    carry: Any = None
    packed: PackedSchedules | None = None
    share: Any = None
