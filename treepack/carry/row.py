"""A packed row in pieces, through the model: the columns of each pass, and the calls.

    Batch, limit --open_row--> CarriedRow        once per row
    for each in row.plan.passes:
        with row.running(each) as piece: ...     `loss` runs the model with `piece` inside the block

A piece is an ordinary row for the model: its tokens and positions, and `subtree_end` of the local row (`pieces`), whose
first places are the stack. Token j is predicted by the piece that has its parent, so only keys and values pass from
piece to piece, no hidden states.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from treepack.attention import BatchSchedules, KeptOutputs, TreePass
from treepack.carry.offload import CarryMemory
from treepack.carry.outputs import PieceOutputs
from treepack.carry.pieces import PiecePass, RowPlan, local_ends, plan_row
from treepack.carry.refusal import check_carry
from treepack.carry.routes import CarriedRoutes
from treepack.carry.stack import CarriedStack
from treepack.carry.states import CarriedStates, follow_layers
from treepack.data.batch import Batch
from treepack.data.transfers import sent
from treepack.memory.host_pages import CarriedBytes
from treepack.model.accept.first_batch import check_positions
from treepack.model.experts.replay import check_routes
from treepack.model.experts.router_balance import places_of_piece
from treepack.model.layers import recomputes
from treepack.model.loaded import LoadedModel
from treepack.model.text_half import check_text
from treepack.trajectory import Int32, Int64


@dataclass(frozen=True)
class PieceRow:
    """One pass, ready for the model.

    Attributes:
        begin: the number of its first token, see `pieces`.
        end: one past the number of its last token.
        batch: its tokens as a row; with `subtree_end` and `schedule` of the local row.
        options: further arguments of the model.
    """

    begin: int
    end: int
    batch: Batch
    options: dict[str, Any]


class CarriedRow:
    """A row on its way through the model in pieces."""

    def __init__(
        self, loaded: LoadedModel, batch: Batch, limit: int, memory: CarryMemory | None, *, with_gradients: bool
    ) -> None:
        """Plan the row; see `open_row`."""
        self.loaded = loaded
        # Padding follows the last token and is never computed.
        self._ends: Int32 = batch.subtree_end[: batch.num_tokens].cpu().numpy()
        self.parent: Int64 = batch.parent[: batch.num_tokens].cpu().numpy()
        # Recurrent layers read states at the ends of chains.
        plan = plan_row(self._ends, self.parent, limit, chains=bool(follow_layers(loaded.causal)))
        self.plan: RowPlan = plan if with_gradients else plan.without_backward()
        # order [0 1 4 2 3] -> numbers [0 1 3 4 2]
        self.numbers: Int64 = np.empty_like(plan.order)
        self.numbers[plan.order] = np.arange(len(plan.order))
        self.batch = batch.to(loaded.device)
        self._order = sent(torch.from_numpy(plan.order), loaded.device)
        memory = CarryMemory(loaded.device) if memory is None else memory
        num_layers = len(loaded.kinds) or loaded.causal.config.get_text_config().num_hidden_layers
        self.stack = CarriedStack(self.plan, memory, num_layers=num_layers, with_gradients=with_gradients)
        self.outputs = PieceOutputs(memory, num_layers)
        self._routes = CarriedRoutes(loaded.causal, self.plan)
        self._states = self.stack.states = CarriedStates(loaded.causal, self.plan, self._ends, self.parent)

        # Most bytes of carried keys, values and sums of gradients, and of kept outputs, until now.
        self.most_bytes = CarriedBytes(0, 0)

    @contextmanager
    def running(self, each: PiecePass) -> Iterator[PieceRow]:
        """Prepare a pass; run the model, and the backward of bundles and pops, inside the block."""
        try:
            self.stack.enter(each)
            self._states.enter(each)
            tokens = self._order[each.begin : each.end]
            with (
                self._routes.running(each),
                places_of_piece(self.loaded.causal, tokens),
                _uncompiled() if each.size == 1 else nullcontext(),
            ):
                yield self._prepare(each)
            others = CarriedBytes(self._routes.num_bytes + self._states.num_bytes, 0)
            self.most_bytes = self.most_bytes.most(self.stack.num_bytes.plus(self.outputs.num_bytes).plus(others))
        finally:
            # After an error too: copies on their way need their memory, and hooks of layers would keep the states.
            self._states.leave()
            self.stack.leave()
            self.outputs.leave(each)

    def _prepare(self, each: PiecePass) -> PieceRow:
        loaded, batch, tokens = self.loaded, self.batch, self._order[each.begin : each.end]
        ends = torch.from_numpy(local_ends(self._ends, self.plan.order, each))
        schedules = BatchSchedules(ends, device=loaded.device, first=each.first)
        for kind in set(loaded.kinds):
            schedules.of(loaded.attention, kind.reach)
        piece = replace(
            batch,
            # Copies: torch.compile makes another version of the layers for a view that starts inside its memory.
            input_ids=batch.input_ids.index_select(0, tokens),
            position_ids=batch.position_ids.index_select(0, tokens),
            subtree_end=sent(ends, loaded.device),
            schedule=schedules,
            routes=None if batch.routes is None else batch.routes.index_select(0, tokens),
        )
        return PieceRow(each.begin, each.end, piece, {"tree_pass": TreePass(self._kept(each), self.stack)})

    def _kept(self, each: PiecePass) -> KeptOutputs | None:
        """Return where attention keeps its outputs in a pass: trunk's until the pop, others until recomputation."""
        if each.kind == "push":
            return self.outputs.push(each) if self.plan.has_pops else None
        pushed = self.outputs.pop(each) if each.kind == "pop" else None
        if pushed is not None:
            return pushed
        return KeptOutputs() if recomputes(self.loaded.causal) else None


def open_row(
    loaded: LoadedModel, batch: Batch, limit: int, *, with_gradients: bool, memory: CarryMemory | None = None
) -> CarriedRow:
    """Return a row that runs in pieces of at most `limit` tokens.

    Args:
        loaded: the model.
        batch: the row, on any device.
        limit: tokens of a piece, at least 1.
        with_gradients: False for one forward pass over every token.
        memory: the budget of carried tensors; None keeps all of them on the model's device.

    Raises:
        TreepackError: the model cannot run rows in pieces, or cannot compute positions of the row exactly.
    """
    check_carry(loaded)
    check_positions(batch.position_ids, loaded.causal, loaded.source)
    check_text(loaded.causal, batch.input_ids, loaded.source)
    if batch.routes is not None:
        check_routes(loaded.causal, loaded.source, batch.routes)
    return CarriedRow(loaded, batch, limit, memory, with_gradients=with_gradients)


def _uncompiled() -> AbstractContextManager[None]:
    """Run compiled layers as they are: torch.compile would make another version of each for a single token."""
    # A model that is compiled has imported the compiler, which takes seconds.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
