"""Refuse ranks that cannot divide the experts of a layer; needs no torch, so that commands do it first."""

from __future__ import annotations

from treepack.errors import TreepackError


def check_share(num_experts: int, size: int, source: str) -> None:
    """Refuse a number of ranks that cannot divide the experts of a model; `num_experts` is 0 if it has none.

    Raises:
        TreepackError: with a number that can.
    """
    if not num_experts:
        raise TreepackError(f"{source}: has no experts in stacked weights; train it without --expert-ranks")
    if num_experts % size:
        fitting = max(n for n in range(1, size) if num_experts % n == 0)
        raise TreepackError(
            f"{source}: its {num_experts} experts cannot be divided among {size} ranks; give --expert-ranks {fitting}"
        )
