"""Outputs of attention over trunk pieces, kept from the push to the pop, whose forward pass then skips the kernel."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from treepack.attention import Kept
from treepack.carry.pieces import Pass


class PieceOutputs:
    """The kept outputs of all trunk pieces on the stack."""

    def __init__(self) -> None:
        """Start without outputs."""
        self._pieces: dict[int, Kept] = {}

    def of(self, each: Pass) -> Kept:
        """Return the outputs of the piece of a pass: empty at its push, full at its pop."""
        return self._pieces.setdefault(each.begin, PushedOutputs())

    def forget(self, each: Pass) -> None:
        """Drop the outputs of a piece after its pop."""
        self._pieces.pop(each.begin, None)


class PushedOutputs(Kept):
    """Outputs and log-sum-exps of one piece by layer; unlike those of `Kept`, they may be taken more than once.

    The forward pass of the pop takes them, and so does a layer that is computed again in its backward.
    """

    def __init__(self) -> None:
        """Start without outputs."""
        super().__init__()
        self._pushed: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def store(self, place: Hashable, out: Tensor, lse: Tensor) -> None:
        """Keep the output and the log-sum-exp of the push at `place`."""
        self._pushed[place] = (out.detach(), lse)

    def take(self, place: Hashable) -> tuple[Tensor, Tensor] | None:
        """Return the result at `place`; None in the push."""
        found = self._pushed.get(place)
        # Another tensor of the same memory each time: autograd writes on the one that it gets.
        return None if found is None else (found[0].detach(), found[1])
