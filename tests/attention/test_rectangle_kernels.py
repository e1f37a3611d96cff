"""The Triton kernels on rectangles against the float64 reference, in Triton's interpreter without a GPU.

Inputs and gradients are views into buffers of NaN, and `torch.empty` returns NaN: a query read before the first one, or
a gradient that no program writes, shows in the results.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.attention_trees import comb, forests, random_tree
from support.kernel_inputs import surrounded
from support.refusal import refusal

pytest.importorskip("triton")

from support.interpreter import poison  # noqa: F401
from treepack.attention import KeyReach, first_visible, prepare, reference_attention, tree_attention
from treepack.attention.autograd import triton_attention
from treepack.attention.build_schedule import build_schedule
from treepack.attention.kernel_launch import AttentionInputs, BackwardInputs
from treepack.attention.portable import forward as portable
from treepack.attention.portable.forward import LoopConfigs, PortableConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(
    end: Tensor,
    first: int,
    reach: KeyReach | None = None,
    *,
    special: bool = False,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (16, 16),
) -> list[Tensor]:
    """Compare output and every gradient with the reference in float64; return the kernels' results.

    With `special`, the layer has sinks and a cap.
    """
    generator = torch.Generator().manual_seed(end.shape[1])
    shapes = [
        (heads[0], end.shape[1] - first, dims[0]),
        (heads[1], end.shape[1], dims[0]),
        (heads[1], end.shape[1], dims[1]),
        (heads[0], end.shape[1] - first, dims[1]),
    ]
    q, k, v, do = (surrounded(torch.randn(len(end), *shape, generator=generator).to(DEVICE)) for shape in shapes)
    sinks = torch.randn(heads[0], generator=generator).to(DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)[: 4 if special else 3]]
    options: dict[str, Any] = {"start": first_visible(end.to(DEVICE), reach), "first": first, "scale": 0.4}
    options |= {"softcap": 3.0} if special else {}

    def attend(*x: Tensor, **more: Any) -> Tensor:
        function = tree_attention if more else reference_attention
        row = end.to(DEVICE)
        return function(x[0], x[1], x[2], row, sinks=x[3] if special else None, **options, **more)

    schedule = prepare(end.to(DEVICE), "triton", start=options["start"], first=first)
    out = attend(*leaves, impl="triton", schedule=schedule)
    results = [out.detach(), *torch.autograd.grad(out, leaves, do)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = attend(*wide)
    for ours, theirs in zip(results, [exact.detach(), *torch.autograd.grad(exact, wide, do.double())], strict=True):
        assert ours.shape == theirs.shape
        assert ours.isfinite().all()
        # The gradients of tokens that see only themselves cancel to 0, so small ones are compared with `do`.
        size = max(float(theirs.norm()), float(do.double().norm()) * 1e-2)
        assert float((ours.double() - theirs).norm()) <= 1e-5 * size
    return results


ROW = random_tree(300, seed=31)
WINDOW = KeyReach("window", 70)


@pytest.mark.parametrize(
    ("first", "reach"),
    [
        (0, WINDOW),
        (128, None),
        (128, WINDOW),
        (128, KeyReach("chunk", 50)),
        (133, None),
        (299, WINDOW),
    ],
)
def test_a_rectangle_from_any_token(first: int, reach: KeyReach | None) -> None:
    check(ROW, first, reach)


@pytest.mark.parametrize("reach", [None, KeyReach("window", 60)])
def test_several_rows_grouped_heads_and_all_options(reach: KeyReach | None) -> None:
    end = torch.cat([random_tree(210, seed=32), comb(70, 70, 2), torch.arange(1, 211)[None].int()])
    results = check(end, 128, reach, special=True, heads=(4, 2), dims=(24, 16))
    assert results[4].abs().min() > 0


def test_blocks_and_tiles_smaller_than_those_of_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PortableConfig(32, 32, 4, 1)
    monkeypatch.setitem(portable.FLOAT32, 64, LoopConfigs(config, config, PortableConfig(32, 16, 4, 1)))
    check(random_tree(200, seed=33), 128, KeyReach("window", 60), heads=(1, 1))


def test_a_carried_key_that_no_query_sees_has_no_gradient() -> None:
    # Tokens 128 ... 255 are branches of one token: no query from 256 on sees them.
    end = torch.cat([torch.full((128,), 300), torch.arange(129, 257), torch.full((44,), 300)]).int()[None]
    _, _, dk, dv = check(end, 256)
    assert not dk[:, :, 128:256].any()
    assert not dv[:, :, 128:256].any()
    assert dv[:, :, :128].abs().min() > 0


@given(forests(lengths=[1, 30, 64, 90], max_nodes=6), st.data())
@settings(max_examples=3, deadline=None)
def test_any_tree_from_any_token(end: Tensor, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, end.shape[1] - 1))
    tokens = torch.arange(end.shape[1])
    # If every query sees itself alone, the exact gradients of queries and keys are 0, and only rounding is compared.
    assume(bool(((tokens[:, None] < tokens) & (tokens < end[0][:, None]))[:, first:].any()))
    check(end, first, KeyReach("window", 50) if data.draw(st.booleans()) else None)


@pytest.mark.parametrize("reach", [None, WINDOW])
def test_the_output_of_a_rectangle_has_the_bits_of_the_square(reach: KeyReach | None) -> None:
    q, k, v = torch.randn(3, 1, 1, 300, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    start = first_visible(ROW.to(DEVICE), reach)
    square = tree_attention(q, k, v, ROW.to(DEVICE), impl="triton", start=start)
    for first in (128, 256):
        out = tree_attention(q[:, :, first:], k, v, ROW.to(DEVICE), impl="triton", start=start, first=first)
        assert torch.equal(out, square[:, :, first:])


def test_queries_that_do_not_fit_the_schedule_are_refused() -> None:
    q, k = torch.zeros(1, 1, 170, 16), torch.zeros(1, 1, 300, 16)
    assert "query has 170 tokens, and the schedule has 172, from token 128 on; pass" in refusal(
        triton_attention, q, k, k, build_schedule(ROW, first=128)
    )


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
def test_launches_on_hopper_have_programs_for_the_query_blocks_from_the_first_token_on(dims: tuple[int, int]) -> None:
    hopper = pytest.importorskip("treepack.attention.hopper.launch")
    schedule = build_schedule(ROW.repeat(2, 1), first=128)
    query, out, grad = (torch.zeros(2, 4, 172, d, dtype=torch.bfloat16) for d in (dims[0], dims[1], dims[1]))
    key, value = (torch.zeros(2, 2, 300, d, dtype=torch.bfloat16) for d in dims)
    lse = torch.zeros(2, 4, 256)
    inputs, incoming = AttentionInputs(query, key, value, schedule, 1.0), BackwardInputs(grad, lse, lse)
    launches = [hopper.hopper_forward_launch(inputs, out, lse), hopper.hopper_query_launch(inputs, incoming, query)]
    assert [launch.programs for launch in launches] == [2 * 4 * 2] * 2
    for launch in (*launches, hopper.hopper_key_launch(inputs, incoming, key, value)):
        assert [launch.arguments[name] for name in ("length", "origin", "padded")] == [300, 128, 384]


def test_hopper_reads_keys_in_a_longer_buffer_without_a_copy() -> None:
    hopper = pytest.importorskip("treepack.attention.hopper.launch")
    # [1, places, H_kv, D] -> [1, H_kv, T, D], tokens before heads in memory
    key, value = (torch.zeros(1, 400, 2, 128, dtype=torch.bfloat16)[:, :300].transpose(1, 2) for _ in range(2))
    query = torch.zeros(1, 4, 172, 128, dtype=torch.bfloat16)
    launch = hopper.hopper_forward_launch(
        AttentionInputs(query, key, value, build_schedule(ROW, first=128), 1.0), query, query
    )
    for name, tensor in (("k_descriptor", key), ("v_descriptor", value)):
        assert launch.arguments[name].base.data_ptr() == tensor.data_ptr()
        assert launch.arguments[name].shape[0] == 300, "the copy engine reads zeros after the last token"
