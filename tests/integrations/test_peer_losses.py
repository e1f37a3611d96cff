"""Policy losses equal the functions of verl and TRL on the same numbers: values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from treepack.data.batch import TermTensors
from treepack.objectives.losses import objective_loss
from treepack.objectives.objective import Objective, choose_objective

pytestmark = pytest.mark.integrations

SEQUENCES, LENGTH = 6, 9


class Numbers:
    """Random log-probabilities [SEQUENCES, LENGTH] of some tokens, the advantage of each sequence, and a mask."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*sizes: int, scale: float) -> Tensor:
            return torch.randn(*sizes, generator=generator, dtype=torch.float64) * scale

        self.old = -normal(SEQUENCES, LENGTH, scale=1.0).abs() - 0.1
        self.current = (self.old + normal(SEQUENCES, LENGTH, scale=0.3)).clamp(max=-0.01).requires_grad_()
        self.sampling = (self.old + normal(SEQUENCES, LENGTH, scale=0.2)).float().double()
        self.advantages = normal(SEQUENCES, scale=1.0)
        lengths = torch.tensor([9, 1, 4, 7, 9, 2])
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).double()


def our_loss(numbers: Numbers, objective: Objective) -> Tensor:
    """Return the loss of one step of the sequences, each a trajectory of its own."""
    trajectory, position = numbers.mask.nonzero().unbind(1)
    lengths = numbers.mask.sum(1)
    shares = {
        "token": torch.full_like(lengths, 1 / float(lengths.sum())),
        "trajectory": 1 / (SEQUENCES * lengths),
        "global": torch.full_like(lengths, 1 / (SEQUENCES * objective.response_length)),
    }
    terms = TermTensors(
        tokens=torch.arange(len(trajectory)),
        index=torch.arange(len(trajectory)).int(),
        trajectory=trajectory.int(),
        weight=torch.ones(len(trajectory), dtype=torch.float64),
        advantage=numbers.advantages[trajectory],
        sampling_logprob=numbers.sampling[trajectory, position],
        old_logprob=numbers.old[trajectory, position],
        ref_logprob=None,
        group=torch.zeros(SEQUENCES, dtype=torch.int32),
        reward=None,
        temperature=None,
    )
    logprobs = numbers.current[trajectory, position]
    return objective_loss(logprobs, torch.zeros_like(logprobs), terms, shares[objective.denominator], objective)[0]


def assert_same(numbers: Numbers, ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    slopes, expected = (torch.autograd.grad(each, numbers.current)[0] for each in (ours, theirs))
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(slopes, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "theirs", "mode", "options"),
    [
        ("ppo", "vanilla", "token-mean", {"dual_clip": 1.3}),
        ("gspo", "gspo", "seq-mean-token-mean", {"clip_low": 0.05, "clip_high": 0.1}),
        ("gmpo", "geo_mean", "seq-mean-token-mean", {"clip_low": 0.2, "clip_high": 0.1}),
        ("cispo", "cispo", "token-mean", {"clip_low": 0.2, "clip_high": 0.1}),
        ("sapo", "sapo", "seq-mean-token-mean", {}),
        ("dppo_tv", "dppo_tv", "token-mean", {"clip_low": 0.03, "clip_high": 0.05}),
        ("dppo_kl", "dppo_kl", "token-mean", {"clip_low": 0.003, "clip_high": 0.005, "dual_clip": 1.2}),
        ("dro", "dro", "token-mean", {"beta": 0.3}),
        ("reinforce", "gpg", "token-mean", {}),
    ],
)
def test_losses_are_those_of_verl(name: str, theirs: str, mode: str, options: dict[str, Any]) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    numbers, objective = Numbers(), choose_objective(name, **options)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=objective.clip_low,
        clip_ratio_high=objective.clip_high,
        clip_ratio_c=objective.dual_clip or 3.0,
        policy_loss=PolicyLossConfig(dro_beta=objective.beta),
    )
    advantages = numbers.advantages[:, None].expand(-1, LENGTH)
    expected, _ = get_policy_loss_fn(theirs)(
        old_log_prob=numbers.old,
        log_prob=numbers.current,
        advantages=advantages,
        response_mask=numbers.mask,
        loss_agg_mode=mode,
        config=config,
    )
    assert_same(numbers, our_loss(numbers, objective), expected)


@pytest.mark.parametrize("cap", [None, 1.1])
def test_the_weights_of_vespo_are_those_of_trl(cap: float | None) -> None:
    from trl import GRPOTrainer

    numbers, ratio = Numbers(), None
    if cap is not None:
        ratio = torch.where(numbers.mask > 0, (numbers.old - numbers.sampling).exp().clamp(max=cap), 1.0)
    weights = GRPOTrainer.get_gamma_weights(
        numbers.advantages[:, None], numbers.current - numbers.old, numbers.mask, ratio
    )
    loss = -weights * numbers.advantages[:, None] * numbers.current * numbers.mask
    objective = choose_objective("vespo", importance_cap=cap)
    assert_same(numbers, our_loss(numbers, objective), loss.sum() / numbers.mask.sum())


def test_stale_sequences_are_those_of_trl() -> None:
    from trl import GRPOTrainer

    numbers = Numbers()
    advantages = numbers.advantages[:, None]
    kept = GRPOTrainer.get_off_policy_mask(advantages, numbers.current, numbers.sampling, numbers.mask, 0.02)
    assert 0 < float(kept.mean()) < 1
    clipped = (numbers.current - numbers.old).exp().clamp(0.8, 1.2)
    loss = -torch.min((numbers.current - numbers.old).exp() * advantages, clipped * advantages) * kept * numbers.mask
    objective = choose_objective("dapo", clip_high=0.2, sequence_mask=0.02)
    assert_same(numbers, our_loss(numbers, objective), loss.sum() / numbers.mask.sum())
