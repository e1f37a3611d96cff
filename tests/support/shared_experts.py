"""The program of each rank of a test of experts over ranks in float64, without FSDP."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh

from support.experts import random_routes
from support.fresh_processes import PROCESSES
from support.oracle_model import Sample, make_row
from support.tiny_families import tiny_family
from treepack.attention import IMPLEMENTATIONS, register
from treepack.carry.backward import CarryOptions, RowsInPieces
from treepack.data.batch import make_batch
from treepack.model.adapters.adapter import assign, initial_weights, put_adapter
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.experts.interface import NAME, register_experts
from treepack.model.experts.over_ranks import share_experts, share_of, sum_over_replicas, whole_experts
from treepack.model.experts.routers import has_experts
from treepack.model.forward import RowRunner, WholeRows
from treepack.model.loaded import LoadedModel
from treepack.model.weights.traced import TracedBox
from treepack.sequence.share import share_rows
from treepack.train.options import TrainOptions
from treepack.train.sharding import load_sharded

# A tree for each rank; that of the last one has no token of its own but padding.
ROWS = [
    [Sample((1, 2, 3, 4, 5), (0, 1, 1, 1, 1)), Sample((1, 2, 3, 6, 7, 8), (0, 0, 1, 2, 1, 1))],
    [Sample((9, 8, 7), (0, 1, 1)), Sample((9, 8, 3, 1, 2, 6, 4), (0, 0, 1, 1, 1, 1, 1))],
    [Sample((11, 12), (0, 1))],
    [Sample((5, 5, 5, 4), (0, 1, 1, 0.5)), Sample((5, 5, 6), (0, 0, 1))],
]


@dataclass(frozen=True)
class ExpertCase:
    """A model, whose rows run in pieces of `limit` tokens, and the ranks that share its experts and its rows.

    With `replays`, the tokens go to recorded experts.
    """

    kind: str
    expert_ranks: int
    lora: bool = False
    limit: int | None = None
    sequence_ranks: int = 1
    replays: bool = False

    @property
    def gathers(self) -> bool:
        """True if ranks differ in their passes, and so gather all experts."""
        return self.limit is not None and self.sequence_ranks % self.expert_ranks != 0


def build(kind: str, lora: bool) -> LoadedModel:
    register()
    register_experts()
    causal = tiny_family(kind)
    causal.set_attn_implementation(IMPLEMENTATIONS["reference"])
    model, weights, _ = put_adapter(causal, None, LoraOptions(rank=3) if lora else None, source=kind, seed=0)
    if lora:
        weights = initial_weights(model, 1, random_b=True)
    assign(model, weights, torch.float64)
    causal.set_experts_implementation(NAME)
    return LoadedModel(model, kind, "reference", ())


def gradients_over(
    size: int, folder: Path, cases: list[ExpertCase], sources: Sequence[Path] = ()
) -> list[dict[str, Tensor]]:
    """Return the whole gradients and the loss of `ROWS` over `size` ranks.

    Size 1 is this process, without shared experts. Each rank also loads the checkpoints `sources`, and writes the names
    that it read to NAME-RANK.txt in `folder`.
    """
    if size == 1:
        return [_compute(case) for case in cases]
    multiprocessing.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        _process,
        (size, folder, cases, sources, dict(os.environ)),
        nprocs=size,
        start_method=PROCESSES.get_start_method(),
    )
    results: list[dict[str, Tensor]] = torch.load(folder / "gradients.pt")
    return results


def _process(
    rank: int, size: int, folder: Path, cases: list[Any], sources: Sequence[Path], environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / f"meeting-{size}"), size)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    for source in sources:
        (folder / f"{source.name}-{rank}.txt").write_text("\n".join(_names_read(source, size)))
    results = [_compute(case) for case in cases]
    if rank == 0:
        torch.save(results, folder / "gradients.pt")
    distributed.destroy_process_group()


def _names_read(source: Path, size: int) -> list[str]:
    read: list[str] = []
    original = TracedBox.put

    def put(box: TracedBox, stored: Any, tensor: Tensor) -> None:
        read.append(box.name)
        original(box, stored, tensor)

    TracedBox.put = put  # type: ignore[assignment,method-assign]
    load_sharded(source, TrainOptions(device="cpu", expert_ranks=size), torch.device("cpu"))
    TracedBox.put = original  # type: ignore[method-assign]
    return read


def _compute(case: ExpertCase) -> dict[str, Tensor]:
    loaded = build(case.kind, case.lora)
    shared: set[nn.Parameter] = set()
    rank, size = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    sequence = case.sequence_ranks if size > 1 else 1
    if size > 1:
        shape = (size,) if case.expert_ranks == size else (size // case.expert_ranks, case.expert_ranks)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "expert")[-len(shape) :])
        shared = share_experts(loaded.causal, mesh, case.kind)
        assert all(p.to_local().numel() * case.expert_ranks == p.numel() for p in shared)  # type: ignore[attr-defined]
        share_rows(loaded.causal, distributed.new_subgroups(sequence)[0])  # type: ignore[no-untyped-call]
    loss = torch.zeros((), dtype=torch.float64)
    batches = [make_batch(make_row(row), multiple=8) for row in ROWS[rank // sequence :: size // sequence]]
    if case.replays:
        batches = [replace(batch, routes=random_routes(batch)) for batch in batches]
    runner: RowRunner = WholeRows(loaded)
    if case.limit is not None:
        runner = RowsInPieces(loaded, CarryOptions(case.limit))
    # Rows differ in their pieces, so ranks differ in their passes.
    with nullcontext() if case.limit is None else whole_experts(loaded.causal):
        gathered = [share_of(module) is None for module in loaded.causal.modules() if has_experts(module)]
        assert gathered == [case.gathers or size == 1] * len(gathered)
        for batch in batches:
            loss += runner.backward(batch).rows.sum() / sequence
    sum_over_replicas(loaded.causal)
    return {"loss": _summed(loss)} | {
        name: _whole(parameter, parameter in shared)
        for name, parameter in loaded.model.named_parameters()
        if parameter.requires_grad
    }


def _whole(parameter: Any, is_shared: bool) -> Tensor:
    if is_shared:
        whole: Tensor = parameter.grad.full_tensor()
        return whole
    return _summed(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def _summed(values: Tensor) -> Tensor:
    if distributed.is_initialized():
        distributed.all_reduce(values)
    return values
