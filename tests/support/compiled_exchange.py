"""The program of two ranks that share a row inside a compiled layer.

    compare_over_ranks(folder) -> the graphs of the first rank, and the worst relative error of each length

The layer is attention between two projections, in float64, compiled as one graph, with and without recomputation.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.functional import scaled_dot_product_attention

from support.fresh_processes import PROCESSES
from support.oracle_model import worst_error
from treepack.attention import TreePass
from treepack.model.layers import recomputed_forward
from treepack.sequence.share import SequenceGroup, TokenShare

SIZE = 2
LENGTHS = (18, 26, 7)  # 18 // 2 is no other size of the layer, which torch.compile would take for the same number
HIDDEN, HEADS, KEY_HEADS, WIDTH, VALUES = 12, 4, 1, 6, 8  # one key head: it is repeated for the second rank


@dataclass
class Comparison:
    """What the ranks found.

    Attributes:
        orders: of each graph with exchanges, True if each exchange depends on the one before it.
        counts: exchanges of each of these graphs.
        graphs: graphs compiled after each length.
        errors: of the compiled layer with the gradients of one process, for each length.
    """

    orders: list[bool] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)


class Layer(nn.Module):
    """Attention with one key head, between two projections."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (HEADS * WIDTH, KEY_HEADS * WIDTH, KEY_HEADS * VALUES)
        self.sizes = sizes
        self.before = nn.Linear(HIDDEN, sum(sizes), dtype=torch.float64)
        self.after = nn.Linear(HEADS * VALUES, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor, tree_pass: TreePass) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, width)).transpose(1, 2)
            for part, width in zip(self.before(x).split(self.sizes, -1), (WIDTH, WIDTH, VALUES), strict=True)
        )
        share = tree_pass.share
        out = attend(query, key, value) if share is None else share.attend(query, key, value, attend)
        states: Tensor = x + self.after(out.transpose(1, 2).flatten(2))
        return states


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def compare_over_ranks(folder: Path) -> dict[bool, Comparison]:
    """Return the comparison without and with recomputation."""
    multiprocessing.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        _process, (folder, dict(os.environ)), nprocs=SIZE, start_method=PROCESSES.get_start_method()
    )
    found: dict[bool, Comparison] = torch.load(folder / "found.pt", weights_only=False)
    return found


def _process(rank: int, folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "meeting"), SIZE)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    found = {recomputed: _compare(rank, recomputed) for recomputed in (False, True)}
    if rank == 0:
        torch.save(found, folder / "found.pt")
    distributed.destroy_process_group()


def _compare(rank: int, recomputed: bool) -> Comparison:
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    comparison, traced = Comparison(), list[int]()

    def backend(graph: Any, _: Any) -> Any:
        exchanges = [node for node in graph.graph.nodes if node.target is torch.ops.treepack.exchange.default]
        traced.append(len(exchanges))
        comparison.counts.append(len(exchanges))
        comparison.orders.append(all(_depends(b, a) for a, b in pairwise(exchanges)))
        return make_boxed_func(graph.forward)

    torch.manual_seed(0)
    layer, group = Layer(), SequenceGroup(distributed.group.WORLD, rank, SIZE)
    forward = recomputed_forward(layer.forward) if recomputed else layer.forward
    derived = aot_autograd(fw_compiler=backend, bw_compiler=backend, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(forward, backend=derived, dynamic=True, fullgraph=True)
    for length in LENGTHS:
        x = torch.randn(1, length, HIDDEN, dtype=torch.float64)
        expected = _outcome(layer, layer, x, None)
        comparison.errors.append(worst_error(_outcome(layer, compiled, x, group.share(length)), expected))
        comparison.graphs.append(len(traced))
    return comparison


def _depends(node: Any, earlier: Any) -> bool:
    """Return True if a node of a graph is computed from an earlier one."""
    return any(each is earlier or _depends(each, earlier) for each in node.all_input_nodes)


def _outcome(layer: Layer, forward: Any, x: Tensor, share: TokenShare | None) -> dict[str, Tensor]:
    """Return loss and gradients, summed over the ranks that share the row."""
    layer.zero_grad()
    own = x if share is None else share.cut(x, 1)
    loss = (forward(own, TreePass(share=share)) ** 2).sum()
    loss.backward()
    outcome = {"loss": loss.detach()} | {name: each.grad for name, each in layer.named_parameters()}
    for each in outcome.values() if share is not None else ():
        distributed.all_reduce(each)
    return {name: each.clone() for name, each in outcome.items()}
