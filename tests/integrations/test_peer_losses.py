"""Policy losses equal the functions of verl and TRL on the same numbers: values and gradients."""

from __future__ import annotations

from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from treepack.objectives.objective import Objective, choose_objective
from treepack.online import sequence_loss

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
        self.reference = (self.old + normal(SEQUENCES, LENGTH, scale=0.2)).float().double()
        self.advantages = normal(SEQUENCES, scale=1.0)
        lengths = torch.tensor([9, 1, 4, 7, 9, 2])
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).double()


def our_loss(numbers: Numbers, objective: Objective, *, has_old: bool = True) -> Tensor:
    """Return the loss of one step of the sequences."""
    return sequence_loss(
        numbers.current,
        None,
        numbers.mask.bool(),
        objective,
        advantages=numbers.advantages,
        old_logprobs=numbers.old if has_old else None,
        sampling_logprobs=numbers.sampling,
        ref_logprobs=numbers.reference,
    )[0]


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
        ("sapo", "sapo", "seq-mean-token-mean", {"loss_constants": {"temperature_pos": 1.4}}),
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
        **{f"tau_{name[12:]}": value for name, value in objective.constants.items()},  # temperature_pos -> tau_pos
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


# Options of TRL with the same numbers in treepack's words.
TRL_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("grpo", {}, {}),
    ("grpo", {"clip_high": 0.3, "dual_clip": 1.4}, {"epsilon_high": 0.3, "delta": 1.4}),
    ("bnpo", {}, {}),
    ("dapo", {}, {"epsilon_high": 0.28}),
    ("dr_grpo", {"response_length": 16}, {"max_completion_length": 16}),
    ("cispo", {"clip_high": 0.1}, {"epsilon_high": 1.1}),
    ("sapo", {}, {}),
    ("sapo", {"loss_constants": {"temperature_neg": 0.6}}, {"sapo_temperature_neg": 0.6}),
    ("luspo", {"clip_low": 0.05, "clip_high": 0.1}, {"epsilon": 0.05, "epsilon_high": 0.1}),
    ("gspo", {"clip_low": 0.05, "clip_high": 0.1}, {"loss_type": "grpo", "epsilon": 0.05, "epsilon_high": 0.1}),
    ("vespo", {}, {}),
    ("vespo", {"importance_cap": 1.1, "importance_floor": 0.9}, {"vllm_importance_sampling_mode": "token_truncate"}),
    ("vespo", {"loss_constants": {"k_neg": 2.0, "lambda_pos": 2.5}}, {"vespo_k_neg": 2.0, "vespo_lambda_pos": 2.5}),
    ("grpo", {"kl": 0.3}, {"beta": 0.3, "use_bias_correction_kl": False}),
    ("grpo", {"kl": 0.3, "kl_estimator": "unbiased"}, {"beta": 0.3, "use_bias_correction_kl": True}),
    ("dapo", {"clip_high": 0.2, "sequence_mask": 0.02}, {"off_policy_mask_threshold": 0.02}),
    ("grpo", {"importance_cap": 1.1, "importance_floor": 0.9}, {"vllm_importance_sampling_mode": "token_truncate"}),
    (
        "grpo",
        {"importance_cap": 1.1, "importance_floor": 0.9, "importance_level": "sequence"},
        {"vllm_importance_sampling_mode": "sequence_truncate"},
    ),
    (
        "dapo",
        {"clip_high": 0.2, "importance_cap": 1e9, "importance_mask": (0.9, 1.1)},
        {"vllm_importance_sampling_mode": "token_mask"},
    ),
    (
        "bnpo",
        {"importance_cap": 1e9, "importance_mask": (0.9, 1.1), "importance_level": "sequence"},
        {"vllm_importance_sampling_mode": "sequence_mask"},
    ),
]


def trl_ratio(numbers: Numbers, mode: str | None) -> Tensor:
    """Return TRL's weights of a mode (`GRPOTrainer._generate_and_score_completions`), with the bounds 0.9 and 1.1."""
    differences = (numbers.old - numbers.sampling) * numbers.mask
    if mode is None:
        return torch.ones_like(differences)
    ratio = (differences.sum(1, keepdim=True) if mode.startswith("sequence") else differences).exp()
    if mode.endswith("truncate"):
        return ratio.clamp(0.9, 1.1)
    return ratio.masked_fill((ratio < 0.9) | (ratio > 1.1), 0.0)


