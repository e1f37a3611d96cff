"""Normalised queries and keys against autograd."""

from __future__ import annotations

import pytest
import torch

from treepack.recurrent.interface import normalise


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_gradient_is_that_of_autograd(scale: float) -> None:
    x = torch.randn(5, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0  # a vector without a direction
    x.requires_grad_()
    dy = torch.randn(5, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = scale * x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    found = normalise(x, scale)
    assert torch.allclose(found, expected, rtol=1e-14, atol=0)
    gradients = [torch.autograd.grad(out, x, dy)[0] for out in (found, expected)]
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


def test_lower_precisions_give_float32() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    y = normalise(x)
    assert y.dtype == torch.float32
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
