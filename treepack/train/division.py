"""The machine that computes each row, so that a machine downloads its rows and not all of them.

    rows of a directory --blocks (data.blocks)--> block of each row --machines--> machines of each block

    4 machines    2 blocks: block 0 has the machines 0 and 1      8 blocks: machine 0 has the blocks 0 and 1

The order of a run depends on its number of blocks, and not on the number of machines. So the number of blocks is
recorded in the run, and a resumed run keeps it on any number of machines. Losses and gradients are sums over the rows
of a step, whichever machine computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treepack.data.blocks import BALANCED, is_balanced
from treepack.data.epochs import block_of_rows
from treepack.data.mixture import AnyDataset, source_of_rows, sources_of
from treepack.errors import TreepackError
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks
from treepack.trajectory import Int64


@dataclass(frozen=True)
class Division:
    """The blocks of a run and its machines, of which each has the same number of ranks.

    `block_of` is the block of every row of the dataset, int64 [num_rows]; -1 for rows that are not trained.
    """

    machines: int
    blocks: int
    block_of: Int64

    def divide(self, rows: Sequence[int], room: int) -> list[list[int]]:
        """Return the rows of each machine: at most `room`, which is enough for all rows together.

        A row goes to a machine of its block, unless all of them are full.
        """
        shares: list[list[int]] = [[] for _ in range(self.machines)]
        for row in rows:
            own = min(self._machines_of(int(self.block_of[row])), key=lambda machine: len(shares[machine]))
            if len(shares[own]) == room:
                own = min(range(self.machines), key=lambda machine: len(shares[machine]))
            shares[own].append(row)
        return shares

    def rows_of(self, machine: int) -> Int64:
        """Return the rows that the machine reads, ascending."""
        own = [block for block in range(self.blocks) if machine in self._machines_of(block)]
        return np.flatnonzero(np.isin(self.block_of, own))

    def _machines_of(self, block: int) -> range:
        # 4 machines: of 2 blocks, block 1 has range(2, 4); of 8 blocks, block 3 has range(1, 2)
        return range(block * self.machines // self.blocks, -(-(block + 1) * self.machines // self.blocks))


def choose_blocks(dataset: AnyDataset, rows: Int64, options: TrainOptions, ranks: Ranks) -> tuple[int, tuple[str, ...]]:
    """Return the number of blocks of a run, and a note if the machines have blocks of their own or cannot have them.

    Args:
        dataset: the rows of the run.
        rows: the trained rows.
        options: `blocks` asks for a number, None for the usual one.
        ranks: the ranks of the run.

    Raises:
        TreepackError: the data cannot have the blocks that `options` ask for.
    """
    if options.blocks is not None:
        obstacle = _obstacle(dataset, rows, options.blocks, options)
        if obstacle is not None:
            raise TreepackError(f"{obstacle}; omit --blocks or give --blocks 1")
        return options.blocks, ()
    machines = ranks.machines or 1
    if machines == 1 or all(source.is_local for source in sources_of(dataset)):
        return 1, ()
    obstacle = _obstacle(dataset, rows, machines, options)
    if obstacle is not None:
        return 1, (f"each machine may read all parts: {obstacle}",)
    return machines, (f"the rows are divided into {machines} blocks, and each machine reads its own",)


def _obstacle(dataset: AnyDataset, rows: Int64, blocks: int, options: TrainOptions) -> str | None:
    """Return the reason why the rows cannot be divided into blocks, as the start of a sentence; None if they can."""
    if blocks == 1:
        return None
    sources = sources_of(dataset)
    for source, count in zip(sources, np.bincount(source_of_rows(dataset)[rows], minlength=len(sources)), strict=True):
        if is_balanced(source.manifest):
            return f"{source.path}: {BALANCED}"
        # Each block takes its share of each directory. Without shares, a block may have no row of a directory.
        if options.mix is not None and 0 < count < blocks:
            return f"{source.path}: has {count} rows with trained tokens, too few for shares in each of {blocks} blocks"
    return None


def divide_rows(
    dataset: AnyDataset, rows: Int64, blocks: int, ranks: Ranks, *, steps: Sequence[int | None] | None = None
) -> Division | None:
    """Divide `rows` among the machines of the run, and announce this machine's rows to the dataset.

    Args:
        dataset: the rows of the run.
        rows: the trained rows, ascending.
        blocks: number of blocks.
        ranks: the ranks of the run, numbered machine by machine.
        steps: training step of every row of the dataset, by default as recorded there.

    Returns:
        None if there is one block or one machine.
    """
    # If the number of machines is not known, each block has one.
    machines = ranks.machines or (blocks if ranks.size % blocks == 0 else 1)
    if blocks == 1 or machines == 1:
        return None
    steps = dataset.steps if steps is None else steps
    block_of = block_of_rows(steps, rows, blocks=blocks, owners=source_of_rows(dataset))
    division = Division(machines, blocks, block_of)
    # 4 ranks on 2 machines: ranks 2 and 3 are on machine 1.
    dataset.claim(division.rows_of(ranks.rank * machines // ranks.size))
    return division
