r"""Objectives over terms: losses for which one weight per token is not enough.

A term is one (trajectory, trained token) pair. Log-probabilities are computed once per token of the tree. The terms of
all trajectories through the token gather its value, each with a separate advantage, old log-probability and weight:

    0 - 1 - 2      tokens   1  2  3          a and b share token 1, which is
         \         a        1  2             computed once and has two terms
           3       b        1     3

The loss of an optimiser step is a sum over its terms t. Term t belongs to trajectory i(t) and has weight w_t (column
term_weight):

    L = sum_t f_i(t) w_t l_t        f from the denominator, over all trajectories i of the step together:

    token        f_i = 1 / sum_t w_t                              every trained token counts the same
    trajectory   f_i = v_i / (V W_i)   W_i = sum_(t of i) w_t     each trajectory counts v_i of V = sum_i v_i
    rollout      f_i = v_r / (V W_r)   W_r = sum_(i of r) W_i     each rollout counts v_r of V = sum_r v_r
    group        f_i = 1 / (G W_g)     W_g = sum_(i of g) W_i     each of the G groups counts the same
    global       f_i = 1 / (V response_length)                    a constant per trajectory, as in Dr. GRPO
                 trajectory and global are of rollouts if `sequence_of` is "rollout"
    edge         as token, with e_t w_t in place of w_t           each edge of a sampled tree counts the same: TreeRPO
                 (e_t: column term_edge_factor)                   (TRACE, 2606.11119, eq. 47; `rl.advantages.edges`)

v_i is the weight of the trajectory (column trajectory_weights), which is a factor of its w_t: 1, the weight of its
record, or its leaf weight in a sampled tree. W_i / v_i is the sum of its span weights. With v_i = 1, V is the number of
trajectories.

docs/objectives.md has the l of every loss with its paper, and `treepack.losses` computes them. A policy loss has more
parts, with x = ref_t - logp_t, k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x (Schulman 2020,
http://joschu.net/blog/kl-approx.html), unbiased = k3 exp(logp_t - old_t) (DeepSeek-V3.2, 2512.02556), H_t the entropy
of softmax(logits / T) at the sampler's temperature T, and sg() no gradient:

    l_t = sg(weight_t) surrogate_t + kl * k_t - entropy * H_t + value_coef * value loss

Sampler and trainer may disagree. With m_t = exp(old_t - sampling_t), or its product or geometric mean over the
trajectory or rollout (`importance_level`, `sequence_of`), weight_t is 1 times

    min(max(m, importance_floor), importance_cap)    truncated importance weights (Yao et al. 2025,
                                                     https://fengyao.notion.site/off-policy-rl)
    1 if low <= m <= high, else 0                    `importance_mask`: rejection of tokens or sequences
    0 if A_t < 0 and the mean over i's tokens of     `sequence_mask`: stale sequences with a negative advantage
    sampling - logp is larger, else 1                (DeepSeek-V3.2, 2512.02556, eq. 9)

A loss with `weighs_sampler` has the bounded m_t in its surrogate, and no weight besides. Without old log-probabilities,
old is sg(logp): the update is on-policy and every ratio is 1. With `old_logprobs` "sampler", old is the sampler's. The
pairs of DPO are all pairs of rollouts of one group with different rewards; the loss is the mean over the pairs of the
step.

This file needs neither a model nor files: tensors in, a scalar out. `denominators` computes f and refuses unsuitable
data.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from treepack.columns import BY_PACKED, remedy
from treepack.data.batch import TermTensors
from treepack.errors import TreepackError
from treepack.objectives.distillation import with_teacher
from treepack.objectives.objective import Objective
from treepack.objectives.policy_terms import SAMPLER_KL, SAMPLER_WEIGHT, TERM_MEANS, term_sums
from treepack.objectives.preferences import PAIR_MEANS, pair_loss
from treepack.objectives.term_slices import TERM_CHUNK, term_slices
from treepack.objectives.trajectory_ratios import trajectory_ratios
from treepack.objectives.value_loss import VALUE_SUMS, explain_variance, value_loss


def objective_loss(
    logprobs: Tensor | None,
    entropies: Tensor | None,
    terms: TermTensors,
    factors: Tensor,
    objective: Objective,
    *,
    values: Tensor | None = None,
    divergences: Tensor | None = None,
    chunk: int = TERM_CHUNK,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return one row's part of an optimiser step's loss, and its part of the sums for the step's means.

    Terms are processed in chunks of `chunk` under checkpointing, so that a row with many more terms than tokens needs
    no memory for them besides their columns. Sums run in float64.

    Args:
        logprobs: [n], of `terms.tokens`; None for a loss over values, which does not read them.
        entropies: [n], nats; None for losses over pairs and over values.
        terms: the row's terms.
        factors: float64 [K], f of the row's trajectories; see `denominators.step_factors`.
        objective: any with `has_terms`.
        values: [n], of the state before each of `terms.tokens`; only for an objective with `has_values`.
        divergences: [n], from the teacher's law of each token; only for an objective with `reads_law`.
        chunk: terms whose values are in memory at a time.

    Returns:
        the loss, a float64 scalar attached to `logprobs` or `values` and already divided by the step's denominator; and
        a dict of float64 scalars: `weight`, and sums for `step_means` after they are added up over the step.

    Raises:
        TreepackError: if the terms lack a column of the objective.
    """
    assert objective.has_terms, "a loss over weights is token_loss.weighted_nll"
    terms = weigh_terms(terms, objective)
    if not objective.reads_logprobs:
        assert values is not None, "a loss over values needs values"
        loss, sums = value_loss(values, terms, factors, clip=objective.value_clip, chunk=chunk)
        return loss, {"weight": terms.weight.sum(), **sums}
    assert logprobs is not None, "losses over terms and pairs read log-probabilities"
    if objective.has_pairs:
        return pair_loss(logprobs, terms, factors, objective, chunk=chunk)
    assert entropies is not None
    terms = with_teacher(terms, logprobs, divergences, objective)
    total, sums = _policy_loss((logprobs, entropies, divergences), terms, factors, objective, chunk)
    if objective.has_values:
        assert values is not None, "value_coef needs values"
        loss, more = value_loss(values, terms, factors, clip=objective.value_clip, chunk=chunk)
        total, sums = total + objective.value_coef * loss, {**sums, **more}
    return total, sums


