"""TRL's GRPOTrainer trains on trees that treepack samples, through its `rollout_func`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.engine_server import EngineServer, in_thread
from support.oracle import union_tokens
from support.paths import ROOT
from support.tool_once import TOOL, ToolOnce
from support.wide_law import STOP, wide_law
from treepack import TreepackError
from treepack.rollout.options import Sampling, TreeOptions, independent

pytestmark = pytest.mark.integrations

OPTIONS = TreeOptions(segment=4, depth=8, max_repeats=0)
STOPS = tuple(range(0, 1464, 15))  # one token in fifteen ends a completion


@pytest.fixture(scope="module")
def runs() -> Any:
    from support import trl_runs  # the import of trl takes seconds, for which the collection of other tests would wait

    return trl_runs


@pytest.fixture(scope="module")
def model(runs: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(runs.tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def make(runs: Any, model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function that makes a trainer with tree rollouts from the trainer's own model."""
    from support.model_engine import ModelEngine
    from treepack.rollout.trainers.trl_rollout import tree_rollouts

    def engine(trainer: Any) -> ModelEngine:
        return ModelEngine(trainer.model, Sampling(temperature=trainer.temperature, stop_token_ids=STOPS))

    def build(
        options: TreeOptions = OPTIONS,
        *,
        base: Any = None,
        reward: Any = None,
        environment: Any = None,
        **changes: Any,
    ) -> Any:
        return (base or runs.GRPOTrainer)(
            model=runs.AutoModelForCausalLM.from_pretrained(model),
            args=runs.GRPOConfig(str(tmp_path_factory.mktemp("out")), **{**runs.SETTINGS, **changes}),
            reward_funcs=reward or runs.reward,
            train_dataset=runs.prompts(8),
            eval_dataset=runs.prompts(2),
            processing_class=runs.tokenizer(),
            rollout_func=tree_rollouts(options, engine=engine, environment=environment),
        )

    build.engine = engine  # type: ignore[attr-defined]
    return build


@pytest.fixture(scope="module")
def training(runs: Any, make: Callable[..., Any]) -> Any:
    """Two steps of GRPOTrainer on trees: calls [(prompts, columns)], reward columns of each call, record, trainer."""
    from treepack.rollout.trainers.trl_rollout import leaf_weighted

    seen: list[dict[str, Any]] = []

    def reward(**columns: Any) -> list[float]:
        seen.append(columns)
        return [float(len(ids)) for ids in columns["completion_ids"]]

    record = runs.Record()
    base = runs.recorded(runs.tree_trainer(runs.GRPOTrainer), record)
    changes = {"max_steps": 2, "loss_type": "dr_grpo", "scale_rewards": "none"}
    trainer = make(base=base, reward=leaf_weighted(reward), **changes)
    calls, errors = [], []
    inner = trainer.rollout_func

    def outer(prompts: list[str], trainer: Any) -> dict[str, Any]:
        columns = inner(prompts, trainer)
        calls.append((prompts, columns))
        errors.append(logprob_error(trainer, columns))  # with the weights of this step
        return dict(columns)

    trainer.rollout_func = outer
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    engine = inner._engine
    return SimpleNamespace(calls=calls, rewards=seen, record=record, logs=logs, engine=engine, errors=errors)


def logprob_error(trainer: Any, columns: dict[str, Any]) -> float:
    """Return the largest difference of the columns' log-probabilities from one forward pass of the whole sequence."""
    errors = []
    for prompt, completion, logprobs in zip(
        columns["prompt_ids"], columns["completion_ids"], columns["logprobs"], strict=True
    ):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            logits = trainer.model(ids).logits[0, len(prompt) - 1 : -1].float() / trainer.temperature
        expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        errors.append(float((expected - torch.tensor(logprobs)).abs().max()))
    return max(errors)


def test_the_trainer_trains_two_steps_on_trees(training: Any) -> None:
    assert len(training.logs) == len(training.calls) == 2
    assert all(np.isfinite(log["loss"]) and log["grad_norm"] > 0 for log in training.logs)
    assert len(training.record.losses) == 4


def test_every_prompt_gets_its_own_tree_in_the_order_of_the_prompts(training: Any, runs: Any) -> None:
    tokenizer = runs.tokenizer()
    for prompts, columns in training.calls:
        assert columns["prompt_ids"] == [tokenizer(prompt)["input_ids"] for prompt in prompts]
        assert columns["tree"] == [0] * 4 + [1] * 4


