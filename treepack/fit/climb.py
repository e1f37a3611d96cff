"""The first rung of a run: the first one of a fixed list that fits into memory, by one measured line.

    ModelProbe, rows, free bytes, given options --climb--> RunPlan       nothing runs here

    1. whole rows, with as few recomputed layers as memory demands; shorter passes if that spares some of them
    2. smaller chunks of logits
    3. inputs of recomputed layers in host memory
    4. rows in pieces: a piece gets a quarter of the memory, and keys, values and outputs the rest (`spare_memory`)

Each of them is tried with the moments of AdamW on the GPU, and in host memory: that costs two copies a step, and is
taken if the layers that it spares cost more, or if nothing fits without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from treepack.carry.pieces import align
from treepack.data.joined import GPU_PASS
from treepack.errors import TreepackError
from treepack.fit.pass_memory import ModelProbe
from treepack.fit.rung import PREFERRED, SMALLEST_PIECE, RunPlan, plan_in_words
from treepack.memory.shortage import gib, shortage
from treepack.model.head.token_loss import CHUNK

# Smaller chunks add up the gradient of the output layer more often.
_CHUNKS = (CHUNK, 1024, 512, 256)
_SMALLEST_PASS = 1024
# Moments in host memory must promise this factor.
_WORTHWHILE = 1.1
# Bytes a second to and from host memory, each way at the same time, cautiously: PCIe 5 has twice as many.
HOST_RATE = 25e9


@dataclass(frozen=True)
class RunRows:
    """The rows of a run on one rank.

    Attributes:
        longest: tokens of the longest trained row, padded.
        longest_of_all: tokens of the longest row, also of held-out rows.
        step_tokens: tokens of the largest step.
        attention: time of the pairs of attention of a token, as a share of the time of its other operations.
    """

    longest: int
    longest_of_all: int
    step_tokens: int
    attention: float = 0.0


@dataclass(frozen=True)
class RunRoom:
    """Free bytes: `gpu` beside weights, gradients and optimiser, and `host`; bytes that a layer's token moves there.

    The `moments` bytes of AdamW may move to host memory too, which costs `moments_seconds` of a token. If some layers
    keep their activations, `spare` more bytes stay free. Rows in pieces gather `whole` bytes of weights and gradients.
    """

    gpu: int
    host: int = 0
    moved: int = 0
    moments: int = 0
    moments_seconds: float = 0.0
    spare: int = 0
    whole: int = 0

    def without_moments(self) -> RunRoom:
        """Return the room when the moments are in host memory."""
        return replace(self, gpu=self.gpu + self.moments, host=self.host - self.moments, moments=0)


@dataclass(frozen=True)
class ClimbInput:
    """Measurements, rows and options from which the first rung is chosen.

    `values` has the options of `rung.PLANNED` without "auto"; its layers are a number. `carries` is True if rows can
    run in pieces.
    """

    probe: ModelProbe
    rows: RunRows
    values: Mapping[str, Any] = field(default_factory=dict)
    carries: bool = False

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunks of logits, the largest first."""
        return (self.values["loss_chunk"],) if "loss_chunk" in self.values else _CHUNKS

    def layers(self, *, offload: bool) -> range:
        """Return the numbers of recomputed layers."""
        given, count = self.values.get("checkpoint_layers"), self.probe.num_layers
        return range(1 if offload else 0, count + 1) if given is None else range(given, given + 1)

    def seconds(self, recomputed: int) -> float:
        """Return the seconds of a token, with its attention, which does not run again."""
        return self.probe.seconds(recomputed) + self.rows.attention * self.probe.seconds_kept


@dataclass(frozen=True)
class PlanForecast:
    """The measurement from which the first plan of a run was chosen.

    `moved` bytes of a layer's token leave the GPU, and `whole` are the bytes of all weights and gradients.
    """

    probe: ModelProbe
    rows: RunRows
    moved: int
    whole: int = 0

    def as_record(self) -> dict[str, Any]:
        """Return the numbers that rows do not have, as JSON values."""
        return {"probe": asdict(self.probe), "moved": self.moved, "whole": self.whole}

    def num_bytes(self, plan: RunPlan, longest: int | None = None) -> int | None:
        """Return the peak of a plan beside weights, gradients and optimiser; None if rows of it run in pieces.

        `longest` is the number of tokens of the longest row, by default of the rows that are trained.
        """
        rows = self.rows if longest is None else replace(self.rows, longest=longest, longest_of_all=longest)
        if plan.carry is not None and rows.longest_of_all > plan.carry:
            return None
        tokens = next(_pass_sizes(rows, plan.pass_tokens))
        moved = self.moved if plan.offload_checkpoints else 0
        whole = self.whole if plan.whole_weights else 0
        return whole + self.probe.pass_bytes(tokens, plan.checkpoint_layers, plan.loss_chunk, moved=moved)


def climb(given: ClimbInput, room: RunRoom) -> RunPlan | None:
    """Return the first rung that fits, or None."""
    found = None
    for away in (False, True) if room.moments else (given.values.get("offload_optimizer", False),):
        room = room.without_moments() if away else room
        plan = next(_rungs(given, room), None)
        if plan is not None:
            copies = room.moments_seconds if away else 0.0
            plan = replace(plan, offload_optimizer=away, seconds=given.seconds(plan.checkpoint_layers) + copies)
            is_whole = found is not None and found.carry is not None and plan.carry is None
            found = plan if found is None or is_whole or _WORTHWHILE * plan.seconds < found.seconds else found
    return found


