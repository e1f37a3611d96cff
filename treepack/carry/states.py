r"""States and inputs of recurrent layers, carried from piece to piece through additional tokens.

    a piece's tokens, and states after the parents of its roots
        --scan, convolve-->  outputs of the tokens; in a push, states after the tokens on which other pieces hang

A recurrent layer starts each node from the state after its parent. If the parent is in another piece, K tokens in front
of the node write that state [K, V] into it: token i has the i-th unit vector as its key, row i of the state as its
value, a rate of 1 and no decay. K tokens after a token of a trunk piece read the state after it: token i has the i-th
unit vector as its query and writes nothing. So any implementation of the layer computes pieces, and its backward pass
gives the gradients of states. A convolution of W taps gets its last W - 1 inputs in the same way.

    trunk 0 - 1 - 2    piece 0 .. 2, on whose tokens 1 and 2 other pieces hang    w w 0 1 r r 2 r r    (K = 2)
           \   `- 3    piece 3 4, whose tokens hang on 2 and 1                    w w 3 w w 4
            `- 4

The state after a token stays as long as its piece is on the stack: in the dtype of the layer's values, as it is read,
and the sum of its gradients in float32, or in float64 for float64.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from treepack.attention import BatchSchedules
from treepack.carry.pieces import PiecePass, RowPlan
from treepack.recurrent import dispatch
from treepack.recurrent.entry import recurrent_modules
from treepack.trajectory import Int32, Int64


@dataclass(frozen=True)
class _PieceTree:
    """The tree of a piece, in local indices.

    Attributes:
        end: int64 [n], one past the last token of each token's subtree.
        begins: int64 [E], the first token of each entry: neighbouring roots with one parent outside of the piece.
        parents: int64 [E], these parents in the row, -1 for roots of the row.
        exits: int64 [X], the tokens on which other pieces hang.
    """

    end: Int64
    begins: Int64
    parents: Int64
    exits: Int64


def _piece_tree(subtree_end: Int32 | Int64, parent: Int64, exits: Int64, each: PiecePass) -> _PieceTree:
    """Return the tree of the piece of a pass; `exits` are the exits of the row, from `_row_exits`."""
    above = parent[each.begin : each.end]
    roots = np.flatnonzero(above < each.begin)
    # parents of the roots [2 2 1] -> entries at the first and the third root
    first = np.append(True, np.diff(above[roots]) != 0)
    own = exits[(exits >= each.begin) & (exits < each.end)]
    end = np.minimum(subtree_end[each.begin : each.end], each.end) - each.begin
    return _PieceTree(end.astype(np.int64), roots[first], above[roots][first], own - each.begin)


def _row_exits(parent: Int64, plan: RowPlan) -> Int64:
    """Return the tokens of a row on which tokens of other pieces hang, ascending."""
    begins = np.array([each.begin for each in plan.passes if each.kind != "pop"])
    piece = np.searchsorted(begins, np.arange(len(parent)), side="right")
    return np.unique(parent[(parent >= 0) & (piece[parent] != piece)])


@dataclass(frozen=True)
class _PieceLayout:
    """The tokens of a piece with W tokens before each entry and R tokens after each exit, M in total.

    Attributes:
        order: int64 [M], the token at each index: a token of the piece, n + an entry's token, or n + E W + an exit's.
        place: int64 [M], the inverse of `order`.
        schedules: tables of the extended row.
    """

    order: Tensor
    place: Tensor
    schedules: BatchSchedules


def _extend_states(tree: _PieceTree, writes: int, reads: int, device: torch.device) -> _PieceLayout:
    """Return the extended row of a piece, with `writes` tokens before each entry and `reads` after each exit."""
    count = len(tree.end)

    def moved(boundary: Int64) -> Int64:
        # A boundary moves by the tokens of entries and exits before it.
        entries, exits = (np.searchsorted(x, boundary, side="left") for x in (tree.begins, tree.exits))
        return boundary + writes * entries + reads * exits

    tokens = np.arange(count)
    # The tokens of an entry are before its first token.
    own = moved(tokens) + writes * np.isin(tokens, tree.begins)
    written = (moved(tree.begins)[:, None] + np.arange(writes)).ravel()
    read = (own[tree.exits][:, None] + 1 + np.arange(reads)).ravel()
    place = np.concatenate([own, written, read])
    last = moved(np.append(tree.begins[1:], count))
    ends = np.concatenate([moved(tree.end), np.repeat(last, writes), np.repeat(own[tree.exits] + 1 + reads, reads)])
    order = np.empty_like(place)
    order[place] = np.arange(len(place))
    schedules = BatchSchedules(torch.from_numpy(ends[order].astype(np.int32)), device=device)
    return _PieceLayout(torch.from_numpy(order).to(device), torch.from_numpy(place).to(device), schedules)


class CarriedStates:
    """The carried states of all recurrent layers for one row; `interface` calls it instead of `dispatch`."""

    def __init__(self, causal: Any, plan: RowPlan, subtree_end: Int32 | Int64, parent: Int64) -> None:
        """Start without states.

        Args:
            causal: the model of transformers.
            plan: the passes of the row.
            subtree_end: [T] of the row.
            parent: [T] of the row.
        """
        self._switches = follow_layers(causal)
        self._ends, self._parent, self._has_pops = subtree_end, parent, plan.has_pops
        self._exits = _row_exits(parent, plan) if self._switches else np.zeros(0, np.int64)
        self._kept: dict[Hashable, dict[int, _CarriedState]] = {}
        self._layouts: dict[tuple[int, int], _PieceLayout] = {}
        self._now: PiecePass | None = None
        self._tree: _PieceTree | None = None
        self._module: nn.Module | None = None
        self._calls = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of all states and sums of gradients."""
        kept = (x for states in self._kept.values() for state in states.values() for x in (state.value, state.sum))
        return sum(x.numel() * x.element_size() for x in kept if x is not None)

    def enter(self, now: PiecePass) -> None:
        """Start a pass: drop the states of pieces that left the stack."""
        if not self._switches:
            return
        self._now, self._tree = now, _piece_tree(self._ends, self._parent, self._exits, now)
        self._layouts.clear()
        alive = [*((begin, end) for begin, end, _ in now.stack), (now.begin, now.end)]
        for states in self._kept.values():
            for token in [token for token in states if not any(begin <= token < end for begin, end in alive)]:
                del states[token]
        for switch in self._switches:
            switch.states = self

    def leave(self) -> None:
        """End a pass, after its backward if it has one."""
        for switch in self._switches:
            switch.states = None
        self._now = None

    def start(self, module: nn.Module) -> None:
        """Note that a recurrent layer starts to run, for the first time or again."""
        self._module, self._calls = module, 0

    def scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> Tensor:
        """Compute `dispatch.scan` for the tokens of the piece."""
        states, width = self._next_call(), k.shape[-1]
        tree, layout = self._shape(width, width, v.device)
        before, after = len(tree.begins), len(tree.exits)
        unit = torch.eye(width, dtype=k.dtype, device=k.device)[:, None].expand(-1, k.shape[1], -1)
        shape = (width, v.shape[1], v.shape[2])

        def column(own: Tensor, written: Tensor | None, read: Tensor | None) -> Tensor:
            parts = [own]
            for part, number in ((written, before), (read, after)):
                rows = own.new_zeros(width, *own.shape[1:]) if part is None else part.to(own.dtype)
                parts.append(rows.repeat(number, *[1] * (own.ndim - 1)))
            return _permute(torch.cat(parts), layout.order, layout.place)

        entering = self._enter(states, tree, shape, v).flatten(0, 1)
        values = torch.cat([v, entering, v.new_zeros(after * width, *v.shape[1:])])
        rate = None if beta is None else column(beta, torch.ones_like(beta[:1]).expand(width, -1), None)
        out = dispatch.scan(
            column(q, None, unit),
            column(k, unit, None),
            _permute(values, layout.order, layout.place),
            column(g, None, None),
            rate,
            layout.schedules,
        )
        out = _permute(out, layout.place, layout.order)
        tokens, read = out[: len(v)], out[len(v) + before * width :]
        return self._exit(states, tree, tokens, read.reshape(after, *shape))

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """Compute `dispatch.convolve` for the tokens of the piece, [n, C]."""
        states, taps = self._next_call(), weight.shape[-1]
        tree, layout = self._shape(taps - 1, 0, x.device)
        entering = self._enter(states, tree, (taps - 1, x.shape[1]), x)
        exits = torch.from_numpy(tree.exits).to(x.device)
        if len(tree.exits):
            # Only a trunk piece, a chain with one entry, has exits. Its inputs before token t and t itself, 3 taps:
            # places [e e 0 1 2], token 1 -> places 2 and 3
            chain = torch.cat([entering[0], x])
            read = torch.stack([chain.index_select(0, exits + 1 + i) for i in range(taps - 1)], 1)
            x = self._exit(states, tree, x, read)
        columns = _permute(torch.cat([x, entering.flatten(0, 1)]), layout.order, layout.place)
        out = dispatch.convolve(columns, weight, bias, activation, layout.schedules)
        return _permute(out, layout.place, layout.order)[: len(x)]

    def _next_call(self) -> dict[int, _CarriedState]:
        """Return the states of the call that runs now, by token: a layer may have several convolutions."""
        assert self._module is not None, "a function of a recurrent layer ran outside of its layer"
        place = (self._module, self._calls)
        self._calls += 1
        return self._kept.setdefault(place, {})

    def _shape(self, writes: int, reads: int, device: torch.device) -> tuple[_PieceTree, _PieceLayout]:
        assert self._tree is not None
        if (writes, reads) not in self._layouts:
            self._layouts[writes, reads] = _extend_states(self._tree, writes, reads, device)
        return self._tree, self._layouts[writes, reads]

    def _enter(
        self, states: dict[int, _CarriedState], tree: _PieceTree, shape: tuple[int, ...], like: Tensor
    ) -> Tensor:
        """Return the states [E, *shape] that enter the piece, in the dtype of `like`; 0 before roots of the row."""
        entering = [states[parent] if parent >= 0 else None for parent in tree.parents.tolist()]
        zero = like.new_zeros(shape)
        rows = torch.stack([zero if state is None else state.value for state in entering])
        sums = [None if state is None else state.sum for state in entering]
        # A leaf that asks for gradients: the states may need them even if no input of this layer does.
        rows.requires_grad_(torch.is_grad_enabled())
        entered: Tensor = _EnterStates.apply(rows, sums)  # type: ignore[no-untyped-call]
        return entered

    def _exit(self, states: dict[int, _CarriedState], tree: _PieceTree, out: Tensor, read: Tensor) -> Tensor:
        """Keep the states `read` [X, ...] of a push; in a pop, return `out` with the gradients of these states."""
        assert self._now is not None
        tokens = (tree.exits + self._now.begin).tolist()
        if self._now.kind == "push":
            precision = torch.promote_types(read.dtype, torch.float32)
            for token, value in zip(tokens, read.detach().unbind(0), strict=True):
                # A copy, because `read` is a part of all outputs.
                states[token] = _CarriedState(
                    value.clone(), torch.zeros_like(value, dtype=precision) if self._has_pops else None
                )
            return out
        if not tokens:
            return out
        joined: Tensor = _ExitStates.apply(out, read, [states[token].sum for token in tokens])  # type: ignore[no-untyped-call]
        return joined


