"""Schedules of rows for every implementation of tree attention.

    subtree_end --prepare, once per row and reach--> schedule of one implementation, or None for the reference
    subtree_end --Schedules, once per batch--> the schedule of each reach and implementation that a layer asks for

A rectangle has the queries of the tokens from `first` on, and the keys and values of all tokens. Schedules cover whole
blocks of queries, so they begin at the block of `first`, and `dispatch` adds queries in front.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from treepack.attention.build_schedule import build_schedule
from treepack.attention.chains import ChainRows, find_chains
from treepack.attention.flash import build_flash_mask
from treepack.attention.flex import build_block_mask
from treepack.attention.operator import PackedSchedules, pack_schedules
from treepack.attention.reach import KeyReach, first_visible
from treepack.attention.schedule import QUERY_BLOCK, Schedule
from treepack.errors import TreepackError

AnySchedule = BlockMask | Schedule | ChainRows | None


def first_of_block(first: int) -> int:
    """Return the first token of the query block that contains the token `first`."""
    # 0 -> 0, 127 -> 0, 128 -> 128, 300 -> 256
    return first - first % QUERY_BLOCK


def prepare(
    subtree_end: Tensor,
    impl: str,
    *,
    start: Tensor | None = None,
    device: torch.device | str | None = None,
    varlen: bool = False,
    first: int = 0,
) -> AnySchedule:
    """Return the schedule of a row for an implementation; one schedule serves every layer of the same reach.

    Args:
        subtree_end: int [B, T] or [T]. If it is on the CPU, for example in a data worker, no GPU is synchronised.
        impl: reference, flex, flash or triton: a result of `resolve`.
        start: int [B, T], on the device of `subtree_end`; the first token that each token sees, None for all ancestors.
        device: device of the layers, by default that of `subtree_end`.
        varlen: allow Chains for a row in which nothing branches; see `takes_chains`. No rectangle has them.
        first: the token of the first query.

    Returns:
        the schedule on `device`; None for the reference.

    Raises:
        TreepackError: if `first` is not a token of the row, or `impl` is flash and `first` is not 0.
    """
    end = subtree_end[None] if subtree_end.ndim == 1 else subtree_end
    target = end.device if device is None else torch.device(device)
    if not 0 <= first < max(end.shape[1], 1):
        raise TreepackError(
            f"attention: first is {first} and the row has {end.shape[1]} tokens; pass 0 to {end.shape[1] - 1}"
        )
    if first and impl == "flash":
        raise TreepackError(f"attention: flash has no rectangles and first is {first}; use triton or flex")
    begin = first_of_block(first)
    schedule: AnySchedule = find_chains(end) if varlen and start is None and not first else None
    if schedule is None and impl == "flex":
        schedule = build_block_mask(end.to(target), None if start is None else start.to(target), first=begin)
    elif schedule is None and impl == "flash":
        schedule = build_flash_mask(end.to(target))
    elif schedule is None and impl == "triton":
        schedule = build_schedule(end, start, first=begin)
    if isinstance(schedule, Schedule | ChainRows) and end.device.type == "cpu" and target.type == "cuda":
        return schedule.pin_memory().to(target, non_blocking=True)
    return schedule.to(target) if isinstance(schedule, Schedule | ChainRows) else schedule


class BatchSchedules:
    """The schedules of one batch of rows, one for each reach of a model's layers, made when they are first asked for.

    A model gets the object as its argument `schedule`, and each layer finds its schedule in it.
    """

    def __init__(
        self,
        subtree_end: Tensor,
        *,
        device: torch.device | str | None = None,
        varlen: bool = False,
        first: int = 0,
    ) -> None:
        """Start without schedules.

        Args:
            subtree_end: int [B, T] or [T], on the CPU if possible; see `prepare`.
            device: of the layers, by default that of `subtree_end`.
            varlen: allow Chains for layers without windows, sinks and caps; see `takes_chains`.
            first: the token of the first query of a rectangle.
        """
        self.varlen = varlen
        self.first = first
        self._end = subtree_end[None] if subtree_end.ndim == 1 else subtree_end
        self._device = self._end.device if device is None else torch.device(device)
        self._starts: dict[KeyReach | None, Tensor | None] = {}
        self._made: dict[tuple[str, KeyReach | None, bool], tuple[Tensor | None, AnySchedule]] = {}
        self._tables: dict[Hashable, Any] = {}
        self.packed: PackedSchedules | None = None

    def pack(self, made: dict[KeyReach | None, AnySchedule]) -> None:
        """Pack the schedules of all kinds of layers for compiled layers, if each is one of the project's kernels.

        Args:
            made: results of `of`, by reach.
        """
        suitable = {reach: schedule for reach, schedule in made.items() if isinstance(schedule, Schedule)}
        if len(suitable) == len(made) > 0:
            self.packed = pack_schedules(suitable)

    def check(self, subtree_end: Tensor, *, first: int = 0) -> None:
        """Check that these are the schedules of the rows of `subtree_end`: their length, and on the CPU their values.

        Another number of rows is found by `tree_attention`, or by the trainer whose wrapper divided a batch.

        Args:
            subtree_end: int [B, T] or [T].
            first: the token of the first query.

        Raises:
            TreepackError: if they are not.
        """
        end = subtree_end[None] if subtree_end.ndim == 1 else subtree_end
        # Values on a GPU are not compared, because every layer would wait for the comparison.
        on_cpu = end.device.type == self._end.device.type == "cpu"
        comparable = on_cpu and len(end) == len(self._end) and end is not self._end
        if end.shape[1] != self._end.shape[1] or (comparable and not torch.equal(end, self._end)):
            raise TreepackError(
                f"attention: the schedule was made for {len(self._end)} other rows of {self._end.shape[1]} tokens; "
                "pass Schedules(subtree_end) of these rows"
            )
        if first != self.first:
            raise TreepackError(
                f"attention: the schedule was made for queries from token {self.first} on and they begin at {first}; "
                f"pass Schedules(subtree_end, first={first})"
            )

    def of(
        self, impl: str, reach: KeyReach | None = None, *, varlen: bool = False
    ) -> tuple[Tensor | None, AnySchedule]:
        """Return `start` and `schedule` of `tree_attention` for an implementation and a reach.

        A reach that no path of the rows exceeds has the results of None.
        """
        if reach not in self._starts:
            self._starts[reach] = first_visible(self._end, reach)
        start = self._starts[reach]
        place = (impl, None if start is None else reach, varlen and start is None)
        if place not in self._made:
            schedule = prepare(self._end, impl, start=start, device=self._device, varlen=varlen, first=self.first)
            moved = None if start is None else start.to(self._device, non_blocking=True)
            self._made[place] = (moved, schedule)
        return self._made[place]

    def table(self, name: Hashable, make: Callable[[Tensor], Any]) -> Any:
        """Return make(subtree_end [B, T]) on the device of the layers, made once under its `name`.

        The result of `make` is a tensor, or has a method `to(device)`. Recurrent layers need such tables.
        """
        if name not in self._tables:
            self._tables[name] = make(self._end).to(self._device)
        return self._tables[name]


_EXPECTED = {"reference": (), "flex": (BlockMask,), "flash": (BlockMask,), "triton": (Schedule, ChainRows)}


def check_schedule(
    schedule: AnySchedule, impl: str, end: Tensor, *, is_plain: bool, start: Tensor | None, first: int
) -> None:
    """Check that a schedule was made for this implementation, reach and rectangle, and for rows of this size.

    Raises:
        TreepackError: if it was not.
    """
    size: tuple[int, int] = (0, 0)
    begin = 0
    rows, length = expected = (len(end), end.shape[1])
    if isinstance(schedule, BlockMask):
        block = schedule.BLOCK_SIZE[0]
        size = (len(schedule.kv_num_blocks), schedule.seq_lengths[1])
        begin = schedule.seq_lengths[1] - schedule.seq_lengths[0]
        expected = (rows, -(-length // block) * block)  # 300 tokens in blocks of 128 -> 384
    elif isinstance(schedule, Schedule):
        size, begin = (len(schedule.end), schedule.length), schedule.first
    elif isinstance(schedule, ChainRows):
        size = (schedule.rows, schedule.length)
    if not isinstance(schedule, (*_EXPECTED[impl], *((ChainRows,) if is_plain else ()))):
        raise TreepackError(
            f"attention: the schedule is a {type(schedule).__name__}, which {impl} does not take; "
            f"pass prepare(subtree_end, {impl!r})"
        )
    if isinstance(schedule, Schedule) and (schedule.start is None) != (start is None):
        raise TreepackError(
            "attention: the schedule was made for another `start`; pass prepare(subtree_end, impl, start=start)"
        )
    if size != expected:
        raise TreepackError(
            f"attention: the schedule has {size[0]} rows of {size[1]} tokens and q has {rows} of {length}; "
            "pass the schedule of these rows"
        )
    if begin != first_of_block(first) or (first and isinstance(schedule, ChainRows)):
        raise TreepackError(
            f"attention: the {type(schedule).__name__} has queries from token {begin} on and they begin at {first}; "
            f"pass prepare(subtree_end, {impl!r}, first={first})"
        )
