"""Windows, chunks, sinks, caps and two head dimensions in the Triton kernels, against the float64 reference.

As in test_kernels: Triton's interpreter without a GPU, inputs and gradients are views into buffers of NaN, and
`torch.empty` returns NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from support.attention_trees import chain, comb, random_tree, star
from support.kernel_inputs import surrounded
from support.refusal import refusal
from support.strategies import trees

pytest.importorskip("triton")

from support.interpreter import poison  # noqa: F401
from treepack.attention import autograd
from treepack.attention.autograd import KeptOutputs, backend, triton_attention
from treepack.attention.build_schedule import build_schedule
from treepack.attention.portable import forward as portable
from treepack.attention.reach import KeyReach, first_visible
from treepack.attention.reference import reference_attention
from treepack.errors import TreepackError
from treepack.pack.plan.problem import PlanTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FOREST = torch.cat([random_tree(210, seed=21), comb(70, 70, 2), torch.arange(1, 211)[None].int()])


def draw(
    end: Tensor, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v and sinks as leaves, and the gradient of the output."""
    generator = torch.Generator().manual_seed(sum(dims))
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1])]
    q, k, v, do = (
        surrounded(torch.randn(len(end), count, end.shape[1], width, generator=generator).to(DEVICE, dtype))
        for count, width in shapes
    )
    sinks = torch.randn(heads[0], generator=generator).to(DEVICE, dtype)
    return [x.requires_grad_() for x in (q, k, v, sinks)], do