def step_means(sums: dict[str, float], left_out: Collection[str] = ()) -> dict[str, float]:
    """Return the means of a step from the summed sums of `objective_loss` of its rows; {} if these are empty.

    `left_out` are names of means that are not returned, because the data determines them.
    """
    sums = {name: value for name, value in sums.items() if name not in left_out}
    weight = sums.get("weight", 1.0)  # total weight of the terms, or pairs
    means = explain_variance({name: value / weight for name, value in sums.items() if name != "weight"})
    means = _sampler_means(means)
    square = means.pop("importance_square", None)
    if square is None:
        return means
    # (sum w m)^2 / (sum w sum w m^2): the share of the terms that would count as much with equal weights
    return {**means, "effective_sample_size": means["importance"] ** 2 / square if square else 0.0}


def _sampler_means(means: dict[str, float]) -> dict[str, float]:
    """Return the means with the divergence from the sampler: over all known terms, and by their positions."""
    others = dict(means)
    divergences = [others.pop(name, 0.0) for name in SAMPLER_KL]
    weights = [others.pop(name, 0.0) for name in SAMPLER_WEIGHT]
    if not sum(weights):
        return others
    parts = {name: kl / w for name, kl, w in zip(SAMPLER_KL, divergences, weights, strict=True) if w}
    return {**others, "sampler_kl": sum(divergences) / sum(weights), **(parts if len(parts) > 1 else {})}


def _policy_loss(
    scores: tuple[Tensor, Tensor, Tensor | None],
    terms: TermTensors,
    factors: Tensor,
    objective: Objective,
    chunk: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the part of a policy loss that reads log-probabilities; arguments as in `objective_loss`."""
    logprobs, entropies, divergences = scores
    whole = trajectory_ratios(logprobs, terms, len(factors), objective, chunk)
    total = logprobs.sum(dtype=torch.float64) * 0  # depends on `logprobs` even for a row of padding, which has no term
    sums = torch.zeros(len(TERM_MEANS), dtype=torch.float64, device=logprobs.device)
    for part in term_slices(terms, chunk):
        loss, part_sums = checkpoint(
            term_sums, logprobs, entropies, part, factors, whole, objective, divergences, use_reentrant=False
        )
        total, sums = total + loss, sums + part_sums
    return total, name_sums(terms, sums, objective)


def name_sums(terms: TermTensors, sums: Tensor, objective: Objective) -> dict[str, Tensor]:
    """Return the sums of `objective_loss` of a policy loss, from the sums of `term_sums`."""
    sum_of = dict(zip(TERM_MEANS, sums.unbind(), strict=True))
    return {"weight": terms.weight.sum(), **{name: sum_of[name] for name in _policy_means(objective)}}


def weigh_terms(terms: TermTensors, objective: Objective) -> TermTensors:
    """Return the terms with the weights that the objective gives them.

    A row of padding has no terms, and needs no columns.

    Raises:
        TreepackError: a column of the objective is missing; the message names it.
    """
    for column in objective.columns:
        # The likeliest words of a teacher are one law in a batch.
        name = "teacher" if column == "term_teacher_topk_logprobs" else BY_PACKED[column].name
        if len(terms.index) and getattr(terms, name) is None:
            raise TreepackError(f"the rows have no {column}, which the loss {objective.name} needs; {remedy(column)}")
    factors = objective.weighing.column
    factor = None if factors is None else getattr(terms, BY_PACKED[factors].name)
    return terms if factor is None else replace(terms, weight=terms.weight * factor)


def sum_names(objective: Objective) -> tuple[str, ...]:
    """Return the names of the sums of `objective_loss`, "weight" first; empty for sft."""
    if not objective.has_terms:
        return ()
    if objective.has_pairs:
        return ("weight", *PAIR_MEANS)
    policy = _policy_means(objective) if objective.is_policy else ()
    return ("weight", *policy, *(VALUE_SUMS if objective.has_values else ()))


def _policy_means(objective: Objective) -> tuple[str, ...]:
    is_read = {
        **dict.fromkeys(("clip_fraction_low", "clip_fraction_high"), objective.has_advantages and objective.clips),
        **dict.fromkeys(("ratio", "old_kl", "zero_advantage"), objective.has_advantages),
        **dict.fromkeys(("importance", "importance_square"), objective.corrects_sampler),
        "truncated": objective.importance_cap is not None,
        "masked": objective.importance_mask is not None or objective.sequence_mask is not None,
        "kl": objective.kl > 0,
        "divergence": objective.reads_law,
        "teacher_kl": objective.teacher_kl > 0,
    }
    return tuple(name for name in TERM_MEANS if is_read.get(name, True))
