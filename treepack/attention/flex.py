"""Tree attention through FlexAttention: blocks of 128 x 128 pairs, whole blocks skipped, no T x T tensor.

The intervals decide each block. Let `low` and `high` be the smallest and the largest subtree_end of its keys, `first`
the index of its first query and `last` one past that of its last query. A block below the diagonal is

    first >= high      skipped: no pair is visible
    last <= low        full: every pair is visible, computed without a mask
    else               partial: some pairs are visible, computed under the mask

and a block on the diagonal is partial, because every token sees itself. With windows, a block that ends before the
smallest `start` of its queries is skipped, and a full one must not begin before the largest. Rows are padded to whole
blocks with tokens that see only themselves (`subtree_end[i] = i + 1`), so no kernel meets an incomplete block.

Same inputs and outputs as `reference`. `build_block_mask` runs once per row, `flex_attention` once per layer. `flash`
runs the same block lists in another kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from treepack.attention.reference import check_shapes
from treepack.errors import TreepackError

BLOCK = 128  # FlexAttention's default, and the tile of keys that `flash` requires

_Kernel = Callable[[Tensor, Tensor, Tensor, BlockMask], tuple[Tensor, Tensor | None]]
_ScoreMap = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

# Options that the public function passes to the operator; the eager operator ignores all of them.
_EAGER_OPTIONS = {
    "BACKEND": "AUTO",
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
}


def build_block_mask(
    subtree_end: Tensor, start: Tensor | None = None, *, query_block: int = BLOCK, first: int = 0
) -> BlockMask:
    """Return the mask of B rows as FlexAttention's block lists.

    Args:
        subtree_end: int [B, T], any T >= 1.
        start: int [B, T], the first token that each token sees; None for all ancestors.
        query_block: queries per block, a multiple of `BLOCK`; the keys of a block are always `BLOCK`.
        first: the token of the first query, a multiple of `query_block`.

    Returns:
        a BlockMask of B x 1 head over T rounded up to a multiple of `query_block`, without the queries before `first`.
        Memory is (T / BLOCK)**2.
    """
    end = _pad_to_blocks(subtree_end, query_block)
    starts = None if start is None else _pad_start(start, end.shape[1])
    # [B, query blocks, key blocks]
    partial, full = (blocks[:, first // query_block :] for blocks in _classify_blocks(end, query_block, starts))
    # A tensor, because the compiler would make a kernel for each value of a number.
    origin = torch.tensor(first, device=end.device)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[batch, key])

    def window_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert starts is not None
        return mask_mod(batch, head, query, key) & (starts[batch, query] <= key)

    square = mask_mod if starts is None else window_mod

    def rectangle_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return square(batch, head, query + origin, key)

    return BlockMask.from_kv_blocks(
        *_block_lists(partial),
        *_block_lists(full),
        BLOCK_SIZE=(query_block, BLOCK),
        mask_mod=rectangle_mod if first else square,
        seq_lengths=(end.shape[-1] - first, end.shape[-1]),
    )


def _pad_to_blocks(subtree_end: Tensor, block: int) -> Tensor:
    """Return `subtree_end` [B, T] as int32, padded to whole blocks with tokens that see only themselves."""
    # [3 2 3], block 8 -> [3 2 3 4 5 6 7 8]
    batch, length = subtree_end.shape
    total = math.ceil(length / block) * block
    tail = torch.arange(length + 1, total + 1, dtype=torch.int32, device=subtree_end.device)
    return torch.cat([subtree_end.to(torch.int32), tail.expand(batch, -1)], dim=1)


def _pad_start(start: Tensor, total: int) -> Tensor:
    """Return `start` [B, T] as int32 [B, total]: tokens that pad the row start at themselves."""
    # [0 0 1] to 6 tokens -> [0 0 1 3 4 5]
    tail = torch.arange(start.shape[1], total, dtype=torch.int32, device=start.device)
    return torch.cat([start.to(torch.int32), tail.expand(len(start), -1)], dim=1)


def _classify_blocks(subtree_end: Tensor, query_block: int, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the partial and the full blocks: two bool [B, T / query_block, T / BLOCK]; see the header."""
    # A prompt and two answers, 128 tokens each: subtree_end [384] * 128 + [256] * 128 + [384] * 128, low [384 256 384]
    #     partial 1 0 0    full 0 0 0
    #             0 1 0         1 0 0
    #             0 0 1         1 0 0
    low, high = subtree_end.reshape(len(subtree_end), 1, -1, BLOCK).aminmax(dim=-1)
    total, device = subtree_end.shape[-1], low.device
    first = torch.arange(0, total, query_block, device=device)[:, None]
    last, key = first + query_block, torch.arange(0, total, BLOCK, device=device)
    # [queries, 1] and [keys] -> [queries, keys]
    below = key + BLOCK <= first
    full = below & (last <= low)
    touched = (below & (first < high)) | ((first < key + BLOCK) & (key < last))
    if start is not None:
        smallest, largest = start.view(len(start), -1, 1, query_block).aminmax(dim=-1)
        touched, full = touched & (key + BLOCK > smallest), full & (key >= largest)
    return touched & ~full, full


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return per query block the number of set key blocks [B, 1, nq], and all key blocks, set first [B, 1, nq, nk]."""
    # rows 1 0 0 / 0 1 0 / 0 0 1 -> counts 1 1 1, lists 0 1 2 / 1 0 2 / 2 0 1; the stable sort keeps lists ascending
    chosen = blocks[:, None].to(torch.int8)
    counts = chosen.sum(dim=-1, dtype=torch.int32)
    return counts, chosen.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    subtree_end: Tensor,
    *,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    start: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    first: int = 0,
) -> Tensor:
    """Compute softmax attention over the visible pairs; compiled on an accelerator, eager (and dense) on the CPU.

    Args:
        query, key, value, subtree_end, scale, start, sinks, softcap: as in `reference.reference_attention`.
        block_mask: `build_block_mask(subtree_end, start, first=first)`; a caller with many layers builds it once.
        first: the token of the first query, a multiple of `BLOCK`.

    Returns:
        [B, H, T - first, D_v] in the dtype of the inputs.

    Raises:
        TreepackError: if the shapes do not fit, or `block_mask` has another number of tokens.
    """
    check_shapes(query, key, value, subtree_end, first)
    mask = build_block_mask(subtree_end, start, first=first) if block_mask is None else block_mask
    with_lse = sinks is not None
    run = _eager(softcap) if query.device.type == "cpu" else fused_kernel(softcap=softcap, with_lse=with_lse)
    out, lse = attend_blocks(run, query, key, value, mask, scale)
    return out if sinks is None or lse is None else _with_sinks(out, lse, sinks)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the output [B, H, T, D_v] of a softmax that also has one sink [H] per head; lse [B, H, T] is natural."""
    # The weights of a row sum to e^lse / (e^lse + e^sink) instead of 1: the sigmoid of lse - sink.
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return (out * share[..., None]).to(out.dtype)


