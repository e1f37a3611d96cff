"""The first rung of a run is the first one of a fixed list that fits, and one that ran out of memory gets smaller."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treepack.fit.climb import ClimbInput, RunRoom, RunRows, climb, climb_error
from treepack.fit.pass_memory import ModelProbe, PeakBytes
from treepack.fit.rung import SMALLEST_CHUNK, RunPlan, smaller_plan

GIB, KIB = 1 << 30, 1 << 10
# The shape of Qwen3-1.7B on an H100: 28 layers, 151,936 words, and a chunk of 2,048 targets.
PEAK = PeakBytes(5 * GIB // 2, 2000 * KIB, 400 * KIB)
FUSED = ModelProbe(True, 28, 12 * 151_936, 18_560, PEAK, PEAK, 2.1e-5)
ROWS = RunRows(32_768, 32_768, 262_144)


def probes() -> st.SearchStrategy[ModelProbe]:
    """Probes of models, whose recomputed layers need less memory."""
    return st.builds(
        lambda layers, fixed, more_fixed, kept, share: ModelProbe(
            False,
            layers,
            1_800_000,
            18_560,
            PeakBytes(fixed + more_fixed, kept, kept * share),
            PeakBytes(fixed, kept * 1.1, kept * share * 1.5),
            1e-5,
        ),
        st.integers(1, 40),
        st.integers(0, 20 * GIB),
        st.integers(0, 5 * GIB),
        st.floats(1e3, 4e6),
        st.floats(0.05, 0.7),
    )


@given(
    probe=probes(),
    longest=st.integers(1, 600).map(lambda n: 128 * n),
    step=st.floats(1, 40),
    room=st.integers(0, 90 * GIB),
)
def test_as_few_layers_run_again_as_memory_demands(probe: ModelProbe, longest: int, step: float, room: int) -> None:
    rows = RunRows(longest, longest, int(longest * step))
    given_ = ClimbInput(probe, rows, {"offload_checkpoints": False})
    sizes = sorted({longest, *(n for n in (1024, 2048, 4096, 8192, 16_384, 32_768) if longest < n <= longest * step)})
    fitting = [
        (chunk, layers, tokens)
        for chunk in (2048, 1024, 512, 256)
        for tokens in sizes
        for layers in range(probe.num_layers + 1)
        if probe.pass_bytes(tokens, layers, chunk) <= room
    ]
    plan = climb(given_, RunRoom(room))
    if not fitting:
        assert plan is None
        assert str(climb_error(given_, RunRoom(room))).startswith(f"a row of {longest:,} tokens needs at least")
        return
    assert plan is not None
    # The largest chunk that any number of layers fits, then the fewest layers of passes for which a GPU is fast.
    chunk = max(each[0] for each in fitting)
    same = [each[1:] for each in fitting if each[0] == chunk]
    fast = [each for each in same if each[1] >= 8192] or [each for each in same if each[1] == max(n for _, n in same)]
    layers = min(fast)[0]
    assert (plan.loss_chunk, plan.checkpoint_layers) == (chunk, layers)
    # The step may end between two sizes, and the longest pass then has all of it.
    assert plan.pass_tokens >= max(tokens for count, tokens in fast if count == layers)
    assert plan.num_bytes == probe.pass_bytes(plan.pass_tokens, layers, chunk) <= room


def test_kept_layers_leave_more_memory_free() -> None:
    def layers(gpu: int, spare: int, **changes: object) -> int:
        given = {"loss_chunk": 2048, "offload_checkpoints": False, **changes}
        plan = climb(ClimbInput(FUSED, ROWS, given), RunRoom(gpu * GIB, spare=spare * GIB))
        assert plan is not None
        return plan.checkpoint_layers

    some, more = layers(48, 0), layers(48, 6)
    assert 0 < some < more < 28
    assert more == layers(42, 0)
    least = -(-FUSED.pass_bytes(32_768, 28, 2048) // GIB)
    assert layers(least, 6) == 28, "layers that all run again need nothing more"
    assert layers(48, 6, checkpoint_layers=some) == some, "a given number is kept"
    assert layers(96, 6) == 0


def test_passes_are_shorter_if_that_spares_recomputed_layers() -> None:
    rows = RunRows(2048, 2048, 131_072)
    sizes = [climb(ClimbInput(FUSED, rows), RunRoom(gpu * GIB)) for gpu in (80, 40, 24, 10, 7)]
    found = [(each.pass_tokens, each.checkpoint_layers) for each in sizes if each is not None]
    assert found[:3] == [(32_768, 0), (16_384, 0), (8192, 0)]
    assert found[3][0] == 8192, "a GPU runs shorter passes at a lower rate"
    assert found[3][1] > 0
    assert found[4][0] < 8192


@pytest.mark.parametrize(
    ("gpu", "seconds", "away"),
    [
        (90, 1e-9, False),  # no layer is recomputed
        (24, 1e-9, True),
        (24, 1e-3, False),  # two copies a step take longer than the recomputed layers
        (2, 1e-3, True),  # nothing else fits
    ],
)
def test_moments_wait_in_host_memory_where_that_is_faster(gpu: int, seconds: float, away: bool) -> None:
    room = RunRoom(gpu * GIB, 100 * GIB, 0, 60 * GIB, seconds)
    given: dict[str, Any] = {"offload_checkpoints": False, "loss_chunk": 2048}
    plan = climb(ClimbInput(FUSED, ROWS, given), room)
    assert plan is not None
    assert plan.offload_optimizer == away
    if away:
        alone = climb(ClimbInput(FUSED, ROWS, given), RunRoom((gpu + 60) * GIB))
        assert alone is not None
        assert plan == replace(alone, offload_optimizer=True, seconds=alone.seconds + seconds)
    for value in (True, False):
        kept = climb(ClimbInput(FUSED, ROWS, {**given, "offload_optimizer": value}), RunRoom(90 * GIB))
        assert kept is not None
        assert kept.offload_optimizer == value


def test_rungs_follow_each_other_in_one_order() -> None:
    rows, moved = RunRows(207_104, 207_104, 207_104), 4 * 2048 + 2 * 2048 + 64
    given = ClimbInput(FUSED, rows, carries=True)
    found = [climb(given, RunRoom(gpu * GIB, 200 * GIB, moved)) for gpu in range(460, 0, -1)]
    plans = [each for each in found if each is not None]
    kinds = [
        "pieces" if each.carry else "host" if each.offload_checkpoints else each.loss_chunk if each.loss_chunk < 2048
        else "layers" if each.checkpoint_layers else "all"
        for each in plans
    ]  # fmt: skip
    assert [*dict.fromkeys(kinds)] == ["all", "layers", 1024, 512, 256, "host", "pieces"]
    pieces = [each for each in plans if each.carry]
    assert {each.carry for each in pieces} == {8192, 4096, 2048, 1024}
    assert all(each.pass_tokens == each.carry for each in pieces)
    # Moments leave, but a whole row that fits beside them comes before pieces.
    room = RunRoom(30 * GIB, 300 * GIB, 0, 300 * GIB, 1.0)
    whole, error = climb(given, room), climb_error(given, RunRoom(GIB))
    assert whole is not None
    assert (whole.offload_optimizer, whole.carry) == (True, None)
    assert str(error).startswith("a row of 207,104 tokens needs at least")
    assert "pieces of 1,024 tokens" in str(error)


def test_inputs_in_host_memory_come_before_moments_that_take_longer() -> None:
    # Qwen3-8B with AdamW on an H200: 11.4 GiB are free beside weights, gradients and moments.
    peak = PeakBytes(2 * GIB, 2000 * KIB, 1000 * KIB)
    probe = ModelProbe(True, 36, 12 * 151_936, 4736, peak, peak, 1e-4)
    room = RunRoom(int(11.4 * GIB), 90 * GIB, 25 * KIB, 61 * GIB, 6e-5, spare=6 * GIB)
    plan = climb(ClimbInput(probe, RunRows(32_768, 32_768, 65_536)), room)
    assert plan is not None
    assert (plan.offload_checkpoints, plan.offload_optimizer, plan.carry) == (True, False, None)
    assert (plan.checkpoint_layers, plan.pass_tokens, plan.loss_chunk) == (36, 32_768, 2048)


def test_ranks_with_rows_in_pieces_have_room_for_the_whole_weights() -> None:
    given = ClimbInput(FUSED, ROWS, {"carry": 4096}, carries=True)
    alone = climb(given, RunRoom(20 * GIB))
    ranks = climb(given, RunRoom(40 * GIB, whole=20 * GIB))
    assert alone is not None
    assert ranks == replace(alone, num_bytes=alone.num_bytes + 20 * GIB)
    assert climb(given, RunRoom(20 * GIB, whole=20 * GIB)) is None


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


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint_layers": 5},
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
    plan = climb(ClimbInput(FUSED, ROWS, changes, carries=True), RunRoom(120 * GIB, 200 * GIB, 12_000))
    assert plan is not None
    assert {name: plan.options[name] for name in changes} == changes


def test_options_without_a_plan_are_refused() -> None:
    given = ClimbInput(FUSED, ROWS, {"offload_checkpoints": True})
    assert climb(given, RunRoom(48 * GIB, moved=12_000)) is None, "there is no host memory"
    assert str(climb_error(given, RunRoom(48 * GIB, moved=12_000))).startswith(
        "no plan with these options runs a row of 32,768 tokens with 48.0 GiB"
    )


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
