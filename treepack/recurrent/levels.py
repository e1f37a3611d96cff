"""Scans of trees through flash-linear-attention, level by level: all nodes of one level are sequences of one call.

    0 - 1 - 2 - 3        level 0: node 0 1             cu_seqlens [0, 2]
         `- 4 - 5        level 1: nodes 2 3, 4         cu_seqlens [0, 2, 3]
             `- 6        level 2: nodes 5, 6           cu_seqlens [0, 1, 2]

A node begins from the final state of its parent, which an earlier call has computed. Queries, keys and values are put
in the order of levels once, so that each level is a slice. The functions of the package are written for sequences:
they get `cu_seqlens` and `initial_state`, and return final states with gradients.

    one decay per head, beta       fla.ops.gated_delta_rule.chunk_gated_delta_rule
    one decay per key, beta        fla.ops.kda.chunk_kda
    one decay per head, no beta    fla.ops.simple_gla.chunk_simple_gla      Mamba-2

A level costs the launches of one whole call, and each node a copy of its parent's state, float32 [H, K, V]; so this
suits trees of few levels. Trees of one token, such as padding, need no state: their outputs have a closed form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treepack.errors import TreepackError, install_hint
from treepack.recurrent.chunks import CHUNK, build_chunks, move

# The functions are public, but their arguments change between versions; the tests run with this one.
_VERSION = "0.6.0"


class _SiblingSums(NamedTuple):
    """Sums of the gradients of sibling nodes for their parents, always in the same order.

    halves    int64 [...] for each distance 1, 2, 4, ...: nodes to which the sibling at this distance is added
    first     int64 [m], the first child of each parent; after the additions it has the sum
    """

    halves: tuple[Tensor, ...]
    first: Tensor


class _NodeLevel(NamedTuple):
    """The n nodes of one level.

    bounds         int64 [n + 1], first token of each node within the level, then the number of tokens
    bounds_cpu     the same on the CPU, which spares the package a synchronisation
    chunks         int64 [c, 2], node and number inside the node of each chunk of at most 64 tokens
    parents        int64 [n], number of the parent in the level above, ascending; 0 for roots
    siblings       for the sums over children
    """

    bounds: Tensor
    bounds_cpu: Tensor
    chunks: Tensor
    parents: Tensor
    siblings: _SiblingSums


@dataclass(frozen=True)
class _NodeLevels:
    """The nodes of the N tokens of a batch, level by level.

    order     int64 [N], the tokens of each level, level after level; then the trees of one token
    place     int64 [N], place of each token in `order`
    sizes     number of tokens of each level; then the number of trees of one token
    levels    from the roots on
    """

    order: Tensor
    place: Tensor
    sizes: tuple[int, ...]
    levels: tuple[_NodeLevel, ...]

    def to(self, device: torch.device) -> _NodeLevels:
        """Return the same table on `device`; from pinned memory, without waiting for the copy."""
        if self.order.device == device:
            return self
        levels = []
        for level in self.levels:
            halves = tuple(move(each, device) for each in level.siblings.halves)
            siblings = _SiblingSums(halves, move(level.siblings.first, device))
            bounds, chunks, parents = (move(x, device) for x in (level.bounds, level.chunks, level.parents))
            levels.append(_NodeLevel(bounds, level.bounds_cpu, chunks, parents, siblings))
        return replace(self, order=move(self.order, device), place=move(self.place, device), levels=tuple(levels))


@functools.cache
def obstacle_of_fla(*, vector_decay: bool = False) -> str | None:
    """Return why flash-linear-attention cannot be used on this machine; None if it can. Does not import it.

    Args:
        vector_decay: True for layers with a decay per key dimension.
    """
    installed = _version("fla-core")
    if installed is None:
        return f"needs flash-linear-attention; {install_hint('fla')}"
    if installed != _VERSION:
        return f"needs flash-linear-attention {_VERSION}, and {installed} is installed; {install_hint('fla')}"
    # On Hopper these compilers give wrong gradients in its kernels for one decay per head, and it refuses to run them.
    if not vector_decay and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        triton = _version("triton") or ""
        # "3.6.0" -> (3, 6, 0)
        numbers = tuple(int(each) for each in triton.split("+")[0].split(".") if each.isdigit())
        if (3, 4) <= numbers < (3, 7, 1):
            return f"does not run on Hopper GPUs with Triton {triton}; install triton 3.7.1 or later"
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def build_levels(subtree_end: Tensor) -> _NodeLevels:
    """Return the levels of rows.

    Args:
        subtree_end: int [B, T], one past the last token of each token's subtree. Subtrees nest.
    """
    # On the CPU whatever the caller's default device is.
    with torch.device("cpu"):
        return _build(subtree_end.cpu()).to(subtree_end.device)


def _build(subtree_end: Tensor) -> _NodeLevels:
    count = subtree_end.numel()
    # A chunk as long as all rows holds a whole node.
    nodes = build_chunks(subtree_end, size=max(count, 1), order="levels")
    begin, length, parent = (x.long() for x in (nodes.begin, nodes.length, nodes.parent))
    single = (parent < 0) & (nodes.end[begin].long() == begin + 1)
    number = torch.zeros(len(begin), dtype=torch.int64)  # of each node in its level
    members = []
    for stage in nodes.stages:
        chosen = stage.chunks.long()
        chosen = chosen[~single[chosen]]
        number[chosen] = torch.arange(len(chosen))
        members.append(chosen)
    # Only the level of the roots can be empty, if there are trees of one token only.
    members = [chosen for chosen in members if len(chosen)]
    levels = []
    for chosen in members:
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), length[chosen].cumsum(0)])
        parents = number[parent[chosen].clamp(min=0)]
        levels.append(_NodeLevel(bounds, bounds, _divide(length[chosen]), parents, _pair_siblings(parents)))
    lists = [_tokens(begin[chosen], length[chosen]) for chosen in members]
    lists.append(_tokens(begin[single], length[single]))
    order = torch.cat(lists)
    place = torch.empty_like(order)
    place[order] = torch.arange(count)
    return _NodeLevels(order, place, tuple(len(each) for each in lists), tuple(levels))


def _tokens(begin: Tensor, length: Tensor) -> Tensor:
    """Return the tokens of nodes, node after node: begins [5, 0] and lengths [2, 3] -> [5, 6, 0, 1, 2]."""
    skipped = begin - (length.cumsum(0) - length)
    return torch.repeat_interleave(skipped, length) + torch.arange(int(length.sum()))


def _divide(length: Tensor) -> Tensor:
    """Return node and number inside the node of each chunk: lengths [65, 3] -> [[0, 0], [0, 1], [1, 0]]."""
    counts = (length + CHUNK - 1) // CHUNK
    node = torch.repeat_interleave(counts)
    return torch.stack([node, torch.arange(len(node)) - (counts.cumsum(0) - counts)[node]], 1)


def _pair_siblings(parents: Tensor) -> _SiblingSums:
    """Return the sums over siblings, which are neighbours, because parents ascend."""
    # parents [0, 0, 0, 2] -> ranks [0, 1, 2, 0] of [3, 3, 3, 1] siblings; distance 1: [0], distance 2: [0]
    _, inverse, counts = torch.unique_consecutive(parents, return_inverse=True, return_counts=True)
    first = counts.cumsum(0) - counts
    rank = torch.arange(len(parents)) - first[inverse]
    halves = []
    distance = 1
    while distance < int(counts.max()):
        halves.append(((rank % (2 * distance) == 0) & (rank + distance < counts[inverse])).nonzero().squeeze(1))
        distance *= 2
    return _SiblingSums(tuple(halves), first)


def scan_by_levels(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, levels: _NodeLevels) -> Tensor:
    """Return the outputs o [N, H, V] of the tokens of a tree; arguments as in `twin.scan`, on a GPU.

    q and k get the dtype of `v`, bfloat16, float16 or float32. Products within chunks have its precision, states are
    float32. Outputs and gradients are the same in each run.

    Raises:
        TreepackError: if the package cannot be imported, or if there is a decay per key dimension without `beta`.
    """
    if g.ndim == 3 and beta is None:
        raise TreepackError("recurrent layer: fla takes a decay per key dimension only with beta; compute it by torch")
    q, k = q.to(v.dtype), k.to(v.dtype)
    if beta is None:  # the one function without grouped heads
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    columns = [q, k, v, g] if beta is None else [q, k, v, g, beta]
    # Slices of one split have one backward, which joins their gradients.
    slices = [_ReorderTokens.apply(x, levels.order, levels.place).split(levels.sizes) for x in columns]  # type: ignore[no-untyped-call]
    outputs = []
    states: Tensor | None = None
    for depth, level in enumerate(levels.levels):
        if states is not None:
            states = _InheritStates.apply(states, level.parents, level.siblings)  # type: ignore[no-untyped-call]
        is_last = depth + 1 == len(levels.levels)
        inputs = [each[depth][None] for each in slices]
        out, states = _compute_level(inputs, level, states, not is_last)
        outputs.append(out[0])
    outputs.append(_compute_single(*(each[-1] for each in slices)))
    joined: Tensor = _ReorderTokens.apply(torch.cat(outputs), levels.place, levels.order)  # type: ignore[no-untyped-call]
    return joined


def _compute_single(q: Tensor, k: Tensor, v: Tensor, _: Tensor, beta: Tensor | None = None) -> Tensor:
    """Return the outputs (q k) beta v of trees of one token: before them the state is 0, so nothing decays."""
    precision = torch.promote_types(v.dtype, torch.float32)
    weights = (q.to(precision) * k.to(precision)).sum(-1).repeat_interleave(v.shape[1] // k.shape[1], 1)
    weights = weights if beta is None else weights * beta
    return (weights[..., None] * v).to(v.dtype)


class _ReorderTokens(torch.autograd.Function):
    """x[order], with a gradient that reads each element once, and needs no additions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return gradients[0][place], None, None


