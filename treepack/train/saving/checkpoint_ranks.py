"""The ranks that write or read a checkpoint together, and their process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from treepack.errors import TreepackError

_T = TypeVar("_T")


@dataclass(frozen=True)
class RankGroup:
    """The ranks of the run and their process group; one rank without a group if torch.distributed is not in use."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def gather(self, value: _T) -> list[_T]:
        """Return the `value` of every rank, on every rank."""
        gathered = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def together(self, function: Callable[[], _T]) -> list[_T]:
        """Return the result of `function` on every rank, on every rank.

        Raises:
            TreepackError: it raised one on any rank; so that no rank waits for another one.
        """
        try:
            own: tuple[_T | None, str | None] = function(), None
        except TreepackError as error:
            own = None, str(error)
        results = self.gather(own)
        problem = next((each for _, each in results if each), None)
        if problem is not None:
            raise TreepackError(problem)
        return [value for value, _ in results]  # type: ignore[misc]  # None only if T allows it

    def lead(self, function: Callable[[], _T]) -> _T:
        """Return the result of `function` on the first rank, which alone calls it, on every rank; as `together`."""
        results: list[_T | None] = self.together(lambda: function() if self.rank == 0 else None)
        return results[0]  # type: ignore[return-value]  # None only if T allows it


def all_ranks(*, new_group: bool = False) -> RankGroup:
    """Return all ranks of the run, with `new_group` in a group for threads, whose collectives must not mix."""
    if not (dist.is_available() and dist.is_initialized()):
        return RankGroup(None, 0, 1)
    group = dist.new_group(backend="gloo") if new_group else None
    return RankGroup(group, dist.get_rank(), dist.get_world_size())