@dataclass(frozen=True)
class _CarriedState:
    """A state after a token, and the sum of its gradients; None without backward passes."""

    value: Tensor
    sum: Tensor | None


class _EnterStates(torch.autograd.Function):
    """Return `rows`; in the backward, add their gradients to `sums`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sums: list[Tensor | None]) -> Tensor:
        ctx.sums = sums
        return rows.view_as(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        for total, own in zip(ctx.sums, grad.unbind(0), strict=True):
            if total is not None:
                total += own
        return None, None


class _ExitStates(torch.autograd.Function):
    """Return `out`; in the backward, give `read` the gradients `sums`."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, read: Tensor, sums: list[Tensor]) -> Tensor:
        ctx.sums, ctx.dtype = sums, read.dtype
        return out.view_as(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.stack(ctx.sums).to(ctx.dtype), None


class _PermuteRows(torch.autograd.Function):
    """x[order]; its gradient reads each element once, so that nothing is added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.place = place
        return x[order]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.place], None, None


def _permute(x: Tensor, order: Tensor, place: Tensor) -> Tensor:
    permuted: Tensor = _PermuteRows.apply(x, order, place)  # type: ignore[no-untyped-call]
    return permuted


class _LayerHook:
    """A hook of a recurrent layer, which announces its start to the states of the row that runs."""

    def __init__(self) -> None:
        self.states: CarriedStates | None = None

    @_disable_dynamo
    def __call__(self, module: nn.Module, _: Any) -> None:
        if self.states is not None:
            self.states.start(module)


def follow_layers(causal: Any) -> list[_LayerHook]:
    """Put a hook on every recurrent layer of a model, in order, and return the hooks; a second call adds none."""
    hooks = []
    for module in recurrent_modules(causal):
        known: list[Callable[..., Any]] = list(module._forward_pre_hooks.values())
        hook = next((each for each in known if isinstance(each, _LayerHook)), None)
        if hook is None:
            hook = _LayerHook()
            module.register_forward_pre_hook(hook)
        hooks.append(hook)
    return hooks
