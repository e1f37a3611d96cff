r"""Objectives over terms: what a trainer minimises when one loss weight per token is not enough.

A term is one (trajectory, trained token) pair. Log-probabilities are computed once per token of the tree and gathered
by the terms of every trajectory through it, each with its own advantage, old log-probability and weight:

    0 - 1 - 2      tokens   1  2  3          a and b share token 1, which is
         \         a        1  2             computed once and has two terms
           3       b        1     3

The loss of an optimiser step is a sum over its terms t of trajectories i(t), of weight w_t (column term_weight):

    L = sum_t f_i(t) w_t l_t        f from the denominator, over all trajectories i of the step together:

    token        f_i = 1 / sum_t w_t                              every trained token counts alike
    trajectory   f_i = 1 / (N W_i)     W_i = sum_(t of i) w_t     every trajectory counts alike, N of them
    group        f_i = 1 / (G W_g)     W_g = sum_(i of g) W_i     every group counts alike, G of them
    global       f_i = 1 / (N response_length)                    a constant per trajectory, as in Dr. GRPO

With r_t = exp(logp_t - old_t), A_t the advantage, sg() no gradient, and clip(r) = min(max(r, 1 - low), 1 + high):

    ppo     -min(r_t A_t, clip(r_t) A_t)                            Schulman et al. 2017 (1707.06347), eq. 7
            where A_t < 0, at most -dual_clip A_t                   Ye et al. 2020 (1912.09729)
    grpo    the same, one mean per trajectory, plus kl              Shao et al. 2024 (2402.03300), eq. 3
    dapo    grpo with clip_high 0.28 and one mean over tokens       Yu et al. 2025 (2503.14476), eq. 8
            (of the step, as its code has it; of each group in the equation: denominator group)
    dr_grpo grpo without the division by lengths: global            Liu et al. 2025 (2503.20783), sec. 3.2
    gspo    the same with s_t = sg(s_i) exp(logp_t - sg(logp_t)),   Zheng et al. 2025 (2507.18071), eq. 7 and 13
            s_i = exp(mean over i's tokens of logp - old)           (a scalar advantage gives eq. 5, the sequence's)
    cispo   -sg(clip(r_t)) A_t logp_t                               MiniMax 2025 (2506.13585), eq. 4
    dpo     -log sigmoid(beta (h_c - h_r)),                         Rafailov et al. 2023 (2305.18290), eq. 7
            h_i = sum over i's tokens of logp - ref

plus kl * k_t - entropy * H_t, with x = ref_t - logp_t and k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x (Schulman 2020,
http://joschu.net/blog/kl-approx.html), H_t the entropy of the distribution that the token is drawn from. With
`importance_cap`, -min(...) and its like are multiplied by sg(min(exp(old_t - sampling_t), cap)): truncated importance
weights between the sampler and the trainer (Yao et al. 2025, https://fengyao.notion.site/off-policy-rl).

Pairs of DPO are all ordered pairs of trajectories of one group with different rewards, the higher one chosen; the loss
is the mean over the pairs of the step. Without old log-probabilities old is sg(logp): on-policy, every ratio 1.

This file knows no model and no files: arrays in, a scalar out. `denominators` makes f and refuses unsuitable data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from treepack.data.batch import TermTensors
from treepack.errors import TreepackError

LOSSES = ("sft", "grpo", "ppo", "gspo", "cispo", "dpo")
DENOMINATORS = ("token", "trajectory", "group", "global")
ESTIMATORS = ("k1", "k2", "k3")

# Terms whose values exist at a time in forward and backward: some 10 MB, whatever the row holds.
TERM_CHUNK = 1 << 17

_CLIPPED = {"clip_low": 0.2, "clip_high": 0.2}
_PRESETS: dict[str, dict[str, Any]] = {
    "sft": {},
    "ppo": {**_CLIPPED, "denominator": "token"},
    "grpo": {**_CLIPPED, "denominator": "trajectory"},
    "dapo": {"loss": "grpo", "clip_low": 0.2, "clip_high": 0.28, "denominator": "token"},
    "dr_grpo": {"loss": "grpo", **_CLIPPED, "denominator": "global"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "denominator": "trajectory"},
    "cispo": {"clip_low": 1.0, "clip_high": 0.2, "denominator": "token"},
    "dpo": {},
}
PRESETS = tuple(_PRESETS)

_SHARED = {"clip_low", "clip_high", "denominator", "response_length", "kl", "kl_estimator", "entropy", "importance_cap"}
_OPTIONS = {
    **{name: _SHARED | {"dual_clip"} for name in ("ppo", "grpo", "gspo")},
    **{"cispo": _SHARED, "dpo": {"beta"}, "sft": set()},
}

_PAIR_MEANS = ("accuracy", "margin", "chosen_reward", "rejected_reward")
_MEANS = ("ratio", "clip_fraction_low", "clip_fraction_high", "old_kl", "kl", "entropy", "importance", "truncated")


@dataclass(frozen=True)
class Objective:
    """What to minimise; `choose_objective` fills in what is usual for a loss.

    `clip_low` and `clip_high` are distances from 1; `kl` and `entropy` are coefficients; `importance_cap` and
    `dual_clip` None switch those off. `sft` is the weighted cross-entropy of `loss.weighted_nll` and has no options.
    """

    loss: str = "sft"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    denominator: str = "token"
    response_length: int = 1
    kl: float = 0.0
    kl_estimator: str = "k3"
    entropy: float = 0.0
    importance_cap: float | None = None
    beta: float = 0.1

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        known = {"loss": LOSSES, "denominator": DENOMINATORS, "kl_estimator": ESTIMATORS}
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                raise TreepackError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(choices)}")
        above = {"clip_low": 0, "clip_high": 0, "dual_clip": 1, "response_length": 1, "kl": 0, "entropy": 0}
        for name, least in {**above, "importance_cap": 0, "beta": 0}.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= least):
                raise TreepackError(f"{name} is {value}; expected a finite number of at least {least}")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of `schema.TERMS` without which it has no value."""
        if self.loss == "sft":
            return ()
        if self.loss == "dpo":
            return ("term_ref_logprob", "trajectory_rewards")
        wanted = {
            "term_advantage": True,
            "term_ref_logprob": self.kl > 0,
            "term_sampling_logprob": self.importance_cap is not None,
        }
        return tuple(name for name, needed in wanted.items() if needed)