def _rungs(given: ClimbInput, room: RunRoom) -> Iterator[RunPlan]:
    """Yield the rungs that fit."""
    carry, wanted = given.values.get("carry"), given.values.get("offload_checkpoints")
    if carry is None or given.rows.longest_of_all <= carry:
        for offload in (False, True) if wanted is None else (wanted,):
            for chunk in given.chunks:
                yield from _whole(given, room, chunk, offload=offload)
    if given.carries:
        yield from _pieces(given, room)


def _whole(given: ClimbInput, room: RunRoom, chunk: int, *, offload: bool) -> Iterator[RunPlan]:
    """Yield the plan of whole rows, joined into passes, that fits with the fewest recomputed layers."""
    wanted, fitting = given.values.get("pass_tokens", "auto"), list[RunPlan]()
    for tokens in _pass_sizes(given.rows, wanted):
        if fitting and tokens < PREFERRED:
            break  # a GPU runs shorter passes at a lower rate
        plan = _fewest(given, room, tokens, chunk, offload=offload)
        fitting += [] if plan is None else [plan if wanted == "auto" else replace(plan, pass_tokens=wanted)]
    if fitting:
        yield min(fitting, key=lambda plan: plan.checkpoint_layers)  # the longest pass of equal ones


def _fewest(given: ClimbInput, room: RunRoom, tokens: int, chunk: int, *, offload: bool = False) -> RunPlan | None:
    """Return the plan of passes of some tokens with the fewest recomputed layers, or None."""
    probe, moved, carry = given.probe, room.moved if offload else 0, given.values.get("carry")
    for recomputed in given.layers(offload=offload):
        size = probe.pass_bytes(tokens, recomputed, chunk, moved=moved)
        # Kept activations have many sizes, and FSDP2 gathers weights in separate streams. With less free memory the
        # allocator returns all unused memory to the GPU in every step.
        spare = room.spare if "checkpoint_layers" not in given.values and recomputed < probe.num_layers else 0
        if size + spare <= room.gpu and recomputed * moved * tokens <= room.host:
            return RunPlan(probe.compiled, recomputed, offload, carry, tokens, chunk, size)
    return None


def _pieces(given: ClimbInput, room: RunRoom) -> Iterator[RunPlan]:
    """Yield plans of rows in pieces: long ones first, and in half of the memory if none fits in a quarter."""
    carry = given.values.get("carry")
    sizes = [PREFERRED >> shift for shift in range(PREFERRED.bit_length()) if PREFERRED >> shift >= SMALLEST_PIECE]
    for share in (4, 2):
        own = replace(room, gpu=(room.gpu - room.whole) // share)
        for size in sizes if carry is None else (carry,):
            for chunk in given.chunks if size < given.rows.longest_of_all else ():
                plan = _fewest(given, own, size, chunk)
                if plan is not None:
                    tokens = given.values.get("pass_tokens", size)
                    yield replace(plan, carry=size, pass_tokens=tokens, num_bytes=plan.num_bytes + room.whole)


def _pass_sizes(rows: RunRows, wanted: int | str) -> Iterator[int]:
    """Yield the tokens that the longest pass may have, descending: none is shorter than the longest row."""
    useful = max(rows.longest, align(rows.step_tokens))  # a step has no longer pass
    sizes = [GPU_PASS >> shift for shift in range(GPU_PASS.bit_length()) if GPU_PASS >> shift >= _SMALLEST_PASS]
    each = [*sizes, rows.longest] if wanted == "auto" else [int(wanted)]
    yield from sorted({min(max(rows.longest, size), useful) for size in each}, reverse=True)


def climb_error(given: ClimbInput, room: RunRoom) -> TreepackError:
    """Return the error about rows for which no rung fits, with the smallest rung, and rows that would fit."""
    values, rows, probe, chunk = given.values, given.rows, given.probe, given.chunks[-1]
    room, layers = room.without_moments() if room.moments else room, given.layers(offload=True)[-1]
    offload = values.get("offload_checkpoints", True) and room.moved > 0 and layers > 0
    carry, tokens = None, list(_pass_sizes(rows, values.get("pass_tokens", "auto")))[-1]
    needed = probe.pass_bytes(tokens, layers, chunk, moved=room.moved if offload else 0)
    if given.carries:
        carry = tokens = values.get("carry", SMALLEST_PIECE)
        offload, needed = False, room.whole + 2 * probe.pass_bytes(tokens, layers, chunk)
    if needed <= room.gpu:
        return TreepackError(
            f"no plan with these options runs a row of {rows.longest_of_all:,} tokens with {gib(room.gpu)} of GPU "
            f"memory and {gib(room.host)} of host memory; leave an option out, pack with a smaller --capacity, or "
            "train on more GPUs"
        )
    smallest = RunPlan(probe.compiled, layers, offload, carry, tokens, chunk)
    fitting = [n for n in range(128, rows.longest, 128) if probe.pass_bytes(n, layers, chunk) <= room.gpu]
    capacity = f"pack with --capacity {fitting[-1]}" if fitting else "train with --lora-rank"
    words = f"{gib(needed)} of GPU memory beside weights and optimiser ({plan_in_words(smallest)})"
    subject, remedy = f"a row of {rows.longest:,} tokens", f"{capacity}, or train on more GPUs"
    return TreepackError(shortage(subject, words, gib(max(0, room.gpu)), remedy))
