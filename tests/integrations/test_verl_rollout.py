"""verl's worker of agent loops gets the leaves of one tree for the n rollouts of a prompt."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.oracle import union_tokens
from support.paths import ROOT, SAMPLE_DATA
from support.tool_once import TOOL
from support.wide_law import STOP
from treepack import TreepackError

pytestmark = pytest.mark.integrations

LOOPS = """
- name: treepack_tree
  _target_: treepack.rollout.trainers.verl_rollout.TreeAgentLoop
  tree: {segment: 4, depth: 10, first_forks: [2, 3], max_repeats: 0}
"""


@pytest.fixture(scope="module")
def rollouts() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_PLATFORM", "cpu")
        from support import verl_engines, verl_rollouts

        assert verl_engines.CpuPlatform.device_name == "cpu"  # verl has no platform of its own for it
        yield verl_rollouts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import AutoTokenizer, Qwen3Config

    folder = tmp_path_factory.mktemp("model")
    Qwen3Config(
        vocab_size=1464, num_hidden_layers=1, eos_token_id=2, architectures=["Qwen3ForCausalLM"]
    ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(SAMPLE_DATA / "tokenizer").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def run(rollouts: Any, model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    def generate(loops: str = LOOPS, **settings: Any) -> Any:
        path = tmp_path_factory.mktemp("loops") / "loops.yaml"
        path.write_text(loops)
        return rollouts.run_worker(model, path, **settings)

    return generate


@pytest.fixture(scope="module")
def trees(run: Callable[..., Any]) -> Any:
    """Two prompts with 6 rollouts each: the batch of verl, and the client that served it."""
    return run()


def sequences(batch: Any) -> list[tuple[int, ...]]:
    """Return the tokens of each sample of verl's padded batch."""
    ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"].bool()
    return [tuple(row[real].tolist()) for row, real in zip(ids, mask, strict=True)]


def test_the_rollouts_of_a_prompt_are_the_leaves_of_one_tree(trees: Any) -> None:
    batch, _ = trees
    weights = batch.non_tensor_batch["leaf_weight"].astype(float).reshape(2, 6)
    assert weights.sum(1) == pytest.approx([1, 1])
    assert len(np.unique(weights)) > 1
    for group in (sequences(batch)[:6], sequences(batch)[6:]):
        assert len({ids[:5] for ids in group}) == 1  # the prompt
        assert union_tokens(group) < 0.6 * sum(map(len, group))


def test_a_segment_is_sampled_once_for_all_leaves_below_it(trees: Any) -> None:
    batch, client = trees
    requests = client.server.requests
    segments = {
        (uid, number)
        for uid, numbers in zip(np.repeat([0, 1], 6), batch.non_tensor_batch["segment_ids"], strict=True)
        for number in numbers
    }
    assert len(requests) == len(segments) < sum(map(len, batch.non_tensor_batch["segments"]))


def test_the_requests_of_a_tree_go_to_one_server(trees: Any) -> None:
    _, client = trees
    starts = [tuple(request["prompt_ids"][:5]) for request in client.server.requests]
    assert len(set(zip(starts, client.sessions, strict=True))) == len(set(client.sessions)) == 2


def test_requests_have_the_sampling_parameters_of_verl_and_the_rest_of_a_path_as_limit(trees: Any, run: Any) -> None:
    _, client = trees
    for request in client.server.requests:
        assert (request["temperature"], request["top_p"], request["top_k"]) == (1.0, 1, -1)
        assert request["stop_token_ids"] == [STOP]
    assert "seed" not in client.server.requests[0]


def test_masks_and_log_probabilities_fit_the_sampled_tokens(trees: Any, rollouts: Any) -> None:
    batch, client = trees
    law = client.server.law
    for row, tokens in enumerate(sequences(batch)):
        mask = batch.batch["response_mask"][row].bool()
        response = batch.batch["responses"][row][mask].tolist()
        before = tokens[-len(response) - 1 : -1]
        expected = np.log([law.transition[a, b] for a, b in zip(before, response, strict=True)])
        assert batch.batch["rollout_log_probs"][row][mask].numpy() == pytest.approx(expected, abs=1e-5)
        assert len(response) <= rollouts.RESPONSE
        assert response[-1] == STOP or batch.non_tensor_batch["finish"][row] != "stop"


def test_verl_gets_the_steps_of_the_weights_that_sampled(trees: Any, rollouts: Any) -> None:
    batch, _ = trees
    assert set(batch.non_tensor_batch["min_global_steps"]) == set(batch.non_tensor_batch["max_global_steps"])
    assert set(batch.non_tensor_batch["max_global_steps"]) == {rollouts.RUNS}


def test_a_validation_samples_independent_greedy_rollouts(run: Callable[..., Any], rollouts: Any) -> None:
    batch, client = run(validate=True, n=2)
    assert set(batch.non_tensor_batch["leaf_weight"]) == {1.0}
    assert len(client.server.requests) == len(set(client.sessions)) == 4
    assert {request["temperature"] for request in client.server.requests} == {0}


