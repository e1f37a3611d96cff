"""Slow, obvious twins of distillation: each trajectory alone through student and teacher, whole laws, plain sums.

divergence_of      D_beta of two laws, written as in the papers
distillation_loss  the loss of an optimiser step over rollouts, attached to the student, in float64
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from support.oracle_objectives import Rollout, step_loss

SMALLEST = torch.finfo(torch.float64).eps  # of the rest of a teacher


def divergence_of(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """D_beta of two laws over the same outcomes, probabilities [B] each."""

    def kl(first: Tensor, second: Tensor) -> Tensor:
        live = first > 0
        return (first[live] * torch.log(first[live] / second[live])).sum()

    if beta in (0, 1):
        return kl(student, teacher) if beta else kl(teacher, student)
    mean = (1 - beta) * student + beta * teacher
    return beta * kl(teacher, mean) + (1 - beta) * kl(student, mean)


def bucketed(law: Tensor, words: Tensor) -> Tensor:
    """Probabilities of `words` of a law [V], and the sum of all others, if there are others."""
    others = [v for v in range(len(law)) if v not in words.tolist()]
    return torch.cat([law[words], law[others].sum()[None]]) if others else law[words]


def laws_of(model: Any, rollout: Rollout) -> dict[int, Tensor]:
    """The law of the word at each trained position, [V], from the plain model run on this rollout alone."""
    logits = model(input_ids=torch.tensor(rollout.tokens)[None], use_cache=False).logits[0]
    if rollout.temperatures is not None:
        logits = logits / torch.tensor([*rollout.temperatures[1:], 1.0], dtype=logits.dtype)[:, None]
    return {j: logits[j - 1].softmax(-1) for j in rollout.trained}


def divergences_of(student: Any, teacher: Any, rollout: Rollout, beta: float, top_k: int | None) -> dict[int, Tensor]:
    """D_beta at each trained position, of the teacher's `top_k` words and the rest, or of whole laws."""
    with torch.no_grad():
        targets = laws_of(teacher, rollout)
    result = {}
    for j, law in laws_of(student, rollout).items():
        words = targets[j].topk(len(law) if top_k is None else top_k).indices
        result[j] = divergence_of(bucketed(law, words), bucketed(targets[j], words).clamp(min=SMALLEST), beta)
    return result


def distillation_loss(
    student: Any, teacher: Any, rollouts: Sequence[Rollout], o: Any, *, top_k: int | None = None, has_old: bool = True
) -> Tensor:
    """Loss of one optimiser step over `rollouts` under the objective `o`."""
    changed = []
    for rollout in rollouts:
        with torch.no_grad():
            own, taught = laws_of(student, rollout), laws_of(teacher, rollout)
            reverse = divergences_of(student, teacher, rollout, 1.0, top_k) if o.teacher_baseline else {}
        advantages = [each if o.rewarded else 0.0 for each in rollout.advantages]
        for j in rollout.trained:
            word = rollout.tokens[j]
            logp = rollout.old[j] if has_old else math.log(float(own[j][word]))
            gain = math.log(float(taught[j][word])) - logp + float(reverse.get(j, 0.0))
            advantages[j] += o.teacher_kl * gain
        changed.append(replace(rollout, advantages=advantages))
    # The divergence has the weights and the denominator of the loss: that of a KL whose value it is.
    loss = step_loss(student, changed, o, has_old=has_old)
    if not o.distill:
        return loss
    found = [divergences_of(student, teacher, each, o.distill_beta, top_k) for each in rollouts]
    weights = _weights(rollouts, o)
    parts = [weights[i][j] * value for i, each in enumerate(found) for j, value in each.items()]
    result: Tensor = loss + o.distill * torch.stack(parts).sum()
    return result


def _weights(rollouts: Sequence[Rollout], o: Any) -> list[list[float]]:
    """The weight of each token's loss in the loss of a step."""
    own = [[each.weight * w for w in each.weights] for each in rollouts]
    sums = [sum(each) for each in own]
    count = sum(each.weight for each, total in zip(rollouts, sums, strict=True) if total)
    if o.denominator == "token":
        return [[w / sum(sums) for w in each] for each in own]
    assert o.denominator == "trajectory"
    return [[r.weight * w / total / count for w in each] for r, each, total in zip(rollouts, own, sums, strict=True)]
