"""Trees for benchmarks of rows in pieces, and the rows that a smaller capacity makes of them.

    workload or file --whole_rows--> rows that hold whole trees --cut_rows--> rows of at most `capacity` tokens

    forks-32k     64 sequences of 32,768 tokens, each forks from an earlier one at a random token
    forks-128k    the same with 131,072 tokens: a deep search
    wide-256k, wide-1m    a trunk of 24,576 tokens and leaves of 8,192, of which the longest sequence has 32,768;
                  262,144 and 1,048,576 tokens in total
    long-200k, long-350k  a sequence of 200,000 or 350,000 tokens, with 8 short leaves that hang on it
    short         8 sequences of 4,096 tokens, to compile
    tiny          a small tree for a dry run

Rows are cut by the planner's own parts, contiguous rows improved by ruin and recreate and then merged, without Arrow,
which the GPU machine may lack. Columns are computed without a Python step for each token, because time on a GPU counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from training_rows import load_columns
from workloads import Int64, Workload, depths, row_of_nodes, star

from treepack.data.batch import Batch
from treepack.native.library import is_compiled
from treepack.pack.plan.fill import merge_rows
from treepack.pack.plan.methods.anneal import anneal
from treepack.pack.plan.methods.contiguous import contiguous
from treepack.pack.plan.problem import PlanTree, RowLimits, SearchOptions
from treepack.pack.plan.unions import RowSizes

STEPS_PER_LEAF = 300


def random_forks(name: str, leaves: int, length: int, seed: int = 0) -> Workload:
    """Return `leaves` sequences of `length` tokens, each of which forks from an earlier one at a random token."""
    generator = np.random.default_rng(seed)
    # Of each sequence: its own first token, and (token, sequence) of all forks from it, ascending by token.
    first, origin, forks = [0], [0], [list[tuple[int, int]]()]
    for leaf in range(1, leaves):
        token, other = int(generator.integers(1, length)), int(generator.integers(leaf))
        while token <= first[other]:  # that part of the path belongs to the sequence from which `other` forks
            other = origin[other]
        forks[other].append((token, leaf))
        first.append(token)
        origin.append(other)
        forks.append([])
    parent, size, children = list[int](), list[int](), list[list[int]]()
    waiting = [(0, -1)]
    while waiting:
        leaf, node = waiting.pop()
        at = first[leaf]
        for token, other in [*sorted(forks[leaf]), (length, -1)]:
            if token > at:  # two forks from one token share the node before it
                parent.append(node)
                size.append(token - at)
                children.append([])
                if node >= 0:
                    children[node].append(len(size) - 1)
                node, at = len(size) - 1, token
            if other >= 0:
                waiting.append((other, node))
    return _depth_first(name, parent, size, children)


def _depth_first(name: str, parent: list[int], size: list[int], children: list[list[int]]) -> Workload:
    """Return the row of a tree, the largest child of each node first, as `pack` arranges it."""
    total = list(size)
    for node in _topological(children)[::-1]:
        total[node] += sum(total[child] for child in children[node])
    order, waiting = list[int](), [0]
    while waiting:
        order.append(waiting.pop())
        waiting += sorted(children[order[-1]], key=lambda child: total[child])
    place = {node: i for i, node in enumerate(order)}
    return row_of_nodes(name, [place.get(parent[node], -1) for node in order], [size[node] for node in order])


def _topological(children: list[list[int]]) -> list[int]:
    order = [0]
    for node in order:
        order += children[node]  # the loop sees them
    return order


def comb(name: str, length: int, leaves: int, size: int) -> Workload:
    """Return one sequence of `length` tokens, and `leaves` leaves of `size` that hang on it at even distances."""
    step = length // (leaves + 1)
    parent, sizes, trunk = [-1], [step], 0
    ends = [step * (i + 1) for i in range(1, leaves)] + [length]
    at = step
    for end in ends:
        parent += [trunk, trunk]
        sizes += [size, end - at]
        trunk, at = len(sizes) - 1, end
    return row_of_nodes(name, parent, sizes)


WORKLOADS: dict[str, Callable[[str], Workload]] = {
    "forks-32k": lambda name: random_forks(name, 64, 32_768),
    "forks-128k": lambda name: random_forks(name, 64, 131_072),
    "wide-256k": lambda name: star(name, 24_576, 29, 8192),
    "wide-1m": lambda name: star(name, 24_576, 125, 8192),
    "long-200k": lambda name: comb(name, 200_000, 8, 512),
    "long-350k": lambda name: comb(name, 350_000, 8, 512),
    "short": lambda name: random_forks(name, 8, 4096),
    "tiny": lambda name: random_forks(name, 5, 40),
}


def whole_rows(source: str, vocabulary: int) -> list[Batch]:
    """Return the rows of a workload with random tokens, or the rows of a file of `training_rows.py`.

    Ids of a file that are beyond the vocabulary become others: 7 of 5 words -> 2.
    """
    if source not in WORKLOADS:
        columns = enumerate(load_columns(Path(source)))
        return [row_of_columns(i, ids % vocabulary, end, ends, weight > 0) for i, (ids, end, ends, weight) in columns]
    work = WORKLOADS[source](source)
    ids = np.random.default_rng(0).integers(0, vocabulary, work.tokens)
    leaves = np.flatnonzero(work.subtree_end == np.arange(1, work.tokens + 1))
    return [row_of_columns(0, ids, work.subtree_end, leaves, np.ones(work.tokens, bool))]


def row_of_columns(number: int, ids: Int64, subtree_end: Int64, ends: Int64, trained: np.ndarray) -> Batch:
    """Return a row whose `trained` tokens, roots excepted, have one unit of weight for each trajectory through them."""
    position = depths(subtree_end) - 1
    parent = _parents(subtree_end)
    # Trajectories that end before token i: ends 1 3 of 4 tokens -> 0 0 1 1 2; through token i: the ends in its subtree
    before = np.concatenate([[0], np.cumsum(np.bincount(ends, minlength=len(ids)))])
    scale = before[subtree_end] - before[:-1]
    weights = torch.from_numpy(np.where(trained & (parent >= 0), scale, 0)).double()
    return Batch(
        row_id=number,
        step=None,
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(position),
        parent=torch.from_numpy(parent),
        subtree_end=torch.from_numpy(subtree_end).int(),
        scale=torch.from_numpy(scale).int(),
        loss_weight=weights,
        trajectory_ids=tuple(map(str, ends.tolist())),
        trajectory_ends=torch.from_numpy(ends),
        num_tokens=len(ids),
        total_weight=float(weights.sum()),
        tokens_flat=int(scale.sum()),
    )


def _parents(subtree_end: Int64) -> Int64:
    """Return `parent` [T], -1 at roots."""
    # A token follows its parent, unless a subtree ends between them; these are few.
    parent = np.arange(-1, len(subtree_end) - 1)
    open_ends: list[int] = []  # tokens before the last break whose subtree continues
    last = 0
    for token in np.flatnonzero(subtree_end[:-1] == np.arange(1, len(subtree_end))) + 1:
        run = np.arange(last, token)
        open_ends = [k for k in open_ends if subtree_end[k] > token]
        # Of a run of tokens that follow each other, the last one whose subtree continues and its ancestors are enough.
        continuing = run[subtree_end[run] > token]
        open_ends += _borders(continuing, subtree_end)
        parent[token] = max(open_ends) if open_ends else -1
        last = int(token)
    return parent


def _borders(run: Int64, subtree_end: Int64) -> list[int]:
    """Return the last token of each stretch of `run` with equal ends: the only ones that can be parents later."""
    # ends 9 9 7 7 5 -> the second, the fourth and the fifth
    if not len(run):
        return []
    last = np.append(subtree_end[run[1:]] != subtree_end[run[:-1]], True)
    found: list[int] = run[last].tolist()
    return found


@dataclass(frozen=True)
class _Piece:
    """Leaves of one tree that share a row: the last tokens of their paths, and the number of tokens on all of them."""

    row: int
    leaves: Int64
    tokens: int


def planned_rows(folder: Path | None, source: str, capacity: int, rows: list[Batch]) -> list[Batch]:
    """Return the rows of a capacity, planned before or now.

    Raises:
        SystemExit: the plan is missing, and planning without the loops in C would take longer than the benchmark.
    """
    plans = None if folder is None else folder / f"{Path(source).stem}-{capacity}.npz"
    if (plans is None or not plans.exists()) and source != "tiny" and not is_compiled():
        raise SystemExit(
            f"{source}: rows of {capacity} tokens are not planned, and treepack's loops are not compiled here; pass "
            "--plans FOLDER with a plan from another machine, where --plan-only wrote it"
        )
    return cut_rows(rows, capacity, plans=plans)


def cut_rows(rows: list[Batch], capacity: int, *, plans: Path | None = None) -> list[Batch]:
    """Return rows of at most `capacity` tokens with the same trajectories; shared prefixes are repeated.

    Args:
        rows: rows of whole trees.
        capacity: tokens.
        plans: file of the planner's results, which are read if the file exists and written otherwise: planning takes
            many seconds, and time on a GPU counts.

    Raises:
        SystemExit: a sequence is longer than the capacity.
    """
    known: list[Int64] = []
    if plans is not None and plans.exists():
        with np.load(plans) as arrays:
            known = [arrays[name] for name in arrays.files]
    made_plans: list[Int64] = []
    trees = iter(known)
    pieces = [piece for number, row in enumerate(rows) for piece in _pieces(number, row, capacity, trees, made_plans)]
    if plans is not None and not plans.exists():
        plans.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(plans, *made_plans)
    tokens = np.array([piece.tokens for piece in pieces])
    sizes = RowSizes(tokens, tokens, np.ones_like(tokens))
    row_of = merge_rows(sizes, np.zeros(len(pieces), np.int64), RowLimits(capacity))
    made = []
    for number in range(int(row_of.max()) + 1):
        mine = [piece for piece, row in zip(pieces, row_of.tolist(), strict=True) if row == number]
        made.append(_union(number, rows, mine))
    return made


def _pieces(number: int, row: Batch, capacity: int, known: Iterator[Int64], plans: list[Int64]) -> list[_Piece]:
    """Return the parts of a row's trees that fit into `capacity`.

    The row of each leaf comes from `known` plans, in the order of the trees, or from the planner; it is added to
    `plans`.
    """
    end, position = row.subtree_end.numpy().astype(np.int64), row.position_ids.numpy()
    leaves = np.flatnonzero(end == np.arange(1, len(end) + 1))
    roots = np.flatnonzero(row.parent.numpy() < 0)
    if int(position.max()) + 1 > capacity:
        raise SystemExit(f"a sequence has {int(position.max()) + 1:,} tokens, and rows have {capacity:,}")
    found = []
    for first in roots.tolist():
        mine = leaves[(leaves >= first) & (leaves < end[first])]
        if end[first] - first <= capacity:
            found.append(_Piece(number, mine, int(end[first] - first)))
            continue
        plan = next(known, None)
        if plan is None:
            tree = _plan_tree(row, first)
            plan = contiguous(tree, RowLimits(capacity), SearchOptions()).row_of_leaf
            plan = anneal(tree, RowLimits(capacity), plan, steps_per_leaf=STEPS_PER_LEAF)
        assert len(plan) == len(mine), "the plan belongs to a different tree; delete its file"
        plans.append(plan)
        for each in range(int(plan.max()) + 1):
            chosen = mine[plan == each]
            found.append(_Piece(number, chosen, len(_tokens_above(end, chosen))))
    return found


def _plan_tree(row: Batch, first: int) -> PlanTree:
    """Return the tree whose root is the token `first`, in the planner's columns."""
    end = row.subtree_end.numpy().astype(np.int64)[first:] - first
    end = end[: end[0]]
    parent = np.maximum(row.parent.numpy()[first : first + len(end)] - first, -1)
    children = np.bincount(parent[1:], minlength=len(end))
    # A node begins at the root, at a child that has siblings, and nowhere else.
    begins = np.flatnonzero(np.concatenate([[True], children[parent[1:]] > 1]))
    node_of = np.searchsorted(begins, np.arange(len(end)), side="right") - 1
    size = np.diff(np.append(begins, len(end)))
    above = np.where(parent[begins] < 0, -1, node_of[parent[begins]])
    stop = np.searchsorted(begins, end[begins])
    leaf = np.flatnonzero(stop == np.arange(1, len(begins) + 1))
    depth = row.position_ids.numpy()[first:][begins]
    return PlanTree(size, depth, above, stop, leaf, np.ones_like(leaf))


