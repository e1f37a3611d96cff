"""The third stage of opening: the ranks that compute a row together or divide experts, and the place of weights.

model, options, rows --rank_needs--> RankNeeds                           before the model is loaded
RankNeeds, free bytes of the smallest rank --choose_division--> values   equal on all ranks, lines for unusual ones

Usually each rank computes different rows, and weights are sharded over all ranks. To share a row costs an exchange in
every layer, whose time is not known before the model is loaded. So the usual way stays, unless the run would be refused
or ranks would be idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.fit.rung import SMALLEST_PIECE
from treepack.memory.device_memory import MemoryMeter
from treepack.memory.model_memory import ModelMemory, WeightCounts, count_weights, memory_of
from treepack.memory.shortage import gib
from treepack.model.adapters.adapter import base_of
from treepack.model.experts.active import stacked_experts
from treepack.model.load import read_config
from treepack.model.stored_weights import stored_kind
from treepack.sequence.share import check_heads
from treepack.train.options import STATE_BYTES, TrainOptions
from treepack.train.ranks import Ranks
from treepack.train.setup.host_memory import host_room
from treepack.train.setup.run_data import RunData

# Share of the free memory that the estimate may take.
_SHARE = 0.9
# Tokens of a row that is worth an exchange in every layer if ranks are idle otherwise: an assumption, not measured.
_LONG = 8192
# Bytes of a weight in the state of a run, and of the whole weight while a rank has it gathered. Trained weights have a
# gradient in both, and AdamW's moments in the state. Rounded ones have 4 bits and scales.
_TRAINED, _FROZEN, _ROUNDED = (16, 8), (4, 4), (0.6, 0.6)
_USUAL: dict[str, Any] = {"sequence_ranks": 1, "expert_ranks": 1}


@dataclass(frozen=True)
class RankNeeds:
    """Bytes that a run needs, and the numbers of ranks that it can use.

    Attributes:
        state: weights, gradients and optimiser of the whole model.
        held: the part of one rank in the usual way.
        moments: those of AdamW in `held`, if they may wait in host memory.
        gathered: whole weights and gradients that a rank has at once: the output layer and two layers.
        experts: the part of `gathered` that belongs to experts.
        whole: all whole weights and gradients, which rows in pieces need; None if rows cannot run in pieces.
        row: returns the bytes of a row of some tokens with all layers recomputed.
        inputs: bytes of a token among them that may wait in host memory.
        longest: tokens of the longest trained row.
        usual: tokens of a usual row.
        rows: rows of a usual step.
        teacher: bytes of a teacher, which every rank has whole.
        sequences: numbers of ranks that can share a row, ascending; never empty.
        divisions: numbers of ranks that can divide the experts, descending.
    """

    state: int
    held: int
    gathered: int
    experts: int
    whole: int | None
    row: Callable[[int], int]
    longest: int
    usual: int
    rows: int
    moments: int = 0
    inputs: int = 0
    teacher: int = 0
    sequences: Sequence[int] = (1,)
    divisions: Sequence[int] = ()

    @property
    def shortest(self) -> int:
        """The bytes of the longest row in the shortest parts: pieces, or shares of all ranks."""
        pieces = SMALLEST_PIECE if self.whole is not None else self.longest
        return self.row(min(pieces, -(-self.longest // self.sequences[-1])))


def choose_ranks(
    model: str | Path, options: TrainOptions, data: RunData, ranks: Ranks, meter: MemoryMeter | None
) -> tuple[TrainOptions, tuple[str, ...]]:
    """Choose the options of several ranks that are "auto"; return lines about unusual ones. All ranks must call this.

    Without a meter, as on a CPU, and in one process these are the usual ones.

    Raises:
        TreepackError: the configuration of the model, or of its teacher, cannot be read.
    """
    auto = [name for name in _USUAL if getattr(options, name) == "auto"]
    values, lines = _USUAL, tuple[str, ...]()
    if auto and ranks.size > 1 and meter is not None:
        free, host = ranks.smallest(meter.free()), ranks.smallest(host_room())
        values, lines = choose_division(rank_needs(model, options, data, ranks), ranks.size, free=free, host=host)
    return replace(options, **{name: values[name] for name in auto}), lines


def choose_division(needs: RankNeeds, size: int, *, free: int, host: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values of `_USUAL` for `size` ranks, and a line for each that is not the usual one.

    Args:
        needs: the needs of the run.
        size: number of ranks.
        free: bytes that the smallest rank may allocate on its GPU.
        host: bytes of host memory that it may use.
    """
    free = max(0, free - needs.teacher)
    values, lines, room, gathered = dict(_USUAL), list[str](), int(_SHARE * free), needs.gathered
    # Tensors that can wait in host memory do not count. The plan decides later, from measurements, if they do.
    moments = needs.moments if needs.moments <= host else 0
    held, row = needs.held - moments, needs.row
    if moments + needs.inputs * needs.longest <= host:
        needs = replace(needs, row=lambda tokens: row(tokens) - needs.inputs * tokens)
    if held + gathered + needs.shortest > room:
        # Each group of ranks that divides the experts has the whole state.
        fitting = [n for n in needs.divisions if needs.state // n + gathered - needs.experts + needs.shortest <= room]
        if fitting:
            values["expert_ranks"], held, gathered = fitting[0], needs.state // fitting[0], gathered - needs.experts
            about = f"experts of two layers have {gib(needs.experts)}, which do not fit on a GPU beside its share"
            lines.append(f"expert-ranks {fitting[0]}: {about}")
    sequence, why = _ranks_of_row(needs, size, room - held - gathered, room - held)
    if sequence > 1 and len(needs.sequences) > 1:
        lines.append(f"sequence-ranks {sequence}: {why}")
    return {**values, "sequence_ranks": sequence}, tuple(lines)


def _ranks_of_row(needs: RankNeeds, size: int, room: int, room_for_pieces: int) -> tuple[int, str]:
    """Return the ranks that share a row, and the reason for several of them.

    `room` are the free bytes beside the weights that a rank has at once, `room_for_pieces` beside its share alone.
    """
    numbers, ranks, why = needs.sequences, needs.sequences[0], ""
    in_pieces = needs.whole is not None and needs.whole + needs.shortest <= room_for_pieces
    if not in_pieces and needs.row(needs.longest) > room > 0:
        fitting = [n for n in numbers if needs.row(-(-needs.longest // n)) <= room]
        ranks = fitting[0] if fitting else numbers[-1]
        bytes_of_row = gib(needs.row(needs.longest))
        why = f"a row of {needs.longest:,} tokens needs {bytes_of_row} on one GPU, of which {gib(room)} is free"
    if needs.usual >= _LONG and size // ranks > needs.rows:
        busy = [n for n in numbers if size // n <= needs.rows]
        if (wider := busy[0] if busy else numbers[-1]) > ranks:
            ranks, why = wider, f"a step has {needs.rows} rows for {size} ranks"
    return ranks, why


def rank_needs(model: str | Path, options: TrainOptions, data: RunData, ranks: Ranks) -> RankNeeds:
    """Return the needs of a run by the configuration of its model, with the values of the options that are given.

    Rows of recurrent layers have no estimate, and count as rows that fit. So do models of unknown cost.

    Raises:
        TreepackError: as `choose_ranks`.
    """
    base, adapter = base_of(model, options.lora)
    whole = read_config(base, options.attention)[0]
    config = whole.get_text_config()
    memory, counts = _estimate(config, base)
    is_stored = stored_kind(whole) is not None and not options.dequantize
    is_rounded = is_stored or (options.lora is not None and bool(options.lora.quantize))
    is_trained = adapter is None and (options.lora is None or options.lora.rank is None)
    of_weight, item = _ROUNDED if is_rounded else _TRAINED if is_trained else _FROZEN
    state = int(counts.total * of_weight)
    shared = options.ranks_of_experts > 1
    moves = is_trained and options.offload_optimizer is not False
    head = counts.ends if config.tie_word_embeddings else counts.ends // 2  # an embedding is gathered for its lookup
    tokens = data.dataset.num_tokens[data.rows]
    sequences, divisions = _numbers_of_ranks(options, config, ranks)
    return RankNeeds(
        state=state,
        held=state // (options.ranks_of_experts if shared else ranks.size),
        moments=STATE_BYTES * counts.total // ranks.size if moves and not shared else 0,
        gathered=int(item * (head + 2 * (counts.layer - (counts.experts if shared else 0)))),
        experts=int(item * 2 * counts.experts),
        whole=int(item * counts.total) if options.carry is not None and options.attention != "flash" else None,
        row=lambda tokens: 0 if memory is None else memory.in_rows(tokens, memory.num_layers) - memory.state,
        inputs=0 if memory is None or options.offload_checkpoints is False else memory.checkpoints,
        longest=data.longest_row,
        usual=int(np.median(tokens)) if len(tokens) else 0,
        rows=int(np.median([len(step.rows) for step in data.schedule])) if data.schedule else ranks.size,
        teacher=_teacher_bytes(options, data.longest_row),
        sequences=sequences,
        divisions=divisions,
    )


def _numbers_of_ranks(options: TrainOptions, config: Any, ranks: Ranks) -> tuple[Sequence[int], Sequence[int]]:
    """Return the numbers of ranks that can share a row, ascending, and that can divide the experts, descending."""
    sequences: Sequence[int] = (options.ranks_of_row,)
    if options.sequence_ranks == "auto":
        local = ranks.size // (ranks.machines or 1)  # of one machine, because they exchange in every layer
        sequences = [n for n in range(1, local + 1) if local % n == 0 and _divides_heads(config, n)]
    num_experts = stacked_experts(config) if options.expert_ranks == "auto" else 0
    numbers = range(ranks.size, 1, -1) if num_experts else ()
    return sequences, tuple(n for n in numbers if ranks.size % n == 0 and num_experts % n == 0)


def _teacher_bytes(options: TrainOptions, longest: int) -> int:
    """Return the bytes of a teacher's weights and, if the loss reads its laws, of its states of the longest row."""
    if options.objective.teacher is None:
        return 0
    base, _ = base_of(options.objective.teacher, None)
    config = read_config(base, options.attention)[0].get_text_config()
    states = config.hidden_size * longest if options.objective.reads_law else 0
    return (2 if options.dtype == "bf16" else 4) * (_estimate(config, base)[1].total + states)


def _estimate(config: Any, name: str) -> tuple[ModelMemory | None, WeightCounts]:
    with suppress(TreepackError):
        memory = memory_of(config.to_dict(), name=name)
        return memory if isinstance(memory, ModelMemory) else None, count_weights(config.to_dict(), name=name)
    return None, WeightCounts()


def _divides_heads(config: Any, size: int) -> bool:
    with suppress(TreepackError):
        check_heads(config, size, "")
        return True
    return False
