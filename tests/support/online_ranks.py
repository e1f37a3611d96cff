"""The program of each process of a test of batches in memory on several ranks.

    run_wrapped(2, folder)   rank r computes SHARES[r] through every wrapper; the gradients of each come back

Rank 0 has one row and rank 1 has five, so rank 0 runs four rows of padding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from support.fresh_processes import PROCESSES
from support.oracle_model import Sample as WeightedSample
from support.oracle_model import gradients, make_row, tiny_model
from treepack.attention import register
from treepack.data.batch import empty_batch, make_batch
from treepack.model.collation import batch_loss, collate
from treepack.online import OnlineOptions, batch_statistics, plan_batch

OPTIONS = OnlineOptions(capacity=5)
SHARES = [[[1, 2, 3], [1, 2, 4]], [[1, 2, 3, 4, 5], [2, 1, 6, 6], [7, 8, 9], [3, 3, 3, 3], [9, 9, 1]]]
SAMPLES = [[WeightedSample((1, 2, 3), (0.0, 1.0, 0.5))], [WeightedSample((4, 5), (0.0, 2.0))]]


def loss_of(logprobs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    """Return a loss in which values at other places have other factors."""
    values = [(v.double() * torch.arange(1.0, len(v) + 1)).sum() for v in logprobs]
    return torch.stack([*values, *[(v.double() * torch.arange(1.0, len(v) + 1)).sum() / 3 for v in entropies]]).sum()


def fsdp2(model: nn.Module) -> nn.Module:
    """Shard layers and the rest of a model, with the output layer in a group of its own."""
    from torch.distributed.fsdp import fully_shard

    inside: Any = model
    for layer in inside.model.layers:
        fully_shard(layer)
    fully_shard(inside.lm_head)
    fully_shard(inside)
    return model


def fsdp1(model: nn.Module) -> nn.Module:
    """Wrap a model and each of its layers in the older FSDP."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    inside: Any = model
    policy = ModuleWrapPolicy({type(inside.model.layers[0])})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": nn.parallel.DistributedDataParallel,
    "ddp unused": lambda model: nn.parallel.DistributedDataParallel(model, find_unused_parameters=True),
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
}


def tree_model() -> Any:
    """Return the tiny model, with equal weights on all ranks."""
    register()
    return tiny_model("qwen3", attention="treepack_reference")


def run_wrapped(size: int, folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """Run the wrappers of these names on `size` ranks, and return what each rank found."""
    arguments = (size, folder, names, dict(os.environ))
    method = PROCESSES.get_start_method()
    multiprocessing.start_processes(_process, arguments, nprocs=size, start_method=method)  # type: ignore[attr-defined,no-untyped-call]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(size)]


def _process(rank: int, size: int, folder: Path, names: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)  # a forkserver has that of its own start
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "meeting"), size)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = {name: _outcome(rank, WRAPPERS[name]) for name in names}
    torch.save(found, folder / f"rank{rank}.pt")
    distributed.destroy_process_group()


def _outcome(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """Return the values and gradients of every way to compute through a wrapper."""
    batch = plan_batch([torch.tensor(each) for each in SHARES[rank]], options=OPTIONS, temperature=0.5)
    model = wrap(tree_model())
    outcome: dict[str, Any] = {"rows": len(batch.rows)}
    exchanged: list[Any] = []
    if isinstance(model, nn.parallel.DistributedDataParallel):
        group: Any = distributed.group.WORLD

        # DistributedDataParallel compares annotations of a hook with its own types, so this one has none.
        def exchange(state, bucket):  # type: ignore[no-untyped-def]
            exchanged.append(bucket.index())
            return allreduce_hook(state, bucket)

        model.register_comm_hook(group, exchange)
    with torch.no_grad():
        outcome["old"] = batch_statistics(model, batch, OPTIONS)[0]
    for name in ("first", "second"):  # two optimiser steps: the state of the wrapper must be as before
        model.zero_grad()
        logprobs, entropies = batch_statistics(model, batch, OPTIONS)
        torch.autograd.backward(loss_of(logprobs, entropies))
        outcome[name] = whole_gradients(model)
    outcome["exchanges"] = len(exchanged)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.zero_grad()
        for last in (False, True):  # a trainer that accumulates two micro-batches
            model.require_backward_grad_sync = last
            torch.autograd.backward(loss_of(*batch_statistics(model, batch, OPTIONS)))
            outcome.setdefault("accumulated", []).append(whole_gradients(model))
    for name, row in (("loss", make_batch(make_row(SAMPLES[rank]))), ("padding", empty_batch(3, terms=True))):
        # Rank 0 has a row of padding in one of the two passes of `batch_loss`.
        inputs = collate([row if name == "loss" or rank == 0 else make_batch(make_row(SAMPLES[rank]))])
        model.zero_grad()
        torch.autograd.backward(batch_loss(model, inputs))
        outcome[name] = whole_gradients(model)
    return outcome


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradient of each parameter under its name in the model without wrappers."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    names = ("module.", "_fsdp_wrapped_module.")
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            found = gradients(model)
    else:
        found = {
            name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).detach().clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
    for part in names:
        found = {name.replace(part, ""): gradient for name, gradient in found.items()}
    return found
