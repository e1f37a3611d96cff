"""`treepack train --loss`: the objective of a whole step for any rows; refusals; verification; the options."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.command_line import Run as Command
from support.oracle_model import tiny_config, write_rows
from support.oracle_objectives import step_loss
from support.packed_objectives import as_trajectories, opened, rollouts
from support.strategies import make
from support.trie_files import saved
from treepack.errors import TreepackError
from treepack.model.verify.gradients import GradientReport, verify_gradients
from treepack.objectives.denominators import step_factors, trajectory_table
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.registry import own_losses, presets_of
from treepack.rl.advantages.advantage_options import AdvantageOptions
from treepack.rl.advantages.estimate import estimate_advantages, with_advantages
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.run import TrainingRun
from treepack.train.setup.opening import open_run, open_verification
from treepack.train.step import StepMetrics
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie

CPU = TrainOptions(device="cpu", lr=1e-2, rows_per_step=100, clip=0.0, checkpoint_every=0)
OVER_TERMS = [name for name in presets_of(own_losses()) if name not in ("sft", "value", "opd", "distill")]
# Of tokens, of sequences, of pairs and of a geometric mean.
VERIFIED = ("grpo", "gspo", "dpo", "gmpo")
# The row of each of the ten rollouts: the two groups in a row each, four rows that mix groups, and one row.
BY_GROUP, MIXED, ONE = [i % 2 for i in range(10)], [0, 0, 1, 1, 1, 2, 2, 2, 3, 3], [0] * 10
PACKINGS = (ONE, MIXED, BY_GROUP)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tiny_config(tmp_path / "tiny.json")


def train_on(
    packed: Path, config: Path, objective: Objective, *, held_out: Path | None = None, **changes: Any
) -> tuple[list[StepMetrics], TrainingRun]:
    run = open_run(packed, config, replace(CPU, objective=objective, **changes), held_out=held_out)
    return list(train(run, packed.parent / f"out-{packed.name}", overwrite=True)), run


@pytest.fixture(scope="module")
def packings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The rollouts in one row, in mixed rows, and with each group in a row."""
    folder = tmp_path_factory.mktemp("packings")
    return [write_rows(folder / str(i), as_trajectories(rollouts()), rows) for i, rows in enumerate(PACKINGS)]


