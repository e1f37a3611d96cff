"""The program of each process of a test of ZeRO-3: two CPU ranks of DeepSpeed compute batches of one and five rows.

run_sharded(folder)     gradients of each case by name, or the refusal of a case
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing

from support.online_ranks import OPTIONS, SAMPLES, SHARES, loss_of, tree_model
from support.oracle_model import make_row
from treepack.data.batch import make_batch
from treepack.errors import TreepackError
from treepack.model.collation import batch_loss, collate
from treepack.online import OnlineOptions, batch_statistics, plan_batch


def run_sharded(folder: Path) -> dict[str, Any]:
    """Run all cases on two ranks, and return what rank 0 found."""
    multiprocessing.start_processes(_process, (folder,), nprocs=2, start_method="spawn")  # type: ignore[attr-defined,no-untyped-call]
    found: dict[str, Any] = torch.load(folder / "found.pt", weights_only=False)
    return found


def _process(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
    os.environ |= {"DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    deepspeed = import_module("deepspeed")  # absent from the environment of the type checker
    store = torch.distributed.FileStore(str(folder / "meeting"), 2)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    deepspeed.init_distributed(dist_backend="gloo")

    def statistics(options: OnlineOptions) -> Callable[[Any], Tensor]:
        batch = plan_batch([torch.tensor(each) for each in SHARES[rank]], options=options, temperature=0.5)
        return lambda engine: loss_of(*batch_statistics(engine, batch, options))

    cases = {
        "loss": lambda engine: batch_loss(engine, collate([make_batch(make_row(SAMPLES[rank]))])),
        "one row": statistics(OnlineOptions()),
        "kept rows": statistics(replace(OPTIONS, recompute=False)),
        "recomputed rows": statistics(OPTIONS),
    }
    found = {name: _gradients(loss) for name, loss in cases.items()}
    if rank == 0:
        torch.save(found, folder / "found.pt")
    torch.distributed.destroy_process_group()


def _gradients(loss: Callable[[Any], Tensor]) -> Any:
    """Return the whole gradients of a loss, or the text of its refusal."""
    whole = import_module("deepspeed.utils").safe_get_full_grad
    model = tree_model().float()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = import_module("deepspeed").initialize(model=model, optimizer=optimiser, config=config)[0]
    try:
        engine.backward(loss(engine).float())
    except TreepackError as error:
        return str(error)
    return {name: whole(parameter).double() for name, parameter in model.named_parameters()}
