"""Targets of the output layer on one of the ranks that share a row, and the laws of a teacher at targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from treepack.data.ragged_tensor import RaggedTensor
from treepack.data.teacher_law import TeacherLaw
from treepack.data.transfers import sent
from treepack.model.head.distribution_loss import TeacherTargets
from treepack.model.head.head_chunks import ChunkTargets, split_targets
from treepack.model.head.logit_map import OutputLayer


def no_logits(hidden: Tensor, layer: OutputLayer) -> Tensor:
    """Return logits [0, V], float64 or float32, attached to `hidden` and the weights: FSDP needs every gradient."""
    logits = linear(hidden[:0], layer.weight, layer.bias)
    return logits if logits.dtype == torch.float64 else logits.float()


@dataclass(frozen=True)
class HeadTargets:
    """n targets of an output layer with their temperatures, sets and laws, None for none.

    Attributes:
        targets: as in `token_loss.tree_logprobs`.
        temperature: float [n].
        kept: n lists of token ids, see `ChunkTargets`.
        teacher: n laws of a teacher, and the beta of the divergence from them.
    """

    targets: tuple[Tensor, Tensor, Tensor]
    temperature: Tensor | None
    kept: RaggedTensor | None
    teacher: tuple[TeacherLaw, float] | None

    def own(self, share: Any, device: torch.device) -> tuple[Tensor, HeadTargets]:
        """Return the numbers of the targets that this rank's states predict, on `device`, and these targets.

        `share` is the `sequence.share.TokenShare` of the row.
        """
        places, targets = share.own_targets(self.targets)
        places = sent(places, device)
        temperature = None if self.temperature is None else self.temperature.index_select(0, places)
        teacher = None if self.teacher is None else (self.teacher[0][places], self.teacher[1])
        return places, HeadTargets(targets, temperature, None if self.kept is None else self.kept[places], teacher)

    def split(self, chunk: int) -> tuple[Tensor, list[ChunkTargets], TeacherTargets | None]:
        """Return `split_targets` of the targets, and the teacher's laws chunk by chunk."""
        tokens, input_ids, parent = self.targets
        labels = input_ids.index_select(0, sent(tokens, input_ids.device))
        sources = parent.index_select(0, tokens)
        order, chunks = split_targets(sources, labels, self.temperature, chunk, self.kept)
        if self.teacher is None:
            return order, chunks, None
        law, beta = self.teacher
        parts = (law[part].map(lambda each: sent(each, order.device)) for part in torch.split(order, chunk))
        return order, chunks, TeacherTargets(list(parts), beta)
