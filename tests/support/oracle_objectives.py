"""Slow, obvious twins of the objectives: each paper's formula, trajectory by trajectory, one forward for each.

    Rollout      one trajectory with everything an objective may read, per token
    step_loss    the loss of an optimiser step over rollouts, attached to the model, in float64

No row, no tree, no term: loops over rollouts and their trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rollout:
    """Token ids, and per token its span weight (0 if it is not trained), advantage and log-probabilities.

    `weight` is that of the whole rollout, which counts as so many equal rollouts. `temperatures` has the sampler's
    temperature of each token; None for 1. `kept` has the ids that its top-p left, none for all. `returns` and
    `old_values` are about the state before each token, for a model with a value head.
    """

    tokens: list[int]
    weights: list[float]
    advantages: list[float]
    old: list[float]
    ref: list[float]
    sampling: list[float]
    group: str
    reward: float
    temperatures: list[float] | None = None
    returns: list[float] | None = None
    old_values: list[float] | None = None
    weight: float = 1.0
    kept: list[list[int]] | None = None
    rollout: str | None = None  # of which this is a sample; None if it is the whole rollout

    @property
    def trained(self) -> list[int]:
        return [j for j, weight in enumerate(self.weights) if weight]


def own_logprobs(model: Any, rollout: Rollout) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Log-probability and entropy at each trained position, from the plain model run on this rollout alone."""
    tokens = torch.tensor(rollout.tokens)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    if rollout.temperatures is not None:
        # logits[j - 1] predict token j; nothing reads the last ones
        logits = logits / torch.tensor([*rollout.temperatures[1:], 1.0], dtype=logits.dtype)[:, None]
    logs = logits.log_softmax(-1)
    logprobs, entropies = {}, {}
    for j in rollout.trained:
        ids = rollout.kept[j] if rollout.kept is not None else []
        own = logs[j - 1, ids] if ids else logs[j - 1]
        total = own.exp().sum().log()  # of the kept words, which are renormalised
        logprobs[j] = logs[j - 1, rollout.tokens[j]] - total
        entropies[j] = -((own - total).exp() * (own - total)).sum()
    return logprobs, entropies


def own_values(model: Any, rollout: Rollout) -> dict[int, Tensor]:
    """Value of the state before each trained position, from the plain model run on this rollout alone."""
    output = model(input_ids=torch.tensor(rollout.tokens)[None], use_cache=False, output_hidden_states=True)
    states, head = output.hidden_states[-1][0], model.value_head
    return {j: (states[j - 1] * head.weight[0]).sum() + head.bias[0] for j in rollout.trained}


def value_losses(model: Any, rollout: Rollout, o: Any) -> dict[int, Tensor]:
    """The clipped value loss of each trained token."""
    assert rollout.returns is not None
    losses = {}
    for j, value in own_values(model, rollout).items():
        target = rollout.returns[j]
        losses[j] = 0.5 * (value - target) ** 2
        if rollout.old_values is not None and o.value_clip:
            old = rollout.old_values[j]
            near = torch.clamp(value, old - o.value_clip, old + o.value_clip)
            losses[j] = torch.max(losses[j], 0.5 * (near - target) ** 2)
    return losses


def clip(value: Tensor, low: float, high: float) -> Tensor:
    return torch.clamp(value, 1 - low, 1 + high)


