"""The program of each rank that loads checkpoints, and writes the models again without a step of training."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from support.fresh_processes import PROCESSES
from treepack.model.saved_files import copied_files, with_model, write_files
from treepack.model.weights.writing import saved_weights
from treepack.train.options import TrainOptions
from treepack.train.ranks import join_ranks
from treepack.train.sharding import load_sharded


@dataclass(frozen=True)
class Reloaded:
    """What two or more ranks made of a checkpoint: the whole tensors, the notes, and the directory written from them.

    `refused` tells whether writing into a missing directory raised an OSError while the other ranks went on.
    """

    tensors: dict[str, torch.Tensor]
    notes: tuple[str, ...]
    out: Path
    refused: bool


def reload_over(size: int, folder: Path, sources: list[Path]) -> dict[str, Reloaded]:
    """Load and write each of the `sources` over `size` ranks; return the results by the name of the source."""
    multiprocessing.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        _process, (size, folder, sources, dict(os.environ)), nprocs=size, start_method=PROCESSES.get_start_method()
    )
    return {source.name: torch.load(folder / f"{source.name}.pt", weights_only=False) for source in sources}


def _process(rank: int, size: int, folder: Path, sources: list[Path], environment: dict[str, str]) -> None:
    os.environ.update(environment)  # a forkserver has that of its own start
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "meeting"), size)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    join_ranks(torch.device("cpu"))
    for source in sources:
        _reload(rank, source, folder / f"{source.name}-again", folder / f"{source.name}.pt")
    distributed.destroy_process_group()


def _reload(rank: int, source: Path, out: Path, result: Path) -> None:
    loaded = load_sharded(source, TrainOptions(device="cpu"), torch.device("cpu"))
    state: dict[str, Any] = loaded.model.state_dict()
    whole = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in state.items()}
    refused = False
    for directory in (out / "missing", out):
        weights = saved_weights(loaded.model)
        assert weights is not None
        if rank == 0:
            write_files(with_model(copied_files(source), loaded.causal), out)
            try:
                weights.write(directory, max_file_bytes=30_000)
            except OSError:
                refused = True
        weights.gather()
    if rank == 0:
        torch.save(Reloaded(whole, loaded.notes, out, refused), result)
