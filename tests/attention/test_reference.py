"""Tree attention in torch: the dense twin against a walk over parents; flex and plain kernels against the twin."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.attention_trees import comb, random_tree, star
from support.oracle import visible
from support.oracle_model import Sample, make_row, sample_sets, tiny_model
from support.refusal import refusal
from treepack.attention import build_block_mask, flex_attention, register
from treepack.attention import naive as tiles
from treepack.attention.build_schedule import build_schedule
from treepack.attention.flex import BLOCK
from treepack.attention.interface import check_request
from treepack.attention.kernel_launch import AttentionInputs
from treepack.attention.reach import KeyReach, first_visible
from treepack.attention.reference import reference_attention, visible_pairs
from treepack.errors import TreepackError


def random_inputs(length: int, *, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(1, heads, length, 8), (1, kv_heads, length, 8), (1, kv_heads, length, 6)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def dense_from_blocks(mask: Any) -> tuple[Tensor, Tensor]:
    """Return the full and the partial blocks as bool [queries, keys], from the lists that a kernel reads."""
    shape = mask.kv_indices.shape[-2:]
    full, partial = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for into, counts, indices in (
        (partial, mask.kv_num_blocks, mask.kv_indices),
        (full, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for query in range(shape[0]):
            into[query, indices[0, 0, query, : counts[0, 0, query]].long()] = True
    return full, partial


@given(sample_sets())
@settings(max_examples=50, derandomize=True, deadline=None)
def test_a_token_sees_itself_and_its_ancestors(samples: list[Sample]) -> None:
    row = make_row(samples)
    seen = visible_pairs(torch.from_numpy(row.subtree_end)[None])[0]
    for q in range(len(row.parent)):
        assert set(seen[q].nonzero().flatten().tolist()) == visible(row.parent.tolist(), q)


@given(st.integers(1, 700), st.integers(0, 10**6))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_block_lists_cover_every_visible_pair_and_full_blocks_nothing_else(length: int, seed: int) -> None:
    for query_block in (BLOCK, 2 * BLOCK):
        check_blocks(random_tree(length, seed), query_block)


@pytest.mark.parametrize("offset", range(0, BLOCK))
def test_block_lists_are_exact_for_branches_at_every_offset(offset: int) -> None:
    check_blocks(comb(1 + offset, 129, 3), BLOCK)


def check_blocks(end: Tensor, query_block: int) -> None:
    length, mask = end.shape[-1], build_block_mask(end, query_block=query_block)
    full, partial = dense_from_blocks(mask)
    assert not (full & partial).any()
    total = mask.seq_lengths[0]
    assert total % query_block == 0
    assert length <= total < length + query_block
    # The padding of `build_block_mask`: tokens that see only themselves.
    padded = torch.cat([end, torch.arange(length + 1, total + 1, dtype=torch.int32)[None]], dim=1)
    # [T, T] -> [query blocks, queries, key blocks, keys] -> [query blocks, key blocks, pairs]
    blocks = visible_pairs(padded)[0].reshape(total // query_block, query_block, total // BLOCK, BLOCK)
    seen = blocks.transpose(1, 2).flatten(2)
    assert torch.equal(full | partial, seen.any(-1)), "exactly the blocks with a visible pair are listed"
    assert seen[full].all(), "a full block is computed without a mask"
    assert torch.equal(full, seen.all(-1)), "no block is masked needlessly"
    index = torch.arange(total)
    pairs = mask.mask_mod(torch.tensor(0), torch.tensor(0), index[:, None], index)
    assert torch.equal(pairs, visible_pairs(padded)[0])
    transposed = dense_of_columns(mask)
    assert torch.equal(transposed[0], full)
    assert torch.equal(transposed[1], partial)


def dense_of_columns(mask: Any) -> tuple[Tensor, Tensor]:
    """Return `dense_from_blocks`, from the lists of query blocks that the backward kernel reads."""
    keys, queries = mask.q_indices.shape[-2:]
    masks = []
    for counts, indices in ((mask.full_q_num_blocks, mask.full_q_indices), (mask.q_num_blocks, mask.q_indices)):
        dense = torch.zeros(queries, keys, dtype=torch.bool)
        for key in range(keys):
            dense[indices[0, 0, key, : counts[0, 0, key]].long(), key] = True
        masks.append(dense)
    return masks[0], masks[1]


@given(sample_sets())
@settings(max_examples=20, derandomize=True, deadline=None)
def test_reference_is_attention_over_ancestors(samples: list[Sample]) -> None:
    row = make_row(samples)
    q, k, v = random_inputs(len(row.parent))
    out = reference_attention(q, k, v, torch.from_numpy(row.subtree_end)[None], scale=0.3)
    for token in range(len(row.parent)):
        seen = sorted(visible(row.parent.tolist(), token))
        for head in range(4):
            scores = k[0, head // 2, seen] @ q[0, head, token] * 0.3
            torch.testing.assert_close(out[0, head, token], scores.softmax(0) @ v[0, head // 2, seen])


@pytest.mark.parametrize("queries", [1, 7, 64])
def test_reference_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    end, (q, k, v) = random_tree(150, seed=2), random_inputs(150)
    results = []
    for size in (150, queries):
        monkeypatch.setattr("treepack.attention.reference.QUERIES", size)
        out = reference_attention(q, k, v, end)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for whole, blocks in zip(*results, strict=True):
        torch.testing.assert_close(blocks, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [1, 17, 128, 129, 300])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_flex_is_the_reference_in_output_and_every_gradient(length: int, scale: float | None) -> None:
    end = random_tree(length, seed=length)
    inputs = random_inputs(length)
    weight = torch.randn(1, 4, length, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = reference_attention(*inputs, end, scale=scale)
    out = flex_attention(*inputs, end, scale=scale, block_mask=build_block_mask(end))
    pairs = zip(
        (out, *torch.autograd.grad((out * weight).sum(), inputs)),
        (expected, *torch.autograd.grad((expected * weight).sum(), inputs)),
        strict=True,
    )
    for ours, theirs in pairs:
        assert (ours - theirs).norm() <= 1e-12 * max(theirs.norm(), 1e-3)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_flex_has_the_same_gradients_when_it_is_computed_again_in_the_backward_pass(softcap: float | None) -> None:
    end = random_tree(130, seed=1)

    def gradients(recompute: bool) -> tuple[Tensor, ...]:
        inputs = random_inputs(130)

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (flex_attention(q, k, v, end, softcap=softcap).tanh() ** 2).exp()

        out = checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
        return torch.autograd.grad(out.sum(), inputs)

    for again, once in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(again, once)


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    end = random_tree(60, seed=0)
    rounded = [x.detach().bfloat16() for x in random_inputs(60)]
    q, k, v = rounded
    exact = reference_attention(q.double(), k.double(), v.double(), end)
    out = reference_attention(q, k, v, end)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact.bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("attend", [reference_attention, flex_attention])
def test_shapes_that_do_not_fit_are_refused(attend: Any) -> None:
    q, k, v = random_inputs(12)
    end = torch.full((1, 12), 12)
    assert "one per token" in refusal(attend, q, k, v, end[:, :11])
    assert "without a cache" in refusal(attend, q[:, :, :3], k, v, end[:, :3])
    assert "not a multiple" in refusal(attend, q[:, :3], k, v, end)


def test_a_block_mask_of_another_row_is_refused() -> None:
    assert "block mask of this row" in refusal(
        flex_attention, *random_inputs(12), torch.full((1, 12), 12), block_mask=build_block_mask(torch.ones(1, 200))
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"subtree_end": None}, "subtree_end did not reach this layer"),
    ({"dropout": 0.1}, "dropout is 0.1"),
    ({"indices": torch.zeros(1, 12, 3, dtype=torch.int32)}, r"uses indices \(keys that an indexer selected\)"),
    ({"position_bias": torch.zeros(1)}, "uses position_bias"),
    ({"head_mask": torch.ones(4)}, "uses head_mask"),
    ({"is_causal": False}, "not causal"),
    ({"output_attentions": True}, "uses output_attentions"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_tree_attention_does_not_compute_is_refused(options: dict[str, Any], message: str) -> None:
    base = {"subtree_end": torch.full((1, 12), 12), "scaling": 0.1}
    computed = {"sliding_window": 11, "softcap": 30.0, "s_aux": torch.zeros(4)}
    no_keys = torch.zeros(1, 12, 0, dtype=torch.int32)
    check_request(nn.Identity(), None, {**base, **computed, "position_ids": torch.zeros(1), "indices": no_keys})
    with pytest.raises(TreepackError, match=message):
        check_request(nn.Identity(), None, {**base, **options})


@pytest.mark.parametrize("attention", ["treepack_reference", "treepack_flex", "treepack_auto"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt_neox", "gpt2"])
def test_models_refuse_a_row_without_subtree_end_and_a_mask(kind: str, attention: str) -> None:
    register()
    register()
    model = tiny_model(kind, attention=attention)
    ids, end = torch.arange(5)[None], torch.full((1, 5), 5)
    assert "subtree_end did not reach this layer" in refusal(model, input_ids=ids, use_cache=False)
    for mask in (torch.tensor([[0, 1, 1, 1, 1]]), torch.zeros(1, 1, 5, 5)):
        assert "mask is given" in refusal(model, input_ids=ids, attention_mask=mask, subtree_end=end, use_cache=False)
    assert model(input_ids=ids, subtree_end=end, use_cache=False).logits.isfinite().all()


def rows_of(length: int) -> Tensor:
    return torch.cat([random_tree(length, seed=1), random_tree(length, seed=2)])


SHORT = [rows_of(1), rows_of(130), rows_of(401), comb(70, 40, 6), torch.arange(1, 200)[None]]


# The star is long enough for key blocks in several shares, and slow.
@pytest.mark.parametrize(
    ("end", "granules"),
    [
        *itertools.product(SHORT, [1, 2, 4]),
        (star(150, 12, 70), 1),
        pytest.param(star(150, 40, 70), 4, marks=pytest.mark.slow),
    ],
)
def test_tiles_are_the_reference_in_output_and_every_gradient(end: Tensor, granules: int) -> None:
    generator = torch.Generator().manual_seed(0)
    (batch, length), schedule, scale = end.shape, build_schedule(end), 0.3
    q, do = torch.randn(2, batch, 4, length, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, batch, 2, length, 16, generator=generator, dtype=torch.float64)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    expected = reference_attention(q, k, v, end, scale=scale)
    gradients = torch.autograd.grad(expected, (q, k, v), do)
    with torch.no_grad():
        inputs = AttentionInputs(q, k, v, schedule, scale)
        out, lse = tiles.naive_forward(inputs, granules=granules)
        results = tiles.naive_backward(inputs, out, lse, do, granules=granules)
        # [B, 4, T, D] @ [B, 4, D, T] -> [B, 4, T, T]
        scores = q @ k.repeat_interleave(2, dim=1).mT * scale
        scores = scores.masked_fill(~visible_pairs(end)[:, None], -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1) / math.log(2))
    # In a row of single tokens dq and dk cancel to 0, so the tolerance is relative to `do` at least.
    size = float(do.norm())
    assert results[3] is None
    for ours, theirs in zip((out, *results[:3]), (expected, *gradients), strict=True):
        ours, theirs = ours.detach(), theirs.detach()
        assert (ours - theirs).norm() <= 1e-13 * max(float(theirs.norm()), size)


@pytest.mark.parametrize("reach", [None, KeyReach("window", 60), KeyReach("chunk", 90)])
@pytest.mark.parametrize(("sinks", "softcap"), [(True, None), (False, 2.0), (True, 2.0)])
def test_windows_sinks_caps_and_narrow_values(reach: KeyReach | None, sinks: bool, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(1)
    end, scale = rows_of(300), 0.4
    start = first_visible(end, reach)
    shapes = [(2, 4, 300, 24), (2, 2, 300, 24), (2, 2, 300, 16), (2, 4, 300, 16), (4,)]
    q, k, v, do, sink = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    q, k, v, sink = (x.requires_grad_() for x in (q, k, v, sink))
    options = {"sinks": sink if sinks else None, "softcap": softcap}
    expected = reference_attention(q, k, v, end, scale=scale, start=start, **options)  # type: ignore[arg-type]
    leaves = (q, k, v, sink) if sinks else (q, k, v)
    gradients = torch.autograd.grad(expected, leaves, do)
    schedule = build_schedule(end, start)
    with torch.no_grad():
        inputs = AttentionInputs(q, k, v, schedule, scale, **options)  # type: ignore[arg-type]
        out, lse = tiles.naive_forward(inputs)
        results = tiles.naive_backward(inputs, out, lse, do)
    for ours, theirs in zip((out, *results), (expected.detach(), *gradients), strict=False):
        assert ours is not None
        assert (ours - theirs).norm() <= 1e-13 * max(float(theirs.norm()), 1.0)
    assert (results[3] is None) == (not sinks)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_reference_has_the_weights_of_one_softmax_with_the_sink(softcap: float | None) -> None:
    q, k, v = torch.randn(3, 1, 1, 3, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    end, start, sink = torch.tensor([[3, 3, 3]]), torch.tensor([[0, 0, 1]]), torch.tensor([0.7], dtype=torch.float64)
    out = reference_attention(q, k, v, end, start=start, sinks=sink, softcap=softcap)
    scores = q[0, 0, 2] @ k[0, 0, 1:].T * 8**-0.5  # token 2 sees the tokens 1 and 2
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    weights = scores.exp() / (scores.exp().sum() + sink.exp())
    torch.testing.assert_close(out[0, 0, 2], weights @ v[0, 0, 1:])
