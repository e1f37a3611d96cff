"""The plan of a run is the fastest of all candidates that fit, and a plan that ran out of memory gets smaller."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treepack.errors import TreepackError
from treepack.fit.limit import CarryCosts
from treepack.fit.pass_memory import ModelProbe, PeakBytes
from treepack.fit.rung import SMALLEST_CHUNK, RunPlan, smaller_plan
from treepack.train.options import TrainOptions
from treepack.train.setup.run_plan import (
    CHUNKS,
    PlanInput,
    RowCut,
    RunRoom,
    RunRows,
    choose_plan,
    layer_counts,
    pieces_may_win,
)

GIB, KIB = 1 << 30, 1 << 10
AUTO = TrainOptions(device="cpu")
# The shape of Qwen3-1.7B on an H100: 28 layers, 151,936 words, and a chunk of 2,048 targets.
PEAK = PeakBytes(5 * GIB // 2, 3000 * KIB, 450 * KIB)
EAGER = ModelProbe(False, 28, 12 * 151_936, PEAK, PEAK, 3.2e-5, 4.3e-5, 0.06)


def with_peaks(probe: ModelProbe, **changes: Any) -> ModelProbe:
    """Return the probe with other bytes of both peaks."""
    return replace(probe, forward=replace(probe.forward, **changes), backward=replace(probe.backward, **changes))


FUSED = replace(
    with_peaks(EAGER, kept=2000 * KIB, recomputed=400 * KIB),
    compiled=True,
    seconds_kept=2.1e-5,
    seconds_recomputed=2.8e-5,
)
COSTS = CarryCosts(28, 6 * GIB, 2100 * KIB, keys_values=4096, sums=8192, output=4096, lse=64)
ROWS = RunRows(32_768, 32_768, 32_768, 262_144)


def twice(forward: float) -> RowCut:
    """Return the cut of a row whose tokens run forward so many times."""
    return RowCut(((int((forward - 1) * 100_000), False), (100_000, True)))


def probes() -> st.SearchStrategy[ModelProbe]:
    """Probes of models, whose recomputed layers need less memory and more time."""
    return st.builds(
        lambda layers, fixed, more_fixed, kept, share, seconds, more, launch: ModelProbe(
            False,
            layers,
            1_800_000,
            PeakBytes(fixed + more_fixed, kept, kept * share),
            PeakBytes(fixed, kept * 1.1, kept * share * 1.5),
            seconds,
            seconds * more,
            launch,
        ),
        st.integers(1, 40),
        st.integers(0, 20 * GIB),
        st.integers(0, 5 * GIB),
        st.floats(1e3, 4e6),
        st.floats(0.05, 0.7),
        st.floats(1e-6, 1e-3),
        st.floats(1, 1.5),
        st.floats(0, 0.5),
    )


@given(
    probe=probes(),
    compiled=st.none() | st.floats(0.5, 1.2),
    longest=st.integers(1, 600).map(lambda n: 128 * n),
    step=st.floats(1, 40),
    room=st.integers(0, 90 * GIB),
)
def test_the_fastest_plan_that_fits_is_chosen(
    probe: ModelProbe, compiled: float | None, longest: int, step: float, room: int
) -> None:
    every = [probe]
    if compiled is not None:
        half = with_peaks(probe, kept=probe.forward.kept / 2)
        every.append(replace(half, compiled=True, seconds_kept=probe.seconds_kept * compiled))
    rows = RunRows(longest, longest, longest, int(longest * step))
    options = replace(AUTO, offload_checkpoints=False)
    # The oracle: every number of layers with every multiple of 128 tokens, and the largest chunk that any of them fits.
    lengths = sorted({longest, *(n for n in (1024, 2048, 4096, 8192, 16_384, 32_768) if longest < n <= longest * step)})

    def seconds(each: ModelProbe, tokens: int, layers: int) -> float:
        share = layers / each.num_layers
        return max(
            each.seconds_kept * (1 - share) + each.seconds_recomputed * share,
            each.launch / min(tokens, int(longest * step)),
        )

    def fits(each: ModelProbe, tokens: int, layers: int, chunk: int) -> bool:
        return each.pass_bytes(tokens, layers, chunk) <= room

    if not any(fits(each, longest, each.num_layers, CHUNKS[-1]) for each in every):
        with pytest.raises(TreepackError, match=f"^a row of {longest:,} tokens needs at least"):
            choose_plan(PlanInput(every, rows, options), RunRoom(room))
        return
    plan = choose_plan(PlanInput(every, rows, options), RunRoom(room))
    assert plan.num_bytes <= room
    chunk = next(c for c in CHUNKS if any(fits(each, longest, each.num_layers, c) for each in every))
    assert plan.loss_chunk == chunk
    best = min(
        seconds(each, tokens, layers)
        for each in every
        for tokens in lengths
        for layers in range(each.num_layers + 1)
        if fits(each, tokens, layers, chunk)
    )
    assert plan.seconds <= best * (1 + 1e-9)


def test_kept_layers_leave_more_memory_free() -> None:
    def layers(gpu: int, spare: int, **changes: object) -> int:
        room = RunRoom(gpu * GIB, spare=spare * GIB)
        options = replace(AUTO, loss_chunk=2048, offload_checkpoints=False, **changes)  # type: ignore[arg-type]
        return choose_plan(PlanInput([FUSED], ROWS, options), room).checkpoint_layers

    some, more = layers(48, 0), layers(48, 6)
    assert 0 < some < more < 28
    assert more == layers(42, 0)
    least = -(-FUSED.pass_bytes(32_768, 28, 2048) // GIB)
    assert layers(least, 6) == 28, "layers that all run again need nothing more"
    assert layers(48, 6, checkpoint_layers=some) == some, "a given number is kept"
    assert layers(96, 6) == 0


@pytest.mark.parametrize(
    ("gpu", "seconds", "away"),
    [
        (90, 1e-9, False),  # no layer is recomputed, and passes are as long as the row
        (24, 1e-9, True),
        (24, 1e-3, False),  # two copies a step take longer than the recomputed layers
        (2, 1e-3, True),  # nothing else fits
    ],
)
def test_moments_wait_in_host_memory_where_that_is_faster(gpu: int, seconds: float, away: bool) -> None:
    room = RunRoom(gpu * GIB, 100 * GIB, 0, 60 * GIB, seconds)
    options = replace(AUTO, offload_checkpoints=False, loss_chunk=2048)
    plan = choose_plan(PlanInput([FUSED], ROWS, options), room)
    assert plan.offload_optimizer == away
    if away:
        alone = choose_plan(PlanInput([FUSED], ROWS, options), RunRoom((gpu + 60) * GIB))
        assert plan == replace(alone, offload_optimizer=True, seconds=alone.seconds + seconds)
    given = [
        choose_plan(PlanInput([FUSED], ROWS, replace(options, offload_optimizer=n)), RunRoom(90 * GIB))
        for n in (True, False)
    ]
    assert [each.offload_optimizer for each in given] == [True, False]


def test_a_row_longer_than_memory_runs_in_pieces() -> None:
    rows = RunRows(207_104, 207_104, 60_000, 207_104, cut=lambda limit: twice(1.3 if limit < 20_000 else 1.2))
    pieces = {0: COSTS, 28: replace(COSTS, piece=480 * KIB)}
    plan = choose_plan(PlanInput([FUSED], rows, AUTO, pieces), RunRoom(48 * GIB, 200 * GIB))
    assert plan.carry is not None
    assert plan.pieces is not None
    assert plan.carry == plan.pieces.limit == plan.pass_tokens
    assert plan.checkpoint_layers == 0
    # Without pieces the inputs of layers wait in host memory, if it has room for them.
    moved = 4 * 2048 + 2 * 2048 + 64
    whole = choose_plan(PlanInput([FUSED], rows, AUTO), RunRoom(48 * GIB, 200 * GIB, moved))
    assert (whole.offload_checkpoints, whole.carry) == (True, None)
    with pytest.raises(TreepackError, match=r"^a row of 207,104 tokens needs at least .* GiB are free; pack with --ca"):
        choose_plan(PlanInput([FUSED], rows, AUTO), RunRoom(48 * GIB, 0, moved))


def test_a_plan_has_room_for_the_states_of_recurrent_layers() -> None:
    asked: list[int] = []

    def cut(limit: int) -> RowCut:
        # Shorter pieces have more branch points between them.
        asked.append(limit)
        return replace(twice(1.2), states=200_000 // limit)

    rows = RunRows(207_104, 207_104, 60_000, 207_104, cut=cut)
    pieces = {0: replace(COSTS, state=100 << 20)}
    plan = choose_plan(PlanInput([FUSED], rows, AUTO, pieces), RunRoom(48 * GIB, 200 * GIB))
    assert plan.carry is not None
    # The states of the last cut are in the plan, whose pieces have room for the rest.
    states = cut(plan.carry).states * (100 << 20)
    assert plan.num_bytes <= 48 * GIB
    assert plan.num_bytes >= COSTS.fixed + states + plan.carry * COSTS.piece
    assert len(asked) > 1


def test_pieces_are_measured_only_if_they_may_win() -> None:
    def may_win(room: int, forward: float) -> bool:
        rows = replace(ROWS, cut=lambda _: twice(forward))
        return pieces_may_win(
            choose_plan(PlanInput([FUSED], rows, AUTO), RunRoom(room)), PlanInput([FUSED], rows, AUTO)
        )

    assert pieces_may_win(None, PlanInput([FUSED], ROWS, AUTO))
    assert not may_win(90 * GIB, 1.0), "no layer is recomputed"
    assert may_win(30 * GIB, 1.2)
    assert not may_win(30 * GIB, 2.0), "all tokens of the row would run forward twice"


def test_host_memory_for_layers_is_taken_where_no_whole_row_fits_and_pieces_are_slower() -> None:
    # A hybrid model with 248,320 words: 5.7 GiB of logits in 9.4 GiB, of which 4 GiB are states of branch points.
    peak = PeakBytes(GIB // 5, 2300 * KIB, 450 * KIB)
    hybrid = ModelProbe(True, 32, 12 * 248_320, peak, peak, 6.6e-5, 8.8e-5, 0.1)
    rows = replace(ROWS, cut=lambda limit: replace(twice(1.3), states=40 if limit < 32_768 else 0))
    costs = replace(COSTS, fixed=GIB // 2, piece=300 * KIB, state=100 << 20)
    room = RunRoom(int(9.4 * GIB), 200 * GIB, 14 * KIB)
    alone = choose_plan(PlanInput([hybrid], rows, AUTO), room)
    assert alone.offload_checkpoints
    assert not pieces_may_win(alone, PlanInput([hybrid], replace(rows, cut=lambda _: twice(2.0)), AUTO))
    pieces = {32: costs}
    plan = choose_plan(PlanInput([hybrid], rows, AUTO, pieces), room)
    assert (plan.offload_checkpoints, plan.carry) == (True, None)
    assert plan.seconds == hybrid.seconds(plan.checkpoint_layers) > hybrid.seconds_kept
    # Copies of 4.7 MB of a token take 0.19 ms each way, longer than the passes.
    slow = choose_plan(PlanInput([hybrid], rows, AUTO), replace(room, moved=144 * KIB))
    assert slow.seconds == pytest.approx(2 * slow.checkpoint_layers * 144 * KIB / 25e9)
    assert pieces_may_win(slow, PlanInput([hybrid], replace(rows, cut=lambda _: twice(2.0)), AUTO))
    plan = choose_plan(PlanInput([hybrid], rows, AUTO, pieces), replace(room, moved=144 * KIB))
    assert (plan.offload_checkpoints, plan.loss_chunk) == (False, 1024)
    assert plan.carry is not None
    # Whole rows come first, if their logits fit in smaller chunks.
    small = with_peaks(hybrid, recomputed=200 * KIB)
    assert choose_plan(PlanInput([small], rows, AUTO), room).loss_chunk < 2048
    assert not choose_plan(PlanInput([small], rows, AUTO), room).offload_checkpoints


def test_pieces_are_not_taken_if_whole_rows_are_faster() -> None:
    pieces = {0: COSTS}
    rows = replace(ROWS, cut=lambda _: twice(1.9))
    assert choose_plan(PlanInput([FUSED], rows, AUTO, pieces), RunRoom(48 * GIB, GIB)).carry is None
    assert choose_plan(
        PlanInput([FUSED], replace(rows, cut=lambda _: twice(1.01)), AUTO, pieces), RunRoom(48 * GIB, GIB)
    ).carry


def test_kept_layers_keep_the_casts_of_their_weights() -> None:
    probe = replace(FUSED, casts=10 * GIB)
    sizes = [probe.pass_bytes(4096, n, 2048) - FUSED.pass_bytes(4096, n, 2048) for n in (0, 9, 27, 28)]
    assert sizes == pytest.approx([10 * GIB, 10 * GIB * 19 / 28, 10 * GIB / 28, 0], abs=1)


def test_logits_are_free_when_the_layers_run_backward() -> None:
    later = replace(FUSED.backward, fixed=FUSED.forward.fixed + GIB)
    probe = replace(FUSED, backward=later)
    first = [FUSED.pass_bytes(4096, 14, chunk) for chunk in (128, 2048, 8192)]
    assert [b - a for a, b in pairwise(first)] == [1920 * probe.logits, 2048 * probe.logits], "of 4,096 targets"
    assert probe.pass_bytes(4096, 14, 128) == FUSED.pass_bytes(4096, 14, 0) + GIB
    assert probe.pass_bytes(4096, 14, 2048) == FUSED.pass_bytes(4096, 14, 2048), "3.5 GiB of logits"


def test_the_last_layer_to_run_again_needs_its_activations() -> None:
    # A layer keeps 10, or its input of 2; one that runs again needs 7 more than all inputs.
    probe = replace(FUSED, num_layers=4, forward=PeakBytes(0, 40.0, 8.0), backward=PeakBytes(0, 40.0, 15.0))
    assert [probe.pass_bytes(10, n, 0) for n in range(5)] == [400, 320, 240, 160, 150]


def test_short_pieces_take_as_long_as_the_processor_starts_them() -> None:
    # 0.06 s of start at 2.1e-5 s of a token: passes of fewer than 2,857 tokens.
    cut = RowCut(((8000, False), (2000, True), (2000, True), (8000, True)))
    assert cut.seconds(2.1e-5, 0.06) == pytest.approx((8000 * 2.1e-5 / 3 + 2 * 0.06 + 8000 * 2.1e-5) / 12_000)
    pieces = {0: COSTS}
    room, rows = RunRoom(48 * GIB, GIB), replace(ROWS, cut=lambda _: cut)
    assert choose_plan(PlanInput([FUSED], rows, AUTO, pieces), room).carry is None
    assert not pieces_may_win(choose_plan(PlanInput([FUSED], rows, AUTO), room), PlanInput([FUSED], rows, AUTO))


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint_layers": 5},
        {"checkpoint_layers": "all"},
        {"loss_chunk": 300},
        {"pass_tokens": 40_000},
        {"carry": None},
        {"carry": 4096},
        {"carry": 50_000},
        {"offload_checkpoints": True},
    ],
    ids=str,
)
def test_options_that_the_user_gave_are_kept(changes: dict[str, Any]) -> None:
    room = RunRoom(120 * GIB, 200 * GIB, 12_000)
    options = replace(AUTO, **changes)
    pieces = dict.fromkeys(layer_counts(options, 28, (0, 28)), COSTS)
    plan = choose_plan(PlanInput([EAGER, FUSED], ROWS, options, pieces), room)
    expected = {name: 28 if value == "all" else value for name, value in changes.items()}
    assert {name: plan.options[name] for name in changes} == expected


def test_options_without_a_plan_are_refused() -> None:
    with pytest.raises(TreepackError, match=r"^no plan with these options runs a row of 32,768 tokens with 48\.0 GiB"):
        choose_plan(PlanInput([EAGER], ROWS, replace(AUTO, carry=4096)), RunRoom(48 * GIB))


@given(
    layers=st.integers(0, 64),
    done=st.floats(0, 1),
    tokens=st.integers(1, 100_000),
    longest=st.integers(1, 400_000),
    carry=st.none() | st.integers(1024, 60_000),
    can_carry=st.booleans(),
)
def test_plans_get_smaller_until_nothing_is_left(
    layers: int, done: float, tokens: int, longest: int, carry: int | None, can_carry: bool
) -> None:
    plan: RunPlan | None = RunPlan(True, int(done * layers), False, carry, tokens, 2048)
    seen = []
    while plan is not None:
        seen.append(plan)
        plan = smaller_plan(plan, longest, layers, can_carry=can_carry)
        assert len(seen) < 60
    for before, after in pairwise(seen):
        sizes = [(-p.checkpoint_layers, p.pass_tokens, p.carry or longest + 1, p.loss_chunk) for p in (before, after)]
        assert all(small <= large for large, small in zip(*sizes, strict=True))
        assert before != after
    last = seen[-1]
    assert (last.checkpoint_layers, last.loss_chunk) == (layers, SMALLEST_CHUNK)
    assert not can_carry or min(longest, last.carry or longest) < 2304
    # A shorter piece shortens the passes with it, so it is looked for first.
    names = ("checkpoint_layers", "carry", "pass_tokens", "loss_chunk")
    kinds = [next(name for name in names if getattr(a, name) != getattr(b, name)) for a, b in pairwise(seen)]
    order = ("checkpoint_layers", "pass_tokens", "carry", "loss_chunk")
    assert [*dict.fromkeys(kinds)] == [name for name in order if name in kinds], "one kind of step after the other"
