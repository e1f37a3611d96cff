"""The values that a step's line and the summary of a run show."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from treepack.train.step import StepMetrics

summary = import_module("treepack_cli.run_summary")

MEANS = {"ratio": 1.0, "clip_fraction_low": 0.25, "clip_fraction_high": 0.125, "old_kl": 0.5, "entropy": 2.0}
MEANS["zero_advantage"] = 0.1


def metrics(loss: float, **means: float) -> StepMetrics:
    numbers: dict[str, Any] = dict.fromkeys(("lr", "grad_norm", "total_weight", "seconds", "wait_seconds"), 1.0)
    numbers |= {"tokens_per_second": 1.0, "tokens_flat_per_second": 1.0}
    return StepMetrics(step=1, epoch=0, loss=loss, num_rows=1, tokens=1, tokens_flat=2, means=means, **numbers)


def test_a_step_of_a_policy_shows_reward_divergence_entropy_and_clip_share() -> None:
    values = summary.step_values(metrics(0.0, reward=0.5, **MEANS))
    chosen = {name: values[name] for name in ("reward", "KL to the old policy", "entropy", "clip share")}
    assert chosen == {"reward": "0.5", "KL to the old policy": "0.5", "entropy": "2", "clip share": "0.375"}
    with_reference = summary.step_values(metrics(0.0, kl=0.75, **MEANS))
    assert (with_reference["KL"], "KL to the old policy" in with_reference) == ("0.75", False)


def test_the_summary_of_a_policy_has_its_means_and_that_of_others_the_loss() -> None:
    steps = [metrics(0.0, reward=0.5, **MEANS), metrics(0.0, reward=0.75, **MEANS)]
    shown = summary._outcome(steps)
    assert shown["reward, first and last"] == "0.5, 0.75"
    assert "first loss" not in shown
    assert summary._outcome([metrics(2.0), metrics(1.0)]) == {"first loss": 2.0, "last loss": 1.0}
    pairs = summary._outcome([metrics(0.7, accuracy=0.5, margin=0.0)])
    assert pairs["accuracy, first and last"] == "0.5, 0.5"


def test_a_large_divergence_from_the_sampler_and_many_terms_without_advantage_are_said() -> None:
    means = {**MEANS, "sampler_kl": 0.5, "sampler_kl_to_256": 0.25, "sampler_kl_to_1k": 0.75, "zero_advantage": 0.5}
    shown = summary._outcome([metrics(0.0, **means), metrics(0.0, **means)])
    assert shown["KL from the sampler by position, last"] == "to 256: 0.25, to 1k: 0.75"
    assert shown["KL from the sampler, first and last"] == "0.5, 0.5"
    assert shown["terms with advantage 0"].startswith("50.0%; `treepack advantages --reject-equal`")
    step = metrics(0.0, **MEANS, sampler_kl=0.001)
    small = summary._outcome([step])
    assert [name for name in small if "sampler" in name or "advantage" in name] == [
        "KL from the sampler, first and last"
    ]
    assert not [name for name in summary.step_values(step) if "sampler" in name]


def test_a_distillation_shows_its_loss_and_divergence_and_no_ratios() -> None:
    means = {"entropy": 2.0, "divergence": 0.5}
    shown = summary._outcome([metrics(0.5, **means), metrics(0.25, **{**means, "divergence": 0.25})])
    assert shown == {
        "first loss": 0.5,
        "last loss": 0.25,
        "divergence from the teacher, first and last": "0.5, 0.25",
        "entropy, first and last": "2, 2",
    }
