"""Outputs of attention over trunk pieces, kept from the push to the pop, whose forward pass then skips the kernel.

Within a budget they stay on the GPU. Beyond it they wait in host memory, and come back a layer ahead of the pop. Beyond
the budget of host memory they are not kept, and the pop computes them again. Log-sum-exps, two numbers per thousand,
stay on the GPU with the outputs of either kind.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal

import torch
from torch import Tensor

from treepack.attention import KeptOutputs
from treepack.attention.autograd import is_recomputing
from treepack.carry.offload import CarryMemory
from treepack.carry.pieces import PiecePass
from treepack.memory.host_pages import CarriedBytes, HostRows, raw

_Location = Literal["gpu", "host", "none"]


class PieceOutputs:
    """The kept outputs of all trunk pieces on the stack."""

    def __init__(self, memory: CarryMemory, num_layers: int) -> None:
        """Start without outputs; the model has `num_layers` layers with attention."""
        self.memory = memory
        # By layer, one row for each place of the stack.
        self.rows: dict[Hashable, HostRows] = {}
        self._num_layers = num_layers
        self._pieces: dict[int, _PushedOutputs] = {}

    @property
    def num_bytes(self) -> CarriedBytes:
        """The bytes of all kept outputs, and of pages."""
        return CarriedBytes(self._used("gpu"), sum(rows.num_bytes for rows in self.rows.values()))

    def push(self, each: PiecePass) -> KeptOutputs:
        """Return where attention keeps its outputs in the push of a piece."""
        self._pieces[each.begin] = _PushedOutputs(self, each.first)
        return self._pieces[each.begin]

    def pop(self, each: PiecePass) -> KeptOutputs | None:
        """Return the kept outputs of a piece; None if its pop computes them again."""
        outputs = self._pieces.get(each.begin)
        return outputs if outputs is not None and outputs.is_full else None

    def leave(self, each: PiecePass) -> None:
        """End a pass: drop the outputs of a popped piece."""
        outputs = self._pieces.get(each.begin)
        if outputs is not None:
            outputs.finish()
            if each.kind == "pop":
                del self._pieces[each.begin]

    def location_of(self, size: int) -> _Location:
        """Return the place of the outputs of the next piece, whose first layer has an output of `size` bytes."""
        budget, need = self.memory.budget, size * self._num_layers
        if budget.outputs is None or self._used("gpu") + need <= budget.outputs:
            return "gpu"
        if budget.host_outputs is None or self._used("host") + need <= budget.host_outputs:
            return "host"
        return "none"

    def _used(self, location: _Location) -> int:
        return sum(each.size * self._num_layers for each in self._pieces.values() if each.location == location)


class _PushedOutputs(KeptOutputs):
    """Outputs and log-sum-exps of one piece by layer.

    Unlike in `KeptOutputs`, they may be taken more than once: by the forward pass of the pop, and by a layer that is
    computed again in its backward pass.
    """

    def __init__(self, pieces: PieceOutputs, first: int) -> None:
        """Start without outputs of the piece at place `first` of the stack."""
        super().__init__()
        self.location: _Location | None = None
        self.size = 0
        self._pieces, self._first = pieces, first
        self._pushed: dict[Hashable, tuple[Tensor | None, Tensor]] = {}
        # Shape and type of an output of a layer, memory [1, n, H, D_v].
        self._shapes: dict[Hashable, tuple[torch.Size, torch.dtype]] = {}
        # Copies on their way, and the tensors that they need.
        self._leaving: tuple[Tensor, Any] | None = None
        self._arriving: dict[Hashable, tuple[Tensor, Any]] = {}

    @property
    def is_full(self) -> bool:
        """True if the outputs of the push are kept."""
        return bool(self._pushed)

    def store(self, place: Hashable, out: Tensor, lse: Tensor) -> None:
        """Keep the output [1, H, n, D_v] and the log-sum-exp of the push at `place`."""
        if self.location is None:
            self.size = out.numel() * out.element_size()
            self.location = self._pieces.location_of(self.size)
        if self.location == "none":
            return
        self._pushed[place] = (out.detach() if self.location == "gpu" else None, lse)
        if self.location == "host":
            dense = out.detach().transpose(1, 2).contiguous()
            self._shapes[place] = dense.shape, dense.dtype
            tokens = raw(dense.view(dense.shape[1], -1))
            rows = self._pieces.rows.setdefault(place, self._pieces.memory.rows(tokens.shape[1]))
            self._await_leaving()
            self._leaving = (dense, rows.write(tokens, self._first))

    def take(self, place: Hashable) -> tuple[Tensor, Tensor] | None:
        """Return the result at `place`; None in the push."""
        result = self._pushed.get(place)
        if result is None:
            return None
        out, lse = result
        # Another tensor of the same memory each time: autograd writes on the one that it gets.
        return (self._fetched(place) if out is None else out.detach()), lse

    def finish(self) -> None:
        """End a pass: let all copies be complete before their memory is free."""
        self._await_leaving()
        for place in list(self._arriving):
            self._await_arriving(place)

    def _fetched(self, place: Hashable) -> Tensor:
        """Return an output from host memory, and start to fetch that of the layer which runs next."""
        self._fetch(place)
        order = list(self._pushed)
        following = order.index(place) + (-1 if is_recomputing() else 1)
        if 0 <= following < len(order):
            self._fetch(order[following])
        return self._await_arriving(place).transpose(1, 2)

    def _fetch(self, place: Hashable) -> None:
        if place not in self._arriving:
            shape, dtype = self._shapes[place]
            dense = torch.empty(shape, dtype=dtype, device=self._pieces.memory.device)
            rows = raw(dense.view(shape[1], -1))
            self._arriving[place] = dense, self._pieces.rows[place].read(rows, self._first)

    def _await_arriving(self, place: Hashable) -> Tensor:
        dense, event = self._arriving.pop(place)
        self._pieces.memory.copies.wait(event)
        return dense

    def _await_leaving(self) -> None:
        if self._leaving is not None:
            self._pieces.memory.copies.wait(self._leaving[1])
            self._leaving = None