def check(
    end: Tensor,
    reach: KeyReach | None = None,
    *,
    sinks: bool = False,
    softcap: float | None = None,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (16, 16),
    scale: float = 0.4,
    tolerance: float = 1e-5,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Compare output and every gradient with the reference in float64; return the kernels' results."""
    (q, k, v, sink), do = draw(end, heads, dims, dtype)
    number, start = 4 if sinks else 3, first_visible(end, reach)
    leaves, options = [q, k, v, sink][:number], {"scale": scale, "softcap": softcap}
    schedule = build_schedule(end, start).to(DEVICE)
    out = triton_attention(q, k, v, schedule, sinks=sink if sinks else None, **options)  # type: ignore[arg-type]
    results = [out.detach(), *torch.autograd.grad(out, leaves, do)]

    wide = [x.detach().double().requires_grad_() for x in leaves]
    rows = {"subtree_end": end.to(DEVICE), "start": None if start is None else start.to(DEVICE), **options}
    exact = reference_attention(*wide[:3], sinks=wide[3] if sinks else None, **rows)  # type: ignore[arg-type]
    expected = [exact.detach(), *torch.autograd.grad(exact, wide, do.double())]
    sizes = [yardstick(theirs, do) for theirs in expected]
    if sinks and dtype != torch.float32:
        sizes[4] = size_of_terms(wide, exact.detach() * do.double(), rows)
    for ours, theirs, size in zip(results, expected, sizes, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == dtype
        assert ours.isfinite().all()
        assert float((ours.double() - theirs).norm()) <= tolerance * size
    return results


def yardstick(expected: Tensor, do: Tensor) -> float:
    """Return the size that errors are relative to; the gradients of q and k may cancel to 0, and `do` does not."""
    size, incoming = float(expected.norm()), float(do.double().norm())
    return incoming if size < 1e-6 * incoming else max(size, incoming * 1e-2)


def size_of_terms(wide: list[Tensor], products: Tensor, rows: dict[str, Any]) -> float:
    """Return the size of the numbers that sum to the gradient of the sinks, because their rounding is its error.

    They are p * out * do of every query and element, and p is the share of the sink. `products` is out * do.
    """
    with torch.no_grad():
        # The weights of the keys sum to 1 - p, so values of 1 give outputs of 1 - p.
        q, k, v, sinks = wide
        p = 1 - reference_attention(q, k, torch.ones_like(v), sinks=sinks, **rows)
        # [B, H, T, D_v] -> [H]
        return float((p * products).abs().sum((0, 2, 3)).norm())


@pytest.mark.parametrize(
    "reach",
    [
        KeyReach("window", 1),
        KeyReach("window", 31),
        KeyReach("chunk", 50),
    ],
)
def test_windows_and_chunks(reach: KeyReach) -> None:
    check(FOREST, reach)


def test_a_window_that_no_path_exceeds_changes_no_bit() -> None:
    end = random_tree(140, seed=22)
    assert first_visible(end, KeyReach("window", 140)) is None
    for ours, plain in zip(check(end, KeyReach("window", 140)), check(end), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("end", [chain(300), star(200, 3, 140), star(128, 3, 64), random_tree(129, seed=3)])
@pytest.mark.parametrize("reach", [KeyReach("window", 100)])
def test_windows_that_begin_inside_and_at_the_edges_of_blocks(end: Tensor, reach: KeyReach) -> None:
    assert first_visible(end, reach) is not None
    check(end, reach, heads=(1, 1))


@pytest.mark.parametrize("reach", [None, KeyReach("window", 40)])
@pytest.mark.parametrize(("sinks", "softcap"), [(True, None), (False, 1.5), (True, 1.5)])
def test_sinks_and_caps(reach: KeyReach | None, sinks: bool, softcap: float | None) -> None:
    check(random_tree(150, seed=23), reach, sinks=sinks, softcap=softcap)


def test_sinks_of_grouped_heads_in_a_batch() -> None:
    results = check(FOREST[:2], KeyReach("window", 50), sinks=True, heads=(4, 2))
    assert results[4].shape == (4,)
    assert results[4].abs().min() > 0


def test_a_sink_far_above_every_score_takes_the_whole_softmax_and_far_below_none() -> None:
    end = random_tree(60, seed=24)
    (q, k, v, _), _ = draw(end, (2, 1), (16, 16))
    schedule = build_schedule(end.to(DEVICE))
    plain = triton_attention(q, k, v, schedule)
    low, high = (triton_attention(q, k, v, schedule, sinks=plain.new_full((2,), x)) for x in (-1000.0, 1000.0))
    assert torch.equal(low, plain)
    assert torch.equal(high, torch.zeros_like(plain))


@pytest.mark.parametrize(
    "dims",
    [
        (24, 16),
        (16, 24),
        (192, 128),
        pytest.param((320, 64), marks=pytest.mark.slow),
    ],
)
def test_head_dimensions_of_keys_and_values(dims: tuple[int, int]) -> None:
    check(comb(20, 10, 3), KeyReach("window", 25), sinks=True, heads=(1, 1), dims=dims, scale=0.1)


def test_head_dimension_512() -> None:
    check(comb(10, 6, 3), heads=(1, 1), dims=(512, 512), scale=512**-0.5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_half_precision_is_as_exact_as_its_rounding(dtype: torch.dtype, tolerance: float) -> None:
    end = comb(20, 15, 3)
    check(end, KeyReach("window", 30), sinks=True, softcap=3.0, dims=(24, 16), dtype=dtype, tolerance=tolerance)


@given(trees(max_leaves=8, max_size=30), st.integers(1, 60), st.sampled_from(["window", "chunk"]), st.booleans())
@settings(max_examples=4)
def test_any_tree_and_any_reach(tree: PlanTree, size: int, kind: str, special: bool) -> None:
    starts = np.append(0, tree.size.cumsum())
    end = torch.from_numpy(starts[tree.end].repeat(tree.size))[None]
    assume(end.numel() > 32)
    check(end, KeyReach(kind, size), sinks=special, softcap=2.0 if special else None, dims=(40, 24))


def test_two_runs_agree_in_every_bit() -> None:
    runs = [check(random_tree(140, seed=7), KeyReach("window", 50), sinks=True, softcap=4.0) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_sinks_keep_their_dtype_and_recomputation_skips_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    end = random_tree(60, seed=9)
    (q, k, v, sinks), do = draw(end, (2, 1), (16, 16))
    half = sinks.detach().bfloat16().requires_grad_()
    schedule = build_schedule(end, first_visible(end, KeyReach("window", 20))).to(DEVICE)
    forward, calls = portable.portable_forward, []

    def counted(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return forward(*args, **options)

    monkeypatch.setattr(portable, "portable_forward", counted)
    plain = torch.autograd.grad(triton_attention(q, k, v, schedule, sinks=half), (q, k, v, half), do)
    assert plain[3].dtype == torch.bfloat16

    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return triton_attention(q, k, v, schedule, sinks=sinks, kept=kept)

    kept = (KeptOutputs(), "layer")
    out: Any = checkpoint(layer, q, k, v, half, use_reentrant=False)
    again = torch.autograd.grad(out, (q, k, v, half), do)
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_arguments_that_do_not_fit_are_refused() -> None:
    end = random_tree(40, seed=11)
    (q, k, v, sinks), _ = draw(end, (2, 1), (16, 16))
    schedule = build_schedule(end.to(DEVICE))
    for softcap in (0.0, -1.0, float(np.nan)):
        with pytest.raises(TreepackError, match=r"softcap is .*; expected a positive number"):
            triton_attention(q, k, v, schedule, softcap=softcap)
    assert "sinks are [1]; expected [2], one per query head" in refusal(
        triton_attention, q, k, v, schedule, sinks=sinks[:1]
    )


@pytest.mark.parametrize(
    ("dims", "layer", "expected"),
    [
        ((128, 128), {}, "hopper"),
        ((128, 128), {"capped": True}, "portable"),
        ((192, 128), {}, "hopper"),
        ((256, 256), {"capped": True}, "portable"),
        ((512, 512), {}, "portable"),
        ((64, 128), {}, "portable"),
    ],
)
def test_a_backend_takes_only_layers_that_it_supports(
    monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], layer: dict[str, bool], expected: str
) -> None:
    monkeypatch.setattr(autograd, "has_hopper", lambda device: True)
    query, value = (torch.empty(1, 1, 1, width, dtype=torch.bfloat16, device="meta") for width in dims)
    runs_hopper = autograd.runs_hopper
    monkeypatch.setattr(autograd, "runs_hopper", lambda _, *args: runs_hopper(torch.device("cuda"), *args))
    assert backend(query, value, **layer) == expected