def policy_losses(rollout: Rollout, logprobs: dict[int, Tensor], o: Any, *, has_old: bool) -> dict[int, Tensor]:
    """The policy loss of each trained token, before KL, entropy and importance weights."""
    recorded = rollout.sampling if o.old_logprobs == "sampler" else rollout.old
    has_old = has_old or o.old_logprobs == "sampler"
    olds = {
        j: torch.tensor(recorded[j], dtype=torch.float64) if has_old else logprobs[j].detach() for j in rollout.trained
    }
    if o.loss == "gmpo":
        return gmpo_losses(rollout, logprobs, olds, o)
    losses = {}
    mean: Any = sum(logprobs[j] - olds[j] for j in rollout.trained)
    mean = mean / max(1, len(rollout.trained))
    for j in rollout.trained:
        logp, advantage = logprobs[j], rollout.advantages[j]
        ratio = torch.exp(logp - olds[j])
        if o.loss in TOKEN_LOSSES:
            losses[j] = TOKEN_LOSSES[o.loss](logp, olds[j], advantage, o)
            continue
        if o.loss == "vespo":
            losses[j] = -vespo_weight(rollout, logprobs, olds, advantage, o) * advantage * logp
            continue
        if o.loss == "gspo":
            ratio = torch.exp(mean).detach() * torch.exp(logp) / torch.exp(logp).detach()
        value = torch.min(ratio * advantage, clip(ratio, o.clip_low, o.clip_high) * advantage)
        if o.dual_clip is not None and advantage < 0:
            value = torch.max(value, torch.tensor(o.dual_clip * advantage, dtype=torch.float64))
        losses[j] = -value
    return losses


def cispo(logp: Tensor, old: Tensor, advantage: float, o: Any) -> Any:
    return -clip(torch.exp(logp - old), o.clip_low, o.clip_high).detach() * advantage * logp


def sapo(logp: Tensor, old: Tensor, advantage: float, o: Any) -> Any:
    constants = {"temperature_pos": 1.0, "temperature_neg": 1.05, **dict(o.loss_constants)}
    tau = constants["temperature_pos" if advantage > 0 else "temperature_neg"]
    gate = 1 / (1 + torch.exp(-tau * (torch.exp(logp) / torch.exp(old) - 1)))
    return -gate * 4 / tau * advantage


def dppo_tv(logp: Tensor, old: Tensor, advantage: float, o: Any) -> Any:
    p, q = math.exp(logp.item()), math.exp(old.item())
    if (advantage > 0 and p - q > o.clip_high) or (advantage <= 0 and q - p > o.clip_low):
        return logp * 0
    return -min(p / q, o.dual_clip) * advantage * logp


def dppo_kl(logp: Tensor, old: Tensor, advantage: float, o: Any) -> Any:
    p, q = math.exp(logp.item()), math.exp(old.item())
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if (advantage > 0 and p > q and divergence > o.clip_high) or (advantage <= 0 and p < q and divergence > o.clip_low):
        return logp * 0
    return -min(p / q, o.dual_clip) * advantage * logp


def dro(logp: Tensor, old: Tensor, advantage: float, o: Any) -> Any:
    return -(logp * advantage - 0.5 * o.beta * (logp - old) ** 2)


def reinforce(logp: Tensor, old: Tensor, advantage: float, o: Any) -> Any:
    return -advantage * logp


TOKEN_LOSSES = {each.__name__: each for each in (cispo, sapo, dppo_tv, dppo_kl, dro, reinforce)}


def gmpo_losses(rollout: Rollout, logprobs: dict[int, Tensor], olds: dict[int, Tensor], o: Any) -> dict[int, Tensor]:
    """-A_t times the geometric mean of the clipped ratios; the gradient of a mean goes to its own token."""
    clipped = {}
    for j in rollout.trained:
        shift, push = logprobs[j] - olds[j], 1 if rollout.advantages[j] > 0 else -1
        near = torch.clamp(shift, -o.clip_low, o.clip_high)
        clipped[j] = push * torch.min(push * shift, push * near)
    mean = sum(each.item() for each in clipped.values()) / max(1, len(clipped))
    return {j: -rollout.advantages[j] * math.exp(mean) * (1 + own - own.detach()) for j, own in clipped.items()}


def vespo_weight(
    rollout: Rollout, logprobs: dict[int, Tensor], olds: dict[int, Tensor], advantage: float, o: Any
) -> float:
    product = 1.0
    for j in rollout.trained:
        product *= math.exp(logprobs[j].item() - olds[j].item())
        if o.importance_cap is not None:
            product *= max(o.importance_floor, min(math.exp(olds[j].item() - rollout.sampling[j]), o.importance_cap))
    constants: dict[str, float] = {"k_pos": 2, "lambda_pos": 3, "k_neg": 3, "lambda_neg": 2, **dict(o.loss_constants)}
    k, rate = (constants[f"{name}_{'pos' if advantage >= 0 else 'neg'}"] for name in ("k", "lambda"))
    weight: float = product**k * math.exp(rate * (1 - product))
    return weight