def test_the_leaves_of_a_tree_share_segments_and_their_weights_sum_to_1(training: Any) -> None:
    flat = computed = 0
    for _, columns in training.calls:
        for leaves in (slice(0, 4), slice(4, 8)):
            responses = [tuple(ids) for ids in columns["completion_ids"][leaves]]
            flat, computed = flat + sum(map(len, responses)), computed + union_tokens(responses)
            assert sum(columns["leaf_weight"][leaves]) == pytest.approx(1)
            assert sum(columns["leaf_weight_before_fallback"][leaves]) == pytest.approx(1)
    assert computed < 0.9 * flat


def test_log_probabilities_are_those_of_the_completions_at_the_trainers_temperature(training: Any) -> None:
    assert max(training.errors) < 1e-5


def test_the_engine_gets_the_version_of_each_step(training: Any) -> None:
    assert training.engine.versions == ["0", "1"]


def test_shared_prefixes_of_a_tree_are_computed_once(training: Any) -> None:
    # The first batch runs twice, because treepack checks that every layer calls tree attention.
    for samples, computed in zip(training.record.samples[1:], training.record.tokens[1:], strict=True):
        assert computed == union_tokens(samples) < sum(map(len, samples))


def test_reward_functions_get_the_fields_of_the_leaves(training: Any) -> None:
    for (_, columns), rewards in zip(training.calls, training.rewards, strict=True):
        for name in ("tree", "segments", "leaf_weight", "leaf_weight_before_fallback", "finish"):
            assert rewards[name] == columns[name]


def test_advantages_are_weighted_by_the_leaves(training: Any) -> None:
    # The logged reward of weighted advantages is 0; the mean reward of the trees is a metric of its own.
    for (_, columns), log in zip(training.calls, training.logs, strict=True):
        lengths = [len(ids) for ids in columns["completion_ids"]]
        expected = np.array(columns["leaf_weight_before_fallback"]) @ lengths / 2
        assert log["reward"] == pytest.approx(0, abs=1e-6)
        assert log["reward/weighted_mean"] == pytest.approx(expected)


def test_the_baseline_of_a_leaf_is_the_weighted_mean_below_the_other_first_forks() -> None:
    from treepack.rollout.trainers.trl_rollout import leaf_weighted

    columns = {
        "completions": [4.0, 2.0, 1.0, None, 6.0, 8.0],
        "tree": [0, 0, 0, 0, 1, 1],
        "segment_ids": [[1, 3], [1, 4], [2], [5], [1, 2], [1, 3]],
        "leaf_weight": [0.25, 0.25, 0.25, 0.25, 0.5, 0.5],
        "leaf_weight_before_fallback": [0.5, 0.0, 0.5, 0.0, 0.5, 0.5],
        "log_metric": lambda name, value: None,
    }

    def reward(completions: list[Any], **_: Any) -> list[Any]:
        return completions

    # Tree 0: 4 leaves * 1/2 * (4 - 1) below its first fork 1, 4 * 1/2 * (1 - 4) below 2. Tree 1 has one first fork.
    assert leaf_weighted(reward)(**columns) == [6.0, 0.0, -6.0, None, -1.0, 1.0]
    # Shares of 1/3 each: 4/3 (4 - 1), 4/3 (2 - 1), 4/3 (1 - 3).
    found = leaf_weighted(reward, fallback_leaves=True)(**columns)
    assert found[:3] == pytest.approx([4, 4 / 3, -8 / 3])


def test_an_environment_answers_turns_and_its_tokens_are_masked(make: Callable[..., Any]) -> None:
    from treepack.rollout.trainers.trl_rollout import environment_reward

    trainer = make(reward=environment_reward, environment=ToolOnce, max_steps=1)
    trainer.train()
    assert np.isfinite(trainer.state.log_history[0]["loss"])
    columns = trainer.rollout_func(["a tree"] * 4, trainer)
    names = ("completion_ids", "env_mask", "logprobs", "environment_reward")
    assert any(0 in mask for mask in columns["env_mask"])
    for ids, mask, logprobs, reward in zip(*(columns[name] for name in names), strict=True):
        # turn, TOOL, turn: the reward is the length of the first turn, and 0 if the first turn was cut off
        tool = TOOL if reward else []
        first = int(reward) or len(ids)
        assert mask == [1] * first + [0] * len(tool) + [1] * (len(ids) - first - len(tool))
        assert ids[first : first + len(tool)] == tool
        assert [value < 0 for value in logprobs] == [each == 1 for each in mask]


def test_an_evaluation_samples_its_own_number_of_leaves(make: Callable[..., Any]) -> None:
    trainer = make(num_generations_eval=2, per_device_eval_batch_size=4)
    assert np.isfinite(trainer.evaluate()["eval_reward"])
    assert trainer.rollout_func._num_calls == 1


