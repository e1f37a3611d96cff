"""The plan of a run: the fastest way to run its rows that fits into memory.

    PlanInput (measured bytes and seconds, rows, options), RunRoom --choose_plan--> RunPlan      nothing runs here

A plan is whole rows or rows in pieces, a number of recomputed layers, the tokens of a pass, and compilation. The
candidates are few: all of them are made, and the fastest one that fits is taken. Smaller chunks of logits cost a few
percent, which no probe measures, so they are tried only if nothing fits without them. Host memory for the inputs of
layers is tried only if no whole row fits without it; its copies count as far as the passes are too short to hide them.
Host memory for the moments of AdamW costs two copies a step, so it is taken if that leaves memory for a faster plan,
or for any.

    seconds of a token = max(seconds with n recomputed layers and attention, seconds to start a pass / its tokens)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from treepack.carry.pieces import align
from treepack.data.joined import GPU_PASS
from treepack.errors import TreepackError
from treepack.fit.limit import LARGEST_PIECE, SMALLEST_PIECE, CarryCosts, CarryPlan, choose_limit
from treepack.fit.pass_memory import ModelProbe
from treepack.fit.rung import RunPlan, plan_in_words
from treepack.memory.shortage import gib, shortage
from treepack.train.options import CHUNK, TrainOptions

# Chunks of logits, the first one by default: smaller ones add up the gradient of the output layer more often.
CHUNKS = (CHUNK, 1024, 512, 256)
_SMALLEST_PASS = 1024
# Targets whose logits are in memory while pieces are measured: more would hide the memory of layers in short pieces.
PIECE_LOGITS = 128
# Pieces must promise this factor: copies to host memory and the code between pieces are not in their estimates.
_WORTHWHILE = 1.1
# A plan for a room with less memory left must promise this factor.
_FASTER = 1.05
# Bytes a second to and from host memory, each way at the same time, cautiously: PCIe 5 has twice as many.
HOST_RATE = 25e9
# A forward pass is a third of a forward and backward pass.
_FORWARD = 1 / 3


@dataclass(frozen=True)
class RowCut:
    """A row in pieces of some size.

    Attributes:
        passes: tokens of each pass, and True if it runs backward too.
        states: branch points that have states.
    """

    passes: tuple[tuple[int, bool], ...]
    states: int = 0

    def seconds(self, of_token: float, start: float) -> float:
        """Return the seconds of a token of the row, if a token takes `of_token` and no pass takes less than `start`.

        A short pass takes as long as its start, so the mean of the passes would promise too much.
        """
        each = ((1.0 if backward else _FORWARD) * max(start, of_token * tokens) for tokens, backward in self.passes)
        return sum(each) / max(1, sum(tokens for tokens, backward in self.passes if backward))


@dataclass(frozen=True)
class RunRows:
    """The rows of a run on one rank.

    Attributes:
        longest: tokens of the longest trained row, padded.
        longest_of_all: tokens of the longest row, also of held-out rows.
        longest_path: tokens.
        step_tokens: tokens of the largest step.
        cut: returns the cut of the longest row into pieces of a size.
        attention: time of the pairs of attention of a token, as a share of the time of its other operations.
    """

    longest: int
    longest_of_all: int
    longest_path: int
    step_tokens: int
    cut: Callable[[int], RowCut] = lambda limit: RowCut(((limit, False), (limit, True)))
    attention: float = 0.0


@dataclass(frozen=True)
class RunRoom:
    """Free bytes: `gpu` beside weights, gradients and optimiser, and `host`; bytes that a layer's token moves there.

    The `moments` bytes of AdamW may move to host memory too, which costs `moments_seconds` of a token. If some layers
    keep their activations, `spare` more bytes stay free.
    """

    gpu: int
    host: int = 0
    moved: int = 0
    moments: int = 0
    moments_seconds: float = 0.0
    spare: int = 0

    def without_moments(self) -> RunRoom:
        """Return the room when the moments are in host memory."""
        return replace(self, gpu=self.gpu + self.moments, host=self.host - self.moments, moments=0)


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
        tokens = _pass_sizes(rows, plan.pass_tokens)[0]
        moved = self.moved if plan.offload_checkpoints else 0
        whole = self.whole if plan.whole_weights else 0
        return whole + self.probe.pass_bytes(tokens, plan.checkpoint_layers, plan.loss_chunk, moved=moved)


@dataclass(frozen=True)
class PlanInput:
    """Measurements, rows and options from which the plan of a run is chosen.

    Attributes:
        probes: passes over whole rows, with layers as they are or compiled, or both.
        rows: the rows of the run.
        options: of the run; an option that is not "auto" has the value given.
        pieces: costs of rows in pieces by the number of recomputed layers; none if the model cannot run them.
    """

    probes: Sequence[ModelProbe]
    rows: RunRows
    options: TrainOptions
    pieces: Mapping[int, CarryCosts] = field(default_factory=dict)

    def probe_of(self, plan: RunPlan) -> ModelProbe:
        """Return the probe of the layers of a plan."""
        return next(each for each in self.probes if each.compiled == plan.compile)

    def carry_plan(self, room: RunRoom, costs: CarryCosts) -> CarryPlan:
        """Return the plan of carried tensors of rows in pieces.

        Raises:
            TreepackError: as `choose_limit`.
        """
        longest, path, limit = self.rows.longest_of_all, self.rows.longest_path, self.options.piece_limit
        return choose_limit(longest, path, costs, gpu_bytes=room.gpu, host_bytes=room.host, limit=limit)


def choose_plan(given: PlanInput, room: RunRoom) -> RunPlan:
    """Return the fastest plan that fits.

    Raises:
        TreepackError: no plan fits; the sentence names the smallest one.
    """
    found: RunPlan | None = None
    for away in (False, True) if room.moments else (given.options.offload_optimizer is True,):
        room = room.without_moments() if away else room
        plan, every = _fastest(given, room)
        if plan is not None:
            plan = replace(plan, offload_optimizer=away, seconds=plan.seconds + (room.moments_seconds if away else 0))
            found = plan if found is None or _WORTHWHILE * plan.seconds < found.seconds else found
    if found is not None:
        return found
    if not every and given.pieces:
        # Raises the error that names the bytes of pieces.
        given.carry_plan(room, min(given.pieces.values(), key=lambda costs: costs.piece))
    raise _refusal(min(every, key=lambda plan: plan.num_bytes, default=None), given, room)


def choose_room(given: PlanInput, rooms: Sequence[RunRoom]) -> tuple[RunPlan, RunRoom]:
    """Return the plan for the first room that has one, or for a later one if it is faster, and the room.

    Raises:
        TreepackError: as `choose_plan`, for the last room.
    """
    found: tuple[RunPlan, RunRoom] | None = None
    for room in rooms:
        with suppress(TreepackError):
            plan = choose_plan(given, room)
            if found is None or _FASTER * plan.seconds < found[0].seconds:
                found = plan, room
    return found or (choose_plan(given, rooms[-1]), rooms[-1])


def _fastest(given: PlanInput, room: RunRoom) -> tuple[RunPlan | None, list[RunPlan]]:
    """Return the fastest plan that fits, or None and all plans."""
    every, best, options = list[RunPlan](), list[RunPlan](), given.options
    for offload in (False, True) if options.offload_checkpoints == "auto" else (bool(options.offload_checkpoints),):
        for chunk in CHUNKS if options.loss_chunk == "auto" else (int(options.loss_chunk),):
            plans = list(_plans(given, room, chunk, offload))
            fitting = [plan for plan in plans if plan.num_bytes <= room.gpu]
            if fitting:
                best.append(min(fitting, key=_expected_seconds))  # the first one of equal ones
                break
            every += plans
        if best and best[-1].pieces is None:
            break
    return min(best, key=_expected_seconds, default=None), every


def _expected_seconds(plan: RunPlan) -> float:
    return plan.seconds * (1 if plan.pieces is None else _WORTHWHILE)


def _plans(given: PlanInput, room: RunRoom, chunk: int, offload: bool) -> Iterator[RunPlan]:
    """Yield the candidates: long passes and few recomputed layers first."""
    rows, options, limit = given.rows, given.options, given.options.piece_limit
    in_pieces = options.carry is not None and rows.longest_of_all > (limit or SMALLEST_PIECE) and not offload
    fastest = min(given.probes, key=lambda probe: probe.seconds_kept)
    for probe in given.probes:
        if limit is None or rows.longest <= limit:
            yield from _whole(given, room, probe, chunk, offload)
        if in_pieces and probe is fastest:
            for recomputed in given.pieces:
                yield from _in_pieces(given, room, probe, recomputed, chunk)


def _whole(given: PlanInput, room: RunRoom, probe: ModelProbe, chunk: int, offload: bool) -> Iterator[RunPlan]:
    """Yield plans of whole rows, joined into passes."""
    rows, options = given.rows, given.options
    layers = range(1 if offload else 0, probe.num_layers + 1)
    for tokens in _pass_sizes(rows, options.pass_tokens):
        passed = options.pass_tokens if options.pass_tokens != "auto" else tokens
        for recomputed in layer_counts(options, probe.num_layers, layers):
            size = probe.pass_bytes(tokens, recomputed, chunk, moved=room.moved if offload else 0)
            if offload and recomputed * room.moved * tokens > room.host:
                continue
            # Kept activations have many sizes, and FSDP2 gathers weights in separate streams. With less free memory the
            # allocator returns all unused memory to the GPU in every step.
            keeps = options.checkpoint_layers == "auto" and recomputed < probe.num_layers
            if keeps and room.gpu - room.spare < size <= room.gpu:
                continue
            start = probe.launch / max(1, min(tokens, max(rows.step_tokens, rows.longest)))
            seconds = max(probe.seconds(recomputed) + rows.attention * probe.seconds_kept, start)
            if offload:  # copies away in the forward pass, a quarter of the time; back in the rest
                copy = recomputed * room.moved / HOST_RATE
                seconds = max(seconds / 4, copy) + max(seconds * 3 / 4, copy)
            yield RunPlan(probe.compiled, recomputed, offload, options.piece_limit, int(passed), chunk, size, seconds)


def _in_pieces(given: PlanInput, room: RunRoom, probe: ModelProbe, recomputed: int, chunk: int) -> Iterator[RunPlan]:
    """Yield the plan of rows in pieces with so many recomputed layers, if there is one that fits."""
    rows, options, measured = given.rows, given.options, given.pieces[recomputed]
    fixed, states = measured.fixed + max(0, chunk - PIECE_LOGITS) * probe.logits, 0
    while True:
        costs = replace(measured, fixed=fixed + states)
        try:
            plan = given.carry_plan(room, costs)
        except TreepackError:
            return
        # Shorter pieces have more branch points between them.
        cut = rows.cut(plan.limit)
        if cut.states * costs.state <= states:
            break
        states = cut.states * costs.state
    if plan.limit >= rows.longest_of_all:
        return
    tokens = plan.limit if options.pass_tokens == "auto" else int(options.pass_tokens)
    seconds = cut.seconds(probe.seconds(recomputed) + rows.attention * probe.seconds_kept, probe.launch)
    yield RunPlan(probe.compiled, recomputed, False, plan.limit, tokens, chunk, plan.peak.gpu, seconds, pieces=plan)


def pieces_may_win(plan: RunPlan | None, given: PlanInput) -> bool:
    """Return True if rows in pieces may be faster than the plan of whole rows, or if that is None.

    To measure pieces takes time, because compiled layers are compiled again for them. At best no layer is recomputed
    and a row has two pieces; then only the tokens that run forward twice cost time.
    """
    if plan is None:
        return True
    rows = given.rows
    if plan.checkpoint_layers == 0 or rows.longest_of_all <= 2 * SMALLEST_PIECE:
        return False
    probe = given.probe_of(plan)
    half = min(LARGEST_PIECE, align(rows.longest_of_all // 2))
    return plan.seconds > _WORTHWHILE * rows.cut(half).seconds((1 + rows.attention) * probe.seconds_kept, probe.launch)


def _pass_sizes(rows: RunRows, wanted: int | str) -> list[int]:
    """Return the tokens that the longest pass may have, descending: none is shorter than the longest row."""
    useful = max(rows.longest, align(rows.step_tokens))  # a step has no longer pass
    if wanted != "auto":
        return [max(rows.longest, min(int(wanted), useful))]
    sizes = [GPU_PASS >> shift for shift in range(GPU_PASS.bit_length()) if GPU_PASS >> shift >= _SMALLEST_PASS]
    return sorted({min(max(rows.longest, size), useful) for size in (*sizes, rows.longest)}, reverse=True)


def layer_counts(options: TrainOptions, num_layers: int, auto: Iterable[int]) -> list[int]:
    """Return the numbers of recomputed layers to try: `auto`, or the one that the options name."""
    wanted = options.checkpoint_layers
    if wanted == "all":
        return [num_layers]
    return list(auto) if wanted == "auto" else [int(wanted)]


def _refusal(smallest: RunPlan | None, given: PlanInput, room: RunRoom) -> TreepackError:
    """Return the error that names the smallest plan, and rows that would fit."""
    rows = given.rows
    if smallest is None:
        return TreepackError(
            f"no plan with these options runs a row of {rows.longest_of_all:,} tokens with {gib(room.gpu)} of GPU "
            f"memory and {gib(room.host)} of host memory; leave an option out, pack with a smaller --capacity, or "
            "train on more GPUs"
        )
    probe = given.probe_of(smallest)
    sizes = range(128, rows.longest, 128)
    fitting = bisect_right(
        sizes, room.gpu, key=lambda size: probe.pass_bytes(size, smallest.checkpoint_layers, smallest.loss_chunk)
    )
    tokens = sizes[fitting - 1] if fitting else 0
    capacity = f"pack with --capacity {tokens}" if tokens else "train with --lora-rank"
    needed = f"{gib(smallest.num_bytes)} of GPU memory beside weights and optimiser ({plan_in_words(smallest)})"
    subject, remedy = f"a row of {rows.longest:,} tokens", f"{capacity}, or train on more GPUs"
    return TreepackError(shortage(subject, needed, gib(max(0, room.gpu)), remedy))
