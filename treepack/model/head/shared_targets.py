"""Targets of the output layer on one of the ranks that share a row, and the laws of a teacher at targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from treepack.data.ragged_tensor import RaggedTensor
from treepack.data.teacher_law import TeacherLaw
from treepack.data.transfers import sent
from treepack.model.head.distribution_loss import TeacherTargets
from treepack.model.head.logit_map import OutputLayer


def teacher_targets(teacher: tuple[TeacherLaw, float] | None, order: Tensor, chunk: int) -> TeacherTargets | None:
    """Return the teacher's laws chunk by chunk."""
    if teacher is None:
        return None
    law, beta = teacher
    parts = (law[part].map(lambda each: sent(each, order.device)) for part in torch.split(order, chunk))
    return TeacherTargets(list(parts), beta)


def no_logits(hidden: Tensor, layer: OutputLayer) -> Tensor:
    """Return logits [0, V], float64 or float32, attached to `hidden` and the weights: FSDP needs every gradient."""
    logits = linear(hidden[:0], layer.weight, layer.bias)
    return logits if logits.dtype == torch.float64 else logits.float()


def own_targets(
    share: Any,
    targets: tuple[Tensor, Tensor, Tensor],
    divisors: Tensor | None,
    kept: RaggedTensor | None,
    teacher: tuple[TeacherLaw, float] | None,
    device: torch.device,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor | None, RaggedTensor | None, tuple[TeacherLaw, float] | None]:
    """Return the numbers of the targets that this rank's states predict, on `device`, and what belongs to them.

    Args:
        share: the `sequence.share.TokenShare` of the row.
        targets: as in `token_loss.tree_logprobs`.
        divisors, kept, teacher: of each target, or None.
        device: of the states.
    """
    places, targets = share.own_targets(targets)
    places = sent(places, device)
    divisors = None if divisors is None else divisors.index_select(0, places)
    teacher = None if teacher is None else (teacher[0][places], teacher[1])
    return places, targets, divisors, None if kept is None else kept[places], teacher