def choose_objective(name: str, **options: Any) -> Objective:
    """The objective called `name`, a loss or a preset (dapo, dr_grpo), with its usual values where an option is None.

    Raises:
        TreepackError: an unknown name, an option that the loss does not have, or a value that makes no sense.
    """
    if name not in _PRESETS:
        raise TreepackError(f"loss is {name!r}; expected one of {', '.join(PRESETS)}")
    usual = {"loss": name, **_PRESETS[name]}
    given = {option: value for option, value in options.items() if value is not None}
    strange = sorted(given.keys() - _OPTIONS[usual["loss"]])
    if strange:
        known = sorted(_OPTIONS[usual["loss"]])
        has = f"it has {', '.join(known)}" if known else "it has no options"
        raise TreepackError(f"{strange[0]} is no option of the loss {name}; {has}")
    return Objective(**{**usual, **given})


def objective_loss(
    logprobs: Tensor,
    entropies: Tensor,
    terms: TermTensors,
    factors: Tensor,
    objective: Objective,
    *,
    chunk: int = TERM_CHUNK,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The part of an optimiser step's loss that comes from one row, and sums to make the step's means from.

    Terms are taken `chunk` at a time under checkpointing, so that ten times as many terms as tokens cost no memory but
    their columns. Sums run in float64.

    Args:
        logprobs: [n], of `terms.tokens`.
        entropies: [n], nats.
        terms: the row's terms.
        factors: float64 [K], f of the row's trajectories; see `denominators.step_factors`.
        objective: any but sft.
        chunk: terms whose values exist at a time.

    Returns:
        the loss, a float64 scalar attached to `logprobs`, already divided by the step's denominator; and float64 sums:
        `weight`, and values whose sums over a step divided by the step's `weight` are its means.
    """
    assert objective.loss != "sft", "sft is loss.weighted_nll"
    if objective.loss == "dpo":
        return _dpo(logprobs, terms, factors, objective, chunk)
    log_ratios = None
    if objective.loss == "gspo":
        with torch.no_grad():
            log_ratios = _sequence_log_ratios(logprobs, terms, len(factors), chunk)
    total = logprobs.sum(dtype=torch.float64) * 0
    sums = torch.zeros(len(_MEANS), dtype=torch.float64, device=logprobs.device)
    for part in _slices(terms, chunk):
        own, means = checkpoint(
            _term_sums, logprobs, entropies, part, factors, log_ratios, objective, use_reentrant=False
        )
        total, sums = total + own, sums + means
    known = dict(zip(_MEANS, sums.unbind(), strict=True))
    return total, {"weight": terms.weight.sum(), **{name: known[name] for name in sum_names(objective)[1:]}}


def sum_names(objective: Objective) -> tuple[str, ...]:
    """Names of the sums that `objective_loss` gives, "weight" first; none for sft."""
    if objective.loss == "sft":
        return ()
    if objective.loss == "dpo":
        return ("weight", *_PAIR_MEANS)
    absent = set() if objective.kl else {"kl"}
    absent |= set() if objective.importance_cap is not None else {"importance", "truncated"}
    return ("weight", *(name for name in _MEANS if name not in absent))


def _slices(terms: TermTensors, chunk: int) -> list[TermTensors]:
    """Views of `terms`, `chunk` terms each."""
    per_term = ("index", "trajectory", "weight", "advantage", "sampling_logprob", "old_logprob", "ref_logprob")
    values = {field.name: getattr(terms, field.name) for field in fields(terms)}
    found = []
    for start in range(0, len(terms.index), chunk):
        cut = {name: values[name][start : start + chunk] for name in per_term if values[name] is not None}
        found.append(TermTensors(**{**values, **cut}))
    return found


def _gathered(logprobs: Tensor, part: TermTensors) -> tuple[Tensor, Tensor]:
    """Current and old log-probabilities of the terms, float64."""
    current = logprobs.index_select(0, part.index).double()
    return current, current.detach() if part.old_logprob is None else part.old_logprob.double()


def _sequence_log_ratios(logprobs: Tensor, terms: TermTensors, num_trajectories: int, chunk: int) -> Tensor:
    """Mean over each trajectory's trained tokens of logp - old, float64 [num_trajectories]."""
    sums = torch.zeros(2, num_trajectories, dtype=torch.float64, device=logprobs.device)
    for part in _slices(terms, chunk):
        current, old = _gathered(logprobs, part)
        trained = (part.weight > 0).double()
        sums.index_add_(1, part.trajectory, torch.stack([(current - old) * trained, trained]))
    return sums[0] / sums[1].clamp(min=1)


def _term_sums(
    logprobs: Tensor,
    entropies: Tensor,
    part: TermTensors,
    factors: Tensor,
    log_ratios: Tensor | None,
    objective: Objective,
) -> tuple[Tensor, Tensor]:
    """Sum of f w l over some terms, and of w times each of `_MEANS`."""
    current, old = _gathered(logprobs, part)
    entropy = entropies.index_select(0, part.index).double()
    if log_ratios is None:
        ratio = (current - old).exp()
    else:
        ratio = (log_ratios.index_select(0, part.trajectory) + current - current.detach()).exp()
    assert part.advantage is not None
    loss = -_surrogate(ratio, current, part.advantage, objective)
    importance = torch.ones_like(old)
    if objective.importance_cap is not None:
        assert part.sampling_logprob is not None
        importance = (old - part.sampling_logprob.double()).exp()
        loss = loss * importance.clamp(max=objective.importance_cap)
    kl = torch.zeros_like(current)
    if objective.kl:
        assert part.ref_logprob is not None
        kl = _kl(part.ref_logprob.double() - current, objective.kl_estimator)
        loss = loss + objective.kl * kl
    if objective.entropy:
        loss = loss - objective.entropy * entropy
    with torch.no_grad():
        low, high = ratio < 1 - objective.clip_low, ratio > 1 + objective.clip_high
        if objective.loss != "cispo":  # the minimum takes the clipped value on one side only
            low, high = low & (part.advantage < 0), high & (part.advantage > 0)
        drift = current - old
        cap = math.inf if objective.importance_cap is None else objective.importance_cap
        columns = [ratio, low, high, drift.exp() - 1 - drift, kl, entropy, importance.clamp(max=cap), importance > cap]
        means = torch.stack([(part.weight * column).sum() for column in columns])
    return (factors.index_select(0, part.trajectory) * part.weight * loss).sum(), means


def _surrogate(ratio: Tensor, current: Tensor, advantage: Tensor, objective: Objective) -> Tensor:
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    if objective.loss == "cispo":
        return clipped.detach() * advantage * current
    least = torch.minimum(ratio * advantage, clipped * advantage)
    if objective.dual_clip is None:
        return least
    return torch.where(advantage < 0, torch.maximum(least, objective.dual_clip * advantage), least)


def _kl(x: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return -x
    return x.square() / 2 if estimator == "k2" else x.exp() - 1 - x


def preference_pairs(group: Tensor, reward: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen and rejected trajectories, int64 [P] each: all pairs within a group whose rewards differ.

    O(K^2) in the K trajectories.

    Args:
        group: [K] integers.
        reward: [K]; NaN compares with nothing.
        trained: bool [K]; a trajectory without trained tokens is in no pair.
    """
    better = (group[:, None] == group) & (reward[:, None] > reward) & trained[:, None] & trained
    chosen, rejected = better.nonzero(as_tuple=True)
    return chosen, rejected


def _dpo(
    logprobs: Tensor, terms: TermTensors, factors: Tensor, objective: Objective, chunk: int
) -> tuple[Tensor, dict[str, Tensor]]:
    assert terms.reward is not None
    num = len(factors)
    shifts = torch.zeros(num, dtype=torch.float64, device=logprobs.device) + logprobs.sum(dtype=torch.float64) * 0
    trained = torch.zeros(num, dtype=torch.bool, device=logprobs.device)
    for part in _slices(terms, chunk):
        shifts = shifts + checkpoint(_shift_sums, logprobs, part, num, use_reentrant=False)
        trained[part.trajectory[part.weight > 0]] = True
    chosen, rejected = preference_pairs(terms.group, terms.reward, trained)
    margins = objective.beta * (shifts.index_select(0, chosen) - shifts.index_select(0, rejected))
    loss = -(logsigmoid(margins) * factors.index_select(0, chosen)).sum()
    with torch.no_grad():
        own = [objective.beta * shifts.index_select(0, side).sum() for side in (chosen, rejected)]
        sums = [(margins > 0).double().sum(), margins.sum(), *own]
    return loss, {"weight": margins.new_tensor(len(margins)), **dict(zip(_PAIR_MEANS, sums, strict=True))}


def _shift_sums(logprobs: Tensor, part: TermTensors, num_trajectories: int) -> Tensor:
    """Sum over each trajectory's trained tokens of logp - ref, float64 [num_trajectories]."""
    assert part.ref_logprob is not None
    shift = logprobs.index_select(0, part.index).double() - part.ref_logprob.double()
    zeros = torch.zeros(num_trajectories, dtype=torch.float64, device=logprobs.device)
    return zeros.index_add(0, part.trajectory, shift * (part.weight > 0))
