"""The backward of attention on Hopper with stored gradients of the scores; `launch.backward` computes them twice.

    Inputs, Incoming --empty_stored--> memory for dS, sums and flags --stored_launch--> dq, dk and dv

It multiplies five times where `launch.backward` multiplies seven times. In exchange it writes and reads dS, which is in
memory for a few sections at a time. It takes heads of 128 without windows and chunks, and a schedule with `bands`.
Neither the number of programs nor the heads of a section change any bit of the results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from treepack.attention.hopper.delta import compute_delta
from treepack.attention.hopper.launch import OPTIONS
from treepack.attention.hopper.matrices import matrix_arguments
from treepack.attention.hopper.stored_backward import stored_kernel
from treepack.attention.hopper.stored_parts import RING
from treepack.attention.kernel_launch import LOG2E, Incoming, Inputs, Launch, sink_gradient, token_major
from treepack.attention.schedule import GRANULE, KEY_BLOCK, QUERY_TILE, Bands, Schedule

# Bytes of dS; if those of one key head need more, they get more.
STORED_BYTES = 1 << 30

HEAD_DIM = 128
STAGES = 2


class Stored(NamedTuple):
    """Memory of the backward: tiles of dS, float32 sums of dk and dv, and flags, which begin with zeros.

    heads        key heads of a section
    ds           [1 + RING * tiles of a section, 128, 64] in the dtype of the keys; tile 0 is zeros
    dk_sums      [num_sums, key heads, 128, D], and dv_sums
    counter      int32, items drawn; key_done, query_done and sums_done are described in `stored_parts.Pointers`
    """

    heads: int
    ds: Tensor
    dk_sums: Tensor
    dv_sums: Tensor
    counter: Tensor
    key_done: Tensor
    query_done: Tensor
    sums_done: Tensor


def takes(head_dims: tuple[int, int]) -> bool:
    """Return True if this backward computes such heads (dimension of q and k, of v)."""
    return head_dims == (HEAD_DIM, HEAD_DIM)


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    schedule: Schedule,
    scale: float,
    *,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and sinks, the first three in their dtypes and in memory [B, T, H, D].

    Args:
        query, key, value, out, lse, grad, scale, sinks: as in `launch.backward`.
        schedule: the result of `with_bands`, with bands.
    """
    inputs = Inputs(query, key, value, schedule, scale, sinks)
    incoming = Incoming(grad, lse, compute_delta(out, grad, lse))
    dq, dk, dv = token_major(query), token_major(key), token_major(value)
    stored_launch(inputs, incoming, empty_stored(inputs), (dq, dk, dv)).run()
    dsinks = None if sinks is None else sink_gradient(sinks, lse, incoming.delta, query.shape[2])
    return dq, dk, dv, dsinks


def empty_stored(inputs: Inputs) -> Stored:
    """Return memory for dS and sums, and flags of zeros."""
    key, bands = inputs.key, _bands(inputs)
    kv_heads, width = key.shape[1], key.shape[-1]
    # Tiles of one key head, at most
    tiles = inputs.group * (max(bands.num_places) - 1)
    fits = STORED_BYTES // (RING.value * tiles * KEY_BLOCK * QUERY_TILE * key.element_size())
    heads = max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and (n == 1 or n <= fits))
    ds = torch.empty(1 + RING.value * heads * tiles, KEY_BLOCK, QUERY_TILE, dtype=key.dtype, device=key.device)
    ds[0].zero_()
    shape = (bands.num_sums, kv_heads, KEY_BLOCK, width)
    dk, dv = (torch.empty(shape, dtype=torch.float32, device=key.device) for _ in range(2))
    sections = len(bands.num_pieces) * (kv_heads // heads)
    sizes = (1, sections, sections, bands.num_sums * kv_heads * 2)
    # Each begins at a multiple of 16 bytes, so Triton compiles one kernel: sizes 1 6 6 8 -> 4 8 8 8
    aligned = [-(-size // 4) * 4 for size in sizes]
    flags = torch.zeros(sum(aligned), dtype=torch.int32, device=key.device)
    return Stored(heads, ds, dk, dv, *flags.split(aligned))


def stored_launch(inputs: Inputs, incoming: Incoming, stored: Stored, results: tuple[Tensor, Tensor, Tensor]) -> Launch:
    """Describe the launch that writes the results dq, dk and dv."""
    schedule, bands = inputs.schedule, _bands(inputs)
    kv_heads, group = inputs.key.shape[1], inputs.group
    heads_of_query_item = 2 if group % 2 == 0 else 1
    chunks = group // heads_of_query_item
    all_blocks = schedule.query_order.numel()
    items = kv_heads * (sum(bands.num_pieces) + all_blocks * chunks)
    outputs = {
        key: value
        for name, x in zip(("dq", "dk", "dv"), results, strict=True)
        for key, value in ((f"{name}_pointer", x), (f"{name}_strides", x.stride()[:3]))
    }
    arguments: dict[str, Any] = {
        **matrix_arguments("q", inputs.query, QUERY_TILE, None),
        **matrix_arguments("do", incoming.grad, QUERY_TILE, None),
        **matrix_arguments("k", inputs.key, GRANULE, None),
        **matrix_arguments("v", inputs.value, GRANULE, None),
        "ds_descriptor": _tiles(stored.ds),
        "lse_pointer": incoming.lse,
        "delta_pointer": incoming.delta,
        "dk_sums": stored.dk_sums,
        "dv_sums": stored.dv_sums,
        **outputs,
        "counter": stored.counter,
        "key_done": stored.key_done,
        "query_done": stored.query_done,
        "sums_done": stored.sums_done,
        "ends": schedule.end,
        "key_granules": schedule.key_granules,
        "pieces": bands.pieces,
        "entries": bands.entries,
        "entry_offsets": bands.entry_offsets,
        "table": bands.table,
        "items": items,
        "sections": len(bands.num_pieces) * (kv_heads // stored.heads),
        "heads": stored.heads,
        "band_blocks": bands.blocks,
        "row_blocks": schedule.query_order.shape[1],
        "all_blocks": all_blocks,
        "section_tiles": (len(stored.ds) - 1) // RING.value,
        "kv_heads": kv_heads,
        "blocks": schedule.key_order.shape[1],
        "length": schedule.length,
        "padded": schedule.end.shape[1],
        "origin": schedule.first,
        "factor": inputs.scale * LOG2E,
        "scale": inputs.scale,
    }
    constants = {"GROUP": group, "CHUNKS": chunks, "STAGES": STAGES}
    return Launch(stored_kernel, min(items, _multiprocessors(inputs.key)), arguments, constants, OPTIONS)


def _bands(inputs: Inputs) -> Bands:
    assert inputs.schedule.bands is not None, "the schedule has bands"
    return inputs.schedule.bands


def _multiprocessors(x: Tensor) -> int:
    # On the CPU, launches are described but never run.
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 132


def _tiles(ds: Tensor) -> TensorDescriptor:
    """Return the descriptor of tiles [n, 128, 64], 64 rows at a time."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows = ds.view(-1, QUERY_TILE)
    return TensorDescriptor(rows, list(rows.shape), [QUERY_TILE, 1], [64, QUERY_TILE], layout)
