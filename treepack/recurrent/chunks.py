"""Chunks of tokens, and the order in which the states of a tree are computed: one table per batch of rows.

A node is a stretch of tokens of which each but the last has one child, the next token. All tokens of a node have the
same subtree_end, so a node begins where subtree_end changes. Nodes are divided into chunks of at most 64 tokens, and
every chunk follows the chunk that contains the parent of its first token, unless it begins a tree:

             subtree_end  6 6 4 4 6 6              nodes 0..1, 2..3, 4..5
    0 - 1 - 2 - 3                                  chunks of 2 tokens: 0, 1, 2
         `- 4 - 5                                  parent [-1, 0, 0]

The state before a chunk is the state after its parent. A run is a list of chunks that follow each other, which one
program of a kernel computes. The runs of a stage do not depend on each other, only on earlier stages:

    by levels        a run is a node, a stage has the nodes of one level of the tree
    by heavy paths   a run continues from node to node, always to the child with the largest number of leaves below;
                     1 + log2(leaves) stages at most

A caterpillar of 40 turns has 40 levels and 2 stages of heavy paths; a star has 2 of both, and its levels end sooner.
`plan_stages` chooses the order with the smaller estimate of time.

A tree of one token needs no state and leaves none to others. Padding consists of such trees, so neighbours among them
share chunks; a token sees the tokens before it in its chunk only up to their subtree_end.

In: subtree_end int [B, T] on the CPU or on a GPU. Out: `TokenChunks` of the tokens of all rows, one row after the
other. No Python loop runs over tokens, only over nodes and chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # tokens, as in the kernels of flash-linear-attention
# The time of a launch in steps of one run, and the number of runs that a GPU computes at once. The programs of one run,
# 32 heads with 2 tiles of the state, fill a quarter of an H200, whose 132 multiprocessors hold two programs each.
_LAUNCH_STEPS = 2
_RUNS_AT_ONCE = 4


class RunStage(NamedTuple):
    """Runs that are computed at once.

    chunks    int32 [n], the chunks of all runs, run after run
    begins    int32 [R + 1], index in `chunks` of the first chunk of each run, then of the end
    first     number of the stage's first run among the runs of all stages
    """

    chunks: Tensor
    begins: Tensor
    first: int


@dataclass(frozen=True)
class TokenChunks:
    """Chunks of the N tokens of a batch. There are C chunks of at most `size` tokens, R runs and S saved states.

    size          maximum number of tokens of a chunk
    end           int32 [N], one past the last token of each token's subtree
    begin         int32 [C], first token of each chunk
    length        int32 [C], tokens of each chunk
    parent        int32 [C], the chunk that contains the parent of the first token, -1 for roots
    saved         int32 [C], number of the saved state after the chunk, -1 if no run begins from it
    run_state     int32 [R], number of the saved state that each run begins from, -1 for roots
    state_begins  int32 [S + 1], index in `state_runs` of the first run that begins from each saved state
    state_runs    int32 [...], the runs that begin from each saved state, state after state, in ascending order
    stages        in the order of the forward pass
    """

    size: int
    end: Tensor
    begin: Tensor
    length: Tensor
    parent: Tensor
    saved: Tensor
    run_state: Tensor
    state_begins: Tensor
    state_runs: Tensor
    stages: tuple[RunStage, ...]

    def to(self, device: torch.device) -> TokenChunks:
        """Return the same table on `device`; from pinned memory, without waiting for the copy."""
        if self.end.device == device:
            return self
        moved = {each.name: getattr(self, each.name) for each in fields(self)}
        moved = {name: move(x, device) if isinstance(x, Tensor) else x for name, x in moved.items()}
        stages = [RunStage(move(s.chunks, device), move(s.begins, device), s.first) for s in self.stages]
        return replace(self, **{**moved, "stages": tuple(stages)})


def move(values: Tensor, device: torch.device) -> Tensor:
    """Return `values` on `device`; a GPU receives them from pinned memory, and nothing waits for the copy."""
    if device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def flatten_ends(subtree_end: Tensor) -> Tensor:
    """Return subtree_end [B, T] of all rows as int64 [B * T], one row after the other."""
    # two rows of 3 tokens: [[3, 2, 3], [3, 3, 3]] + [[0], [3]] -> [3, 2, 3, 6, 6, 6]
    rows, length = subtree_end.shape
    offset = torch.arange(rows, device=subtree_end.device)[:, None] * length
    return (subtree_end.long() + offset).flatten()


def find_parents(end: Tensor) -> Tensor:
    """Return the parent of each token, int64 [N], -1 for roots, from one past the last token of each subtree."""
    # In depth-first order the parent is the last token before whose depth is smaller by 1. Sort tokens by depth, then
    # index; the parent of q has the largest key up to (depth - 1) * N + q.
    # end 5 3 3 5 5 -> depths 0 1 2 1 2 -> keys 0 6 8 12 14 of tokens 0 1 3 2 4; q = 4: 1 * 5 + 4 = 9 -> token 3
    count = len(end)
    steps = torch.ones(count + 1, dtype=torch.int64, device=end.device)
    steps[:1] = 0
    steps.scatter_add_(0, end, -torch.ones_like(end))
    depth = steps.cumsum(0)[:count]
    index = torch.arange(count, device=end.device)
    keys, order = (depth * count + index).sort()
    places = torch.searchsorted(keys, (depth - 1) * count + index, right=True) - 1
    return torch.where(depth == 0, -1, order[places.clamp(min=0)])


def build_chunks(subtree_end: Tensor, *, size: int = CHUNK, order: str | None = None) -> TokenChunks:
    """Return the chunks of rows.

    Args:
        subtree_end: int [B, T], one past the last token of each token's subtree. Subtrees nest.
        size: maximum number of tokens of a chunk.
        order: "levels" or "paths" for the order of the states; None for the one that should be faster.
    """
    # On the CPU whatever the caller's default device is.
    with torch.device("cpu"):
        return _build(flatten_ends(subtree_end).cpu(), size, order).to(subtree_end.device)


def _build(end: Tensor, size: int, order: str | None) -> TokenChunks:
    parent = find_parents(end)
    count = len(end)
    index = torch.arange(count)
    # A tree of one token is a root whose subtree ends with it. Neighbours among them form one "node".
    single = (parent < 0) & (end == index + 1)
    starts = torch.ones(count, dtype=torch.bool)
    starts[1:] = (end[1:] != end[:-1]) & ~(single[1:] & single[:-1])
    # Such a "node" is no longer than a chunk: five of them with size 2 begin nodes at 0, 2 and 4.
    since = index - torch.where(starts, index, 0).cummax(0).values if count else index
    starts |= single & (since % size == 0)
    node_begin = starts.nonzero().squeeze(1)
    node_length = torch.diff(node_begin, append=torch.tensor([count]))
    node_chunks = (node_length + size - 1) // size
    # nodes of 3 and 1 tokens with size 2: chunks per node [2, 1], first chunks [0, 2], inside [0, 1, 0]
    node_first = node_chunks.cumsum(0) - node_chunks
    node_of = torch.repeat_interleave(node_chunks)
    inside = torch.arange(len(node_of)) - node_first[node_of]
    begin = node_begin[node_of] + inside * size
    length = torch.minimum(node_length[node_of] - inside * size, torch.tensor(size))
    # The parent of a node's first token is the last token of the parent node, so the parent chunk is its last one.
    token_node = starts.long().cumsum(0) - 1
    above = parent[node_begin]
    node_parent = torch.where(above < 0, -1, token_node[above.clamp(min=0)]) if count else above
    last = node_first + node_chunks - 1
    before_node = torch.where(node_parent < 0, -1, last[node_parent.clamp(min=0)]) if count else node_parent
    previous = torch.where(inside == 0, before_node[node_of], torch.arange(len(node_of)) - 1)
    runs = plan_stages(node_parent.tolist(), node_chunks.tolist(), order)
    table = _number_states(runs, node_first, node_chunks, before_node)
    int32 = {"end": end, "begin": begin, "length": length, "parent": previous, **table.columns}
    tensors = {name: values.to(torch.int32) for name, values in int32.items()}
    return TokenChunks(size=size, stages=table.stages, **tensors)


def plan_stages(parent: list[int], steps: list[int], order: str | None = None) -> list[list[list[int]]]:
    """Return the nodes of every run of every stage.

    Args:
        parent: of each node, smaller than the node, -1 for roots.
        steps: chunks of each node.
        order: "levels", "paths", or None for the one with the smaller estimate of time.
    """
    plans = {"levels": _levels, "paths": _heavy_paths}
    if order is not None:
        return plans[order](parent, steps)
    candidates = [plan(parent, steps) for plan in plans.values()]
    return min(candidates, key=lambda stages: _estimate(stages, steps))


def _estimate(stages: list[list[list[int]]], steps: list[int]) -> float:
    """Return the time of all stages in steps of one run: the longest run of each, or more if there are many runs."""
    total = 0.0
    for runs in stages:
        lengths = [sum(steps[node] for node in run) for run in runs]
        total += _LAUNCH_STEPS + max(max(lengths), sum(lengths) / _RUNS_AT_ONCE)
    return total


def _levels(parent: list[int], steps: list[int]) -> list[list[list[int]]]:
    level: list[int] = []
    stages: list[list[list[int]]] = []
    for node, above in enumerate(parent):
        level.append(0 if above < 0 else level[above] + 1)
        if level[node] == len(stages):
            stages.append([])
        stages[level[node]].append([node])
    return stages


def _heavy_paths(parent: list[int], steps: list[int]) -> list[list[list[int]]]:
    # Chunks below the longest way down would shorten the longest chain, leaves below bound the number of stages.
    leaves = [0] * len(parent)
    heavy = [-1] * len(parent)
    for node in range(len(parent) - 1, -1, -1):  # children come after their parent
        leaves[node] = leaves[node] or 1
        above = parent[node]
        if above >= 0:
            leaves[above] += leaves[node]
            # Not ">": of children with equally many leaves the first one is taken, which the loop meets last.
            if heavy[above] < 0 or leaves[node] >= leaves[heavy[above]]:
                heavy[above] = node
    stages: list[list[list[int]]] = []
    stage_of = [0] * len(parent)
    for node, above in enumerate(parent):
        if above >= 0 and heavy[above] == node:
            stage_of[node] = stage_of[above]
            continue
        stage_of[node] = 0 if above < 0 else stage_of[above] + 1
        if stage_of[node] == len(stages):
            stages.append([])
        run = [node]
        while heavy[run[-1]] >= 0:
            run.append(heavy[run[-1]])
        stages[stage_of[node]].append(run)
    return stages


class _StateTable(NamedTuple):
    columns: dict[str, Tensor]
    stages: tuple[RunStage, ...]


def _number_states(
    plan: list[list[list[int]]], node_first: Tensor, node_chunks: Tensor, before_node: Tensor
) -> _StateTable:
    """Return the columns of `TokenChunks` about runs and saved states."""
    first, count, before = node_first.tolist(), node_chunks.tolist(), before_node.tolist()
    runs = [run for stage in plan for run in stage]
    # Runs from the same chunk share one saved state; states are numbered by their chunk.
    sources = [before[run[0]] for run in runs]
    number = {chunk: i for i, chunk in enumerate(sorted({source for source in sources if source >= 0}))}
    saved = torch.full((sum(count),), -1)
    for chunk, i in number.items():
        saved[chunk] = i
    followers: list[list[int]] = [[] for _ in number]
    for run, source in enumerate(sources):
        if source >= 0:
            followers[number[source]].append(run)
    stages, done = [], 0
    for stage in plan:
        lists = [[c for node in run for c in range(first[node], first[node] + count[node])] for run in stage]
        sizes = torch.tensor([0, *map(len, lists)])
        flat = torch.tensor([c for chunks in lists for c in chunks], dtype=torch.int32)
        stages.append(RunStage(flat, sizes.cumsum(0).to(torch.int32), done))
        done += len(stage)
    columns = {
        "saved": saved,
        "run_state": torch.tensor([number.get(source, -1) for source in sources], dtype=torch.int64),
        "state_begins": torch.tensor([0, *map(len, followers)]).cumsum(0),
        "state_runs": torch.tensor([run for each in followers for run in each], dtype=torch.int64),
    }
    return _StateTable(columns, tuple(stages))