def correction(rollout: Rollout, logprobs: dict[int, Tensor], o: Any, j: int, *, has_old: bool) -> float:
    """The factor of the policy loss of token j because the sampler was another policy: a weight, or 0."""
    olds = {i: rollout.old[i] if has_old else logprobs[i].item() for i in rollout.trained}
    ratios = [math.exp(olds[i] - rollout.sampling[i]) for i in rollout.trained]
    m = math.exp(olds[j] - rollout.sampling[j])
    if o.importance_level == "sequence":
        m = math.prod(ratios)
    elif o.importance_level == "geometric":
        m = math.prod(ratios) ** (1 / len(ratios))
    factor = 1.0
    if o.importance_cap is not None and o.loss != "vespo":
        factor = max(o.importance_floor, min(m, o.importance_cap))
    if o.importance_mask is not None and not o.importance_mask[0] <= m <= o.importance_mask[1]:
        return 0.0
    lag = sum(rollout.sampling[i] - logprobs[i].item() for i in rollout.trained) / len(rollout.trained)
    if o.sequence_mask is not None and rollout.advantages[j] < 0 and lag > o.sequence_mask:
        return 0.0
    return factor


def kl(logp: Tensor, ref: float, estimator: str, old: float) -> Tensor:
    if estimator == "unbiased":
        return torch.exp(logp - old) * (torch.exp(ref - logp) - (ref - logp) - 1)
    if estimator == "k1":
        return logp - ref
    if estimator == "k2":
        return 0.5 * (logp - ref) ** 2
    return torch.exp(ref - logp) / 1.0 - (ref - logp) - 1


def token_losses(model: Any, rollout: Rollout, o: Any, *, has_old: bool) -> dict[int, Tensor]:
    """Loss of each trained token of a rollout."""
    if o.loss == "value":
        return value_losses(model, rollout, o)
    losses = sequence_losses(rollout, own_logprobs(model, rollout), o, has_old=has_old)
    if o.value_coef:
        losses = {j: losses[j] + o.value_coef * loss for j, loss in value_losses(model, rollout, o).items()}
    return losses


def sequence_losses(
    rollout: Rollout, numbers: tuple[dict[int, Tensor], dict[int, Tensor]], o: Any, *, has_old: bool
) -> dict[int, Tensor]:
    """Loss of each trained token of a sequence, without values, from its log-probabilities and entropies."""
    logprobs, entropies = numbers
    losses = policy_losses(rollout, logprobs, o, has_old=has_old)
    for j in rollout.trained:
        losses[j] = losses[j] * correction(rollout, logprobs, o, j, has_old=has_old)
        divergence = kl(logprobs[j], rollout.ref[j], o.kl_estimator, rollout.old[j])
        losses[j] = losses[j] + o.kl * divergence - o.entropy * entropies[j]
    return losses


def losses_of_whole_rollouts(
    model: Any, samples: Sequence[Rollout], o: Any, *, has_old: bool
) -> list[dict[int, Tensor]]:
    """Losses of the trained tokens of each sample, with the samples of a rollout behind each other as one sequence."""
    losses: list[dict[int, Tensor]] = [{} for _ in samples]
    names = [sample.rollout or f"alone {i}" for i, sample in enumerate(samples)]
    for name in dict.fromkeys(names):
        inside = [i for i, other in enumerate(names) if other == name]
        starts, end = {}, 0
        numbers: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
        for i in inside:
            starts[i], end = end, end + len(samples[i].tokens)
            for joined, own in zip(numbers, own_logprobs(model, samples[i]), strict=True):
                joined.update({starts[i] + j: value for j, value in own.items()})
        columns = ("tokens", "weights", "advantages", "old", "ref", "sampling")
        merged: dict[str, Any] = {
            column: [x for i in inside for x in getattr(samples[i], column)] for column in columns
        }
        whole = sequence_losses(replace(samples[inside[0]], **merged), numbers, o, has_old=has_old)
        for i in inside:
            losses[i] = {j: whole[starts[i] + j] for j in samples[i].trained}
    return losses


