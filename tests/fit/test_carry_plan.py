"""The size of pieces and the memory of carried tensors follow from free bytes, and rows that never fit are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treepack.carry.stack import num_offloaded
from treepack.errors import TreepackError
from treepack.fit.limit import PREFERRED, CarryCosts, choose_limit

GIB = 1 << 30
# Qwen3-1.7B under bfloat16, activations of compiled layers.
QWEN = CarryCosts(28, 2 * GIB, 2_340 << 10, keys_values=4096, sums=8192, output=4096, lse=64)


@given(
    row=st.integers(1, 2_000_000),
    share=st.floats(0.01, 1),
    gpu=st.integers(0, 200 * GIB),
    host=st.integers(0, 300 * GIB),
    limit=st.none() | st.integers(1, 40_000),
)
def test_a_plan_fits_and_a_refusal_says_how_much_is_needed(
    row: int, share: float, gpu: int, host: int, limit: int | None
) -> None:
    path = max(1, int(row * share))
    try:
        plan = choose_limit(row, path, QWEN, gpu_bytes=gpu, host_bytes=host, limit=limit)
    except TreepackError:
        needed = rf"carry: a row of {row:,} tokens, {path:,} of them on one path, needs at least .* [GM]iB are free; "
        with pytest.raises(TreepackError, match=needed):
            choose_limit(row, path, QWEN, gpu_bytes=gpu, host_bytes=host, limit=limit)
        return
    assert plan.peak.gpu <= gpu
    assert plan.peak.host <= host
    if limit is None:
        assert plan.limit % 128 == 0
        assert 1024 <= plan.limit <= 65_536
    else:
        assert plan.limit == limit
    if row > plan.limit:  # the stack offloads the planned number of layers
        carried, own = -(-path // 128) * 128, -(-plan.limit // 128) * 128
        size = (carried + own) * QWEN.keys_values + carried * QWEN.sums
        assert num_offloaded(plan.budget.stack, size, 28) == 28 - plan.resident_layers
        # On the GPU: a piece with its activations, the buffers of layers, and one layer's gradients.
        buffers = min(28, plan.resident_layers + 2) * size
        assert plan.peak.gpu >= QWEN.fixed + min(row, plan.limit) * QWEN.piece + buffers


def test_short_paths_stay_on_the_gpu_and_long_ones_wait_in_host_memory() -> None:
    free = {"gpu_bytes": 100 * GIB, "host_bytes": 100 * GIB}
    short = choose_limit(1_000_000, 32_000, QWEN, **free)
    assert (short.resident_layers, short.keep_outputs, short.peak.host) == (28, True, 0)
    assert short.limit > PREFERRED
    long = choose_limit(400_000, 200_000, QWEN, gpu_bytes=60 * GIB, host_bytes=100 * GIB)
    assert long.limit == PREFERRED
    assert 0 < long.resident_layers < 28
    assert long.peak.host > 0
    whole = choose_limit(5_000, 5_000, QWEN, **free)
    assert (whole.limit, whole.peak.host) == (5_120, 0)


def test_samples_of_200k_tokens_keep_outputs_of_trunk_and_of_350k_compute_them_again() -> None:
    # Of 80 GB, weights, gradients and AdamW of 1.72 billion numbers take 27.5.
    free = {"gpu_bytes": 52 * 10**9, "host_bytes": 100 * 10**9}
    assert choose_limit(200_000, 200_000, QWEN, **free).keep_outputs
    assert not choose_limit(350_000, 350_000, QWEN, **free).keep_outputs


def test_rows_that_do_not_fit_are_refused_with_what_is_missing() -> None:
    with pytest.raises(
        TreepackError, match=r"of GPU memory and 0 MiB of host memory in pieces of 1,024, and 1\.0 GiB "
    ):
        choose_limit(1_000, 1_000, replace(QWEN, fixed=2 * GIB), gpu_bytes=GIB, host_bytes=GIB)
    with pytest.raises(TreepackError, match=r"needs at least 32\.\d GiB of GPU memory and 320\.\d GiB of host memory"):
        choose_limit(10**6, 10**6, QWEN, gpu_bytes=70 * GIB, host_bytes=GIB)