def _tokens_above(end: Int64, leaves: Int64) -> Int64:
    """Return the tokens on the paths to `leaves`, ascending."""
    # A token is on such a path if its subtree contains one of the leaves.
    before = np.concatenate([[0], np.cumsum(np.bincount(leaves, minlength=len(end)))])
    found: Int64 = np.flatnonzero(before[end] > before[:-1])
    return found


def _union(number: int, rows: list[Batch], pieces: list[_Piece]) -> Batch:
    """Return the row of all trajectories that end above the leaves of `pieces`."""
    columns: list[tuple[Int64, Int64, Int64, np.ndarray]] = []
    offset = 0
    for piece in pieces:
        row = rows[piece.row]
        end = row.subtree_end.numpy().astype(np.int64)
        chosen = _tokens_above(end, piece.leaves)
        leaves = np.flatnonzero(end == np.arange(1, len(end) + 1))
        # A trajectory goes to the row of the first leaf that is not before its end.
        own = row.trajectory_ends.numpy()
        own = own[np.isin(leaves[np.searchsorted(leaves, own)], piece.leaves)]
        columns.append((
            row.input_ids.numpy()[chosen],
            # ends 9 3 9 of chosen tokens 0 2 7 -> 3 2 3
            np.searchsorted(chosen, end[chosen]) + offset,
            np.searchsorted(chosen, own) + offset,
            row.loss_weight.numpy()[chosen] > 0,
        ))  # fmt: skip
        offset += len(chosen)
    ids, end, ends, trained = (np.concatenate(values) for values in zip(*columns, strict=True))
    return row_of_columns(number, ids, end, np.sort(ends), trained)