def step_loss(model: Any, rollouts: Sequence[Rollout], o: Any, *, has_old: bool = True) -> Tensor:
    """Loss of one optimiser step over `rollouts` under the objective `o`."""
    if o.loss == "dpo":
        return dpo(model, rollouts, o)
    weighted, sums = [], []
    is_whole = o.sequence_of == "rollout"
    if is_whole:
        per_sample = losses_of_whole_rollouts(model, rollouts, o, has_old=has_old)
    else:
        per_sample = [token_losses(model, rollout, o, has_old=has_old) for rollout in rollouts]
    for rollout, losses in zip(rollouts, per_sample, strict=True):
        total: Any = sum(rollout.weight * rollout.weights[j] * losses[j] for j in rollout.trained)
        weighted.append(total)
        sums.append(rollout.weight * sum(rollout.weights))
    live = [i for i, s in enumerate(sums) if s]
    count = sum(rollouts[i].weight for i in live)
    if o.denominator == "token":
        result: Any = sum(weighted[i] for i in live) / sum(sums)
    elif o.denominator == "trajectory" and not is_whole:
        means = [weighted[i] / sums[i] for i in live]
        result = sum(rollouts[i].weight * mean for i, mean in zip(live, means, strict=True)) / count
    elif o.denominator in ("rollout", "trajectory"):
        units = {i: rollouts[i].rollout or f"alone {i}" for i in live}
        weights = {units[i]: rollouts[i].weight for i in live}
        result = 0
        for name, weight in weights.items():
            inside = [i for i in live if units[i] == name]
            mean = sum(weighted[i] for i in inside) / sum(sums[i] for i in inside)
            result = result + weight * mean / sum(weights.values())
    elif o.denominator == "group":
        groups = sorted({rollouts[i].group for i in live})
        means = []
        for name in groups:
            inside = [i for i in live if rollouts[i].group == name]
            means.append(sum(weighted[i] for i in inside) / sum(sums[i] for i in inside))
        result = sum(means) / len(groups)
    else:
        if is_whole:
            count = sum({rollouts[i].rollout or f"alone {i}": rollouts[i].weight for i in live}.values())
        result = sum(weighted[i] / o.response_length for i in live) / count
    assert isinstance(result, Tensor)
    return result


def gspo_of_sequences(model: Any, rollouts: Sequence[Rollout], o: Any) -> Tensor:
    """GSPO's eq. 5: one ratio and one advantage per sequence, the gradient through the ratio itself."""
    total: Any = 0
    for rollout in rollouts:
        logprobs, _ = own_logprobs(model, rollout)
        differences = [logprobs[j] - rollout.old[j] for j in rollout.trained]
        ratio = torch.exp(torch.stack(differences).mean())
        advantage = rollout.advantages[rollout.trained[0]]
        total = total - torch.min(ratio * advantage, clip(ratio, o.clip_low, o.clip_high) * advantage)
    result: Tensor = total / len(rollouts)
    return result


def dpo(model: Any, rollouts: Sequence[Rollout], o: Any) -> Tensor:
    shifts: list[Any] = []
    for rollout in rollouts:
        logprobs, _ = own_logprobs(model, rollout)
        shifts.append(sum(logprobs[j] - rollout.ref[j] for j in rollout.trained))
    losses = []
    for i, chosen in enumerate(rollouts):
        for k, rejected in enumerate(rollouts):
            live = bool(chosen.trained) and bool(rejected.trained)
            if live and chosen.group == rejected.group and chosen.reward > rejected.reward:
                losses.append(-torch.log(torch.sigmoid(o.beta * (shifts[i] - shifts[k]))))
    return torch.stack(losses).mean()
