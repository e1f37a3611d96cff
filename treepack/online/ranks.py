"""Batches in memory on several ranks: equal numbers of forward passes, and one exchange of gradients.

FSDP, ZeRO-3 and DistributedDataParallel communicate inside forward and backward passes, so all ranks of a model must
run equally many. A rank with fewer rows runs rows of padding, whose gradients are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from treepack.model.accept.first_batch import sharding_groups


def find_replicas(model: nn.Module) -> DistributedDataParallel | None:
    """Return the wrapper that exchanges whole gradients, or None."""
    return next((each for each in model.modules() if isinstance(each, DistributedDataParallel)), None)


def agree_on_rows(model: nn.Module, num_rows: int) -> int:
    """Return the maximum number of rows over the ranks that train `model` together, at least 1.

    All of these ranks must call it together. Without such ranks it returns `num_rows`, or 1.
    """
    groups: list[Any] = list(sharding_groups(model) or [])
    replicas = find_replicas(model)
    if replicas is not None:
        groups.append(replicas.process_group)
    if not groups:
        return max(num_rows, 1)
    # One group after the other: in a mesh of 2 x 2 ranks, rank 3 has no group with rank 0, but both have one with 1.
    most = torch.tensor(max(num_rows, 1), device=next(model.parameters()).device)
    for group in groups:
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group=group)
    return int(most)


def uses_deepspeed(model: nn.Module) -> bool:
    """Return True if DeepSpeed reduces the gradients of the model; it takes one backward pass after a forward pass."""
    # By names, because DeepSpeed is not imported here: its engine, and parameters that ZeRO-3 has sharded.
    wrapped = any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)
    return wrapped or any(hasattr(parameter, "ds_id") for parameter in model.parameters())


@contextmanager
def gradient_exchange(replicas: DistributedDataParallel | None, exchange: bool) -> Iterator[None]:
    """Exchange gradients after the passes in the block, or not. Without replicas nothing changes."""
    if replicas is None:
        yield
        return
    before = replicas.require_backward_grad_sync
    replicas.require_backward_grad_sync = exchange
    try:
        yield
    finally:
        replicas.require_backward_grad_sync = before