class _InheritStates(torch.autograd.Function):
    """Initial states of the nodes of a level from the final states [p, H, K, V] of the level above.

    The gradient of a final state is the sum over the children. index_select would add them in any order on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, parents: Tensor, siblings: _SiblingSums) -> Tensor:
        ctx.save_for_backward(parents)
        ctx.siblings, ctx.count = siblings, len(states)
        return states[parents]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (parents,) = ctx.saved_tensors
        halves, first = ctx.siblings
        total = gradients[0].clone()
        for step, nodes in enumerate(halves):
            total[nodes] += total[nodes + 2**step]
        states = total.new_zeros(ctx.count, *total.shape[1:])
        states[parents[first]] = total[first]
        return states, None, None


def _compute_level(
    inputs: list[Tensor], level: _NodeLevel, states: Tensor | None, has_children: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [1, t, H, V] of a level, and the final states of its nodes, float32 [n, H, K, V], or None.

    Args:
        inputs: q, k, v, g and perhaps beta, [1, t, ...].
        level: of these tokens.
        states: before the nodes, float32 [n, H, K, V]; None for 0.
        has_children: True if there are nodes below, which need the final states.
    """
    g = inputs[3]
    rule = (g.ndim == 4, len(inputs) == 5)
    named = dict(zip(("q", "k", "v", "g", "beta"), inputs, strict=False))
    # The other two functions compute their chunks from the bounds.
    options = {"chunk_indices": level.chunks} if rule == (False, True) else {}
    out, after = _functions()[rule](
        **named,
        scale=1.0,  # q includes it
        initial_state=states,
        output_final_state=has_children,
        cu_seqlens=level.bounds,
        cu_seqlens_cpu=level.bounds_cpu,
        **options,
    )
    return out, after


@functools.cache
def _functions() -> dict[tuple[bool, bool], Callable[..., tuple[Tensor, Tensor | None]]]:
    """Return the functions of flash-linear-attention by (a decay per key dimension, with beta)."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError as error:
        raise TreepackError(f"flash-linear-attention: cannot be imported ({error}); {install_hint('fla')}") from error
    return {(False, True): chunk_gated_delta_rule, (True, True): chunk_kda, (False, False): chunk_simple_gla}