@pytest.fixture(scope="module")
def plain(packings: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model of transformers alone, with the weights that every run of this file starts with."""
    new = open_run(packings[0], tiny_config(tmp_path_factory.mktemp("plain") / "tiny.json"), CPU).loaded.model
    model = AutoModelForCausalLM.from_config(new.config)
    model.set_attn_implementation("sdpa")
    model.load_state_dict(new.state_dict())
    return model


@pytest.mark.parametrize("name", OVER_TERMS)
def test_a_step_does_not_depend_on_its_rows_and_is_that_of_trajectories_alone(
    packings: list[Path], config: Path, plain: Any, name: str
) -> None:
    objective = choose_objective(name)
    results = []
    # A pair of dpo must be in one row, so MIXED has other pairs and another loss.
    for i in (0, 2 if name == "dpo" else 1):
        # The rows of the last packing are joined into passes.
        (metrics,), run = train_on(packings[i], config, objective, epochs=1, pass_tokens=4096 if i else 1)
        assert metrics.num_rows == len(set(PACKINGS[i]))
        results.append((metrics, run.loaded.model.state_dict()))
    expected = step_loss(plain, rollouts(), objective).item()
    for metrics, weights in results:
        assert metrics.loss == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert metrics.means == pytest.approx(results[0][0].means, rel=1e-4, abs=1e-5)
        assert metrics.grad_norm == pytest.approx(results[0][0].grad_norm, rel=1e-3)
        for key, weight in weights.items():
            torch.testing.assert_close(weight, results[0][1][key], rtol=1e-3, atol=2e-4)


def test_metrics_hold_the_mean_reward_and_the_means_of_the_objective(tmp_path: Path, config: Path) -> None:
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts()), MIXED)
    common = {field.name for field in fields(StepMetrics)} - {"means", "evaluation", "passes", "memory"}
    kinds = {
        "sft": {"reward"},
        "grpo": {"reward", "ratio", "clip_fraction_low", "clip_fraction_high", "old_kl", "entropy", "zero_advantage"}
        | {"sampler_kl"},  # by position, too, for rows of more than 256 tokens
    }
    for name, means in kinds.items():
        train_on(packed, config, choose_objective(name))
        (line,) = (tmp_path / "out-packed" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line).keys() == common | means
        assert json.loads(line)["reward"] == pytest.approx(sum(rollout.reward for rollout in rollouts()) / 10)


def test_groups_in_several_rows_and_steps_are_counted_per_step(tmp_path: Path) -> None:
    dataset = opened(tmp_path / "packed", rollouts(), MIXED)
    objective = choose_objective("grpo", denominator="group")
    table = trajectory_table(dataset, objective)
    for rows in ([0, 1, 2, 3], [3, 1], [2]):
        factors = step_factors(table, rows, objective)
        # Factors times weights, summed over the step, are 1.
        total = sum(
            float((row_factors * table.weight[table.first[row] : table.first[row + 1]]).sum())
            for row, row_factors in zip(rows, factors, strict=True)
        )
        assert total == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("name", VERIFIED)
def test_verification_is_of_the_objective(packings: list[Path], config: Path, name: str) -> None:
    run = open_verification(packings[2], config, replace(CPU, objective=choose_objective(name)))
    rows = run.trainable_rows
    arguments: dict[str, Any] = {"objective": run.options.objective, "factors": run.factors(rows)}
    batches = [run.dataset[row] for row in rows]
    report = verify_gradients(run.loaded, batches, **arguments)
    assert report.passed
    assert report.dtype == "float64"
    assert report.worst[1] < 1e-10
    # Every token sees all tokens before it, also on other branches.
    wrong = [replace(b, subtree_end=torch.full_like(b.subtree_end, len(b.subtree_end))) for b in batches[:1]]
    assert not verify_gradients(run.loaded, wrong, **{**arguments, "factors": arguments["factors"][:1]}).passed


def test_unsuitable_data_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts(), without=["advantages"]), ONE)
    with pytest.raises(TreepackError, match="has no term_advantage"):
        # A model that does not exist: loading it would raise another error.
        open_run(packed, tmp_path / "no-such-model", replace(CPU, objective=choose_objective("grpo")))


def test_rows_without_pairs_are_left_out_of_dpo_and_counted(tmp_path: Path, config: Path) -> None:
    samples = [replace(r, group=f"{r.group}{i // 6}", reward=float(i % 4 > 1)) for i, r in enumerate(rollouts())]
    # Alone in its group, so its row has no pair.
    lone = replace(samples[0], group="lone")
    packed = write_rows(tmp_path / "packed", as_trajectories([*samples, lone]), [*ONE, 1])
    run = open_run(packed, config, replace(CPU, objective=choose_objective("dpo")))
    assert [step.rows for step in run.schedule] == [[0]]
    assert "1 rows without pairs to compare are left out" in run.notes


RATIOS = {"ratio", "clip_fraction_low", "clip_fraction_high", "old_kl"}
TWO_UPDATES: dict[str, Any] = {"steps": 2, "rows_per_step": 100}


@pytest.mark.parametrize(
    ("without", "loss", "changes", "expected"),
    [
        (["old_logprobs"], "grpo", TWO_UPDATES, "sampler"),
        (["old_logprobs"], "gspo", {"rows_per_step": 2}, "sampler"),  # an epoch of two updates
        (["old_logprobs"], "grpo", {"steps": 1}, "recorded"),
        ([], "grpo", TWO_UPDATES, "recorded"),
        (["old_logprobs", "sampling_logprobs"], "grpo", TWO_UPDATES, "recorded"),
        (["old_logprobs"], "reinforce", TWO_UPDATES, "recorded"),  # has no ratio
    ],
)
def test_the_samplers_logprobs_are_old_if_several_updates_use_one_batch_and_no_others_are_recorded(
    tmp_path: Path, config: Path, without: list[str], loss: str, changes: dict[str, Any], expected: str
) -> None:
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts(), without=without), MIXED)
    run = open_run(packed, config, replace(CPU, objective=choose_objective(loss), **changes))
    assert run.options.as_record()["objective"]["old_logprobs"] == expected
    said = [note for note in run.notes if note.startswith("several updates use one batch of rollouts")]
    assert len(said) == (expected == "sampler")
    missing = [note for note in run.notes if "every update counts as on-policy" in note]
    assert len(missing) == (expected == "recorded" and bool(without) and loss != "reinforce")


def test_given_old_logprobs_and_weights_of_the_sampler_are_kept(tmp_path: Path, config: Path) -> None:
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts(), without=["old_logprobs"]), MIXED)
    given: list[dict[str, Any]] = [{"old_logprobs": "recorded"}, {"importance_cap": 2.0}]
    for options in given:
        run = open_run(packed, config, replace(CPU, objective=choose_objective("grpo", **options), **TWO_UPDATES))
        assert run.options.objective.old_logprobs == "recorded"
        (note,) = [note for note in run.notes if "on-policy" in note]
        assert ("--old-logprobs sampler" in note) == ("importance_cap" not in options)  # which excludes it


def test_an_update_for_each_training_step_is_on_policy(tmp_path: Path, config: Path) -> None:
    of_steps = [
        replace(each, step=i % 2) for i, each in enumerate(as_trajectories(rollouts(), without=["old_logprobs"]))
    ]
    packed = write_rows(tmp_path / "packed", of_steps, BY_GROUP)
    for epochs, expected in ((1, "recorded"), (2, "sampler")):
        run = open_run(packed, config, replace(CPU, objective=choose_objective("grpo"), epochs=epochs))
        assert (len(run.schedule), run.options.objective.old_logprobs) == (2 * epochs, expected)


def _without_sampler(trajectory: Trajectory) -> Trajectory:
    assert isinstance(trajectory.content, Tokens)
    return replace(trajectory, content=replace(trajectory.content, sampling_logprob=None))


@pytest.mark.parametrize("is_held_out", [False, True])
def test_logprobs_of_the_sampler_that_some_rollouts_lack_are_not_chosen(
    tmp_path: Path, config: Path, is_held_out: bool
) -> None:
    whole = as_trajectories(rollouts(), without=["old_logprobs"])
    packed = write_rows(tmp_path / "packed", whole, MIXED)
    part = write_rows(tmp_path / "part", [_without_sampler(whole[0]), *whole[1:]], MIXED)
    options = replace(CPU, objective=choose_objective("grpo"), **TWO_UPDATES)
    run = open_run(packed, config, options, held_out=part) if is_held_out else open_run(part, config, options)
    assert run.options.objective.old_logprobs == "recorded"


def test_the_default_is_the_run_with_old_logprobs_of_the_sampler(tmp_path: Path, config: Path) -> None:
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts(), without=["old_logprobs"]), MIXED)
    results = []
    for old in ("auto", "sampler"):
        steps, run = train_on(packed, config, choose_objective("grpo", old_logprobs=old), **TWO_UPDATES)
        assert not any("on-policy" in note for note in run.notes)
        results.append((steps[-1].means, run.loaded.model.state_dict()))
    (means, weights), (expected, others) = results
    assert means == expected
    assert means.keys() & {*RATIOS, "sampler_kl"} == {*RATIOS, "sampler_kl"} - {"old_kl"}  # which is sampler_kl
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def test_a_resumed_run_keeps_its_old_logprobs(treepack: Command, tmp_path: Path, config: Path) -> None:
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts(), without=["old_logprobs"]), MIXED)
    common = ("train", packed, "--model", config, "--device", "cpu", "--loss", "grpo", "--rows-per-step", 4)
    for first, expected in ((1, "recorded"), (2, "sampler")):
        out = tmp_path / expected
        assert treepack(*common, "--steps", first, "--out", out).status == 0
        done = treepack(*common, "--steps", 3, "--out", out, "--resume")
        assert (done.status, "resumed after step" in done.err) == (0, True)
        for name in ("run.json", "train.json"):
            assert json.loads((out / name).read_text())["options"]["objective"]["old_logprobs"] == expected
        other = {"recorded": "sampler", "sampler": "recorded"}[expected]
        done = treepack(*common, "--steps", 4, "--out", out, "--resume", "--old-logprobs", other)
        assert done.err.endswith(
            f"cannot resume: --old-logprobs was {expected!r} when the run started and is {other!r} now; restore it, or "
            "start a new --out\n"
        )


@pytest.mark.parametrize(
    ("without", "loss", "options", "left_out"),
    [
        (["old_logprobs"], "grpo", {}, RATIOS),
        ([], "grpo", {}, set()),
        ([], "sapo", {}, {"clip_fraction_low", "clip_fraction_high"}),  # bounds no term
        ([], "ppo", {"value_coef": 0.5, "value_clip": 0.0}, {"value_clip_fraction"}),
        (["old_values"], "ppo", {"value_coef": 0.5}, {"value_clip_fraction"}),
        ([], "ppo", {"value_coef": 0.5}, set()),
    ],
)
def test_means_that_the_data_determines_are_left_out(
    tmp_path: Path, config: Path, without: list[str], loss: str, options: dict[str, Any], left_out: set[str]
) -> None:
    samples = [replace(r, returns=[0.5] * len(r.tokens), old_values=[0.25] * len(r.tokens)) for r in rollouts()]
    packed = write_rows(tmp_path / "packed", as_trajectories(samples, without=without), MIXED)
    (metrics,), _ = train_on(packed, config, choose_objective(loss, **options), held_out=packed)
    values = {"value_clip_fraction"} if "value_coef" in options else set()
    assert metrics.means.keys() & (RATIOS | {"value_clip_fraction"}) == (RATIOS | values) - left_out
    evaluated = {name.removeprefix("eval_") for name in metrics.evaluation}
    assert evaluated & (RATIOS | {"value_clip_fraction"}) == (RATIOS | values) - left_out


def test_the_command_trains_and_verifies(treepack: Command, tmp_path: Path, config: Path) -> None:
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts()), MIXED)
    common = (packed, "--model", config, "--device", "cpu", "--loss", "dapo", "--kl", "0.1")
    done = treepack("train", *common, "--out", tmp_path / "out")
    assert done.status == 0
    assert "kl" in json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    record = json.loads((tmp_path / "out" / "train.json").read_text())["options"]["objective"]
    assert (record["loss"], record["clip_high"], record["denominator"], record["kl"]) == ("grpo", 0.28, "token", 0.1)
    done = treepack("train", *common, "--verify", "--verify-rows", 4)
    assert (done.status, "float64" in done.out) == (0, True)
    done = treepack("train", packed, "--model", config, "--out", tmp_path / "out2", "--kl", "0.1")
    assert (done.status, done.err.splitlines()[-1]) == (
        1,
        "treepack: --kl is not an option of the loss sft; it has no options",
    )


@pytest.mark.parametrize("carry", ["off", "7"])
def test_verification_passes_if_advantages_cancel(treepack: Command, tmp_path: Path, config: Path, carry: str) -> None:
    # Without old log-probabilities every ratio is 1, so the losses of a group add up to 0, apart from rounding.
    rng = np.random.default_rng(0)
    prompts = {"g": [1, *range(20, 31)], "h": [2, *range(10, 21)]}
    made = [
        make(f"{group}{i}", [*prompt, *rng.integers(3, 40, 4).tolist()], group=group, reward=float(i % 2))
        for group, prompt in prompts.items()
        for i in range(4)
    ]
    trie = build_trie(made)
    saved(with_advantages(trie, estimate_advantages(trie, AdvantageOptions("grpo"))), tmp_path / "trie")
    assert treepack("pack", tmp_path / "trie", "--capacity", 64, "--out", tmp_path / "packed").status == 0
    command = ("train", tmp_path / "packed", "--model", config, "--device", "cpu", "--loss", "grpo", "--verify")
    done = treepack(*command, "--carry", carry)
    assert (done.status, "differs" in done.err) == (0, False)
    assert "loss error" in done.out
    report = GradientReport("float64", "reference", 1, 8, 1e-17, 4e-17, {"w": 0.0}, 1e-9, loss_scale=2.0)
    assert report.passed
    assert not replace(report, loss_packed=1e-8).passed


def test_the_command_has_the_options_of_the_objective() -> None:
    options = import_module("treepack_cli.objective")
    # click turns the decorated function into a command, which lists its options.
    command = click.command()(options.objective_options(lambda objective: None))
    names = {each.name for each in fields(Objective)} - {"preset", "rewarded"}  # both follow from --loss
    assert {parameter.name for parameter in command.params} == names