def test_aborted_requests_are_asked_for_again(run: Callable[..., Any], rollouts: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("treepack.rollout.requests.FIRST_PAUSE", 0.01)
    batch, _ = run(server=rollouts.LawServer(aborts=2))
    assert batch.non_tensor_batch["leaf_weight"].astype(float).sum() == pytest.approx(2)


def test_an_environment_answers_turns_and_gives_the_reward(run: Callable[..., Any]) -> None:
    batch, _ = run(LOOPS + "  environment: support.tool_once:ToolOnce\n")
    assert 4 in batch.non_tensor_batch["__num_turns__"]
    for row in np.flatnonzero(batch.non_tensor_batch["__num_turns__"] == 4):
        first = int(batch.batch["rm_scores"][row].sum())
        assert batch.batch["responses"][row][first : first + len(TOOL)].tolist() == TOOL
        assert batch.batch["response_mask"][row][: first + len(TOOL) + 1].tolist() == [1] * first + [0] * len(TOOL) + [
            1
        ]


def test_a_tree_that_nobody_waits_for_is_cancelled(rollouts: Any, model: str, tmp_path: Path) -> None:
    from treepack.rollout.trainers.verl_rollout import TreeAgentLoop

    (tmp_path / "loops.yaml").write_text(LOOPS)
    server = rollouts.LawServer()

    async def cancelled() -> Any:
        task = asyncio.ensure_future(rollouts.generate(model, tmp_path / "loops.yaml", server=server))
        while len(server.requests) < 4:
            await asyncio.sleep(0)
        task.cancel()
        before = await asyncio.gather(task, return_exceptions=True)
        requests = len(server.requests)
        await asyncio.sleep(0.05)
        assert len(server.requests) == requests
        return before

    assert isinstance(asyncio.run(cancelled())[0], asyncio.CancelledError)
    assert TreeAgentLoop._waiting == {}


def test_full_determinism_samples_the_same_trees_again(run: Callable[..., Any]) -> None:
    (first, client), (second, _) = (run(full_determinism=True) for _ in range(2))
    assert sequences(first) == sequences(second)
    # verl passes the id on to the server then, which takes each id once.
    assert len(set(client.sessions)) == len(client.sessions)


def test_without_log_probabilities_of_the_server_there_are_none(run: Callable[..., Any]) -> None:
    batch, _ = run(calculate_log_probs=False)
    assert "rollout_log_probs" not in batch.batch


def test_verl_gets_the_experts_of_the_server(run: Callable[..., Any], rollouts: Any) -> None:
    from support.engine_server import experts_of

    batch, _ = run(server=rollouts.LawServer(has_routes=True))
    recorded = batch.batch["routed_experts"]
    assert recorded.shape[:2] == batch.batch["input_ids"].shape
    mask = batch.batch["attention_mask"].bool()
    for ids, experts, real in zip(sequences(batch), recorded, mask, strict=True):
        assert experts[real][:-1].tolist() == experts_of(ids[:-1], 2).tolist()
        assert not experts[~real].any()
        assert not experts[real][-1].any()


def test_a_shape_that_may_stay_narrow_is_refused(run: Callable[..., Any]) -> None:
    with pytest.raises(TreepackError, match="fewer leaves than the number of rollouts, which is 6"):
        run(LOOPS.replace("max_repeats: 0", "fallback: none"))


def test_an_unknown_field_of_the_tree_is_refused(run: Callable[..., Any]) -> None:
    with pytest.raises(Exception, match="tree has widht; expected fields among branches"):
        run(LOOPS.replace("max_repeats", "widht"))


def test_the_configuration_of_the_docs_samples_trees(run: Callable[..., Any], rollouts: Any) -> None:
    page = (ROOT / "docs" / "your-trainer.md").read_text().split("\n## Sampling trees in verl\n")[1].split("\n## ")[0]
    (loops,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (options,) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    start = "actor_rollout_ref.rollout."
    settings = dict(line.removeprefix(start).split("=") for line in options.splitlines() if line.startswith(start))
    assert settings.pop("agent.agent_loop_config_path") == "trees.yaml"
    assert len(settings) == 2
    batch, _ = run(loops, **settings)
    assert batch.non_tensor_batch["leaf_weight"].astype(float).sum() == pytest.approx(2)


def test_the_signatures_are_those_of_the_installed_verl(rollouts: Any) -> None:
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.workers.rollout.llm_server import LLMServerClient

    from treepack.rollout.trainers.verl_rollout import TreeAgentLoop

    assert list(inspect.signature(SingleTurnAgentLoop.run).parameters)[:2] == ["self", "sampling_params"]
    assert list(inspect.signature(TreeAgentLoop.run).parameters) == ["self", "sampling_params", "kwargs"]
    parameters = inspect.signature(LLMServerClient.generate).parameters
    assert {"request_id", "prompt_ids", "sampling_params"} <= set(parameters)
