"""The forecast of rows in pieces: cost and memory of each capacity with and without `train --carry`, ready for JSON.

    RowsToCarry, ... --carried_report--> {"lines": [{"capacity": 65536, "hours_rows": ..., "hours_carry": ...}], ...}

Without --carry, as few layers are recomputed as the device demands, as a run chooses them. With it, the
size of a piece is the largest of `PIECES` that fits the device. If the carried path leaves room only for pieces below
`_MIN_PIECE_WITH_PATH`, the path waits in host memory, except for two layers. Hours include the operations that run
twice, at the rate of rows with checkpointing. They leave out waiting for copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treepack.analysis.capacities import PlannedCapacity, rows_work
from treepack.analysis.capacity_choice import largest_tree
from treepack.analysis.carried_cost import (
    TrunkCounter,
    TrunkTokens,
    executed_in_pieces,
    executed_in_rows,
    plan_trunks,
    trie_trunks,
)
from treepack.analysis.forecast import MFU, ForecastLine, TrainingDevice, tree_work
from treepack.costs.model_cost import FlopCount, ModelShape, operations
from treepack.errors import TreepackError
from treepack.memory.model_memory import ModelMemory, NoPieces
from treepack.trie.trie import Trie

# Sizes of a piece to choose from: shorter ones do not keep a GPU busy, and longer ones gain little.
PIECES = (4_096, 8_192, 16_384, 32_768, 65_536)
# The size if the memory of the device is not known.
_USUAL_PIECE = 16_384
# Pieces of this size compute at least as long as it takes to copy their path from host memory and back.
_MIN_PIECE_WITH_PATH = 8_192
# Share of the device's memory that a plan may use; the rest is for fragments and the error of the estimate.
USABLE = 0.9
GIB = 1 << 30

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RowsToCarry:
    """Rows of `capacity` tokens, or of whole trees if it is None.

    Attributes:
        capacity: maximum number of tokens of a row.
        num_left_out: trajectories that are longer.
        work: the work of the rows.
        row_tokens: tokens of the largest row.
        longest: tokens of the longest trajectory.
        trunks: the trunk for each size of a piece.
        num_rows: number of rows.
    """

    capacity: int | None
    num_left_out: int
    work: FlopCount
    row_tokens: int
    longest: int
    trunks: tuple[TrunkTokens, ...]
    num_rows: int = 0


def sizes_of_pieces(carry: int | None) -> tuple[int, ...]:
    """Return the sizes of a piece to choose from: `carry` alone if the user gave it.

    Raises:
        TreepackError: it is not positive.
    """
    if carry is not None and carry < 1:
        raise TreepackError(f"carry is {carry}; expected a positive number of tokens, or None for a size that fits")
    return PIECES if carry is None else (carry,)


def rows_of_plans(trie: Trie, planned: Sequence[PlannedCapacity], pieces: Sequence[int]) -> list[RowsToCarry]:
    """Return the rows of whole trees, and of each plan."""
    longest, trunks = int(trie.lengths.max()), trie_trunks(trie, pieces)
    rows = [RowsToCarry(None, 0, tree_work(trie), largest_tree(trie), longest, trunks, trie.num_trees)]
    for each in planned:
        trunks = plan_trunks(each.packed_nodes, each.plan.row_of, pieces)
        row_tokens, longest = int(each.totals.row_tokens.max()), int(each.trie.lengths.max())
        capacity, left_out = each.plan.capacity, each.num_too_long
        rows.append(RowsToCarry(capacity, left_out, rows_work(each), row_tokens, longest, trunks, each.totals.num_rows))
    return rows


def packed_rows(line: ForecastLine, counter: TrunkCounter) -> RowsToCarry:
    """Return the rows that `counter` and the `RowCounter` of `line` have read."""
    return RowsToCarry(
        line.capacity, 0, line.packed, counter.row_tokens, counter.longest, counter.trunks, counter.num_rows
    )


def carried_report(
    rows: Iterable[RowsToCarry], shape: ModelShape, memory: ModelMemory | NoPieces, device: TrainingDevice
) -> Entry:
    """Return cost and memory of the rows on one device, with and without pieces, as plain values.

    A model without a forecast of pieces has no lines, and its obstacle is the reason.
    """
    entry: Entry = {"device_bytes": device.memory, "obstacle": None}
    if isinstance(memory, NoPieces):
        return entry | {"obstacle": memory.reason, "lines": [], "notes": []}
    lines = [_line(each, shape, memory, device) for each in rows]
    sizes = {"state_bytes": memory.state, "path_bytes_per_token": memory.path}
    return entry | sizes | {"lines": lines, "notes": notes(lines, device)}


def _line(rows: RowsToCarry, shape: ModelShape, memory: ModelMemory, device: TrainingDevice) -> Entry:
    trunk, in_host = _choose(rows, memory, device)
    limit = 0.0 if device.memory is None else USABLE * device.memory
    recomputed = memory.fewest_recomputed(rows.row_tokens, limit)
    # The rate holds for steps that recompute all layers, and counts no operation twice.
    hours = operations(shape, rows.work) / (device.rate * MFU) / 3600 / executed_in_rows(shape, rows.work, 1)
    executed = executed_in_rows(shape, rows.work, recomputed / memory.num_layers)
    carried = executed_in_pieces(shape, rows.work, trunk)
    bytes_rows, bytes_carry = memory.in_rows(rows.row_tokens, recomputed), _on_device(rows, memory, trunk, in_host)
    return {
        "capacity": rows.capacity,
        "num_left_out": rows.num_left_out,
        "row_tokens": rows.row_tokens,
        "longest": rows.longest,
        "recomputed_layers": recomputed,
        "bytes_rows": bytes_rows,
        "fits_rows": _fits(bytes_rows, device),
        "hours_rows": hours * executed,
        "carry": trunk.piece,
        "tokens_computed": rows.work.tokens,
        "tokens_trunk": trunk.tokens,
        "tokens_path": trunk.path,
        "bytes_path": trunk.path * memory.path,
        "bytes_carry": bytes_carry,
        "bytes_host": memory.in_host(trunk.path) if in_host else 0,
        "fits_carry": _fits(bytes_carry, device),
        "hours_carry": hours * carried,
        "speedup": executed / carried,
    }


def _choose(rows: RowsToCarry, memory: ModelMemory, device: TrainingDevice) -> tuple[TrunkTokens, bool]:
    """Return the trunk of the size of a piece to use, and True if the path waits in host memory.

    If rows are shorter than a piece, it is the smallest size that contains a row. If nothing fits, it is the smallest
    size of all.
    """
    if device.memory is None:
        return next((trunk for trunk in rows.trunks if trunk.piece == _USUAL_PIECE), rows.trunks[0]), False

    def largest(in_host: bool) -> TrunkTokens | None:
        fitting = [trunk for trunk in rows.trunks if _fits(_on_device(rows, memory, trunk, in_host), device)]
        return max(fitting, key=lambda trunk: (min(trunk.piece, rows.row_tokens), -trunk.piece), default=None)

    on_gpu, with_host = largest(False), largest(True)
    if on_gpu is not None and (on_gpu == with_host or on_gpu.piece >= min(_MIN_PIECE_WITH_PATH, rows.row_tokens)):
        return on_gpu, False
    return with_host or rows.trunks[0], True


def _on_device(rows: RowsToCarry, memory: ModelMemory, trunk: TrunkTokens, in_host: bool) -> int:
    return memory.in_pieces(rows.row_tokens, trunk.piece, trunk.path, path_in_host=in_host)


def _fits(needed: int, device: TrainingDevice) -> bool | None:
    return None if device.memory is None else needed <= USABLE * device.memory


def _rows(line: Mapping[str, Any]) -> str:
    if line["capacity"] is None:
        return f"rows of whole trees (--capacity {line['row_tokens']})"
    return f"rows of {line['capacity']:,} tokens"


def notes(lines: Iterable[Mapping[str, Any]], device: TrainingDevice) -> list[str]:
    """Return sentences about unknown memory, trajectories left out, and paths in host memory."""
    sentences = []
    if device.memory is None:
        sentences.append("the memory of the device is not known, so without --carry all layers are recomputed")
    for line in lines:
        if line["num_left_out"]:
            sentences.append(f"{_rows(line)} leave out {line['num_left_out']:,} longer trajectories")
        if line["bytes_host"]:
            sentences.append(f"the path of {_rows(line)} is in host memory")
    return sentences
