"""The fourth stage of opening: numbers for the options that are "auto", chosen from measured memory.

    MemoryInput: data, model and options --choose_memory--> MemoryChoices

    carry               tokens of a piece                   piece_choice
    checkpoint_layers   layers that are recomputed          layer_choice, with the longest row or piece
    pass_tokens         tokens of a pass of joined rows     pass_choice, with the layers as chosen

Every choice is a number that all ranks have in common, and no choice changes the result of a run except for rounding.
Options that are numbers already are kept; of these too, the memory that they need is reserved or refused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treepack.carry.offload import CarryMemory
from treepack.train.setup.layer_choice import choose_layers
from treepack.train.setup.memory_input import MemoryInput
from treepack.train.setup.pass_choice import choose_pass_tokens
from treepack.train.setup.piece_choice import choose_pieces


@dataclass(frozen=True)
class MemoryChoices:
    """The options that memory decides, as numbers, the memory of rows in pieces, and notes for the user."""

    carry: int | None
    checkpoint_layers: int | None
    pass_tokens: int
    carry_memory: CarryMemory | None
    notes: tuple[str, ...]

    @property
    def options(self) -> dict[str, Any]:
        """The fields of `TrainOptions` that are chosen."""
        return {name: getattr(self, name) for name in ("carry", "checkpoint_layers", "pass_tokens")}


def choose_memory(given: MemoryInput) -> MemoryChoices:
    """Measure the memory that a run needs, and choose; all ranks must call this.

    Raises:
        TreepackError: memory is too small on any rank, the model cannot run rows in pieces, or layers cannot be
            measured.
    """
    carry, memory, about_pieces = choose_pieces(given)
    layers, about_layers = choose_layers(given, carry)
    tokens, about_passes = choose_pass_tokens(given)
    return MemoryChoices(carry, layers, tokens, memory, (*about_pieces, *about_layers, *about_passes))