def attend_blocks(
    run: _Kernel, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None
) -> tuple[Tensor, Tensor | None]:
    """Run a kernel; return output [B, H, T, D_v], and natural log-sum-exp [B, H, T] if the kernel computes it.

    Raises:
        TreepackError: if `mask` has another number of tokens.
    """
    length, (total, total_keys) = query.shape[-2], mask.seq_lengths
    is_whole = total == math.ceil(length / mask.BLOCK_SIZE[0]) * mask.BLOCK_SIZE[0]
    if not is_whole or total_keys - total != key.shape[-2] - length:
        raise TreepackError(
            f"attention: block_mask covers {total} tokens and the row has {length}; pass the block mask of this row"
        )
    # [B, H, T, D] -> [B, H, total, D]
    query, key, value = (pad(x, (0, 0, 0, total - length)) for x in (query, key, value))
    out, lse = run(_scale_query(query, scale), key, value, mask)
    return out[..., :length, :], None if lse is None else lse[..., :length]


def _scale_query(query: Tensor, scale: float | None) -> Tensor:
    """Return `query` multiplied by a factor, so that the default scale D**-0.5 gives the scores of `scale`.

    As an argument, a scale would become a symbolic float under dynamic=True, which the kernel template refuses.
    """
    # D = 16 has the default 0.25, so scale 0.5 doubles the query
    default = query.shape[-1] ** -0.5
    return query if scale is None or math.isclose(scale, default) else query * (scale / default)


@functools.cache
def _capped_scores(softcap: float) -> _ScoreMap:
    """Return the change of scores by a cap, for FlexAttention; one function per cap, so that it compiles once."""

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@functools.cache
def fused_kernel(
    backend: Literal["AUTO", "FLASH"] = "AUTO", *, softcap: float | None = None, with_lse: bool = False
) -> _Kernel:
    """Return the fused kernel, which is compiled on first use for every row length at once."""
    options: Any = {"enable_gqa": True, "kernel_options": {"BACKEND": backend}}
    if softcap is not None:
        options["score_mod"] = _capped_scores(softcap)
    if with_lse:
        options["return_lse"] = True

    def run(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask) -> tuple[Tensor, Tensor | None]:
        result: Any = torch_flex.flex_attention(query, key, value, block_mask=block_mask, **options)
        return result if with_lse else (result, None)

    # fullgraph: without it, torch silently falls back to the dense form after the recompile limit.
    return torch.compile(run, dynamic=True, fullgraph=True)


def _eager(softcap: float | None) -> _Kernel:
    """Return the kernel for the CPU, float64 too."""
    score_mod = torch_flex._identity if softcap is None else _traced_alone(_capped_scores(softcap))

    def run(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask) -> tuple[Tensor, Tensor | None]:
        # The public function refuses gradients on the CPU; the operator that it calls computes them, in float64 too.
        out, lse, *_ = flex_operator(
            query, key, value, score_mod, block_mask.as_tuple(), query.shape[-1] ** -0.5, _EAGER_OPTIONS
        )
        return out, lse * math.log(2)  # the operator counts in powers of two

    return run


def _traced_alone(change: _ScoreMap) -> _ScoreMap:
    """Return a change of scores whose saved tensors a checkpoint around the layer does not see.

    The eager operator traces the change and its gradient while it runs. A checkpoint counts the tensors that the trace
    saves among its own; it then gives the backward pass other tensors than the forward pass saved.
    """

    def run(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            return change(score, batch, head, query, key)

    return run


def _same(saved: Tensor) -> Tensor:
    return saved