@pytest.mark.parametrize(("name", "options", "settings"), TRL_CASES)
def test_losses_are_those_of_trl(name: str, options: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    numbers, objective = Numbers(), choose_objective(name, **options)
    sequences = {"importance_sampling_level": "sequence"} if name in ("luspo", "gspo") else {}
    args = GRPOConfig(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, **{"loss_type": name, **sequences, **settings}
    )
    ones = torch.ones(SEQUENCES, LENGTH, dtype=torch.int64)
    mode = settings.get("vllm_importance_sampling_mode")

    class Trainer:
        """The state that `GRPOTrainer._compute_loss` reads, around the numbers of the test."""

        top_entropy_quantile, use_vllm, vllm_importance_sampling_correction = 1.0, mode is not None, True
        aux_loss_enabled = _entropy_bonus_enabled = False
        current_gradient_accumulation_steps, max_completion_length = 1, args.max_completion_length
        accelerator = import_module("accelerate").Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1).train()
        get_gamma_weights = staticmethod(GRPOTrainer.get_gamma_weights)
        get_off_policy_mask = staticmethod(GRPOTrainer.get_off_policy_mask)

        def __getattr__(self, attribute: str) -> Any:
            return getattr(args, attribute)

        def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
            return numbers.current, torch.zeros_like(numbers.current), None

    trainer: Any = Trainer()
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer.args, trainer.epsilon_low = args, args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    inputs = {
        "prompt_ids": ones[:, :1],
        "prompt_mask": ones[:, :1],
        "completion_ids": ones,
        "completion_mask": numbers.mask,
        "advantages": numbers.advantages,
        "old_per_token_logps": numbers.old,
        "ref_per_token_logps": numbers.reference,
        "sampling_per_token_logps": numbers.sampling,
        "importance_sampling_ratio": trl_ratio(numbers, mode),
        "num_items_in_batch": numbers.mask.sum(),
    }
    # The optimiser step is this one micro-batch.
    args.steps_per_generation = 1
    assert_same(numbers, our_loss(numbers, objective), GRPOTrainer._compute_loss(trainer, None, inputs))


@pytest.mark.parametrize(
    ("options", "level", "threshold", "rejection", "bounds"),
    [
        ({"importance_cap": 1.1}, "token", 1.1, None, None),
        ({"importance_cap": 1.1, "importance_level": "sequence"}, "sequence", 1.1, None, None),
        ({"importance_cap": 1e9, "importance_mask": (0.9, 1.1)}, "token", "0.9_1.1", None, None),  # IcePop
        ({"importance_mask": (0.8, 1.25)}, None, None, "token_k1", "0.8_1.25"),
        ({"importance_mask": (0.8, 1.25), "importance_level": "sequence"}, None, None, "seq_sum_k1", "0.8_1.25"),
        ({"importance_mask": (0.98, 1 / 0.98), "importance_level": "geometric"}, None, None, "seq_mean_k1", 1 / 0.98),
    ],
)
def test_corrections_of_the_sampler_are_those_of_verl(
    options: dict[str, Any], level: str | None, threshold: Any, rejection: str | None, bounds: Any
) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.workers.config import ActorConfig

    numbers, objective = Numbers(), choose_objective("dapo", **options)
    weights, mask, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=numbers.old,
        rollout_log_prob=numbers.sampling,
        response_mask=numbers.mask,
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_rs=rejection,
        rollout_rs_threshold=bounds,
    )
    assert 0 < float(mask.sum()) <= float(numbers.mask.sum())
    assert rejection is None or float(mask.sum()) < float(numbers.mask.sum())
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.28,
        clip_ratio_c=1e9,
    )  # fmt: skip
    expected, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=numbers.old,
        log_prob=numbers.current,
        advantages=numbers.advantages[:, None].expand(-1, LENGTH),
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=config,
        rollout_is_weights=None if weights is None else weights.batch["rollout_is_weights"],
    )
    # verl's mean is over the tokens that are left, and ours over all of them.
    assert_same(numbers, our_loss(numbers, objective), expected * mask.sum() / numbers.mask.sum())


@pytest.mark.parametrize(
    ("name", "options", "kind", "weights"),
    [
        ("ppo", {"old_logprobs": "sampler", "dual_clip": 3.0}, "ppo_clip", None),
        ("reinforce", {"importance_cap": 1.1}, "reinforce", "token"),
        ("reinforce", {"importance_cap": 1.1, "importance_level": "sequence"}, "reinforce", "sequence"),
    ],
)
def test_the_bypass_mode_of_verl_is_the_sampler_as_the_old_policy(
    name: str, options: dict[str, Any], kind: str, weights: str | None
) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    numbers, objective = Numbers(), choose_objective(name, **options)
    settings = {"loss_type": kind, "rollout_is": weights, "rollout_is_threshold": 1.1}
    policy_loss = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=settings)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=policy_loss)
    expected, _ = get_policy_loss_fn("bypass_mode")(
        old_log_prob=numbers.sampling,
        log_prob=numbers.current,
        advantages=numbers.advantages[:, None].expand(-1, LENGTH),
        response_mask=numbers.mask,
        loss_agg_mode="token-mean",
        config=config,
    )
    ours = our_loss(numbers, objective, has_old=name != "reinforce")
    assert_same(numbers, ours, expected)
