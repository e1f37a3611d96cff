"""Delta, which the kernels of the backward read, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import support.interpreter  # noqa: F401  (repairs the interpreter)


@pytest.mark.parametrize("width", [80, 128])
def test_delta_is_the_sum_over_the_head_dimension_and_zero_after_the_row(width: int) -> None:
    from treepack.attention.delta import compute_delta

    # [B, H, T, D], with tokens before heads in memory as the forward returns it; T_pad is 128
    made = torch.randn(2, 1, 100, 2, width, generator=torch.Generator().manual_seed(width))
    out, grad = made.bfloat16().transpose(2, 3)
    delta = compute_delta(out, grad, torch.full((1, 2, 128), torch.nan))
    torch.testing.assert_close(delta[..., :100].double(), (out.double() * grad.double()).sum(-1), rtol=1e-5, atol=1e-5)
    assert not delta[..., 100:].any()
    unpadded = compute_delta(out, grad, torch.full((1, 2, 100), torch.nan))
    assert torch.equal(unpadded, delta[..., :100])