def test_the_same_seed_gives_the_same_rollouts(make: Callable[..., Any]) -> None:
    texts = ["a tree"] * 4 + ["a row of tokens"] * 4
    first, second = (make().rollout_func(texts, make()) for _ in range(2))
    assert first == second


def test_independent_rollouts_need_no_fallback(make: Callable[..., Any]) -> None:
    trainer = make(independent(width=16, max_tokens=100))
    columns = trainer.rollout_func(["a tree"] * 4, trainer)
    assert columns["leaf_weight"] == [0.25] * 4
    assert max(map(len, columns["completion_ids"])) <= 32


def test_the_program_of_the_docs_trains(
    make: Callable[..., Any], runs: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "your-trainer.md").read_text().split("\n## Sampling trees in TRL\n")[1].split("\n## ")[0]
    (program,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(program.splitlines()) <= 20
    # There is no server here, and two short steps on a CPU suffice.
    program = program.replace(
        'use_vllm=True, vllm_mode="server"', "use_cpu=True, bf16=False, max_steps=2, logging_steps=1"
    )
    program = program.replace("first_forks=(2, 8))", "first_forks=(2, 8)), engine=engine").replace("256", "8")
    runs.tokenizer().save_pretrained(model)
    names = {"model": model, "reward": runs.reward, "prompts": runs.prompts(4), "engine": make.engine}  # type: ignore[attr-defined]
    exec(compile(program, "docs/your-trainer.md", "exec"), names)
    logs = [log for log in names["trainer"].state.log_history if "loss" in log]
    assert [np.isfinite(log["loss"]) for log in logs] == [True] * 2
    assert all("reward/weighted_mean" in log for log in logs)


def test_trees_that_may_stay_narrow_are_refused(make: Callable[..., Any]) -> None:
    trainer = make(TreeOptions(segment=4, fallback="none"))
    with pytest.raises(TreepackError, match="fewer leaves than num_generations, which is 4; use fallback='random'"):
        trainer.train()


def test_copies_of_a_prompt_in_several_processes_are_refused(make: Callable[..., Any]) -> None:
    trainer = make()
    trainer.model.train()
    with pytest.raises(TreepackError, match=r"make per_device_train_batch_size .* a multiple of num_generations$"):
        trainer.rollout_func(["a", "a", "a", "b", "b", "b", "b", "c"], trainer)


def test_an_engine_at_another_temperature_is_refused(make: Callable[..., Any], runs: Any) -> None:
    from support.model_engine import ModelEngine
    from treepack.rollout.trainers.trl_rollout import tree_rollouts

    trainer = make()
    with pytest.raises(TreepackError, match=r"temperature 1\.0 and the trainer has 0\.7"):
        tree_rollouts(OPTIONS, engine=ModelEngine(trainer.model, Sampling()))(["a tree"] * 4, trainer)


def test_the_default_engine_is_the_server_of_the_trainer(make: Callable[..., Any]) -> None:
    from treepack.rollout.trainers.trl_rollout import tree_rollouts

    trainer = make(temperature=0.7)
    server = EngineServer(law=wide_law())
    rollouts = tree_rollouts(OPTIONS)
    with in_thread(server) as url:
        # A trainer with these settings starts vLLM itself, which is not installed here.
        trainer.use_vllm, trainer.vllm_mode = True, "server"
        trainer.vllm_generation = SimpleNamespace(server_base_url=url)
        columns = rollouts(["a tree"] * 4, trainer)
        rollouts.close()
    params = server.requests[-1]["sampling_params"]
    assert (params["temperature"], params["stop_token_ids"]) == (0.7, [STOP])
    assert sum(columns["leaf_weight"]) == pytest.approx(1)


def test_a_trainer_without_an_engine_is_refused(make: Callable[..., Any]) -> None:
    from treepack.rollout.trainers.trl_rollout import tree_rollouts

    with pytest.raises(TreepackError, match="no server of vLLM; set use_vllm=True"):
        tree_rollouts(OPTIONS)(["a tree"] * 4, make())


def test_the_sampling_is_that_of_the_trainer(make: Callable[..., Any]) -> None:
    from treepack.rollout.trainers.trl_rollout import trainer_sampling

    trainer = make(temperature=0.7, top_p=0.9, top_k=20)
    assert trainer_sampling(trainer) == Sampling(0.7, 0.9, 20, stop_token_ids=tuple(trainer.eos_token_ids))
    with pytest.raises(TreepackError, match=r"repetition_penalty is 1\.1, which tree sampling does not have"):
        trainer_sampling(make(repetition_penalty=1.1))
