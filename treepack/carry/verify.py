"""Rows in pieces as the packed side of a comparison of gradients."""

from __future__ import annotations

from treepack.carry.backward import CarryOptions, RowsInPieces
from treepack.model.verify.gradients import RunnerMaker


def in_pieces(limit: int) -> RunnerMaker:
    """Return an argument `backward` of `verify_gradients` that runs each row in pieces of at most `limit` tokens."""
    return lambda loaded, chunk: RowsInPieces(loaded, CarryOptions(limit, chunk=chunk))
