"""Experts that a mixture's routers choose in a push, repeated in the pop of the same piece.

    push    router(states) --> experts of each token, recorded; keys and values of the layers above depend on them
    pop     router(states) --> weights of the recorded experts, with a graph

A pop computes the states of its tokens again. If they round in another way, because a graph was compiled with gradients
and another one without, then a token whose scores are nearly equal moves to another expert. The pieces above have used
keys and values of the first expert, so the pop would get gradients of a different function.

`model.experts.routers` finds the routers. The choices of a router are the indices of every `topk`, and of every `max`
along a dimension (PhiMoE), in the order of the calls. They are repeated by a `gather` at the recorded indices, whose
values and gradients equal `topk`'s if nothing moved.

    scores [[.1, .7, .2]], k = 2    push: values [.7, .2], experts [1, 2]
    scores [[.3, .5, .2]]           pop:  values [.5, .2], experts [1, 2] instead of [1, 0]

Recorded indices take one byte each for up to 256 experts, and stay on the GPU as long as the piece is on the stack: 48
layers with 8 experts of 128 need 384 bytes per trunk token, 0.4 % of the keys and values of Qwen3-30B-A3B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from treepack.carry.pieces import PiecePass, RowPlan
from treepack.errors import TreepackError
from treepack.model.experts.routers import TOPK, follow_routers, scores_of

_MAX = (torch.max, Tensor.max)


class CarriedRoutes:
    """The recorded choices of all trunk pieces of one row."""

    def __init__(self, causal: Any, plan: RowPlan) -> None:
        """Start without choices.

        Args:
            causal: the model of transformers.
            plan: the passes of the row; nothing is recorded if none of them is a pop.
        """
        self._switches = follow_routers(causal) if plan.has_pops else []
        # By the first token of a piece, then by router: one tensor of indices for each choice.
        self._pieces: dict[int, dict[nn.Module, list[Tensor]]] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of all recorded choices."""
        routers = (router for piece in self._pieces.values() for router in piece.values())
        return sum(x.numel() * x.element_size() for choices in routers for x in choices)

    @contextmanager
    def running(self, each: PiecePass) -> Iterator[None]:
        """Record the choices of a push in the block, or repeat them in a pop and its backward."""
        if each.kind == "push":
            recorded: dict[nn.Module, list[Tensor]] | None = self._pieces.setdefault(each.begin, {})
        else:
            recorded = self._pieces.pop(each.begin, None)  # None for a bundle
        for switch in self._switches:
            switch.set("carry", None if recorded is None else _mode(switch.router, recorded, each))
        try:
            yield
        finally:
            for switch in self._switches:
                switch.set("carry", None)


def _mode(
    router: nn.Module, recorded: dict[nn.Module, list[Tensor]], each: PiecePass
) -> Callable[[], _RecordMode] | Callable[[], _RepeatMode]:
    """Return the maker of a router's mode in a push or a pop."""
    if each.kind == "pop":
        return lambda: _RepeatMode(recorded[router])
    return lambda: _record_once(router, recorded)


def _record_once(router: nn.Module, recorded: dict[nn.Module, list[Tensor]]) -> _RecordMode:
    """Return a mode that records the choices of a router, which runs once in a push."""
    if router in recorded:
        raise TreepackError(
            f"carry: {type(router).__name__} runs twice in one forward pass; train this model without --carry"
        )
    return _RecordMode(recorded.setdefault(router, []))


class _RecordMode(TorchFunctionMode):
    """Append the indices of each choice in the block to a list."""

    hides_choices = False

    def __init__(self, choices: list[Tensor]) -> None:
        super().__init__()
        self._choices = choices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        dim = _dim_of_choice(func, args, kwargs or {})
        if dim is not None:
            size = scores_of(args, kwargs or {}).shape[dim]
            self._choices.append(result.indices.to(_index_type(size)))
        return result

    def finish(self, router: nn.Module) -> None:
        """Accept any number of choices."""


class _RepeatMode(TorchFunctionMode):
    """Replace each choice in the block by the recorded one."""

    hides_choices = True

    def __init__(self, choices: list[Tensor]) -> None:
        super().__init__()
        self._choices, self._next = choices, 0

    def finish(self, router: nn.Module) -> None:
        """Check that all choices were repeated."""
        assert self._next == len(self._choices), f"{type(router).__name__} made fewer choices than in the push"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dim = _dim_of_choice(func, args, kwargs or {})
        if dim is None:
            return func(*args, **(kwargs or {}))
        indices = self._choices[self._next].long()
        self._next += 1
        return _choose(func, scores_of(args, kwargs or {}), indices, dim)


def _choose(func: Any, scores: Tensor, indices: Tensor, dim: int) -> Any:
    """Return the result of `func` if it had chosen `indices`."""
    if func in TOPK:
        return torch.return_types.topk((scores.gather(dim, indices), indices))
    if indices.ndim == scores.ndim:
        return torch.return_types.max((scores.gather(dim, indices), indices))
    # max without keepdim: scores [T, E], indices [T] -> [T, 1] -> values [T, 1] -> [T]
    values = scores.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
    return torch.return_types.max((values, indices))


def _dim_of_choice(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> int | None:
    """Return the dimension along which a call chooses; None for a call that does not choose."""
    if func in TOPK:  # topk(scores, k, dim=-1, ...)
        return int(kwargs.get("dim", args[2] if len(args) > 2 else -1))
    if func in _MAX:  # max(scores, dim, keepdim=False), but also max(scores) and max(scores, other)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return dim if isinstance(dim, int) else None
    return None


def _index_type(size: int) -> torch.dtype:
    """Return the smallest type of indices below `size`."""
    if size <= 1 << 8:
        return torch.uint8
    return torch.int16 if size <= 1 << 15 else torch.int32
