"""Checks of a model that treepack did not load, at its first batch; the losses of `collation` call them.

    model with the wrappers of its trainer --probe of `load_model`--> refusal on all ranks, or never checked again

FSDP and ZeRO-3 gather weights only inside a forward pass that all ranks run together. So the probe runs through the
wrappers, and all ranks agree on its result. Each model object is checked once. Each refusal is one sentence.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, distributed, nn

from treepack.errors import TreepackError
from treepack.model.accept.compatibility import check_config, path_too_long, position_limit
from treepack.model.accept.probe import probe
from treepack.model.stored_weights import check_stored, check_types, prepare_products

# Models that passed, and the limit of positions of each model. Weak, so that a model can be freed.
_CHECKED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_LIMITS: weakref.WeakKeyDictionary[nn.Module, tuple[int, str] | None] = weakref.WeakKeyDictionary()


def mark_checked(causal: nn.Module) -> None:
    """Remember that the model passed the probe, so that its first batch does not run it again."""
    _CHECKED.add(causal)


def check_positions(position_ids: Tensor, causal: Any, source: str) -> None:
    """Refuse positions that the model cannot compute exactly; see `compatibility.position_limit`.

    Raises:
        TreepackError: if a position is beyond the limit.
    """
    if causal not in _LIMITS:
        _LIMITS[causal] = position_limit(causal)
    limit = _LIMITS[causal]
    # Most models have no limit, so they do not wait for the maximum here.
    if limit is not None and (largest := int(position_ids.max())) >= limit[0]:
        raise TreepackError(f"{source}: {path_too_long('a row has', largest, limit)}")


def check_first_batch(model: nn.Module, causal: Any, position_ids: Tensor) -> None:
    """Check the model before its first batch, and the positions of every batch.

    The probe runs through the wrappers, so all ranks that share weights must call this function together.

    Args:
        model: the model with the wrappers of the trainer.
        causal: the causal language model of transformers inside `model`.
        position_ids: of the batch.

    Raises:
        TreepackError: if the model fails a check, on all ranks that share its weights; or if the batch has positions
            that the model cannot compute exactly.
    """
    # fully_shard replaces the class of a module by a subclass: GraniteForCausalLM -> FSDPGraniteForCausalLM
    name = type(causal).__name__.removeprefix("FSDP")
    source = f"{name} (model type {causal.config.get_text_config().model_type})"
    if causal in _CHECKED:
        check_positions(position_ids, causal, source)
        return
    check_config(causal.config.get_text_config(), source=source)
    check_stored(source, causal.config)
    if torch.is_grad_enabled():
        check_types(source, causal)
    prepare_products(causal)
    complaint = None
    try:
        probe(causal, source=source, device=position_ids.device, wrapped=model)
    except TreepackError as error:
        complaint = error
    _agree(complaint, sharding_groups(model) or [], position_ids.device, source)
    check_positions(position_ids, causal, source)
    mark_checked(causal)


def sharding_groups(model: nn.Module) -> list[Any] | None:
    """Return the process groups over which weights are sharded, in the same order on all ranks; None if they are whole.

    Weights are sharded by FSDP2 or tensor parallelism (DTensor), FSDP1, or ZeRO-3 of DeepSpeed (parameters with ds_id).
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    groups: list[Any] = []
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            # Hybrid sharding has a second group, of the ranks that hold equal shards.
            groups += [group for name in ("process_group", "_inter_node_pg") if (group := getattr(module, name, None))]
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            groups += parameter.device_mesh.get_all_groups()
        elif hasattr(parameter, "ds_id"):
            groups.append(getattr(parameter, "ds_process_group", distributed.group.WORLD))
    unique = {id(group): group for group in groups}
    return list(unique.values()) or None


def _agree(complaint: TreepackError | None, groups: list[Any], device: torch.device, source: str) -> None:
    """Raise the complaint on every rank of `groups` if any rank has one.

    Raises:
        TreepackError: the complaint of this rank, or a sentence that refers to the complaint of a different rank.
    """
    refused = torch.tensor(int(complaint is not None), device=device)
    # One group after the other: in a mesh of 2 x 2 ranks, rank 3 has no group with rank 0, but both have one with 1.
    for group in groups:
        distributed.all_reduce(refused, distributed.ReduceOp.MAX, group=group)
    if complaint is not None:
        raise complaint
    if refused:
        raise TreepackError(f"{source}: another rank refused the model; see the error of that rank")
