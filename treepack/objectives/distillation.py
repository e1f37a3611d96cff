r"""Divergences between the laws of a student and a teacher, and the teacher's part of an advantage.

p is the student's law of the next token and q that of the teacher, both softmax(logits / T) at the temperature T of the
token. Both depend on the path alone, so a token of the tree has one divergence; its weight is the sum over the
trajectories through it. With m = (1 - beta) p + beta q:

    D_0  = KL(q || p) = sum q log(q / p)              forward KL   Hinton et al. 2015 (1503.02531)
    D_1  = KL(p || q) = sum p log(p / q)              reverse KL   Gu et al. 2023 (2306.08543)
    D_b  = beta KL(q || m) + (1 - beta) KL(p || m)    generalised Jensen-Shannon, 0 < beta < 1:
                                                      Agarwal et al. 2023, GKD (2306.13649), eq. 1
    distill * D_b is added to the loss of a term, as kl * k_t is.

Of a teacher's top K, the sums run over these K words and one bucket with the rest, whose probabilities are 1 - sum p_k
and 1 - sum q_k: a divergence of two laws of K + 1 outcomes, which is 0 or more and at most the full one. Without the
bucket, the reverse KL would fall if the student leaves the K words.

Policy gradient on the sampled token, in any policy loss:

    A'_t = A_t + teacher_kl * (log q_t - log p_t + b_t)     Lu et al. 2025,
                                                            https://thinkingmachines.ai/blog/on-policy-distillation
    b_t  = sg(KL(p || q)) with teacher_baseline, else 0     Oh et al. 2026 (2605.07865)

log p_t is the old log-probability, or sg(log p_t) without one. KL(p || q) is minus the mean of log q - log p under the
student, so b_t is a baseline: it depends on no sampled token, and changes the variance and not the mean. The advantage
A_t of the data is left out (0) by the presets opd and distill.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treepack.objectives.trajectory_ratios import gather_logprobs

if TYPE_CHECKING:
    from treepack.data.batch import TermTensors
    from treepack.objectives.objective import Objective


def divergence(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return D_beta of laws over B outcomes, and its slopes by the student's log-probabilities.

    The slopes are right up to a multiple of p, which a softmax cancels: the derivative by the logit of outcome b is
    slope_b - p_b * (sum of the slopes).

    Args:
        student: log p, float [n, B]; -inf is 0.
        teacher: log q, float [n, B].
        beta: 0 for the forward KL, 1 for the reverse KL.

    Returns:
        [n], nats, and [n, B].
    """
    p, q = student.exp(), teacher.exp()
    if beta == 0:
        return _product(q, teacher - student).sum(-1), -q
    if beta == 1:
        slopes = _product(p, student - teacher)
        return slopes.sum(-1), slopes
    mean = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    slopes = (1 - beta) * _product(p, student - mean)
    return beta * _product(q, teacher - mean).sum(-1) + slopes.sum(-1), slopes


def _product(weight: Tensor, logs: Tensor) -> Tensor:
    """Return weight * logs, with 0 for a weight of 0, even if the logarithm is infinite."""
    return torch.where(weight > 0, weight * logs, 0.0)


def log_rest(logprobs: Tensor, stored: torch.dtype) -> Tensor:
    """Return the logarithm of 1 - sum exp(logprobs) [n], of some words [n, K] of a teacher.

    Its minimum is the rounding of the dtype `stored` of the recorded log-probabilities, which contain no smaller rest.
    """
    rest = -torch.expm1(logprobs.double().logsumexp(-1))
    return rest.clamp(min=torch.finfo(stored).eps).log().to(logprobs.dtype)


def with_teacher(terms: TermTensors, logprobs: Tensor, divergences: Tensor | None, objective: Objective) -> TermTensors:
    """Return the terms with the advantages A' in place of A.

    Args:
        terms: the terms, about the tokens in `logprobs`.
        logprobs: [n], of the student.
        divergences: [n], KL(p || q); read with `teacher_baseline`.
        objective: a policy loss.
    """
    if objective.rewarded and not objective.teacher_kl:
        return terms
    _, student = gather_logprobs(logprobs.detach(), terms, objective)
    advantage = terms.advantage
    if not objective.rewarded or advantage is None:
        advantage = torch.zeros_like(student)
    if objective.teacher_kl:
        assert terms.teacher_logprob is not None
        gain = terms.teacher_logprob.double() - student
        if objective.teacher_baseline:
            assert divergences is not None
            gain = gain + divergences.detach().double().index_select(0, terms.index)
        advantage = advantage + objective.teacher_kl * gain
    return replace(terms, advantage=advantage)
