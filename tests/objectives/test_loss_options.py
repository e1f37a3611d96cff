"""Options of losses that have no effect, and names of other trainers, are refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from support.command_line import Run
from treepack.errors import TreepackError
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.other_losses import OTHER_LOSSES
from treepack.objectives.registry import find_loss, own_losses, presets_of


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rlhf", {}, "loss is 'rlhf'; expected one of sft, cispo, dppo_kl, dppo_tv"),
        ("sft", {"kl": 0.1}, "kl is not an option of the loss sft; it has no options"),
        ("dpo", {"clip_low": 0.1}, "clip_low is not an option of the loss dpo; it has beta"),
        ("cispo", {"dual_clip": 3.0}, "dual_clip is not an option of the loss cispo"),
        ("grpo", {"dual_clip": 0.5}, "dual_clip is 0.5; expected a finite number of at least 1"),
        ("grpo", {"kl": -1.0}, "kl is -1.0; expected"),
        (
            "grpo",
            {"denominator": "mean"},
            "denominator is 'mean'; expected one of token, trajectory, rollout, group, global",
        ),
        ("grpo", {"kl_estimator": "k1"}, "kl_estimator is about the divergence, which has no weight; give kl too"),
        ("dapo", {"response_length": 9}, "response_length belongs to the denominator global"),
        ("dapo", {"importance_floor": 0.1}, "importance_floor bounds importance_cap from below; give it too"),
        ("dapo", {"importance_floor": 2.0, "importance_cap": 1.0}, "importance_floor is 2 and importance_cap 1"),
        ("dapo", {"importance_cap": 0.0}, "importance_cap is 0, so that no term has a weight"),
        ("dapo", {"importance_level": "sequence"}, "importance_level is the level of importance_mask"),
        ("vespo", {"importance_level": "sequence", "importance_cap": 2.0}, "except in vespo"),
        ("ppo", {"value_clip": 0.1}, "value_clip is about the value loss, which has no weight; give value_coef too"),
        ("ppo", {"old_logprobs": "sampler", "importance_cap": 2.0}, "ratios correct the sampler already"),
        ("ppo", {"loss_constants": {"k_pos": 1.0}}, "loss_constants is not an option of the loss ppo"),
        (
            "sapo",
            {"loss_constants": {"k_pos": 1.0}},
            "k_pos is not a constant of the loss sapo; it has temperature_pos",
        ),
        ("sapo", {"loss_constants": {"temperature_pos": 0.0}}, "the constant temperature_pos is 0; expected a finite"),
        ("clip_cov", {}, "verl's clip_cov chooses tokens by their covariance within a micro-batch"),
        ("sft", {"distill": 0.1}, "distill is not an option of the loss sft; take the loss distill, or a policy loss"),
        ("distill", {"importance_cap": 2.0}, "importance_cap weighs advantages, which distill does not have"),
        ("distill", {"sequence_mask": 0.1}, "sequence_mask weighs advantages, which distill does not have"),
        ("distill", {"old_logprobs": "sampler"}, "the loss distill has no ratio, so old_logprobs has no effect"),
        ("reinforce", {"old_logprobs": "sampler"}, "the loss reinforce has no ratio"),
        ("gpg", {}, "verl's gpg is reinforce here"),
        ("ipo", {}, "TRL's ipo is a loss of pairs that is not computed here"),
    ],
)
def test_options_without_meaning_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TreepackError, match=message):
        choose_objective(name, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("distill", {"teacher_kl": 0.5, "importance_cap": 2.0}),
        ("reinforce", {"teacher_kl": 0.5, "old_logprobs": "sampler"}),
        ("reinforce", {"kl": 0.5, "kl_estimator": "unbiased", "old_logprobs": "sampler"}),
        ("opd", {"sequence_mask": 0.1}),
    ],
)
def test_options_that_another_option_gives_a_meaning_are_taken(name: str, options: dict[str, Any]) -> None:
    chosen = choose_objective(name, **options)
    assert {key: getattr(chosen, key) for key in options} == options


def test_no_name_of_another_trainer_is_a_preset() -> None:
    assert not {*OTHER_LOSSES} & {*presets_of(own_losses())}
    assert len(OTHER_LOSSES) > 20


# A preset that took another denominator would have other gradients in no other fast test.
DENOMINATORS_OF_PRESETS = {
    "token": "bnpo cispo dapo distill dpo dppo_kl dppo_tv dro opd ppo reinforce sft value vespo",
    "trajectory": "gmpo grpo gspo sapo",
    "global": "dr_grpo luspo",
}


def test_every_preset_has_its_denominator() -> None:
    expected = {name: denominator for denominator, names in DENOMINATORS_OF_PRESETS.items() for name in names.split()}
    assert {name: choose_objective(name).denominator for name in presets_of(own_losses())} == expected


def test_constants_keep_their_usual_values_beside_one_that_is_given() -> None:
    assert choose_objective("vespo", loss_constants={"k_neg": 4}).constants == {
        **find_loss("vespo").constants,
        "k_neg": 4,
    }
    assert Objective(loss="sapo").constants == find_loss("sapo").constants


def test_the_command_names_the_same_loss_and_takes_constants(treepack: Run) -> None:
    result = treepack("train", "packed", "--model", "m", "--loss", "geo-mean")
    assert result.status == 2
    assert "verl's geo_mean is gmpo here" in result.err
    result = treepack("train", "packed", "--model", "m", "--loss", "sapo", "--loss-constant", "temperature_neg=x")
    assert result.status == 2
    assert "'temperature_neg=x' is not NAME=VALUE, such as temperature_neg=1.1" in result.err
    twice = ("--loss-constant", "temperature_neg=1", "--loss-constant", "temperature_neg=2")
    result = treepack("train", "packed", "--model", "m", "--loss", "sapo", *twice)
    assert "temperature_neg has two values; give one of them" in result.err
    result = treepack("train", "packed", "--model", "m", "--loss", "vespo", "--loss-constant", "k=2")
    assert "k is not a constant of the loss vespo; it has k_pos, lambda_pos, k_neg, lambda_neg" in result.err
